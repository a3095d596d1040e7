"""The bill of a recording: a row per call, and what the session would take without each cause.

The time of a prefill is fitted to the recorded calls themselves, T = f + a n + b n (past + n / 2)
for n tokens after `past` cached ones. Where the server does not say how many tokens it had cached,
the same formula, from the calls that began a conversation, says it from the time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core import stats
from lab.features.recording.lines import CLIENT, RecordedCall

if TYPE_CHECKING:
    import pandas as pd

MOST_TERMS = 3
LEAST_SPAN = 2.0  # times as many tokens: below, a fixed time and a time per token look alike
FEW_POINTS = 10  # whose errors are taken whole: quantiles of fewer say little
LEAST_ERROR = 0.01  # no prefill repeats more exactly
WORSE = 1.5  # as large as the least errors: of formulas that the points do not tell apart
MOST_POINTS = 400  # of the formula that are left out in turn
LOW = 0.1
HIGH = 0.9
"""Quantiles of the formula's errors that a range spans."""

KNOWN = "server"
FROM_TIME = "time"


@dataclass(frozen=True)
class PrefillFormula:
    """The prefill time of one server, with the range of measured over predicted times; None: too
    few calls to know it."""

    linear_s: float
    square_s: float
    fixed_s: float
    low: float | None = None
    high: float | None = None
    others: tuple[PrefillFormula, ...] = ()
    """Formulas with fewer terms that fit the calls as well."""

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
    """What a session would save without one cause. Seconds; None: not known."""

    cause: tuple[object, ...]
    calls: tuple[int, ...]
    n_again: int | None
    again_s: float | None
    saved_s: float | None
    low_s: float | None
    high_s: float | None
    session_s: float  # with the cause
    mended_s: float | None


def bill(calls: Sequence[RecordedCall]) -> pd.DataFrame:
    """A row per call, in the order of the session, with `call_record` of each."""
    import pandas as pd

    rows: list[dict[str, object]] = []
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
    n_again = (table.n_computed - table.n_new).clip(lower=0)
    table["n_again"] = n_again.where(table.is_broken, 0.0)
    table["again_s"] = again_s(table, formula)
    return table


def seconds(ns: int | None) -> float:
    return math.nan if ns is None else ns / 1e9


def prefill_s(call: RecordedCall) -> float:
    """The prefill time by the server; otherwise the TTFT. Unknown for an answer that was not
    streamed."""
    if call.prefill_ns is not None and not call.has_impossible_times:
        return min(call.prefill_ns, call.ended_ns) / 1e9
    return seconds(call.ttft_ns)


def decode_s(call: RecordedCall) -> float:
    """The time of the tokens after the first; unknown if there are none."""
    if call.n_gen is not None and call.n_gen < 2:
        return math.nan
    if call.decode_ns is not None and not call.has_impossible_times:
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
    n_most = most_terms(points)
    formula = formula_through(points, n_most)
    errors = errors_left_out(points, n_most)
    if not errors or not have_lengths(points):
        return formula
    others = []
    for n_terms in range(1, n_most):
        if spread(errors_left_out(points, n_terms)) <= WORSE * max(
            LEAST_ERROR, spread(errors)
        ):
            others.append(formula_through(points, n_terms))
    low, high = range_of(errors)
    return dataclasses.replace(formula, low=low, high=high, others=tuple(others))


def most_terms(points: pd.DataFrame) -> int:
    """How many terms these points can tell apart: fewer than there are points, and a fixed time
    only if their lengths differ."""
    return max(1, min(MOST_TERMS, len(points) - 1)) if have_lengths(points) else 1


def have_lengths(points: pd.DataFrame) -> bool:
    """Whether calls computed such different numbers of tokens that a formula says what few take."""
    return bool(points.n_tokens.max() >= LEAST_SPAN * points.n_tokens.min())


def formula_through(points: pd.DataFrame, n_terms: int) -> PrefillFormula:
    """The formula with this many terms through these points: tokens, a fixed time, and tokens times
    positions. A fit of shares lies below times that scatter, so its mean error is taken out."""
    squares = points.n_tokens * (points.n_cached + points.n_tokens / 2)
    columns = [list(points.n_tokens), [1.0] * len(points), list(squares)]
    terms = [*stats.fit(columns[:n_terms], list(points.prefill_s)), 0.0, 0.0]
    formula = PrefillFormula(terms[0], terms[2], terms[1])
    expected = formula.seconds(points.n_tokens, points.n_cached)
    if not (expected > 0).all():
        return formula
    level = float((points.prefill_s / expected).mean())
    return PrefillFormula(level * terms[0], level * terms[2], level * terms[1])


def errors_left_out(points: pd.DataFrame, n_terms: int) -> list[float]:
    """Measured over predicted time of each point, predicted without it; none if the others would
    not be more than the terms."""
    if len(points) - 1 <= n_terms:
        return []
    step = math.ceil(len(points) / MOST_POINTS)
    ratios: list[float] = []
    for index in points.index[::step]:
        formula = formula_through(points.drop(index), n_terms)
        point = points.loc[index]
        expected = formula.seconds(point.n_tokens, point.n_cached)
        if expected > 0:
            ratios.append(point.prefill_s / expected)
    return ratios


def spread(ratios: Sequence[float]) -> float:
    """The median distance of ratios from 1, as logarithms."""
    distances = sorted(abs(math.log(ratio)) for ratio in ratios if ratio > 0)
    return distances[len(distances) // 2] if distances else math.inf


def range_of(ratios: Sequence[float]) -> tuple[float, float]:
    """The range of measured over predicted times: all of a few, 80 % of many."""
    import pandas as pd

    column = pd.Series(ratios)
    is_few = len(ratios) < FEW_POINTS
    low = float(column.min() if is_few else column.quantile(LOW))
    high = float(column.max() if is_few else column.quantile(HIGH))
    return min(low, 1 - LEAST_ERROR), max(high, 1 + LEAST_ERROR)


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
    """Seconds of each call that a whole cache would have saved; unknown where tokens are."""
    seconds = math.nan * table.n_again
    if formula is not None:
        mended = formula.seconds(table.n_new, table.n_prompt - table.n_new)
        seconds = (table.prefill_s - mended).clip(lower=0)
    return seconds.where(table.n_again != 0, 0.0)


def cause_key(call: RecordedCall) -> tuple[object, ...]:
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
    results = []
    for key, rows in table[table.is_broken].groupby("key", sort=False):
        results.append(mend(key, rows, formula, float(table.total_s.sum())))
    return sorted(results, key=lambda mend: -(mend.saved_s or 0))


def mend(
    key: tuple[object, ...],
    rows: pd.DataFrame,
    formula: PrefillFormula | None,
    session_s: float,
) -> Mend:
    """What the session would save without the cause of these calls."""
    saved_s = known_sum(rows.again_s)
    low_s, high_s = saved_range(rows, formula)
    n_again = known_sum(rows.n_again)
    return Mend(
        cause=key,
        calls=tuple(rows.call),
        n_again=None if n_again is None else int(n_again),
        again_s=saved_s,
        saved_s=saved_s,
        low_s=low_s,
        high_s=high_s,
        session_s=session_s,
        mended_s=None if saved_s is None else session_s - saved_s,
    )


def known_sum(column: pd.Series) -> float | None:
    """The sum of the known values; None if none is known."""
    return None if column.isna().all() else float(column.sum())


def saved_range(
    rows: pd.DataFrame, formula: PrefillFormula | None
) -> tuple[float | None, float | None]:
    """The least and the most seconds that the calls would save: by the formula's errors, and by
    other formulas that fit the calls as well."""
    known = rows[rows.again_s > 0]
    if formula is None or formula.low is None or formula.high is None or known.empty:
        return None, None
    n_past = known.n_prompt - known.n_new
    rests = []
    for candidate in (formula, *formula.others):
        rests.append(candidate.seconds(known.n_new, n_past).clip(upper=known.prefill_s))
    rest_s = [float(rest.sum()) for rest in rests]
    prefill_s = float(known.prefill_s.sum())
    low_s = prefill_s - formula.high * max(rest_s)
    high_s = prefill_s - formula.low * min(rest_s)
    saved_s = float(known.again_s.sum())
    low_s = max(0.0, min(low_s, (1 - LEAST_ERROR) * saved_s))
    return low_s, min(prefill_s, max(high_s, (1 + LEAST_ERROR) * saved_s))
