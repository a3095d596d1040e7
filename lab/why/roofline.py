"""Why this fast: what a run cost, beside what the machine's own kernels could have done.

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
from lab.errors import LabError
from lab.models import catalog
from lab.process.wire import ATTENTION, MUL_MAT
from lab.why import probing

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
    step = cost.step(model, n_tokens, n_past, n_outputs, settings.type_k, settings.type_v)
    if step is None:
        return None
    head = model.output_bytes or model.embedding_bytes or 0
    head_type = type_of(model, head, model.embedding_type if model.tied_embeddings else model.output_type)
    decode = n_tokens == 1
    n_threads = settings.n_threads if decode else settings.n_threads_batch
    in_layers = dict(model.tensor_bytes)
    in_layers[head_type] -= head
    if not model.tied_embeddings and model.embedding_bytes:
        in_layers[type_of(model, model.embedding_bytes, model.embedding_type)] -= model.embedding_bytes
    part = step.layer_flops / _all_rows(model, n_tokens)  # the last feed-forward is not for all tokens
    layers_s = sum(
        part * n_bytes * seconds_per_byte(ceilings, model, kind, n_tokens, n_threads)
        for kind, n_bytes in in_layers.items()
        if n_bytes >= probing.MIN_SHARE * sum(model.tensor_bytes.values())
    )
    head_s = head * seconds_per_byte(ceilings, model, head_type, n_outputs, n_threads) if n_outputs else 0.0
    attention_s = step.attention_flops * seconds_per_flop(ceilings, model, settings.type_k.upper(), n_tokens, n_threads)
    return Kernels(layers_s, head_s, attention_s)


def seconds_per_byte(ceilings: Ceilings, model: Model, kind: str, n_tokens: int, n_threads: int) -> float:
    """Best time of a product with n_tokens columns, per byte of weights; between measured columns interpolated."""
    rates = [rate for rate in ceilings.rates if (rate.op, rate.type, rate.n_threads) == (MUL_MAT, kind, n_threads)]
    if not rates:
        known = {rate.type for rate in ceilings.rates if rate.n_threads == n_threads}
        total = sum(model.tensor_bytes.values())
        lacking = [
            each
            for each, n_bytes in model.tensor_bytes.items()
            if each not in known and n_bytes >= probing.MIN_SHARE * total
        ]
        raise LabError(
            f"The ceilings of {' and '.join(lacking or [kind])} with {n_threads} threads are not measured on this "
            "machine.",
            f"Run: lab ceilings -m {catalog.spec_of(model)} --types {','.join(lacking or [kind])} "
            f"--threads {n_threads}",
        )
    points = {r.n_tokens: min(r.times_ns) / 1e9 / r.n_bytes for r in _of_shape(rates, model.n_ff, model.n_embd)}
    return _between(points, n_tokens)


def seconds_per_flop(ceilings: Ceilings, model: Model, kind: str, n_tokens: int, n_threads: int) -> float:
    """Best time of attention with n_tokens queries, per FLOP."""
    rates = [rate for rate in ceilings.rates if (rate.op, rate.type, rate.n_threads) == (ATTENTION, kind, n_threads)]
    if not rates:
        raise LabError(
            f"The ceiling of attention on a {kind} cache with {n_threads} threads is not measured.",
            f"Run: lab ceilings -m {catalog.spec_of(model)} -ctk {kind.lower()} --threads {n_threads}",
        )
    nearest = _of_shape(rates, model.n_head, model.head_dim, model.n_head_kv)
    points = {r.n_tokens: min(r.times_ns) / 1e9 / r.flops for r in nearest}
    return _between(points, n_tokens)


def _of_shape(rates: list[Rate], rows: int | None, columns: int | None, n_head_kv: int | None = None) -> list[Rate]:
    """The rates of the shape that is most like rows x columns: kernels are slower on small matrices."""

    def distance(rate: Rate) -> float:
        shared = (rate.rows / (rate.n_head_kv or rate.rows)) / ((rows or 1) / (n_head_kv or rows or 1))
        pairs = (rate.rows, rows or 1), (rate.columns, columns or 1), (shared, 1)
        return sum(abs(math.log(here / there)) for here, there in pairs)

    nearest = min(rates, key=distance)
    like = nearest.rows, nearest.columns, nearest.n_head_kv
    return [rate for rate in rates if (rate.rows, rate.columns, rate.n_head_kv) == like]


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
        rows = [row for row in (_phase(run, each, ceilings, phase) for run, each in runs) if row]
        if not rows:
            raise LabError(f"What a step of {record.model.name} costs is not known from its header.", "")
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
    found = []
    for i in chosen:
        n_outputs = 1 if i >= last else 0
        shape = steps.n_tokens[i], steps.n_past[i], n_outputs
        step = cost.step(model, *shape, settings.type_k, settings.type_v)
        kernels = step_kernels(model, settings, ceilings, *shape)
        if step is None or kernels is None:
            return None
        found.append((step, kernels))
    if not found:
        return None
    seconds = sum(steps.ready_ns[i] - steps.start_ns[i] for i in chosen) / 1e9
    parts = len(chosen) if phase == "decode" else 1
    step = cost.StepCost(*(sum(each) / parts for each in zip(*(dataclasses.astuple(s) for s, _ in found), strict=True)))
    kernels = Kernels(*(sum(each) / parts for each in zip(*(dataclasses.astuple(k) for _, k in found), strict=True)))
    choosing = sum(steps.end_ns[i] - steps.ready_ns[i] for i in chosen) / 1e9
    between = sum(steps.start_ns[i] - steps.end_ns[i - 1] for i in chosen if i) / 1e9
    return seconds / parts, step, kernels, len(chosen), choosing / parts, between / parts


def _limit(measured_s: float, kernels_s: float, arithmetic_s: float, traffic_s: float) -> str:
    if measured_s - kernels_s > OVERHEAD_SHARE * measured_s:
        return OVERHEAD
    if kernels_s > KERNEL_FACTOR * max(arithmetic_s, traffic_s):
        return KERNEL
    return ARITHMETIC if arithmetic_s > traffic_s else TRAFFIC


def _all_rows(model: Model, n_tokens: int) -> float:
    """Layer FLOPs if the last feed-forward ran for every token."""
    step = cost.step(model, n_tokens, 0, n_tokens)
    assert step is not None
    return step.layer_flops


def type_of(model: Model, n_bytes: int, told: str | None) -> str:
    """The type of a tensor of so many bytes: as `told`, else the one that has exactly these, else the most used."""
    if told in model.tensor_bytes:
        return told
    exact = [kind for kind, each in model.tensor_bytes.items() if each == n_bytes]
    return exact[0] if exact else max(model.tensor_bytes, key=lambda kind: model.tensor_bytes[kind])


def _between(points: dict[int, float], n: int) -> float:
    """A value at n out of values at some n, straight lines on logarithms; the nearest outside of them."""
    below = max((x for x in points if x <= n), default=min(points))
    above = min((x for x in points if x >= n), default=max(points))
    if below >= above:
        return points[below if n >= below else above]
    share = (math.log(n) - math.log(below)) / (math.log(above) - math.log(below))
    return math.exp((1 - share) * math.log(points[below]) + share * math.log(points[above]))
