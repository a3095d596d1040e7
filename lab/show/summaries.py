"""A summary of runs: one row per setup and length, with medians over repeats.

A figure of several runs is their median with its interval: a mean with a standard deviation says
little where another process can halve a rate for seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lab.core import figures, shown, stats
from lab.core.figures import FigureKind
from lab.core.results import Readable
from lab.core.shown import Shown
from lab.errors import LabError
from lab.show import text_setup
from lab.show.table import NAN, runs, timed

if TYPE_CHECKING:
    import pandas as pd

NEEDED = {
    *("n_prompt", "n_gen", "status", "warmup", "disturbed", "case", "energy_of"),
    *figures.names(figures.FIGURES),
}
"""Columns of `runs` without which no summary is possible."""

REQUEST_KINDS = ("warm", "short")
"""Requests of equal setup and length differ in these: cached prompt tokens, and an answer that is
shorter than requested. None if the server does not report it."""


def summary(table: pd.DataFrame | Readable) -> pd.DataFrame:
    """One row per setup and length over the successful timed runs, without experiments.

        lab.summary(records)

    `table` is that of `lab.runs`, or what `lab.runs` takes.

    Columns: `repeats`, how many of them were `disturbed`, the `doubts` (such as "few runs") of all
    figures of the row, and for each figure the median, the ends of its 95 % interval (`_low`,
    `_high`; NaN for fewer than 6 runs), and its range (`_min`, `_max`). `j_per_token` is included
    if a run has it, unless a row's runs differ in `energy_of`. Requests that are `warm`, or
    `short` of the requested tokens, have separate rows.
    """
    import pandas as pd

    if not isinstance(table, pd.DataFrame):
        table = runs(table)
    missing = NEEDED - set(table.columns)
    if missing:
        raise LabError(
            f"The table has no column {sorted(missing)[0]}.",
            "Give the table of lab.runs(records) with all its columns.",
        )
    if table.empty:
        return table
    request_kinds = REQUEST_KINDS if "server" in table else ()
    keys = [*text_setup.fields(table), *request_kinds, "n_prompt", "n_gen"]
    plain = timed(table[table.case.isna()])
    rows = []
    for values, repeats in plain.groupby(keys, dropna=False, sort=False):
        setup = dict(zip(keys, values, strict=True))
        rows.append(setup | _figures_of(repeats))
    if not rows:
        return table[:0]
    return pd.DataFrame(rows).sort_values(
        ["n_prompt", "n_gen"], kind="stable", ignore_index=True
    )


def _figures_of(repeats: pd.DataFrame) -> dict[str, object]:
    """The figures of repeats, with their doubts."""
    n_disturbed = int(repeats.disturbed.sum())
    row: dict[str, object] = {
        "repeats": len(repeats),
        "disturbed": n_disturbed,
        "doubts": shown.of_runs(len(repeats), n_disturbed, stats.fewest_for_interval()),
    }
    names = figures.names(figures.FIGURES)
    if "server" in repeats:
        names += figures.names(figures.REQUEST_FIGURES)
        has_bounds_only = repeats.tpot_ms.isna() & repeats.tpot_low_ms.notna()
        row["n_bounds"] = int(has_bounds_only.sum())
    if repeats.energy_of.nunique() == 1:
        row["energy_of"] = repeats.energy_of.dropna().iloc[0]
        names.append(figures.ENERGY.name)
    for name in names:
        row |= _median(name, repeats[name].dropna().tolist())
    n_prompt = repeats.n_prompt.iloc[0]
    row |= _rate(figures.PREFILL_RATE, n_prompt, row)
    row |= _rate(figures.DECODE_RATE, 1e3, row)  # a token per TPOT, in ms
    return row


def _median(name: str, values: list[float]) -> dict[str, float]:
    """The median of a figure, its interval and its range; NaN where there is none."""
    interval = stats.median_interval(values) or stats.Interval(NAN, NAN)
    return {
        name: statistics.median(values) if values else NAN,
        f"{name}_low": interval.low,
        f"{name}_high": interval.high,
        f"{name}_min": min(values, default=NAN),
        f"{name}_max": max(values, default=NAN),
    }


def _rate(rate: FigureKind, amount: float, row: Mapping[str, Any]) -> dict[str, float]:
    """A rate of `amount` per time; its lowest value belongs to the longest time."""
    name = rate.name
    time = rate.rate_of
    times = {
        name: row[time],
        f"{name}_low": row[f"{time}_high"],
        f"{name}_high": row[f"{time}_low"],
        f"{name}_min": row[f"{time}_max"],
        f"{name}_max": row[f"{time}_min"],
    }
    return {end: amount / value if value else NAN for end, value in times.items()}


def shown_in(row: Mapping[str, Any], figure: str, scale: float = 1.0) -> Shown:
    """A figure of a row of `summary`, with its interval; with its range if runs are too few."""
    value = scale * row[figure]
    n = row["repeats"]
    if n < 2:
        return Shown(value, None, None, n, row["doubts"])
    low = row[f"{figure}_low"]
    high = row[f"{figure}_high"]
    if low != low:  # NaN
        low = row[f"{figure}_min"]
        high = row[f"{figure}_max"]
    return Shown(value, scale * low, scale * high, n, row["doubts"])


def firm(rows: pd.DataFrame) -> pd.DataFrame:
    """The reliable rows of `summary`."""
    if rows.empty:
        return rows
    return rows[rows.doubts.map(shown.is_firm).astype(bool)]
