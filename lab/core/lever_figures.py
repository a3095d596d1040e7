"""The figures by which runs of an experiment are compared, from the times of their steps.

- batch: `prefill_s` of all prompts; `tpot_ms`, a decode step, which gives each sequence one token
- speculation: `tpot_ms` of all tokens after the first, with drafting and forgetting
- turns: `turns_s`, the whole conversation
- stall: `gap_ms`, the longest gap between two tokens of a stream; `newcomer_s`, the new request's TTFT (gaps.py)
"""

from __future__ import annotations

import statistics

from lab.core import gaps
from lab.core.levers import Batch, Speculation, Stall, Turns
from lab.core.record import DECODE, OK, PREFILL, Run

NAMES = {
    "gap_ms": "longest gap",
    "newcomer_s": "TTFT of the newcomer",
    "turns_s": "whole conversation",
}
"""The figures that plain runs do not have, in words."""


def figures(run: Run) -> dict[str, float]:
    """The figures by name; empty for a plain run, a failed run, and one whose steps do not fit its experiment."""
    if run.status != OK or run.n_prompt < 1 or run.n_gen < 1:
        return {}
    of = FIGURES.get(type(run.lever))
    times = of(run) if of else {}
    return times if all(value > 0 for value in times.values()) else {}


def batch(run: Run) -> dict[str, float]:
    """Prefill of all prompts in s, and the mean time of a decode step in ms, without sampling.

    Empty unless every decode step has a token of each sequence.
    """
    steps = run.steps
    ready = [ready for kind, ready in zip(steps.kind, steps.ready_ns, strict=True) if kind == PREFILL]
    sizes = {n for kind, n in zip(steps.kind, steps.n_tokens, strict=True) if kind == DECODE}
    if run.batch is None or not ready or sizes != {run.batch.n_seq}:
        return {}
    return {"prefill_s": ready[-1] / 1e9, "tpot_ms": 1e3 * step_s(run)}


def step_s(run: Run) -> float:
    """The mean time of the decode steps in seconds, without sampling."""
    steps = run.steps
    columns = zip(steps.kind, steps.start_ns, steps.ready_ns, strict=True)
    return statistics.fmean(ready - start for kind, start, ready in columns if kind == DECODE) / 1e9


def speculation(run: Run) -> dict[str, float]:
    """Time per token after the first in ms, with drafting and forgetting; empty if no text was generated."""
    lever, steps = run.speculation, run.steps
    if lever is None or lever.text is None or run.n_gen < 2 or PREFILL not in steps.kind:
        return {}
    last_prefill = max(i for i, kind in enumerate(steps.kind) if kind == PREFILL)
    return {"tpot_ms": (steps.end_ns[-1] - steps.end_ns[last_prefill]) / 1e6 / (run.n_gen - 1)}


def turns(run: Run) -> dict[str, float]:
    """The time of the whole conversation in s, with saving and loading its cache."""
    return {"turns_s": run.steps.end_ns[-1] / 1e9} if run.steps.end_ns else {}


FIGURES = {
    Batch: batch,
    Stall: gaps.compared,
    Speculation: speculation,
    Turns: turns,
}
"""The function that makes the figures of a run, by its lever."""
