"""The bill of a recording: a row per call, and what the session would take without each cause.

The time of a prefill is fitted to the recorded calls themselves, T = f + a n + b n (past + n / 2)
for n tokens after `past` cached ones. Where the server does not say how many tokens it had cached,
the same formula, from the calls that began a conversation, says it from the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core import stats
from lab.features.recording.lines import CLIENT, RecordedCall

if TYPE_CHECKING:
    import pandas as pd

LEAST_POINTS = 3
MOST_POINTS = 400  # of the formula that are left out in turn
LOW = 0.1
HIGH = 0.9
"""Quantiles of the formula's errors that a range spans."""

KNOWN = "server"
FROM_TIME = "time"


@dataclass(frozen=True)
class PrefillFormula:
    """The prefill time of one server, with the range of measured over predicted times."""

    linear_s: float
    square_s: float
    fixed_s: float
    low: float = 1.0
    high: float = 1.0
    n_points: int = 0

    def seconds(self, n_tokens: Any, n_past: Any) -> Any:
        """Seconds of n_tokens after n_past; numbers or columns."""
        squares = n_tokens * (n_past + n_tokens / 2)
        return self.fixed_s + self.linear_s * n_tokens + self.square_s * squares

    def tokens_computed(self, seconds: float, n_prompt: int) -> int:
        """The tokens at the end of a prompt that take these seconds."""
        low = 1
        high = n_prompt
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle, n_prompt - middle) < seconds:
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True)
class Mend:
    """What a session would save without one cause. Seconds."""

    cause: tuple[Any, ...]
    calls: tuple[int, ...]
    n_again: int
    again_s: float
    saved_s: float
    low_s: float
    high_s: float
    session_s: float  # with the cause
    mended_s: float


def bill(calls: Sequence[RecordedCall]) -> pd.DataFrame:
    """A row per call, in the order of the session, with `call_record` of each."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for call in calls:
        rows.append(
            {
                "call": call.call,
                "conversation": call.conversation,
                "turn": call.turn,
                "n_prompt": call.n_prompt,
                "n_cached": call.n_cached,
                "n_gen": call.n_gen,
                "n_new": call.n_new,
                "follows": call.follows,
                "is_first": call.follows is None,
                "is_broken": call.cause is not None,
                "prefill_s": prefill_s(call),
                "ttft_s": seconds(call.ttft_ns),
                "decode_s": decode_s(call),
                "total_s": call.ended_ns / 1e9,
                "is_exact": call.is_exact,
                "failure": call.failure,
            }
        )
    table = pd.DataFrame(rows)
    counts = ["n_prompt", "n_cached", "n_gen", "n_new", "prefill_s", "ttft_s", "decode_s"]
    table = table.astype(dict.fromkeys(counts, float))
    formula = fitted(table)
    table["cached_by"] = KNOWN
    table = with_cached_from_time(table, formula)
    table["n_computed"] = table.n_prompt - table.n_cached
    n_again = (table.n_computed - table.n_new.fillna(table.n_computed)).clip(lower=0)
    table["n_again"] = n_again.where(table.is_broken, 0.0)
    table["again_s"] = again_s(table, formula)
    return table


def seconds(ns: int | None) -> float:
    return math.nan if ns is None else ns / 1e9


def prefill_s(call: RecordedCall) -> float:
    """The prefill time by the server; otherwise the TTFT, or the whole time of a short answer."""
    if call.prefill_ns is not None:
        return call.prefill_ns / 1e9
    return seconds(call.ttft_ns)


def decode_s(call: RecordedCall) -> float:
    """The time of the tokens after the first; unknown if there are none."""
    if call.n_gen is not None and call.n_gen < 2:
        return math.nan
    if call.decode_ns is not None:
        return call.decode_ns / 1e9
    if call.ttft_ns is not None:
        return (call.ended_ns - call.ttft_ns) / 1e9
    return math.nan


def fitted(table: pd.DataFrame) -> PrefillFormula | None:
    """The formula of the calls with known tokens and times; None for none.

    Calls that begin a conversation count as computed whole where the server says nothing.
    """
    points = table[table.prefill_s.gt(0) & table.n_prompt.gt(0)].copy()
    if points.n_cached.isna().all():
        points = points[points.is_first].fillna({"n_cached": 0.0})
    points = points.dropna(subset=["n_cached"])
    points["n_tokens"] = points.n_prompt - points.n_cached
    points = points[points.n_tokens > 0]
    if points.empty:
        return None
    formula = formula_through(points)
    errors = errors_left_out(points)
    if not errors:
        return formula
    import pandas as pd

    ratios = pd.Series(errors)
    return PrefillFormula(
        formula.linear_s,
        formula.square_s,
        formula.fixed_s,
        float(ratios.quantile(LOW)),
        float(ratios.quantile(HIGH)),
        len(points),
    )


def formula_through(points: pd.DataFrame) -> PrefillFormula:
    """The formula through these points; with one or two, terms are left out."""
    squares = points.n_tokens * (points.n_cached + points.n_tokens / 2)
    columns = [list(points.n_tokens), [1.0] * len(points), list(squares)]
    terms = [*stats.fit(columns[: len(points)], list(points.prefill_s)), 0.0, 0.0]
    return PrefillFormula(terms[0], terms[2], terms[1], n_points=len(points))


def errors_left_out(points: pd.DataFrame) -> list[float]:
    """Measured over predicted time of each point, predicted without it."""
    if len(points) <= LEAST_POINTS:
        return []
    step = math.ceil(len(points) / MOST_POINTS)
    ratios: list[float] = []
    for index in points.index[::step]:
        formula = formula_through(points.drop(index))
        point = points.loc[index]
        expected = formula.seconds(point.n_tokens, point.n_cached)
        if expected > 0:
            ratios.append(point.prefill_s / expected)
    return ratios


def with_cached_from_time(table: pd.DataFrame, formula: PrefillFormula | None) -> pd.DataFrame:
    """The rows with cached tokens from the prefill time where the server gives none."""
    for index in table.index[table.n_cached.isna()]:
        row = table.loc[index]
        if formula is None or not row.n_prompt > 0 or not row.prefill_s > 0:
            continue
        n_computed = formula.tokens_computed(row.prefill_s, int(row.n_prompt))
        table.loc[index, "n_cached"] = row.n_prompt - n_computed
        table.loc[index, "cached_by"] = FROM_TIME
    return table


def again_s(table: pd.DataFrame, formula: PrefillFormula | None) -> pd.Series:
    """Seconds of each call that a whole cache would have saved."""
    if formula is None:
        return 0 * table.n_again
    n_new = table.n_new.fillna(table.n_computed)
    mended = formula.seconds(n_new, table.n_prompt - n_new)
    saved = (table.prefill_s - mended).clip(lower=0)
    return saved.where(table.n_again > 0, 0.0).fillna(0.0)


def cause_key(call: RecordedCall) -> tuple[Any, ...]:
    """What calls with the same cause share: the place and the kind, not the character."""
    cause = call.cause
    if cause is None:
        return ()
    return cause.by, cause.kind, cause.part, cause.role, cause.text_field, place_key(call)


def place_key(call: RecordedCall) -> int | None:
    """The index of a part near the beginning; later ones move with the conversation."""
    cause = call.cause
    is_client = cause is not None and cause.by == CLIENT
    return cause.index if cause and is_client else None


def mends(calls: Sequence[RecordedCall]) -> list[Mend]:
    """What the session would save without each cause, the largest first."""
    table = bill(calls)
    formula = fitted(table)
    table["key"] = list(map(cause_key, calls))
    session_s = float(table.total_s.sum())
    results: list[Mend] = []
    for key, rows in table[table.is_broken].groupby("key", sort=False):
        saved_s = float(rows.again_s.sum())
        low_s = saved_s
        high_s = saved_s
        if formula is not None:
            rest_s = float((rows.prefill_s - rows.again_s).sum())
            low_s = max(0.0, saved_s - (formula.high - 1) * rest_s)
            high_s = saved_s + (1 - formula.low) * rest_s
        results.append(
            Mend(
                cause=key,
                calls=tuple(rows.call),
                n_again=int(rows.n_again.sum()),
                again_s=saved_s,
                saved_s=saved_s,
                low_s=min(low_s, saved_s),
                high_s=max(high_s, saved_s),
                session_s=session_s,
                mended_s=session_s - saved_s,
            )
        )
    return sorted(results, key=lambda mend: -mend.saved_s)
