"""Search, then confirm the winner, within a budget of time.

The search (search.py) says what to measure block by block, in fresh engines. At last the winner is
measured side by side with the default, in blocks that chose nothing. About half of the budget is
kept for the confirmation.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from lab.app.command_words import words_of_values
from lab.core import shell, stored_command
from lab.core.arguments import StrPath, Time
from lab.core.keywords import EngineSettings
from lab.core.record import Model, Record
from lab.core.results import NotSaved, save
from lab.errors import LabError
from lab.features.tune import figures, planning
from lab.features.tune.choices import DECODE, NO_CHANGE, Choice, Timing
from lab.features.tune.figures import DEFAULT, FEWEST_CONFIRMED, Tuned
from lab.features.tune.lines import CONFIRM, REQUEST, SEARCH, TuningLine
from lab.features.tune.planning import TunePlan
from lab.features.tune.search import Search
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import as_options, neighbours, progress, trial
from lab.runner.cases import Plan, utc_now
from lab.runner.progress import Reporter, ShowStatus, Watch
from lab.runner.run_list import RunList
from lab.runner.session import new_results_file

# Share of the budget that is kept, once FEWEST_TRIED choices were tried
FOR_CONFIRMATION = 0.5
FEWEST_TRIED = 3
OVER_BUDGET = 0.05  # share by which the budget may be exceeded, because times are estimated
MOST_CONFIRMED = 12
"""Blocks of the confirmation, as the budget allows: blocks until a gain shows would find noise."""


def tune(
    prompt_len: int = planning.PROMPT_LEN,
    gen: int = planning.GEN,
    model: str = catalog.DEFAULT,
    *,
    goal: str = REQUEST,
    sequences: int = 1,
    budget: Time = planning.BUDGET,
    allow_lossy: bool = False,
    beside: int = 0,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[EngineSettings],
) -> Tuned:
    """The fastest settings for requests of prompt_len + gen tokens, within a budget of time.

        tuned = lab.tune(2000, 300, budget="5min")
        lab.show_tuned(tuned)  # what was tried, and what is recommended
        lab.measure("2000", 300, **tuned.settings)

    `goal`: the time of the whole request, until the first token (ttft), per further token (tpot),
    or the tokens per second of all `sequences` (throughput). Settings that are given stay fixed.
    `beside` busy programs of another session run all the time: for a machine in use. LabError
    if nothing is left to choose, or if the default cannot be measured.
    """
    from lab.features.tune.command import command

    options: dict[str, Any] = {
        "prompt_len": prompt_len,
        "gen": gen,
        "model": model,
        "goal": goal,
        "sequences": sequences,
        "budget": budget,
        "allow_lossy": allow_lossy,
        "beside": beside,
        **settings,
    }
    words = words_of_values(command, options)
    with (
        Worker() as worker,
        progress.shown_to(watch) as show,
        stored_command.storing(words),
    ):
        plan = planning.plan(worker, **options)
        path = new_results_file(plan.default, Path(out))
        lines = list(execute(plan, worker, path, show))
    result = figures.tuned(lines)
    if result is None:
        raise LabError("The default could not be measured.", "Try it alone: lab measure")
    return result


def execute(
    plan: TunePlan,
    worker: Worker,
    path: Path,
    watch: ShowStatus,
    new_worker: Callable[[], Worker] = Worker,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[TuningLine | Record]:
    """Search, then confirm: yields each line after it was appended to `path`."""
    line = first_line(plan, path)
    save(path, line)
    yield line
    session = TuneSession(plan, worker, path, watch, new_worker, clock)
    with neighbours.planted(plan.n_beside):
        yield from session.search_all()
        yield from session.confirm()


def first_line(plan: TunePlan, path: Path) -> TuningLine:
    return TuningLine(
        session=path.stem,
        machine=plan.default.machine,
        model=plan.default.model,
        settings=plan.default.settings,
        started_at=utc_now(),
        goal=plan.request.goal,
        n_gen=plan.request.n_gen,
        command=stored_command.command(),
    )


def variant(choice: Choice, default: Plan) -> str:
    """A choice as options. Threads of decode alone name those of prefill too."""
    changes = dict(choice)
    if "threads" in changes:  # the threads of prefill follow --threads otherwise
        changes.setdefault("threads_batch", default.settings.n_threads_batch)
    options: list[str] = []
    for name, value in changes.items():
        options += as_options.option(name, value)
    return shell.join(*options) or DEFAULT


@dataclass
class TuneSession:
    """A search under way, and its budget."""

    plan: TunePlan
    worker: Worker
    path: Path
    watch: ShowStatus
    new_worker: Callable[[], Worker]
    clock: Callable[[], float]
    models: dict[str, Model] = field(default_factory=dict)  # by file, with their checksums
    request_s: dict[Choice, float] = field(default_factory=lambda: {NO_CHANGE: 0.0})
    n_blocks: int = 0
    n_tried: int = 0
    slowest_run_s: float = 0.0

    def __post_init__(self) -> None:
        self.search = Search(self.plan.choices, self.plan.phases)
        self.chance = random.Random(self.plan.default.seed)
        self.started = self.clock()

    @property
    def left_s(self) -> float:
        return self.plan.budget_s - (self.clock() - self.started)

    @property
    def kept_s(self) -> float:
        """The part of the budget that the search leaves for the confirmation: half or more, once
        some choices were tried."""
        budget_s = self.plan.budget_s
        least_s = 2 * FEWEST_CONFIRMED * self.request_s[NO_CHANGE]
        if least_s > budget_s:  # nothing can be confirmed
            least_s = 0.0
        if self.n_tried < FEWEST_TRIED:
            return least_s
        return max(least_s, FOR_CONFIRMATION * budget_s)

    def has_time_for(self, n_runs: int) -> bool:
        """Whether the budget of the search allows more runs."""
        return self.left_s - self.kept_s >= n_runs * self.slowest_run_s

    def search_all(self) -> Iterator[Record]:
        """Blocks until the best choice is known, or the budget of the search is spent."""
        choices = self.search.next_block()
        while choices and (self.n_blocks == 0 or self.has_time_for(2)):
            default, *others = choices
            yield from self.try_choice(default)
            for choice in others:
                if not self.has_time_for(1):
                    break
                yield from self.try_choice(choice)
            self.n_blocks += 1
            choices = self.search.next_block()

    def try_choice(self, choice: Choice) -> Iterator[Record]:
        """A run of a choice; a choice that fails is dropped. LabError if the default fails."""
        began = self.clock()
        timing: Timing | None = None
        try:
            for record in self.block([choice], SEARCH):
                if record.run.error:
                    self.search.drop(choice, record.run.error)
                timing = figures.timing(record, choice) or timing
                yield record
        except NotSaved:
            raise
        except LabError as problem:  # the plan is impossible
            self.search.drop(choice, str(problem))
        if NO_CHANGE in self.search.dropped:
            reason = self.search.dropped[NO_CHANGE]
            raise LabError(
                f"The default cannot be measured: {reason}", "Try it alone: lab measure"
            )
        run_s = self.clock() - began
        self.slowest_run_s = max(self.slowest_run_s, run_s)
        if choice != NO_CHANGE:
            self.n_tried += 1
        if timing:
            self.search.timings.append(timing)
            self.learn(choice, run_s, timing)

    def learn(self, choice: Choice, run_s: float, timing: Timing) -> None:
        """The time of a whole request; the search generates only a part of it."""
        n_more = max(0, self.plan.request.n_gen - planning.N_SEARCH_GEN)
        request_s = run_s + n_more * timing.seconds.get(DECODE, 0.0)
        self.request_s[choice] = max(self.request_s.get(choice, 0.0), request_s)

    def confirm(self) -> Iterator[Record]:
        """Blocks of the default and the winner, if there is time for enough of them."""
        winner = self.search.best()
        if winner == NO_CHANGE:
            return
        spare_s = OVER_BUDGET * self.plan.budget_s
        slowest_request_s = max(self.request_s.values())
        winner_s = self.request_s.get(winner, slowest_request_s)
        block_s = self.request_s[NO_CHANGE] + winner_s
        if self.left_s + spare_s < FEWEST_CONFIRMED * block_s:
            return
        for _ in range(MOST_CONFIRMED):
            if self.left_s + spare_s < block_s:
                return
            for record in self.block([NO_CHANGE, winner], CONFIRM):
                yield record
                if record.run.error:
                    return
            self.n_blocks += 1

    def block(self, choices: Sequence[Choice], part: str) -> Iterator[Record]:
        """A run of each choice side by side in fresh engines."""
        plans = {}
        for choice in choices:
            plan = self.plan.plan(self.worker, choice, part)
            model = self.models.get(str(plan.file.path), plan.model)
            plans[variant(choice, self.plan.default)] = dataclasses.replace(plan, model=model)
        if len(plans) > 1:
            trial.check(plans)
        runs = RunList()
        for plan in plans.values():
            runs.add((0, case) for case in plan.cases)
        stage = "searching" if part == SEARCH else "confirming"
        label = f"{stage}, block {self.n_blocks + 1}"

        def show(status: progress.Status) -> None:
            left_s = max(0.0, self.left_s)
            of_block = dataclasses.replace(
                status, part=label, n_runs=0, left_s=left_s, announcement=""
            )
            self.watch(of_block)

        reporter = Reporter(show, runs, self.plan.default.n_tokens)
        blocks = trial.Trial(
            plans, self.path, reporter, runs, self.chance, self.new_worker, trial.Blocks(1, 1)
        )
        yield from blocks.block(self.n_blocks)
        for plan in blocks.plans.values():
            self.models[str(plan.file.path)] = plan.model
