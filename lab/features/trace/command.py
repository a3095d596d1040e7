"""The command `lab trace`, and its results as sections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from lab.app.command_words import ASKED_FOR
from lab.app.help import Command
from lab.app.options import (
    OUTPUT,
    SETTINGS,
    gen_option,
    prompt_len_option,
    with_options,
)
from lab.app.output import Output
from lab.app.reading import RESULTS
from lab.core.lists import join_and
from lab.errors import LabError
from lab.features.trace import attention_section, measuring, trace_section
from lab.features.trace.lines import AttentionLine, TraceLine
from lab.show import text_plan
from lab.show.section import Context, Kind, Section

OF_TIMES = {
    "gen": "--gen",
    "prompt_len": "--prompt-len",
    "repeat": "--repeat",
    "ceilings": "--ceilings",
}
"""Options of a trace of times, which attention weights do not use."""


def chapters(lines: Sequence[TraceLine | AttentionLine], _: Context) -> list[Section]:
    """Parts for prefill and decode, or for attention weights."""
    parts: list[Section] = []
    documents = []
    for line in lines:
        if isinstance(line, TraceLine):
            parts += trace_section.sections(line)
            documents.append(trace_section.document(line))
        else:
            parts.append(attention_section.section(line))
            documents.append(attention_section.document(line))
    chapter = Section(
        "One token's way",
        name="trace",
        question=parts[0].question or "Where does the time of a token go?",
        parts=parts,
        data=lambda: {"traces": documents},
    )
    return [chapter]


KINDS = (Kind("trace", lambda line: isinstance(line, TraceLine | AttentionLine), chapters),)

PROMPT_LEN = prompt_len_option(200, "Tokens of the prompt.")
GEN = gen_option(8, "Decode steps to trace after each prefill.")
REPEAT = click.option(
    "--repeat",
    "-r",
    default=5,
    show_default=True,
    help="How often to trace prefill and these steps.",
)
TEXT = click.option(
    "--attention",
    "text",
    metavar="TEXT",
    help="Show what each token of this text attends to, layer by layer, instead.",
)
CEILINGS = click.option(
    "--ceilings",
    default=RESULTS,
    show_default=True,
    help="Folder with the ceilings.",
)


@click.command(
    "trace",
    cls=Command,
    first=("model", "prompt-len", "gen", "repeat", "attention", "threads"),
)
@with_options(PROMPT_LEN, GEN, REPEAT, TEXT, *SETTINGS, CEILINGS, *OUTPUT)
@click.pass_context
def command(context: click.Context, /, text: str | None, **options: Any) -> None:
    """Show where the time of one token goes, operation by operation.

    \b
      lab trace                             # a prompt of 200 tokens
      lab trace -p 1000 -m llama-3.2-3b
      lab trace --attention "The cat sat on the mat"

    Follows a prefill and decode steps through llama.cpp. For each operation (norm, Q, K, V,
    attention, feed-forward, the last matrix, sampling) prints the bytes read, FLOPs, time, and the
    share of the kernel's ceiling (lab ceilings).

    The engine stops after each operation. Views, which compute nothing, show what a stop costs;
    that is taken off. The same steps also run without stops, and the output says how far the sum is
    from them; where it is too far, no shares are shown. Keep the machine quiet. With several
    devices the copies between them are an operation of their own. The picture shows all layers. The
    results file keeps all figures, for lab show and lab report.
    """
    from lab.show import console

    output = Output.taken_from(options)
    err = console.console(stderr=True)
    line: TraceLine | AttentionLine
    with console.transfer(err) as watch:
        if text is None:
            line = measuring.trace(**options, out=output.folder, watch=watch, say=err.print)
        else:
            settings = without_options_of_times(context, options)
            line = measuring.attention(text, **settings, out=output.folder, watch=watch)
    for sentence in text_plan.describe(line.machine, line.model):
        err.print(sentence)
    output.finish([line], output.folder / f"{line.session}.jsonl")


def without_options_of_times(
    context: click.Context, options: dict[str, Any]
) -> dict[str, Any]:
    """The options that attention weights use. LabError if the user gave another one."""
    unused = []
    for name, flag in sorted(OF_TIMES.items()):
        if context.get_parameter_source(name) in ASKED_FOR:
            unused.append(flag)
    if unused:
        flags = join_and(unused)
        raise LabError(
            f"--attention looks at its own text once and does not use {flags}.",
            f"Leave {flags} out, or trace times without --attention.",
        )
    return {name: value for name, value in options.items() if name not in OF_TIMES}
