"""What lab doctor says of a busy program beside llama.cpp."""

from __future__ import annotations

import pytest

from lab.features.doctor import beside
from lab.features.doctor.beside import Rates
from lab.features.doctor.checks import FINE, LOOK


def test_a_neighbour_that_costs_a_factor_is_told_with_the_cure_and_its_price() -> None:
    check = beside.check(Rates(242, 0.412, 236, 61.2))
    assert check.verdict == LOOK
    assert "decode falls from 242 to 0.412 tokens/s" in check.words
    assert "with GOMP_SPINCOUNT=300 to 61.2 (2 % slower when quiet)" in check.words
    assert check.command
    assert "--wait 300" in check.command


def test_few_spins_that_cost_nothing_are_said_to_be_as_fast() -> None:
    assert "(as fast when quiet)" in beside.check(Rates(242, 0.4, 244, 61)).words


@pytest.mark.parametrize("rate", [61, 80, 120, 200, 242, 260])
def test_a_neighbour_that_takes_its_share_does_no_harm(rate: float) -> None:
    check = beside.check(Rates(242, rate, 236, rate))
    assert check.verdict == FINE
    assert not check.words


def test_a_machine_that_is_busy_already_is_not_called_fine() -> None:
    check = beside.check(Rates(0.48, 0.46, 31.1, 19.2))
    assert check.verdict == LOOK
    assert "Other programs slow decode now: 0.480 tokens/s" in check.words
    assert "with GOMP_SPINCOUNT=300 31.1" in check.words
