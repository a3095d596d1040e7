"""Energy as text: what a prompt and a token cost, where that is known, and which counters this machine has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lab.analysis import wording
from lab.runner.energy import Counters
from lab.show.console import Grid, grid_of

if TYPE_CHECKING:
    import pandas as pd

SHOWN = {
    "prefill_j": "J per\nprompt",
    "prefill_above_idle_j": "above\nidle",
    "decode_j_per_token": "J per\ntoken",
    "decode_above_idle_j_per_token": "above\nidle",
    "prefill_w": "prefill\nW",
    "decode_w": "decode\nW",
    "idle_w": "idle\nW",
}
"""Figures of energy, and their headings."""


def table_of(rows: pd.DataFrame) -> tuple[str, list[str], list[list[str]]] | None:
    """Heading, headings of columns and cells (medians) of a summary's energy; None where there is none."""
    if "energy_source" not in rows:
        return None
    shown = {name: heading for name, heading in SHOWN.items() if rows[name].notna().any()}
    known = rows[rows[list(shown)].notna().any(axis="columns")]
    if known.empty or set(shown) <= {"idle_w"}:
        return None
    heading = f"Energy of {scope(known.energy_source.unique())}; median"
    lines = [
        [f"{row['n_prompt']:,}", *(wording.digits(row[name]) for name in shown)] for row in known.to_dict("records")
    ]
    return heading, ["prompt\ntokens", *shown.values()], lines


def scope(sources: Iterable[str]) -> str:
    """What joules are of, in words."""
    return f"{', '.join(sources)} (of all that ran on it, idle power included)"


def energy_table(headings: list[str], lines: list[list[str]]) -> Grid:
    """The cells of `table_of` as a table."""
    grid = grid_of(*headings)
    for line in lines:
        grid.add_row(*line)
    return grid


def which(counters: Counters) -> str:
    """A line on the counters of a machine: those that can be read, and what to do about others."""
    if not counters.readable and not counters.problems:
        return f"not known: there is no {', no '.join(counters.missing)}"
    known = ", ".join(f"{counter.name} ({counter.source})" for counter in counters.readable)
    return "; ".join([*([known] if known else []), *counters.problems])
