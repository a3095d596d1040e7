"""What a run of speculation shows: the time of a token, and what became of the guesses.

The run's first token comes out of its prefill; the others out of steps that follow: `draft` (guessing), `verify` (the
guesses and one token more, computed at once), `forget` (of what was wrong), and `decode` where nothing was guessed.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.core.record import DECODE, DRAFT, OK, PREFILL, VERIFY, Run

Chain = tuple[int, int]
"""How many tokens were guessed, one after the other, and how many of the first of them were right."""


def figures(run: Run) -> dict[str, float]:
    """`tpot_ms` of a run that generated; empty for others."""
    seconds = tpot_s(run)
    return {} if seconds is None else {"tpot_ms": 1e3 * seconds}


def tpot_s(run: Run) -> float | None:
    """Time per token after the first, guessing and forgetting included; None where there is none."""
    lever, steps = run.speculation, run.steps
    if lever is None or lever.text is None or run.status != OK or run.n_gen < 2 or PREFILL not in steps.kind:
        return None
    last_prefill = max(i for i, kind in enumerate(steps.kind) if kind == PREFILL)
    taken_ns = steps.end_ns[-1] - steps.end_ns[last_prefill]
    return taken_ns / 1e9 / (run.n_gen - 1) if taken_ns > 0 else None


def checked(run: Run) -> list[Chain]:
    """Of each step that chose tokens: how many it verified, and how many were right; (0, 0) of plain ones."""
    accepted = iter(run.accepted or ())
    kinds = zip(run.steps.kind, run.steps.n_tokens, strict=True)
    return [(n - 1, next(accepted, 0)) if kind == VERIFY else (0, 0) for kind, n in kinds if kind in (VERIFY, DECODE)]


def by_position(chains: Sequence[Chain]) -> tuple[float, ...]:
    """For the first, second, ... guess of a step: the share that was right, of those whose predecessors were."""
    shares = []
    for i in range(max((n for n, _ in chains), default=0)):
        tried = [right > i for n, right in chains if n > i and right >= i]
        if not tried:
            break
        shares.append(statistics.fmean(tried))
    return tuple(shares)


def joined(chains: Sequence[Chain]) -> list[Chain]:
    """Steps of which every guess was right, and what follows them, as one long chain of guesses.

    The token that such a step adds would have been the next guess; it counts as a right one.
    """
    chained: list[Chain] = []
    goes_on = False
    for n, right in chains:
        if goes_on and n:
            n_before, right_before = chained.pop()
            n, right = n_before + 1 + n, right_before + 1 + right
        chained.append((n, right))
        goes_on = n > 0 and right == n
    return chained


def in_steps_of(chains: Sequence[Chain], n_draft: int, may_fall_short: bool = True) -> list[Chain]:
    """The same guesses verified n_draft at a time: the steps that this would have taken.

    A lookup's guesses `may_fall_short` where the text has no more; a model always guesses n_draft of them.
    """
    return [step for n, n_right in joined(chains) for step in _steps_of(n, n_right, n_draft, may_fall_short)]


def _steps_of(n: int, n_right: int, n_draft: int, may_fall_short: bool) -> Iterator[Chain]:
    """The steps of one chain. Each chooses the tokens that it guessed right, and the one after them."""
    n_chosen = 0
    while n_chosen <= n_right:
        guessed = min(n_draft, n - n_chosen)
        if n > n_right and not may_fall_short:  # what follows a wrong guess was not asked for, and would be wrong
            guessed = n_draft
        accepted = min(guessed, n_right - n_chosen)
        yield guessed, accepted
        n_chosen += accepted + 1


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the steps that speculation is made of: of the model by positions, of the draft model by tokens.

    The draft model reads two tokens in a step after all its guesses were right: it has not read the last one yet.
    """

    target: dict[int, float]
    draft: dict[int, float]

    def draft_s(self, guessed: int, after_all_right: bool) -> float:
        """Guessing so many tokens; looking them up costs nothing."""
        if not guessed or not self.draft:
            return 0.0
        return guessed * self.draft[1] + (self.draft[2] - self.draft[1] if after_all_right else 0.0)


def step_times(runs: Sequence[Run]) -> StepTimes | None:
    """Medians over runs of the curve (a Speculation without text); None without one."""
    target: dict[int, list[float]] = {}
    draft: dict[int, list[float]] = {}
    for run in runs:
        if run.speculation is None or run.speculation.text is not None or run.status != OK:
            continue
        steps = run.steps
        columns = zip(steps.kind, steps.n_tokens, steps.n_outputs or (), steps.start_ns, steps.end_ns, strict=True)
        for kind, n_tokens, n_outputs, start, end in columns:
            if n_outputs and kind in (DECODE, VERIFY):
                target.setdefault(n_tokens, []).append((end - start) / 1e9)
            elif n_outputs and kind == DRAFT:
                draft.setdefault(n_tokens, []).append((end - start) / 1e9)
    if 1 not in target:
        return None
    return StepTimes(
        {n: statistics.median(times) for n, times in sorted(target.items())},
        {n: statistics.median(times) for n, times in sorted(draft.items())},
    )


def speed_up(chains: Sequence[Chain], times: StepTimes) -> float | None:
    """Plain decoding's time over that of these steps; None where a step's time is not known."""
    total = 0.0
    for before, (guessed, _) in itertools.pairwise([(0, 0), *chains]):
        if guessed + 1 not in times.target:
            return None
        total += times.draft_s(guessed, before[0] > 0 and before[0] == before[1]) + times.target[guessed + 1]
    n_tokens = sum(right + 1 for _, right in chains)
    return n_tokens * times.target[1] / total if total > 0 else None


def textbook_length(acceptance: float, n_draft: int) -> float:
    """Tokens that a verification of n_draft guesses brings, where each is right with the same probability.

    (1 - a^(n+1)) / (1 - a): Leviathan et al. (2023), equation 1.
    """
    return n_draft + 1.0 if acceptance >= 1 else (1 - acceptance ** (n_draft + 1)) / (1 - acceptance)


def break_even(v: float, c: float, n_draft: int) -> float | None:
    """The share of right guesses (each equally likely) at which L = n c + v; None where even 1 is too few."""
    cost = n_draft * c + v
    if cost >= n_draft + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if textbook_length(middle, n_draft) < cost else (low, middle)
    return high
