"""Uncertainty: confidence intervals, ratios, trends and fits.

Every interval assumes independent values from one distribution, at the level of repetition (runs,
blocks, sessions). Intervals of medians and of paired ratios are distribution-free (sign test).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
Range = tuple[float, float]  # the ends of a range
ROUNDING = 1e-9  # a probability that is larger than its limit only by rounding is within it


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


def median_interval(
    values: Sequence[float], confidence: float = CONFIDENCE
) -> Interval | None:
    """The narrowest interval of the median between two of the ordered values; None for too few.

    David & Nagaraja, "Order statistics", 7.1. Equal to `scipy.stats.quantile_test`, which takes 1 s
    to import.
    """
    n = len(values)
    if n < fewest_for_interval(confidence):
        return None
    from scipy.special import bdtr

    most_outside = (1 - confidence) * (1 + ROUNDING)
    outside = 2 * bdtr(range(n // 2), n, 0.5)  # the chance that rank 0, 1, ... are beyond
    rank = int((outside <= most_outside).sum())
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[-rank])


def mean_half_width(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Half the interval of the mean of independent values, by Student's t; 0 for one value."""
    n = len(values)
    if n < 2:
        return 0.0
    from scipy.special import stdtrit

    quantile = float(stdtrit(n - 1, (1 + confidence) / 2))
    return quantile * statistics.stdev(values) / math.sqrt(n)


def further_half_width(values: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Half the interval around the mean that holds a further value, by Student's t."""
    return mean_half_width(values, confidence) * math.sqrt(len(values) + 1)


def log_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of the geometric mean of positive values; None for fewer than 3.

    By Student's t on logarithms.
    """
    if len(values) < 3:
        return None
    logs = list(map(math.log, values))
    centre = statistics.fmean(logs)
    half = mean_half_width(logs, confidence)
    return Interval(math.exp(centre - half), math.exp(centre + half))


def paired_ratio(
    baseline: Sequence[float], candidate: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio | None:
    """The median of the pairs' ratios candidate / baseline; None for too few pairs.

    The interval is the interval of the sign test.
    """
    pairs = zip(baseline, candidate, strict=True)
    ratios = [numerator / denominator for denominator, numerator in pairs]
    interval = median_interval(ratios, confidence)
    if interval is None:
        return None
    return Ratio(statistics.median(ratios), interval.low, interval.high)


def repeats_needed(
    values: Sequence[float], share: float, confidence: float = CONFIDENCE
) -> int:
    """The number of repeats for a median within +- `share` of the truth, from the first `values`.

    Stein's two-stage rule (1945) on logarithms, with the variance of a median (pi / 2 x variance /
    n). At least the number of values.
    """
    from scipy.stats import t

    n = len(values)
    logs = list(map(math.log, values))
    spread = math.sqrt(math.pi / 2) * statistics.stdev(logs)
    quantile = float(t.ppf((1 + confidence) / 2, n - 1))
    return max(n, math.ceil((quantile * spread / share) ** 2))


def fewest_for_interval(confidence: float = CONFIDENCE) -> int:
    """The fewest values for an interval of a median (pairs, of `paired_ratio`): 6 for 95 %."""
    n = 1
    while 2 * 0.5**n > (1 - confidence) * (1 + ROUNDING):
        n += 1
    return n


def trend(values: Sequence[float]) -> tuple[float, float]:
    """The factor from the first to the last value, and the p-value of Kendall's test.

    The factor is Theil-Sen's on logarithms. Fewer than 3 values, or equal ones, have no trend:
    factor 1, p-value 1.
    """
    if len(set(values)) < 2 or len(values) < 3:
        return 1.0, 1.0
    from scipy.stats import kendalltau, theilslopes

    logs = list(map(math.log, values))
    positions = range(len(logs))
    change = math.exp((len(logs) - 1) * theilslopes(logs, positions).slope)
    return change, float(kendalltau(positions, logs).pvalue)


def slope(columns: Sequence[float], values: Sequence[float]) -> Ratio | None:
    """The Theil-Sen slope of `values` over `columns` with its interval (Sen, 1968).

    None for fewer than 4 different columns.
    """
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
    """Coefficients >= `at_least` (0) for which the sum of coefficient x column fits `values` best.

    Non-negative least squares with each row weighted by 1 / value, so that times of 1 ms and of
    100 s count equally and no term of a cost is negative. The best of all subsets of columns whose
    own least squares are not negative: the same as scipy.optimize.nnls for these few columns,
    without the half second that its import takes.
    """
    import numpy as np

    matrix = np.array(columns, dtype=float).T
    target = np.array(values, dtype=float)
    lowest = np.zeros(len(columns))
    if at_least is not None:
        lowest += at_least
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1
    rows = matrix / scale / target[:, None]
    remainder = 1 - matrix @ lowest / target  # what the lowest coefficients leave, as a share
    best = np.zeros(len(columns))
    least_error = float(remainder @ remainder)
    for subset in _subsets(len(columns)):
        coefficients = np.linalg.lstsq(rows[:, subset], remainder, rcond=None)[0]
        residual = remainder - rows[:, subset] @ coefficients
        error = float(residual @ residual)
        if (coefficients >= 0).all() and error < least_error * (1 - 1e-12):
            least_error = error
            best = np.zeros(len(columns))
            best[subset] = coefficients
    coefficients = lowest + best / scale
    return tuple(coefficients.tolist())


def _subsets(n: int) -> Iterator[list[int]]:
    """The subsets of n columns but the empty one, the smallest first."""
    for size in range(1, n + 1):
        for subset in itertools.combinations(range(n), size):
            yield list(subset)
