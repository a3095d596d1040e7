"""Explains the time of a run: its cost compared with the best of the machine's own kernels.

A phase's least time is the sum of its kernels at their ceilings: every weight type at the columns of its steps, and
attention over its positions. Measured time beyond that is overhead (norms, softmax, threads that wait for each other,
small matrices that do not fill a core). Below are the two classical roofs: arithmetic (FLOPs over the machine's best
FLOP/s) and memory traffic (bytes over its best bytes/s). The nearest of the three is the limit; attention is a separate
limit if it takes longer than all products. Williams, Waterman & Patterson, "Roofline" (2009). With layers on several
devices, each has its own kernels, and the copies between them take time too (step_kernels.py).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import cost, phases, shown, stats
from lab.core.lists import grouped
from lab.core.record import DECODE, PREFILL, Ceilings, Record, Run
from lab.errors import LabError
from lab.features.limits import plain_read, probing, step_kernels, where
from lab.features.limits.step_kernels import Kernels, Layers
from lab.process.wire import MUL_MAT, MUL_MAT_ID
from lab.show import disturbances

ARITHMETIC, TRAFFIC, KERNEL, OVERHEAD = "arithmetic", "memory traffic", "the kernel", "overhead"
ATTENTION = "attention"
READERS = (MUL_MAT, MUL_MAT_ID, plain_read.READ)
"""Probes that read all of their bytes from the device's own memory."""

OVERHEAD_SHARE = 0.5
"""A phase that spends more than this share outside its kernels is limited by overhead."""

ATTENTION_SHARE = 0.5
"""A phase whose kernels spend more than this share in attention is limited by attention."""

BEYOND = 1.005
"""A phase above this share of its ceiling shows that the ceiling is wrong, and so are its parts."""

KERNEL_FACTOR = 1.5
"""Kernels slower than both arithmetic and memory traffic by this factor are the limit."""


@dataclass(frozen=True)
class Roof:
    """The machine's best, over all kernels: FLOP/s and bytes/s (both in 10^9)."""

    gflops: float
    gbps: float

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which arithmetic is the limit."""
        return self.gflops / self.gbps


@dataclass(frozen=True)
class Share:
    """The least time of a phase on one device; for decode per token."""

    device: str  # by llama.cpp's name
    kernels: Kernels


@dataclass(frozen=True)
class Explained:
    """One phase at one length: medians over runs. Figures of decode are per token.

    `of_request` is the phase's share of the whole request, as `prefill_share` in lab.runs: the median over runs.
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
    choosing_s: float  # sampling; not in measured_s
    harness_s: float  # from one step to the next; not in measured_s
    least_s: float  # in its kernels and between devices
    shares: tuple[Share, ...] = ()  # by device, if there are several
    between_s: float | None = None  # least time of copies between devices; None: one device, or not measured
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
        """The share of its kernels' best that the phase reached."""
        return self.least_s / self.measured_s


def roof(ceilings: Ceilings, layers: Layers = ()) -> Roof:
    """The best of all probes. With `layers` on several devices, weighted by their shares of the layers."""
    best = {one.device: _roof(one) for one in where.each_device(ceilings)}
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
    """The cost, rates and limit of every length and phase of one setup's runs.

        rows = lab.explain(records, lab.ceilings())

    LabError if there is nothing to explain, or a ceiling is missing.
    """
    timed = []
    for record in records:
        for run in phases.by_length(record.run):
            if run.is_timed and run.lever is None:
                if run.totals is not None:
                    raise LabError("Imported results have no steps to explain.", "Measure here: lab measure")
                timed += [(phase, run, record) for phase in (PREFILL, DECODE) if phase in run.steps.kind]
    if not timed:
        if any(record.run.lever for record in records):
            raise LabError(
                "There are only experiments here; lab explain needs runs of lab measure.",
                "The tables of experiments include predictions: lab show RESULTS",
            )
        raise LabError("No run succeeded, so there is nothing to explain.", "Look at the errors: lab show RESULTS")
    by_length = grouped(timed, lambda one: (one[1].n_prompt, one[1].n_gen, one[0] == DECODE))
    return [_explained(repeats, ceilings) for _, repeats in sorted(by_length.items())]


def _explained(repeats: Sequence[tuple[str, Run, Record]], ceilings: Ceilings) -> Explained:
    """A phase at one length: the medians of its runs, its limit and its doubts."""
    rows = [_phase(phase, run, record, ceilings) for phase, run, record in repeats]
    first, measured_s = rows[0], statistics.median(row.measured_s for row in rows)
    best = roof(ceilings, where.layers_of(repeats[0][2]))
    arithmetic_s, traffic_s = first.flops / best.gflops / 1e9, first.n_bytes / best.gbps / 1e9
    n_disturbed = sum(bool(disturbances.disturbances(record)) for _, _, record in repeats)
    doubts = [shown.of_runs(len(rows), n_disturbed, stats.fewest_for_interval()), probing.doubts(ceilings)]
    doubts.append((shown.ABOVE,) if first.least_s > BEYOND * measured_s else ())
    return dataclasses.replace(
        first,
        measured_s=measured_s,
        arithmetic_s=arithmetic_s,
        traffic_s=traffic_s,
        limit=_limit(measured_s, first.least_s, first.kernels.attention_s, arithmetic_s, traffic_s),
        choosing_s=statistics.median(row.choosing_s for row in rows),
        harness_s=statistics.median(row.harness_s for row in rows),
        of_request=statistics.median(row.of_request for row in rows),
        n_runs=len(rows),
        doubts=shown.all_of(doubts),
    )


def _phase(phase: str, run: Run, record: Record, ceilings: Ceilings) -> Explained:
    """A phase of one run (decode: the mean per token), without its limit. LabError if the cost of steps is unknown."""
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
    mean, is_split = step_kernels.mean(parts, n), len(parts[0].by_device) > 1
    shares = [Share(where.label(name), kernels) for name, kernels in mean.by_device.items()]
    overlaps = phase == PREFILL and is_split and len(chosen) > 1 and not phases.times_prefill_steps(settings)
    prefill, e2e = phases.prefill_ns(run), phases.e2e_ns(run)
    of_prefill = prefill / e2e if prefill and e2e else 0.0
    return Explained(
        n_prompt=run.n_prompt,
        n_gen=run.n_gen,
        phase=phase,
        n_steps=len(chosen),
        measured_s=sum(steps.ready_ns[i] - steps.start_ns[i] for i in chosen) / 1e9 / n,
        flops=sum(step.flops for step in costs) / n,
        n_bytes=sum(step.n_bytes for step in costs) / n,
        kernels=mean.total,
        arithmetic_s=0.0,
        traffic_s=0.0,
        limit="",
        choosing_s=sum(steps.end_ns[i] - steps.ready_ns[i] for i in chosen) / 1e9 / n,
        harness_s=sum(steps.start_ns[i] - steps.end_ns[i - 1] for i in chosen if i) / 1e9 / n,
        least_s=step_kernels.least_s(parts, overlaps) / n,
        shares=tuple(shares) if is_split else (),
        between_s=mean.between_s if is_split else None,
        overlaps=overlaps,
        of_request=of_prefill if phase == PREFILL else 1 - of_prefill,
    )


def _limit(measured_s: float, kernels_s: float, attention_s: float, arithmetic_s: float, traffic_s: float) -> str:
    if measured_s - kernels_s > OVERHEAD_SHARE * measured_s:
        return OVERHEAD
    if attention_s > ATTENTION_SHARE * kernels_s:
        return ATTENTION
    if kernels_s > KERNEL_FACTOR * max(arithmetic_s, traffic_s):
        return KERNEL
    return ARITHMETIC if arithmetic_s > traffic_s else TRAFFIC
