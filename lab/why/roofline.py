"""Why this fast: what a run cost, next to what the machine's own kernels could have done.

A phase's least time is the sum of its kernels at their ceilings: every weight type at the columns of its steps,
and attention over the positions it looked back at. Measured time beyond that is overhead (norms, softmax,
threads that wait for each other, small matrices that do not fill a core). Below it lie the two classical roofs:
arithmetic (FLOPs over the machine's best FLOP/s) and memory traffic (bytes over its best bytes/s). Which of the
three is nearest is the limit. Williams, Waterman & Patterson, "Roofline" (2009).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import cost, phases
from lab.core.record import OK, PREFILL, Ceilings, Model, Rate, Record, Run, Settings
from lab.core.shape import EXPERTS, FEED_FORWARD, Heads, Matrix
from lab.errors import LabError
from lab.models import catalog
from lab.process.wire import ATTENTION, MUL_MAT, MUL_MAT_ID
from lab.why import probing
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
    model: Model, settings: Settings, ceilings: Ceilings, n_tokens: int, n_past: int, n_outputs: int
) -> Kernels | None:
    """Least time of a step in its kernels. None where the model's cost is not known; LabError for a missing probe."""
    work, layers = cost.products(model, n_tokens, n_outputs), cost.attended(model, n_tokens, n_past)
    if work is None or layers is None:
        return None
    n_threads = settings.n_threads if n_tokens == 1 else settings.n_threads_batch
    used = {*used_types(model), *(product.matrix.type for product in work if product.is_head)}
    seconds = [0.0, 0.0]
    for product in work:
        if product.matrix.type in used:
            per_byte = _seconds_per_byte(ceilings, model, product.matrix, product.n_tokens, n_threads)
            seconds[product.is_head] += product.n_bytes * per_byte
    width = 2 * ((model.head_dim or 0) + (model.head_dim_v or model.head_dim or 0))
    kind, attention_s = settings.type_k.upper(), 0.0
    for part in layers:
        flops = width * part.heads.n_layer * part.heads.n_head * part.n_pairs
        per_flop = _seconds_per_flop(ceilings, model, part.heads, kind, n_tokens, n_threads, part.n_positions)
        attention_s += flops * per_flop
    return Kernels(seconds[False], seconds[True], attention_s)


def seconds_per_byte(ceilings: Ceilings, model: Model, kind: str, n_tokens: int, n_threads: int) -> float:
    """Best time of a product with n_tokens columns, per byte of weights, in the shape of the feed-forward."""
    matrix = Matrix(FEED_FORWARD, kind, model.n_ff or 1, model.n_embd or 1, 1)
    return _seconds_per_byte(ceilings, model, matrix, n_tokens, n_threads)


def _seconds_per_byte(ceilings: Ceilings, model: Model, matrix: Matrix, n_tokens: int, n_threads: int) -> float:
    """Best time of a product, per byte of weights that it reads; between measured columns interpolated."""
    op = MUL_MAT_ID if matrix.part == EXPERTS else MUL_MAT
    rates = [rate for rate in ceilings.rates if (rate.op, rate.type, rate.n_threads) == (op, matrix.type, n_threads)]
    if not rates:
        known = {rate.type for rate in ceilings.rates if rate.n_threads == n_threads}
        lacking = [kind for kind in used_types(model) if kind not in known] or [matrix.type]
        raise LabError(
            f"The ceilings of {' and '.join(lacking)} with {n_threads} threads are not measured on this machine.",
            f"Run: lab ceilings -m {catalog.spec_of(model)} --types {','.join(lacking)} --threads {n_threads}",
        )
    by_shape = _by_shape(rates, (matrix.rows, matrix.columns))
    most = max(len(points) for points in by_shape)
    nearest = by_shape[0]
    if n_tokens not in nearest:  # a shape that is probed at few sizes of step does not say what lies between
        nearest = next(points for points in by_shape if n_tokens in points or len(points) == most)
    return _between({n: rate_of(rates)[0] for n, rates in nearest.items()}, n_tokens)


def _seconds_per_flop(
    ceilings: Ceilings, model: Model, heads: Heads, kind: str, n_tokens: int, n_threads: int, n_positions: int
) -> float:
    """Best time of attention with n_tokens queries over n_positions, per FLOP; between lengths interpolated."""
    rates = [rate for rate in ceilings.rates if (rate.op, rate.type, rate.n_threads) == (ATTENTION, kind, n_threads)]
    if not rates:
        raise LabError(
            f"The ceiling of attention on a {kind} cache with {n_threads} threads is not measured.",
            f"Run: lab ceilings -m {catalog.spec_of(model)} -ctk {kind.lower()} --threads {n_threads}",
        )
    rates = [rate for rate in rates if rate.n_positions] or rates  # older files have one length, which they do not say
    nearest = _by_shape(rates, (heads.n_head, model.head_dim, heads.n_head_kv))[0]
    points = {}
    for n, alike in nearest.items():
        points[n] = _between({rate.n_positions or 0: rate_of([rate])[1] for rate in alike}, n_positions)
    return _between(points, n_tokens)


def rate_of(rates: Sequence[Rate]) -> tuple[float, float]:
    """Best seconds per byte, and per FLOP, of the same probe."""
    best = min(rates, key=lambda rate: min(rate.times_ns) / rate.n_bytes)
    seconds = min(best.times_ns) / 1e9
    return seconds / best.n_bytes, seconds / best.flops if best.flops else math.inf


def _by_shape(rates: Sequence[Rate], wanted: tuple[int | None, ...]) -> list[dict[int, list[Rate]]]:
    """The rates of each probed shape by n_tokens, the shape that is most like (rows, columns, n_head_kv) first.

    Kernels are slower on small matrices; heads that share keys are another kernel.
    """
    rows, columns, n_head_kv = (*wanted, None)[:3]
    shapes: dict[tuple[object, ...], dict[int, list[Rate]]] = {}
    distances: dict[tuple[object, ...], float] = {}
    for rate in rates:
        key = rate.rows, rate.columns, rate.n_head_kv, rate.n_expert, rate.n_expert_used
        shared = (rate.rows / (rate.n_head_kv or rate.rows)) / ((rows or 1) / (n_head_kv or rows or 1))
        pairs = (rate.rows, rows or 1), (rate.columns, columns or 1), (shared, 1)
        distances[key] = sum(abs(math.log(here / there)) for here, there in pairs)
        shapes.setdefault(key, {}).setdefault(rate.n_tokens, []).append(rate)
    return [shapes[key] for key in sorted(shapes, key=lambda key: distances[key])]


def explain(records: Sequence[Record], ceilings: Ceilings) -> list[Explained]:
    """Every length and phase of one setup's runs: what it cost, what it reached, and what limited it.

        rows = lab.explain(records, lab.ceilings())

    LabError where there is nothing to explain, or a ceiling is missing.
    """
    best = roof(ceilings)
    by_length: dict[tuple[int, int, str], list[tuple[Run, Record]]] = {}
    for record in records:
        for run in phases.by_length(record.run):
            if run.status == OK and not run.warmup:
                if run.totals is not None:
                    raise LabError("Imported results have no steps to explain.", "Measure here: lab measure")
                for phase in ("prefill", "decode") if run.n_gen > 1 else ("prefill",):
                    by_length.setdefault((run.n_prompt, run.n_gen, phase), []).append((run, record))
    if not by_length:
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


def _mean(rows: Sequence[tuple[float, ...]], n: int) -> list[float]:
    """The sum of each column, divided by n."""
    return [sum(column) / n for column in zip(*rows, strict=True)]


def _limit(measured_s: float, kernels_s: float, arithmetic_s: float, traffic_s: float) -> str:
    if measured_s - kernels_s > OVERHEAD_SHARE * measured_s:
        return OVERHEAD
    if kernels_s > KERNEL_FACTOR * max(arithmetic_s, traffic_s):
        return KERNEL
    return ARITHMETIC if arithmetic_s > traffic_s else TRAFFIC


def _between(points: dict[int, float], n: int) -> float:
    """A value at n out of values at some n, straight lines on logarithms; the nearest outside of them."""
    below = max((x for x in points if x <= n), default=min(points))
    above = min((x for x in points if x >= n), default=max(points))
    if below >= above:
        return points[below if n >= below else above]
    share = (math.log(n) - math.log(below)) / (math.log(above) - math.log(below))
    return math.exp((1 - share) * math.log(points[below]) + share * math.log(points[above]))
