"""Models and made-up machines for predictions: rates of kernels that a test can compute with."""

from __future__ import annotations

import dataclasses

from lab.core.record import Ceilings, Model, Rate, Record
from lab.models import catalog, synthetic
from lab.process.wire import ATTENTION, MUL_MAT
from lab.roofline import learning, probes
from lab.roofline.learning import Step
from lab.roofline.step_kernels import StepKernels
from tests.support.records import MACHINE, SETTINGS, exact_steps, make_record, make_run


def of_catalog(name: str, quantization: str = "F16") -> Model:
    """A model of the catalog as its header would describe it."""
    return synthetic.model_of(catalog.entries()[name], quantization)


BIG = dataclasses.replace(of_catalog("llama-3.2-1b", "Q8_0"), name="big")
WIDE = dataclasses.replace(SETTINGS, n_ubatch=512)


def rate(
    op: str,
    kind: str,
    n_tokens: int,
    gbps: float,
    gflops: float,
    n_threads: int = 2,
) -> Rate:
    """A kernel that reads at gbps, or computes at gflops, whichever is slower."""
    n_bytes = 34 * 10**6
    flops = 2 * 32 * 10**6 * n_tokens
    best_ns = round(max(n_bytes / gbps, flops / gflops))
    times_ns = (2 * best_ns, best_ns)
    return Rate(op, kind, "CPU", 1, 1, n_tokens, n_threads, n_bytes, flops, times_ns)


FAST = Ceilings(
    "2026-01-01T00:00:00Z",
    MACHINE,
    on_gpu=False,
    rates=(
        rate(MUL_MAT, "Q8_0", 1, 20, 400),
        rate(MUL_MAT, "Q8_0", 8, 20, 400),
        rate(MUL_MAT, "Q8_0", 512, 20, 400),
        rate(ATTENTION, "F16", 1, 20, 400),
        rate(ATTENTION, "F16", 512, 20, 100),
        rate(probes.READ, "I64", 1, 40, 1e9),
    ),
)


def timed(decode_factor: float) -> list[Record]:
    """A run on BIG whose decode steps take decode_factor times their kernels' least time."""
    decode = StepKernels(BIG, WIDE, FAST).total(1, 22, 1)
    prefill = StepKernels(BIG, WIDE, FAST).total(8, 8, 1)
    run = make_run(
        20,
        5,
        decode_ms=1e3 * decode_factor * decode.total_s,
        prefill_ms=1e3 * prefill.total_s / 6,
    )
    return [make_record(run, model=BIG, settings=WIDE)]


def timed_run(
    n_prompt: int,
    prefill_factor: float,
    decode_factor: float,
    session: str = "a",
) -> Record:
    """A run on BIG that takes so many times its kernels' least time."""
    prompt = [Step(512, first, 0) for first in range(0, n_prompt, 512)]
    prefill = learning.costs_of(StepKernels(BIG, WIDE, FAST), prompt)
    token = learning.costs_of(StepKernels(BIG, WIDE, FAST), [Step(1, n_prompt + 2, 1)])
    prefill_ms = 1e3 * prefill_factor * prefill.kernels_s / n_prompt
    decode_ms = 1e3 * decode_factor * token.kernels_s
    run = make_run(n_prompt, 6, steps=exact_steps(n_prompt, 6, 512, prefill_ms, decode_ms))
    return make_record(
        run,
        model=BIG,
        settings=WIDE,
        session=session,
    )
