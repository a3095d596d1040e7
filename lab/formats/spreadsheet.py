"""Tables that a spreadsheet opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

FORMULA_BEGINS = ("=", "+", "-", "@", "\t", "\r")


def without_formulas(rows: pd.DataFrame) -> pd.DataFrame:
    """The same rows; a text that a spreadsheet would run as a formula begins with an apostrophe."""

    def quoted(value: object) -> object:
        if isinstance(value, str) and value.startswith(FORMULA_BEGINS):
            return f"'{value}"
        return value

    if rows.empty:
        return rows
    return rows.map(quoted)
