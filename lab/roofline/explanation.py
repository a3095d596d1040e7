"""What the time of runs goes to, and what limits it, from the best rates of the machine's own
kernels.

A phase's least time is the sum of its kernels at their ceilings. Measured time beyond that is
overhead (norms, softmax, threads that wait for each other, small matrices that do not fill a core).
Below are the two classical roofs: arithmetic (FLOPs over the machine's best FLOP/s) and memory
traffic (bytes over its best bytes/s). The nearest of the three is the limit. Where attention takes
longer than all products, its own FLOPs and bytes are compared with its own time, else those of the
products with theirs. Williams,
Waterman & Patterson, "Roofline" (2009).
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lab.core import cost, phases, shown, stats
from lab.core.record import DECODE, PREFILL, Ceilings, Record, Run
from lab.core.results import Readable, contents_of, measured_of
from lab.errors import LabError
from lab.roofline import kernel_rates, probing, step_kernels
from lab.roofline.step_kernels import StepKernels
from lab.runner import disturbances

if TYPE_CHECKING:
    import pandas as pd

ARITHMETIC = "arithmetic"
TRAFFIC = "memory traffic"
KERNEL = "the kernel"
OVERHEAD = "overhead"
ATTENTION = "attention"
"""What can limit a phase."""

OF_ATTENTION = {
    ARITHMETIC: "attention (arithmetic)",
    TRAFFIC: "attention (traffic)",
    KERNEL: "attention (kernel)",
}
"""What can limit a phase whose time is mostly attention's."""

LAYERS = "layers"
OUTPUT = "output"
BETWEEN = "between devices"
"""Parts of a phase's least time, besides attention."""

OVERHEAD_SHARE = 0.5
ATTENTION_SHARE = 0.5
KERNEL_FACTOR = 1.5
"""Overhead limits a phase with more than OVERHEAD_SHARE of its time outside its kernels, attention
one with more than ATTENTION_SHARE of its kernels' time, the kernel one that it makes KERNEL_FACTOR
times slower than both roofs."""

BEYOND = 1.005  # times its ceiling: a phase that is faster shows that the ceiling is wrong

CASE = ["n_prompt", "n_gen", "phase"]
MEDIANS = ["measured_s", "choosing_s", "harness_s", "of_request", "tpot_s"]

COSTS = ["flops", "n_bytes", "attention_flops", "attention_bytes", "least_s", "attention_s"]
SUMS = [*COSTS, "measured_s", "choosing_s", "harness_s"]
"""What is added up over the steps of a phase."""

Size = tuple[int, int, int]  # n_tokens, n_past, n_outputs of a step
Cost = tuple[cost.StepCost, step_kernels.StepParts]


def _check_kind(ceilings: object) -> None:
    if not isinstance(ceilings, Ceilings):
        kind = type(ceilings).__name__
        what = f"Ceilings are needed, and this is a {kind}."
        raise LabError(what, "Measure them: lab ceilings")


def explain(records: Readable, ceilings: Ceilings | None = None) -> pd.DataFrame:
    """The cost, rates and limit of every length and phase of one setup's runs: a row each, medians
    over runs.

        rows = lab.explain(records, lab.ceilings())

    Without `ceilings`, those of the same machine in a results file, or in what lab.read returned.
    Times of decode are per token. `least_s` is what its kernels take at their ceilings; `parts` has
    it by part (and device). `of_request` is the phase's share of the whole request; `choosing_s`
    (sampling) and `harness_s` (from one step to the next) are not in measured_s; in decode the
    three add up to `tpot_s`. LabError if there is nothing to explain, or a ceiling is missing.
    """
    import pandas as pd

    if isinstance(records, (str, os.PathLike)):
        records = contents_of(records)
    measured = measured_of(records)
    plain = [
        record for record in measured if isinstance(record, Record) and record.run.is_plain
    ]
    if ceilings is None:
        ceilings = _ceilings_in(records, plain)
    _check_kind(ceilings)
    phase_rows: list[dict[str, object]] = []
    costs = StepCosts(ceilings)
    for record in plain:
        for run in phases.by_length(record.run):
            if run.is_timed:
                phase_rows += rows_of_run(run, record, costs)
    if not phase_rows:
        raise _nothing_to_explain()
    cases = pd.DataFrame(phase_rows).groupby(CASE)
    rows = cases.first()  # costs are equal in all runs of a case
    rows[MEDIANS] = cases[MEDIANS].median()
    rows["n_runs"] = cases.size()
    rows["n_disturbed"] = cases.is_disturbed.sum()
    rows = rows.sort_index(ascending=[True, True, False])  # prefill before decode
    rows["intensity"] = rows.flops / rows.n_bytes
    rows["of_ceiling"] = rows.least_s / rows.measured_s
    rows["gflops"] = rows.flops / rows.measured_s / 1e9
    rows["gbps"] = rows.n_bytes / rows.measured_s / 1e9
    rows["limit"] = [limit_of(row) for row in rows.itertuples()]
    rows["doubts"] = _doubts(rows, ceilings)
    return rows.reset_index().drop(columns=["is_disturbed", "n_disturbed"])


def _nothing_to_explain() -> LabError:
    return LabError(
        "There is no run of lab measure with steps to explain.",
        "What there is, with predictions of experiments: lab show RESULTS",
    )


def _ceilings_in(records: Readable, runs: Sequence[Record]) -> Ceilings:
    """The ceilings of the first run's machine among what was read. LabError without them.

    `records` is what was read (`Contents`, or what lab.read returns), or a list without ceilings.
    """
    if not runs:
        raise _nothing_to_explain()
    sessions: Sequence[Ceilings] = getattr(records, "ceilings", ())
    return probing.need(sessions, probing.place_of_record(runs[0]), runs[0].model.name)


def _doubts(rows: pd.DataFrame, ceilings: Ceilings) -> list[tuple[str, ...]]:
    """The doubts of each explained row: of its runs, of the ceilings, and of a phase above its
    ceiling."""
    fewest = stats.fewest_for_interval()
    doubts_of_ceilings = probing.doubts(ceilings)
    doubts = []
    for row in rows.itertuples():
        doubts_of_runs = shown.of_runs(row.n_runs, row.n_disturbed, fewest)
        doubts_of_row = [doubts_of_runs, doubts_of_ceilings]
        if row.least_s > BEYOND * row.measured_s:
            doubts_of_row.append((shown.ABOVE,))
        doubts.append(shown.all_of(doubts_of_row))
    return doubts


class CostedPhase(Protocol):
    """A phase beside its ceilings, in a row: what limits it follows from these columns."""

    phase: str
    measured_s: float
    least_s: float
    arithmetic_s: float
    traffic_s: float
    attention_s: float
    attention_arithmetic_s: float
    attention_traffic_s: float
    attention_flops: float
    attention_bytes: float
    flops: float
    n_bytes: float
    parts: Mapping[str, float]


class ExplainedRow(CostedPhase, Protocol):
    """A row of `explain`: the columns that sentences, tables and predictions read."""

    n_prompt: int
    n_gen: int
    limit: str
    doubts: tuple[str, ...]
    is_split: bool
    of_ceiling: float
    gflops: float
    gbps: float
    intensity: float
    tpot_s: float
    choosing_s: float
    harness_s: float


def limit_of(row: CostedPhase) -> str:
    """What is nearest to the measured time of an explained row."""
    overhead_s = row.measured_s - row.least_s
    if overhead_s > OVERHEAD_SHARE * row.measured_s:
        return OVERHEAD
    if row.attention_s > ATTENTION_SHARE * row.least_s:
        limit = _nearest(row.attention_s, row.attention_arithmetic_s, row.attention_traffic_s)
        return OF_ATTENTION[limit]
    kernels_s = min(row.least_s, row.measured_s)  # a probe may be slower than the run
    return _nearest(
        kernels_s - row.attention_s,
        row.arithmetic_s - row.attention_arithmetic_s,
        row.traffic_s - row.attention_traffic_s,
    )


def _nearest(kernels_s: float, arithmetic_s: float, traffic_s: float) -> str:
    """The nearest to the time of kernels: themselves, or one of the two roofs below them."""
    if kernels_s > KERNEL_FACTOR * max(arithmetic_s, traffic_s):
        return KERNEL
    return ARITHMETIC if arithmetic_s > traffic_s else TRAFFIC


class StepCosts:
    """The costs of steps beside a machine's ceilings; a size of step is costed only once."""

    def __init__(self, ceilings: Ceilings) -> None:
        self.ceilings = ceilings
        self._costs: dict[tuple[Size, step_kernels.Layers], Cost] = {}

    def of_step(self, size: Size, layers: step_kernels.Layers, record: Record) -> Cost:
        """FLOPs and bytes of a step, and its kernels at their ceilings. LabError without a cost."""
        model = record.model
        settings = record.settings
        if (size, layers) not in self._costs:
            step = cost.step(model, *size, settings.type_k, settings.type_v)
            parts = StepKernels(model, settings, self.ceilings, layers).parts(*size)
            self._costs[size, layers] = (step_kernels.known(step, model), parts)
        return self._costs[size, layers]


def rows_of_run(run: Run, record: Record, costs: StepCosts) -> list[dict[str, object]]:
    """The phases of one run: sums over the steps of prefill, means over those of decode."""
    layers = probing.layers_of(record)
    all_steps = _costed_steps(run, record, layers, costs)
    best = kernel_rates.roof(costs.ceilings, layers)
    rows = []
    for phase, steps in all_steps.groupby("phase"):
        n = len(steps) if phase == DECODE else 1
        sums = steps[SUMS].sum() / n
        rows.append(
            {
                "n_prompt": run.n_prompt,
                "n_gen": run.n_gen,
                "phase": phase,
                "n_steps": len(steps),
                **sums,
                "parts": by_part(steps.parts, n),
                "is_split": len(steps.parts.iloc[0].by_device) > 1,
                "arithmetic_s": sums.flops / best.gflops / 1e9,
                "traffic_s": sums.n_bytes / best.gbps / 1e9,
                "attention_arithmetic_s": sums.attention_flops / best.gflops / 1e9,
                "attention_traffic_s": sums.attention_bytes / best.gbps / 1e9,
                "of_request": _share_of_request(str(phase), run),
                "tpot_s": _tpot_s(str(phase), run),
                "is_disturbed": bool(disturbances.disturbances(record)),
            }
        )
    return rows


def _costed_steps(
    run: Run, record: Record, layers: step_kernels.Layers, costs: StepCosts
) -> pd.DataFrame:
    """A row per step: its phase, its cost, its least time, and what it took, in seconds."""
    import pandas as pd

    steps = run.steps.frame()
    last_prefill = phases.n_prefill_steps(run) - 1
    rows = []
    for step in steps.itertuples():
        n_outputs = 1 if step.Index >= last_prefill else 0
        size = (step.n_tokens, step.n_past, n_outputs)
        counted, parts = costs.of_step(size, layers, record)
        kernels = parts.total
        cost_of_step = (
            *(counted.flops, counted.n_bytes, counted.attention_flops, counted.kv_read_bytes),
            *(kernels.total_s, kernels.attention_s, parts),
        )
        rows.append(cost_of_step)
    table = pd.DataFrame(rows, columns=[*COSTS, "parts"])
    return table.assign(
        phase=steps.kind.where(steps.kind == PREFILL, DECODE),
        measured_s=(steps.ready_ns - steps.start_ns) / 1e9,
        choosing_s=(steps.end_ns - steps.ready_ns) / 1e9,
        harness_s=(steps.start_ns - steps.end_ns.shift()) / 1e9,
    )


def by_part(steps: Iterable[step_kernels.StepParts], n: int) -> dict[str, float]:
    """Least seconds of steps by part, divided by n; with several devices by device and part."""
    sums: dict[str, float] = defaultdict(float)
    for step in steps:
        is_split = len(step.by_device) > 1
        for device, kernels in step.by_device.items():
            prefix = f"{device or probing.CPU} " if is_split else ""
            sums[f"{prefix}{LAYERS}"] += kernels.layers_s
            sums[f"{prefix}{ATTENTION}"] += kernels.attention_s
            sums[f"{prefix}{OUTPUT}"] += kernels.head_s
        if is_split:
            sums[BETWEEN] += step.between_s
    return {name: seconds / n for name, seconds in sums.items()}


def _tpot_s(phase: str, run: Run) -> float:
    """TPOT of a decode; NaN of a prefill, and of fewer than two tokens."""
    tpot_ns = phases.tpot_ns(run)
    if phase != DECODE or tpot_ns is None:
        return math.nan
    return tpot_ns / 1e9


def _share_of_request(phase: str, run: Run) -> float:
    """A phase's share of the whole request."""
    prefill_ns = phases.prefill_ns(run)
    e2e_ns = phases.e2e_ns(run)
    share_of_prefill = prefill_ns / e2e_ns if prefill_ns and e2e_ns else 0.0
    return share_of_prefill if phase == PREFILL else 1 - share_of_prefill
