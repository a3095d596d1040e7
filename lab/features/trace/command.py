"""The command that follows one token through the machine: trace."""

from __future__ import annotations

from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import OUTPUT, SETTINGS, TOKENS, with_options
from lab.core.lists import join_and
from lab.errors import LabError
from lab.features.running import RESULTS, Output
from lab.features.serve.command import given


@click.command(cls=Command, first=("model", "prompt-len", "gen", "repeat", "attention", "threads"))
@with_options(
    click.option("--prompt-len", "-p", type=TOKENS, default=200, show_default=True, help="Tokens of the prompt."),
    click.option("--gen", "-n", default=8, show_default=True, help="Decode steps to trace after each prefill."),
    click.option("--repeat", "-r", default=5, show_default=True, help="How often to trace prefill and these steps."),
    click.option(
        "--attention", metavar="TEXT", help="Show what each token of this text attends to, layer by layer, instead."
    ),
    *SETTINGS,
    click.option("--ceilings", "results", default=RESULTS, show_default=True, help="Folder with the ceilings."),
    *OUTPUT,
    click.option("--details", is_flag=True, help="Show a table by layer, too."),
)
def trace(attention: str | None, details: bool, **asked: Any) -> None:
    """Show where the time of one token goes, operation by operation.

    \b
      lab trace                             # a prompt of 200 tokens
      lab trace -p 1000 -m llama-3.2-3b --details
      lab trace --attention "The cat sat on the mat"

    Follows a prefill and decode steps through llama.cpp. For each operation (norm, Q, K, V, attention, feed-forward,
    the last matrix, sampling) prints the bytes read, FLOPs, time, and the share of the kernel's ceiling (lab ceilings).

    The engine stops after each operation. Views, which compute nothing, show what a stop costs; that is taken off. The
    same steps run in turns without stops, and the output says how far the sum is from them. Keep the machine quiet.
    With several devices the copies between them are an operation of their own. On an RPC server a stop takes a round
    trip. The picture shows all layers. The results file keeps all figures, for lab show and lab report.
    """
    from lab.features import known
    from lab.features.trace import attention as weights
    from lab.features.trace import token_trace
    from lab.show import console, text_setup
    from lab.show.kind import Context

    output, err = Output.taken_from(asked), console.console(stderr=True)
    with console.transfer(err) as transferring:
        if attention is None:
            record = token_trace.trace(**asked, out=output.folder, watch=transferring)
        else:
            unused = {"prompt_len", "gen", "repeat", "results", "details"}
            settings = {name: value for name, value in asked.items() if name not in unused}
            _refuse(unused)
            record = weights.recorded(attention, **settings, out=output.folder, watch=transferring)
    for line in text_setup.describe(record.machine, record.model):
        err.print(line)
    made = known.sections([record], Context(details=details))
    output.finish(
        [record],
        output.folder / f"{record.session}.jsonl",
        lambda out: known.print_results([record], console.console() if details else out, made),
        made=made,
    )


def _refuse(unused: set[str]) -> None:
    """LabError if the user gave options that --attention does not use."""
    names = {"results": "ceilings"}
    if found := sorted(unused & set(given(click.get_current_context()))):
        options = join_and([f"--{names.get(name, name).replace('_', '-')}" for name in found])
        raise LabError(
            f"--attention looks at its own text once and does not use {options}.",
            f"Leave {options} out, or trace times without --attention.",
        )
