"""Why this fast: what a run cost, next to what the machine's own kernels could have done.

A phase's least time is the sum of its kernels at their ceilings: every weight type at the columns of its steps,
and attention over the positions it looked back at. Measured time beyond that is overhead (norms, softmax,
threads that wait for each other, small matrices that do not fill a core). Below it lie the two classical roofs:
arithmetic (FLOPs over the machine's best FLOP/s) and memory traffic (bytes over its best bytes/s). Which of the
three is nearest is the limit. Williams, Waterman & Patterson, "Roofline" (2009).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import cost, phases
from lab.core.record import OK, PREFILL, Ceilings, Model, Record, Run, Settings
from lab.errors import LabError
from lab.process.wire import ATTENTION
from lab.why import kernel_rates, probing
from lab.why.probe_plan import used_types

ARITHMETIC, TRAFFIC, KERNEL, OVERHEAD = "arithmetic", "memory traffic", "the kernel", "overhead"
OVERHEAD_SHARE = 0.5
"""A phase of which more than this is not in its kernels is limited by overhead."""

KERNEL_FACTOR = 1.5
"""Kernels that take so many times what arithmetic or memory traffic would are the limit themselves."""


@dataclass(frozen=True)
class Roof:
    """The machine's best, over all kernels: FLOP/s and bytes/s (both in 10^9)."""

    gflops: float
    gbps: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte from which on arithmetic is the limit."""
        return self.gflops / self.gbps


@dataclass(frozen=True)
class Kernels:
    """Least seconds of a step or a phase in its kernels."""

    layers_s: float
    head_s: float
    attention_s: float

    @property
    def total_s(self) -> float:
        return self.layers_s + self.head_s + self.attention_s


@dataclass(frozen=True)
class Explained:
    """One phase at one length: medians over runs. A decode figure is that of a token."""

    n_prompt: int
    n_gen: int
    phase: str  # prefill, decode
    n_steps: int
    measured_s: float
    flops: float
    n_bytes: float
    kernels: Kernels
    arithmetic_s: float
    traffic_s: float
    limit: str
    choosing_s: float  # not in measured_s: picking a token
    harness_s: float  # nor this: from one step to the next

    @property
    def intensity(self) -> float:
        return self.flops / self.n_bytes

    @property
    def gflops(self) -> float:
        return self.flops / self.measured_s / 1e9

    @property
    def gbps(self) -> float:
        return self.n_bytes / self.measured_s / 1e9

    @property
    def of_ceiling(self) -> float:
        """The part of its kernels' best that the phase reached."""
        return self.kernels.total_s / self.measured_s


def roof(ceilings: Ceilings) -> Roof:
    """The best that any probe reached."""
    return Roof(
        gflops=max(probing.gflops(rate) for rate in ceilings.rates),
        gbps=max(probing.gbps(rate) for rate in ceilings.rates if rate.n_tokens == 1 and rate.op != ATTENTION),
    )


def step_kernels(
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    n_tokens: int,
    n_past: int,
    n_outputs: int,
    others: Sequence[cost.Span] = (),
) -> Kernels | None:
    """Least time of a step in its kernels; `others` are further sequences in it, whose attention is each its own.

    None where the model's cost is not known; LabError for a missing probe.
    """
    spans = Counter([(n_tokens, n_past), *others])
    n_all = sum(n * times for (n, _), times in spans.items())
    work = cost.products(model, n_all, n_outputs)
    if work is None or cost.attended(model, n_tokens, n_past) is None:
        return None
    n_threads = settings.n_threads if n_all == 1 else settings.n_threads_batch
    used = {*used_types(model), *(product.matrix.type for product in work if product.is_head)}
    seconds = [0.0, 0.0]
    for product in work:
        if product.matrix.type in used:
            per_byte = kernel_rates.of_matrix(ceilings, model, product.matrix, product.n_tokens, n_threads)
            seconds[product.is_head] += product.n_bytes * per_byte
    width = 2 * ((model.head_dim or 0) + (model.head_dim_v or model.head_dim or 0))
    kind, attention_s = settings.type_k.upper(), 0.0
    for (n, past), times in spans.items():
        for part in cost.attended(model, n, past) or ():
            flops = times * width * part.heads.n_layer * part.heads.n_head * part.n_pairs
            per_flop = kernel_rates.of_attention(ceilings, model, part.heads, kind, n, n_threads, part.n_positions)
            attention_s += flops * per_flop
    return Kernels(seconds[False], seconds[True], attention_s)


def explain(records: Sequence[Record], ceilings: Ceilings) -> list[Explained]:
    """Every length and phase of one setup's runs: what it cost, what it reached, and what limited it.

        rows = lab.explain(records, lab.ceilings())

    LabError where there is nothing to explain, or a ceiling is missing.
    """
    best = roof(ceilings)
    by_length: dict[tuple[int, int, str], list[tuple[Run, Record]]] = {}
    for record in records:
        for run in phases.by_length(record.run):
            if run.status == OK and not run.warmup and run.lever is None:
                if run.totals is not None:
                    raise LabError("Imported results have no steps to explain.", "Measure here: lab measure")
                for phase in ("prefill", "decode") if run.n_gen > 1 else ("prefill",):
                    by_length.setdefault((run.n_prompt, run.n_gen, phase), []).append((run, record))
    if not by_length:
        if any(record.run.lever for record in records):
            raise LabError(
                "There are only experiments here; what can be explained is runs of lab measure.",
                "What limits an experiment, its own table says: lab show RESULTS",
            )
        raise LabError("There is no run that went well, so nothing to explain.", "Look at the errors: lab show RESULTS")
    explained = []
    for (n_prompt, n_gen, phase), runs in sorted(
        by_length.items(), key=lambda item: (*item[0][:2], item[0][2] == "decode")
    ):
        record = runs[0][1]
        rows = [row for row in (_phase(run, its_record, ceilings, phase) for run, its_record in runs) if row]
        if not rows:
            reason = f" ({record.model.uncounted})" if record.model.uncounted else ""
            raise LabError(f"What a step of {record.model.name} costs is not known from its header{reason}.", "")
        measured_s = statistics.median(row[0] for row in rows)
        _, step, kernels, n_steps, *_ = rows[0]
        arithmetic_s, traffic_s = step.flops / best.gflops / 1e9, step.n_bytes / best.gbps / 1e9
        limit = _limit(measured_s, kernels.total_s, arithmetic_s, traffic_s)
        explained.append(
            Explained(
                n_prompt,
                n_gen,
                phase,
                n_steps,
                measured_s,
                step.flops,
                step.n_bytes,
                kernels,
                arithmetic_s,
                traffic_s,
                limit,
                statistics.median(row[4] for row in rows),
                statistics.median(row[5] for row in rows),
            )
        )
    return explained


PhaseCost = tuple[float, cost.StepCost, Kernels, int, float, float]


def _phase(run: Run, record: Record, ceilings: Ceilings, phase: str) -> PhaseCost | None:
    """Measured seconds, cost and least kernel time of a run's phase; of decode the mean of a token; its steps."""
    model, settings, steps = record.model, record.settings, run.steps
    last = phases.n_prefill_steps(run) - 1
    chosen = [i for i, kind in enumerate(steps.kind) if (kind == PREFILL) == (phase == "prefill")]
    costs = []
    for i in chosen:
        n_outputs = 1 if i >= last else 0
        shape = steps.n_tokens[i], steps.n_past[i], n_outputs
        step = cost.step(model, *shape, settings.type_k, settings.type_v)
        kernels = step_kernels(model, settings, ceilings, *shape)
        if step is None or kernels is None:
            return None
        costs.append((step, kernels))
    if not costs:
        return None
    seconds = sum(steps.ready_ns[i] - steps.start_ns[i] for i in chosen) / 1e9
    parts = len(chosen) if phase == "decode" else 1
    step = cost.StepCost(
        *(sum(column) / parts for column in zip(*(dataclasses.astuple(s) for s, _ in costs), strict=True))
    )
    kernels = Kernels(
        *(sum(column) / parts for column in zip(*(dataclasses.astuple(k) for _, k in costs), strict=True))
    )
    choosing = sum(steps.end_ns[i] - steps.ready_ns[i] for i in chosen) / 1e9
    between = sum(steps.start_ns[i] - steps.end_ns[i - 1] for i in chosen if i) / 1e9
    return seconds / parts, step, kernels, len(chosen), choosing / parts, between / parts


def _limit(measured_s: float, kernels_s: float, arithmetic_s: float, traffic_s: float) -> str:
    if measured_s - kernels_s > OVERHEAD_SHARE * measured_s:
        return OVERHEAD
    if kernels_s > KERNEL_FACTOR * max(arithmetic_s, traffic_s):
        return KERNEL
    return ARITHMETIC if arithmetic_s > traffic_s else TRAFFIC
