"""Conclusions of the lessons from several measurements of one thing, which all have to allow it."""

from __future__ import annotations

import pytest

from lab.features.lessons import agreement
from lab.features.lessons.statements import MORE


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
    assert "if there are 3 of them in a step" in best.sentence
    assert "2.63 times as long as one without drafts" in best.sentence
    assert best.verdict == MORE
    assert end in best.sentence
