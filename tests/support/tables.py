"""The table of a section as text."""

from __future__ import annotations

from lab.show.section import Section


def headings(section: Section) -> list[str]:
    return [column.heading for column in section.columns]


def lines_of(section: Section) -> list[list[str]]:
    """The cells line by line, with line breaks in a cell."""
    return [
        ["\n".join([cell.value, *cell.below]) for cell in cells] for cells in section.cells
    ]
