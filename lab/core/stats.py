"""How sure a figure is: intervals, ratios, trends and fits.

Every interval assumes that its values were drawn independently from one distribution, at the level at which they
were repeated (runs, blocks, sessions). Intervals of medians and of paired ratios assume nothing about its shape: they
count on which side of the truth values fall, and leave the rarest outcomes out. The ratio between sessions, of which
there are few, assumes that logarithms are about normal.
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
    """How many times the base a figure is, or per unit how large: the estimate and its interval."""

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
    that do is binomial (David & Nagaraja, Order Statistics, 7.1). As narrow as its confidence allows.
    """
    n, outside = len(values), (1 - confidence) * (1 + 1e-9)
    if 2 * 0.5**n > outside:
        return None
    from scipy.special import bdtr

    rank = sum(2 * bdtr(range(n // 2), n, 0.5) <= outside)  # of scipy.stats, quantile_test says the same, 1 s later
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[-rank])


def log_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of the geometric mean of positive values by Student's t on their logarithms; None for fewer than 3.

    Narrower than the order of 3 to 5 values allows, because it assumes that logarithms are about normal.
    """
    n = len(values)
    if n < 3:
        return None
    from scipy.stats import t

    logs = [math.log(value) for value in values]
    half = float(t.ppf((1 + confidence) / 2, n - 1)) * statistics.stdev(logs) / math.sqrt(n)
    centre = statistics.fmean(logs)
    return Interval(math.exp(centre - half), math.exp(centre + half))


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


def interval_of_shares(shares: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of the mean of repeated shares between 0 and 1, which lies between 0 and 1; None for fewer than 3.

    Student's t on logits; where a share is 1 or more (its ceiling is too low), on logarithms, cut at 1.
    """
    if any(share >= 1 for share in shares):
        whole = log_interval(shares, confidence)
        return whole and Interval(min(1.0, whole.low), 1.0)
    odds = log_interval([share / (1 - share) for share in shares], confidence)
    return odds and Interval(odds.low / (1 + odds.low), odds.high / (1 + odds.high))


def share_interval(
    good: Sequence[Sequence[bool]], alike: Sequence[Sequence[bool]] = (), confidence: float = CONFIDENCE
) -> Interval:
    """The interval of a share of which batches were drawn, such as of requests that came one after the other.

    Clopper and Pearson's binomial interval of so many independent draws as the batches are worth (Korn & Graubard,
    Survey Methodology 24, 1998): fewer where good ones come in bunches, so that batches differ by more than chance.
    `alike` are batches of what bunches in the same way; the stronger bunching counts. ValueError without a draw.
    """
    from scipy.special import betaincinv, stdtrit

    n, n_good = sum(map(len, good)), sum(map(sum, good))
    if not n:
        raise ValueError("there is no draw")
    outside = (1 - confidence) / 2
    n_worth, effect = float(n), max(_design_effect(good), _design_effect(alike))
    if effect > 1:  # known from few batches only
        t_all, t_batches = (stdtrit(df, 1 - outside) for df in (n - 1, sum(map(bool, good)) - 1))
        n_worth *= (t_all / t_batches) ** 2 / effect
    bad_worth = n_worth * (n - n_good) / n
    low = betaincinv(n_worth - bad_worth, bad_worth + 1, outside) if n_good else 0.0
    high = betaincinv(n_worth - bad_worth + 1, bad_worth, 1 - outside) if n_good < n else 1.0
    return Interval(float(low), float(high))


def _design_effect(batches: Sequence[Sequence[bool]]) -> float:
    """How many times the variance of a share is that of independent draws; 0 where it cannot be known."""
    own, n, n_good = [batch for batch in batches if batch], sum(map(len, batches)), sum(map(sum, batches))
    if len(own) < 2 or n_good in (0, n):
        return 0.0
    share = n_good / n
    between = sum((sum(batch) - share * len(batch)) ** 2 for batch in own) / n
    return len(own) / (len(own) - 1) * between / (share * (1 - share))


def repeats_needed(values: Sequence[float], share: float, confidence: float = CONFIDENCE) -> int:
    """How many repeats in all bring a median within +- `share` of the truth, judged by these first ones.

    Stein's two-stage rule (1945) on logarithms, with the variance of a median (pi / 2 x variance / n). Never fewer
    than the values that there are.
    """
    from scipy.stats import t

    n = len(values)
    spread = math.sqrt(math.pi / 2) * statistics.stdev(math.log(value) for value in values)
    return max(n, math.ceil((float(t.ppf((1 + confidence) / 2, n - 1)) * spread / share) ** 2))


def fewest_for_interval(confidence: float = CONFIDENCE) -> int:
    """How many values (or pairs) a median must have (or `paired_ratio`) to have an interval: 6 for 95 %."""
    return next(n for n in itertools.count(1) if 2 * 0.5**n <= (1 - confidence) * (1 + 1e-9))


def trend(values: Sequence[float]) -> tuple[float, float]:
    """By what factor `values` changed from first to last, and the two-sided p-value of Kendall's test for no trend.

    The factor comes from Theil and Sen's slope of the logarithms. (1, 1) for under 3 values, or equal ones.
    """
    if len(set(values)) < 2 or len(values) < 3:
        return 1.0, 1.0
    from scipy.stats import kendalltau, theilslopes

    logs = [math.log(value) for value in values]
    numbers = range(len(logs))
    change = math.exp((len(logs) - 1) * theilslopes(logs, numbers).slope)
    return change, float(kendalltau(numbers, logs).pvalue)


def slope(columns: Sequence[float], values: Sequence[float]) -> Ratio | None:
    """How much `values` rise per unit of `columns`: Theil and Sen's median of slopes, with its interval (Sen, 1968).

    A few wild points do not move it. None for fewer than 4 different columns. Of exactly 4 points the interval holds
    with 92 %, which is all that their order can give.
    """
    if len(set(columns)) < 4:
        return None
    if len(set(values)) < 2:  # scipy divides by zero
        return Ratio(0.0, 0.0, 0.0)
    from scipy.stats import theilslopes

    slopes = theilslopes(values, columns, CONFIDENCE)
    return Ratio(float(slopes.slope), float(slopes.low_slope), float(slopes.high_slope))


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Kendall's tau: 1 where both order things alike, -1 where the other way round; None where one of them is equal."""
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    from scipy.stats import kendalltau

    return float(kendalltau(one, other).statistic)


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
