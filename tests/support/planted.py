"""A planted machine whose claims are known."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lab.core import script as scripts
from lab.core.record import DECODE, OK, Ceilings, Rate, Record, Run, Settings
from lab.core.script import OPEN_ENDED, Shape
from lab.engine import loop
from lab.features.claims import measuring
from lab.process.wire import ATTENTION, MUL_MAT
from lab.runner.cases import Case, Plan, named
from lab.runner.plan import make_plan
from tests.support.fake_worker import FakeWorker, speculated
from tests.support.records import MACHINE, MODEL, FakeClock, make_record

WEIGHTS = 10**6 * 32 // 18
"""Of the tiny model, whose 10^6 bytes are Q4_0: blocks of 32 weights in 18 bytes."""


BYTES_PER_WEIGHT = {
    "F16": 2.0,
    "Q8_0": 34 / 32,
    "Q4_1": 20 / 32,
    "Q4_0": 18 / 32,
}


TRAINED = dataclasses.replace(MODEL, n_ctx_train=8192)
ASKED: dict[str, Any] = {
    "model": "smollm2-135m",
    "threads": 2,
    "threads_batch": 2,
}


CACHE_OPERATIONS_WITH_TIME = ("copy", "save", "load")


class Work(NamedTuple):
    """A run that a session of claims makes in each of its repeats."""

    part: str
    variant: str
    plan: Plan
    case: Case
    quantization: str


@functools.cache
def work() -> list[Work]:
    """The runs of a repeat, as a session plans them; Q4_1 is among the quantizations too."""
    worker: Any = FakeWorker()
    worker.model = TRAINED
    base = make_plan(worker, [1], 1, 1, **ASKED)
    runs: list[Work] = []
    for part in measuring.PARTS:
        if part == "quantizations":
            plan = make_plan(worker, [64], 64, 1, **ASKED)
            for kind in BYTES_PER_WEIGHT:
                runs.append(Work(part, kind, plan, plan.cases[0], kind))
            continue
        for variant, plan in measuring.plans_of(part, worker, base, ASKED).items():
            for case in plan.cases:
                runs.append(Work(part, variant, plan, case, "Q4_0"))
    return runs


@dataclass(frozen=True)
class Planted:
    """A machine whose step takes as long as its arithmetic or its traffic, and attention on top.

    Without changes: 1 ms to read all weights, 1/8 ms to compute a token, so that 8 tokens take as
    long as the reading.
    """

    gflops: float = 8 * 2 * WEIGHTS / 1e6
    gbps: float = 1.0
    half_reads: float = 0.9  # the share of the bandwidth that half the threads reach
    half_computes: float = 0.5  # and of the arithmetic
    pair_ns: float = 26.0  # a token that sees a position
    sees: int = 10**9  # the most positions that a token sees
    stair: int = 1  # positions are rounded up to a multiple of it
    q8_cache: float = 0.53  # a pair with a q8_0 cache
    no_flash: float = 5.0  # a pair without flash attention
    slow: dict[str, float] = field(default_factory=dict)  # factors of types of kernels
    wasted_ms: float = 0.0  # in each step
    kept_close: float = 1.0  # the factor by which a run reads faster than a kernel alone
    each_reads: float = 0.0  # times the step of one sequence, for each of several
    mixed_ms: float = 0.0  # more for a step of a prompt and other sequences
    n_right: int = 3  # drafted tokens that are right
    again: float = 1.0  # factor for a token of a prompt at a place that was computed before
    cached_decode: float = 1.0  # factor for decode after a prompt that a cache served in part
    noise: float = 0.003  # of runs
    step_noise: float = 0.0
    probe_noise: float = 0.0  # other programs only make a probe slower

    def step_ns(
        self,
        shape: Shape,
        settings: Settings,
        kind: str,
    ) -> float:
        """The time of a step."""
        has_half = settings.n_threads == 1
        gbps = self.gbps * self.kept_close
        gflops = self.gflops
        if has_half:
            gbps *= self.half_reads
            gflops *= self.half_computes
        traffic_ns = WEIGHTS * BYTES_PER_WEIGHT[kind] / gbps
        # In the second of two layers only tokens with an output go on to the feed-forward part.
        n_computed = (shape.n_tokens + shape.n_outputs) / 2
        arithmetic_ns = 2 * WEIGHTS * n_computed / gflops
        kernels_ns = max(traffic_ns, arithmetic_ns) * self.slow.get(kind, 1.0)
        step_ns = kernels_ns + 1e6 * self.wasted_ms
        if self.each_reads and shape.n_seq > 1:
            step_ns *= self.each_reads * shape.n_seq
        is_mixed = 1 < shape.n_seq < shape.n_tokens and shape.n_outputs > 1
        if is_mixed:
            step_ns += 1e6 * self.mixed_ms
        return step_ns + self.attention_ns(shape, settings)

    def attention_ns(
        self,
        shape: Shape,
        settings: Settings,
    ) -> float:
        pair_ns = self.pair_ns
        if settings.type_k == "q8_0":
            pair_ns *= self.q8_cache
        if settings.flash_attn == "off":
            pair_ns *= self.no_flash
        positions = range(shape.n_past, shape.n_past + shape.n_tokens)
        seen = [math.ceil(position / self.stair) * self.stair for position in positions]
        return pair_ns * sum(min(self.sees, position) for position in seen)

    def run(
        self,
        work: Work,
        chance: random.Random,
    ) -> Run:
        """The run of a case, with a noise of its own."""
        script = work.plan.write(work.case, tokens, work.plan.settings)
        shapes = list(scripts.shapes(script))
        counts: dict[str, tuple[int, ...]] = {}
        if script[-1].kind == OPEN_ENDED:
            more_shapes, accepted = speculated(script, self.n_right)
            shapes += more_shapes
            counts = {"accepted": accepted}
        clock = FakeClock()
        factor = math.exp(chance.gauss(0, self.noise))
        actions = Actions(self, work, factor, clock, random.Random(chance.random()))
        steps = loop.as_steps(shapes, loop.walk(map(actions.of, shapes), clock, [0]))
        return Run(
            **named(work.case),
            steps=steps,
            repeat=0,
            token_ids=(7,) * 4,
            counts=counts,
            warmup=False,
            started_at="2026-01-01T00:00:00Z",
            status=OK,
        )

    def session(
        self,
        parts: tuple[str, ...],
        seed: int = 1,
        n_repeat: int = 3,
    ) -> list[Record]:
        """The runs of some parts."""
        chance = random.Random(seed)
        records: list[Record] = []
        for repeat in range(n_repeat):
            for run_of_part in work():
                if run_of_part.part in parts:
                    records.append(self.record(run_of_part, repeat, chance))
        return records

    def record(
        self,
        work: Work,
        repeat: int,
        chance: random.Random,
    ) -> Record:
        run = dataclasses.replace(
            self.run(work, chance),
            part=work.part,
            repeat=repeat,
        )
        if work.variant:
            run = dataclasses.replace(run, block=repeat, variant=work.variant)
        model = TRAINED
        kind = work.quantization
        if kind != model.quantization:
            size = round(WEIGHTS * BYTES_PER_WEIGHT[kind])
            model = dataclasses.replace(
                model, quantization=kind, n_bytes=size, tensor_bytes={kind: size}
            )
        return make_record(run, settings=work.plan.settings, model=model)

    def ceilings(self, seed: int = 1) -> Ceilings:
        """What its kernels reach alone, and a plain read."""
        chance = random.Random(seed)
        rates = []
        for rate in self.exact_rates():
            times_ns: list[int] = []
            for _ in range(5):
                luck = math.exp(abs(chance.gauss(0, self.probe_noise)))
                times_ns.append(round(luck * rate.times_ns[0]))
            rates.append(dataclasses.replace(rate, times_ns=tuple(times_ns)))
        return Ceilings("2026-01-01T00:00:00Z", MACHINE, False, tuple(rates))

    def exact_rates(self) -> list[Rate]:
        rates = [Rate("read", "I64", "numpy", 1, 1, 1, 2, 10**6, 0, (round(1e6 / self.gbps),))]
        for kind in ("Q4_0", "Q8_0", "F16"):
            rates += [self.kernel(kind, n_tokens) for n_tokens in (1, 8, 512)]
        for n_tokens in (1, 512):
            n_pairs = 1000 * n_tokens * 512  # a thousand times
            times_ns = (round(n_pairs * self.pair_ns / (MODEL.n_layer or 1)),)
            sizes = (4, 16, n_tokens, 2, 10**4, 4 * 4 * 16 * n_pairs)
            rates.append(Rate(ATTENTION, "F16", "CPU", *sizes, times_ns, 2, 512))
        return rates

    def kernel(
        self,
        kind: str,
        n_tokens: int,
    ) -> Rate:
        """A thousand products with a matrix of 128 x 64 weights."""
        n_weights = 128 * 64
        n_bytes = round(n_weights * BYTES_PER_WEIGHT[kind])
        flops = 2 * n_weights * n_tokens
        ns = self.slow.get(kind, 1.0) * max(n_bytes / self.gbps, flops / self.gflops)
        times_ns = (round(1e3 * ns),)
        sizes = (128, 64, n_tokens, 2, 1000 * n_bytes, 1000 * flops)
        return Rate(MUL_MAT, kind, "CPU", *sizes, times_ns)


@dataclass
class Actions:
    """What the operations of a run do on a planted machine: they let time pass."""

    machine: Planted
    work: Work
    factor: float
    clock: FakeClock
    chance: random.Random
    n_computed: int = 0  # places that a conversation with a cache has computed

    def of(self, shape: Shape) -> loop.Action:
        luck = math.exp(self.chance.gauss(0, self.machine.step_noise))
        ns = round(luck * self.factor * self.duration_ns(shape))

        def compute() -> None:
            self.clock.advance(ns)

        def choose() -> None:
            self.clock.advance(1000)

        return compute, choose if shape.n_outputs else None, 0

    def duration_ns(self, shape: Shape) -> float:
        if shape.n_tokens == 0:
            return 1e3 * shape.n_past if shape.kind in CACHE_OPERATIONS_WITH_TIME else 0.0
        ns = self.machine.step_ns(shape, self.work.plan.settings, self.work.quantization)
        if self.work.case.values.get("keep") != "memory":
            return ns
        is_again = shape.n_past < self.n_computed
        self.n_computed = max(self.n_computed, shape.n_past + shape.n_tokens)
        if shape.kind == DECODE:
            return ns * self.machine.cached_decode
        return ns * self.machine.again if is_again else ns


def tokens(sequence: int, n: int) -> list[int]:
    return list(range(sequence, sequence + n))
