"""Lengths as users write them, and draws from them."""

import math
import statistics

import pytest

from lab.core import random_lengths
from lab.core.random_lengths import Lengths, draw, parse
from lab.errors import LabError


def test_a_length_is_a_number_or_a_distribution_as_its_quantiles() -> None:
    assert parse("--turn", 64).values == (64,)
    assert parse("--turn", "5-8").values == (5, 6, 7, 8)
    uniform = parse("--turn", "100-1000").values
    assert len(uniform) == random_lengths.MOST_VALUES
    assert uniform[0] == 114
    assert uniform[-1] == 986
    normal = parse("--turn", "normal:500,100").values
    assert statistics.mean(normal) == pytest.approx(500, abs=2)
    assert statistics.pstdev(normal) == pytest.approx(98, abs=2)
    heavy = parse("--turn", "lognormal:300,0.8").values
    assert heavy[15] < 300 < heavy[16]
    quarter = 300 * math.exp(
        -0.8 * 0.6745
    )  # a quarter of a normal's values lies below -0.6745
    assert heavy[7] < quarter < heavy[8]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-5",
        "10-5",
        "0-10",
        "1e3",
        "normal:50,100",
        "normal:5",
        "lognormal:0,1",
        "lognormal:9,999999999",
        "x",
    ],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(LabError, match="--turn"):
        parse("--turn", text)


def test_lengths_are_drawn_from_shuffled_decks_by_the_seed() -> None:
    pool = Lengths("", (10, 20, 30, 40))
    lengths = draw(pool, 40, "1")
    assert lengths == draw(pool, 40, "1")
    assert lengths != draw(pool, 40, "2")
    for start in range(0, 40, 4):
        assert sorted(lengths[start : start + 4]) == [10, 20, 30, 40]
