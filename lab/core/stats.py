"""How sure a figure is: intervals, ratios, trends and fits, without assuming how noise is distributed.

Times on a busy machine have no bell curve, so nothing here rests on one. Every interval comes from counting:
if nothing but chance decided on which side of the truth a value falls, all outcomes would be equally likely,
and those that are too rare are left out. `counts[i]` is how many outcomes have the statistic i. The price is
honest: with too few values there is no interval at all.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
MOST_EXACT = 60
"""Values up to which outcomes are counted; beyond it the normal curve is as good."""


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """How many times the base a figure is: the estimate and its interval."""

    estimate: float
    low: float
    high: float


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of the median between two of the ordered values; None where there are too few (6 for 95 %).

    Each value falls below the true median with probability 1/2, whatever its distribution, so the number
    that do is binomial (David & Nagaraja, Order Statistics, 7.1).
    """
    n = len(values)
    if n > MOST_EXACT:
        rank = _normal_rank(n / 2, math.sqrt(n) / 2, confidence)
    else:
        rank = _rank(_binomial_counts(n), confidence)
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[-rank]) if rank else None


def ratio(base: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """other / base of two independent samples of positive values; None where they are too few.

    Hodges and Lehmann's estimate on logarithms: the median of all pairwise ratios. Its interval holds the
    ratios that the exact two-sided rank-sum test does not reject (4 against 4 are the fewest for 95 %).
    """
    n, m = len(base), len(other)
    pairs = sorted(math.log(b / a) for a, b in itertools.product(base, other))
    if max(n, m) > MOST_EXACT:
        rank = _normal_rank(n * m / 2, math.sqrt(n * m * (n + m + 1) / 12), confidence)
    else:
        rank = _rank(_rank_sum_counts(n, m), confidence)
    if not rank:
        return None
    return Ratio(*map(math.exp, (statistics.median(pairs), pairs[rank - 1], pairs[-rank])))


def paired_ratio(base: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """other / base of values that belong together pair by pair; None where they are too few (6 for 95 %).

    The median of the pairs' ratios with its interval (the sign test, inverted). The signed-rank test would be
    a little narrower on quiet machines, but there a single spike in ten pairs widens the interval beyond use.
    """
    ratios = sorted(b / a for a, b in zip(base, other, strict=True))
    interval = median_interval(ratios, confidence)
    return Ratio(statistics.median(ratios), interval.low, interval.high) if interval else None


def fewest(paired: bool, confidence: float = CONFIDENCE) -> int:
    """How many values a side `paired_ratio`, or `ratio`, must have to give an interval."""
    counts = _binomial_counts if paired else lambda n: _rank_sum_counts(n, n)
    return next(n for n in itertools.count(1) if _rank(counts(n), confidence))


def trend(values: Sequence[float]) -> tuple[float, float]:
    """By what factor `values` changed from first to last, and how likely chance does so much (two-sided).

    Theil and Sen's slope of the logarithms; Kendall's exact test against no trend. (1, 1) for under 3 values.
    """
    n = len(values)
    if n < 3:
        return 1.0, 1.0
    logs = [math.log(value) for value in values]
    pairs = list(itertools.combinations(range(n), 2))
    change = math.exp((n - 1) * statistics.median((logs[j] - logs[i]) / (j - i) for i, j in pairs))
    falls = sum(logs[j] < logs[i] for i, j in pairs)
    fewest = min(falls, len(pairs) - falls)
    if n > MOST_EXACT:
        spread = math.sqrt(n * (n - 1) * (2 * n + 5) / 72)
        return change, min(1.0, 2 * statistics.NormalDist().cdf((fewest - len(pairs) / 2) / spread))
    counts = [1]
    for i in range(1, n):  # a new value has 0 to i of the earlier ones above it
        counts = _product(counts, range(i + 1))
    return change, min(1.0, 2 * sum(counts[: fewest + 1]) / math.factorial(n))


def fit(
    columns: Sequence[Sequence[float]], values: Sequence[float], at_least: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Coefficients >= `at_least` (0) that bring the sum of coefficient x column nearest to `values`, by relative error.

    Non-negative least squares (Lawson & Hanson), each row weighted by 1 / value: times of 1 ms and of 100 s
    count alike, and no term of a cost can be negative.
    """
    import numpy as np
    from scipy.optimize import nnls

    matrix, target = np.array(columns, dtype=float).T, np.array(values, dtype=float)
    lowest = np.zeros(len(columns)) if at_least is None else np.array(at_least, dtype=float)
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1
    beyond, _ = nnls(matrix / scale / target[:, None], 1 - matrix @ lowest / target)
    return tuple(float(c) for c in lowest + beyond / scale)


def _rank(counts: Sequence[int], confidence: float) -> int:
    """How many of the rarest outcomes can be left out on each side; 0: not even one, there are too few values."""
    total, tail = sum(counts), 0
    for rank, count in enumerate(counts):
        tail += count
        if 2 * tail > (1 - confidence) * total * (1 + 1e-9):
            return rank
    raise AssertionError("the tail of a distribution is all of it")


def _normal_rank(mean: float, spread: float, confidence: float) -> int:
    return max(0, math.floor(mean + statistics.NormalDist().inv_cdf((1 - confidence) / 2) * spread + 0.5))


def _binomial_counts(n: int) -> list[int]:
    """Of all ways in which n values fall below or above a median: in how many i fall below."""
    return [math.comb(n, i) for i in range(n + 1)]


def _rank_sum_counts(n: int, m: int) -> list[int]:
    """Of all orders of n and m values: in how many i of the n x m pairs are the wrong way round."""
    counts = [1] + [0] * (n * m)
    for i in range(1, m + 1):  # the Gaussian binomial: times (1 - q^(n+i)), over (1 - q^i)
        for k in range(n * m, n + i - 1, -1):
            counts[k] -= counts[k - n - i]
        for k in range(i, n * m + 1):
            counts[k] += counts[k - i]
    return counts


def _product(counts: Sequence[int], shifts: Iterable[int]) -> list[int]:
    """Counts of a statistic to which each outcome of a further choice adds one of `shifts`."""
    shifts = list(shifts)
    total = [0] * (len(counts) + max(shifts))
    for shift in shifts:
        for i, count in enumerate(counts):
            total[i + shift] += count
    return total
