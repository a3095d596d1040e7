"""A fake engine with exact times, for tests that need no llama.cpp."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lab.core import script as scripts
from lab.core.memory import Tensor
from lab.core.record import (
    DECODE,
    DRAFT,
    FORGET,
    VERIFY,
    Buffer,
    Model,
    Placement,
    Rate,
    Settings,
)
from lab.core.script import OPEN_ENDED, Script, Shape
from lab.errors import LabError
from lab.process.setup import ProcessSetup
from lab.process.wire import Build, Outcome, Probe, Progress, Vocabulary
from lab.process.worker import WorkerDied
from lab.runner.warm_engine import N_SENTINEL
from tests.support.records import (
    MACHINE,
    MODEL,
    steps_of_shapes,
)


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


@functools.cache
def letters(text: str) -> tuple[int, ...]:
    """The tokens of a fake engine's model: its texts are long and always the same."""
    return tuple(ord(letter) % 100 for letter in text)


# Type checkers see that the fake takes and answers what the real one does; nothing is inherited.
if TYPE_CHECKING:
    from lab.process.worker import Worker as Interface
else:
    Interface = object


class FakeWorker(Interface):
    """Stands in for worker.Worker: exact steps at once, and deaths or refusals where a test wants
    them."""

    reads_files = True
    pid = os.getpid()

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
        self.on_run: Callable[[int, int], None] = lambda n_prompt, n_gen: None
        self.decode_ms: Callable[[], float] = lambda: 10
        self.on_context: Callable[[int], None] = lambda n_ctx: None
        self.resolve: Callable[[Settings], str | None] = lambda settings: "on"

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

    def probe(self, probe: Probe) -> Rate:
        raise LabError(f"{probe.op} is not timed here.")

    def pieces(self) -> list[bytes]:
        return [f"<{i}>".encode() for i in range(100)]

    def new_context(self, asked: Settings) -> Settings:
        self.on_context(asked.n_ctx)
        self.contexts.append(asked.n_ctx)
        return dataclasses.replace(asked, flash_attn_resolved=self.resolve(asked))

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


def died() -> WorkerDied:
    return WorkerDied("The engine's process ended: SIGSEGV.", "")
