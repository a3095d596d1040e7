"""The arithmetic of drafts: chains, steps and speed-ups counted by hand."""

import dataclasses

import pytest

from lab.core import drafts
from lab.core.drafts import Chain, StepTimes
from lab.core.record import DECODE, DRAFT, FORGET, VERIFY, Steps
from tests.support.records import make_run

ONE = StepTimes({1: 1.0, 2: 1.5, 3: 2.0, 4: 2.5}, {1: 0.25, 2: 0.375})


def test_each_step_that_chose_tokens_is_a_chain() -> None:
    kinds = (DECODE, DRAFT, VERIFY, FORGET, VERIFY)
    n = len(kinds)
    zeros = (0,) * n
    steps = Steps(kinds, (1, 1, 4, 0, 3), zeros, zeros, zeros, zeros, zeros, zeros)
    run = dataclasses.replace(make_run(), steps=steps, counts={"accepted": (2,)})
    assert drafts.checked(run) == [(0, 0), (3, 2), (2, 0)]


@pytest.mark.parametrize(
    ("chains", "n_draft", "steps"),
    [
        ([(4, 4)], 2, [(2, 2), (1, 1)]),
        ([(5, 5)], 2, [(2, 2), (2, 2)]),
        ([(4, 2)], 2, [(2, 2)]),
        ([(5, 3)], 2, [(2, 2), (2, 0)]),
        ([(5, 4)], 2, [(2, 2), (2, 1)]),
        ([(4, 0)], 2, [(2, 0)]),
        ([(0, 0)], 2, [(0, 0)]),
        # All accepted: with the token that was chosen, the next step continues the chain
        ([(2, 2), (2, 1)], 8, [(5, 4)]),
        ([(2, 2), (3, 3), (1, 0)], 20, [(8, 7)]),
        ([(1, 1), (1, 0)], 8, [(3, 2)]),
        ([(2, 2), (0, 0)], 8, [(2, 2), (0, 0)]),
        ([(2, 1), (2, 1)], 8, [(2, 1), (2, 1)]),
        ([(0, 0), (2, 1)], 8, [(0, 0), (2, 1)]),
    ],
)
def test_the_same_tokens_in_shorter_or_longer_drafts(
    chains: list[Chain], n_draft: int, steps: list[Chain]
) -> None:
    assert drafts.in_steps_of(chains, n_draft) == steps


def test_a_draft_model_drafts_as_many_tokens_as_it_is_asked_for() -> None:
    """Those after a rejected one are unknown; after all were accepted there are no more."""
    assert drafts.in_steps_of([(1, 0)], 3, may_fall_short=False) == [(3, 0)]
    assert drafts.in_steps_of([(1, 0)], 3) == [(1, 0)]
    assert drafts.in_steps_of([(1, 1)], 3, may_fall_short=False) == [(1, 1)]


def test_the_speed_up_is_the_tokens_over_the_time_of_their_steps() -> None:
    lookup = StepTimes(ONE.target, {})
    assert drafts.speed_up([(0, 0)], ONE) == 1
    assert drafts.speed_up([(2, 1)], lookup) == 2 / 2
    assert drafts.speed_up([(3, 3)], lookup) == 4 / 2.5
    assert drafts.speed_up([(2, 1)], ONE) == 2 / (2 + 2 * 0.25)
    # After all were accepted the draft model's next step has two tokens
    assert drafts.speed_up([(1, 1), (1, 0)], ONE) == 3 / (2 * (1.5 + 0.25) + 0.125)
    assert drafts.speed_up([(0, 0), (1, 0)], ONE) == 2 / (1 + 1.5 + 0.25)
    assert drafts.speed_up([(2, 1), (1, 0)], ONE) == 3 / (2 + 0.5 + 1.5 + 0.25)
    assert drafts.speed_up([(4, 1)], ONE) is None
    assert drafts.speed_up([], ONE) is None
    assert drafts.speed_up([(0, 0)], StepTimes({1: 0.0}, {})) is None


def test_the_expected_tokens_of_a_verification() -> None:
    assert drafts.textbook_length(0.0, 3) == 1
    assert drafts.textbook_length(0.5, 3) == 1 + 1 / 2 + 1 / 4 + 1 / 8
    assert drafts.textbook_length(1.0, 3) == 4
    assert drafts.textbook_length(1.5, 3) == 4


def test_drafts_pay_below_the_cost_of_their_tokens() -> None:
    """Of one token at most two: 1 + a = c + v."""
    assert drafts.break_even(1.5, 0.25, 1) == pytest.approx(0.75)
    assert drafts.break_even(1.0, 0.0, 1) == pytest.approx(0, abs=1e-9)
    assert drafts.break_even(1.75, 0.25, 1) is None
    assert drafts.break_even(1.75, 0.2, 1) == pytest.approx(0.95)
    assert drafts.break_even(1.0, 0.375, 2) == pytest.approx(0.5)  # 1 + 1/2 + 1/4
