"""How long runs will take: measured where a case was run, else computed from the runs so far.

A run is work: arithmetic and memory traffic of its prefill and of its decode. The seconds per FLOP
and per byte come from the runs so far, beginning with the warm-ups. So a session can say soon after
its start how long it will take, also for prompts much longer than those of the warm-up. What
attention takes there is timed beforehand (attention_probe.py) and counted by its own rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from lab.core import cost, script, stats
from lab.core.record import DECODE, DRAFT, PREFILL, VERIFY, Settings
from lab.core.script import Shape
from lab.runner.cases import Case, Plan, measured_run

DECODE_KINDS = (DECODE, DRAFT, VERIFY)
"""Kinds of steps that count as decode."""

MOST_SHAPES = (
    200  # steps of a phase whose work is computed; the others are like their neighbours
)


LEAST_BESIDE = 0.1  # share of a measured phase that is left for what is not attention


@dataclass(frozen=True)
class Work:
    """What a phase of a run computes and moves, and attention's part of both."""

    flops: float = 0.0
    n_bytes: float = 0.0
    attention_flops: float = 0.0
    attention_bytes: float = 0.0

    @property
    def without_attention(self) -> Work:
        return Work(self.flops - self.attention_flops, self.n_bytes - self.attention_bytes)


class AttentionRates(NamedTuple):
    """Seconds per FLOP of attention, timed at the longest length."""

    prefill: float
    decode: float


class Phases(NamedTuple):
    """The work of a run's two phases.

    `linear` is the share of the prefill that grows with its tokens; the rest, of attention, grows
    with their square.
    """

    prefill: Work
    decode: Work
    linear: float = 1.0


class Sample(NamedTuple):
    """A measured phase."""

    work: Work
    seconds: float


WorkOf = Callable[[Case], Phases]


class Forecast:
    """Forecasts seconds of cases; `work_of` says what a case computes."""

    def __init__(self, work_of: WorkOf) -> None:
        self._work_of = work_of
        self._works: dict[Case, Phases] = {}
        self._prefills: dict[Case, Sample] = {}
        self._decodes: dict[Case, Sample] = {}
        self._measured: dict[Case, list[tuple[float, float]]] = {}
        self._rates: tuple[float, ...] | None = None  # seconds per FLOP and per byte
        self.attention: AttentionRates | None = None

    @property
    def is_possible(self) -> bool:
        """Whether any run was learned."""
        return bool(self._prefills)

    def learn(self, case: Case, prefill_s: float, decode_s: float) -> None:
        """Learn from a run. Each case counts once, with its last run."""
        work = self._work(case)
        if prefill_s and work.prefill.flops:
            self._prefills[case] = Sample(work.prefill, prefill_s)
        if decode_s and work.decode.n_bytes:
            self._decodes[case] = Sample(work.decode, decode_s)
        self._measured.setdefault(case, []).append((prefill_s, decode_s))
        self._rates = None

    def seconds(self, case: Case) -> tuple[float, float] | None:
        """Seconds of prefill and of decode: the means of a case that was run, else computed.

        None before the first run.
        """
        measured = self._measured.get(case)
        if measured:
            prefills_s, decodes_s = zip(*measured, strict=True)
            return statistics.fmean(prefills_s), statistics.fmean(decodes_s)
        if not self.is_possible:
            return None
        return self.computed(self._work(case))

    def was_run(self, case: Case) -> bool:
        return case in self._measured

    def linear(self, case: Case) -> float:
        """The share of a case's prefill that grows with its tokens."""
        return self._work(case).linear

    def computed(self, work: Phases) -> tuple[float, float]:
        """Seconds of prefill and of decode of some work, at the speed of the runs so far."""
        if self._rates is None:
            self._rates = self._fitted()
        return (
            self._computed(work.prefill, self.attention and self.attention.prefill),
            self._computed(work.decode, self.attention and self.attention.decode),
        )

    def _computed(self, work: Work, attention_s_per_flop: float | None) -> float:
        assert self._rates is not None
        s_per_flop, s_per_byte = self._rates
        if attention_s_per_flop is None:
            return work.flops * s_per_flop + work.n_bytes * s_per_byte
        rest = work.without_attention
        attention_s = work.attention_flops * attention_s_per_flop
        return rest.flops * s_per_flop + rest.n_bytes * s_per_byte + attention_s

    def _fitted(self) -> tuple[float, ...]:
        """Seconds per FLOP and per byte.

        Of the prefills only those count that are at least half as much work as the largest one:
        the first short one touches memory for the first time.
        """
        largest = max(sample.work.flops for sample in self._prefills.values())
        large = [
            sample for sample in self._prefills.values() if sample.work.flops >= largest / 2
        ]
        samples = [*self._decodes.values(), *large]
        if self.attention is not None:
            decodes = [
                _beside(sample, self.attention.decode) for sample in self._decodes.values()
            ]
            samples = [
                *decodes,
                *(_beside(sample, self.attention.prefill) for sample in large),
            ]
        columns = [
            [sample.work.flops for sample in samples],
            [sample.work.n_bytes for sample in samples],
        ]
        return stats.fit(columns, [sample.seconds for sample in samples])

    def _work(self, case: Case) -> Phases:
        if case not in self._works:
            self._works[case] = self._work_of(case)
        return self._works[case]


def _beside(sample: Sample, attention_s_per_flop: float) -> Sample:
    """A phase without its attention: at least LEAST_BESIDE of its time."""
    attention_s = sample.work.attention_flops * attention_s_per_flop
    rest_s = max(LEAST_BESIDE * sample.seconds, sample.seconds - attention_s)
    return Sample(sample.work.without_attention, rest_s)


def work_of_tokens(n_tokens: Callable[[Case], tuple[int, int]]) -> WorkOf:
    """The work of cases whose steps are not known: prompt tokens and generated tokens."""

    def work_of(case: Case) -> Phases:
        n_prefilled, n_generated = n_tokens(case)
        return Phases(Work(flops=n_prefilled), Work(n_bytes=n_generated))

    return work_of


def work_of_plan(plan: Plan) -> WorkOf:
    """The work of the cases of a plan, counted step by step; by tokens for a model that cannot be
    counted."""
    by_tokens = work_of_tokens(plan.n_tokens)

    def work_of(case: Case) -> Phases:
        shapes = planned_shapes(plan, case)
        prefills = [shape for shape in shapes if shape.kind not in DECODE_KINDS]
        decodes = [shape for shape in shapes if shape.kind in DECODE_KINDS]
        prefill = work_of_shapes(plan, prefills)
        decode = work_of_shapes(plan, decodes)
        if prefill is None or decode is None:
            return by_tokens(case)
        return Phases(prefill, decode, _linear(plan, prefills, prefill))

    return work_of


def _linear(plan: Plan, prefills: Sequence[Shape], whole: Work) -> float:
    """The share of a prefill's work that grows with its tokens, from its first half."""
    first_half = prefills[: len(prefills) // 2]
    work = work_of_shapes(plan, first_half) if first_half else None
    if work is None or not whole.flops:
        return 1.0
    x = sum(shape.n_tokens for shape in first_half) / sum(shape.n_tokens for shape in prefills)
    linear = (work.flops / whole.flops - x * x) / (x - x * x)
    return min(1.0, max(0.0, linear))


def planned_shapes(plan: Plan, case: Case) -> list[Shape]:
    """The steps of a case. Of what depends on chosen tokens, one step for each token."""
    write = plan.write if case.experiment else measured_run
    operations = write(case, lambda sequence, n: [0] * n, plan.settings)
    shapes = [shape for shape in script.shapes(operations) if shape.n_tokens]
    for operation in operations:
        if operation.kind == script.OPEN_ENDED:
            shapes += [Shape(DECODE, 1, case.n_prompt, 1, 1)] * operation.times
    return shapes


def work_of_shapes(plan: Plan, shapes: Sequence[Shape]) -> Work | None:
    """The work of steps; None for a model that cannot be counted."""
    stride = math.ceil(len(shapes) / MOST_SHAPES) or 1
    chosen = shapes[::stride]
    work = Work()
    for shape in chosen:
        step = cost_of(plan, plan.settings, shape)
        if step is None:
            return None
        work = Work(
            work.flops + step.flops,
            work.n_bytes + step.n_bytes,
            work.attention_flops + step.attention_flops,
            work.attention_bytes + step.kv_read_bytes,
        )
    scale = len(shapes) / len(chosen) if chosen else 1.0
    return Work(*(scale * amount for amount in astuple(work)))


def cost_of(plan: Plan, settings: Settings, shape: Shape) -> cost.StepCost | None:
    """The cost of a step; each sequence beside the first has one token."""
    beside = [(1, shape.n_past)] * (shape.n_seq - 1)
    n_first = shape.n_tokens - len(beside)
    if shape.kind == PREFILL or n_first < 1:
        beside = []
        n_first = shape.n_tokens
    return cost.step(
        plan.model,
        n_first,
        shape.n_past,
        shape.n_outputs,
        settings.type_k,
        settings.type_v,
        beside,
    )
