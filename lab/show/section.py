"""A section of output: a title, a table, sentences, warnings, pictures, and parts, which are sections too.

This file prints sections; page.html.jinja writes them as HTML.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from lab.core.lists import plural
from lab.core.record import Ceilings, Record
from lab.core.shown import MARK, NOT_TO_BE_TRUSTED
from lab.show import wording
from lab.show.console import TEXT_COLUMNS, Grid, Terminal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN = wording.UNKNOWN

MOST_LINES = (
    4  # warnings, sentences and notes that a terminal shows below a table; --details shows all
)
ONCE = {"prompt\ntokens", "answer\ntokens", "runs", "n", "sequences", "streams"}
"""Headings of columns that a terminal replaces by a word in the title if all their cells are equal."""

LONG = 20  # cells with more letters than this wrap on a page
SMALL = (5.0, 3.9)
WIDE = (10.0, 4.6)  # sizes of pictures on a page, in inches
Columns = Sequence[tuple[str, Callable[[Any], Any]]]
"""For each column the heading, with the unit in a second line, and the function that makes its cell from a row."""


class Cell(str):
    """A cell of a table that a page may style: the figure, and lines below it in small print."""

    style: str

    def __new__(cls, text: str, style: str = "") -> Cell:
        made = super().__new__(cls, text)
        made.style = style
        return made


@dataclass(frozen=True)
class Picture:
    """A picture: its name in files, its caption, the function that draws it, and its size on a page in inches."""

    name: str
    caption: str
    draw: Callable[[Figure], Any]
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
    name: str = ""  # of an experiment in JSON; the target of links on a page
    question: str = ""  # that it answers
    answer: str = ""  # in one sentence; a terminal prints it first
    words: Sequence[str] = ()  # paragraphs before the table
    facts: dict[str, str] = field(default_factory=dict)
    headings: Sequence[str] = ()
    cells: Sequence[Sequence[str]] = ()
    most_rows: int | None = None  # of the table on a terminal; --details shows all
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    sentences: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    parts: Sequence[Section] = ()
    rows: Sequence[Any] = ()  # the source of the cells, for JSON
    data: Callable[[], dict[str, list[Any]]] = dict  # what JSON has of it, lists by name

    @property
    def caption(self) -> str:
        return ": ".join(filter(None, [self.title, self.about]))

    @property
    def said(self) -> str:
        """All sentences of the section and its parts: a text alternative for its pictures."""
        return " ".join([self.answer, *self.sentences, *(part.said for part in self.parts)]).strip()

    @property
    def all_pictures(self) -> list[Picture]:
        """The pictures of the section and its parts."""
        return [*self.pictures, *(picture for part in self.parts for picture in part.all_pictures)]

    def document(self) -> dict[str, list[Any]]:
        """What JSON has of the section and its parts."""
        lists: dict[str, list[Any]] = {}
        for one in (self.data(), *(part.document() for part in self.parts)):
            for name, values in one.items():
                lists.setdefault(name, []).extend(values)
        return lists

    def is_text(self, column: int) -> bool:
        """Whether a column contains text, which is left-aligned and wraps."""
        is_long = any(len(line[column].partition("\n")[0]) > LONG for line in self.cells)
        return self.headings[column] in TEXT_COLUMNS or is_long


def tabled(columns: Columns, rows: Sequence[Any], keep_all: bool = False) -> dict[str, Any]:
    """The fields of a Section with a table of these rows. Columns without known figures are left out."""
    columns_of = [(heading, [show(row) for row in rows]) for heading, show in columns]
    kept = [
        (heading, cells)
        for heading, cells in columns_of
        if keep_all or not {*cells} <= {"", UNKNOWN}
    ]
    lines = zip(*(cells for _, cells in kept), strict=True)
    return {
        "headings": [heading for heading, _ in kept],
        "cells": list(map(list, lines)),
        "rows": rows,
    }


def numbered(pictures: Sequence[Picture]) -> list[Picture]:
    """The same pictures; pictures of equal name get numbers that no other name has."""
    names = [picture.name for picture in pictures]
    used = set(names)
    made = []
    for picture in pictures:
        name = picture.name
        if names.count(name) > 1:
            name = next(
                free for n in itertools.count(1) if (free := f"{picture.name}-{n}") not in used
            )
        used.add(name)
        made.append(dataclasses.replace(picture, name=name))
    return made


def print_sections(sections: Sequence[Section], out: Console) -> None:
    """Prints each section below an empty line."""
    for section in sections:
        out.print()
        print_section(section, out)


def print_section(section: Section, out: Console) -> None:
    """Prints the answer, title, table, warnings, sentences and notes, then the parts, and how to see what is hidden."""
    more = out.details if isinstance(out, Terminal) else ""
    if section.answer:
        out.print(Text(section.answer, style="bold"))
    same = dict[int, str]()  # columns of equal cells are said once
    for i, heading in enumerate(section.headings):
        values = {line[i] for line in section.cells}
        if heading in ONCE and len(section.cells) > 1 == len(values):
            same[i] = f"{' '.join(heading.split())} {values.pop()}"
            for mark, words in (
                (NOT_TO_BE_TRUSTED, ", half or more disturbed"),
                (MARK, ", some disturbed"),
            ):
                if same[i].endswith(mark):
                    same[i] = f"{same[i].removesuffix(mark)}{words} ({mark})"
    about = "; ".join(filter(None, [section.about, ", ".join(same.values())]))
    if section.title or about:
        out.print(
            Text(section.title, style="bold") + Text(": " * bool(section.title and about) + about)
        )
    for words in section.words:
        out.print(words)
    for name, what in section.facts.items():
        out.print(Text(name, style="bold"))
        out.print(what)
    if section.cells:
        kept = [i for i in range(len(section.headings)) if i not in same]
        grid = Grid(*(section.headings[i] for i in kept))
        n_rows = section.most_rows if more else None
        for line in section.cells[:n_rows]:
            cells = [line[i].partition("\n") for i in kept]
            grid.add_row(
                *(
                    Text(value) + Text(line_end + below, style="dim")
                    for value, line_end, below in cells
                )
            )
        out.print(grid)
        if n_rows is not None and len(section.cells) > n_rows:
            out.print(
                Text(f"{plural(len(section.cells) - n_rows, 'more row')}: {more}", style="dim")
            )
    notes = [Text(line, style="dim") for line in section.notes]
    print_lines([*map(_marked, section.warnings), *map(Text, section.sentences), *notes], out)
    print_sections(section.parts, out)


def print_lines(lines: Sequence[Text], out: Console) -> None:
    """Prints the first lines, and how to see the others."""
    more = out.details if isinstance(out, Terminal) else ""
    n = MOST_LINES if more else len(lines)
    for line in lines[:n]:
        out.print(line)
    if len(lines) > n:
        out.print(Text(f"{plural(len(lines) - n, 'more line')}: {more}", style="dim"))


def _marked(warning: str) -> Text:
    return Text(f"{MARK} ", style="yellow") + Text(warning)


def print_marked(warnings: Sequence[str], failures: Sequence[str], out: Console) -> None:
    """Prints what failed, and what disturbed the runs."""
    failed = [Text("failed ", style="red") + Text(line) for line in failures]
    print_lines([*failed, *map(_marked, warnings)], out)


Lines = Sequence[Any]  # runs, requests and findings of rooms


@dataclass(frozen=True)
class Context:
    """What sections may use besides the records of their kind."""

    ceilings: Sequence[Ceilings] = ()
    others: Sequence[Record] = ()  # more runs of these machines
    details: bool = False
    is_page: bool = False
    together: bool = True  # runs and requests are drawn in one picture
    runs: Sequence[Record] = ()  # among the records; known.sections sets it


@dataclass(frozen=True)
class Kind:
    """A kind of results."""

    name: str
    is_mine: Callable[[Any], bool]
    sections: Callable[[Any, Context], list[Section]]


def is_plain(one: Any) -> bool:
    """Whether a record is a run whose results are in the common tables: of `lab measure`, or of an experiment."""
    return isinstance(one, Record) and not one.run.is_apart
