"""The command that follows one token through the machine: trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import SETTINGS, TOKENS, as_json_option, out_option, with_options
from lab.cli.running import RESULTS
from lab.cli.servers import given
from lab.core.lists import join_and
from lab.errors import LabError


@click.command(cls=Command, first=("model", "prompt-len", "gen", "repeat", "attention", "threads"))
@with_options(
    click.option("--prompt-len", "-p", type=TOKENS, default=200, show_default=True, help="Tokens of the prompt."),
    click.option("--gen", "-n", default=8, show_default=True, help="Decode steps to trace after each prefill."),
    click.option("--repeat", "-r", default=5, show_default=True, help="How often to trace prefill and these steps."),
    click.option(
        "--attention", metavar="TEXT", help="Show what each token of this text attends to, layer by layer, instead."
    ),
    *SETTINGS,
    click.option("--results", default=RESULTS, show_default=True, help="Folder with the ceilings."),
    out_option("Folder for the picture."),
    click.option("--no-plot", is_flag=True, help="Draw no picture."),
    click.option("--details", is_flag=True, help="Show a table by layer, too."),
    as_json_option("tables"),
)
def trace(
    prompt_len: int,
    gen: int,
    repeat: int,
    attention: str | None,
    results: str,
    out: str,
    no_plot: bool,
    details: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Show where the time of one token goes, operation by operation.

    \b
      lab trace                             # a prompt of 200 tokens
      lab trace -p 1000 -m llama-3.2-3b --details
      lab trace --attention "The cat sat on the mat"

    Follows a prefill and decode steps through llama.cpp. For each operation (norm, Q, K, V, attention, feed-forward,
    the last matrix, sampling) prints the bytes read, FLOPs, time, and the share of the kernel's ceiling (lab ceilings).

    The engine stops after each operation. Views, which compute nothing, show what a stop costs; that is taken off. The
    same steps run in turns without stops, and the output says how far the sum is from them. Keep the machine quiet.
    With several devices the copies between them are an operation of their own. The picture shows all layers. The
    command keeps no record; --json has all figures.
    """
    from lab.drawing import canvas
    from lab.runner.machine import slug
    from lab.show import console, text_setup, trace_views
    from lab.show.section import print_sections
    from lab.why import token_trace

    err = console.console(stderr=True)
    if attention is not None:
        _look(attention, asked, Path(out), no_plot, as_json)
        return
    with console.transfer(err) as transferring:
        traced = token_trace.trace(prompt_len, gen, repeat, **asked, results=results, watch=transferring)
    for line in text_setup.describe(traced.machine, traced.model):
        err.print(line)
    shown = trace_views.sections(traced, details)
    stem = f"trace-{slug(traced.model.name)}-{prompt_len}"
    pictures = [] if no_plot else shown[-1].pictures
    plots = [path for one in pictures for path in canvas.write(one.draw, Path(out), stem, one.file_size)]
    if as_json:
        document = dataclasses.asdict(traced)
        sums = [{"sum_s": phase.sum_s, "off": phase.off} for phase in traced.phases]
        document["phases"] = [one | more for one, more in zip(document["phases"], sums, strict=True)]
        console.print_json({**document, "plots": [str(path) for path in plots]})
        return
    stdout = console.console()
    print_sections(shown, stdout)
    for path in plots:
        stdout.print(f"plot     {path}")


def _look(text: str, asked: dict[str, Any], folder: Path, no_plot: bool, as_json: bool) -> None:
    """The attention weights of a text."""
    from lab.drawing import canvas
    from lab.runner.machine import slug
    from lab.show import attention_views, console
    from lab.show.section import print_sections
    from lab.why import attention_weights

    if unused := sorted(
        {"prompt_len", "gen", "repeat", "details", "results"} & set(given(click.get_current_context()))
    ):
        options = join_and([f"--{name.replace('_', '-')}" for name in unused])
        raise LabError(
            f"--attention looks at its own text once and does not use {options}.",
            f"Leave {options} out, or trace times without --attention.",
        )
    with console.transfer(console.console(stderr=True)) as transferring:
        seen = attention_weights.attention(text, **asked, watch=transferring)
    shown = attention_views.section(seen)
    stem, pictures = f"attention-{slug(seen.model.name)}", () if no_plot else shown.pictures
    plots = [path for one in pictures for path in canvas.write(one.draw, folder, stem, one.file_size)]
    if as_json:
        console.print_json(
            {**dataclasses.asdict(seen), "differs": seen.differs, "plots": [str(path) for path in plots]}
        )
        return
    stdout = console.console()
    print_sections([shown], stdout)
    for path in plots:
        stdout.print(f"plot     {path}")
