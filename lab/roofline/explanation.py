"""What the time of runs goes to, and what limits it, from the best rates of the machine's own
kernels.

A phase's least time is the sum of its kernels at their ceilings. Measured time beyond that is
overhead (norms, softmax, threads that wait for each other, small matrices that do not fill a core).
Below are the two classical roofs: arithmetic (FLOPs over the machine's best FLOP/s) and memory
traffic (bytes over its best bytes/s). The nearest of the three is the limit; attention is one if it
takes longer than all products. Williams, Waterman & Patterson, "Roofline" (2009).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.core import cost, phases, shown, stats
from lab.core.record import DECODE, PREFILL, Ceilings, Record, Run
from lab.errors import LabError
from lab.roofline import probing, step_kernels
from lab.runner import disturbances

if TYPE_CHECKING:
    import pandas as pd

ARITHMETIC = "arithmetic"
TRAFFIC = "memory traffic"
KERNEL = "the kernel"
OVERHEAD = "overhead"
ATTENTION = "attention"
"""What can limit a phase."""

LAYERS = "layers"
OUTPUT = "output"
BETWEEN = "between devices"
"""Parts of a phase's least time, besides attention."""

OVERHEAD_SHARE = 0.5  # overhead limits a phase with more than this share outside its kernels
ATTENTION_SHARE = (
    0.5  # attention limits a phase with more than this share of its kernels' time
)
KERNEL_FACTOR = 1.5  # the kernel limits a phase that it makes this much slower than both roofs
BEYOND = 1.005  # times its ceiling: a faster phase shows that the ceiling is wrong

CASE = ["n_prompt", "n_gen", "phase"]
MEDIANS = ["measured_s", "choosing_s", "harness_s", "of_request"]

SUMS = ["flops", "n_bytes", "least_s", "measured_ns", "choosing_ns", "harness_ns"]
"""What is added up over the steps of a phase."""

Size = tuple[int, int, int]  # n_tokens, n_past, n_outputs of a step
Cost = tuple[cost.StepCost, step_kernels.StepParts]


def explain(records: Sequence[Record], ceilings: Ceilings) -> pd.DataFrame:
    """The cost, rates and limit of every length and phase of one setup's runs: a row each, medians
    over runs.

        rows = lab.explain(records, lab.ceilings())

    Times of decode are per token. `least_s` is what its kernels take at their ceilings; `parts` has
    it by part (and device). `of_request` is the phase's share of the whole request; `choosing_s`
    (sampling) and `harness_s` (from one step to the next) are not in measured_s. LabError if there
    is nothing to explain, or a ceiling is missing.
    """
    import pandas as pd

    phase_rows = []
    phases_of = PhasesOfRuns(ceilings)
    for record in records:
        if not record.run.is_plain:
            continue
        for run in phases.by_length(record.run):
            if not run.is_timed:
                continue
            for phase in (PREFILL, DECODE):
                if phase in run.steps.kind:
                    phase_rows.append(phases_of.row(phase, run, record))
    if not phase_rows:
        raise LabError(
            "There is no run of lab measure with steps to explain.",
            "What there is, with predictions of experiments: lab show RESULTS",
        )
    by_run = pd.DataFrame(phase_rows)
    cases = by_run.groupby(CASE)
    rows = by_run.drop_duplicates(CASE).set_index(CASE)
    rows = rows.sort_index(ascending=[True, True, False])  # prefill first
    rows[MEDIANS] = cases[MEDIANS].median()
    rows["n_runs"] = cases.size()
    rows["n_disturbed"] = cases.is_disturbed.sum()
    rows["intensity"] = rows.flops / rows.n_bytes
    rows["of_ceiling"] = rows.least_s / rows.measured_s
    rows["gflops"] = rows.flops / rows.measured_s / 1e9
    rows["gbps"] = rows.n_bytes / rows.measured_s / 1e9
    rows["limit"] = [limit_of(row) for row in rows.itertuples()]
    rows["doubts"] = _doubts(rows, ceilings)
    return rows.reset_index().drop(columns=["is_disturbed", "n_disturbed"])


def _doubts(rows: pd.DataFrame, ceilings: Ceilings) -> list[tuple[str, ...]]:
    """The doubts of each explained row: of its runs, of the ceilings, and of a phase above its
    ceiling.
    """
    fewest = stats.fewest_for_interval()
    doubts_of_ceilings = probing.doubts(ceilings)
    doubts = []
    for row in rows.itertuples():
        doubts_of_row = [
            shown.of_runs(row.n_runs, row.n_disturbed, fewest),
            doubts_of_ceilings,
        ]
        if row.least_s > BEYOND * row.measured_s:
            doubts_of_row.append((shown.ABOVE,))
        doubts.append(shown.all_of(doubts_of_row))
    return doubts


def limit_of(row: Any) -> str:
    """What is nearest to the measured time of an explained row."""
    attention_s = 0.0
    for name, seconds in row.parts.items():
        if name.endswith(ATTENTION):
            attention_s += seconds
    overhead_s = row.measured_s - row.least_s
    if overhead_s > OVERHEAD_SHARE * row.measured_s:
        return OVERHEAD
    if attention_s > ATTENTION_SHARE * row.least_s:
        return ATTENTION
    if row.least_s > KERNEL_FACTOR * max(row.arithmetic_s, row.traffic_s):
        return KERNEL
    if row.arithmetic_s > row.traffic_s:
        return ARITHMETIC
    return TRAFFIC


class PhasesOfRuns:
    """Phases of runs beside their ceilings; a size of step that many runs share is costed once."""

    def __init__(self, ceilings: Ceilings) -> None:
        self.ceilings = ceilings
        self.costs: dict[tuple[Size, step_kernels.Layers], Cost] = {}

    def row(self, phase: str, run: Run, record: Record) -> dict[str, Any]:
        """A phase of one run (decode: the mean per token). LabError without a cost."""
        steps = run.steps
        layers = probing.layers_of(record)
        last_prefill = phases.n_prefill_steps(run) - 1
        sums: dict[str, float] = dict.fromkeys(SUMS, 0.0)
        parts = []
        for i, kind in enumerate(steps.kind):
            if (kind == PREFILL) != (phase == PREFILL):
                continue
            n_outputs = 1 if i >= last_prefill else 0
            size = (steps.n_tokens[i], steps.n_past[i], n_outputs)
            step, parts_of_step = self.cost(size, layers, record)
            parts.append(parts_of_step)
            sums["flops"] += step.flops
            sums["n_bytes"] += step.n_bytes
            sums["least_s"] += parts_of_step.total.total_s
            sums["measured_ns"] += steps.ready_ns[i] - steps.start_ns[i]
            sums["choosing_ns"] += steps.end_ns[i] - steps.ready_ns[i]
            if i > 0:
                sums["harness_ns"] += steps.start_ns[i] - steps.end_ns[i - 1]
        n = len(parts) if phase == DECODE else 1
        flops = sums["flops"] / n
        n_bytes = sums["n_bytes"] / n
        best = step_kernels.roof(self.ceilings, layers)
        return {
            "n_prompt": run.n_prompt,
            "n_gen": run.n_gen,
            "phase": phase,
            "n_steps": len(parts),
            "measured_s": sums["measured_ns"] / 1e9 / n,
            "least_s": sums["least_s"] / n,
            "parts": by_part(parts, n),
            "is_split": len(parts[0].by_device) > 1,
            "flops": flops,
            "n_bytes": n_bytes,
            "arithmetic_s": flops / best.gflops / 1e9,
            "traffic_s": n_bytes / best.gbps / 1e9,
            "choosing_s": sums["choosing_ns"] / 1e9 / n,
            "harness_s": sums["harness_ns"] / 1e9 / n,
            "of_request": _share_of_request(phase, run),
            "is_disturbed": bool(disturbances.disturbances(record)),
        }

    def cost(self, size: Size, layers: step_kernels.Layers, record: Record) -> Cost:
        """The cost of a step, and its kernels at their ceilings."""
        model = record.model
        settings = record.settings
        if (size, layers) not in self.costs:
            step = step_kernels.step_cost(model, *size, settings.type_k, settings.type_v)
            parts = step_kernels.parts(model, settings, self.ceilings, *size, layers=layers)
            self.costs[size, layers] = (step, parts)
        return self.costs[size, layers]


def by_part(steps: Sequence[step_kernels.StepParts], n: int) -> dict[str, float]:
    """Least seconds of steps by part, divided by n; with several devices by device and part."""
    sums: dict[str, float] = defaultdict(float)
    for step in steps:
        is_split = len(step.by_device) > 1
        for device, kernels in step.by_device.items():
            prefix = ""
            if is_split:
                prefix = f"{device or probing.CPU} "
            sums[f"{prefix}{LAYERS}"] += kernels.layers_s
            sums[f"{prefix}{ATTENTION}"] += kernels.attention_s
            sums[f"{prefix}{OUTPUT}"] += kernels.head_s
        if is_split:
            sums[BETWEEN] += step.between_s
    return {name: seconds / n for name, seconds in sums.items()}


def _share_of_request(phase: str, run: Run) -> float:
    """A phase's share of the whole request."""
    prefill_ns = phases.prefill_ns(run)
    e2e_ns = phases.e2e_ns(run)
    share_of_prefill = 0.0
    if prefill_ns and e2e_ns:
        share_of_prefill = prefill_ns / e2e_ns
    return share_of_prefill if phase == PREFILL else 1 - share_of_prefill
