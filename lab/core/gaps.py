"""The gaps between the tokens of running answers when a long prompt arrives (`lab stall`).

All streams get a token in the same steps, so they share one list of gaps. The functions take a frame of steps (`kind`,
`start_s`, `end_s`), measured or predicted: the streams' own prompts, their steps alone, the new prompt, steps of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.core.record import DECODE, MIXED, PREFILL, Run

if TYPE_CHECKING:
    import pandas as pd

STALL = 2.0
"""A gap longer than STALL times the usual gap is a stall."""


def prompt_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps of the new prompt: those with prompt tokens after the first decode step."""
    return steps[steps.kind.eq(DECODE).cummax() & steps.kind.isin((MIXED, PREFILL))]


def of(steps: pd.DataFrame) -> pd.DataFrame:
    """A row per token of the streams: `at_s` since the new prompt arrived, `gap_s`, and `when`.

    `when` is before the prompt, during its prefill (the gap overlaps it), or after.
    """
    import pandas as pd

    prompt = prompt_steps(steps)
    tokens = steps[steps.kind.eq(DECODE).cummax() & steps.kind.isin((DECODE, MIXED))]
    arrived, done = prompt.start_s.min(), prompt.end_s.max()
    end, previous = tokens.end_s, tokens.end_s.shift()
    when = pd.Series("after", tokens.index).mask(previous < done, "during").mask(end <= arrived, "before")
    return tokens.assign(at_s=end - arrived, gap_s=end - previous, when=when).iloc[1:].reset_index()


def figures(steps: pd.DataFrame) -> dict[str, float]:
    """The figures of a run. `newcomer_s` is the new request's TTFT, `usual_gap_s` the median gap before it came."""
    tokens, prompt = of(steps), prompt_steps(steps)
    during, usual = tokens.gap_s[tokens.when == "during"], tokens.gap_s[tokens.when == "before"].median()
    return {
        "n_steps": len(prompt),
        "n_stalls": int((during > STALL * usual).sum()),
        "longest_gap_s": during.max(),
        "median_gap_s": during.median(),
        "usual_gap_s": usual,
        "newcomer_s": prompt.end_s.max() - prompt.start_s.min(),
    }


def measured(run: Run) -> pd.DataFrame | None:
    """The steps of a run of `lab stall`; None for other runs, and if its steps are not those of its script."""
    lever = run.stall
    if lever is None or lever.n_streams < 1 or (lever.chunk is not None and lever.chunk < 1) or lever.n_before < 2:
        return None
    steps = run.steps.frame()
    prompt = prompt_steps(steps)
    n_before = (steps.loc[: prompt.index.min() - 1].kind == DECODE).sum() if len(prompt) else 0
    n_beside = lever.n_streams * (prompt.kind == MIXED).sum()
    is_whole = n_before == lever.n_before and prompt.n_tokens.sum() - n_beside == run.n_prompt
    return steps if is_whole and (steps.kind == DECODE).sum() > n_before else None


def compared(run: Run) -> dict[str, float]:
    """The compared figures: gap_ms, the longest gap during prefill of the prompt, and newcomer_s."""
    steps = measured(run)
    known = {} if steps is None else figures(steps)
    return {"gap_ms": 1e3 * known["longest_gap_s"], "newcomer_s": known["newcomer_s"]} if known else {}
