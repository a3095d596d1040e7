"""What is planned, as data: cases, the plan that holds them, and the run that a failure leaves.

A case is one thing that is measured again and again, and becomes a script. A plain case is a prompt of so many tokens
and so many generated ones. An experiment (lab/experiments) has cases with a lever, and writes their scripts itself. A
plan says which cases are measured, of which model on which machine, in which order.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from lab.core import record, script
from lab.core.asked_settings import AskedSettings
from lab.core.levers import LEVERS, LOOKUP, Lever, Speculation, name_of
from lab.core.memory import Memory, of_context, padded
from lab.core.placement import Tensor
from lab.core.record import Machine, Model, Run, Settings, Steps
from lab.core.script import Operation
from lab.errors import LabError
from lab.models import catalog
from lab.process.wire import DEFAULT_BACKEND, Backend
from lab.process.worker import WorkerDied
from lab.runner import prompts


@dataclass(frozen=True)
class Case:
    """What a run does, whatever its prompts say: runs of one case are repeats of each other.

    `sequences`: how many tokens each sequence will have at its end; empty where there is one, of n_prompt + n_gen.
    `text`: what its prompts are cut from, as `--prompt` names it; None: what all are cut from.
    """

    n_prompt: int
    n_gen: int
    every: int | None = None  # a sweep
    lever: Lever | None = None
    sequences: tuple[int, ...] = ()
    text: str | None = None

    @property
    def n_generated(self) -> int:
        """Tokens that a measured run generates: n_gen, in a sweep as often as it stops to decode."""
        return self.n_gen * (1 if self.every is None else -(-self.n_prompt // self.every))

    @property
    def name(self) -> str:
        """In progress lines and in errors."""
        return name_of(self.n_prompt, self.lever)


Text = Callable[[int, int], list[int]]
"""Gives sequence i a prompt of n tokens."""


def measured_run(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script of a case without a lever."""
    prompt = text(0, case.n_prompt)
    if case.every is None:
        return script.run(prompt, case.n_gen, settings.n_ubatch)
    return script.sweep(prompt, case.n_gen, settings.n_ubatch, case.every)


def with_room(settings: Settings, cases: Sequence[Case]) -> Settings:
    """The settings of a context in which each of these cases can run, one after the other.

    Sequences share one cache (`kv_unified`), or have one each, all of the same size.
    """
    lengths = [case.sequences or (case.n_prompt + case.n_gen,) for case in cases]
    n_seq = max(map(len, lengths))
    n_ctx = max(map(sum, lengths))
    if n_seq > 1 and not settings.kv_unified:
        n_ctx = n_seq * padded(max(map(max, lengths)))
    return dataclasses.replace(settings, n_ctx=n_ctx, n_seq_max=n_seq)


def named(case: Case) -> dict[str, Any]:
    """The fields of a run that say what it did."""
    lever = {name: case.lever for name, kind in LEVERS.items() if isinstance(case.lever, kind)}
    return {"n_prompt": case.n_prompt, "n_gen": case.n_gen, "every": case.every, **lever}


def is_of_draft(case: Case) -> bool:
    """Whether a draft model takes part."""
    return isinstance(case.lever, Speculation) and case.lever.draft not in (None, LOOKUP)


def failed_run(case: Case, repeat: int, problem: LabError, warmup: bool = False) -> Run:
    """The run that `problem` prevented."""
    return Run(
        **named(case),
        repeat=repeat,
        warmup=warmup,
        started_at=utc_now(),
        status=record.CRASHED if isinstance(problem, WorkerDied) else record.FAILED,
        error=str(problem),
        steps=Steps(),
        token_ids=(),
        prompt_offset=None,
        end_of_generation_at=None,
        noise=None,
    )


def utc_now() -> str:
    """This moment, as records have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Until:
    """When repeats are enough: intervals within +- `share` of their medians; at most so many repeats or minutes."""

    share: float
    max_repeats: int
    max_minutes: float | None


@dataclass(frozen=True)
class Draft:
    """A model that guesses for another one: its file, and its header."""

    file: catalog.ModelFile
    model: Model


@dataclass(frozen=True)
class Plan:
    """What will be measured. `refused` says of cases that cannot fit why not; `write` makes a case's script."""

    file: catalog.ModelFile
    model: Model
    machine: Machine
    settings: Settings  # n_ctx is that of the largest case
    prompt: prompts.Source
    cases: tuple[Case, ...]
    n_repeat: int
    refused: dict[Case, str]
    warnings: tuple[str, ...]
    until: Until | None = None
    is_more_if_cheap: bool = False  # cases that cost little get further rounds
    write: Callable[[Case, Text, Settings], list[Operation]] = measured_run
    draft: Draft | None = None
    backend: Backend = DEFAULT_BACKEND
    tensors: tuple[Tensor, ...] = ()  # of the model's file, where layers go to devices
    free: Mapping[str, int] = field(default_factory=dict)  # bytes of each device
    round_trips_s: tuple[float, ...] = ()  # to each RPC server, as it answered before
    auto: AskedSettings | None = None  # where as many layers as fit go to devices
    part: str | None = None  # of `lab claims`: written into every run, as is_quick
    is_quick: bool | None = None

    @property
    def order(self) -> list[tuple[int, Case]]:
        """(repeat, case) of every run that is sure to be made, round by round."""
        possible = [case for case in self.cases if case not in self.refused]
        return [run for repeat in range(self.n_repeat) for run in self.round(repeat, possible)]

    @property
    def seed(self) -> int:
        """Of the order of runs, and of the prompts."""
        return self.settings.seed or 0

    def round(self, repeat: int, cases: Sequence[Case]) -> list[tuple[int, Case]]:
        """(repeat, case) once for each of `cases`, shuffled by the seed."""
        return shuffled(sorted(cases, key=lambda case: (case.n_prompt, self.cases.index(case))), self.seed, repeat)

    def n_tokens(self, case: Case) -> tuple[int, int]:
        """How many tokens a run of it prefills, and how many it chooses."""
        if case.lever is None:
            return case.n_prompt, case.n_generated
        operations = self.write(case, lambda sequence, n: [0] * n, self.settings)
        return script.n_prefilled(operations), script.n_chosen(operations)

    def memory(self, case: Case) -> Memory:
        """Estimated memory of a context for this case alone; a draft model has one of the same length."""
        room = with_room(self.settings, [case])
        own = of_context(self.model, room)
        return own if self.draft is None else own.beside(of_context(self.draft.model, room))


def shuffled(cases: Sequence[Case], seed: int, repeat: int) -> list[tuple[int, Case]]:
    """(repeat, case) once for each of `cases`, in an order that the seed and the repeat decide."""
    order = list(cases)
    random.Random(f"{seed} {repeat}").shuffle(order)
    return [(repeat, case) for case in order]
