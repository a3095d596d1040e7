"""The list of features, and the loops over their kinds of results: tables, JSON, pictures, "make again", commands.

To remove a feature, remove its room and its lines here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import UserDict
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core.lists import grouped

if TYPE_CHECKING:
    import click
    from rich.console import Console

    from lab.core.record import Ceilings, Record
    from lab.show.section import Context, Kind, Lines, Section


COMMANDS = {
    # name: group in the help, module, one line of help
    "measure": (
        "Measure",
        "lab.features.measure.measuring",
        "Time every token of answers to prompts of several lengths.",
    ),
    "sweep": (
        "Measure",
        "lab.features.measure.measuring",
        "Measure how both phases slow down as one prompt grows.",
    ),
    "ab": (
        "Measure",
        "lab.features.measure.measuring",
        "Compare settings or models, measured alternately.",
    ),
    "ceilings": (
        "Understand",
        "lab.features.ceilings",
        "Measure how fast this machine's basic operations can be.",
    ),
    "explain": (
        "Understand",
        "lab.features.explain.command",
        "Explain what limited each phase, and what would help.",
    ),
    "why": (
        "Understand",
        "lab.features.why.command",
        "Explain why two speeds differ, cause by cause.",
    ),
    "trace": (
        "Understand",
        "lab.features.trace.token_trace",
        "Show where the time of one token goes, operation by operation.",
    ),
    "claims": (
        "Understand",
        "lab.features.claims.session",
        "Test common claims about LLM inference on this machine.",
    ),
    "words": (
        "Understand",
        "lab.app.running",
        "Explain the lab's terms, such as TTFT, ridge or ubatch.",
    ),
    "show": ("Understand", "lab.app.running", "Show saved results (files or folders) as tables."),
    "plot": (
        "Understand",
        "lab.app.running",
        "Draw the plots of saved results (files or folders).",
    ),
    "report": (
        "Understand",
        "lab.app.running",
        "Write results as one HTML page with the raw data inside.",
    ),
    "compare": (
        "Compare and choose",
        "lab.features.compare.command",
        "Compare saved results: machines, builds, models, settings.",
    ),
    "predict": (
        "Compare and choose",
        "lab.features.predict.command",
        "Predict a model's speed: which device suits it, and why.",
    ),
    "quant": (
        "Compare and choose",
        "lab.features.quant.comparing",
        "Show what quantizations cost in quality and gain in speed.",
    ),
    "tune": (
        "Compare and choose",
        "lab.features.tune.tuning",
        "Find the fastest settings for your requests, and prove it.",
    ),
    "batch": (
        "Serve many",
        "lab.features.batch",
        "Measure what decoding several answers together gains.",
    ),
    "turns": (
        "Serve many",
        "lab.features.turns",
        "Measure what each turn of a conversation processes again.",
    ),
    "stall": (
        "Serve many",
        "lab.features.stall",
        "Measure how long a new prompt interrupts running answers.",
    ),
    "speculate": (
        "Serve many",
        "lab.features.speculate.speculation",
        "Measure what speculative decoding costs and gains.",
    ),
    "models": (
        "Files",
        "lab.features.models",
        "List models; subcommands: info, make, pull, remove.",
    ),
    "export": (
        "Files",
        "lab.features.export_results",
        "Export results as llama-bench's output, or as tables.",
    ),
    "import": ("Files", "lab.features.import_results", "Import results of llama-bench."),
    "machine": (
        "Machines",
        "lab.features.doctor",
        "Show this machine, the llama.cpp build and its devices.",
    ),
    "doctor": ("Machines", "lab.features.doctor", "Find out why the lab fails or is slow."),
}
"""Every command, in the order of the help."""

KINDS = (
    "lab.show.text_results",
    "lab.features.batch",
    "lab.features.turns",
    "lab.features.stall",
    "lab.features.speculate.speculation",
    "lab.features.tune.result",
    "lab.features.claims.judging",
    "lab.features.quant.comparing",
    "lab.remote.through_server",
    "lab.features.trace.token_trace",
)
"""Where the kinds of results are (`KINDS` of these modules), in the order in which they are shown."""


class Commands(UserDict[str, Any]):
    """The commands by name; a module is imported when its command is used, so that `lab --help` is instant."""

    def __getitem__(self, name: str) -> click.Command:
        import click

        _group, room, _help = self.data[name]
        module = import_module(room)
        return next(
            one
            for one in vars(module).values()
            if isinstance(one, click.Command) and one.name == name
        )


@functools.cache
def kinds(rooms: Sequence[str] = KINDS) -> tuple[Kind, ...]:
    """Every kind of results, in the order in which they are shown."""
    return tuple(kind for room in rooms for kind in import_module(room).KINDS)


def sections(
    records: Lines, context: Context | None = None, only: Sequence[str] = ()
) -> list[Section]:
    """The sections of all records, or of those of some kinds. Without a context nothing is predicted."""
    from lab.core.record import Record
    from lab.show import table
    from lab.show.section import Context, is_plain

    context = context or Context()
    answered = any(map(table.went_well, table.alone(records)))
    context = dataclasses.replace(
        context,
        runs=[one for one in table.of_engine(records) if is_plain(one)],
        together=context.together and answered,
    )
    is_simple = all(
        isinstance(one, Record) and is_plain(one) and one.run.lever is None for one in records
    )
    of = [
        kind for kind in kinds(KINDS[:1] if is_simple else KINDS) if not only or kind.name in only
    ]
    owned = [(kind, [one for one in records if kind.is_mine(one)]) for kind in of]
    return [section for kind, own in owned if own for section in kind.sections(own, context)]


def experiments_of(
    records: Lines, ceilings: Sequence[Ceilings] = (), others: Sequence[Record] = ()
) -> list[Section]:
    """The tables of experiments: a section for each table and setup."""
    from lab.show import table
    from lab.show.section import Context, is_plain

    own = [one for one in table.of_engine(records) if is_plain(one) and one.run.lever]
    names = [kind.name for kind in kinds() if any(map(kind.is_mine, own))]
    made = sections(records, Context(ceilings, others), names) if names else []
    return [part for section in made for part in section.parts]


def print_results(
    records: Lines,
    out: Console,
    made: Sequence[Section] | None = None,
    sentences: Sequence[str] = (),
) -> None:
    """Prints the sections that are `made` of records, then what failed and what disturbed the runs, then sentences.

    Of a section without a table of its own the parts are printed, without what introduces them on a page.
    """
    from lab.show import text_results
    from lab.show import table
    from lab.show.section import Section, is_plain, print_marked, print_sections

    for section in sections(records) if made is None else made:
        print_sections([section] if section.headings or not section.parts else section.parts, out)
    rest = [one for one in table.of_engine(records) if is_plain(one)]
    alone = table.alone(records)
    if rest and not any(record.run.is_timed for record in rest):
        out.print("\nNo run went well.")
    of_experiments = [record for record in rest if record.run.lever is not None]
    doubts = [
        *text_results.imported(rest),
        *text_results.distrust(rest),
        *text_results.disturbed(of_experiments),
    ]
    print_marked(doubts, text_results.failures(rest), out)
    if alone:
        from lab.remote import through_server

        if not any(map(table.went_well, alone)):
            out.print("\nNo request went well.")
        print_marked(through_server.warnings(alone), through_server.failures(alone), out)
    print_sections([Section(sentences=sentences)] if sentences else [], out)


def as_json(records: Lines, made: Sequence[Section] | None = None) -> dict[str, Any]:
    """The rows of sections, what disturbed the runs, and what failed."""
    from lab.show import text_results
    from lab.remote import through_server
    from lab.show import table

    lists: dict[str, list[Any]] = {"rows": []}
    for section in sections(records) if made is None else made:
        for name, values in section.document().items():
            lists[name] = [*lists.get(name, ()), *values]
    runs = [one for one in table.of_engine(records) if not one.run.is_traced]
    alone = table.alone(records)
    return {
        **{name: values for name, values in lists.items() if values or name == "rows"},
        "warnings": [*text_results.warnings(runs), *through_server.warnings(alone)],
        "failures": [*text_results.failures(runs), *through_server.failures(alone)],
    }


def draw(made: Sequence[Section], folder: Path, stem: str) -> list[Path]:
    """Writes the pictures of sections; their paths: `<stem>-prefill.png` ..."""
    from lab.show import canvas
    from lab.show.section import numbered

    pictures = numbered([picture for section in made for picture in section.all_pictures])
    return [
        path
        for one in pictures
        for path in canvas.write(one.draw, folder, f"{stem}-{one.name}", one.file_size)
    ]


def commands(records: Lines) -> list[str]:
    """The command line of each session and kind of results, runs of the engine first."""
    from lab.core.request import RequestRecord

    in_order = sorted(records, key=lambda one: isinstance(one, RequestRecord))
    sessions = grouped(in_order, lambda one: (one.session, type(one)))
    return [line for line in dict.fromkeys(map(command, sessions.values())) if line]


def command(records: Lines) -> str | None:
    """The command line of one session; None for what no command makes again, such as imported results."""
    from lab.core.record import Record

    first = next(
        (one for one in records if isinstance(one, Record) and not one.run.warmup), records[0]
    )
    return next((kind.again(records) for kind in kinds() if kind.is_mine(first)), None)
