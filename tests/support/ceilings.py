"""Machines with made-up ceilings."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from lab.core import results
from lab.core.matrices import ATTENTION as IN_ATTENTION, EMBEDDING, FEED_FORWARD, Matrix
from lab.core.record import (
    Ceilings,
    Device,
    Machine,
    Rate,
    Record,
)
from lab.process.wire import (
    ATTENTION,
    DOWNLOAD,
    MUL_MAT,
    UPLOAD,
)
from lab.roofline import probes, probing
from lab.roofline.probing import Where
from tests.support.records import MACHINE, MODEL

GPU = Device("CUDA0", "Test GPU", "gpu", 8 * 10**9)
WITH_GPU = dataclasses.replace(MACHINE, devices=(*MACHINE.devices, GPU))
ATTENTION_BYTES = 8 * 64 * 64 * 34 / 32
FFN_BYTES = 12 * 128 * 64 * 34 / 32
HEAD_BYTES = 1000 * 64 * 34 / 32
TINY = dataclasses.replace(
    MODEL,
    quantization="Q8_0",
    n_layer=4,
    n_vocab=1000,
    embedding_bytes=int(HEAD_BYTES),
    tensor_bytes={"Q8_0": int(ATTENTION_BYTES + FFN_BYTES + HEAD_BYTES)},
    matrices=(
        Matrix(EMBEDDING, "Q8_0", 1000, 64, 1),
        Matrix(IN_ATTENTION, "Q8_0", 64, 64, 8.0),
        Matrix(FEED_FORWARD, "Q8_0", 128, 64, 12.0),
    ),
)


def product(
    n_tokens: int,
    ns_per_byte: float,
    kind: str = "Q8_0",
    n_threads: int = 2,
    rows: int = 128,
    columns: int = 64,
    **changes: Any,
) -> Rate:
    """A product that takes so many ns for each byte of weights, in the better of two passes."""
    best_ns = round(1e6 * ns_per_byte)
    times_ns = (3 * best_ns, best_ns)
    rate = Rate(
        MUL_MAT, kind, "CPU", rows, columns, n_tokens, n_threads, 10**6, 2 * 10**6, times_ns
    )
    return dataclasses.replace(rate, **changes)


def attention(
    n_tokens: int, ns_per_flop: float, n_threads: int = 2, n_positions: int = 0, **changes: Any
) -> Rate:
    """Attention that takes so many ns for each FLOP."""
    times_ns = (round(1e6 * ns_per_flop), round(2e6 * ns_per_flop))
    rate = Rate(
        ATTENTION,
        "F16",
        "CPU",
        4,
        16,
        n_tokens,
        n_threads,
        10**5,
        10**6,
        times_ns,
        2,
        n_positions,
    )
    return dataclasses.replace(rate, **changes)


def ceilings(*rates: Rate, here: Machine = MACHINE, **changes: Any) -> Ceilings:
    return Ceilings(
        "2026-01-01T00:00:00Z", here, changes.get("device") is not None, rates, **changes
    )


def copies(
    op: str,
    latency_ns: int,
    ns_per_byte: float,
) -> list[Rate]:
    rates = []
    for n_bytes in probes.COPIES:
        times_ns = (round(latency_ns + ns_per_byte * n_bytes),)
        rates.append(Rate(op, "F32", "CUDA0", 1, n_bytes // 4, 1, 1, n_bytes, 0, times_ns))
    return rates


ON_CPU = ceilings(
    *(product(n, 10 / n**0.5) for n in (1, 2, 16, 64)),
    *(attention(n, 3.0) for n in (1, 64)),
)


ON_GPU = ceilings(
    *(product(n, 1.0, n_threads=1) for n in (1, 64)),
    *(attention(n, 0.5, n_threads=1) for n in (1, 64)),
    *copies(UPLOAD, 1000, 0.25),
    *copies(DOWNLOAD, 2000, 0.5),
    here=WITH_GPU,
    device="CUDA0",
)


SAMPLES = Path("results")


def epyc(*lengths: int) -> tuple[list[Record], Ceilings]:
    """The samples' runs of some prompt lengths, and the ceilings of their machine."""
    contents = results.read(sorted(SAMPLES.glob("sample-*.jsonl")))
    machine = (
        results.read([SAMPLES / "sample-smollm2-135m-amd-epyc.jsonl"]).ceilings[0].machine
    )
    ceilings = probing.known(contents.ceilings, Where(machine))
    assert ceilings
    records = []
    for record in contents.records:
        is_plain = record.model.quantization == "Q4_1" and record.run.every is None
        if is_plain and record.run.n_prompt in lengths:
            records.append(record)
    return records, ceilings
