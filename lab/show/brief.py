"""Sections as a terminal shows them first: the answers, one table, the most important lines.

The whole output fits on half a screen. --details shows the rest: ranges, more tables, legends.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from lab.core.lists import plural
from lab.show.cells import Cell
from lab.show.console import Grid, Terminal
from lab.show.section import (
    Section,
    equal_columns,
    grid,
    marked_lines,
    print_legends,
    print_title,
)

HEIGHT = 13
"""Lines of a terminal for a whole output, without the line that names what is hidden."""

MOST_ANSWERS = 3
MOST_LINES = 3
FEWEST_LINES = 2
"""Warnings and sentences below the table."""

FEWEST_ROWS = 6
FEW_ROWS = 2
"""The most rows that are printed beyond the limit rather than hidden."""

RANGED_ROWS = 2
"""Tables with more rows show the ranges of their figures only with --details."""


def print_brief(sections: Sequence[Section], out: Terminal) -> None:
    """Print the answers, the first table and the most important lines, and how to see the rest."""
    every: list[Section] = []
    for section in sections:
        every += section.with_parts
    page = _Page(out, HEIGHT - out.end_lines)
    answers = [Text(section.answer, style="bold") for section in every if section.answer]
    for answer in answers[:MOST_ANSWERS]:
        page.print(answer)
    page.hide("answer", len(answers) - MOST_ANSWERS)
    with_tables = [section for section in every if section.cells]
    for section in with_tables[:1]:
        _print_table(section, page)
    page.hide("table", len(with_tables) - 1)
    _print_lines(every, page)
    if page.hidden:
        out.print(Text(f"More ({', '.join(page.hidden)}): {out.details}", style="dim"))


@dataclass
class _Page:
    """What was printed on a terminal: the lines that are left, and what was hidden."""

    out: Terminal
    lines_left: int
    hidden: list[str] = field(default_factory=list)

    def print(self, text: Text) -> None:
        self.out.print(text)
        self.lines_left -= text.plain.count("\n") + 1

    def hide(self, what: str, number: int) -> None:
        if number > 0:
            self.hidden.append(plural(number, what))


def _print_table(section: Section, page: _Page) -> None:
    equal = equal_columns(section)
    cells = [list(line) for line in section.cells]
    has_ranges = section.has_ranges and len(cells) <= RANGED_ROWS
    if section.has_ranges and not has_ranges:
        cells = [_without_ranges(line) for line in cells]
        page.hidden.append("ranges")
    contents = section.contents if has_ranges else section.about
    print_title(section.title, [contents, ", ".join(equal.values())], page.out)
    page.lines_left -= 1
    rows = _rows_that_fit(section, cells, equal, page)
    table = grid(section, rows, equal)
    columns = table.fitting(page.out, page.out.options)
    page.out.print(table.table(columns))
    shown = [table.columns[index] for index in columns]
    page.lines_left -= print_legends(section, shown, page.out)
    page.lines_left -= _height(table, page.out)
    page.hide("row", len(cells) - len(rows))
    page.hide("column", len(table.columns) - len(columns))


def _without_ranges(cells: Sequence[Cell]) -> list[Cell]:
    """A line of cells without their lower lines; the first cell names the row."""
    first, *others = cells
    return [first, *(Cell(cell.value) for cell in others)]


def _height(table: Grid, out: Terminal) -> int:
    """The lines of a table on this terminal: text in its cells may wrap."""
    shown = table.table(table.fitting(out, out.options))
    return len(out.render_lines(shown, out.options))


def _rows_that_fit(
    section: Section, cells: list[list[Cell]], hidden: Container[int], page: _Page
) -> Sequence[Sequence[Cell]]:
    """The rows that leave room for sentences: evenly spaced ones of a curve, else the first."""
    n_lines = len(marked_lines(section)) + len(section.sentences)
    room = page.lines_left - min(n_lines, FEWEST_LINES)
    n_rows = len(cells)
    while (
        n_rows > FEWEST_ROWS
        and _height(grid(section, cells[:n_rows], hidden), page.out) > room
    ):
        n_rows -= 1
    if n_rows + FEW_ROWS >= len(cells):
        return cells
    if not section.is_curve:
        return cells[:n_rows]
    ends = [round((number + 1) * len(cells) / n_rows) for number in range(n_rows)]
    return [cells[end - 1] for end in ends]


def _print_lines(sections: Sequence[Section], page: _Page) -> None:
    """Print what failed, warnings, then sentences, as many as fit and at least one."""
    lines: list[Text] = []
    n_notes = 0
    for section in sections:
        lines += marked_lines(section)
        n_notes += len(section.notes) + len(section.words) + len(section.facts)
    for section in sections:
        lines += map(Text, section.sentences)
    n_printed = 0
    for line in lines[:MOST_LINES]:
        if n_printed >= FEWEST_LINES and line.plain.count("\n") + 1 > page.lines_left:
            break
        page.print(line)
        n_printed += 1
    page.hide("line", len(lines) - n_printed + n_notes)
    page.hidden += [section.hidden for section in sections if section.hidden]
