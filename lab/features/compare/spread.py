"""The spread between sessions of one machine, which no single session shows.

Sessions differ more than the runs of one session: the time of day, the load of a virtual machine's host and the place
of the data in memory change. So a difference between two sessions counts only if it exceeds that spread. The spread is
the standard deviation of the logarithm of session medians, estimated from sessions of equal setup on the same machine.
If there are too few, a default for the kind of machine replaces it.

`sides_of` returns the values of a group that are compared, for every figure and length, with spread and doubts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core import lever_figures, shown
from lab.core.lists import grouped
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.features.serve.access import Access, is_loopback
from lab.show import request_table, setup_columns, table
from lab.show.setup_columns import is_request
from lab.show.wording import percent

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("prefill_s", "tpot_ms", "decode_ms")
"""Figures whose spread is estimated. For requests also TTFT."""

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
    n_sessions: int  # used for the estimate; 0: a default
    source: str

    @property
    def words(self) -> str:
        """The spread and its source."""
        return f"{percent(math.expm1(self.sd))} ({self.source})"


def default(run: Any) -> Spread:
    """The assumed spread for the machine of a run (a row of `table.runs`)."""
    if setup_columns.is_request(run):
        try:
            is_here = is_loopback(Access(run.url))
        except ValueError:  # not an address, in a damaged file
            is_here = False
        if not is_here:
            return Spread(VIRTUAL, math.inf, 0, "assumed since the server's machine is unknown")
    if run.power == "battery":
        return Spread(BATTERY, math.inf, 0, "assumed for a machine on battery")
    if run.virtual == False:  # noqa: E712  (of numpy, or of Python; None and NaN are neither)
        return Spread(PHYSICAL, math.inf, 0, "assumed for a physical machine")
    kind = "for a virtual machine" if run.virtual else "since it is unknown whether the machine is virtual"
    return Spread(VIRTUAL, math.inf, 0, f"assumed {kind}")


def known_spreads(records: Sequence[Record | RequestRecord]) -> dict[tuple[Any, str], Spread]:
    """The spread of every (machine, figure) with enough sessions of one setup in `records`.

    Sessions with at least half of their runs disturbed are left out.
    """
    if not records:
        return {}
    rows = request_table.measured(table.runs(records))
    if rows.empty:
        return {}
    rows = rows[rows.block.isna() & rows.lever.isna()]
    rows = rows[2 * rows.groupby("session").disturbed.transform("sum") < rows.groupby("session").run.transform("size")]
    rows = rows.assign(setup=rows.groupby(setup_columns.fields(rows), dropna=False, sort=False).ngroup())
    found: dict[tuple[Any, str], list[tuple[int, pd.Series]]] = {}
    for figure in (*FIGURES, "ttft_s") if "server" in rows else FIGURES:
        for (setup, *_), repeats in rows[rows[figure] > 0].groupby(["setup", "n_prompt", "n_gen"]):
            centres = repeats.groupby("session")[figure].median().map(math.log)
            if len(centres) > 1:
                found.setdefault((machine_of(repeats), figure), []).append((setup, centres))
    known = {}
    for key, of_sessions in found.items():
        df: dict[int, int] = {}  # of each setup: more lengths do not add degrees
        for setup, centres in of_sessions:
            df[setup] = max(df.get(setup, 0), len(centres) - 1)
        if sum(df.values()) >= FEWEST_SESSIONS - 1:
            squares = sum(centres.var() * (len(centres) - 1) for _, centres in of_sessions)
            sd = math.sqrt(squares / sum(len(centres) - 1 for _, centres in of_sessions))
            n = len({session for _, centres in of_sessions for session in centres.index})
            known[key] = Spread(sd, sum(df.values()), n, f"from {n} sessions of this machine")
    return known


def machine_of(rows: pd.DataFrame) -> tuple[Any, ...]:
    """The identity of a machine and its computing device, for rows of one setup; for requests also the server."""
    first = rows.iloc[0]
    of_machine = first.machine, None if first.ram_gb != first.ram_gb else first.ram_gb
    return (*of_machine, first.server) if setup_columns.is_request(first) else of_machine


FIGURE_NAMES = {
    "prefill_s": "prefill",
    "ttft_s": "TTFT",
    "tpot_ms": "TPOT",
    "decode_ms": "decode compute",
    "prefill_j": "J per prompt",
    "decode_j_per_token": "J per token",
    **lever_figures.NAMES,
}
"""The compared figures; those of experiments come last. TTFT is compared only if a side is a server."""

OF_PROMPTS = ("prefill_s", "ttft_s", "prefill_j")
"""Figures that do not depend on the number of generated tokens."""

Key = tuple[str, int, int | None, str | None]  # figure, n_prompt, n_gen, lever
Values = dict[tuple[str, Any], list[float]]  # by (session, block); block is None outside of `lab ab`


@dataclass(frozen=True)
class Side:
    """The values of a figure of one group, and the spread between its machine's sessions."""

    values: Values
    spread: Spread
    doubts: tuple[str, ...] = ()  # some of core/shown.py; DISTURBED if at least half of a session's runs were


def compared_figures(groups: Sequence[pd.DataFrame]) -> list[str]:
    """The names of FIGURE_NAMES by which groups are compared: TTFT only if a group is of requests to a server."""
    has_requests = any(is_request(rows.iloc[0]) for rows in groups)
    return [figure for figure in FIGURE_NAMES if figure != "ttft_s" or has_requests]


def sides_of(rows: pd.DataFrame, known: dict[tuple[Any, str], Spread], figures: Sequence[str]) -> dict[Key, Side]:
    """Those of `figures` that a group has, by length, with the values of its runs."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for row in rows.to_dict("records"):
        lever = row["lever"] if isinstance(row["lever"], str) else None
        for figure in set(figures) & row.keys():
            if row[figure] > 0:  # neither NaN nor a time that a damaged file made up
                key = figure, row["n_prompt"], None if figure in OF_PROMPTS else row["n_gen"], lever
                found.setdefault(key, []).append(row)
    first = {lever: i for i, lever in enumerate(dict.fromkeys(rows.lever))}
    names = list(FIGURE_NAMES)

    def place(key: Key) -> tuple[object, ...]:
        figure, n_prompt, n_gen, lever = key
        return lever is not None, n_prompt, first.get(lever, 0), n_gen or 0, names.index(figure)

    machine, assumed, sides = machine_of(rows), default(rows.iloc[0]), {}
    for key in sorted(found, key=place):
        own, figure = found[key], key[0]
        by_unit = grouped(own, lambda row: (row["session"], row["block"] if row["block"] == row["block"] else None))
        by_session = grouped(own, lambda row: row["session"]).values()
        doubts = [shown.of_runs(len(runs), sum(row["disturbed"] for row in runs), 0) for runs in by_session]
        values = {unit: [row[figure] for row in runs] for unit, runs in by_unit.items()}
        sides[key] = Side(values, known.get((machine, figure)) or assumed, shown.all_of(doubts))
    return sides


def is_second_choice(key: Key, keys: Sequence[Key]) -> bool:
    """Decode compute replaces TPOT only if one side has no TPOT (imported results)."""
    return key[0] == "decode_ms" and ("tpot_ms", *key[1:]) in keys


def without(figures: Mapping[Key, Side], compared: Sequence[Key]) -> tuple[str, ...]:
    """The names of the figures that were not compared: only one of TPOT and decode compute."""

    def what(key: Key) -> tuple[object, ...]:
        return "tpot_ms" if key[0] == "decode_ms" else key[0], *key[1:]

    names: dict[tuple[object, ...], str] = {}
    for key in figures:
        figure, n_prompt, n_gen, lever = key
        at = ", ".join(filter(None, [f"{n_prompt:,}" if n_prompt else "", lever]))
        words = f"{FIGURE_NAMES[figure]} at {at}" + (f" with {n_gen:,} generated" if n_gen else "")
        names.setdefault(what(key), words)
    done = set(map(what, compared))
    return tuple(words for key, words in names.items() if key not in done)
