"""Every criterion on made-up evidence: where the claim holds, where it does not, where nobody could tell."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.analysis import disturbances, spread
from lab.core import memory, phases
from lab.core.levers import Batch, Prefix, Speculation, Stall
from lab.core.record import (
    DECODE,
    FAILED,
    PREFILL,
    Arrivals,
    Buffer,
    Ceilings,
    Device,
    Model,
    Placement,
    Rate,
    Record,
    Settings,
)
from lab.experiments import batching, prefix_cache, stalls
from lab.experiments.claims import claim as claim_rules
from lab.experiments.claims import claim_parts, of_hardware
from lab.experiments.claims.claim import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE, Claim, Condition, Evidence, Judgement
from lab.experiments.claims.claim_verdicts import CLAIMS
from lab.process.wire import ATTENTION, MUL_MAT
from lab.runner.cases import Case
from lab.why import datasheet, published
from tests.conftest import MACHINE, MODEL, SETTINGS, exact_steps, make_record, make_run, steps_of

EVEN = (1.0, 1.004, 0.998, 1.002, 0.997, 1.001)
WILD = (0.2, 5.0, 0.3, 4.0, 0.25, 3.0)
"""What the times of six repeats are multiplied by: hardly anything, or so much that nothing can be told."""

ONE_WAIT = dataclasses.replace(SETTINGS, prefill_wait="end")

NO_SHAPE = dataclasses.replace(MODEL, n_layer=None)
WIDE = dataclasses.replace(MODEL, n_layer=30, tensor_bytes={"Q4_0": 10**8}, embedding_bytes=10**5)
"""A model whose cache is nothing against its weights."""

BY_NUMBER = {claim.number: claim for claim in CLAIMS}


def judged(number: int, *records: Record, **known: Any) -> Judgement:
    return BY_NUMBER[number].judge(Evidence(tuple(records), **known))


def plain(part: str, n_prompt: int, gen: int = 8, times: Sequence[float] = EVEN, **changes: Any) -> list[Record]:
    """Runs of one length, one a repeat. `prefill_ms`, `decode_ms` and `per_position_ms` are the fake engine's."""
    rates = {"prefill_ms": 1.0, "decode_ms": 10.0, "per_position_ms": 0.0}
    rates = {name: changes.pop(name, usual) for name, usual in rates.items()}
    of_record = {name: changes.pop(name) for name in ("model", "settings") if name in changes}
    runs = [
        make_run(n_prompt, gen, i, part=part, block=i, **{k: v * time for k, v in rates.items()}, **changes)
        for i, time in enumerate(times)
    ]
    return [make_record(run, **of_record) for run in runs]


def lengths(*sizes: int, **changes: Any) -> list[Record]:
    return [record for n in sizes or (100, 500, 1000) for record in plain("lengths", n, **changes)]


def context(to: int = 2000, every: int = 250, n_walks: int = 1, **changes: Any) -> list[Record]:
    return [make_record(make_run(to, 4, i, part="context", every=every, **changes)) for i in range(n_walks)]


def threads(half_prefill: float, half_decode: float, times: Sequence[float] = EVEN) -> list[Record]:
    """All threads, and half of them with so many times the time a token."""
    one_thread = dataclasses.replace(SETTINGS, n_threads=1, n_threads_batch=1)
    slower: dict[str, Any] = {"prefill_ms": half_prefill, "decode_ms": 10 * half_decode, "settings": one_thread}
    return plain("threads", 64, variant="all") + plain("threads", 64, variant="half", times=times, **slower)


def ceilings(gbps: float = 1.0, gflops: float = 1.0, plain_gbps: float = 0.0) -> Ceilings:
    """Kernels that take 10^6 bytes a column at so many GB/s, or their FLOPs at so many GFLOP/s if that is longer."""
    rates = [
        Rate(MUL_MAT, "Q4_0", "CPU", 128, 64, n, 2, 10**6, 4 * n * 10**6, (round(max(1e6 / gbps, 4e6 * n / gflops)),))
        for n in (1, 8, 512)
    ]
    rates += [Rate(ATTENTION, "F16", "CPU", 4, 16, n, 2, 10**4, 10**5, (10**4,), 2, 512) for n in (1, 512)]
    rates += [Rate("read", "I64", "numpy", 1, 1, 1, 2, 10**6, 0, (round(1e6 / plain_gbps),))] if plain_gbps else []
    return Ceilings("2026-01-01T00:00:00Z", MACHINE, False, tuple(rates))


def in_one_step(n: int) -> list[Record]:
    return [
        make_record(dataclasses.replace(record.run, steps=whole(record)), model=WIDE) for record in plain("lengths", n)
    ]


def whole(record: Record) -> Any:
    """The same steps, with the prompt in one."""
    return exact_steps(record.run.n_prompt, record.run.n_gen, record.run.n_prompt)


def bent(ms: Callable[[float], float]) -> list[Record]:
    """Token times at eight contexts by any law."""
    sizes = range(250, 2001, 250)
    return [make_record(make_run(n, 4, i, part="context", decode_ms=ms(n) - 1)) for i, n in enumerate(sizes)]


def no_cache(seconds: Callable[[float], float]) -> list[Record]:
    """Prompts without a token more, by any law."""
    return [
        make_record(make_run(n, 1, repeat, part="no_cache", prefill_ms=1e3 * seconds(n) / n))
        for repeat in range(2)
        for n in (16, 32, 64, 128, 256, 512)
    ]


def text(sequence: int, n: int) -> list[int]:
    return [sequence + i for i in range(n)]


def batch(
    seconds: Callable[[int], float], numbers: Sequence[int] = (1, 2, 4, 8, 16), times: Sequence[float] = EVEN
) -> list[Record]:
    """So many sequences at once, a step of n of which takes seconds(n)."""
    records = []
    for n in numbers:
        case = Case(20, 4, lever=Batch(n, False), sequences=(24,) * n)
        for i, time in enumerate(times):
            steps = steps_of(batching.write(case, text, SETTINGS), decode_ms=1e3 * seconds(n) * time / n)
            records.append(make_record(make_run(20, 4, i, part="batch", steps=steps, batch=Batch(n, False))))
    return records


def heads(ratio_of_slopes: float, model: Model = MODEL, **changes: Any) -> list[Record]:
    """Sweeps of two shapes with 1 and 4 key-value heads."""
    records = []
    for n, slope in ((1, 0.01), (4, 0.01 * ratio_of_slopes)):
        shape = dataclasses.replace(model, n_head_kv=n, name=f"{n} heads")
        run = make_run(2000, 4, part="heads", every=250, per_position_ms=slope, **changes)
        records.append(make_record(run, model=shape))
    return records


def formats(*ms: float, times: Sequence[float] = EVEN) -> list[Record]:
    """Decode of four formats, the largest first."""
    sizes = {"F16": 4, "Q8_0": 3, "Q4_1": 2, "Q4_0": 1}
    return [
        record
        for (kind, size), taken in zip(sizes.items(), ms, strict=False)
        for record in plain(
            "quantizations",
            20,
            decode_ms=taken,
            times=times if kind == "Q4_1" else EVEN,
            model=dataclasses.replace(MODEL, quantization=kind, n_bytes=size * 10**6),
        )
    ]


def flash(n: int, off_ms: float, times: Sequence[float] = EVEN) -> list[Record]:
    off = dataclasses.replace(SETTINGS, flash_attn="off", flash_attn_resolved="off")
    return plain("flash", n, 2) + plain("flash", n, 2, times, prefill_ms=off_ms, settings=off)


def cache(q8_ms: float, q4_ms: float, times: Sequence[float] = EVEN, n: int = 4000) -> list[Record]:
    types = {kind: dataclasses.replace(SETTINGS, type_k=kind, type_v=kind) for kind in ("q8_0", "q4_0")}
    return [
        *plain("cache", n),
        *plain("cache", n, times=times, decode_ms=q8_ms, settings=types["q8_0"]),
        *plain("cache", n, times=times, decode_ms=q4_ms, settings=types["q4_0"]),
    ]


def speculation(*gains: float, times: Sequence[float] = EVEN) -> list[Record]:
    """Texts with so many times the speed where 4 tokens are looked up, and none where a model guesses 2."""
    records = []
    for i, gain in enumerate(gains):
        for draft, n_draft, faster in ((None, 0, 1.0), ("lookup", 4, gain), ("small", 2, 1.0)):
            lever = Speculation(draft, n_draft, f"text {i}")
            taken = times if n_draft == 4 else EVEN
            records += plain("speculation", 20, decode_ms=11 / faster - 1, times=taken, speculation=lever)
    return records


def prefixes(
    move_ms: Callable[[int], float], sizes: Sequence[int] = (8, 32, 128), n_runs: int = 3, **changes: Any
) -> list[Record]:
    """Prefixes used again, with 8 tokens more; a copy, save or load takes move_ms."""
    records = []
    for n in sizes:
        written = prefix_cache.write(Case(n + 8, 1, lever=Prefix(n, 8)), text, SETTINGS, folder=Path("states"))
        for i in range(n_runs):
            run = make_run(n + 8, 1, i, part="prefix", prefix=Prefix(n, 8), token_ids=(7,) * 4)
            run = dataclasses.replace(
                run, steps=steps_of(written, move_ms=move_ms(n)), state_bytes=(1000 * n, 1000 * n)
            )
            records.append(make_record(dataclasses.replace(run, **changes)))
    return records


def stall(ms: Callable[[int | None], float], n_runs: int = 2) -> list[Record]:
    """A prompt of 200 tokens all at once, and in chunks whose tokens take ms(chunk)."""
    settings = dataclasses.replace(SETTINGS, kv_unified=True, n_ubatch=512)
    records = []
    for chunk in (None, 100, 25):
        case = stalls.case(200, 1, chunk)
        assert isinstance(case.lever, Stall)
        for i in range(n_runs):
            steps = steps_of(stalls.write(case, text, settings), prefill_ms=ms(chunk))
            run = make_run(200, case.n_gen, i, part="stall", stall=case.lever, steps=steps)
            records.append(make_record(run, settings=settings))
    return records


def trained(n_ctx: int | None) -> list[Record]:
    return lengths(100, model=dataclasses.replace(MODEL, n_ctx_train=n_ctx))


def on_gpu(name: str, tokens_per_s: float, times: Sequence[float] = EVEN, gb: float = 12) -> list[Record]:
    """A 7B in F16 on a GPU of this name, with so much memory."""
    here = dataclasses.replace(MACHINE, devices=(Device("CUDA0", name, "gpu", int(gb * 2**30)),))
    seven = dataclasses.replace(MODEL, name="seven", n_params=7 * 10**9, quantization="F16")
    settings = dataclasses.replace(SETTINGS, n_gpu_layers=99)
    ms = 1e3 / tokens_per_s - 1
    return [
        dataclasses.replace(record, machine=here)
        for record in plain("", 20, decode_ms=ms, times=times, model=seven, settings=settings)
    ]


GPUS = {  # GB/s and TFLOP/s of models/devices.toml
    "NVIDIA GeForce RTX 3060": (360, 51),
    "NVIDIA GeForce RTX 4080": (717, 195),
    "NVIDIA GeForce RTX 3080 Ti": (912, 136),
    "NVIDIA GeForce RTX 3090": (936, 142),
    "NVIDIA GeForce RTX 4090": (1008, 330),
    "NVIDIA A100-SXM4-80GB": (2039, 312),
}


def machines(which: int, *names: str) -> tuple[Record, ...]:
    """Rates in proportion to bandwidth (0) or to the peak (1)."""
    rates = {name: 0.2 * GPUS[name][which] for name in names or GPUS}
    return tuple(record for name, rate in rates.items() for record in on_gpu(name, rate))


def sevens(on_a100: float, on_h100: float, **changes: Any) -> tuple[Record, ...]:
    records = on_gpu("NVIDIA A100-SXM4-80GB", on_a100, **changes)
    return (*records, *on_gpu("NVIDIA H100 80GB HBM3", on_h100, **changes))


def dependence(*changes: tuple[float, float]) -> list[Record]:
    """How K and V of each layer change."""
    return [make_record(make_run(4, 1, part="dependence", changes=changes))]


def buffers(saved: float, n_ctx: int = 8000, **changes: Any) -> list[Record]:
    """Compute buffers that differ by this share of what the scores of a layer need; `changes` of the model."""
    records, model = [], dataclasses.replace(BROAD, **changes)
    sides = [
        dataclasses.replace(SETTINGS, n_ctx=n_ctx, flash_attn=one, flash_attn_resolved=one) for one in ("on", "off")
    ]
    with_it, without = (memory.compute_bytes(model, one) or 0 for one in sides)
    for settings, n_bytes in zip(sides, (with_it, with_it + saved * (without - with_it)), strict=True):
        own = Placement((), (Buffer("compute", "CPU", round(n_bytes)), Buffer("KV", "CPU", 10**9)))
        records.append(make_record(make_run(16, 2, part="buffers", placement=own), model=model, settings=settings))
    return records


def queue(above: float, below: float, times: Sequence[float] = EVEN, n: int = 12) -> list[Record]:
    """Requests to a server of 4 a second, whose TTFT grows by so many seconds per second at both rates."""
    records = []
    for rate, growth in ((8.0, above), (2.0, below)):
        due = [i / rate for i in range(n)]
        ttft = [round(1e9 * (0.2 + growth * at) * times[i % len(times)]) for i, at in enumerate(due)]
        found = Arrivals(rate, 4.0, tuple(round(1e9 * at) for at in due), tuple(ttft), n_failed=1)
        records.append(make_record(make_run(64, 16, part="queue", arrivals=found)))
    return records


BROAD = dataclasses.replace(MODEL, n_head=32)
"""Many heads, whose scores need more memory than anything else."""

RIDGE_AT_4 = ceilings(1, 14.5)
"""Here arithmetic takes as long as reading with 4 sequences, or 14.5 FLOPs per byte."""

CASES: list[tuple[int, str, str, Callable[[], Judgement]]] = [
    # The tiny model computes 2 MFLOPs a prompt token in 1 ms, and reads 1 MB a decoded token in 10 ms.
    (1, "near the ceiling", HOLDS, lambda: judged(1, *lengths(), *threads(2, 1), ceilings=ceilings(1, 2.5))),
    (1, "far below it", HOLDS_NOT, lambda: judged(1, *lengths(), *threads(2, 1), ceilings=ceilings(10, 44))),
    (1, "threads are no matter", HOLDS_NOT, lambda: judged(1, *lengths(), *threads(1, 1), ceilings=ceilings(1, 2.5))),
    (1, "wild", UNSURE, lambda: judged(1, *lengths(), *threads(2, 1, WILD), ceilings=ceilings(1, 2.5))),
    (1, "no ceilings", UNTESTABLE, lambda: judged(1, *lengths(), *threads(2, 1))),
    (2, "near reading", HOLDS, lambda: judged(2, *lengths(), *threads(2, 1.1), ceilings=ceilings(0.11))),
    (2, "the kernel", HOLDS_NOT, lambda: judged(2, *lengths(), *threads(2, 1), ceilings=ceilings(0.11, plain_gbps=1))),
    (2, "threads matter", HOLDS_NOT, lambda: judged(2, *lengths(), *threads(2, 1.6), ceilings=ceilings(0.11))),
    (2, "wild", UNSURE, lambda: judged(2, *lengths(times=WILD), *threads(2, 1), ceilings=ceilings(0.11))),
    (3, "twice, and a little", HOLDS, lambda: judged(3, *lengths(500, 1000, 2000, per_position_ms=1e-4))),
    (3, "no quadratic part", HOLDS_NOT, lambda: judged(3, *lengths(500, 1000, 2000, times=(1,) * 6))),
    (3, "mostly quadratic", HOLDS_NOT, lambda: judged(3, *lengths(500, 1000, per_position_ms=0.1))),
    (3, "wild", UNSURE, lambda: judged(3, *lengths(500, per_position_ms=1e-3), *lengths(1000, times=WILD))),
    (3, "no double", UNTESTABLE, lambda: judged(3, *lengths(500, per_position_ms=1e-3))),
    (4, "choosing is short", HOLDS, lambda: judged(4, *lengths())),
    (4, "choosing is long", HOLDS_NOT, lambda: judged(4, *lengths(prefill_ms=0.1))),
    (4, "at the threshold", UNSURE, lambda: judged(4, *lengths(100, prefill_ms=0.19))),
    (5, "constant", HOLDS, lambda: judged(5, *lengths())),
    (5, "10 % more", HOLDS_NOT, lambda: judged(5, *lengths(100, 1000, per_position_ms=0.01))),
    (5, "near 5 %", UNSURE, lambda: judged(5, *lengths(10, times=WILD, per_position_ms=0.0027))),
    (6, "a line", HOLDS, lambda: judged(6, *context(per_position_ms=0.01))),
    (6, "level", HOLDS_NOT, lambda: judged(6, *context())),
    (6, "a bend", HOLDS_NOT, lambda: judged(6, *bent(lambda p: 5 + (p / 500) ** 2))),
    (6, "noise", UNSURE, lambda: judged(6, *bent(lambda p: 5 + p / 500 + 3 * (p // 250 % 2)))),
    (6, "two lengths", UNTESTABLE, lambda: judged(6, *context(500))),
    (7, "120 times", HOLDS, lambda: judged(7, *lengths(1000, prefill_ms=0.1, decode_ms=11))),
    (7, "11 times", HOLDS_NOT, lambda: judged(7, *lengths(1000))),
    (7, "two runs near it", UNSURE, lambda: judged(7, *lengths(1000, prefill_ms=0.1, decode_ms=9, times=(1, 1.01)))),
    (7, "another length", UNTESTABLE, lambda: judged(7, *lengths(100))),
    (8, "one step a prompt", HOLDS, lambda: judged(8, *in_one_step(100))),
    (8, "steps of 8 tokens", HOLDS_NOT, lambda: judged(8, *lengths(100, model=WIDE))),
    (8, "unknown shape", UNTESTABLE, lambda: judged(8, *lengths(100, model=NO_SHAPE))),
    (14, "below", HOLDS, lambda: judged(14, *lengths(), ceilings=ceilings(0.2))),
    (14, "above", HOLDS_NOT, lambda: judged(14, *lengths(), ceilings=ceilings(0.05))),
    (14, "about", UNSURE, lambda: judged(14, *lengths(100, times=WILD), ceilings=ceilings(0.1))),
    (15, "no matter", HOLDS, lambda: judged(15, *threads(2, 1.05))),
    (15, "they do", HOLDS_NOT, lambda: judged(15, *threads(2, 1.5))),
    (15, "wild", UNSURE, lambda: judged(15, *threads(2, 1.1, WILD))),
    (20, "quadratic", HOLDS, lambda: judged(20, *no_cache(lambda n: (n / 300) ** 2))),
    (20, "in proportion", HOLDS_NOT, lambda: judged(20, *no_cache(lambda n: n / 300))),
    (20, "wild", UNSURE, lambda: judged(20, *no_cache(lambda n: (n / 300) ** 2 * (9 if n in (64, 256) else 1)))),
    (25, "mostly", HOLDS, lambda: judged(25, *lengths())),
    (25, "slow prefill", HOLDS_NOT, lambda: judged(25, *lengths(prefill_ms=50))),
    (25, "two runs near it", UNSURE, lambda: judged(25, *lengths(prefill_ms=11, times=(1, 1.02)))),
    (25, "one length", UNTESTABLE, lambda: judged(25, *lengths(500))),
    (26, "at 1,000", HOLDS, lambda: judged(26, *lengths())),
    (26, "beyond the context", HOLDS_NOT, lambda: judged(26, *lengths(prefill_ms=0.1))),
    (26, "wild", UNSURE, lambda: judged(26, *lengths(100, times=WILD))),
    (9, "at the ridge", HOLDS, lambda: judged(9, *batch(lambda n: 0.01 * (1 + n / 4)), ceilings=RIDGE_AT_4)),
    (9, "long before it", HOLDS_NOT, lambda: judged(9, *batch(lambda n: 0.01 * n), ceilings=RIDGE_AT_4)),
    (9, "never", HOLDS_NOT, lambda: judged(9, *batch(lambda n: 0.01), ceilings=RIDGE_AT_4)),
    (9, "too few", UNSURE, lambda: judged(9, *batch(lambda n: 0.01, (1, 4)), ceilings=RIDGE_AT_4)),
    (9, "no ceilings", UNTESTABLE, lambda: judged(9, *batch(lambda n: 0.01))),
    (10, "both", HOLDS, lambda: judged(10, *batch(lambda n: 0.01 * n**0.5))),
    (10, "two are slower", HOLDS_NOT, lambda: judged(10, *batch(lambda n: 0.01 * (1 if n == 1 else n**0.5 + 1)))),
    (10, "one run", UNSURE, lambda: judged(10, *batch(lambda n: 0.01 * n**0.9, times=(1,)))),
    (10, "one number", UNTESTABLE, lambda: judged(10, *batch(lambda n: 0.01, (4,)))),
    (11, "long context", HOLDS, lambda: judged(11, *trained(10_000))),
    (11, "short context", HOLDS_NOT, lambda: judged(11, *trained(1_000))),
    (11, "unknown context", UNTESTABLE, lambda: judged(11, *trained(None))),
    (12, "as the bytes", HOLDS, lambda: judged(12, *heads(4))),
    (12, "no difference", HOLDS_NOT, lambda: judged(12, *heads(1))),
    (12, "level", UNSURE, lambda: judged(12, *heads(0))),
    (12, "one shape", UNTESTABLE, lambda: judged(12, *heads(4)[:1])),
    (13, "each is faster", HOLDS, lambda: judged(13, *formats(20, 15, 12, 8))),
    (13, "one is slower", HOLDS_NOT, lambda: judged(13, *formats(20, 15, 16, 8))),
    (13, "one is wild", UNSURE, lambda: judged(13, *formats(20, 15, 12, 8, times=WILD))),
    (13, "one format", UNTESTABLE, lambda: judged(13, *formats(20))),
    (16, "faster", HOLDS, lambda: judged(16, *flash(4000, 1.3))),
    (16, "hardly", HOLDS_NOT, lambda: judged(16, *flash(4000, 1.1))),
    (16, "wild", UNSURE, lambda: judged(16, *flash(4000, 1.3, WILD))),
    (16, "short", UNTESTABLE, lambda: judged(16, *flash(256, 1.3))),
    (17, "faster", HOLDS, lambda: judged(17, *cache(9, 8))),
    (17, "one alike", HOLDS_NOT, lambda: judged(17, *cache(9, 10))),
    (17, "wild", UNSURE, lambda: judged(17, *cache(9, 8, WILD))),
    (17, "short", UNTESTABLE, lambda: judged(17, *cache(9, 8, n=500))),
    (18, "on most texts", HOLDS, lambda: judged(18, *speculation(2.5, 1, 3))),
    (18, "on one text", HOLDS_NOT, lambda: judged(18, *speculation(3, 1, 1.2))),
    (18, "wild", UNSURE, lambda: judged(18, *speculation(2.5, 2.5, times=WILD))),
    (18, "nothing plain", UNTESTABLE, lambda: judged(18, *speculation(2.5)[6:])),
    (19, "cheap copies", HOLDS, lambda: judged(19, *prefixes(lambda n: 1))),
    (19, "dear copies", HOLDS_NOT, lambda: judged(19, *prefixes(lambda n: n * n / 50))),
    (19, "one run", UNSURE, lambda: judged(19, *prefixes(lambda n: n, n_runs=1))),
    (19, "one length", UNTESTABLE, lambda: judged(19, *prefixes(lambda n: 1, (8,)))),
    (21, "smaller, shorter", HOLDS, lambda: judged(21, *stall(lambda chunk: 1))),
    (21, "dear chunks", HOLDS_NOT, lambda: judged(21, *stall(lambda chunk: 5 if chunk else 1))),
    (21, "about alike", UNSURE, lambda: judged(21, *stall(lambda chunk: 200 / (chunk or 200)))),
    (21, "one size", UNTESTABLE, lambda: judged(21, *stall(lambda chunk: 1)[:2])),
    (24, "long context", HOLDS, lambda: judged(24, *trained(10_000))),
    (24, "short context", HOLDS_NOT, lambda: judged(24, *trained(1_000))),
    (24, "unknown context", UNTESTABLE, lambda: judged(24, *trained(None))),
    (23, "measured, inside", HOLDS, lambda: judged(23, *lengths(100), others=sevens(115, 75))),
    (23, "measured, faster", HOLDS_NOT, lambda: judged(23, *lengths(100), others=sevens(115, 180))),
    (23, "measured, wild", UNSURE, lambda: judged(23, *lengths(100), others=sevens(115, 75, times=WILD))),
    (23, "only predicted", UNTESTABLE, lambda: judged(23, *lengths(100))),
    (27, "by bandwidth", HOLDS, lambda: judged(27, *lengths(100), others=machines(0))),
    (27, "by the peak", HOLDS_NOT, lambda: judged(27, *lengths(100), others=machines(1))),
    (27, "one decides", UNSURE, lambda: judged(27, *lengths(100), others=machines(0, *list(GPUS)[2:]))),
    (27, "one machine", UNTESTABLE, lambda: judged(27, *lengths(100), ceilings=ceilings())),
    (28, "dear moves", HOLDS, lambda: judged(28, *prefixes(lambda n: 10), ceilings=RIDGE_AT_4)),
    (28, "cheap moves", HOLDS_NOT, lambda: judged(28, *prefixes(lambda n: 0.1), ceilings=RIDGE_AT_4)),
    (28, "one run", UNSURE, lambda: judged(28, *prefixes(lambda n: 6, n_runs=1), ceilings=RIDGE_AT_4)),
    (28, "no ceilings", UNTESTABLE, lambda: judged(28, *prefixes(lambda n: 10))),
    (29, "no layer changes", HOLDS, lambda: judged(29, *dependence((0, 0), (1e-4, 0.009)))),
    (29, "V of one layer", HOLDS_NOT, lambda: judged(29, *dependence((0, 0), (0, 0.011)))),
    (29, "the first layer", HOLDS_NOT, lambda: judged(29, *dependence((0.2, 0), (0, 0)))),
    (29, "nothing compared", UNTESTABLE, lambda: judged(29, *dependence())),
    (30, "near the peak", HOLDS, lambda: judged(30, *lengths(prefill_ms=0.3), ceilings=ceilings())),
    (30, "far below", HOLDS_NOT, lambda: judged(30, *lengths(), ceilings=ceilings())),
    (30, "wild", UNSURE, lambda: judged(30, *lengths(prefill_ms=0.4, times=WILD), ceilings=ceilings())),
    (30, "no ceilings", UNTESTABLE, lambda: judged(30, *lengths())),
    (32, "copies for nothing", HOLDS, lambda: judged(32, *prefixes(lambda n: 0.1))),
    (32, "dear copies", HOLDS_NOT, lambda: judged(32, *prefixes(lambda n: 10))),
    (32, "one run", UNSURE, lambda: judged(32, *prefixes(lambda n: 1, n_runs=1))),
    (32, "steps not timed", UNTESTABLE, lambda: judged(32, *with_settings(prefixes(lambda n: 1), ONE_WAIT))),
    (33, "all of it", HOLDS, lambda: judged(33, *buffers(1))),
    (33, "equal buffers", HOLDS_NOT, lambda: judged(33, *buffers(0))),
    (33, "a short context", HOLDS_NOT, lambda: judged(33, *buffers(1, 256, tensor_bytes={"Q4_0": 10**9}))),
    (33, "larger logits", UNTESTABLE, lambda: judged(33, *buffers(1, n_vocab=10**7))),
    (33, "one side", UNTESTABLE, lambda: judged(33, *buffers(1)[:1])),
    (34, "soon and fast", HOLDS, lambda: judged(34, *lengths(decode_ms=20))),
    (34, "a late first token", HOLDS_NOT, lambda: judged(34, *lengths(decode_ms=20, prefill_ms=3))),
    (34, "slow tokens", HOLDS_NOT, lambda: judged(34, *lengths(decode_ms=80))),
    (34, "wild", UNSURE, lambda: judged(34, *lengths(decode_ms=20, times=WILD))),
    (34, "another length", UNTESTABLE, lambda: judged(34, *lengths(1000))),
    (35, "constant tokens", HOLDS, lambda: judged(35, *lengths())),
    (35, "slower and slower", HOLDS_NOT, lambda: judged(35, *lengths(per_position_ms=0.01))),
    (35, "slow prefill", HOLDS_NOT, lambda: judged(35, *lengths(prefill_ms=20))),
    (35, "two runs near it", UNSURE, lambda: judged(35, *lengths(prefill_ms=4, times=(1, 1.02)))),
    (35, "one length", UNTESTABLE, lambda: judged(35, *lengths(500))),
    (36, "a second each", HOLDS, lambda: judged(36, *queue(1, 0))),
    (36, "a server that keeps up", HOLDS_NOT, lambda: judged(36, *queue(0, 0))),
    (36, "too slow for half of it", HOLDS_NOT, lambda: judged(36, *queue(1, 0.3))),
    (36, "wild", UNSURE, lambda: judged(36, *queue(1, 0, WILD))),
    (36, "three requests", UNTESTABLE, lambda: judged(36, *queue(1, 0, n=3))),
    (36, "one rate", UNTESTABLE, lambda: judged(36, *queue(1, 0)[:1])),
]


@pytest.mark.parametrize(
    ("number", "verdict", "judge"),
    [pytest.param(case[0], case[2], case[3], id=f"{case[0]} {case[1]}") for case in CASES],
)
def test_a_criterion(number: int, verdict: str, judge: Callable[[], Judgement]) -> None:
    judgement = judge()
    assert judgement.verdict == verdict, judgement.words
    assert judgement.words
    for figure in judgement.figures:
        assert figure.low is None or figure.high is None or figure.low <= figure.value <= figure.high, figure


def test_verdicts_and_figures_stay_as_they_were() -> None:
    """As they were when each criterion was a function; since then one interval of a share was cut at 100 %."""
    golden = [json.loads(line) for line in (Path(__file__).parent / "claims_golden.jsonl").read_text().splitlines()]
    assert [case[0] for case in golden] == [f"{number} {name}" for number, name, _, _ in CASES]
    for (name, verdict, figures), (_, _, _, judge) in zip(golden, CASES, strict=True):
        judgement = judge()
        known = [[one.name, one.value, one.low, one.high, one.unit, one.n] for one in judgement.figures]
        assert judgement.verdict == verdict and len(known) == len(figures), name
        for was, now in zip(figures, known, strict=True):
            assert now == [was[0], *(x if x is None else pytest.approx(x, 1e-4) for x in was[1:4]), *was[4:]], name


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: str(claim.number))
def test_a_criterion_is_made_of_its_conditions(claim: Claim) -> None:
    assert claim.criterion.startswith(" ".join(f"{one.what} is {one.bounds}." for one in claim.conditions))
    assert all(one.least > -math.inf or one.most < math.inf for one in claim.conditions)
    moved = dataclasses.replace(claim.conditions[0], least=7.0, most=math.inf)
    other = dataclasses.replace(claim, conditions=(moved, *claim.conditions[1:]))
    assert "is at least 7" in other.criterion and claim.criterion != other.criterion


def reach(prefill: tuple[float, float], decode: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has runs on devices of the datasheets reach these shares of their limits."""

    def times(model: Model, settings: Settings, device: datasheet.Device, n_prompt: int, n_gen: int) -> dict[str, Any]:
        limits = datasheet.limits(model, settings, device, n_prompt, n_gen)
        assert limits is not None and limits[0] is not None
        shares = {PREFILL: (limits[0], prefill), DECODE: (limits[1], decode)}
        return {phase: (limit / high, limit / high, limit / low) for phase, (limit, (low, high)) in shares.items()}

    monkeypatch.setattr(published, "times", times)


@pytest.mark.parametrize(
    ("prefill", "decode", "verdict"),
    [
        ((0.40, 0.45), (0.60, 0.65), HOLDS),
        ((0.05, 0.06), (0.60, 0.65), HOLDS_NOT),
        ((0.25, 0.70), (0.55, 0.80), UNSURE),
    ],
)
def test_the_share_of_prefill_of_a_7b_is_judged_by_its_prediction(
    prefill: tuple[float, float], decode: tuple[float, float], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(prefill, decode, monkeypatch)
    judgement = judged(22, *lengths())
    assert judgement.verdict == verdict, judgement.words
    assert "Predicted" in judgement.words and "measured here, 1,000 + 200" in [one.name for one in judgement.figures]


def test_a_prediction_that_contradicts_nothing_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    reach((0.25, 0.70), (0.2, 0.8), monkeypatch)
    judgement = judged(23, *lengths(100))
    assert judgement.verdict == UNTESTABLE and "there is no such GPU here" in judgement.words


def test_all_36_are_there_in_order() -> None:
    assert [claim.number for claim in CLAIMS] == [*range(1, 31), *range(32, 37)]
    assert all(claim.criterion.endswith(".") and not claim.words.endswith(".") for claim in CLAIMS)
    parts = {record.run.part for record in ALL} | {claim_parts.CEILINGS}
    assert {part for claim in CLAIMS for part in claim.parts} == parts


ALL = [
    *lengths(100, 500, 1000),
    *context(),
    *threads(2, 1),
    *batch(lambda n: 0.01),
    *heads(4),
    *formats(20, 15, 12, 8),
    *flash(4000, 1.3),
    *cache(9, 8),
    *speculation(2, 3),
    *prefixes(lambda n: 1),
    *no_cache(lambda n: n / 300),
    *stall(lambda chunk: 1),
    *dependence((0, 0), (0.1, 0.2)),
    *buffers(1),
    *queue(1, 0),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: str(claim.number))
def test_a_judge_never_fails_for_what_a_user_can_have(claim: Claim) -> None:
    first_of_part = list({record.run.part: record for record in reversed(ALL)}.values())
    unknown = [dataclasses.replace(record, model=NO_SHAPE) for record in ALL]
    untrained = [
        dataclasses.replace(record, model=dataclasses.replace(MODEL, n_ctx_train=None, n_bytes=None)) for record in ALL
    ]
    whole_set = ceilings().rates
    bare = dataclasses.replace(ceilings(), rates=whole_set[-1:])
    other_type = tuple(dataclasses.replace(rate, type="Q8_0") for rate in whole_set)
    of_others = dataclasses.replace(ceilings(), rates=other_type)
    instant = [
        dataclasses.replace(record, run=dataclasses.replace(record.run, steps=stopped(record))) for record in ALL
    ]
    for records in (ALL, first_of_part, unknown, untrained, instant, ALL[::7], []):
        for best in (None, ceilings(), bare, of_others):
            judgement = claim.judge(Evidence(tuple(records), best, others=tuple(ALL)))
            assert judgement.verdict in (HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE) and judgement.words
    assert judgement.verdict == UNTESTABLE and "does not include" in judgement.words


def stopped(record: Record) -> Any:
    """Steps that took no time at all, as a clock that stands still has them."""
    nothing = (0,) * len(record.run.steps.kind)
    return dataclasses.replace(record.run.steps, start_ns=nothing, ready_ns=nothing, end_ns=nothing)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: str(claim.number))
def test_what_failed_is_named(claim: Claim) -> None:
    failed = [make_record(make_run(part=part, status=FAILED, error="Out of memory.")) for part in claim.parts]
    judgement = judged(claim.number, *failed, ceilings=ceilings())
    assert judgement.verdict == UNTESTABLE and "Out of memory." in judgement.words


def with_settings(records: Sequence[Record], settings: Settings) -> list[Record]:
    return [dataclasses.replace(record, settings=settings) for record in records]


def test_why_a_part_is_missing() -> None:
    some, one_thread = lengths(100), dataclasses.replace(SETTINGS, n_threads=1)
    assert "one thread" in judged(15, *with_settings(some, one_thread)).words
    assert "--quick" in judged(16, *some, is_quick=True).words
    made_up = dataclasses.replace(MODEL, source="synthetic")
    assert "random weights" in judged(18, *lengths(100, model=made_up)).words
    windowed = dataclasses.replace(MODEL, windows=(8, 0))
    assert "sliding-window" in judged(19, *lengths(100, model=windowed)).words
    assert "the measurement `stall`" in judged(21, *some).words


def test_on_a_gpu_threads_decide_nothing() -> None:
    records = with_settings(threads(2, 1), dataclasses.replace(SETTINGS, n_gpu_layers=99))
    assert "on a GPU" in judged(15, *records).words
    other_device = judged(2, *with_settings(lengths(), records[0].settings), *records, ceilings=ceilings(0.11))
    assert other_device.verdict == UNTESTABLE and "another device" in other_device.words


def test_what_was_mostly_disturbed_is_not_sure_unless_it_was_measured_side_by_side(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disturbances, "disturbances", lambda record: ["another process used a core"])
    judgement = judged(4, *lengths())
    assert judgement.verdict == UNSURE and judgement.words.startswith("18 of 18 runs were disturbed")
    assert judged(15, *threads(2, 1.05)).verdict == HOLDS


@pytest.mark.parametrize(("n", "low", "high"), [(6, 1, 6), (3, 0.457, 7.22), (2, 0.798, 2.51), (1, 0.798, 1.254)])
def test_an_interval_is_made_of_what_there_is(n: int, low: float, high: float) -> None:
    known = claim_rules.figure("a figure", [float(i + 1) for i in range(n)])
    assert known is not None and known.n == n
    assert [known.low, known.high] == pytest.approx([low, high], 0.01)


@pytest.mark.parametrize(
    ("description", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop"),
        ("NVIDIA GeForce RTX 2080 SUPER", "rtx-2080-super"),
        ("NVIDIA GeForce GTX 980", None),
    ],
)
def test_the_device_of_a_run_is_that_of_its_accelerator(description: str, name: str | None) -> None:
    device = of_hardware.device_of(on_gpu(description, 100)[0])
    assert (device and device.name) == name
    assert of_hardware.device_of(lengths(100)[0]) is None


def test_in_words_the_failing_conditions_come_first() -> None:
    words = judged(10, *batch(lambda n: 0.01 * (1 if n == 1 else n**0.5 + 1))).words
    assert words.startswith("Fails: the same, for 2x the sequences (2 over 1): 1.2") and "Holds: " in words


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_at_its_very_threshold_a_condition_is_rarely_decided(n: int) -> None:
    chance, n_decided = random.Random(n), 0
    for _ in range(400):
        ratios = [1.1 * math.exp(math.sqrt(2) * chance.gauss(0, spread.VIRTUAL)) for _ in range(n)]
        known = claim_rules.figure("a ratio", ratios)
        assert known is not None
        n_decided += Condition("A ratio", most=1.1).holds(known) is not None
    assert n_decided <= 0.08 * 400


def e2e(n_gen: int, **rates: Any) -> float:
    return phases.e2e_ns(make_run(500, n_gen, **rates)) or 0.0


@pytest.mark.parametrize("seed", range(12))
def test_no_made_up_machine_gets_a_verdict_that_is_wrong(seed: int) -> None:
    """The truth comes from longer runs, or is simulated step by step, instead of computed from the figures."""
    chance = random.Random(seed)

    def some(low: float, high: float) -> float:
        return math.exp(chance.uniform(math.log(low), math.log(high)))

    noise = [1 + chance.gauss(0, 0.02) for _ in range(6)]
    rates: dict[str, Any] = {
        "prefill_ms": some(0.2, 20),
        "decode_ms": some(2, 200),
        "per_position_ms": some(1e-4, 0.02),
    }
    runs = [*lengths(times=noise, **rates), *context(**rates)]
    first = make_run(500, 8, **rates)
    short_s, long_s = e2e(500, **rates), e2e(5000, **rates)
    serial, fixed = some(0.01, 1), some(0.01, 1)

    def step_s(n: int) -> float:
        return fixed + serial * n

    copy_ms, part_ms = some(0.05, 20), 8.0
    of_100 = (128 + 100 * part_ms + 99 * copy_ms) / (128 + 100 * part_ms)
    growth, below = some(0.05, 5), some(0.001, 0.5)
    queued = queue(growth, below, [1 + chance.gauss(0, 0.02) for _ in range(12)])
    for number, truths, records in (
        (32, [(of_100, 1.25)], prefixes(lambda n: copy_ms)),
        (34, [((phases.ttft_ns(first) or 0) / 1e9, 1), ((phases.tpot_ns(first) or 0) / 1e9, 1 / 15)], runs),
        (35, [(8, long_s / short_s), (long_s / short_s, 12.5)], runs),
        (36, [(0.5, growth), (below, 0.05)], queued),
    ):  # each claim holds if the first of all pairs are smaller; nearly equal ones prove nothing
        if any(0.9 < one / other < 1.1 for one, other in truths):
            continue
        judgement, is_true = judged(number, *records), all(one < other for one, other in truths)
        assert judgement.verdict in (HOLDS if is_true else HOLDS_NOT, UNSURE), (number, judgement.words)
