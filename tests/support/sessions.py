"""Runs of batches by the fake engine, their kernels, and sessions with disturbed runs."""

from __future__ import annotations

from typing import Any

from lab.core.record import Ceilings, Rate, Record, Run
from lab.process.wire import ATTENTION, MUL_MAT
from lab.runner import batches
from lab.runner.batches import Batch
from lab.runner.cases import Case
from tests.bench import doubt
from tests.support.records import (
    MACHINE,
    SETTINGS,
    make_record,
    make_run,
    steps_of,
)


def text(sequence: int, n: int) -> list[int]:
    return [100 * sequence + i for i in range(n)]


def case(
    n_seq: int,
    n_prompt: int = 20,
    n_gen: int = 5,
    is_shared: bool = False,
) -> Case:
    return batches.case(Batch(n_seq, is_shared), n_prompt, n_gen, SETTINGS)


def batch_run(n_seq: int, repeat: int = 0, decode_ms: float = 10, n_prompt: int = 20) -> Run:
    script = batches.write(case(n_seq, n_prompt), text, SETTINGS)
    steps = steps_of(script, decode_ms=decode_ms)
    setup = Batch(n_seq, is_shared=False)
    return make_run(n_prompt, 5, repeat, steps=steps, experiment="batch", setup=setup)


def products(n: int) -> Rate:
    """Weights of 1 MB, read in 1 ms; 16 tokens take twice as long as none."""
    times_ns = (round(10**6 * (1 + n / 16)),)
    return Rate(MUL_MAT, "Q4_0", "CPU", 128, 64, n, 2, 10**6, 2 * n * 10**6, times_ns)


def attention(n: int) -> Rate:
    return Rate(ATTENTION, "F16", "CPU", 4, 16, n, 2, 10**4, 10**4, (10**4,), 2, 512)


RATES = (
    *map(products, (1, 2, 4, 8, 32, 128, 512)),
    attention(1),
    attention(512),
)


KERNELS = Ceilings("2026-01-01T00:00:00Z", MACHINE, False, RATES)
COMMAND = ("measure", "--prompt-len", "20,40")


def repeats(n_disturbed: int, n: int = 6, **changes: Any) -> list[Record]:
    """Quiet and disturbed runs of two lengths; only the longer ones are disturbed."""
    records = []
    for repeat in range(n):
        short = make_run(20, 5, repeat, **changes)
        long = make_run(40, 5, repeat, prefill_ms=2, decode_ms=20, **changes)
        records.append(make_record(short, command=COMMAND))
        record = make_record(long, command=COMMAND)
        records.append(doubt.neighbour(record) if repeat < n_disturbed else record)
    return records
