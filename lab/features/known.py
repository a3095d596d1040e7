"""The list of features, and the loops over their kinds of results: tables, JSON, pictures, "make again", commands.

`lab show`, `lab plot`, `lab report`, `--json` and the notebooks use these loops. To remove a feature, remove its room
and its line here. The terminal prints the parts of a section, a page is made of whole sections.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lab.core.lists import grouped

if TYPE_CHECKING:
    import click
    from rich.console import Console

    from lab.core.record import Ceilings, Record
    from lab.show.kind import Context, Kind, Lines
    from lab.show.section import Section


class Feature(NamedTuple):
    """A feature: the group of its commands in the help, where they are, and where its kinds of results are (KINDS)."""

    group: str
    room: str
    commands: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()


FEATURES = (
    Feature("Understand", "shown", ("show", "plot", "report", "words")),
    Feature("Measure", "measure.command", ("measure", "sweep", "ab"), ("measure.text_results",)),
    Feature("Understand", "limits.command", ("ceilings", "explain")),
    Feature("Understand", "why.command", ("command",)),
    Feature("Serve many", "batch", ("command",), ("batch",)),
    Feature("Serve many", "turns.conversation", ("command",), ("turns.conversation", "turns.served")),
    Feature("Serve many", "stall", ("command",), ("stall",)),
    Feature("Serve many", "speculate.speculation", ("command",), ("speculate.speculation",)),
    Feature("Compare and choose", "compare.command", ("compare",)),
    Feature("Compare and choose", "predict.command", ("predict",)),
    Feature("Compare and choose", "tune.command", ("tune",), ("tune.result",)),
    Feature("Understand", "claims.command", ("claims",), ("claims.views",)),
    Feature("Compare and choose", "quant.command", ("quant",), ("quant.views",)),
    Feature("Servers", "serve.command", ("server", "load"), ("serve.text_requests", "serve.load_views")),
    Feature("Machines", "machine", ("machine",)),
    Feature("Machines", "lend.command", ("rpc_server",)),
    Feature("Understand", "trace.command", ("trace",), ("trace.trace_views",)),
    Feature("Files", "models", ("models",)),
    Feature("Files", "compare.command", ("export", "import_")),
    Feature("Machines", "doctor", ("doctor",)),
)
"""Every feature; its results are shown in this order."""


def commands_by_group() -> dict[str, list[click.Command]]:
    """The commands of the features."""
    by_group: dict[str, list[click.Command]] = {}
    for feature in FEATURES:
        room = import_module(f"lab.features.{feature.room}")
        by_group.setdefault(feature.group, []).extend(getattr(room, name) for name in feature.commands)
    return by_group


@functools.cache
def kinds() -> tuple[Kind, ...]:
    """Every kind of results, in the order in which they are shown."""
    rooms = [import_module(f"lab.features.{room}") for feature in FEATURES for room in feature.kinds]
    return tuple(kind for room in rooms for kind in room.KINDS)


def sections(records: Lines, context: Context | None = None, only: Sequence[str] = ()) -> list[Section]:
    """The sections of all records, or of those of some kinds. Without a context nothing is predicted."""
    from lab.show import request_table
    from lab.show.kind import Context, is_plain

    context = context or Context()
    answered = any(map(request_table.went_well, request_table.alone(records)))
    context = dataclasses.replace(
        context,
        runs=[one for one in request_table.of_engine(records) if is_plain(one)],
        together=context.together and answered,
    )
    owned = [(kind, [one for one in records if kind.is_mine(one)]) for kind in kinds() if not only or kind.name in only]
    return [section for kind, own in owned if own for section in kind.sections(own, context)]


def experiments_of(records: Lines, ceilings: Sequence[Ceilings] = (), others: Sequence[Record] = ()) -> list[Section]:
    """The tables of experiments: a section for each table and setup."""
    from lab.show import request_table
    from lab.show.kind import Context, is_plain

    own = [one for one in request_table.of_engine(records) if is_plain(one) and one.run.lever]
    names = [kind.name for kind in kinds() if any(map(kind.is_mine, own))]
    made = sections(records, Context(ceilings, others), names) if names else []
    return [part for section in made for part in section.parts]


def print_results(
    records: Lines, out: Console, made: Sequence[Section] | None = None, sentences: Sequence[str] = ()
) -> None:
    """Prints the sections that are `made` of records, then what failed and what disturbed the runs, then sentences.

    Of a section without a table of its own the parts are printed, without what introduces them on a page.
    """
    from lab.features.measure import text_results
    from lab.features.serve import text_requests
    from lab.show import request_table
    from lab.show.kind import is_plain
    from lab.show.section import Section, print_marked, print_sections

    for section in sections(records) if made is None else made:
        print_sections([section] if section.headings or not section.parts else section.parts, out)
    rest, alone = [one for one in request_table.of_engine(records) if is_plain(one)], request_table.alone(records)
    if rest and not any(record.run.is_timed for record in rest):
        out.print("\nNo run went well.")
    of_experiments = [record for record in rest if record.run.lever is not None]
    doubts = [*text_results.imported(rest), *distrust(rest), *text_results.disturbed(of_experiments)]
    print_marked(doubts, text_results.failures(rest), out)
    if alone and not any(map(request_table.went_well, alone)):
        out.print("\nNo request went well.")
    print_marked(text_requests.warnings(alone), text_requests.failures(alone), out)
    print_sections([Section(sentences=sentences)] if sentences else [], out)


def as_json(records: Lines, made: Sequence[Section] | None = None) -> dict[str, Any]:
    """The rows of sections, what disturbed the runs, and what failed."""
    from lab.features.measure import text_results
    from lab.features.serve import text_requests
    from lab.show import request_table

    lists: dict[str, list[Any]] = {"rows": []}
    for section in sections(records) if made is None else made:
        for name, values in section.document().items():
            lists[name] = [*lists.get(name, ()), *values]
    runs = [one for one in request_table.of_engine(records) if not one.run.is_traced]
    alone = request_table.alone(records)
    return {
        **{name: values for name, values in lists.items() if values or name == "rows"},
        "warnings": [*warnings(runs), *text_requests.warnings(alone)],
        "failures": [*text_results.failures(runs), *text_requests.failures(alone)],
    }


def draw(made: Sequence[Section], folder: Path, stem: str) -> list[Path]:
    """Writes the pictures of sections; their paths: `<stem>-prefill.png` ..."""
    from lab.show import canvas
    from lab.show.section import numbered

    pictures = numbered([picture for section in made for picture in section.all_pictures])
    return [path for one in pictures for path in canvas.write(one.draw, folder, f"{stem}-{one.name}", one.file_size)]


def commands(records: Lines) -> list[str]:
    """The command line of each session and kind of results, runs of the engine first."""
    from lab.core.request import RequestRecord

    in_order = sorted(records, key=lambda one: isinstance(one, RequestRecord))
    sessions = grouped(in_order, lambda one: (one.session, type(one)))
    return [line for line in dict.fromkeys(map(command, sessions.values())) if line]


def command(records: Lines) -> str | None:
    """The command line of one session; None for what no command makes again, such as imported results."""
    from lab.core.record import Record

    first = next((one for one in records if isinstance(one, Record) and not one.run.warmup), records[0])
    return next((kind.again(records) for kind in kinds() if kind.is_mine(first)), None)


def distrust(records: Sequence[Record]) -> list[str]:
    """A sentence for each session with unreliable figures, with the command to measure it again."""
    from lab.features.measure import text_results

    return text_results.distrust(records, command)


def warnings(records: Sequence[Record]) -> list[str]:
    """What disturbed runs of the engine, and whether their figures are to be trusted."""
    from lab.features.measure import text_results

    return [*text_results.imported(records), *text_results.disturbed(records), *distrust(records)]
