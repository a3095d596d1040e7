"""Measure variants side by side: the trial of `lab ab`.

Machines drift, and every process of llama.cpp is some percent faster or slower than the next (it
depends on where its memory was allocated). So a trial consists of blocks. In each block every
variant gets a new engine, and the runs have a random order and then its reverse (A B B A), so that
a steady drift affects all variants equally. The comparison uses blocks, not single runs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import random
import string
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import shell
from lab.core.asked_settings import check_number
from lab.core.record import OK, Record, Run
from lab.core.results import NotSaved, save
from lab.errors import LabError
from lab.process.worker import Worker
from lab.runner import as_options, builds, machine
from lab.runner.cases import Case, MakesPlan, Plan, failed_run, is_given_up
from lab.runner.forecast import work_of_plan
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter, ShowStatus
from lab.runner.run_list import RunList
from lab.runner.warm_engine import WarmEngine

N_BLOCKS = 10
N_TURNS = 2  # runs of a variant in a block


def named(variants: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Settings with their label: as options."""
    labelled: list[tuple[str, Mapping[str, Any]]] = []
    for settings in variants:
        options: list[str] = []
        for name, value in settings.items():
            options += as_options.option(name, value)
        labelled.append((shell.join(*options), settings))
    return labelled


def plan(
    worker: Worker,
    variants: Sequence[tuple[str, Mapping[str, Any]]],
    n_blocks: int,
    make: MakesPlan = make_plan,
    **shared: Any,
) -> dict[str, Plan]:
    """The plans of variants (label and settings), by name: A, B and so on, and the label. LabError
    as in `check`.

    Names are kept in records, so they have only the end of a library folder's path. `make` makes
    each plan: of a plain measurement, or of an experiment.
    """
    check_number("repeat", n_blocks, 1000)
    if len(variants) > len(string.ascii_uppercase):
        raise LabError(
            f"{len(variants)} variants are too many.", "Compare at most 26 at once."
        )
    plans: dict[str, Plan] = {}
    for letter, (label, settings) in zip(string.ascii_uppercase, variants, strict=False):
        name = f"{letter}: {_short_label(label, settings.get('lib')) or 'as it is'}"
        plans[name] = make(worker, repeat=N_TURNS * n_blocks, **{**shared, **settings})
    check(plans)
    return plans


def _short_label(label: str, lib: str | None) -> str:
    """A label with only the end of a library folder's path."""
    if not lib:
        return label
    options = [word.replace(lib, builds.short(lib)) for word in shell.split(label)]
    return shell.join(*options)


def check(plans: Mapping[str, Plan]) -> None:
    """LabError if the variants cannot be measured side by side. The keys are the variants'
    names."""
    if len(plans) < 2:
        hint = 'For example: lab ab "--threads 1" "--threads 2"'
        raise LabError("A trial needs at least two variants.", hint)
    for name, plan_of_variant in plans.items():
        if plan_of_variant.refused:
            reasons = " ".join(plan_of_variant.refused.values())
            raise LabError(f"{name}: {reasons}", "Use shorter prompts or a smaller model.")
    if any(case.is_cold for planned in plans.values() for case in planned.cases):
        raise LabError("A cold run needs an engine of its own: a trial cannot compare it.")
    problem = too_large(plans)
    if problem:
        hint = (
            "Use a smaller model or shorter prompts, or measure the variants one after the other "
            "(lab measure)."
        )
        raise LabError(problem, hint)


def too_large(plans: Mapping[str, Plan]) -> str:
    """Why the variants do not fit into memory together; "" if they do."""
    needed_bytes = 0
    for plan_of_variant in plans.values():
        if plan_of_variant.settings.n_gpu_layers:
            return ""
        cases = plan_of_variant.cases
        needed_bytes += max(plan_of_variant.memory(case).total_bytes for case in cases)
    available_bytes = machine.memory_available()
    if needed_bytes <= available_bytes:
        return ""
    return (
        f"All variants together need about {needed_bytes / 1e9:.1f} GB of memory; "
        f"{available_bytes / 1e9:.1f} GB are available."
    )


@dataclass(frozen=True)
class Blocks:
    """How many blocks a trial makes: fewer, at least `fewest`, if more would take longer than the
    budget.

    With `n_turns` 1 each variant runs once in a block: this allows more blocks, but drift within a
    block counts.
    """

    n: int
    n_turns: int = N_TURNS
    budget_s: float = math.inf
    fewest: int = 1
    first: int = 0  # the number of the first one, where a trial goes on


def execute(
    plans: Mapping[str, Plan],
    blocks: Blocks,
    path: Path,
    watch: ShowStatus,
    new_worker: Callable[[], Worker] = Worker,
) -> Iterator[Record]:
    """Make the trial's runs, append each to `path` when it ends, and yield its record.

    A failed variant, or one whose engine crashes twice (once if the crash is known to
    repeat), is recorded and ends the trial with a LabError; finished runs are kept.
    """
    first_plan = next(iter(plans.values()))
    cases_of_block: list[Case] = []
    for plan_of_variant in plans.values():
        cases_of_block += plan_of_variant.cases * blocks.n_turns
    runs = RunList()
    for number in range(blocks.first, blocks.first + blocks.n):
        runs.add((number, case) for case in cases_of_block)
    reporter = Reporter(watch, runs, first_plan.n_tokens, work_of_plan(first_plan))
    chance = random.Random(first_plan.seed)
    trial = Trial(dict(plans), path, reporter, runs, chance, new_worker, blocks)
    started = time.monotonic()
    reporter.ends_at = started + blocks.budget_s
    n_crashes = collections.Counter[str | None]()
    for number in range(blocks.n):
        elapsed_s = time.monotonic() - started
        if number >= blocks.fewest and elapsed_s * (number + 1) / number > blocks.budget_s:
            break
        run, most_crashes = yield from trial.block(blocks.first + number)
        if run.status != OK:
            n_crashes[run.variant] += 1
            if is_given_up(run.status, n_crashes[run.variant], most_crashes):
                raise LabError(f"{run.variant}: {run.error}", "The finished runs are kept.")
            n_left = (blocks.n - number - 1) * len(cases_of_block)
            runs.pass_over(n_left)


@dataclass
class Trial:
    """A trial under way, with the runs of its reporter; `plans` get the checksums of their
    models."""

    plans: dict[str, Plan]
    path: Path
    reporter: Reporter
    runs: RunList
    chance: random.Random
    new_worker: Callable[[], Worker]
    blocks: Blocks

    def block(self, number: int) -> Generator[Record, None, tuple[Run, int]]:
        """The runs of one block, in random order and then in reverse.

        A failed run ends it. Returns the last run, and the crashes after which its variant is
        abandoned.
        """
        self.reporter.begin_round(number)
        n_turns = self.blocks.n_turns
        names = self.chance.sample(list(self.plans), len(self.plans))
        places = list(range(len(self.plans[names[0]].cases)))
        self.chance.shuffle(places)
        with contextlib.ExitStack() as stack:
            engines: dict[str, WarmEngine] = {}
            for name in names:
                worker = stack.enter_context(self.new_worker())
                engines[name] = WarmEngine(self.plans[name], worker, self.reporter)
            name = names[0]
            place = places[0]
            try:
                for name in names:
                    for run in self._warm_up(engines[name], name):
                        record = self._save(engines[name], name, number, run)
                        yield record
                self.reporter.announce()
                for turn, name, place in _order(names, places, n_turns):
                    self.runs.take()
                    case = self.plans[name].cases[place]
                    run = engines[name].run(case, n_turns * number + turn)
                    record = self._save(engines[name], name, number, run)
                    yield record
            except NotSaved:
                raise
            except LabError as problem:
                case = self.plans[name].cases[place]
                run = failed_run(case, n_turns * number, problem)
                record = self._save(engines[name], name, number, run)
                yield record
        return record.run, engines[name].most_crashes

    def _warm_up(self, engine: WarmEngine, name: str) -> Iterator[Run]:
        cases = self.plans[name].cases
        engine.load()
        engine.open(cases)
        yield from engine.warm_up(cases)

    def _save(self, engine: WarmEngine, name: str, number: int, run: Run) -> Record:
        self.plans[name] = dataclasses.replace(self.plans[name], model=engine.model)
        run_of_block = dataclasses.replace(run, block=number, variant=name)
        record = engine.record(self.path.stem, run_of_block)
        save(self.path, record)
        return record


def _order(
    names: Sequence[str], places: Sequence[int], n_turns: int
) -> Iterator[tuple[int, str, int]]:
    """(turn, variant, place of the case): every second turn in reverse, so that a steady drift
    affects all equally."""
    for turn in range(n_turns):
        is_reversed = turn % 2 == 1
        for name in reversed(names) if is_reversed else names:
            for place in reversed(places) if is_reversed else places:
                yield turn, name, place
