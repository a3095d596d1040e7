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
    if setup_columns.is_request(run) and not _is_here(run.url):
        return Spread(VIRTUAL, math.inf, 0, "assumed since the server's machine is unknown")
    if run.power == "battery":
        return Spread(BATTERY, math.inf, 0, "assumed for a machine on battery")
    if run.virtual == False:  # noqa: E712  (of numpy, or of Python; None and NaN are neither)
        return Spread(PHYSICAL, math.inf, 0, "assumed for a physical machine")
    kind = "for a virtual machine" if run.virtual else "since it is unknown whether the machine is virtual"
    return Spread(VIRTUAL, math.inf, 0, f"assumed {kind}")


def _is_here(url: str) -> bool:
    """Whether a server's address is on the client's own machine."""
    try:
        return is_loopback(Access(url))
    except ValueError:  # not an address, in a damaged file
        return False


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
    return {key: known for key, centres in found.items() if (known := _estimated(centres))}


def _estimated(found: Sequence[tuple[int, pd.Series]]) -> Spread | None:
    """Estimated from the centres of sessions (of a setup at a length); None for too few. Lengths do not add degrees."""
    df: dict[int, int] = {}
    for setup, centres in found:
        df[setup] = max(df.get(setup, 0), len(centres) - 1)
    if sum(df.values()) < FEWEST_SESSIONS - 1:
        return None
    squares = sum(centres.var() * (len(centres) - 1) for _, centres in found)
    sd = math.sqrt(squares / sum(len(centres) - 1 for _, centres in found))
    n_sessions = len({session for _, centres in found for session in centres.index})
    return Spread(sd, sum(df.values()), n_sessions, f"from {n_sessions} sessions of this machine")


def machine_of(rows: pd.DataFrame) -> tuple[Any, ...]:
    """The identity of a machine and its computing device, for rows of one setup; for requests also the server."""
    first = rows.iloc[0]
    of_machine = first.machine, None if first.ram_gb != first.ram_gb else first.ram_gb
    return (*of_machine, first.server) if setup_columns.is_request(first) else of_machine


def spread_of(rows: pd.DataFrame, figure: str, known: dict[tuple[Any, str], Spread]) -> Spread:
    """The known spread of a figure for the runs of one setup, or the assumed one."""
    return known.get((machine_of(rows), figure)) or default(rows.iloc[0])


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

    spreads = {figure: spread_of(rows, figure, known) for figure in figures}
    return {key: _side(key[0], found[key], spreads[key[0]]) for key in sorted(found, key=place)}


def _side(figure: str, rows: Sequence[dict[str, Any]], spread: Spread) -> Side:
    """A figure of these rows as a side."""
    by_unit = grouped(rows, lambda row: (row["session"], row["block"] if row["block"] == row["block"] else None))
    disturbed = [[row["disturbed"] for row in alike] for alike in grouped(rows, lambda row: row["session"]).values()]
    return Side(
        {unit: [row[figure] for row in alike] for unit, alike in by_unit.items()},
        spread,
        shown.all_of([shown.of_runs(len(runs), sum(runs), 0) for runs in disturbed]),
    )


def is_second_choice(key: Key, keys: Sequence[Key]) -> bool:
    """Decode compute replaces TPOT only if one side has no TPOT (imported results)."""
    return key[0] == "decode_ms" and ("tpot_ms", *key[1:]) in keys


def without(figures: Mapping[Key, Side], compared: Sequence[Key]) -> tuple[str, ...]:
    """The names of the figures that were not compared: only one of TPOT and decode compute."""
    done = {(_kind(key[0]), *key[1:]) for key in compared}
    names: dict[tuple[object, ...], str] = {}
    for key in figures:
        names.setdefault((_kind(key[0]), *key[1:]), name_of(key))
    return tuple(name for what, name in names.items() if what not in done)


def _kind(figure: str) -> str:
    """TPOT and decode compute describe the same decoding."""
    return "tpot_ms" if figure == "decode_ms" else figure


def name_of(key: Key) -> str:
    at = ", ".join([*([f"{key[1]:,}"] if key[1] else []), *([key[3]] if key[3] else [])])
    return f"{FIGURE_NAMES[key[0]]} at {at}" + (f" with {key[2]:,} generated" if key[2] else "")
