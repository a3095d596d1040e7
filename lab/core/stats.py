"""Uncertainty: confidence intervals, ratios, trends and fits.

Every interval assumes independent values from one distribution, at the level of repetition (runs, blocks, sessions).
Intervals of medians and of paired ratios are distribution-free (sign test).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """An estimated ratio, or slope per unit, with its interval."""

    estimate: float
    low: float
    high: float


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The narrowest interval of the median between two ordered values (David & Nagaraja, 7.1); None for too few."""
    n = len(values)
    outside = (1 - confidence) * (1 + 1e-9)
    if 2 * 0.5**n > outside:
        return None
    from scipy.special import bdtr

    rank = sum(
        2 * bdtr(range(n // 2), n, 0.5) <= outside
    )  # like scipy.stats.quantile_test, which takes 1 s to import
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[-rank])


def mean_half_width(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Half the interval of the mean of independent values, by Student's t; 0 for one value."""
    from scipy.special import stdtrit

    n = len(values)
    quantile = float(stdtrit(n - 1, (1 + confidence) / 2)) if n > 1 else 0.0
    return quantile * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0


def log_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of the geometric mean of positive values, by Student's t on logarithms; None for fewer than 3."""
    if len(values) < 3:
        return None
    logs = [math.log(value) for value in values]
    centre = statistics.fmean(logs)
    half = mean_half_width(logs, confidence)
    return Interval(math.exp(centre - half), math.exp(centre + half))


def paired_ratio(
    base: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio | None:
    """The median of the pairs' ratios other / base, with the interval of the sign test; None for too few pairs."""
    ratios = sorted(b / a for a, b in zip(base, other, strict=True))
    interval = median_interval(ratios, confidence)
    return Ratio(statistics.median(ratios), interval.low, interval.high) if interval else None


def repeats_needed(values: Sequence[float], share: float, confidence: float = CONFIDENCE) -> int:
    """The total number of repeats for a median within +- `share` of the truth, estimated from the first `values`.

    Stein's two-stage rule (1945) on logarithms, with the variance of a median (pi / 2 x variance / n). At least the
    number of values.
    """
    from scipy.stats import t

    n = len(values)
    spread = math.sqrt(math.pi / 2) * statistics.stdev(math.log(value) for value in values)
    return max(n, math.ceil((float(t.ppf((1 + confidence) / 2, n - 1)) * spread / share) ** 2))


def fewest_for_interval(confidence: float = CONFIDENCE) -> int:
    """The fewest values (or pairs) for an interval of a median (or of `paired_ratio`): 6 for 95 %."""
    return next(n for n in itertools.count(1) if 2 * 0.5**n <= (1 - confidence) * (1 + 1e-9))


def trend(values: Sequence[float]) -> tuple[float, float]:
    """The factor from the first to the last value (Theil-Sen on logarithms), and the p-value of Kendall's test."""
    if len(set(values)) < 2 or len(values) < 3:
        return 1.0, 1.0
    from scipy.stats import kendalltau, theilslopes

    logs = [math.log(value) for value in values]
    numbers = range(len(logs))
    change = math.exp((len(logs) - 1) * theilslopes(logs, numbers).slope)
    return change, float(kendalltau(numbers, logs).pvalue)


def slope(columns: Sequence[float], values: Sequence[float]) -> Ratio | None:
    """The Theil-Sen slope of `values` over `columns` with its interval (Sen, 1968); None for fewer than 4 columns."""
    if len(set(columns)) < 4:
        return None
    if len(set(values)) < 2:  # scipy divides by zero
        return Ratio(0.0, 0.0, 0.0)
    from scipy.stats import theilslopes

    slopes = theilslopes(values, columns, CONFIDENCE)
    return Ratio(float(slopes.slope), float(slopes.low_slope), float(slopes.high_slope))


def fit(
    columns: Sequence[Sequence[float]],
    values: Sequence[float],
    at_least: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """Coefficients >= `at_least` (0) for which the sum of coefficient x column fits `values` best, by relative error.

    Non-negative least squares with each row weighted by 1 / value, so that times of 1 ms and of 100 s count equally and
    no term of a cost is negative. The best of all subsets of columns whose own least squares are not negative: the same
    as scipy.optimize.nnls for these few columns, without the half second that its import takes.
    """
    import numpy as np

    matrix = np.array(columns, dtype=float).T
    target = np.array(values, dtype=float)
    lowest = np.zeros(len(columns)) if at_least is None else np.array(at_least, dtype=float)
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1
    rows = matrix / scale / target[:, None]
    rest = 1 - matrix @ lowest / target
    beyond = np.zeros(len(columns))
    least = float(rest @ rest)
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(columns)), n + 1) for n in range(len(columns))
    )
    for subset in map(list, subsets):
        found = np.linalg.lstsq(rows[:, subset], rest, rcond=None)[0]
        error = rest - rows[:, subset] @ found
        if (found >= 0).all() and error @ error < least * (1 - 1e-12):
            beyond = np.zeros(len(columns))
            least = float(error @ error)
            beyond[subset] = found
    return tuple(float(c) for c in lowest + beyond / scale)
