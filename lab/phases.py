"""A run's phases, by arithmetic on its steps.

    start of step 0            prefill ready   first token          token 2        last token
    |------- prefill time -----------|--------------|--- ITL[0] -------|  ...  ------|
    |------- TTFT ----------------------------------|--- the n_gen - 1 decode steps -|
    |------- E2E --------------------------------------------------------------------|

Times are in nanoseconds as recorded; a figure that a run cannot give (it failed, or is too short) is
None. Tokenising the prompt is in none of them.
"""

from __future__ import annotations

from lab.record import DECODE, OK, PREFILL, Run


def n_prefill_steps(run: Run) -> int:
    """How many of the first steps are prefill."""
    return run.steps.kind.count(PREFILL)


def prefill_ns(run: Run) -> int | None:
    """Last prefill step's logits ready - first step's start. Comparable with llama-bench `pp`."""
    if run.status != OK or not n_prefill_steps(run):
        return None
    return run.steps.ready_ns[n_prefill_steps(run) - 1] - run.steps.start_ns[0]


def ttft_ns(run: Run) -> int | None:
    """Time to first token: prefill plus choosing one token."""
    if run.status != OK or not n_prefill_steps(run):
        return None
    return run.steps.end_ns[n_prefill_steps(run) - 1] - run.steps.start_ns[0]


def itl_ns(run: Run) -> tuple[int, ...]:
    """Inter-token latencies: `end_ns` of decode step i - `end_ns` of the step before it."""
    ends = run.steps.end_ns
    return tuple(ends[i] - ends[i - 1] for i, kind in enumerate(run.steps.kind) if kind == DECODE and i > 0)


def decode_compute_ns(run: Run) -> tuple[int, ...]:
    """`ready_ns` - `start_ns` of each decode step: sampling excluded. Comparable with llama-bench `tg`."""
    steps = run.steps
    return tuple(
        ready - start
        for kind, start, ready in zip(steps.kind, steps.start_ns, steps.ready_ns, strict=True)
        if kind == DECODE
    )


def tpot_ns(run: Run) -> float | None:
    """Time per output token after the first: (last end - first token's end) / (n_gen - 1)."""
    first = ttft_ns(run)
    if first is None or run.n_gen < 2:
        return None
    return (run.steps.end_ns[-1] - run.steps.start_ns[0] - first) / (run.n_gen - 1)


def e2e_ns(run: Run) -> int | None:
    """End to end: last end - first start."""
    if run.status != OK or not run.steps.kind:
        return None
    return run.steps.end_ns[-1] - run.steps.start_ns[0]


def between_steps_ns(run: Run) -> tuple[int, ...]:
    """The harness's own time: from each step's `end_ns` to the next step's `start_ns`."""
    steps = run.steps
    return tuple(start - end for end, start in zip(steps.end_ns, steps.start_ns[1:], strict=False))
