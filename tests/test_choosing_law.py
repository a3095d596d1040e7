"""The law of a chain over the size of the vocabulary, from planted times."""

import math
from collections.abc import Sequence

import pandas as pd
import pytest

from lab.core.stats import Ratio
from lab.roofline import choosing
from lab.roofline.choosing import Choosing, ChoosingLaw


def times(rows: Sequence[tuple[int, float]]) -> pd.DataFrame:
    """Rows of a vocabulary and the logarithm of the time to choose."""
    return pd.DataFrame(
        [(n_vocab, math.exp(log_s)) for n_vocab, log_s in rows],
        columns=["n_vocab", "choose_s"],
    )


@pytest.mark.parametrize(
    ("x", "y"), [(-1.0, -2.0), (0.0, 0.0), (0.5, 1.0), (1.0, 2.0), (2.0, 5.0), (4.0, 11.0)]
)
def test_a_line_through_points_goes_on_beyond_them(x: float, y: float) -> None:
    points = [(0.0, 0.0), (1.0, 2.0), (3.0, 8.0)]
    assert choosing.on_line(points, x) == pytest.approx(y)
    assert choosing.on_line([(5.0, 7.0)], x) == 7


def test_a_line_has_as_many_segments_as_points_say() -> None:
    points = [(0.0, 0.0), (1.0, 1.0), (2.0, 3.0), (3.0, 6.0)]
    values = [choosing.on_line(points, x) for x in (0.5, 1.5, 2.5, 3.5)]
    assert values == pytest.approx([0.5, 2, 4.5, 7.5])


def test_the_range_has_the_spread_of_runs_and_the_bend_of_the_line() -> None:
    """Variances of 0.02 with one degree of freedom and of 0.04 with two: 0.1 over 3. The point in
    the middle is 0.25 above the line between the others, of which half is the bend.
    """
    law = choosing.law(
        times([(100, 0.0), (100, 0.2), (1000, 0.9), *((10_000, log) for log in (1, 1.2, 1.4))])
    )
    points = [(math.log(100), 0.1), (math.log(1000), 0.9), (math.log(10_000), 1.2)]
    assert list(law.points) == [pytest.approx(point) for point in points]
    assert law.half == pytest.approx(1.96 * math.sqrt(0.1 / 3 + 0.125**2))
    assert law.seconds(1000) == pytest.approx(math.exp(0.9))
    assert law.range(1000) == pytest.approx(
        (math.exp(0.9 - law.half), math.exp(0.9 + law.half))
    )


def test_only_points_between_others_bend_a_line() -> None:
    """Of four points the second is 0.1 and the third 0.4 beside the line between its neighbours."""
    rows = [(10, 0.0), (100, 1.1), (1000, 2.0), (10_000, 3.7)]
    law = choosing.law(times(rows))
    errors = (0.1**2 + 0.4**2) / 2
    assert law.half == pytest.approx(1.96 * math.sqrt(errors) / 2)


def test_two_runs_of_one_vocabulary_have_a_spread() -> None:
    law = choosing.law(times([(100, 0.0), (100, 0.2)]))
    assert law.half == pytest.approx(1.96 * math.sqrt(0.02))


def test_a_range_is_2_percent_at_least() -> None:
    exact = choosing.law(times([(100, 1.0), (1000, 2.0), (10_000, 3.0)]))
    assert exact.half == math.log(1.02)
    single = choosing.law(times([(100, 1.0)]))
    assert single.half == math.log(1.02)
    assert single.seconds(5) == pytest.approx(math.e)
    low, high = ChoosingLaw(((0.0, 0.0),), math.log(2)).range(7)
    assert (low, high) == pytest.approx((0.5, 2))


def test_laws_are_of_one_sequence_and_of_times() -> None:
    rows = times([(100, 1.0), (100, 1.0), (100, 2.0)])
    rows["name"] = ["a", "a", "b"]
    rows["n_seq"] = [1, 2, 1]
    rows.loc[2, "choose_s"] = 0.0
    laws = choosing.laws(rows)
    assert list(laws) == ["a"]
    rows.loc[2, "choose_s"] = 1e-9
    assert list(choosing.laws(rows)) == ["a", "b"]


def test_penalties_look_back_64_tokens_by_default() -> None:
    assert choosing.window_of("temp 0.8") is None
    assert choosing.window_of("repeat_penalty 1.1") == 64
    assert choosing.window_of("repeat_penalty 1.1, repeat_last_n 256") == 256


@pytest.mark.parametrize(
    ("low", "high", "is_different"),
    [
        (1.021, 1.5, True),
        (1.019, 1.5, False),
        (0.5, 0.979, True),
        (0.5, 0.981, False),
        (0.9, 1.1, False),
        (math.exp(math.log(1.02)), 2.0, False),
        (0.5, math.exp(-math.log(1.02)), False),
    ],
)
def test_chains_differ_by_more_than_2_percent(
    low: float, high: float, is_different: bool
) -> None:
    assert choosing.differs(Ratio(1.0, low, high)) == is_different
    assert not choosing.differs(None)


def test_a_ratio_pairs_the_chains_of_a_run() -> None:
    rows = []
    for run in range(6):
        rows += [(run, "a", 1, 1.0 + run), (run, "b", 1, 3 * (1.0 + run))]
    rows += [(6, "a", 1, 9.0), (0, "a", 4, 100.0)]
    frame = pd.DataFrame(rows, columns=["run", "name", "n_seq", "choose_s"])
    assert choosing.ratio(frame, "a", "b") == pytest.approx(Ratio(3, 3, 3))
    assert choosing.ratio(frame, "a", "c") is None
    assert choosing.ratio(frame, "c", "a") is None
    assert choosing.ratio(frame[frame.run > 0], "a", "b") is None  # five pairs


def test_a_case_needs_a_sequence_two_steps_and_a_chain() -> None:
    case = Choosing(1, 2, "greedy: the most probable | default: temp 0.8")
    assert case.names == ["greedy", "default"]
    assert case.order == [0, 1, 1, 0]
    for wrong in ((0, 2, "a"), (1, 1, "a"), (1, 2, "")):
        with pytest.raises(ValueError, match="it needs"):
            Choosing(*wrong)
