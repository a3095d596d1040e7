"""The case of a run of `lab speculate`, and its figures."""

from __future__ import annotations

from dataclasses import dataclass

from lab.core.experiments import ExperimentRuns, setup_of
from lab.core.record import OK, PREFILL, Run

NAME = "speculate"  # of the experiment in records


@dataclass(frozen=True)
class Speculation:
    """Tokens were drafted and verified together; without a text only single steps were timed."""

    draft: str | None  # lookup (earlier words of the text), a model's label; None: no drafts
    n_draft: int  # drafted before each verification, at most; 0: plain decoding
    text: str | None
    """The prompt's source. None: steps of 1 to n_draft + 1 positions and of the draft model were
    timed, each forgotten again."""

    @property
    def label(self) -> str:
        if self.text is None:
            return f"steps of 1 to {self.n_draft + 1} positions"
        if self.n_draft == 0:
            return f"{self.text}, no drafts"
        return f"{self.text}, {self.n_draft} drafted by {self.draft}"


def speculation_of(run: Run) -> Speculation | None:
    """The speculation of a run; None for runs of other experiments."""
    return setup_of(Speculation, run.case) if run.experiment == NAME else None


def figures(run: Run) -> dict[str, float]:
    """`tpot_ms` of all tokens after the first, with drafting and forgetting.

    Empty for a failed run, and for one of single steps.
    """
    speculation = speculation_of(run)
    if speculation is None or speculation.text is None:
        return {}
    steps = run.steps
    if run.status != OK or run.n_gen < 2 or run.n_prompt < 1 or PREFILL not in steps.kind:
        return {}
    first_token_ns = 0
    for kind, end_ns in zip(steps.kind, steps.end_ns, strict=True):
        if kind == PREFILL:
            first_token_ns = end_ns
    decode_ns = steps.end_ns[-1] - first_token_ns
    return {"tpot_ms": decode_ns / 1e6 / (run.n_gen - 1)} if decode_ns > 0 else {}


RUNS = ExperimentRuns(
    check=lambda case: setup_of(Speculation, case),
    label=lambda case: setup_of(Speculation, case).label,
    figures=figures,
)
