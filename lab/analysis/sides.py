"""What of a group is compared: the values of every figure at every length, and how sure one can be of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.analysis.setup_columns import is_request
from lab.analysis.spread import Spread, spread_of
from lab.core import energy

if TYPE_CHECKING:
    import pandas as pd

FIGURE_NAMES = {
    "prefill_s": "prefill",
    "ttft_s": "TTFT",
    "tpot_ms": "TPOT",
    "decode_ms": "decode compute",
    "prefill_j": "J per prompt",
    "decode_j_per_token": "J per token",
    "cold_s": "TTFT, nothing cached",
    "cached_s": "TTFT, prefix cached",
    "ram_s": "TTFT, prefix from RAM",
    "disk_s": "TTFT, prefix from disk",
    "gap_ms": "longest gap",
    "newcomer_s": "TTFT of the newcomer",
}
"""The figures that are compared; those of experiments come last. TTFT is one where a side is a server."""

OF_PROMPTS = ("prefill_s", "ttft_s", "prefill_j")
"""Those that do not depend on how much is generated."""

Key = tuple[str, int, int | None, str | None]  # figure, n_prompt, n_gen, lever
Values = dict[tuple[str, Any], list[float]]  # by (session, block); block is None outside of `lab ab`


@dataclass(frozen=True)
class Side:
    """The values of a figure of one group, and how much its machine's sessions differ."""

    values: Values
    spread: Spread
    is_doubtful: bool  # half of its runs or more were disturbed
    sources: tuple[str, ...] = ()  # of energy: what it is of; several where its runs differ


def compared_figures(groups: Sequence[pd.DataFrame]) -> list[str]:
    """The names of FIGURE_NAMES that groups are compared by: TTFT only where one of them is of requests to a server."""
    has_requests = any(is_request(rows.iloc[0]) for rows in groups)
    return [figure for figure in FIGURE_NAMES if figure != "ttft_s" or has_requests]


def sides_of(rows: pd.DataFrame, known: dict[tuple[Any, str], Spread], figures: Sequence[str]) -> dict[Key, Side]:
    """Those of `figures` that a group has: at which length, and the values of its runs."""
    values_of: dict[Key, Values] = {}
    sources: dict[Key, set[str]] = {}
    for row in rows.to_dict("records"):
        unit = row["session"], row["block"] if row["block"] == row["block"] else None
        lever = row["lever"] if isinstance(row["lever"], str) else None
        for figure in set(figures) & row.keys():
            if row[figure] > 0:  # neither NaN nor a time that a damaged file made up
                key = figure, row["n_prompt"], None if figure in OF_PROMPTS else row["n_gen"], lever
                values_of.setdefault(key, {}).setdefault(unit, []).append(row[figure])
                if figure in energy.COMPARED:
                    sources.setdefault(key, set()).add(row["energy_source"])
    first = {lever: i for i, lever in enumerate(dict.fromkeys(rows.lever))}
    names = list(FIGURE_NAMES)
    in_order = sorted(
        values_of.items(),
        key=lambda item: (
            item[0][3] is not None,
            item[0][1],
            first.get(item[0][3], 0),
            item[0][2] or 0,
            names.index(item[0][0]),
        ),
    )
    spreads = {figure: spread_of(rows, figure, known) for figure in figures}
    is_doubtful = 2 * rows.disturbed.sum() >= len(rows)
    return {
        key: Side(values, spreads[key[0]], is_doubtful, tuple(sorted(sources.get(key, ())))) for key, values in in_order
    }


def is_of_one_source(base: Side, other: Side) -> bool:
    """Whether both are no energy, or energy from one kind of source, the same."""
    return base.sources == other.sources and len(base.sources) < 2


def is_second_choice(key: Key, keys: Sequence[Key]) -> bool:
    """Decode compute stands in for TPOT only where one side has no TPOT (imported results)."""
    return key[0] == "decode_ms" and ("tpot_ms", *key[1:]) in keys


def without(figures: Mapping[Key, Side], compared: Sequence[Key]) -> tuple[str, ...]:
    """The names of the figures that were not compared; of two about the same decoding, one."""
    done = {(_kind(key[0]), *key[1:]) for key in compared}
    names: dict[tuple[object, ...], str] = {}
    for key in figures:
        names.setdefault((_kind(key[0]), *key[1:]), name_of(key))
    return tuple(name for what, name in names.items() if what not in done)


def _kind(figure: str) -> str:
    """TPOT and decode compute are about the same decoding."""
    return "tpot_ms" if figure == "decode_ms" else figure


def name_of(key: Key) -> str:
    at = ", ".join([*([f"{key[1]:,}"] if key[1] else []), *([key[3]] if key[3] else [])])
    return f"{FIGURE_NAMES[key[0]]} at {at}" + (f" with {key[2]:,} generated" if key[2] else "")
