"""The loops over kinds of results: tables, JSON, pictures, and the command lines that made them.

The list of features names the kinds of each room.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab import feature_list
from lab.app import command_words
from lab.app.reading import note
from lab.core import shell
from lab.core.lists import grouped
from lab.errors import LabError

if TYPE_CHECKING:
    from rich.console import Console

    from lab.core.lines import Lines
    from lab.core.record import Ceilings, Record
    from lab.show.section import Context, Kind, Section


PLAIN_RUNS = "runs"
"""The name of the section of plain runs, which are printed below experiments."""


@functools.cache
def kinds() -> tuple[Kind, ...]:
    """Every kind of results, in the order in which they are shown."""
    every_kind: list[Kind] = []
    for feature in feature_list.FEATURES:
        for target in feature.results:
            every_kind += feature_list.load(target)
    return tuple(every_kind)


@functools.cache
def _kinds_of_plain_runs() -> tuple[Kind, ...]:
    """The kinds of the first feature with results; the others need not be imported for plain
    runs."""
    kinds_of_first: tuple[Kind, ...] = feature_list.load(feature_list.FEATURES[0].results[0])
    return kinds_of_first


def sections(
    records: Lines, context: Context | None = None, only: Sequence[str] = ()
) -> list[Section]:
    """The sections of all records, or of those of some kinds. Without a context nothing is
    predicted."""
    from lab.show import table
    from lab.show.section import Context, is_plain

    context = context or Context()
    runs = list(filter(is_plain, table.of_engine(records)))
    has_answers = any(request.is_good for request in table.alone(records))
    context = dataclasses.replace(
        context, runs=runs, together=context.together and has_answers
    )
    plain_runs = [run for run in runs if run.run.is_plain]
    has_plain_runs_only = len(plain_runs) == len(records)
    sections_of_kinds: list[Section] = []
    for kind in _kinds_of_plain_runs() if has_plain_runs_only else kinds():
        if only and kind.name not in only:
            continue
        records_of_kind = [record for record in records if kind.is_mine(record)]
        if records_of_kind:
            sections_of_kinds += kind.sections(records_of_kind, context)
    return sections_of_kinds


def experiments_of(
    records: Lines, ceilings: Sequence[Ceilings] = (), others: Sequence[Record] = ()
) -> list[Section]:
    """The tables of experiments: a section for each table and setup."""
    from lab.show import table
    from lab.show.section import Context, is_plain

    runs = [run for run in filter(is_plain, table.of_engine(records)) if not run.run.is_plain]
    names = [kind.name for kind in kinds() if any(map(kind.is_mine, runs))]
    if not names:
        return []
    parts: list[Section] = []
    for section in sections(records, Context(ceilings, others), names):
        parts += section.parts
    return parts


def print_results(
    records: Lines,
    out: Console,
    shown: Sequence[Section] | None = None,
    sentences: Sequence[str] = (),
) -> None:
    """Print the sections of records, then what failed and what disturbed the runs, then sentences.

    Of a section without a table of its own the parts are printed, without what introduces them on a
    page.
    """
    from lab.show.section import print_sections

    all_sections = sections(records) if shown is None else shown
    printed: list[Section] = []
    for section in sorted(all_sections, key=lambda section: section.name == PLAIN_RUNS):
        if section.parts and not section.columns:
            printed += section.parts
        else:
            printed.append(section)
    print_sections([*printed, *_closing(records, sentences)], out)


def _closing(records: Lines, sentences: Sequence[str]) -> list[Section]:
    """What failed and what disturbed the runs, what failed of requests, then the sentences."""
    from lab.show import table, text_doubts, text_requests
    from lab.show.section import Section, is_plain

    runs = list(filter(is_plain, table.of_engine(records)))
    of_experiments = [record for record in runs if not record.run.is_plain]
    doubts = [
        *text_doubts.imported(runs),
        *text_doubts.distrust(runs),
        *text_doubts.disturbed(of_experiments),
    ]
    has_no_good_run = bool(runs) and not any(record.run.is_timed for record in runs)
    closing = [
        Section(
            answer="No run went well." if has_no_good_run else "",
            failures=text_doubts.failures(runs),
            warnings=doubts,
        )
    ]
    requests = table.requests_of(records)
    if requests:
        has_no_answer = not any(request.is_good for request in requests)
        of_requests = Section(
            answer="No request went well." if has_no_answer else "",
            failures=text_requests.failures(requests),
            warnings=text_requests.warnings(requests),
        )
        closing.append(of_requests)
    closing.append(Section(answer=" ".join(sentences)))
    return [section for section in closing if section != Section()]


def as_json(records: Lines, shown: Sequence[Section] | None = None) -> dict[str, object]:
    """The rows of sections, what disturbed the runs, and what failed."""
    from lab.show import table, text_doubts, text_requests

    lists: dict[str, list[object]] = {"rows": []}
    for section in sections(records) if shown is None else shown:
        for name, values in section.document().items():
            lists.setdefault(name, []).extend(values)
    document: dict[str, object] = {}
    for name, values in lists.items():
        if values or name == "rows":
            document[name] = values
    runs = table.of_engine(records)
    requests = table.requests_of(records)
    document["warnings"] = [*text_doubts.warnings(runs), *text_requests.warnings(requests)]
    document["failures"] = [*text_doubts.failures(runs), *text_requests.failures(requests)]
    return document


def draw(shown: Sequence[Section], folder: Path, stem: str) -> Iterator[Path]:
    """Write the pictures of sections, and yield the path of each: `<stem>-prefill.png` ...

    LabError if one cannot be written.
    """
    from lab.show import canvas
    from lab.show.section import numbered

    pictures = []
    for section in shown:
        pictures += section.all_pictures
    for picture in numbered(pictures):
        name = f"{stem}-{picture.name}"
        yield from canvas.write(picture.draw, folder, name, picture.file_size)


def draw_what_can_be(shown: Sequence[Section], folder: Path, stem: str) -> list[Path]:
    """Write the pictures that go with an answer; returns the paths of those that were written.

    That one cannot be written is a note: the answer is there without it.
    """
    paths: list[Path] = []
    try:
        paths.extend(draw(shown, folder, stem))
    except LabError as problem:
        note(f"{problem.what} The answer is complete without it. {problem.hint}")
    return paths


def plot_lines(stem: Path, paths: Sequence[Path]) -> list[str]:
    """One line that names the pictures `<stem>-<name>.<suffix>`; none without pictures."""
    if not paths:
        return []
    names = dict.fromkeys(path.stem.removeprefix(f"{stem.name}-") for path in paths)
    suffixes = dict.fromkeys(path.suffix for path in paths)
    return [f"plot     {shell.braced(str(stem), list(names), list(suffixes))}"]


def commands(records: Lines) -> list[str]:
    """The command line of each session, runs of the engine first; nothing for imported results."""
    from lab.core.request import RequestRecord

    in_order = sorted(records, key=lambda record: isinstance(record, RequestRecord))
    lines: dict[str, None] = {}
    for session in grouped(in_order, lambda record: (record.session, type(record))).values():
        line = command_words.line(session)
        if line:
            lines[line] = None
    return list(lines)
