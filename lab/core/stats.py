"""How sure a figure is: intervals, ratios, trends and fits.

Every interval assumes that its values were drawn independently from one distribution, at the level at which they
were repeated (runs, blocks, sessions). Intervals of medians and of paired ratios assume nothing about its shape: they
count outcomes, and those that are too rare are left out (`counts[i]` is how many outcomes have the statistic i). The
ratio between sessions, of which there are few, assumes that logarithms are about normal.
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


@dataclass(frozen=True)
class Centre:
    """A typical value: its logarithm, the variance of that, and the degrees of freedom with which that is known."""

    log: float
    variance: float
    df: float


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


def session_centre(sessions: Sequence[Sequence[float]], sd: float, df: float) -> Centre:
    """The typical value of sessions of positive values, and how sure it is. ValueError for a session of one value.

    A session's centre is the median of its values' logarithms; its variance is that of such a median (pi / 2 x
    variance / n, for normal values), but at least `sd`^2: how much sessions differ from each other, known with `df`
    degrees of freedom. Sessions are averaged.
    """
    centres, variances, dfs = [], [], []
    for values in sessions:
        logs = [math.log(value) for value in values]
        own = math.pi / 2 * statistics.variance(logs) / len(logs)
        centres.append(statistics.median(logs))
        variances.append(max(own, sd**2))
        dfs.append(df if sd**2 >= own else len(logs) - 1)
    n = len(sessions)
    return Centre(statistics.fmean(centres), sum(variances) / n**2, _joint_df([v / n**2 for v in variances], dfs))


def ratio(base: Centre, other: Centre, confidence: float = CONFIDENCE) -> Ratio:
    """other / base with the interval of Welch's t-test on logarithms.

    It assumes that sessions are independent, and that logarithms of their centres are about normally distributed.
    """
    from scipy.stats import t

    variance = base.variance + other.variance
    df = _joint_df([base.variance, other.variance], [base.df, other.df])
    half = float(t.ppf((1 + confidence) / 2, df)) * math.sqrt(variance)
    difference = other.log - base.log
    return Ratio(*map(math.exp, (difference, difference - half, difference + half)))


def _joint_df(variances: Sequence[float], dfs: Sequence[float]) -> float:
    """Welch and Satterthwaite's degrees of freedom of a sum of variances."""
    parts = sum(variance**2 / df for variance, df in zip(variances, dfs, strict=True))
    return sum(variances) ** 2 / parts if parts else math.inf


def paired_ratio(base: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE) -> Ratio | None:
    """other / base of values that belong together pair by pair; None where they are too few (6 for 95 %).

    The median of the pairs' ratios with its interval (the sign test, inverted). The signed-rank test would be
    a little narrower on quiet machines, but there a single spike in ten pairs widens the interval beyond use.
    """
    ratios = sorted(b / a for a, b in zip(base, other, strict=True))
    interval = median_interval(ratios, confidence)
    return Ratio(statistics.median(ratios), interval.low, interval.high) if interval else None


def repeats_needed(values: Sequence[float], share: float, confidence: float = CONFIDENCE) -> int:
    """How many repeats in all bring a median within +- `share` of the truth, judged by these first ones.

    Stein's two-stage rule (1945) on logarithms, with the variance of a median (pi / 2 x variance / n). Never fewer
    than the values that there are.
    """
    from scipy.stats import t

    n = len(values)
    spread = math.sqrt(math.pi / 2) * statistics.stdev(math.log(value) for value in values)
    return max(n, math.ceil((float(t.ppf((1 + confidence) / 2, n - 1)) * spread / share) ** 2))


def fewest_pairs(confidence: float = CONFIDENCE) -> int:
    """How many pairs `paired_ratio` must have to give an interval."""
    return next(n for n in itertools.count(1) if _rank(_binomial_counts(n), confidence))


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


def fit(columns: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Coefficients >= 0 that bring the sum of coefficient x column nearest to `values`, by relative error.

    Non-negative least squares (Lawson & Hanson), each row weighted by 1 / value: times of 1 ms and of 100 s
    count alike, and no term of a cost can be negative.
    """
    import numpy as np
    from scipy.optimize import nnls

    matrix, target = np.array(columns, dtype=float).T, np.array(values, dtype=float)
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1
    coefficients, _ = nnls(matrix / scale / target[:, None], np.ones_like(target))
    return tuple(float(c) for c in coefficients / scale)


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


def _product(counts: Sequence[int], shifts: Iterable[int]) -> list[int]:
    """Counts of a statistic to which each outcome of a further choice adds one of `shifts`."""
    shifts = list(shifts)
    total = [0] * (len(counts) + max(shifts))
    for shift in shifts:
        for i, count in enumerate(counts):
            total[i + shift] += count
    return total
