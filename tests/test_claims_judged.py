"""Every criterion on made-up evidence: where the claim holds, where it does not, where nobody could tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lab.core.record import Ceilings, Rate, Record
from lab.experiments.claim import HOLDS, HOLDS_NOT, UNSURE, UNTESTABLE, Evidence, Judgement
from lab.experiments.claim_list import CLAIMS
from lab.process.wire import ATTENTION, MUL_MAT
from tests.conftest import MACHINE, MODEL, SETTINGS, exact_steps, make_record, make_run

EVEN = (1.0, 1.004, 0.998, 1.002, 0.997, 1.001)
WILD = (0.2, 5.0, 0.3, 4.0, 0.25, 3.0)
"""What the times of six repeats are multiplied by: hardly anything, or so much that nothing can be told."""

NO_SHAPE = dataclasses.replace(MODEL, n_layer=None)
WIDE = dataclasses.replace(MODEL, n_layer=30, tensor_bytes={"Q4_0": 10**8}, embedding_bytes=10**5)
"""A model whose cache and activations are nothing beside its weights."""

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


CASES: list[tuple[int, str, str, Callable[[], Judgement]]] = [
    # prefill of the tiny model: 2 MFLOPs a token, 1 ms each; decode: 1 MB a token, 10 ms each
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
