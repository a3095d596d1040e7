"""The cells and small tables of `lab quant`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lab.show.section import UNKNOWN, Section
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd


def ends(row: Any, name: str, scale: float = 1.0, most: float = math.inf) -> str:
    """The interval of a figure, from 0 to `most`; "" without one."""
    low = scale * getattr(row, f"{name}_low")
    high = scale * getattr(row, f"{name}_high")
    if math.isnan(low) or low == high:
        return ""
    return f"{digits(max(low, 0))}-{digits(min(high, most))}"


def cell(
    row: Any, name: str, scale: float = 1.0, unit: str = "", most: float = math.inf
) -> str:
    """A figure, with its interval in a second line."""
    value = scale * getattr(row, name)
    if math.isnan(value):
        return UNKNOWN
    interval = ends(row, name, scale, most)
    first = f"{digits(value)}{unit}"
    return f"{first}\n{interval}" if interval else first


def name_of(row: Any) -> str:
    return f"{row.label} (reference)" if row.is_reference else row.label


def matrix(
    about: str, table: pd.DataFrame, column: str, cell_of: Callable[[Any], str]
) -> Section:
    """A table with a row for each label, and a column for each value of `column`."""
    values = list(dict.fromkeys(table[column]))
    cells = []
    for label, rows in table.groupby("label", sort=False):
        by_value = {getattr(row, column): cell_of(row) for row in rows.itertuples()}
        cells.append([str(label), *(by_value.get(value, "") for value in values)])
    names = [value if isinstance(value, str) else f"{value:,}" for value in values]
    return Section("", about, headings=["name", *names], cells=cells)
