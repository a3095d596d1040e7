"""Where a curve breaks: planted lines with a known place, slopes and jump, at every limit."""

import math
from collections.abc import Sequence

import pytest

from lab.core import breaks
from lab.core.breaks import Break, RunCurve

MANY = 124
"""Places: those that are tried for a change of slope are then the whole numbers from 3 to 122."""


def bent(
    start: float, slope_after: float, place: float = 64, n: int = MANY, noise: float = 0
) -> list[float]:
    """Times at 1 to n: slope 1 up to a place, another after it; every second one is longer."""
    times = []
    for work in range(1, n + 1):
        time = start + min(work, place) + slope_after * max(0, work - place)
        times.append(time * (1 + (noise if work % 2 else -noise)))
    return times


def stepped(n: int, n_before: int, jump: float, slope_after: float = 1) -> list[float]:
    """Times at 1 to n: 10 + work for n_before of them, then longer by `jump` at the middle."""
    middle = n_before + 0.5
    times = []
    for work in range(1, n + 1):
        time = 10.0 + work
        if work > n_before:
            time = 10 + middle + jump + slope_after * (work - middle)
        times.append(time)
    return times


def break_of(times: Sequence[float]) -> Break | None:
    return breaks.find(range(1, len(times) + 1), times)


def test_lines_that_meet_have_a_place_and_a_factor_of_their_slopes() -> None:
    found = break_of(bent(start=10, slope_after=3))
    assert found is not None
    assert not found.is_jump
    assert (found.low, found.work, found.high) == pytest.approx((64, 64, 64), rel=1e-9)
    assert (found.slope_before, found.slope_after) == pytest.approx((1, 3))
    assert found.factor == pytest.approx(3)


@pytest.mark.parametrize("place", [3, 122])
def test_a_slope_may_change_at_the_third_place_and_at_the_third_last(place: int) -> None:
    found = break_of(bent(start=5, slope_after=60, place=place))
    assert found is not None
    assert found.work == pytest.approx(place, rel=1e-9)


def test_a_jump_lies_between_two_places_and_has_the_factor_of_the_times() -> None:
    found = break_of(stepped(n=20, n_before=10, jump=15))
    assert found is not None
    assert found.is_jump
    assert (found.low, found.work, found.high) == pytest.approx((10, 10.5, 11))
    assert found.factor == pytest.approx(35.5 / 20.5)
    assert (found.slope_before, found.slope_after) == pytest.approx((1, 1))


def test_a_jump_to_another_slope_has_the_factor_of_the_slopes() -> None:
    found = break_of(stepped(n=20, n_before=10, jump=15, slope_after=2))
    assert found is not None
    assert not found.is_jump
    assert (found.low, found.high) == pytest.approx((10, 11))
    assert found.factor == pytest.approx(2)
    falling = break_of([100 - work if work <= 10 else 200 + work for work in range(1, 21)])
    assert falling is not None
    assert falling.is_jump
    assert falling.factor == pytest.approx((200 + 10.5) / (100 - 10.5))
    assert falling.slope_before == pytest.approx(-1)


def test_a_break_has_three_places_on_either_side() -> None:
    times = [10.0, 11, 12, 30, 31, 32]
    found = break_of(times)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((3, 4))
    assert break_of(times[1:]) is None
    for n_before in (3, 6):
        found = break_of(stepped(n=9, n_before=n_before, jump=15))
        assert found is not None
        assert (found.low, found.high) == pytest.approx((n_before, n_before + 1))
    for n_before in (2, 7):
        found = break_of(stepped(n=9, n_before=n_before, jump=15))
        assert found is None or found.low == found.high


def test_lines_start_above_zero_unless_they_jump() -> None:
    """Lines that meet and begin at -1 are no times of steps."""
    works = range(3, 127)
    times = [work - 1 + 2 * max(0, work - 64) for work in works]
    assert breaks.find(works, times) is None


def test_a_break_does_not_depend_on_the_unit_of_time() -> None:
    """Steps take milliseconds: slopes and times far below 1."""
    kink = break_of([time / 1e5 for time in bent(start=10, slope_after=3)])
    assert kink is not None
    assert kink.factor == pytest.approx(3)
    assert kink.slope_before == pytest.approx(1e-5)
    jump = break_of([time / 1e5 for time in stepped(n=20, n_before=10, jump=15)])
    assert jump is not None
    assert jump.is_jump
    assert jump.factor == pytest.approx(35.5 / 20.5)


# The limits


@pytest.mark.parametrize(("slope_after", "is_found"), [(1.49, False), (1.51, True)])
def test_slopes_differ_by_half(slope_after: float, is_found: bool) -> None:
    assert (break_of(bent(start=10, slope_after=slope_after)) is not None) == is_found


@pytest.mark.parametrize(("jump", "is_found"), [(4.0, False), (4.2, True)])
def test_times_jump_by_a_fifth(jump: float, is_found: bool) -> None:
    """From 20.5 at the middle: a fifth is 4.1."""
    assert (break_of(stepped(n=20, n_before=10, jump=jump)) is not None) == is_found


def error_of_one_line(times: Sequence[float]) -> float:
    """The root mean square of the relative errors of the best line."""
    import numpy as np

    works = np.arange(1, len(times) + 1)
    values = np.array(times)
    line = np.polyval(np.polyfit(works, values, 1, w=1 / values), works)
    return math.sqrt(np.mean((line / values - 1) ** 2))


@pytest.mark.parametrize(("start", "is_found"), [(790, True), (810, False)])
def test_a_line_that_errs_by_less_than_2_percent_has_no_break(
    start: float, is_found: bool
) -> None:
    times = bent(start=start, slope_after=3)
    assert (error_of_one_line(times) > 0.02) == is_found
    assert (break_of(times) is not None) == is_found


@pytest.mark.parametrize(("noise", "is_found"), [(0.11, True), (0.115, False)])
def test_two_lines_leave_at_most_half_of_the_errors(noise: float, is_found: bool) -> None:
    """What two lines leave is the noise."""
    times = bent(start=10, slope_after=3, noise=noise)
    assert (noise / error_of_one_line(times) < 0.505) == is_found
    assert (break_of(times) is not None) == is_found


@pytest.mark.parametrize(("noise", "is_found"), [(0.188, True), (0.191, False)])
def test_few_places_give_too_little_evidence(noise: float, is_found: bool) -> None:
    """Ten places, and less than half of the errors left: 10 log(share of the squares) + 2 log 10
    is below -10 or not.
    """
    times = bent(start=2, slope_after=6, place=5, n=10, noise=noise)
    assert (break_of(times) is not None) == is_found


@pytest.mark.parametrize(("jump", "has_jump"), [(6.2, False), (6.4, True)])
def test_a_small_jump_is_none_if_lines_that_meet_fit_nearly_as_well(
    jump: float, has_jump: bool
) -> None:
    times = []
    for work in range(1, 21):
        time = 20.0 + work
        if work > 10:
            time = 30.5 + jump + 4 * (work - 10.5)
        times.append(time * (0.98 if work % 2 else 1.02))
    found = break_of(times)
    assert found is not None
    assert (found.low < found.high) == has_jump


# Several runs


def curve(times: Sequence[float]) -> RunCurve:
    works = tuple(float(work) for work in range(1, len(times) + 1))
    return RunCurve(works, tuple(times), tuple(100 + 10 * work for work in works))


def test_the_position_is_between_those_of_the_steps_beside_it() -> None:
    run = curve([1.0, 2.0, 3.0])
    assert run.n_past(1) == 110
    assert run.n_past(2.5) == 125


def broken_at(place: float) -> RunCurve:
    return curve(bent(start=10, slope_after=3, place=place))


STRAIGHT = curve(bent(start=10, slope_after=1))


def test_one_run_alone_has_no_common_break_and_two_have() -> None:
    assert breaks.common([broken_at(64)]) is None
    found = breaks.common([broken_at(64), broken_at(64)])
    assert found is not None
    assert found.work == pytest.approx(64)
    assert breaks.common([STRAIGHT] * 3) is None


def test_most_runs_show_a_common_break_within_15_percent() -> None:
    """The median of the runs breaks at 60: 52 and 68 are 13 % from there, 50 and 70 are 17 %."""
    near = [broken_at(52), broken_at(60), broken_at(68)]
    found = breaks.common(near)
    assert found is not None
    assert found.work == pytest.approx(60)
    assert breaks.common([broken_at(50), broken_at(60), broken_at(70)]) is None
    assert breaks.common([broken_at(52), broken_at(60), broken_at(70)]) is not None


def test_half_of_the_runs_are_not_most() -> None:
    """The median of four is between the two in the middle, which break alike."""
    four = [broken_at(20), broken_at(60), broken_at(60), broken_at(110)]
    assert breaks.common(four) is None
    five = [broken_at(20), *[broken_at(60)] * 3, broken_at(110)]
    assert breaks.common(five) is not None
