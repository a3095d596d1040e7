"""What the lessons conclude where several measurements of one thing have to agree.

A conclusion is drawn only if all of them allow it.
"""

from __future__ import annotations

from collections.abc import Mapping

from lab.core import guesses
from lab.core.stats import Ratio
from lab.features.lessons.statements import LESS, MORE, SAME, Judgement, judged
from lab.roofline.advice import ACCEPTANCE
from lab.show.wording import digits


def drafts_to_gain(
    step_ratios: Mapping[int, float], predicted: tuple[int, float] | None = None
) -> Judgement:
    """Which number of drafts gains most, from the measured cost of a step by its drafts.

    `predicted`: a number of drafts, and the gain that the lab predicts for it.
    """
    gains: dict[int, float] = {}
    for n_drafts, step_ratio in step_ratios.items():
        if n_drafts:
            gains[n_drafts] = guesses.textbook_length(ACCEPTANCE, n_drafts) / step_ratio
    best = max(gains, key=gains.__getitem__)
    gain = gains[best]
    verdict = judged(Ratio(gain, gain, gain))
    ends = {
        MORE: "they can pay",
        LESS: "they cost more than they gain, and so does any other number that was measured",
        SAME: "they gain next to nothing, and no other number that was measured gains more",
    }
    right = f"{100 * ACCEPTANCE:.0f} %"
    sentence = (
        f"By the measured steps, drafts that are right with a chance of {right} gain most if "
        f"there are {best} of them in a step. Such a step takes {digits(step_ratios[best])} times "
        f"as long as one without drafts, so decode would be {gain:.2f} times as fast (without the "
        f"time to draft): {ends[verdict]}."
    )
    if predicted is not None:
        sentence += f" {beside_prediction(predicted, gains)}"
    return Judgement(f"{best} drafts at {right}", verdict, sentence)


def beside_prediction(predicted: tuple[int, float], gains: Mapping[int, float]) -> str:
    """A predicted gain of drafts against the measured one of the same number of drafts."""
    n_drafts, gain = predicted
    if n_drafts not in gains:
        return (
            f"No step with {n_drafts} drafts was measured, so these runs do not test the gain "
            "that is predicted for it."
        )
    return (
        f"For {n_drafts} drafts the ceilings predict {gain:.2f} times, and the measured step "
        f"gives {gains[n_drafts]:.2f} times: trust the measured one."
    )
