"""The arithmetic of speculative decoding: accepted draft tokens, times of steps, the speed-up.

Prefill yields the first token. The others come from `draft` steps, `verify` steps (the draft tokens
and one more, at once), `forget` (removes the rejected tokens), and `decode` where nothing was
drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.core.record import DECODE, DRAFT, OK, VERIFY, Run

if TYPE_CHECKING:
    import pandas as pd

LOOKUP = "lookup"  # drafts are what followed the same words before

Chain = tuple[int, int]
"""Draft tokens in a row, and how many of them, from the first on, were accepted."""


def checked(run: Run) -> list[Chain]:
    """For each step that chose tokens: the draft tokens verified, and those accepted.

    (0, 0) for steps without draft tokens.
    """
    accepted = iter(run.counts.get("accepted", ()))
    chains = []
    for kind, n_tokens in zip(run.steps.kind, run.steps.n_tokens, strict=True):
        if kind == VERIFY:
            chains.append((n_tokens - 1, next(accepted, 0)))
        elif kind == DECODE:
            chains.append((0, 0))
    return chains


def in_steps_of(
    chains: Sequence[Chain], n_draft: int, may_fall_short: bool = True
) -> list[Chain]:
    """The steps that the same draft tokens would have taken, `n_draft` verified at a time.

    With `may_fall_short` (lookup in the text) a draft may be shorter than n_draft; a model always
    drafts n_draft. Tokens after a rejected one are unknown, and count as rejected.
    """
    steps = []
    for n_tokens, n_accepted in _joined(chains):
        while n_accepted >= 0:  # each step chooses its accepted tokens and one more
            n_drafted = min(n_draft, n_tokens)
            if n_tokens > n_accepted and not may_fall_short:
                n_drafted = n_draft
            n_right = min(n_drafted, n_accepted)
            steps.append((n_drafted, n_right))
            n_tokens -= n_right + 1
            n_accepted -= n_right + 1
    return steps


def _joined(chains: Sequence[Chain]) -> list[Chain]:
    """Long chains: a step with all tokens accepted and its successor are one.

    The extra token of that step would have been the next draft token: it counts as accepted.
    """
    long_chains: list[Chain] = []
    continues = False
    for n_tokens, n_accepted in chains:
        if continues and n_tokens:
            n_tokens_before, n_accepted_before = long_chains.pop()
            n_tokens += n_tokens_before + 1
            n_accepted += n_accepted_before + 1
        long_chains.append((n_tokens, n_accepted))
        continues = 0 < n_tokens == n_accepted
    return long_chains


@dataclass(frozen=True)
class StepTimes:
    """Seconds of steps by number of tokens: of the model, and of the draft model.

    After a fully accepted draft the draft model's next step has two tokens, because it has not read
    the last one yet.
    """

    target: dict[int, float]
    draft: dict[int, float]


def step_times(runs: Sequence[Run]) -> StepTimes | None:
    """Median step times over the runs of single steps; None without such runs."""
    import pandas as pd

    completed = [run for run in runs if run.status == OK]
    if not completed:
        return None
    steps = pd.concat([run.steps.frame() for run in completed])
    steps = steps[steps.kind.isin((DECODE, VERIFY, DRAFT)) & (steps.n_outputs > 0)]
    seconds = steps.end_s - steps.start_s
    is_draft = steps.kind == DRAFT
    target = _medians(seconds[~is_draft], steps.n_tokens[~is_draft])
    draft = _medians(seconds[is_draft], steps.n_tokens[is_draft])
    if 1 not in target:
        return None
    if 1 not in draft or 2 not in draft:
        draft = {}
    return StepTimes(target, draft)


def _medians(seconds: pd.Series, n_tokens: pd.Series) -> dict[int, float]:
    """The median seconds by number of tokens."""
    medians = seconds.groupby(n_tokens).median()
    return dict(medians.items())


def speed_up(chains: Sequence[Chain], times: StepTimes) -> float | None:
    """The time of plain decoding over the time of these steps.

    None if a step's time is unknown.
    """
    total_s = 0.0
    n_chosen = 0
    is_behind = False
    for n_drafted, n_accepted in chains:
        if n_drafted + 1 not in times.target:
            return None
        total_s += times.target[n_drafted + 1]
        if n_drafted and times.draft:  # a lookup costs nothing
            total_s += n_drafted * times.draft[1]
            if is_behind:
                total_s += times.draft[2] - times.draft[1]
        is_behind = 0 < n_drafted == n_accepted
        n_chosen += n_accepted + 1
    if total_s <= 0:
        return None
    return n_chosen * times.target[1] / total_s


def textbook_length(acceptance: float, n_draft: int) -> float:
    """Expected tokens of one verification: (1 - a^(n+1)) / (1 - a).

    Leviathan et al. (2023), equation 1.
    """
    if acceptance >= 1:
        return n_draft + 1.0
    return (1 - acceptance ** (n_draft + 1)) / (1 - acceptance)


def break_even(v: float, c: float, n_draft: int) -> float | None:
    """The acceptance rate (equal for each token) at which L = n c + v.

    None if even a rate of 1 is too low.
    """
    cost = n_draft * c + v
    if cost >= n_draft + 1:
        return None
    low = 0.0
    high = 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if textbook_length(middle, n_draft) < cost:
            low = middle
        else:
            high = middle
    return high
