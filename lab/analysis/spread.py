"""How much a machine differs from itself between two sessions: the spread that no single session can see.

Sessions differ by more than their runs do: another hour, another load of a virtual machine's host, another place
of the data in memory. So a difference between two sessions counts only beyond that spread. It is the standard deviation
of the logarithm of a session's median, estimated from sessions of equal setup on the same machine (of whatever setup);
where too few are known, a default for the kind of machine stands in (of times, taken for energy too). `lab calibrate`
makes such sessions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.analysis import request_table, setup_columns, table
from lab.core import energy
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.endpoints.access import Access, is_loopback

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("prefill_s", "tpot_ms", "decode_ms", *energy.COMPARED)
"""Those of which a spread is estimated; of requests also that of TTFT."""

VIRTUAL, BATTERY, PHYSICAL = 0.08, 0.06, 0.04
"""Defaults, as standard deviations of logarithms. VIRTUAL: 16 sessions of the main job on a busy 2-core virtual machine
(tests/bench/same_sessions.py). The other two are assumptions; no such machine was measured."""

FEWEST_SESSIONS = 4
"""Known sessions of one setup from which on their spread replaces the default."""


@dataclass(frozen=True)
class Spread:
    """`sd`: standard deviation of log(figure) between sessions, with `df` degrees of freedom (inf: a default)."""

    sd: float
    df: float
    n_sessions: int  # that it was estimated from; 0: a default
    source: str

    @property
    def words(self) -> str:
        """The spread and where it comes from."""
        return f"{100 * math.expm1(self.sd):.1f} % ({self.source})"


def default(run: Any) -> Spread:
    """The spread that is assumed for the machine of a run (a row of `table.runs`)."""
    if setup_columns.is_request(run) and not _is_here(run.url):
        return Spread(VIRTUAL, math.inf, 0, "assumed; the machine of the server is not known")
    if run.power == "battery":
        return Spread(BATTERY, math.inf, 0, "assumed for a machine on battery")
    if run.virtual == False:  # noqa: E712  (of numpy, or of Python; None and NaN are neither)
        return Spread(PHYSICAL, math.inf, 0, "assumed for a machine that is not virtual")
    source = "assumed for a virtual machine" if run.virtual else "assumed; whether the machine is virtual is not known"
    return Spread(VIRTUAL, math.inf, 0, source)


def _is_here(url: str) -> bool:
    """Whether a server is on the machine of its client, as far as its address says so."""
    try:
        return is_loopback(Access(url))
    except ValueError:  # of a damaged file: no address at all
        return False


def known_spreads(records: Sequence[Record | RequestRecord]) -> dict[tuple[Any, str], Spread]:
    """The spread of every (machine, figure) of which enough sessions of one setup are in `records`.

    Sessions of which half of the runs or more were disturbed stay out.
    """
    if not records:
        return {}
    rows = request_table.measured(table.runs(records))
    if rows.empty:
        return {}
    figures = (*FIGURES, "ttft_s") if "server" in rows else FIGURES
    rows = rows[rows.block.isna() & rows.lever.isna()]
    rows = rows[2 * rows.groupby("session").disturbed.transform("sum") < rows.groupby("session").run.transform("size")]
    squares: dict[tuple[Any, str], float] = {}
    n_terms: dict[tuple[Any, str], int] = {}
    n_sessions: dict[tuple[Any, str], set[str]] = {}
    df: dict[tuple[Any, str], dict[Any, int]] = {}
    for setup, part in rows.groupby(setup_columns.fields(rows), dropna=False, sort=False):
        for figure in figures:
            alike = ["n_prompt", "n_gen", *(["energy_source"] if figure in energy.COMPARED else [])]
            for _, same_length in part[part[figure] > 0].groupby(alike):
                centres = [math.log(values.median()) for _, values in same_length.groupby("session")[figure]]
                if len(centres) < 2:
                    continue
                key = machine_of(same_length), figure
                squares[key] = squares.get(key, 0.0) + statistics.variance(centres) * (len(centres) - 1)
                n_terms[key] = n_terms.get(key, 0) + len(centres) - 1
                n_sessions.setdefault(key, set()).update(same_length.session)
                of_setup = df.setdefault(key, {})
                of_setup[setup] = max(of_setup.get(setup, 0), len(centres) - 1)
    return {
        key: Spread(
            math.sqrt(square / n_terms[key]),
            sum(df[key].values()),
            len(n_sessions[key]),
            f"from {len(n_sessions[key])} sessions of this machine",
        )
        for key, square in squares.items()
        if sum(df[key].values()) >= FEWEST_SESSIONS - 1
    }


def machine_of(rows: pd.DataFrame) -> tuple[Any, ...]:
    """What tells machines (and what of them computes) apart, of rows of one setup; of requests the server too."""
    first = rows.iloc[0]
    of_machine = first.machine, None if first.ram_gb != first.ram_gb else first.ram_gb
    return (*of_machine, first.server) if setup_columns.is_request(first) else of_machine


def spread_of(rows: pd.DataFrame, figure: str, known: dict[tuple[Any, str], Spread]) -> Spread:
    """The spread of a figure for the runs of one setup: as known, or assumed."""
    return known.get((machine_of(rows), figure)) or default(rows.iloc[0])
