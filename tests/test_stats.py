"""Intervals and trends against worked examples, counts of all outcomes, and scipy's exact tests."""

import itertools
import math
import random
import statistics
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats as reference

from lab.core import stats
from lab.core.stats import Interval, Ratio
from lab.show.session_spread import Spread, between_sessions


def planted(sd: float, df: float) -> Spread:
    return Spread(sd, df, "planted")


def draw_logs(
    chance: random.Random,
    n: int,
    spread: float,
) -> list[float]:
    return [chance.gauss(0, spread) for _ in range(n)]


def draw(
    chance: random.Random,
    n: int,
    spread: float,
) -> list[float]:
    """Values with the median 1."""
    return list(np.exp(draw_logs(chance, n, spread)))


def sample(n: int, seed: int) -> list[float]:
    return draw(random.Random(seed), n, 0.1)


def logarithms(values: Sequence[float]) -> list[float]:
    return list(np.log(values))


# Between sessions

NOTHING_KNOWN = planted(0.0, math.inf)


def test_a_ratio_between_sessions_is_welchs_test_where_sessions_do_not_differ() -> None:
    a = sample(7, 1)
    b = [1.1 * value for value in sample(8, 2)]
    ratio = between_sessions(([a], [b]), (NOTHING_KNOWN, NOTHING_KNOWN))
    variance_a = math.pi / 2 * reference.tvar(logarithms(a)) / len(a)
    variance_b = math.pi / 2 * reference.tvar(logarithms(b)) / len(b)
    variance = variance_a + variance_b
    freedom = variance**2 / (variance_a**2 / 6 + variance_b**2 / 7)
    half = reference.t.ppf(0.975, freedom) * math.sqrt(variance)
    assert ratio.estimate == pytest.approx(
        math.sqrt(sorted(b)[3] * sorted(b)[4]) / sorted(a)[3]
    )
    assert math.log(ratio.high / ratio.estimate) == pytest.approx(half)
    assert math.log(ratio.estimate / ratio.low) == pytest.approx(half)


@pytest.mark.parametrize("n", [2, 3, 6])
def test_sessions_that_share_a_spread_have_its_degrees_of_freedom_and_no_more(n: int) -> None:
    """With the spread pooled from the compared sessions: Student's t-test of two samples."""
    chance = random.Random(n)
    first = draw_logs(chance, n, 0.08)
    second = draw_logs(chance, n, 0.08)
    spread = planted(
        math.sqrt((reference.tvar(first) + reference.tvar(second)) / 2),
        2 * (n - 1),
    )
    sides = (
        [[math.exp(centre)] * 3 for centre in first],
        [[math.exp(centre)] * 3 for centre in second],
    )
    ratio = between_sessions(sides, (spread, spread))
    expected = reference.ttest_ind(second, first).confidence_interval()
    interval = (math.log(ratio.low), math.log(ratio.high))
    assert interval == pytest.approx((expected.low, expected.high))


def test_different_spreads_are_different_estimates() -> None:
    """Two machines: Welch's test. A default is known for sure."""
    a = [1.0, 1.001, 0.999]
    b = [1.2, 1.201, 1.199]
    measured = between_sessions(
        ([a], [b]),
        (planted(0.05, 4), planted(0.05, 8)),
    )
    half = reference.t.ppf(0.975, 4 / (1 / 4 + 1 / 8)) * 0.05 * math.sqrt(2)
    assert math.log(measured.high / measured.estimate) == pytest.approx(half)
    certain = between_sessions(
        ([a], [b] * 4),
        (planted(0.05, math.inf), planted(0.05, math.inf)),
    )
    half = 1.959964 * 0.05 * math.sqrt(1 + 1 / 4)
    assert math.log(certain.high / certain.estimate) == pytest.approx(half)


# Medians and means


@pytest.mark.parametrize("spread", [0.02, 0.04])
def test_repeats_that_are_decided_once_keep_the_promise(spread: float) -> None:
    chance = random.Random(7)
    n_stopped = 0
    n_hold = 0
    n_within = 0
    for _ in range(400):
        values = draw(chance, 8, spread)
        n = stats.repeats_needed(values, 0.02)
        if n >= 60:
            continue
        values += draw(chance, n - 8, spread)
        interval = stats.median_interval(values)
        assert interval is not None
        n_stopped += 1
        if interval.low <= 1 <= interval.high:
            n_hold += 1
        if abs(sorted(values)[n // 2] - 1) <= 0.02:
            n_within += 1
    assert n_stopped > 200
    assert n_hold >= 0.93 * n_stopped
    assert n_within >= 0.93 * n_stopped


def test_repeats_needed_are_steins() -> None:
    values = [1.0, 1.1, 1.3, 1.6]
    spread = math.sqrt(math.pi / 2) * statistics.stdev(logarithms(values))
    for share, confidence in ((0.1, 0.95), (0.2, 0.9)):
        quantile = reference.t.ppf(1 - (1 - confidence) / 2, 3)
        expected = math.ceil((quantile * spread / share) ** 2)
        assert stats.repeats_needed(values, share, confidence) == expected
    assert stats.repeats_needed(values, 100) == 4


def test_the_interval_of_paired_ratios_holds_what_the_sign_test_does_not_reject() -> None:
    a = sample(9, 1)
    b = [1.1 * value for value in sample(9, 2)]
    ratio = stats.paired_ratio(a, b)
    assert ratio is not None
    ratios = sorted(y / x for x, y in zip(a, b, strict=True))
    assert ratio.estimate == ratios[4]

    def p_value(factor: float) -> float:
        n_above = sum(quotient > factor for quotient in ratios)
        return float(reference.binomtest(n_above, 9).pvalue)

    assert p_value(ratio.low * 0.9999) < 0.05 < p_value(ratio.low * 1.0001)
    assert p_value(ratio.high * 1.0001) < 0.05 < p_value(ratio.high * 0.9999)


def test_too_few_values_have_no_interval() -> None:
    assert stats.paired_ratio([1] * 5, [2] * 5) is None
    assert stats.paired_ratio([1] * 6, [2] * 6) == Ratio(2, 2, 2)
    with pytest.raises(ValueError, match="shorter"):
        stats.paired_ratio([1] * 6, [2] * 5)
    assert stats.fewest_for_interval() == 6
    assert stats.fewest_for_interval(confidence=0) == 1
    assert stats.fewest_for_interval(confidence=0.5) == 2
    assert stats.fewest_for_interval(confidence=0.99) == 8


def n_left_out(n: int, confidence: float) -> int:
    """The ordered values to leave out at each end, by counting all 2^n outcomes.

    In `math.comb(n, i)` outcomes i values fall below the median.
    """
    n_outcomes = 0
    for i in itertools.count():
        n_outcomes += math.comb(n, i)
        if 2 * n_outcomes > (1 - confidence) * 2**n:
            return i
    raise AssertionError


@pytest.mark.parametrize("n", [*range(1, 30), 60, 61, 200])
@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
def test_the_interval_of_a_median_leaves_out_the_rarest_outcomes(
    n: int, confidence: float
) -> None:
    interval = stats.median_interval(range(n), confidence)
    n_outside = n_left_out(n, confidence)
    if n_outside:
        assert interval == Interval(n_outside - 1, n - n_outside)
        expected = reference.quantile_test(range(n), p=0.5).confidence_interval(confidence)
        assert interval == Interval(expected.low, expected.high)
    else:
        assert interval is None


def test_a_probability_that_is_just_the_limit_is_within_it() -> None:
    """Two values are both below or both above the median in half of all outcomes."""
    assert stats.median_interval([1, 3], 0.5) == Interval(1, 3)
    assert stats.median_interval([4, 1, 3, 2], 0.875) == Interval(1, 4)


def test_three_values_have_an_interval_by_students_t_on_their_logarithms() -> None:
    values = [9.0, 10.0, 11.0]
    logs = logarithms(values)
    expected = reference.t.interval(0.95, 2, statistics.fmean(logs), reference.sem(logs))
    interval = stats.log_interval(values)
    assert interval is not None
    assert (math.log(interval.low), math.log(interval.high)) == pytest.approx(expected)
    assert stats.log_interval(values[:2]) is None


def test_the_half_width_of_a_mean_is_students() -> None:
    low, high = reference.t.interval(0.9, 1, 2.0, reference.sem([1.0, 3.0]))
    assert stats.mean_half_width([1.0, 3.0], 0.9) == pytest.approx((high - low) / 2)
    assert stats.mean_half_width([1.0]) == 0
    assert stats.mean_half_width([]) == 0


# Trends and fits


def test_the_half_width_for_a_further_value_holds_the_share_that_is_asked_for() -> None:
    draw = random.Random(3)
    n_inside = 0
    for _ in range(2000):
        *values, further = (draw.gauss(5, 2) for _ in range(7))
        half = stats.further_half_width(values, 0.9)
        n_inside += abs(further - statistics.fmean(values)) <= half
    assert n_inside / 2000 == pytest.approx(0.9, abs=0.02)


def surplus(order: Sequence[int]) -> float:
    """By how many pairs more rise than fall, or the reverse."""
    pairs = itertools.combinations(order, 2)
    return abs(sum(math.copysign(1, second - first) for first, second in pairs))


@pytest.mark.parametrize("n", [3, 5, 6])
def test_the_chance_of_a_trend_is_the_share_of_orders_with_as_much_of_one(n: int) -> None:
    orders = list(itertools.permutations(range(1, n + 1)))
    amounts = np.array([surplus(order) for order in orders])
    for order in random.Random(n).sample(orders, 6):
        share = (amounts >= surplus(order)).mean()
        assert stats.trend(order)[1] == pytest.approx(share)


def test_a_trend_is_the_factor_from_the_first_to_the_last_value() -> None:
    assert stats.trend([1, 2, 4, 8])[0] == pytest.approx(8)
    assert stats.trend([1, 2, 4, 8, 1e9])[0] == pytest.approx(2**4)
    assert stats.trend([1, 2, 2])[0] == pytest.approx(2)


@pytest.mark.parametrize("values", [[1, 2], [5, 5, 5]])
def test_too_few_and_equal_values_have_no_trend(values: list[float]) -> None:
    assert stats.trend(values) == (1, 1)


def test_a_wild_point_does_not_move_a_slope() -> None:
    points = list(range(10))
    values = [3 + 2 * x for x in points[:-1]] + [500]
    rise = stats.slope(points, values)
    assert rise is not None
    assert rise.estimate == pytest.approx(2)
    assert rise.low == pytest.approx(2)


def test_a_slope_needs_four_columns_and_is_sens() -> None:
    assert stats.slope([0, 1, 2, 2], [1, 2, 3, 4]) is None
    assert stats.slope([0, 1, 2, 3], [1.0] * 4) == Ratio(0, 0, 0)
    points = [0, 1, 2, 3, 4, 5]
    values = [0.0, 1.2, 1.9, 3.3, 3.8, 5.5]
    expected = reference.theilslopes(values, points, 0.95)
    assert stats.slope(points, values) == Ratio(
        expected.slope, expected.low_slope, expected.high_slope
    )
    steps = stats.slope([0, 1, 2, 3], [1.0, 1.0, 2.0, 2.0])
    assert steps is not None
    assert steps.estimate == pytest.approx(5 / 12)


def test_a_fit_finds_the_coefficients_and_none_below_zero() -> None:
    lengths = [512 * i for i in range(1, 17)]
    columns = [[1] * 16, lengths, [n * n for n in lengths]]
    times = [0.01 + 2e-3 * n + 3e-7 * n * n for n in lengths]
    assert stats.fit(columns, times) == pytest.approx((0.01, 2e-3, 3e-7))
    falling = stats.fit([[1] * 3, [1, 2, 3]], [3, 2, 1])
    assert falling[1] == 0


def test_a_fit_keeps_its_lowest_coefficients() -> None:
    columns = [[1, 1, 1], [1, 2, 3]]
    assert stats.fit(columns, [6, 9, 12], [1, 1]) == pytest.approx((3, 3))
    assert stats.fit(columns, [6, 9, 12], [3, 3]) == pytest.approx((3, 3))
    bounded = stats.fit(columns, [6, 9, 12], [4, 0])
    assert bounded[0] == 4
    least_squares = (2 / 36 + 10 / 81 + 24 / 144) / (1 / 36 + 4 / 81 + 9 / 144)
    assert bounded[1] == pytest.approx(least_squares)


def test_a_column_of_zeros_gets_no_coefficient() -> None:
    assert stats.fit([[1, 2, 3], [0, 0, 0]], [2, 4, 6]) == pytest.approx((2, 0))
    assert stats.fit([[0, 0, 0]], [2, 4, 6]) == (0,)


@pytest.mark.parametrize("n_columns", [1, 2, 3, 4])
def test_a_fit_is_that_of_non_negative_least_squares(n_columns: int) -> None:
    from scipy.optimize import nnls

    chance = np.random.default_rng(n_columns)
    for _ in range(20):
        magnitudes = 10.0 ** chance.integers(-3, 4, size=n_columns)
        columns = np.abs(chance.normal(size=(9, n_columns))) * magnitudes
        values = np.exp(chance.normal(size=9))
        fitted = columns @ stats.fit(columns.T.tolist(), values.tolist())
        scale = columns.max(axis=0)
        _, residual = nnls(columns / scale / values[:, None], np.ones(9))
        assert np.linalg.norm(1 - fitted / values) == pytest.approx(residual, abs=1e-9)
