"""Intervals and trends against worked examples, against counts of all outcomes, and against scipy's exact tests."""

import itertools
import math
import random
import statistics

import numpy as np
import pytest
from scipy import stats as reference

from lab.core import stats
from lab.core.stats import Interval
from lab.show.comparison import between_sessions


def sample(n: int, seed: int, factor: float = 1.0) -> list[float]:
    chance = random.Random(seed)
    return [factor * math.exp(chance.gauss(0, 0.1)) for _ in range(n)]


NOTHING_KNOWN = (0.0, math.inf)


def test_a_ratio_between_sessions_is_welchs_test_where_sessions_do_not_differ() -> None:
    a = sample(7, 1)
    b = sample(8, 2, 1.1)
    ratio = between_sessions(([a], [b]), (NOTHING_KNOWN, NOTHING_KNOWN))
    one, other = (
        math.pi / 2 * reference.tvar([math.log(v) for v in values]) / len(values)
        for values in (a, b)
    )
    half = reference.t.ppf(0.975, (one + other) ** 2 / (one**2 / 6 + other**2 / 7)) * math.sqrt(
        one + other
    )
    assert ratio.estimate == pytest.approx(math.sqrt(sorted(b)[3] * sorted(b)[4]) / sorted(a)[3])
    assert math.log(ratio.high / ratio.estimate) == pytest.approx(half)
    assert math.log(ratio.estimate / ratio.low) == pytest.approx(half)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_sessions_that_share_a_spread_have_its_degrees_of_freedom_and_no_more(n: int) -> None:
    """With the spread pooled from the compared sessions themselves: Student's t-test of two samples."""
    chance = random.Random(n)
    centres = [[chance.gauss(0, 0.08) for _ in range(n)] for _ in range(2)]
    (first, second) = centres
    df = 2 * (n - 1)
    sd = math.sqrt((reference.tvar(first) + reference.tvar(second)) / 2)
    sides = tuple([[math.exp(centre)] * 3 for centre in of_side] for of_side in centres)
    ratio = between_sessions((sides[0], sides[1]), ((sd, df), (sd, df)))
    theirs = reference.ttest_ind(second, first).confidence_interval()
    assert (math.log(ratio.low), math.log(ratio.high)) == pytest.approx((theirs.low, theirs.high))


def test_different_spreads_are_different_estimates() -> None:
    """Two machines: Welch's test. A default is known for sure."""
    a = [1.0, 1.001, 0.999]
    b = [1.2, 1.201, 1.199]
    apart = between_sessions(([a], [b]), ((0.05, 4), (0.05, 8)))
    half = reference.t.ppf(0.975, 4 / (1 / 4 + 1 / 8)) * 0.05 * math.sqrt(2)
    assert math.log(apart.high / apart.estimate) == pytest.approx(half)
    sure = between_sessions(([a], [b] * 4), ((0.05, math.inf), (0.05, math.inf)))
    assert math.log(sure.high / sure.estimate) == pytest.approx(
        1.959964 * 0.05 * math.sqrt(1 + 1 / 4)
    )


@pytest.mark.parametrize("spread", [0.02, 0.04])
def test_repeats_that_are_decided_once_keep_the_promise(spread: float) -> None:
    chance = random.Random(7)
    n_stopped = 0
    n_hold = 0
    n_within = 0
    for _ in range(400):
        values = [math.exp(chance.gauss(0, spread)) for _ in range(8)]
        n = min(60, stats.repeats_needed(values, 0.02))
        values += [math.exp(chance.gauss(0, spread)) for _ in range(n - 8)]
        interval = stats.median_interval(values)
        assert interval is not None
        n_stopped += n < 60
        n_hold += n < 60 and interval.low <= 1 <= interval.high
        n_within += n < 60 and abs(sorted(values)[n // 2] - 1) <= 0.02
    assert n_stopped > 200
    assert n_hold >= 0.93 * n_stopped and n_within >= 0.93 * n_stopped


def test_the_interval_of_paired_ratios_holds_what_the_sign_test_does_not_reject() -> None:
    a = sample(9, 1)
    b = sample(9, 2, 1.1)
    ratio = stats.paired_ratio(a, b)
    assert ratio is not None

    def p(times: float) -> float:
        return float(
            reference.binomtest(sum(y > times * x for x, y in zip(a, b, strict=True)), 9).pvalue
        )

    assert p(ratio.low * 0.9999) < 0.05 < p(ratio.low * 1.0001)
    assert p(ratio.high * 1.0001) < 0.05 < p(ratio.high * 0.9999)


def test_too_few_values_have_no_interval() -> None:
    assert stats.paired_ratio([1] * 5, [2] * 5) is None
    assert stats.fewest_for_interval() == 6
    assert stats.fewest_for_interval(confidence=0.99) > 6


@pytest.mark.parametrize("n", [*range(1, 30), 60, 61, 200])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_the_interval_of_a_median_leaves_out_the_rarest_outcomes_counted_one_by_one(
    n: int, confidence: float
) -> None:
    interval = stats.median_interval(range(n), confidence)
    ways = [
        math.comb(n, i) for i in range(n + 1)
    ]  # of all 2^n: those in which i values fall below the median
    left_out = next(
        i for i in itertools.count() if 2 * sum(ways[: i + 1]) > (1 - confidence) * 2**n
    )
    assert interval == (Interval(left_out - 1, n - left_out) if left_out else None)
    theirs = reference.quantile_test(range(n), p=0.5).confidence_interval(confidence)
    assert interval is None or interval == Interval(theirs.low, theirs.high)


@pytest.mark.parametrize("n", [3, 5, 6])
def test_the_chance_of_a_trend_is_the_share_of_orders_with_as_much_of_one(n: int) -> None:
    def surplus(order: tuple[int, ...]) -> int:
        return abs(sum(math.copysign(1, b - a) for a, b in itertools.combinations(order, 2)))  # type: ignore[return-value]

    orders = list(itertools.permutations(range(1, n + 1)))
    amounts = [surplus(order) for order in orders]
    for order in random.Random(n).sample(orders, 6):
        share = sum(amount >= surplus(order) for amount in amounts) / len(orders)
        assert stats.trend(order)[1] == pytest.approx(share)


def test_a_fit_finds_the_coefficients_and_none_below_zero() -> None:
    lengths = [512 * i for i in range(1, 17)]
    columns = [[1] * 16, lengths, [n * n for n in lengths]]
    assert stats.fit(columns, [0.01 + 2e-3 * n + 3e-7 * n * n for n in lengths]) == pytest.approx(
        (0.01, 2e-3, 3e-7)
    )
    falling = stats.fit([[1] * 3, [1, 2, 3]], [3, 2, 1])
    assert falling[1] == 0


def test_three_values_have_an_interval_by_students_t_on_their_logarithms() -> None:
    values = [9.0, 10.0, 11.0]
    logs = [math.log(value) for value in values]
    expected = reference.t.interval(0.95, 2, statistics.fmean(logs), reference.sem(logs))
    interval = stats.log_interval(values)
    assert interval is not None
    assert (math.log(interval.low), math.log(interval.high)) == pytest.approx(expected)
    assert stats.log_interval(values[:2]) is None


def test_a_wild_point_does_not_move_a_slope() -> None:
    points = list(range(10))
    values = [3 + 2 * x for x in points[:-1]] + [500]
    rise = stats.slope(points, values)
    assert rise is not None and rise.estimate == pytest.approx(2) and rise.low == pytest.approx(2)
    assert stats.slope(points[:3], values[:3]) is None
    assert stats.slope(points, [1.0] * 10) == stats.Ratio(0, 0, 0)


def test_a_fit_is_that_of_non_negative_least_squares() -> None:
    from scipy.optimize import nnls

    chance = np.random.default_rng(1)
    for n_columns in (1, 2, 3, 4) * 20:
        columns = np.abs(chance.normal(size=(9, n_columns))) * 10.0 ** chance.integers(
            -3, 4, size=n_columns
        )
        values = np.exp(chance.normal(size=9))
        fitted = columns @ stats.fit(columns.T.tolist(), values.tolist())
        scale = columns.max(axis=0)
        _, residual = nnls(columns / scale / values[:, None], np.ones(9))
        assert np.linalg.norm(1 - fitted / values) == pytest.approx(residual, abs=1e-9)
