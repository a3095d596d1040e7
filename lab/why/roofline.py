"""Why this fast: what a run cost, next to what the machine's own kernels could have done.

A phase's least time is the sum of its kernels at their ceilings: every weight type at the columns of its steps,
and attention over the positions it looked back at. Measured time beyond that is overhead (norms, softmax,
threads that wait for each other, small matrices that do not fill a core). Below it lie the two classical roofs:
arithmetic (FLOPs over the machine's best FLOP/s) and memory traffic (bytes over its best bytes/s). Which of the
three is nearest is the limit; attention is one of its own where it takes most of the time. Williams, Waterman &
Patterson, "Roofline" (2009). Where layers lie on several devices,
each has its own kernels, and what moves between them takes time too (step_kernels.py).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lab.analysis import disturbances
from lab.core import cost, phases, shown, stats
from lab.core.record import DECODE, PREFILL, Ceilings, Record, Run
from lab.errors import LabError
from lab.process.wire import MUL_MAT, MUL_MAT_ID
from lab.why import plain_read, probing, step_kernels, where
from lab.why.step_kernels import Kernels, Layers, Parts

ARITHMETIC, TRAFFIC, KERNEL, OVERHEAD = "arithmetic", "memory traffic", "the kernel", "overhead"
ATTENTION = "attention"
READERS = (MUL_MAT, MUL_MAT_ID, plain_read.READ)
"""Probes whose bytes are read from the device's own memory, all of them."""

OVERHEAD_SHARE = 0.5
"""A phase of which more than this is not in its kernels is limited by overhead."""

ATTENTION_SHARE = 0.5
"""A phase of which attention takes more than this is limited by attention."""

BEYOND = 1.005
"""A phase that reaches more than this of its ceiling shows that the ceiling is wrong: its shares would mislead."""

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
class Share:
    """What a phase needs on one device at least; of decode a token."""

    device: str  # by llama.cpp's name
    kernels: Kernels


@dataclass(frozen=True)
class Explained:
    """One phase at one length: medians over runs. A decode figure is that of a token.

    `of_request` is the phase's share of the whole request, as `prefill_share` of lab.runs has it: the median over runs.
    """

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
    least_s: float  # in its kernels, and between devices
    shares: tuple[Share, ...] = ()  # of each device, where there are several
    between_s: float | None = None  # what moves between these, at least; None: one device, or not measured
    overlaps: bool = False  # the devices work at the same time
    of_request: float = 0.0
    n_runs: int = 1
    doubts: tuple[str, ...] = ()  # some of core/shown.py

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
        return self.least_s / self.measured_s


def roof(ceilings: Ceilings, layers: Layers = ()) -> Roof:
    """The best that any probe reached. With `layers` on several devices: as if each did its share of the work so."""
    best = {where.measured_on(one): _roof(one) for one in (ceilings, *(ceilings.others or ()))}
    if len(best) == 1 or not layers or not set(layers) <= set(best):
        return _roof(ceilings)
    counts = Counter(layers)
    gflops, gbps = (
        len(layers) / sum(n / getattr(best[name], which) for name, n in counts.items()) for which in ("gflops", "gbps")
    )
    return Roof(gflops, gbps)


def _roof(ceilings: Ceilings) -> Roof:
    return Roof(
        gflops=max(probing.gflops(rate) for rate in ceilings.rates),
        gbps=max(probing.gbps(rate) for rate in ceilings.rates if rate.n_tokens == 1 and rate.op in READERS),
    )


def explain(records: Sequence[Record], ceilings: Ceilings) -> list[Explained]:
    """Every length and phase of one setup's runs: what it cost, what it reached, and what limited it.

        rows = lab.explain(records, lab.ceilings())

    LabError where there is nothing to explain, or a ceiling is missing.
    """
    by_length: dict[tuple[int, int, str], list[tuple[Run, Record]]] = {}
    for record in records:
        for run in phases.by_length(record.run):
            if run.is_timed and run.lever is None:
                if run.totals is not None:
                    raise LabError("Imported results have no steps to explain.", "Measure here: lab measure")
                for phase in (kind for kind in (PREFILL, DECODE) if kind in run.steps.kind):
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
        by_length.items(), key=lambda item: (*item[0][:2], item[0][2] == DECODE)
    ):
        record = runs[0][1]
        rows = [_phase(run, its_record, ceilings, phase) for run, its_record in runs]
        n_disturbed = sum(bool(disturbances.disturbances(its_record)) for _, its_record in runs)
        row = _explained((n_prompt, n_gen, phase), rows, roof(ceilings, where.layers_of(record)))
        doubts = [shown.of_runs(len(runs), n_disturbed, stats.fewest_for_interval()), probing.doubts(ceilings)]
        doubts.append((shown.ABOVE,) if row.least_s > BEYOND * row.measured_s else ())
        explained.append(dataclasses.replace(row, n_runs=len(runs), doubts=shown.all_of(doubts)))
    return explained


@dataclass(frozen=True)
class _Phase:
    """A phase of one run: measured, and what it cost; of decode the mean of a token."""

    measured_s: float
    cost: cost.StepCost
    parts: Parts
    least_s: float
    overlaps: bool
    n_steps: int
    choosing_s: float
    harness_s: float
    of_request: float


def _explained(key: tuple[int, int, str], rows: Sequence[_Phase], best: Roof) -> Explained:
    """Medians of the runs of one length."""
    first, measured_s = rows[0], statistics.median(row.measured_s for row in rows)
    arithmetic_s, traffic_s = first.cost.flops / best.gflops / 1e9, first.cost.n_bytes / best.gbps / 1e9
    is_split = len(first.parts.by_device) > 1
    shares = [Share(where.label(name), kernels) for name, kernels in first.parts.by_device.items()]
    return Explained(
        *key,
        first.n_steps,
        measured_s,
        first.cost.flops,
        first.cost.n_bytes,
        first.parts.total,
        arithmetic_s,
        traffic_s,
        _limit(measured_s, first.least_s, first.parts.total.attention_s, arithmetic_s, traffic_s),
        statistics.median(row.choosing_s for row in rows),
        statistics.median(row.harness_s for row in rows),
        first.least_s,
        tuple(shares) if is_split else (),
        first.parts.between_s if is_split else None,
        first.overlaps,
        statistics.median(row.of_request for row in rows),
    )


def _phase(run: Run, record: Record, ceilings: Ceilings, phase: str) -> _Phase:
    """A run's phase. LabError where what its steps cost is not known."""
    model, settings, steps = record.model, record.settings, run.steps
    last, layers = phases.n_prefill_steps(run) - 1, where.layers_of(record)
    chosen = [i for i, kind in enumerate(steps.kind) if (kind == PREFILL) == (phase == PREFILL)]
    costs, parts = [], []
    for i in chosen:
        shape = steps.n_tokens[i], steps.n_past[i], 1 if i >= last else 0
        step = cost.step(model, *shape, settings.type_k, settings.type_v)
        if step is None:
            raise step_kernels.not_known(model)
        costs.append(step)
        parts.append(step_kernels.parts(model, settings, ceilings, *shape, layers=layers))
    n = len(chosen) if phase == DECODE else 1
    is_split = len(parts[0].by_device) > 1
    overlaps = phase == PREFILL and is_split and len(chosen) > 1 and not phases.times_prefill_steps(settings)
    prefill, e2e = phases.prefill_ns(run), phases.e2e_ns(run)
    of_prefill = prefill / e2e if prefill and e2e else 0.0
    columns = zip(*(dataclasses.astuple(step) for step in costs), strict=True)
    return _Phase(
        sum(steps.ready_ns[i] - steps.start_ns[i] for i in chosen) / 1e9 / n,
        cost.StepCost(*(sum(column) / n for column in columns)),
        step_kernels.mean(parts, n),
        step_kernels.least_s(parts, overlaps) / n,
        overlaps,
        len(chosen),
        sum(steps.end_ns[i] - steps.ready_ns[i] for i in chosen) / 1e9 / n,
        sum(steps.start_ns[i] - steps.end_ns[i - 1] for i in chosen if i) / 1e9 / n,
        of_prefill if phase == PREFILL else 1 - of_prefill,
    )


def _limit(measured_s: float, kernels_s: float, attention_s: float, arithmetic_s: float, traffic_s: float) -> str:
    if measured_s - kernels_s > OVERHEAD_SHARE * measured_s:
        return OVERHEAD
    if attention_s > ATTENTION_SHARE * measured_s:
        return ATTENTION
    if kernels_s > KERNEL_FACTOR * max(arithmetic_s, traffic_s):
        return KERNEL
    return ARITHMETIC if arithmetic_s > traffic_s else TRAFFIC
