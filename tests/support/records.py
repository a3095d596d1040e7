"""Hand-made records, and steps of an engine with exact times."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any

from lab.core import script as scripts
from lab.core.experiments import case_of
from lab.core.matrices import Matrix
from lab.core.record import (
    DECODE,
    OK,
    Device,
    Machine,
    Model,
    Noise,
    NoiseReading,
    NoiseSamples,
    Record,
    Run,
    Settings,
    Steps,
)
from lab.core.script import Script, Shape
from lab.engine import loop

MS = 1_000_000
MACHINE = Machine(
    cpu="Test CPU",
    n_cores_physical=4,
    n_cores_usable=4,
    ram_bytes=16 * 10**9,
    os="TestOS",
    python="3.11",
    llama_cpp_python="0.0",
    llama_cpp_commit=None,
    system_info="",
    devices=(Device("CPU", "Test CPU", "cpu", None),),
    virtual=False,
    power=None,
)


MODEL = Model(
    name="tiny",
    source="file",
    repo=None,
    file="tiny.gguf",
    revision=None,
    sha256=None,
    n_bytes=10**6,
    quantization="Q4_0",
    arch="llama",
    n_layer=2,
    n_embd=64,
    n_head=4,
    n_head_kv=2,
    head_dim=16,
    n_ff=128,
    n_vocab=100,
    n_ctx_train=1000,
    tied_embeddings=True,
    tensor_bytes={"Q4_0": 10**6},
    embedding_bytes=10**5,
    matrices=(
        Matrix("embedding", "Q4_0", 100, 64, 1),
        Matrix("attention", "Q4_0", 128, 64, 3.0),
        Matrix("ffn", "Q4_0", 128, 64, 213.23263888888889),
    ),
)


SETTINGS = Settings(
    n_ctx=128,
    n_batch=2048,
    n_ubatch=8,
    n_threads=2,
    n_threads_batch=2,
    n_gpu_layers=0,
    flash_attn="auto",
    flash_attn_resolved="on",
    type_k="f16",
    type_v="f16",
    prompt="text",
    prompt_sha256=None,
    seed=1,
)


class FakeClock:
    """Time passes only when somebody works: `clock()` reads it, `advance` moves it."""

    def __init__(self) -> None:
        self.now = 5_000

    def __call__(self) -> int:
        return self.now

    def advance(self, ns: int) -> None:
        self.now += ns


def exact_steps(
    n_prompt: int,
    n_gen: int,
    n_ubatch: int,
    prefill_ms: float = 1,
    decode_ms: float = 10,
    every: int | None = None,
    per_position_ms: float = 0,
) -> Steps:
    """Steps of an engine that needs prefill_ms a prompt token, decode_ms a token and 1 ms to choose
    one.

    Every position that a step looks back at makes each of its tokens per_position_ms slower.
    """
    prompt = list(range(n_prompt))
    written = (
        scripts.sweep(prompt, n_gen, n_ubatch, every)
        if every
        else scripts.run(prompt, n_gen, n_ubatch)
    )
    return steps_of(written, prefill_ms, decode_ms, per_position_ms)


def steps_of(
    script: Script,
    prefill_ms: float = 1,
    decode_ms: float = 10,
    per_position_ms: float = 0,
    move_ms: float = 0,
) -> Steps:
    """Steps of that engine for any script: each sequence's token costs decode_ms, whatever shares
    its step."""
    return steps_of_shapes(
        list(scripts.shapes(script)), prefill_ms, decode_ms, per_position_ms, move_ms
    )


def steps_of_shapes(
    shapes: list[Shape],
    prefill_ms: float = 1,
    decode_ms: float = 10,
    per_position_ms: float = 0,
    move_ms: float = 0,
) -> Steps:
    """Steps of that engine, of these shapes."""
    clock = FakeClock()

    def move(shape: Shape) -> loop.Action:
        each = (
            decode_ms if shape.kind == DECODE else prefill_ms
        ) + per_position_ms * shape.n_past
        ns = round((each * shape.n_tokens if shape.n_tokens else move_ms) * MS)
        choose = (lambda: clock.advance(shape.n_outputs * MS)) if shape.n_outputs else None
        return lambda: clock.advance(ns), choose, 0

    return loop.as_steps(shapes, loop.walk([move(shape) for shape in shapes], clock, [0]))


def make_run(n_prompt: int = 20, n_gen: int = 5, repeat: int = 0, **changes: Any) -> Run:
    """A run with exact times. `setup` is an experiment's own dataclass, `every` makes it a
    sweep."""
    rates = {
        name: changes.pop(name)
        for name in ("prefill_ms", "decode_ms", "per_position_ms")
        if name in changes
    }
    every = changes.pop("every", None)
    n_ubatch = changes.pop("n_ubatch", 8)
    setup = changes.pop("setup", None)
    if setup is not None:
        changes["case"] = case_of(setup)
    elif every is not None:
        changes["case"] = {"every": every}
    return dataclasses.replace(
        Run(
            n_prompt=n_prompt,
            n_gen=n_gen,
            repeat=repeat,
            warmup=False,
            started_at="2026-01-01T00:00:00Z",
            status=OK,
            error=None,
            steps=exact_steps(n_prompt, n_gen, n_ubatch, every=every, **rates),
            token_ids=tuple(range(n_gen)),
            end_of_generation_at=None,
            noise=None,
        ),
        **changes,
    )


def make_record(run: Run | None = None, **changes: Any) -> Record:
    return dataclasses.replace(
        Record("a-session", MACHINE, MODEL, SETTINGS, run or make_run()), **changes
    )


def column(rows: Iterable[Any], name: str) -> list[Any]:
    """An attribute of each row, such as `n_cached` or `run.status`."""
    return list(map(operator.attrgetter(name), rows))


READING = NoiseReading()


def watched(others_ms: list[int], every_ms: int = 100, **changes: Any) -> Run:
    """A run during which others took so much CPU time in each interval."""
    at_ms = tuple(every_ms * (i + 1) for i in range(len(others_ms)))
    samples = NoiseSamples(at_ms, tuple(others_ms))
    return make_run(noise=Noise(READING, dataclasses.replace(READING, **changes), samples))


def session(decode_ms: float = 10, **changes: object) -> list[Record]:
    """A warm-up, and two repeats of three prompt lengths: 1,000 tokens are slower per token."""
    records = [make_record(make_run(10, 2, warmup=True))]
    for n_prompt, prefill_ms in (
        (10, 1),
        (100, 1),
        (1000, 2),
    ):
        for repeat in range(2):
            token_ms = decode_ms * (1 + n_prompt / 1000)
            run = make_run(n_prompt, 5, repeat, prefill_ms=prefill_ms, decode_ms=token_ms)
            records.append(make_record(run, **changes))
    return records
