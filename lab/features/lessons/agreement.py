"""What the lessons conclude where several measurements of one thing have to agree.

A conclusion is drawn only if all of them allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lab.core import drafts
from lab.core.lists import join_and, plural
from lab.core.stats import Ratio
from lab.features.lessons.statements import (
    AGREE,
    HOLDS,
    LESS,
    MORE,
    NEAR,
    NEAR_PERCENT,
    SAME,
    UNCLEAR,
    Judgement,
    judged,
    present,
    ratio,
    shown,
)
from lab.roofline.gains import ACCEPTANCE
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
            gains[n_drafts] = drafts.textbook_length(ACCEPTANCE, n_drafts) / step_ratio
    best = max(gains, key=gains.__getitem__)
    gain = gains[best]
    verdict = judged(Ratio(gain, gain, gain))
    ends = {
        MORE: "they can pay",
        LESS: "they cost more than they gain, and so does any other number that was measured",
        SAME: "that is nearly the same, and no other number that was measured gains more",
    }
    right = f"{100 * ACCEPTANCE:.0f} %"
    as_good = [f"{n}" for n in sorted(gains) if n != best and gains[n] * NEAR > gain]
    also = f" (within {NEAR_PERCENT} also with {join_and(as_good)})" if as_good else ""
    sentence = (
        f"By the measured steps, drafts that are right with a chance of {right} gain most with "
        f"{best} of them in a step{also}. Such a step takes {digits(step_ratios[best])} times "
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


def disturbed(before: Ratio | None, now: Ratio | None) -> str | None:
    """A sentence if a gain lies outside what the runs of an earlier measurement allow.

    Both are times over those of one thread. None where nothing contradicts, or too few runs tell.
    """
    if before is None or now is None:
        return None
    if before.low / NEAR <= now.estimate <= before.high * NEAR:
        return None
    return (
        "Disturbed: all threads make decode of the small model "
        f"{digits(1 / now.estimate)} times as fast here ({digits(1 / now.high)} to "
        f"{digits(1 / now.low)} in the runs), and made it {digits(1 / before.estimate)} times as "
        f"fast above ({digits(1 / before.high)} to {digits(1 / before.low)}). Measure again while "
        "no other program runs."
    )


def context_in_batch(factors: Sequence[float], k_ratio: float | None) -> Judgement:
    """Whether a longer context costs in a batch what the law says.

    `factors`: the measured cost over that of the law, for each pair of runs; none if the law has no
    cost. `k_ratio`: the slope
    of this session over that of notebook 1.
    """
    subject = "a longer context in a batch"
    if not factors:
        sentence = "By the law a longer context costs nothing, so this test tells nothing."
        return Judgement(subject, UNCLEAR, sentence)
    verdict = by_all(factors)
    ends = {
        HOLDS: "So the law also holds for contexts in a batch. The answers below are good near the "
        "measured lengths.",
        UNCLEAR: "These runs do not tell whether the law holds for contexts in a batch.",
        MORE: "All runs took more than the law says",
        LESS: "All runs took less than the law says",
    }
    end = ends[verdict]
    if verdict == UNCLEAR and (min(factors) > 1 or max(factors) < 1):
        side = "more" if min(factors) > 1 else "less"
        end = f"All runs took {side}, but these runs do not tell whether by over {AGREE:g} times."
    if verdict in (MORE, LESS):
        reason = (
            "a context costs another time in a batch than alone, or this session's k is off"
        )
        if k_ratio is not None:
            with_other_k = by_all([factor * k_ratio for factor in factors])
            if with_other_k == HOLDS:
                reason = (
                    "with the k of notebook 1 the law would hold, so one k of the two is off"
                )
            elif with_other_k == verdict:
                reason = (
                    "the k of notebook 1 gives the same, so the batch changes it, or the machine's "
                    "speed changed between the two measurements"
                )
        end += f": {reason}. Take the answers below for long contexts as orders of magnitude."
    figures = f"{digits(min(factors))} to {digits(max(factors))}"
    sentence = f"The longer context took {figures} times what the law says. {end}"
    return Judgement(subject, verdict, sentence)


def by_all(factors: Sequence[float]) -> str:
    """The verdict that all of these factors of 1 allow."""
    low = min(factors)
    high = max(factors)
    if low > 1 / AGREE and high < AGREE:
        return HOLDS
    if low > AGREE:
        return MORE
    if low > 0 and high < 1 / AGREE:
        return LESS
    return UNCLEAR


def same_request(before_ms: Sequence[float], now_ms: Sequence[float]) -> str | None:
    """A sentence if a server's tokens took another time in later runs of one request."""
    measured = ratio(present(before_ms), present(now_ms))
    if judged(measured) not in (MORE, LESS):
        return None
    return (
        f"Each further token through the server took {shown(measured)} as long here as in the "
        f"{plural(len(present(before_ms)), 'run')} of the first measurement: the server's speed "
        "changed between the two cells. So only runs that take turns are compared."
    )
