"""How much sessions of one machine vary, and the ratio of two sides with that variation in it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.core import figures
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.core.shown import is_unreliable
from lab.core.stats import CONFIDENCE, Ratio
from lab.remote.access import Access, is_loopback
from lab.show import table, text_setup

if TYPE_CHECKING:
    import pandas as pd

VIRTUAL = 0.08
BATTERY = 0.06
PHYSICAL = 0.04
"""Defaults, as standard deviations of logarithms. VIRTUAL was measured: 16 sessions of the main job
on a busy 2-core virtual machine (tests/bench/same_sessions.py). The other two are assumptions
without a measurement."""

FEWEST_SESSIONS = 4  # sessions of one setup from which their spread replaces the default


@dataclass(frozen=True)
class Spread:
    """How much a figure varies between sessions of one machine."""

    sd: float  # standard deviation of log(figure)
    df: float  # degrees of freedom; infinite for an assumption
    source: str  # where it comes from, in words

    @property
    def is_assumed(self) -> bool:
        return math.isinf(self.df)


def default_spread(run: pd.Series) -> Spread:
    """The assumed spread for the machine of a run (a row of `table.runs`)."""
    sd, reason = _default_of_machine(run)
    return Spread(sd, math.inf, f"assumed {reason}")


def _default_of_machine(run: pd.Series) -> tuple[float, str]:
    if text_setup.is_request(run) and not _is_loopback(run.url):
        return VIRTUAL, "since the server's machine is unknown"
    if run.power == "battery":
        return BATTERY, "for a machine on battery"
    if run.virtual is None or run.virtual != run.virtual:  # NaN
        return VIRTUAL, "since it is unknown whether the machine is virtual"
    if run.virtual:
        return VIRTUAL, "for a virtual machine"
    return PHYSICAL, "for a physical machine"


def _is_loopback(url: str) -> bool:
    try:
        return is_loopback(Access(url))
    except ValueError:  # not an address, in a damaged file
        return False


def known_spreads(
    records: Sequence[Record | RequestRecord],
) -> dict[tuple[object, str], Spread]:
    """The measured spread of (machine, figure), where there are enough sessions of one setup.

    Sessions that were disturbed for the most do not count.
    """
    if not records:
        return {}
    rows = table.measured(table.runs(records))
    if rows.empty:
        return {}
    rows = _quiet(rows[rows.block.isna() & rows.case.isna()])
    setup = rows.groupby(text_setup.fields(rows), dropna=False, sort=False).ngroup()
    rows = rows.assign(setup=setup)
    spreads: dict[tuple[object, str], Spread] = {}
    for figure in figures.COMPARED:
        spreads |= _spreads_of(rows, figure.name)
    return spreads


def _quiet(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of sessions whose medians are reliable."""
    unreliable = set()
    for session, disturbed in rows.groupby("session").disturbed:
        if is_unreliable(len(disturbed), int(disturbed.sum())):
            unreliable.add(session)
    return rows[~rows.session.isin(unreliable)]


def _spreads_of(rows: pd.DataFrame, figure: str) -> dict[tuple[object, str], Spread]:
    """The spread of each machine, from the medians of its sessions by setup and length."""
    case = ["setup", "n_prompt", "n_gen"]
    medians = rows[rows[figure] > 0].groupby([*case, "session"])[figure].median()
    centres = medians.map(math.log).rename("centre")
    cells = centres.groupby(case).agg(["count", "var"])
    cells = cells[cells["count"] > 1]
    machines = {setup: machine_of(of_setup) for setup, of_setup in rows.groupby("setup")}
    machine_of_cell = [machines[setup] for setup in cells.index.get_level_values("setup")]
    spreads: dict[tuple[object, str], Spread] = {}
    for machine in dict.fromkeys(machine_of_cell):
        of_machine = cells[[other == machine for other in machine_of_cell]]
        df = of_machine["count"] - 1
        n_free = df.groupby("setup").max().sum()  # more lengths do not add degrees of freedom
        if n_free < FEWEST_SESSIONS - 1:
            continue
        is_used = centres.index.droplevel("session").isin(of_machine.index)
        n_sessions = centres[is_used].index.get_level_values("session").nunique()
        sd = math.sqrt((of_machine["var"] * df).sum() / df.sum())
        spreads[machine, figure] = Spread(
            sd, n_free, f"from {n_sessions} sessions of this machine"
        )
    return spreads


def machine_of(rows: pd.DataFrame) -> tuple[object, ...]:
    """The identity of a machine and its computing device, for rows of one setup.

    Of requests also the server.
    """
    first = rows.iloc[0]
    ram_gb = None if first.ram_gb != first.ram_gb else first.ram_gb  # NaN
    if text_setup.is_request(first):
        return first.machine, ram_gb, first.server
    return first.machine, ram_gb


def between_sessions(
    sides: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]],
    spreads: tuple[Spread, Spread],
    confidence: float = CONFIDENCE,
) -> Ratio:
    """The ratio of the second side to the first, with its interval.

    A side has sessions of positive values, and a spread between sessions. A side's centre is the
    mean over sessions of the median of logarithms. The variance of a session is that of a median
    (pi / 2 x variance / n, for normal values), but at least the variance between sessions.
    Student's t with Welch-Satterthwaite degrees of freedom, in which all sessions with one spread
    count as one estimate: their errors do not average out. ValueError for a session of one value.
    """
    from scipy.special import stdtrit

    variances: dict[object, float] = {}  # by the estimate that they come from
    freedoms: dict[object, float] = {}
    centres: list[float] = []
    for side, (sessions, spread) in enumerate(zip(sides, spreads, strict=True)):
        logs = [[math.log(value) for value in values] for values in sessions]
        centres.append(statistics.fmean(map(statistics.median, logs)))
        for number, values in enumerate(logs):
            of_median = math.pi / 2 * statistics.variance(values) / len(values)
            if spread.sd**2 >= of_median:
                estimate: object = (spread.sd, spread.df)
                freedoms[estimate] = spread.df
            else:
                estimate = (side, number, None)
                freedoms[estimate] = len(values) - 1
            part = max(of_median, spread.sd**2) / len(logs) ** 2
            variances[estimate] = variances.get(estimate, 0.0) + part
    total = sum(variances.values())
    squares = sum(variance**2 / freedoms[estimate] for estimate, variance in variances.items())
    freedom = total**2 / squares if squares else math.inf
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(total)
    difference = centres[1] - centres[0]
    return Ratio(
        math.exp(difference), math.exp(difference - half), math.exp(difference + half)
    )
