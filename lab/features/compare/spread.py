"""The spread between sessions of one machine, which no single session shows.

Sessions differ more than the runs of one session: the time of day, the load of a virtual machine's host and the place
of the data in memory change. So a difference between two sessions counts only if it exceeds that spread. The spread is
the standard deviation of the logarithm of session medians, estimated from sessions of equal setup on the same machine.
If there are too few, a default for the kind of machine replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.features.serve.access import Access, is_loopback
from lab.show import table, text_setup
from lab.show.wording import percent

if TYPE_CHECKING:
    import pandas as pd

VIRTUAL, BATTERY, PHYSICAL = 0.08, 0.06, 0.04
"""Defaults, as standard deviations of logarithms. VIRTUAL was measured: 16 sessions of the main job on a busy 2-core
virtual machine (tests/bench/same_sessions.py). The other two are assumptions without a measurement."""

FEWEST_SESSIONS = 4
"""Sessions of one setup from which their spread replaces the default."""


@dataclass(frozen=True)
class Spread:
    """`sd`: standard deviation of log(figure) between sessions, with `df` degrees of freedom (inf: a default)."""

    sd: float
    df: float
    source: str

    @property
    def words(self) -> str:
        return f"{percent(math.expm1(self.sd))} ({self.source})"


def default(run: Any) -> Spread:
    """The assumed spread for the machine of a run (a row of `table.runs`)."""
    if text_setup.is_request(run):
        try:
            is_here = is_loopback(Access(run.url))
        except ValueError:  # not an address, in a damaged file
            is_here = False
        if not is_here:
            return Spread(VIRTUAL, math.inf, "assumed since the server's machine is unknown")
    if run.power == "battery":
        return Spread(BATTERY, math.inf, "assumed for a machine on battery")
    if run.virtual == False:  # noqa: E712  (of numpy, or of Python; None and NaN are neither)
        return Spread(PHYSICAL, math.inf, "assumed for a physical machine")
    kind = "for a virtual machine" if run.virtual else "since it is unknown whether the machine is virtual"
    return Spread(VIRTUAL, math.inf, f"assumed {kind}")


def known_spreads(records: Sequence[Record | RequestRecord]) -> dict[tuple[Any, str], Spread]:
    """The spread of every (machine, figure) with enough sessions of one setup in `records`.

    Sessions with at least half of their runs disturbed are left out.
    """
    import pandas as pd

    rows = table.measured(table.runs(records)) if records else pd.DataFrame()
    if rows.empty:
        return {}
    rows = rows[rows.block.isna() & rows.lever.isna()]
    rows = rows[2 * rows.groupby("session").disturbed.transform("sum") < rows.groupby("session").run.transform("size")]
    rows = rows.assign(setup=rows.groupby(text_setup.fields(rows), dropna=False, sort=False).ngroup())
    machines = {setup: machine_of(own) for setup, own in rows.groupby("setup")}
    case, known = ["setup", "n_prompt", "n_gen"], {}
    for figure in ("prefill_s", "tpot_ms", "decode_ms", *(["ttft_s"] if "server" in rows else [])):
        centres = rows[rows[figure] > 0].groupby([*case, "session"])[figure].median().map(math.log).rename("centre")
        cells = centres.groupby(case).agg(["count", "var"]).query("count > 1")
        for machine in dict.fromkeys(machines[setup] for setup, *_ in cells.index):
            own = cells[[machines[setup] == machine for setup, *_ in cells.index]]
            df = own["count"] - 1
            n_free = df.groupby("setup").max().sum()  # more lengths do not add degrees of freedom
            if n_free >= FEWEST_SESSIONS - 1:
                n = len({session for *key, session in centres.index if tuple(key) in own.index})
                sd = math.sqrt((own["var"] * df).sum() / df.sum())
                known[machine, figure] = Spread(sd, n_free, f"from {n} sessions of this machine")
    return known


def machine_of(rows: pd.DataFrame) -> tuple[Any, ...]:
    """The identity of a machine and its computing device, for rows of one setup; for requests also the server."""
    first = rows.iloc[0]
    of_machine = first.machine, None if first.ram_gb != first.ram_gb else first.ram_gb
    return (*of_machine, first.server) if text_setup.is_request(first) else of_machine
