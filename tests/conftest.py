"""Shared by the tests: hand-made records, a fake engine with exact times, and the lab as a real
command."""

from __future__ import annotations

import dataclasses
import functools
import io
import operator
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from lab.core import script as scripts
from lab.core.experiments import case_of
from lab.core.memory import Tensor
from lab.core.record import (
    DECODE,
    DRAFT,
    FORGET,
    OK,
    VERIFY,
    Buffer,
    Device,
    Machine,
    Model,
    Noise,
    NoiseReading,
    Placement,
    Record,
    Run,
    Settings,
    Steps,
)
from lab.core.script import OPEN_ENDED, Script, Shape
from lab.core.shape import Matrix
from lab.engine import loop
from lab.models import catalog, synthetic
from lab.process.setup import ProcessSetup
from lab.process.wire import Build, Outcome, Progress, Vocabulary
from lab.process.worker import WorkerDied
from lab.runner import disturbances, noise_watch
from lab.runner.warm_engine import N_SENTINEL
from tests import miniature

# A suite that is started in the background of a script inherits that Ctrl-C is ignored, and would
# hand it on.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop(
    "COLUMNS", None
)  # what is printed shall not depend on the terminal that runs the tests

# Threads of an engine that wait for each other sleep: where they spin on a busy machine, a test
# takes minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The processes of `-n auto`: two for the whole suite; none for a part of it, which starts
    sooner alone."""
    return (
        2
        if config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and not config.option.keyword
        else 0
    )


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


def speculated(script: Script, n_right: int) -> tuple[list[Shape], tuple[int, ...]]:
    """The steps of `speculate`, the last of a script, where so many guesses are right each time;
    and how many were."""
    last = script[-1]
    n_past = scripts.n_prefilled([op for op in script if not op.of_draft])
    n_chosen = 1
    shapes: list[Shape] = []
    accepted = []
    while (n_left := last.times + 1 - n_chosen) > 0:
        n = min(last.n_draft, n_left - 1)
        right = min(n, n_right)
        if n:
            n_read = 1 if last.of_draft else 0
            shapes += [
                Shape(DRAFT, n_read, n_past + i, 1, n_read)
                for i in range(n if last.of_draft else 1)
            ]
            accepted.append(right)
        shapes.append(Shape(VERIFY if n else DECODE, n + 1, n_past, 1, n + 1))
        if right < n:
            shapes.append(Shape(FORGET, 0, n_past + n + 1, 1, 0))
        n_past = n_past + right + 1
        n_chosen = n_chosen + right + 1
    return shapes, tuple(accepted)


def make_run(n_prompt: int = 20, n_gen: int = 5, repeat: int = 0, **changes: Any) -> Run:
    """A run with exact times. `setup` is an experiment's own dataclass, `every` makes it a
    sweep."""
    rates = {
        name: changes.pop(name)
        for name in ("prefill_ms", "decode_ms", "per_position_ms")
        if name in changes
    }
    every = changes.pop("every", None)
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
            steps=exact_steps(n_prompt, n_gen, 8, every=every, **rates),
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


@functools.cache
def letters(text: str) -> tuple[int, ...]:
    """The tokens of a fake engine's model: its texts are long and always the same."""
    return tuple(ord(letter) % 100 for letter in text)


class FakeWorker:
    """Stands in for worker.Worker: exact steps at once, and deaths or refusals where a test wants
    them."""

    reads_files = True

    def __init__(self) -> None:
        self.setup = ProcessSetup()
        self.build = Build("0.0", None, "", MACHINE.devices)
        self.model = MODEL
        self.tensors_of_file: tuple[Tensor, ...] = ()
        self.free: dict[str, int] = {}  # bytes of each device
        self.starts = 1
        self.loads = 0
        self.contexts: list[int] = []
        self.prompts: list[list[int]] = []
        self.scripts: list[Script] = []
        self.move_ms = 5.0
        self.n_right = 2  # of the guesses of each verification
        self.differ: str | None = None  # the vocabularies of a model and its draft
        self.pid = os.getpid()
        self.on_run: Callable[[int, int], None] = lambda n_prompt, n_gen: None
        self.decode_ms: Callable[[], float] = lambda: 10
        self.on_context: Callable[[int], None] = lambda n_ctx: None

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None: ...

    def restart(self) -> None:
        self.starts += 1

    def use(self, setup: ProcessSetup) -> None:
        self.setup = setup

    @contextmanager
    def ended_after(self, seconds: float) -> Iterator[None]:
        yield

    def read_model(self, *_: object) -> Model:
        return self.model

    def tensors(self, *_: object) -> tuple[Tensor, ...]:
        return self.tensors_of_file

    def free_memory(self) -> dict[str, int]:
        return self.free

    def load(self, *_: object) -> Vocabulary:
        self.loads += 1
        return Vocabulary(
            n_vocab=100,
            bos=None,
            description="tiny",
        )

    def vocabularies_differ(self, *_: object) -> str | None:
        return self.differ

    def tokenize(self, text: str) -> list[int]:
        return list(letters(text))

    def pieces(self) -> list[bytes]:
        return [f"<{i}>".encode() for i in range(100)]

    def new_context(self, asked: Settings) -> Settings:
        self.on_context(asked.n_ctx)
        self.contexts.append(asked.n_ctx)
        return dataclasses.replace(asked, flash_attn_resolved="on")

    def placement(self) -> Placement:
        return Placement(
            ("CPU", "CPU", "CPU"),
            (Buffer("model", "CPU", 10**6),),
        )

    def run(
        self,
        script: Script,
        watch: Callable[[Progress], None],
    ) -> Outcome:
        n_prefilled = scripts.n_prefilled(script)
        n_chosen = scripts.n_chosen(script)
        more: tuple[list[Shape], tuple[int, ...]] = ([], ())
        if script[-1].kind == OPEN_ENDED:
            more = speculated(script, self.n_right)
        shapes = [*scripts.shapes(script), *more[0]]
        steps = steps_of_shapes(
            shapes,
            decode_ms=self.decode_ms(),
            move_ms=self.move_ms,
        )
        outcome = Outcome(steps, tuple(range(n_chosen)), None)
        if more[1]:
            outcome = dataclasses.replace(
                outcome, counts=outcome.counts | {"accepted": more[1]}
            )
        if (n_prefilled, n_chosen) == (1, N_SENTINEL + 2):
            return outcome
        self.scripts.append(script)
        self.prompts.append(
            [token for op in script for part in op.parts for token in part.tokens or ()]
        )
        self.on_run(n_prefilled, n_chosen)
        watch(Progress(n_prefilled, (1, 2)))
        return outcome


def column(rows: Iterable[Any], name: str) -> list[Any]:
    """An attribute of each row, such as `n_cached` or `run.status`."""
    return list(map(operator.attrgetter(name), rows))


def died() -> WorkerDied:
    return WorkerDied("The engine's process ended: SIGSEGV.", "")


@pytest.fixture(autouse=True)
def no_counters_of_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests are the same on machines that have some: those that are about energy make their own."""
    monkeypatch.setattr(noise_watch, "energy_counters", lambda gpus: [])


class QuietWatch:
    """Stands in for noise_watch.NoiseWatch where time is made up: nothing else happens on this
    machine."""

    def __init__(self, *_: object) -> None: ...

    def sample(self) -> None: ...

    def finish(self, *_: object) -> Noise:
        nothing = NoiseReading()
        return Noise(nothing, nothing)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many made-up sessions: the real machine is not watched, and no line is waited for until
    the disk has it."""
    monkeypatch.setattr(noise_watch, "NoiseWatch", QuietWatch)
    monkeypatch.setattr(os, "fsync", lambda number: None)


@pytest.fixture
def fake_worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture(scope="session")
def embedded() -> Path:
    return catalog.embedded_path()


@pytest.fixture(scope="session")
def mini(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file of three narrow layers with random weights: the real engine runs it in no
    time."""
    path = tmp_path_factory.mktemp("models") / "mini.gguf"
    synthetic.write(miniature.entry("llama").shape, "Q4_0", path)
    return path


def start_lab(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The real command, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "lab", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        **options,
    )


def run_process(*arguments: object, timeout_s: float = 120) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the real command."""
    process = start_lab(*arguments)
    out, err = process.communicate(timeout=timeout_s)
    assert "Traceback" not in err, err
    return process.returncode, out, err


@pytest.fixture
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the machine does is not held against the runs, so that what they show is
    said."""
    monkeypatch.setattr(disturbances, "disturbances", lambda record: {})
    monkeypatch.setattr(disturbances, "of_request", lambda record: {})


def run_lab(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command's `main` in this process.

    A process of its own starts Python, pandas and matplotlib anew, which takes seconds:
    `run_process` is for tests of that. What `main` does to signals is undone.
    """
    from lab.main import main

    out, err = (
        io.TextIOWrapper(
            io.BytesIO(),
            encoding="utf-8",
            write_through=True,
        )
        for _ in range(2)
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if hasattr(signal, "SIGHUP"):
        handlers[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
    status: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["lab", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            status = end.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    written = [stream.buffer.getvalue().decode() for stream in (out, err)]
    assert isinstance(status, int), written[1]
    assert "Traceback" not in written[1], written[1]
    return status, written[0], written[1]
