"""The gaps between the tokens of running answers, before a long prompt arrives and during its prefill.

All streams get a token in the same steps, so they share one list of gaps.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from lab.core.record import DECODE, MIXED, PREFILL, Run

STALL = 2.0
"""A gap longer than STALL times the usual gap is a stall."""


@dataclass(frozen=True)
class Gaps:
    """The gaps of one run. `ends_s`: when the token after each gap arrived, in s since the new prompt arrived.

    The first n_before gaps are before the new prompt, the next n_during are during its prefill. `newcomer_s` is the new
    request's TTFT, `n_steps` the number of its prefill steps.
    """

    ends_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    n_before: int
    n_during: int
    n_steps: int
    newcomer_s: float

    @property
    def usual_s(self) -> float:
        """The median gap before the prompt arrived."""
        return statistics.median(self.gaps_s[: self.n_before])

    @property
    def during_s(self) -> tuple[float, ...]:
        """The gaps during prefill of the prompt."""
        return self.gaps_s[self.n_before : self.n_before + self.n_during]

    @property
    def n_stalls(self) -> int:
        """The number of stalls among these."""
        return sum(gap > STALL * self.usual_s for gap in self.during_s)


def of(run: Run) -> Gaps | None:
    """The gaps of a run of `lab stall`; None for other runs, and if the steps do not show them."""
    steps, lever = run.steps, run.stall
    decode = [i for i, kind in enumerate(steps.kind) if kind == DECODE]
    if lever is None or lever.n_streams < 1 or (lever.chunk is not None and lever.chunk < 1):
        return None
    if lever.n_before < 2 or len(decode) <= lever.n_before:
        return None
    last_before = decode[lever.n_before - 1]
    prompt = [i for i, kind in enumerate(steps.kind) if i > last_before and kind in (MIXED, PREFILL)]
    answering = [i for i, kind in enumerate(steps.kind) if i >= decode[0] and kind in (DECODE, MIXED)]
    if not prompt or len(answering) != len(decode) + sum(steps.kind[i] == MIXED for i in prompt):
        return None
    n_beside = lever.n_streams * sum(steps.kind[i] == MIXED for i in prompt)
    if sum(steps.n_tokens[i] for i in prompt) - n_beside != run.n_prompt:
        return None
    came = steps.start_ns[prompt[0]]
    ends = [steps.end_ns[i] for i in answering]
    return Gaps(
        ends_s=tuple((end - came) / 1e9 for end in ends[1:]),
        gaps_s=tuple((end - before) / 1e9 for before, end in itertools.pairwise(ends)),
        n_before=lever.n_before - 1,
        n_during=sum(steps.kind[i] == MIXED for i in prompt) or 1,
        n_steps=len(prompt),
        newcomer_s=(steps.end_ns[prompt[-1]] - came) / 1e9,
    )


def figures(run: Run) -> dict[str, float]:
    """The compared figures: gap_ms, the longest gap during prefill of the prompt, and newcomer_s."""
    known = of(run)
    return {} if known is None else {"gap_ms": 1e3 * max(known.during_s), "newcomer_s": known.newcomer_s}
