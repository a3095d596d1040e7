"""The arithmetic of speculative decoding: accepted draft tokens, times of steps, and the speed-up from both.

Prefill yields the first token. The others come from `draft` steps, `verify` steps (the draft tokens and one more, at
once), `forget` (removes the rejected tokens), and `decode` where nothing was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.core.record import DECODE, DRAFT, OK, VERIFY, Run

LOOKUP = "lookup"  # drafts are what followed the same words before
Chain = tuple[
    int, int
]  # the number of draft tokens in a row, and how many of them, from the first on, were accepted


def checked(run: Run) -> list[Chain]:
    """For each step that chose tokens: the draft tokens verified, and those accepted; (0, 0) for plain steps."""
    accepted = iter(run.counts.get("accepted", ()))
    kinds = zip(run.steps.kind, run.steps.n_tokens, strict=True)
    return [
        (n - 1, next(accepted, 0)) if kind == VERIFY else (0, 0)
        for kind, n in kinds
        if kind in (VERIFY, DECODE)
    ]


def in_steps_of(chains: Sequence[Chain], n_draft: int, may_fall_short: bool = True) -> list[Chain]:
    """The steps that the same draft tokens would have taken, if `n_draft` had been verified at a time.

    With `may_fall_short` (lookup in the text) a draft may be shorter than n_draft; a model always drafts n_draft.
    """
    long = list[Chain]()
    steps = list[Chain]()
    goes_on = False
    for n, right in chains:  # a step with all tokens accepted and its successor are one long chain
        if (
            goes_on and n
        ):  # the extra token of that step would have been the next draft token: it counts as accepted
            n_before, right_before = long.pop()
            n = n_before + 1 + n
            right = right_before + 1 + right
        long.append((n, right))
        goes_on = n > 0 and right == n
    for n, right in long:
        while right >= 0:  # each step chooses its accepted tokens and one more
            # tokens after a rejected one are unknown, and count as rejected
            guessed = n_draft if n > right and not may_fall_short else min(n_draft, n)
            steps.append((guessed, min(guessed, right)))
            n = n - steps[-1][1] - 1
            right = right - steps[-1][1] - 1
    return steps


@dataclass(frozen=True)
class StepTimes:
    """Seconds of steps by number of tokens: of the model, and of the draft model.

    After a fully accepted draft the draft model's next step has two tokens, because it has not read the last one yet.
    """

    target: dict[int, float]
    draft: dict[int, float]


def step_times(runs: Sequence[Run]) -> StepTimes | None:
    """Median step times over the runs of single steps; None without such runs."""
    import pandas as pd

    curves = [run for run in runs if run.status == OK]
    if not curves:
        return None
    steps = pd.concat([run.steps.frame() for run in curves])
    steps = steps[steps.kind.isin((DECODE, VERIFY, DRAFT)) & (steps.n_outputs > 0)]
    medians = (steps.end_s - steps.start_s).groupby([steps.kind == DRAFT, steps.n_tokens]).median()
    target, draft = (
        {n: s for (is_draft, n), s in medians.items() if is_draft == own} for own in (False, True)
    )
    return StepTimes(target, draft if {1, 2} <= draft.keys() else {}) if 1 in target else None


def speed_up(chains: Sequence[Chain], times: StepTimes) -> float | None:
    """The time of plain decoding over that of these steps; None if a step's time is unknown."""
    total = 0.0
    is_behind = False
    for guessed, right in chains:
        if guessed + 1 not in times.target:
            return None
        total += times.target[guessed + 1]
        if guessed and times.draft:  # a lookup costs nothing
            total += guessed * times.draft[1] + (
                times.draft[2] - times.draft[1] if is_behind else 0.0
            )
        is_behind = 0 < guessed == right
    n_tokens = sum(right + 1 for _, right in chains)
    return n_tokens * times.target[1] / total if total > 0 else None


def textbook_length(acceptance: float, n_draft: int) -> float:
    """Expected tokens of one verification: (1 - a^(n+1)) / (1 - a), Leviathan et al. (2023), equation 1."""
    return (
        n_draft + 1.0 if acceptance >= 1 else (1 - acceptance ** (n_draft + 1)) / (1 - acceptance)
    )


def break_even(v: float, c: float, n_draft: int) -> float | None:
    """The acceptance rate (equal for each token) at which L = n c + v; None if even a rate of 1 is too low."""
    cost = n_draft * c + v
    if cost >= n_draft + 1:
        return None
    low = 0.0
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if textbook_length(middle, n_draft) < cost else (low, middle)
    return high
