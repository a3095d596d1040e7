"""Conclusions of the lessons from several measurements of one thing, which all have to allow it."""

from __future__ import annotations

import pytest

from lab.core.stats import Ratio
from lab.features.lessons import agreement
from lab.features.lessons.statements import HOLDS, LESS, MORE, UNCLEAR


@pytest.mark.parametrize(
    ("predicted", "end"),
    [
        ((3, 1.10), "predict 1.10 times, and the measured step gives 1.12 times"),
        ((4, 1.10), "predict 1.10 times, and the measured step gives 1.00 times"),
        ((7, 1.10), "No step with 7 drafts was measured"),
        (None, "1.12 times as fast (without the time to draft): they can pay."),
    ],
)
def test_a_prediction_of_drafts_is_set_against_the_same_number_of_drafts(
    predicted: tuple[int, float] | None, end: str
) -> None:
    best = agreement.drafts_to_gain({0: 1, 1: 1.75, 2: 2.22, 3: 2.63, 4: 3.35}, predicted)
    assert "with 3 of them in a step" in best.sentence
    assert "2.63 times as long as one without drafts" in best.sentence
    assert best.verdict == MORE
    assert end in best.sentence


@pytest.mark.parametrize(
    ("factors", "k_ratio", "verdict", "part"),
    [
        ([0.9, 1.1], None, HOLDS, "took 0.900 to 1.10 times what the law says. So the law"),
        ([1.6, 1.2], None, UNCLEAR, "do not tell"),
        ([1.6], 1.0, MORE, "the k of notebook 1 gives the same"),
        ([1.6, 1.4], None, MORE, "or this session's k is off"),
        ([1.6, 1.4], 0.85, MORE, "in a batch than alone, or this session's k is off"),
        ([1.6, 1.4], 0.7, MORE, "with the k of notebook 1 the law would hold"),
        ([0.5, 0.6], None, LESS, "less than the law says"),
        ([-0.5, 0.6], None, UNCLEAR, "do not tell"),
        ([], 1.0, UNCLEAR, "tells nothing"),
    ],
)
def test_a_context_in_a_batch_is_judged_only_where_all_runs_agree(
    factors: list[float], k_ratio: float | None, verdict: str, part: str
) -> None:
    said = agreement.context_in_batch(factors, k_ratio)
    assert (said.verdict, part in said.sentence) == (verdict, True), said.sentence


BEFORE = Ratio(1 / 1.49, 1 / 1.57, 1 / 1.32)


@pytest.mark.parametrize(
    ("before", "gain", "is_disturbed"),
    [
        (BEFORE, 1.07, True),
        (BEFORE, 1.25, False),  # within 10 % of the range: another context
        (BEFORE, 1.5, False),
        (BEFORE, 1.8, True),
        (None, 1.07, False),
    ],
)
def test_a_gain_outside_the_earlier_range_is_called_disturbed(
    before: Ratio | None, gain: float, is_disturbed: bool
) -> None:
    sentence = agreement.disturbed(before, Ratio(1 / gain, 0.9 / gain, 1.1 / gain))
    assert (sentence is not None) == is_disturbed
    if sentence:
        assert f"{gain:.2f} times as fast here" in sentence
        assert "1.49 times as fast above (1.32 to 1.57)" in sentence


def test_a_server_whose_speed_changed_is_named() -> None:
    assert agreement.same_request([10.0, 10.3], [10.5, 11.4]) is None
    assert agreement.same_request([10.1, 9.9, 10.3], [11.8, 9.8, 13.0]) is None
    changed = agreement.same_request([12.4, 12.5, 12.3], [9.47, 9.5]) or ""
    assert "took 0.765 times" in changed
    assert "in the 3 runs of the first measurement" in changed
    assert agreement.same_request([float("nan")], [9.47]) is None
