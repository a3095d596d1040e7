"""Measure variants side by side: the trial of `lab ab`.

Machines drift, and every process of llama.cpp is some percent faster or slower than the next (it depends on where its
memory was allocated). So a trial consists of blocks. In each block every variant gets a new engine, and the runs have a
random order and then its reverse (A B B A), so that a steady drift affects all variants equally. The comparison uses
blocks, not single runs.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import random
import string
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.core import shell
from lab.core.asked_settings import check_number
from lab.core.record import FAILED, OK, Record, Run
from lab.core.results import save
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import as_options, builds, machine, progress
from lab.runner.cases import Case, Plan, failed_run
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter, ShowStatus
from lab.runner.session import new_results_file
from lab.runner.warm_engine import WarmEngine

N_BLOCKS = 10


def ab(
    variants: Sequence[Mapping[str, Any]],
    prompt_len: str = "256",
    gen: int = 32,
    blocks: int = N_BLOCKS,
    model: str = catalog.DEFAULT,
    *,
    out: str | Path = "results",
    **shared: Any,
) -> list[Record]:
    """Measure settings side by side, in blocks; the first variant is the base. Returns the records.

        lab.compare(lab.ab([{"threads": 1}, {"threads": 2}]))

    A variant has its own settings (and model, if it differs), `shared` those of all. A notebook shows a progress line.
    """
    with Worker() as worker:
        plans = plan(
            worker, named(variants), blocks, prompt_len=prompt_len, gen=gen, model=model, **shared
        )
    path = new_results_file(next(iter(plans.values())), Path(out))
    with progress.in_notebook() as watch:
        return list(execute(plans, blocks, path, watch))


def named(variants: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Settings with their words: as options."""
    options = [
        [as_options.option(name, value) for name, value in settings.items()]
        for settings in variants
    ]
    return [
        (shell.join(*itertools.chain(*words)), own)
        for words, own in zip(options, variants, strict=True)
    ]


def plan(
    worker: Worker,
    variants: Sequence[tuple[str, Mapping[str, Any]]],
    n_blocks: int,
    make: Callable[..., Plan] = make_plan,
    may_be_apart: bool = False,
    **shared: Any,
) -> dict[str, Plan]:
    """The plans of variants (words and settings), by name: A, B and so on, and the words. LabError as in `check`.

    Names are kept in records, so they have only the end of a library folder's path. `make` makes each plan: of a plain
    measurement, or of an experiment. With `may_be_apart` they need not fit into memory together.
    """
    check_number("blocks", n_blocks, 1000)
    if len(variants) > 26:
        raise LabError(f"{len(variants)} variants are too many.", "Compare at most 26 at once.")
    plans = {}
    for letter, (words, settings) in zip(string.ascii_uppercase, variants, strict=False):
        if lib := settings.get("lib"):
            words = shell.join(
                *(word.replace(lib, builds.short(lib)) for word in shell.split(words))
            )
        plans[f"{letter}: {words or 'as it is'}"] = make(
            worker, repeat=2 * n_blocks, **{**shared, **settings}
        )
    check(plans, may_be_apart)
    return plans


def check(plans: dict[str, Plan], may_be_apart: bool = False) -> None:
    """LabError if the variants cannot be measured side by side. The keys are the variants' names."""
    if len(plans) < 2:
        raise LabError(
            "A trial needs at least two variants.",
            'For example: lab ab "--threads 1" "--threads 2"',
        )
    for name, plan in plans.items():
        if plan.refused:
            raise LabError(
                f"{name}: {' '.join(plan.refused.values())}",
                "Use shorter prompts or a smaller model.",
            )
    if not may_be_apart and (problem := too_large(plans)):
        hint = "Use a smaller model or shorter prompts, or measure the variants one after the other (lab measure)."
        raise LabError(problem, hint)


def too_large(plans: dict[str, Plan]) -> str:
    """Why the variants do not fit into memory together; "" if they do."""
    need = sum(max(plan.memory(case).total_bytes for case in plan.cases) for plan in plans.values())
    available = machine.memory_available()
    if any(plan.settings.n_gpu_layers for plan in plans.values()) or need <= available:
        return ""
    return f"All variants together need about {need / 1e9:.1f} GB of memory; {available / 1e9:.1f} GB are available."


def execute(
    plans: dict[str, Plan],
    n_blocks: int,
    path: Path,
    watch: ShowStatus,
    new_worker: Callable[[], Worker] = Worker,
    n_turns: int = 2,
    apart: bool = False,
) -> Iterator[Record]:
    """Make the trial's runs, append each to `path` when it ends, and yield its record.

    With `n_turns` 1 each variant runs once in a block: this allows more blocks, but drift within a block counts. A
    failed variant, or one whose engine crashes twice (once if the crash is known to repeat), is recorded and ends the
    trial with a LabError; finished runs are kept. `apart`: only one variant's engine has its model loaded at a time.
    """
    first = next(iter(plans.values()))
    chance = random.Random(first.seed)
    todo = [(0, case) for plan in plans.values() for case in plan.cases] * (n_turns * n_blocks)
    per_block = len(todo) // n_blocks
    reporter = Reporter(watch, todo, first.n_tokens)
    plans = dict(plans)
    crashes = collections.Counter[str | None]()
    for number in range(n_blocks):
        run, most_crashes = yield from block(
            plans, number, path, reporter, todo, chance, new_worker, n_turns, apart
        )
        if run.status != OK:
            crashes[run.variant] += 1
            if run.status == FAILED or crashes[run.variant] >= most_crashes:
                raise LabError(f"{run.variant}: {run.error}", "The finished runs are kept.")
            del todo[(n_blocks - number - 1) * per_block :]


def block(
    plans: dict[str, Plan],
    number: int,
    path: Path,
    reporter: Reporter,
    todo: list[tuple[int, Case]],
    chance: random.Random,
    new_worker: Callable[[], Worker],
    n_turns: int,
    apart: bool = False,
) -> Generator[Record, None, tuple[Run, int]]:
    """The runs of one block, in random order and then in reverse. A failed run ends it; returns the last run."""
    names = chance.sample(list(plans), len(plans))
    places = list(range(len(plans[names[0]].cases)))
    chance.shuffle(places)
    with contextlib.ExitStack() as stack:
        workers = {name: stack.enter_context(new_worker()) for name in names}
        engines = {name: WarmEngine(plans[name], workers[name], reporter) for name in names}

        def kept(name: str, run: Run) -> Record:
            plans[name] = dataclasses.replace(plans[name], model=engines[name].model)
            line = engines[name].record(
                path.stem, dataclasses.replace(run, block=number, variant=name)
            )
            save(path, line)
            return line

        name = names[0]
        place = places[0]
        try:
            for group in [[name] for name in names] if apart else [names]:  # loaded together
                for name in group:
                    engines[name].load()
                    engines[name].open(plans[name].cases)
                    for run in engines[name].warm_up(plans[name].cases):
                        yield (line := kept(name, run))
                turns = [(turn, name) for turn in range(n_turns) for name in group[:: 1 - 2 * turn]]
                for turn, name in turns:
                    for place in places[:: 1 - 2 * turn]:
                        todo.pop()
                        yield (
                            line := kept(
                                name,
                                engines[name].run(
                                    plans[name].cases[place], n_turns * number + turn
                                ),
                            )
                        )
                if apart:
                    workers[name].restart()  # frees its memory
        except LabError as problem:
            yield (
                line := kept(name, failed_run(plans[name].cases[place], n_turns * number, problem))
            )
    return line.run, engines[name].most_crashes
