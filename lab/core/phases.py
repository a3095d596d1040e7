"""A run's phases, by arithmetic on its steps.

    start of step 0            prefill ready   first token          token 2        last token
    |------- prefill time -----------|--------------|--- ITL[0] -------|  ...  ------|
    |------- TTFT ----------------------------------|--- the n_gen - 1 decode steps -|
    |------- E2E --------------------------------------------------------------------|

Times are in nanoseconds as recorded. A figure is None if the run failed or is too short for it. No figure includes
tokenization of the prompt. `figures` are those by which runs of experiments are compared.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import statistics
from typing import TYPE_CHECKING

from lab.core.record import DECODE, FORGET, MIXED, OK, PREFILL, Run, Settings, Steps

if TYPE_CHECKING:
    import pandas as pd

STALL = 2.0  # a gap longer than STALL times the usual gap is a stall

FIGURE_NAMES = {
    "gap_ms": "longest gap",
    "newcomer_s": "TTFT of the newcomer",
    "turns_s": "whole conversation",
}
"""The figures of `figures` that plain runs do not have, in words."""


def by_length(run: Run) -> tuple[Run, ...]:
    """A sweep as separate runs, one per length, with all prefill steps up to it; any other run unchanged."""
    import numpy as np

    if run.every is None or not run.steps.kind:
        return (run,)
    names = [field.name for field in dataclasses.fields(Steps)]
    kept = np.array(run.steps.kind) != FORGET
    steps = {name: np.array(getattr(run.steps, name))[kept] for name in names}
    firsts = np.flatnonzero(steps["kind"] == PREFILL)
    sizes = np.diff([*firsts, len(steps["kind"])])
    took_ns = steps["ready_ns"][firsts] - steps["start_ns"][firsts]
    moved_ns = np.repeat(took_ns.cumsum() - took_ns - steps["start_ns"][firsts], sizes)
    steps |= {name: steps[name] + moved_ns for name in ("start_ns", "ready_ns", "end_ns")}
    # the prefill steps as if nothing had been generated between them
    read = {name: column[firsts] for name, column in steps.items()}
    read |= {"end_ns": read["ready_ns"], "n_outputs": 0 * read["n_outputs"]}
    lengths = list[Run]()
    for number, first in enumerate(firsts):
        n_prompt = int(steps["n_past"][first] + steps["n_tokens"][first])
        after = first + sizes[number]
        if n_prompt % run.every == 0 or number == len(firsts) - 1:
            rows = {
                name: (*read[name][:number].tolist(), *steps[name][first:after].tolist())
                for name in names
            }
            lengths.append(
                dataclasses.replace(run, n_prompt=n_prompt, steps=Steps(**rows), token_ids=())
            )
    return tuple(lengths)


def n_prefill_steps(run: Run) -> int:
    return run.steps.kind.count(PREFILL)


def times_prefill_steps(settings: Settings) -> bool:
    """Whether each prefill step is timed: its `ready_ns` is when it was done. Otherwise only the last one's is."""
    return settings.prefill_wait != "end"


def prefill_ns(run: Run) -> int | None:
    """From the first step's start to the logits of the last prefill step. Comparable with llama-bench `pp`."""
    if run.totals is not None:
        return run.totals.prefill_ns
    n_prefill = n_prefill_steps(run)
    return (
        None
        if run.status != OK or not n_prefill
        else run.steps.ready_ns[n_prefill - 1] - run.steps.start_ns[0]
    )


def ttft_ns(run: Run) -> int | None:
    """Time to first token: prefill plus sampling one token."""
    n_prefill = n_prefill_steps(run)
    return (
        None
        if run.status != OK or not n_prefill
        else run.steps.end_ns[n_prefill - 1] - run.steps.start_ns[0]
    )


def itl_ns(run: Run) -> tuple[int, ...]:
    """Inter-token latencies: `end_ns` of decode step i - `end_ns` of the step before it."""
    ends = run.steps.end_ns
    return tuple(
        ends[i] - ends[i - 1] for i, kind in enumerate(run.steps.kind) if kind == DECODE and i > 0
    )


def decode_compute_ns(run: Run) -> tuple[int, ...]:
    """`ready_ns` - `start_ns` of each decode step: sampling excluded. Comparable with llama-bench `tg`."""
    compute = map(operator.sub, run.steps.ready_ns, run.steps.start_ns)
    return tuple(itertools.compress(compute, map(DECODE.__eq__, run.steps.kind)))


def decode_compute_mean_ns(run: Run) -> float | None:
    """The mean of `decode_compute_ns`: what llama-bench's `tg` rate is the reciprocal of."""
    if run.totals is not None:
        decode = run.totals.decode_ns
        return None if decode is None or run.n_gen < 2 else decode / (run.n_gen - 1)
    steps = run.steps
    n_prefill = n_prefill_steps(run)
    if run.status != OK or DECODE not in steps.kind:
        return None
    if DECODE in steps.kind[:n_prefill]:  # a whole sweep, where the phases alternate
        return statistics.fmean(decode_compute_ns(run))
    return (sum(steps.ready_ns[n_prefill:]) - sum(steps.start_ns[n_prefill:])) / (
        len(steps.kind) - n_prefill
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


def step_s(run: Run) -> float:
    return statistics.fmean(decode_compute_ns(run)) / 1e9


def figures(run: Run) -> dict[str, float]:
    """The figures by which runs of an experiment are compared, by name.

    - batch: `prefill_s` of all prompts; `tpot_ms`, a decode step, which gives each sequence one token
    - speculation: `tpot_ms` of all tokens after the first, with drafting and forgetting
    - turns: `turns_s`, the whole conversation
    - stall: `gap_ms`, the longest gap between two tokens of a stream; `newcomer_s`, the new request's TTFT

    Empty for a plain run, a failed run, and one whose steps do not fit its experiment.
    """
    steps = run.steps
    times = dict[str, float]()
    if run.status != OK or run.n_prompt < 1 or run.n_gen < 1:
        return {}
    if run.batch is not None:
        ready = [
            ready for kind, ready in zip(steps.kind, steps.ready_ns, strict=True) if kind == PREFILL
        ]
        sizes = {n for kind, n in zip(steps.kind, steps.n_tokens, strict=True) if kind == DECODE}
        if ready and sizes == {run.batch.n_seq}:  # every decode step has a token of each sequence
            times = {"prefill_s": ready[-1] / 1e9, "tpot_ms": 1e3 * step_s(run)}
    elif run.stall is not None:
        if (whole := stall_steps(run)) is not None:
            known = stall_figures(whole)
            times = {"gap_ms": 1e3 * known["longest_gap_s"], "newcomer_s": known["newcomer_s"]}
    elif run.speculation is not None:
        if run.speculation.text is not None and run.n_gen > 1 and PREFILL in steps.kind:
            last_prefill = max(i for i, kind in enumerate(steps.kind) if kind == PREFILL)
            times = {
                "tpot_ms": (steps.end_ns[-1] - steps.end_ns[last_prefill]) / 1e6 / (run.n_gen - 1)
            }
    elif run.turns is not None and steps.end_ns:
        times = {"turns_s": steps.end_ns[-1] / 1e9}
    return times if all(value > 0 for value in times.values()) else {}


def prompt_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps of the new prompt of `lab stall`: those with prompt tokens after the first decode step."""
    return steps[steps.kind.eq(DECODE).cummax() & steps.kind.isin((MIXED, PREFILL))]


def gaps(steps: pd.DataFrame) -> pd.DataFrame:
    """A row per token of the streams of `lab stall`: `at_s` since the new prompt arrived, `gap_s`, and `when`.

    All streams get a token in the same steps, so they share one list of gaps. `steps`, measured or predicted, has
    `kind`, `start_s`, `end_s`. `when` is before the prompt, during its prefill (the gap overlaps it), or after.
    """
    import pandas as pd

    prompt = prompt_steps(steps)
    tokens = steps[steps.kind.eq(DECODE).cummax() & steps.kind.isin((DECODE, MIXED))]
    arrived = prompt.start_s.min()
    done = prompt.end_s.max()
    end = tokens.end_s
    previous = tokens.end_s.shift()
    when = (
        pd.Series("after", tokens.index)
        .mask(previous < done, "during")
        .mask(end <= arrived, "before")
    )
    return tokens.assign(at_s=end - arrived, gap_s=end - previous, when=when).iloc[1:].reset_index()


def stall_figures(steps: pd.DataFrame) -> dict[str, float]:
    """The figures of a run of `lab stall`. `usual_gap_s` is the median gap before the new prompt came."""
    tokens = gaps(steps)
    prompt = prompt_steps(steps)
    during = tokens.gap_s[tokens.when == "during"]
    usual = tokens.gap_s[tokens.when == "before"].median()
    return {
        "n_steps": len(prompt),
        "n_stalls": int((during > STALL * usual).sum()),
        "longest_gap_s": during.max(),
        "median_gap_s": during.median(),
        "usual_gap_s": usual,
        "newcomer_s": prompt.end_s.max() - prompt.start_s.min(),
    }


def stall_steps(run: Run) -> pd.DataFrame | None:
    """The steps of a run of `lab stall`; None for other runs, and if its steps are not those of its script."""
    lever = run.stall
    if (
        lever is None
        or lever.n_streams < 1
        or (lever.chunk is not None and lever.chunk < 1)
        or lever.n_before < 2
    ):
        return None
    steps = run.steps.frame()
    prompt = prompt_steps(steps)
    n_before = (steps.loc[: prompt.index.min() - 1].kind == DECODE).sum() if len(prompt) else 0
    n_beside = lever.n_streams * (prompt.kind == MIXED).sum()
    is_whole = n_before == lever.n_before and prompt.n_tokens.sum() - n_beside == run.n_prompt
    return steps if is_whole and (steps.kind == DECODE).sum() > n_before else None
