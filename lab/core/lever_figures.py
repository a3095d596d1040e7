"""What a run of an experiment is compared by: a few times, read off its steps.

- batch: `prefill_s` of all prompts; `tpot_ms`, a decode step, of which each sequence gets one token
- prefix: `cold_s`, `cached_s`, `ram_s`, `disk_s`, times to first token (prefix_times.py)
- stall: `gap_ms`, the longest gap between two tokens of a stream; `newcomer_s`, the newcomer's TTFT (gaps.py)
"""

from __future__ import annotations

import statistics

from lab.core import gaps, prefix_times
from lab.core.record import DECODE, OK, PREFILL, Run


def figures(run: Run) -> dict[str, float]:
    """By name; empty for a plain run, and for one that failed."""
    if run.status != OK or not run.steps.kind:
        return {}
    if run.batch is not None:
        return batch(run)
    return prefix_times.figures(run) if run.prefix is not None else gaps.figures(run)


def batch(run: Run) -> dict[str, float]:
    """Prefill of all prompts in s, and the mean time of a decode step in ms, without choosing tokens."""
    ready = [ready for kind, ready in zip(run.steps.kind, run.steps.ready_ns, strict=True) if kind == PREFILL]
    return {"prefill_s": ready[-1] / 1e9, "tpot_ms": 1e3 * step_s(run)}


def step_s(run: Run) -> float:
    """The mean time of the decode steps, without choosing tokens."""
    steps = run.steps
    columns = zip(steps.kind, steps.start_ns, steps.ready_ns, strict=True)
    return statistics.fmean(ready - start for kind, start, ready in columns if kind == DECODE) / 1e9
