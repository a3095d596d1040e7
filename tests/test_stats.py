"""Intervals by counting, against worked examples and against scipy's exact tests."""

import math
import random

import pytest
from scipy import stats as reference

from lab.core import stats
from lab.core.stats import Interval


def sample(n: int, seed: int, factor: float = 1.0) -> list[float]:
    chance = random.Random(seed)
    return [factor * math.exp(chance.gauss(0, 0.1)) for _ in range(n)]


def test_at_six_values_the_interval_of_the_median_is_their_range() -> None:
    assert stats.median_interval([3, 1, 2, 6, 5, 4]) == Interval(1, 6)  # 1 - 2/64 = 97 %
    assert stats.median_interval([1, 2, 3, 4, 5]) is None
    assert stats.median_interval([]) is None


@pytest.mark.parametrize("n", [7, 20, 61, 200])
def test_the_interval_of_a_median_leaves_out_as_much_as_it_may(n: int) -> None:
    interval = stats.median_interval(range(n))
    assert interval is not None
    left_out = int(interval.low)  # values below the interval, as many as above it
    assert interval.high == n - 1 - left_out
    assert 2 * reference.binom.cdf(left_out, n, 0.5) <= 0.05 < 2 * reference.binom.cdf(left_out + 1, n, 0.5)


def test_the_interval_of_a_ratio_holds_what_the_rank_sum_test_does_not_reject() -> None:
    a, b = sample(7, 1), sample(8, 2, 1.1)
    ratio = stats.ratio(a, b)
    assert ratio is not None and ratio.low < ratio.estimate < ratio.high

    def p(times: float) -> float:
        return float(reference.mannwhitneyu(b, [times * value for value in a], method="exact").pvalue)

    assert p(ratio.low * 0.9999) < 0.05 < p(ratio.low * 1.0001)
    assert p(ratio.high * 1.0001) < 0.05 < p(ratio.high * 0.9999)


def test_the_interval_of_paired_ratios_holds_what_the_sign_test_does_not_reject() -> None:
    a, b = sample(9, 1), sample(9, 2, 1.1)
    ratio = stats.paired_ratio(a, b)
    assert ratio is not None

    def p(times: float) -> float:
        return float(reference.binomtest(sum(y > times * x for x, y in zip(a, b, strict=True)), 9).pvalue)

    assert p(ratio.low * 0.9999) < 0.05 < p(ratio.low * 1.0001)
    assert p(ratio.high * 1.0001) < 0.05 < p(ratio.high * 0.9999)


def test_one_spike_on_each_side_does_not_spoil_ten_pairs() -> None:
    ratio = stats.paired_ratio([1] * 10, [1.5, *[1.05] * 8, 0.7])
    assert ratio == stats.Ratio(1.05, 1.05, 1.05)


def test_too_few_values_have_no_interval() -> None:
    assert stats.ratio([1, 2, 3], [4, 5, 6]) is None
    assert stats.ratio([1, 2, 3, 4], [5, 6, 7, 8]) is not None
    assert stats.paired_ratio([1] * 5, [2] * 5) is None
    assert (stats.fewest(paired=False), stats.fewest(paired=True)) == (4, 6)
    assert stats.fewest(paired=False, confidence=0.99) > 4


def test_a_plain_doubling_is_a_ratio_of_two() -> None:
    ratio = stats.paired_ratio([1, 2, 3, 4, 5, 6], [2, 4, 6, 8, 10, 12])
    assert ratio is not None
    assert (ratio.low, ratio.estimate, ratio.high) == pytest.approx((2, 2, 2))


def test_many_values_use_the_normal_curve_and_agree_with_counting() -> None:
    a, b = sample(stats.MOST_EXACT, 3), sample(stats.MOST_EXACT, 4, 1.05)
    exact, normal = stats.ratio(a, b), stats.ratio([*a, 1.0], b)
    assert exact is not None and normal is not None
    assert normal.low == pytest.approx(exact.low, rel=0.01) and normal.high == pytest.approx(exact.high, rel=0.01)


@pytest.mark.parametrize("n", [3, 8, 30, 80])
def test_a_trend_is_kendalls(n: int) -> None:
    values = [value * 1.01**i for i, value in enumerate(sample(n, n))]
    change, chance = stats.trend(values)
    assert chance == pytest.approx(reference.kendalltau(range(n), values).pvalue, rel=0.05)
    assert change == pytest.approx(1.01 ** (n - 1), rel=0.5)


def test_no_trend_without_values() -> None:
    assert stats.trend([]) == stats.trend([5, 6]) == (1.0, 1.0)


def test_a_fit_finds_the_coefficients_and_none_below_zero() -> None:
    lengths = [512 * i for i in range(1, 17)]
    columns = [[1] * 16, lengths, [n * n for n in lengths]]
    assert stats.fit(columns, [0.01 + 2e-3 * n + 3e-7 * n * n for n in lengths]) == pytest.approx((0.01, 2e-3, 3e-7))
    falling = stats.fit([[1] * 3, [1, 2, 3]], [3, 2, 1])
    assert falling[1] == 0


def test_a_fit_keeps_its_bounds() -> None:
    columns, values = [[1.0, 2.0, 4.0], [1.0, 1.0, 1.0]], [0.5, 1.0, 2.0]
    assert stats.fit(columns, values) == pytest.approx((0.5, 0))
    assert stats.fit(columns, values, at_least=(1, 0)) == pytest.approx((1, 0))
    assert stats.fit(columns, [4.0, 7.0, 13.0], at_least=(1, 0)) == pytest.approx((3, 1))
