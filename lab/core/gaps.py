"""The gaps between the tokens of running answers: before a long prompt came, and while it was prefilled.

All streams get a token in the same steps, so one list of gaps is that of every stream.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass

from lab.core.record import DECODE, MIXED, PREFILL, Run

STALL = 2.0
"""A gap of more than STALL times the usual one is a stall."""


@dataclass(frozen=True)
class Gaps:
    """Of one run. `ends_s`: when the token after each gap came, in s since the newcomer's prompt came.

    The first n_before gaps came before it, the next n_during while it was prefilled. `newcomer_s` is the newcomer's
    TTFT, `n_steps` how many steps its prompt took.
    """

    ends_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    n_before: int
    n_during: int
    n_steps: int
    newcomer_s: float

    @property
    def usual_s(self) -> float:
        """The median before the prompt came."""
        return statistics.median(self.gaps_s[: self.n_before])

    @property
    def during_s(self) -> tuple[float, ...]:
        """Those in which the prompt was prefilled."""
        return self.gaps_s[self.n_before : self.n_before + self.n_during]

    @property
    def n_stalls(self) -> int:
        """How many of these are more than STALL times the usual one."""
        return sum(gap > STALL * self.usual_s for gap in self.during_s)


def of(run: Run) -> Gaps | None:
    """The gaps of a run of `lab stall`; None for other runs, and where the steps do not show them."""
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
    """What runs are compared by: gap_ms, the longest gap while the prompt was prefilled, and newcomer_s."""
    known = of(run)
    return {} if known is None else {"gap_ms": 1e3 * max(known.during_s), "newcomer_s": known.newcomer_s}
