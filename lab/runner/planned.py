"""A plan as data: what is measured of which model on which machine, in which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lab.core import script
from lab.core.memory import Memory, of_context
from lab.core.placement import Tensor
from lab.core.record import Machine, Model, Settings
from lab.core.script import Operation
from lab.models import catalog
from lab.process.wire import DEFAULT_BACKEND, Backend
from lab.runner import offload, prompts
from lab.runner.case import Case, Text, measured_run, with_room


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
    auto: offload.Asked | None = None  # where as many layers as fit go to devices
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
