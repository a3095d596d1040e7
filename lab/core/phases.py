"""A run's phases, by arithmetic on its steps.

    start of step 0            prefill ready   first token          token 2        last token
    |------- prefill time -----------|--------------|--- ITL[0] -------|  ...  ------|
    |------- TTFT ----------------------------------|--- the n_gen - 1 decode steps -|
    |------- E2E --------------------------------------------------------------------|

Times are in nanoseconds as recorded. A figure is None if the run failed or is too short for it. No
figure includes tokenization of the prompt. An imported run has one step for a whole phase, without
the choice of a token.
"""

from __future__ import annotations

import dataclasses

from lab.core.record import DECODE, FORGET, OK, PREFILL, Run, Settings, Steps

STEP_COLUMNS = tuple(field.name for field in dataclasses.fields(Steps))
STAMPS = ("start_ns", "ready_ns", "end_ns")


def by_length(run: Run) -> tuple[Run, ...]:
    """A sweep as separate runs, one per length, with all prefill steps up to it; any other run
    unchanged."""
    import numpy as np

    if run.every is None or not run.steps.kind:
        return (run,)
    computes = np.array(run.steps.kind) != FORGET
    columns = {name: np.array(getattr(run.steps, name))[computes] for name in STEP_COLUMNS}
    firsts = np.flatnonzero(columns["kind"] == PREFILL)
    # Of each prefill step and the steps after it
    n_rows = np.diff([*firsts, len(columns["kind"])])

    # Move each prefill step, with the steps after it, to the time at which it would have begun if
    # nothing had been generated before it.
    prefill_ns = columns["ready_ns"][firsts] - columns["start_ns"][firsts]
    starts_at_ns = prefill_ns.cumsum() - prefill_ns
    moved_ns = np.repeat(starts_at_ns - columns["start_ns"][firsts], n_rows)
    for name in STAMPS:
        columns[name] = columns[name] + moved_ns
    prefill = {name: column[firsts] for name, column in columns.items()}
    prefill["end_ns"] = prefill["ready_ns"]
    prefill["n_outputs"] = np.zeros_like(prefill["n_outputs"])

    runs: list[Run] = []
    for number, first in enumerate(firsts):
        n_prompt = int(columns["n_past"][first] + columns["n_tokens"][first])
        is_last = number == len(firsts) - 1
        if n_prompt % run.every and not is_last:
            continue
        end = first + n_rows[number]
        rows = {}
        for name in STEP_COLUMNS:
            steps_before = prefill[name][:number].tolist()
            rows[name] = (*steps_before, *columns[name][first:end].tolist())
        steps = Steps(**rows)
        runs.append(dataclasses.replace(run, n_prompt=n_prompt, steps=steps, token_ids=()))
    return tuple(runs)


def n_prefill_steps(run: Run) -> int:
    return run.steps.kind.count(PREFILL)


def times_prefill_steps(settings: Settings) -> bool:
    """Whether each prefill step is timed: its `ready_ns` is when it was done. Otherwise only the
    last one's is."""
    return settings.prefill_wait != "end"


def prefill_ns(run: Run) -> int | None:
    """From the first step's start to the logits of the last prefill step. Comparable with
    llama-bench `pp`."""
    n_prefill = n_prefill_steps(run)
    if run.status != OK or n_prefill == 0:
        return None
    return run.steps.ready_ns[n_prefill - 1] - run.steps.start_ns[0]


def ttft_ns(run: Run) -> int | None:
    """Time to first token: prefill plus sampling one token."""
    n_prefill = n_prefill_steps(run)
    if run.status != OK or n_prefill == 0 or run.imported_from is not None:
        return None
    return run.steps.end_ns[n_prefill - 1] - run.steps.start_ns[0]


def itl_ns(run: Run) -> tuple[int, ...]:
    """Inter-token latencies: `end_ns` of decode step i - `end_ns` of the step before it."""
    latencies = []
    for i, kind in enumerate(run.steps.kind):
        if kind == DECODE and i > 0:
            latencies.append(run.steps.end_ns[i] - run.steps.end_ns[i - 1])
    return tuple(latencies)


def decode_compute_ns(run: Run) -> tuple[int, ...]:
    """`ready_ns` - `start_ns` of each decode step: sampling excluded. Comparable with llama-bench
    `tg`."""
    steps = run.steps
    durations = []
    for kind, start, ready in zip(steps.kind, steps.start_ns, steps.ready_ns, strict=True):
        if kind == DECODE:
            durations.append(ready - start)
    return tuple(durations)


def decode_compute_mean_ns(run: Run) -> float | None:
    """Decode compute per token of a sequence: what llama-bench's `tg` rate is the reciprocal of."""
    compute_ns = decode_compute_ns(run)
    if run.status != OK or not compute_ns:
        return None
    if run.imported_from is not None:  # one step for all tokens
        return compute_ns[0] / run.steps.n_tokens[0]
    return sum(compute_ns) / len(compute_ns)


def tpot_ns(run: Run) -> float | None:
    """Time per output token after the first: (last end - first token's end) / (n_gen - 1)."""
    first_ns = ttft_ns(run)
    if first_ns is None or run.n_gen < 2:
        return None
    return (run.steps.end_ns[-1] - run.steps.start_ns[0] - first_ns) / (run.n_gen - 1)


def e2e_ns(run: Run) -> int | None:
    """End to end: last end - first start."""
    if run.status != OK or not run.steps.kind or run.imported_from is not None:
        return None
    return run.steps.end_ns[-1] - run.steps.start_ns[0]
