"""Columns and cells of tables: what they hold, and what a terminal and a page do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import Generic, Never, Protocol, TypeVar

from lab.core.figures import FigureKind


class CellKind(Enum):
    """What the cells of a column hold: numbers are right-aligned, only long text wraps."""

    NUMBER = 0
    TEXT = 1
    LONG_TEXT = 2


Row_contra = TypeVar("Row_contra", contravariant=True)

NUMBER = CellKind.NUMBER
TEXT = CellKind.TEXT
LONG_TEXT = CellKind.LONG_TEXT


@dataclass(frozen=True)
class Cell:
    """A cell: a value, lines below it in small print, and its style on a page."""

    value: str
    below: tuple[str, ...] = ()
    style: str = ""


@dataclass(frozen=True)
class Column(Generic[Row_contra]):
    """A column: its heading, with the unit in a second line, and what makes its cell of a row."""

    heading: str
    cell: Callable[[Row_contra], Cell | str] = str
    kind: CellKind = NUMBER
    is_in_title: bool = False  # on a terminal in place of the column, if all cells are equal
    priority: int = (
        0  # a narrow terminal hides columns of low priority first, then from the right
    )
    implied_by: str = ""  # how the heading begins without which the priority is ordinary

    @property
    def is_text(self) -> bool:
        return self.kind is not NUMBER

    def priority_among(self, columns: Sequence[Column[Never]]) -> int:
        """The priority in a table of these columns; text comes after ordinary numbers."""
        headings = [column.heading for column in columns if column is not self]
        if self.implied_by and not any(name.startswith(self.implied_by) for name in headings):
            return 0
        return self.priority or int(self.is_text)


def stacked(*lines: str) -> Cell:
    """A cell with these lines but the empty ones."""
    value, *below = filter(None, lines)
    return Cell(value, tuple(below))


def of_figure(
    figure: FigureKind, cell: Callable[[Row_contra], Cell | str] = str
) -> Column[Row_contra]:
    return Column(figure.heading, cell, priority=figure.priority, implied_by=figure.implied_by)


def listed(headings: Iterable[str]) -> list[Column[Sequence[Cell | str]]]:
    """The columns of rows that are lists of cells."""
    return [Column(heading, itemgetter(index)) for index, heading in enumerate(headings)]


class HasPrompt(Protocol):
    @property
    def n_prompt(self) -> int: ...


class HasRuns(Protocol):
    @property
    def n_runs(self) -> int: ...


PROMPT_TOKENS: Column[HasPrompt] = Column(
    "prompt\ntokens", lambda row: f"{row.n_prompt:,}", is_in_title=True
)
N_RUNS: Column[HasRuns] = Column("runs", lambda row: f"{row.n_runs}", is_in_title=True)
