"""The data of a plan: its cases, which become scripts and are measured repeatedly, and the run of a
failure."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple, Protocol, TypedDict

from lab.core import record, script
from lab.core.asked_settings import AskedSettings
from lab.core.experiments import case_of, run_label
from lab.core.memory import Memory, Tensor, of_context, padded
from lab.core.record import Machine, Model, Run, Settings, Steps, Value
from lab.core.script import Operation
from lab.errors import LabError
from lab.models import catalog
from lab.process.setup import ProcessSetup
from lab.process.worker import Worker, WorkerDied
from lab.runner import prompts


@dataclass(frozen=True)
class Case:
    """What a run does, apart from the text of its prompts: runs of one case are repeats of each
    other."""

    n_prompt: int
    n_gen: int
    every: int | None = None  # a sweep
    experiment: str | None = None
    setup: Any = None  # the experiment's own dataclass of numbers, texts and truth values
    sequences: tuple[int, ...] = ()  # final tokens of each; empty: one of n_prompt + n_gen
    text: str | None = None  # the source of its prompts, as in `--prompt`; None: the plan's
    is_cold: bool = False  # in an engine of its own, without warm-up runs and sentinels

    @property
    def n_generated(self) -> int:
        n_answers = 1 if self.every is None else math.ceil(self.n_prompt / self.every)
        return self.n_gen * n_answers

    @property
    def name(self) -> str:
        """The name in progress lines and errors."""
        return run_label(self.n_prompt, self.experiment, self.values)

    @property
    def values(self) -> dict[str, Value]:
        """What identifies the case in a record."""
        if self.setup is not None:
            return case_of(self.setup)
        return {} if self.every is None else {"every": self.every}


Text = Callable[[int, int], list[int]]  # returns a prompt of n tokens for sequence i
Write = Callable[[Case, Text, Settings], list[Operation]]  # makes a case's script


def measured_run(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script of a case of no experiment."""
    prompt = text(0, case.n_prompt)
    if case.every is None:
        return script.run(prompt, case.n_gen, settings.n_ubatch)
    return script.sweep(prompt, case.n_gen, settings.n_ubatch, case.every)


def with_room(settings: Settings, cases: Sequence[Case]) -> Settings:
    """The settings of a context for each of these cases: one cache (`kv_unified`), or equal ones
    for all sequences."""
    lengths = [case.sequences or (case.n_prompt + case.n_gen,) for case in cases]
    n_seq = max(map(len, lengths))
    if n_seq > 1 and not settings.kv_unified:
        n_ctx = n_seq * padded(max(map(max, lengths)))
    else:
        n_ctx = max(map(sum, lengths))
    return dataclasses.replace(settings, n_ctx=n_ctx, n_seq_max=n_seq)


class CaseFields(TypedDict):
    """The fields of a run that identify its case."""

    n_prompt: int
    n_gen: int
    experiment: str | None
    case: dict[str, Value]


def named(case: Case) -> CaseFields:
    return {
        "n_prompt": case.n_prompt,
        "n_gen": case.n_gen,
        "experiment": case.experiment,
        "case": case.values,
    }


def status_of(problem: LabError) -> str:
    return record.CRASHED if isinstance(problem, WorkerDied) else record.FAILED


def is_given_up(status: str, n_crashes: int, most_crashes: int) -> bool:
    """Whether what failed is not tried again: after an error that the engine reported, which would
    come again, or after the most crashes, which may be chance."""
    return status == record.FAILED or n_crashes >= most_crashes


def failed_run(case: Case, repeat: int, problem: LabError, warmup: bool = False) -> Run:
    """The record of a failure."""
    return Run(
        **named(case),
        repeat=repeat,
        warmup=warmup,
        status=status_of(problem),
        error=str(problem),
        started_at=utc_now(),
        steps=Steps(),
        token_ids=(),
    )


def utc_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True)
class Until:
    """When to stop: intervals within +- `share` of their medians, or the maximum of repeats or
    seconds."""

    share: float
    max_repeats: int
    budget_s: float | None


class Draft(NamedTuple):
    file: catalog.ModelFile
    model: Model


@dataclass(frozen=True)
class Plan:
    """What will be measured. `refused` says why a case does not fit; `write` makes a case's
    script."""

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
    may_change_repeats: bool = False  # quick cases get more rounds, dear ones fewer
    write: Write = measured_run
    draft: Draft | None = None
    setup: ProcessSetup = field(default_factory=ProcessSetup)  # of the engine's process
    tensors: tuple[Tensor, ...] = ()  # of the model's file, if layers go to devices
    free: Mapping[str, int] = field(default_factory=dict)  # free bytes of each device
    auto: AskedSettings | None = None  # set if as many layers as fit go to devices
    part: str | None = None  # of a larger session: written into every run
    first_repeat: int = 0  # of a plan that goes on where another one ended

    @property
    def order(self) -> list[tuple[int, Case]]:
        """(repeat, case) of every planned run."""
        possible = [case for case in self.cases if case not in self.refused]
        runs: list[tuple[int, Case]] = []
        for repeat in range(self.first_repeat, self.n_repeat):
            runs += self.round(repeat, possible)
        return runs

    @property
    def seed(self) -> int:
        return self.settings.seed or 0

    def round(self, repeat: int, cases: Sequence[Case]) -> list[tuple[int, Case]]:
        """(repeat, case) once for each of `cases`: first from the shortest prompt to the longest,
        so that figures appear after seconds, later shuffled by the seed."""
        by_length = sorted(cases, key=lambda case: (case.n_prompt, self.cases.index(case)))
        if repeat == 0:
            return [(repeat, case) for case in by_length]
        return shuffled(by_length, self.seed, repeat)

    def n_tokens(self, case: Case) -> tuple[int, int]:
        """Tokens that a run of this case prefills, and tokens that it chooses."""
        if case.experiment is None:
            return case.n_prompt, case.n_generated
        operations = self.write(case, lambda sequence, n: [0] * n, self.settings)
        return script.n_prefilled(operations), script.n_chosen(operations)

    def memory(self, case: Case) -> Memory:
        """Estimated memory of a context for this case alone; a draft model has one of the same
        length."""
        settings = with_room(self.settings, [case])
        system_info = self.machine.system_info
        memory = of_context(self.model, settings, system_info)
        if self.draft is None:
            return memory
        return memory.beside(of_context(self.draft.model, settings, system_info))


class MakesPlan(Protocol):
    """A function that makes a plan with an engine's process, of options that are its own."""

    def __call__(self, worker: Worker, /, *values: Any, **options: Any) -> Plan: ...


def shuffled(cases: Sequence[Case], seed: int, repeat: int) -> list[tuple[int, Case]]:
    """(repeat, case) once for each of `cases`, in an order given by the seed and the repeat."""
    order = list(cases)
    random.Random(f"{seed} {repeat}").shuffle(order)
    return [(repeat, case) for case in order]
