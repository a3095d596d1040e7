"""Figures in words: numbers with three significant digits and a unit, and sentences on the rows of a summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.core.lists import join_and
from lab.core.shown import Shown

if TYPE_CHECKING:
    import pandas as pd


def digits(value: float) -> str:
    """A number with three significant digits, and thousands separated."""
    if value != value:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def times(factor: float) -> str:
    """A factor with three significant digits: 1.93x, 5x, 1,200x."""
    return f"{factor:,.0f}x" if factor >= 100 else f"{factor:.3g}x"


def percent(share: float) -> str:
    """A share with one decimal: 0.5 %, 2.5 %, 12.3 %, 100 %."""
    return f"{100 * share:.1g} %" if abs(share) < 0.001 else f"{round(100 * share, 1):,g} %"


def seconds(value: float) -> str:
    """A time with three significant digits and a unit: 62.6 s, 2.58 ms, 640 us, 1.20 ns."""
    if value != value or not value:
        return "-" if value else "0 s"
    units = {"s": 1.0, "ms": 1e3, "us": 1e6}
    unit = next((unit for unit, factor in units.items() if value * factor >= 1), "ns")
    return f"{digits(value * units.get(unit, 1e9))} {unit}"


def ends(one: Shown) -> str:
    """The interval or range of a figure; "" for a single run or a missing value."""
    if one.low is None or one.high is None or one.value != one.value:
        return ""
    return f"{digits(one.low)}-{digits(one.high)}"


def sentences(summary_rows: pd.DataFrame) -> list[str]:
    """Sentences on rows of one setup and one n_gen that are `table.firm`: prefill, decode, and prefill's share."""
    rows = summary_rows[summary_rows.prefill_share.notna()].sort_values("n_prompt")
    if len(rows) < 2:
        return [_where_the_time_went(rows)] if len(rows) else []
    short, long, before = rows.iloc[0], rows.iloc[-1], rows.iloc[-2]
    if (far := rows[rows.n_prompt <= long.n_prompt / 2]).size:  # a step of a few percent shows nothing
        before = far.iloc[-1]
    n_times = long.n_prompt / before.n_prompt
    per_token = long.prefill_s / before.prefill_s / n_times
    clear = _apart(long, before, "prefill_s", long.n_prompt, before.n_prompt)
    growth = (
        f"{times(per_token)} per token, because each token attends to more earlier ones"
        if clear and per_token > 1.1
        else f"{times(per_token)} per token, because short prompts underuse the hardware"
        if clear and per_token < 0.9
        else "about in proportion"
    )
    words = [
        f"Prefill of {long.n_prompt:,} tokens took {times(per_token * n_times)} as long as for {before.n_prompt:,} "
        f"({times(n_times)} the tokens): {growth}."
    ]
    if long.tpot_ms > 0 and short.tpot_ms > 0:  # not NaN: there was decoding
        slower = long.tpot_ms / short.tpot_ms
        reason = ", because each step reads the whole KV cache"
        words.append(
            f"Decode took {digits(short.tpot_ms)} ms per token after {short.n_prompt:,} prompt tokens and "
            f"{digits(long.tpot_ms)} ms after {long.n_prompt:,} ({times(slower)})"
            f"{reason if _apart(long, short, 'tpot_ms', 1, 1) and slower > 1.1 else ''}."
        )
    is_sweep = rows.sweep_every.notna().all()  # it generates too few tokens for a share
    return words + ([] if is_sweep else [_where_the_time_went(rows)])


def _apart(one: pd.Series, other: pd.Series, figure: str, per_one: float, per_other: float) -> bool:
    """Whether the ranges of a figure (each over its own unit) do not overlap. A single run has no range."""
    if min(one.repeats, other.repeats) < 2:
        return False
    low, high = one[f"{figure}_min"] / per_one, one[f"{figure}_max"] / per_one
    return bool(low > other[f"{figure}_max"] / per_other or high < other[f"{figure}_min"] / per_other)


def _where_the_time_went(rows: pd.DataFrame) -> str:
    rows = rows if len(rows) <= 5 else rows.iloc[[0, len(rows) // 2, -1]]
    parts = [f"{100 * row.prefill_share:.0f} % of the time at {row.n_prompt:,}" for row in rows.itertuples()]
    parts[1:] = [part.replace(" of the time", "") for part in parts[1:]]
    rest = f"decoding {rows.n_gen.iloc[0]:,} tokens" if rows.n_gen.iloc[0] > 1 else "sampling one token"
    return f"Prefill took {join_and(parts)} prompt tokens; {rest} took the rest."
