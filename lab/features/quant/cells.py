"""The cells and small tables of `lab quant`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from lab.features.quant.figures import QuantRow
from lab.show.cells import TEXT, Cell, Column, stacked
from lab.show.section import UNKNOWN, Section, tabled
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd


Row = TypeVar("Row")


def ends(row: object, name: str, scale: float = 1.0, most: float = math.inf) -> str:
    """The interval of a figure, from 0 to `most`; "" without one."""
    low = scale * getattr(row, f"{name}_low")
    high = scale * getattr(row, f"{name}_high")
    if math.isnan(low) or low == high:
        return ""
    return f"{digits(max(low, 0))}-{digits(min(high, most))}"


def cell(
    row: object, name: str, scale: float = 1.0, unit: str = "", most: float = math.inf
) -> Cell:
    """A figure, with its interval in a second line."""
    value = scale * getattr(row, name)
    if math.isnan(value):
        return Cell(UNKNOWN)
    return stacked(f"{digits(value)}{unit}", ends(row, name, scale, most))


def name_of(row: QuantRow) -> str:
    return f"{row.label} (reference)" if row.is_reference else row.label


def matrix(
    about: str, table: pd.DataFrame, column: str, cell_of: Callable[[Row], Cell | str]
) -> Section:
    """A table with a row for each label, and a column for each value of `column`."""
    values = list(dict.fromkeys(table[column]))
    columns: list[Column[Sequence[Cell | str]]] = [Column("name", itemgetter(0), TEXT)]
    for value in values:
        name = value if isinstance(value, str) else f"{value:,}"
        columns.append(Column(name, itemgetter(len(columns))))
    lines: list[list[Cell | str]] = []
    for label, rows in table.groupby("label", sort=False):
        by_value = {getattr(row, column): cell_of(row) for row in rows.itertuples()}
        lines.append([str(label), *(by_value.get(value, "") for value in values)])
    return Section("", about, **tabled(columns, lines, keep_all=True))
