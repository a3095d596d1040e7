"""A section of output: a title, a table, sentences, warnings, pictures, and parts (sections too).

This file prints sections; page.html.jinja writes them as HTML.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Never, TypedDict, TypeGuard, TypeVar

from rich.console import Console
from rich.text import Text

from lab.core.record import Ceilings, Record
from lab.core.shown import MARK, NOT_TO_BE_TRUSTED
from lab.show import wording
from lab.show.cells import Cell, Column
from lab.show.console import Grid, Terminal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN = wording.UNKNOWN

LONG = 20  # cells with more letters than this wrap on a page
SMALL = (5.0, 3.9)
WIDE = (10.0, 4.6)
"""Sizes of pictures on a page, in inches."""

Row = TypeVar("Row")
Columns = Sequence[Column[Row]]
ShownColumns = Columns[Never]  # with cells that are already written


@dataclass(frozen=True)
class Picture:
    """A picture: its name in files, its caption, the function that draws it, and its size on a
    page in inches."""

    name: str
    caption: str
    draw: Callable[[Figure], object]
    size: tuple[float, float] = SMALL

    @property
    def file_size(self) -> tuple[float, float]:
        """Its size in files, in inches."""
        width, height = self.size
        return (8, 5) if width < WIDE[0] else (11, max(5, height))


@dataclass(frozen=True)
class Section:
    """A section, shown in the order of the fields."""

    title: str = ""
    about: str = ""  # the contents of the table
    below: str = ""  # what cells have in their second line, such as "their range"
    name: str = ""  # of an experiment in JSON; the target of links on a page
    question: str = ""  # that it answers
    answer: str = ""  # in one sentence; a terminal prints it first
    words: Sequence[str] = ()  # paragraphs before the table
    facts: dict[str, str] = field(default_factory=dict)
    columns: ShownColumns = ()
    cells: Sequence[Sequence[Cell]] = ()
    is_curve: bool = False  # any of its rows may be left out; else the first rows say most
    notes: Sequence[str] = ()
    hidden: str = ""  # what --details adds to the table
    failures: Sequence[str] = ()
    warnings: Sequence[str] = ()
    sentences: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    parts: Sequence[Section] = ()
    rows: Sequence[object] = ()  # the source of the cells, for JSON
    data: Callable[[], Mapping[str, Sequence[object]]] = (
        dict  # what JSON has of it, lists by name
    )

    @property
    def caption(self) -> str:
        return ": ".join(filter(None, [self.title, self.contents]))

    @property
    def contents(self) -> str:
        """What the table contains, with what stands below its figures."""
        below = f"below each {self.below}" if self.has_ranges else ""
        return "; ".join(filter(None, [self.about, below]))

    @property
    def has_ranges(self) -> bool:
        """Whether a figure of the table has a second line, as `below` says."""
        return bool(self.below) and any(
            cell.below for _, *others in self.cells for cell in others
        )

    @property
    def with_parts(self) -> list[Section]:
        """The section, its parts, and theirs."""
        every = [self]
        for part in self.parts:
            every += part.with_parts
        return every

    @property
    def said(self) -> str:
        """All sentences of the section and its parts: a text alternative for its pictures."""
        sentences = [self.answer, *self.sentences]
        for part in self.parts:
            sentences.append(part.said)
        return " ".join(sentences).strip()

    @property
    def all_pictures(self) -> list[Picture]:
        """The pictures of the section and its parts."""
        pictures = list(self.pictures)
        for part in self.parts:
            pictures += part.all_pictures
        return pictures

    def document(self) -> dict[str, list[object]]:
        """What JSON has of the section and its parts."""
        lists: dict[str, list[object]] = {}
        for document in (self.data(), *(part.document() for part in self.parts)):
            for name, values in document.items():
                lists.setdefault(name, []).extend(values)
        return lists

    def is_text(self, column: int) -> bool:
        """Whether a column contains text, which is left-aligned and wraps."""
        has_long_cell = any(len(cells[column].value) > LONG for cells in self.cells)
        return self.columns[column].is_text or has_long_cell


class Table(TypedDict):
    """The fields of a Section that are its table."""

    columns: ShownColumns
    cells: Sequence[Sequence[Cell]]
    rows: Sequence[object]


def tabled(columns: Columns[Row], rows: Sequence[Row], keep_all: bool = False) -> Table:
    """The fields of a Section with a table of these rows.

    Columns without known figures are left out, unless `keep_all`.
    """
    shown = []
    cells_of_columns = []
    for column in columns:
        cells = [
            Cell(cell) if isinstance(cell, str) else cell for cell in map(column.cell, rows)
        ]
        if keep_all or not {cell.value for cell in cells} <= {"", UNKNOWN}:
            shown.append(column)
            cells_of_columns.append(cells)
    lines = [list(line) for line in zip(*cells_of_columns, strict=True)]
    return {"columns": shown, "cells": lines, "rows": rows}


def numbered(pictures: Sequence[Picture]) -> list[Picture]:
    """The same pictures; those of equal name get numbers, so that no two share a name."""
    names = [picture.name for picture in pictures]
    used = set(names)
    renamed = []
    for picture in pictures:
        name = picture.name
        if names.count(name) > 1:
            name = _free_name(name, used)
            used.add(name)
        renamed.append(dataclasses.replace(picture, name=name))
    return renamed


def _free_name(name: str, used: set[str]) -> str:
    number = 1
    while f"{name}-{number}" in used:
        number += 1
    return f"{name}-{number}"


def print_sections(sections: Sequence[Section], out: Console) -> None:
    """Print each section below an empty line; a Terminal with `details` what matters most."""
    from lab.show.brief import print_brief

    if isinstance(out, Terminal) and out.details:
        print_brief(sections, out)
        return
    for section in sections:
        out.print()
        print_section(section, out)


def print_section(section: Section, out: Console) -> None:
    """Print the answer, title, table, warnings, sentences and notes, then the parts."""
    if section.answer:
        out.print(Text(section.answer, style="bold"))
    equal = equal_columns(section)
    print_title(section.title, [section.contents, ", ".join(equal.values())], out)
    for paragraph in section.words:
        out.print(paragraph)
    for name, fact in section.facts.items():
        out.print(Text(name, style="bold"))
        out.print(fact)
    if section.cells:
        out.print(grid(section, section.cells, equal))
        print_legends(section, section.columns, out)
    for line in [*marked_lines(section), *map(Text, section.sentences)]:
        out.print(line)
    for note in section.notes:
        for phrase in lines_of_note(note):
            out.print(Text(phrase, style="dim"))
    print_sections(section.parts, out)


def print_title(title: str, contents: Sequence[str], out: Console) -> None:
    """Print a title, if there is one, and what the table below it contains, without legends."""
    phrases = [phrase for text in contents for phrase in split_legends(text)[0]]
    about = "; ".join(phrases)
    colon = ": " if title and about else ""
    if title or about:
        out.print(Text(title, style="bold") + Text(f"{colon}{about}"))


def split_legends(about: str) -> tuple[list[str], list[str]]:
    """The phrases of a table's contents, and those that explain a name, such as "lost: what..."."""
    phrases = [phrase for phrase in about.split("; ") if phrase]
    legends = [phrase for phrase in phrases if ": " in phrase]
    return [phrase for phrase in phrases if phrase not in legends], legends


def about_shown(about: str, columns: ShownColumns, shown: ShownColumns) -> str:
    """What a table is about, without the legends of columns that are not shown."""
    hidden = {column.heading.partition("\n")[0] for column in columns}
    hidden -= {column.heading.partition("\n")[0] for column in shown}
    phrases, legends = split_legends(about)
    kept = [legend for legend in legends if legend.partition(": ")[0] not in hidden]
    return "; ".join([*phrases, *kept])


def print_legends(section: Section, shown: ShownColumns, out: Console) -> int:
    """Print below a table with these columns what names in it mean, each in a line of its own.

    Returns how many.
    """
    legends = split_legends(about_shown(section.about, section.columns, shown))[1]
    for legend in legends:
        out.print(Text(legend, style="dim"))
    return len(legends)


def lines_of_note(note: str) -> list[str]:
    """A note in one line, or of several legends each in its own."""
    phrases, legends = split_legends(note)
    return [note] if phrases or len(legends) < 2 else legends


def equal_columns(section: Section) -> dict[int, str]:
    """Columns for the title with equal cells, each as a phrase: "runs 3"."""
    phrases: dict[int, str] = {}
    if len(section.cells) < 2:
        return phrases
    for index, column in enumerate(section.columns):
        values = {cells[index] for cells in section.cells}
        if column.is_in_title and len(values) == 1:
            cell = values.pop()
            phrases[index] = _phrase(" ".join(column.heading.split()), cell.value)
    return phrases


def _phrase(name: str, value: str) -> str:
    """A column whose cells have this value, with its mark in words."""
    if value.endswith(NOT_TO_BE_TRUSTED):
        number = value.removesuffix(NOT_TO_BE_TRUSTED)
        return f"{name} {number}, half or more disturbed ({NOT_TO_BE_TRUSTED})"
    if value.endswith(MARK):
        return f"{name} {value.removesuffix(MARK)}, some disturbed ({MARK})"
    return f"{name} {value}"


def grid(section: Section, lines: Sequence[Sequence[Cell]], hidden: Container[int]) -> Grid:
    """The table of a section with these lines of cells, without the `hidden` columns."""
    shown = [index for index in range(len(section.columns)) if index not in hidden]
    table = Grid(*(section.columns[index] for index in shown))
    for cells in lines:
        table.add_row(*(cells[index] for index in shown))
    return table


def marked_lines(section: Section) -> list[Text]:
    """What failed, and warnings, with their marks."""
    failed = [Text("failed ", style="red") + Text(line) for line in section.failures]
    warned = [Text(f"{MARK} ", style="yellow") + Text(line) for line in section.warnings]
    return [*failed, *warned]


@dataclass(frozen=True)
class Context:
    """What sections may use besides the records of their kind."""

    ceilings: Sequence[Ceilings] = ()
    others: Sequence[Record] = ()  # more runs of these machines
    details: bool = False
    is_page: bool = False
    together: bool = True  # runs and requests are drawn in one picture
    runs: Sequence[Record] = ()  # among the records; app/kinds.py sets it


@dataclass(frozen=True)
class Kind:
    """A kind of results."""

    name: str
    is_mine: Callable[[object], bool]
    sections: Callable[[Any, Context], list[Section]]


def is_plain(line: object) -> TypeGuard[Record]:
    """Whether a line is a run with results in the common tables, plain or of an experiment."""
    return isinstance(line, Record) and not line.run.is_apart
