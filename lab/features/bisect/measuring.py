"""Run a search: prepare each build when it is needed, measure block by block, keep every line.

`search.py` says what to measure. A build that cannot be built, loaded or run is left out.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from lab.app.options import seconds_of
from lab.core import phases, stored_command
from lab.core.arguments import StrPath, Texts, Time
from lab.core.asked_settings import check_number, parts
from lab.core.files import expanded
from lab.core.keywords import EngineSettings
from lab.core.lists import plural
from lab.core.record import OK, Model, Record, Run
from lab.core.results import NotSaved, save
from lab.errors import LabError
from lab.features.bisect import package_index, series
from lab.features.bisect.figures import (
    Bisected,
    bisected,
    take_complete_block,
    times_of_block,
)
from lab.features.bisect.lines import DECODE, FIGURES, PREFILL, BisectLine, BuildLine, variant
from lab.features.bisect.search import (
    AGAIN,
    ENDS,
    GOOD,
    PAIR,
    STEP,
    NextBlock,
    RegressionSearch,
)
from lab.models import catalog
from lab.process.setup import ProcessSetup
from lab.process.wire import Build
from lab.process.worker import Worker
from lab.runner import builds, machine, progress, trial
from lab.runner.cases import Plan, is_given_up, utc_now
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter, ShowStatus, Status, Watch
from lab.runner.run_list import RunList
from lab.runner.session import new_results_file

PROMPT_LEN = 512
GEN = 64
AT_LEAST = 0.03
BUDGET = "1h"
TURNS_S = 4.0  # for the runs of a build in a block
MOST_TURNS = 6
DEFAULTS = "the default of "
OF_QUANTIZING = "llama_model_quantize_params"  # no run uses them
STAGES = {
    ENDS: "comparing the ends",
    STEP: "testing {}",
    PAIR: "confirming {}",
}


@dataclass(frozen=True)
class BisectPlan:
    """What is searched with which run, and the seconds to measure for."""

    series: series.Series
    base: Plan  # with the settings of all builds
    figures: tuple[str, ...]
    at_least: float
    budget_s: float

    @property
    def labels(self) -> tuple[str, ...]:
        return self.series.labels


def plan(
    worker: Worker,
    good: str,
    bad: str,
    among: Sequence[str] = (),
    prompt_len: int = PROMPT_LEN,
    gen: int = GEN,
    model: str = catalog.DEFAULT,
    *,
    figure: str | None = None,
    at_least: float = AT_LEAST,
    budget: str | float = BUDGET,
    watch: Any = None,
    **settings: Any,
) -> BisectPlan:
    """Check what can be checked before a build is made. LabError for an impossible search.

    The settings are planned once, with the installed bindings, and are the same for all builds.
    """
    budget_s = seconds_of(budget)
    check_number("gen", gen, 10**6)
    if not 0.005 <= at_least <= 5:
        raise LabError(
            f"--at-least {100 * at_least:g}% is not possible.",
            "Give a share from 0.5% to 500%.",
        )
    if figure not in (None, *FIGURES):
        raise LabError(f"--figure {figure} is none.", "Choose prefill or decode.")
    if figure == DECODE and gen < 2:
        raise LabError("Decode needs at least two generated tokens.", "Use --gen 2 or more.")
    figures: tuple[str, ...] = (figure,) if figure else FIGURES
    if gen < 2:
        figures = (PREFILL,)
    if settings.pop("lib", None):
        raise LabError(
            "--lib has no effect here: each build has its own libraries.", "Leave it out."
        )
    candidates = series.find(good, bad, among)
    base = make_plan(worker, str(prompt_len), gen, 1, model, watch=watch, **settings)
    if base.refused:
        reasons = " ".join(base.refused.values())
        raise LabError(reasons, "Use a shorter prompt or a smaller model.")
    return BisectPlan(candidates, base, figures, at_least, budget_s)


def bisect(
    good: StrPath,
    bad: StrPath,
    among: Texts = (),
    prompt_len: int = PROMPT_LEN,
    gen: int = GEN,
    model: str = catalog.DEFAULT,
    *,
    figure: str | None = None,
    at_least: float = AT_LEAST,
    budget: Time = BUDGET,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[EngineSettings],
) -> Bisected:
    """Find the build of llama.cpp that became slower; returns the `Bisected` search.

        found = lab.bisect("0.3.20", "0.3.36")
        lab.show_bisected(found)

    `good` and `bad` are versions of llama-cpp-python, which are built into the lab's cache, or
    folders of builds; `among` is the folder of those between. `at_least` is the slowdown looked
    for, `budget` the time to measure. LabError if an end cannot be measured.
    """
    from lab.app.command_words import words_of_values
    from lab.features.bisect.command import command

    options: dict[str, Any] = {
        "good": str(expanded(good)),
        "bad": str(expanded(bad)),
        "among": parts(among),
        "prompt_len": prompt_len,
        "gen": gen,
        "model": model,
        "figure": figure,
        "at_least": at_least,
        "budget": budget,
        **settings,
    }
    words = words_of_values(command, options)
    with progress.shown_to(watch) as show, stored_command.storing(words):
        with Worker() as worker:
            bisect_plan = plan(worker, **options)
        path = new_results_file(bisect_plan.base, Path(out))
        lines = list(execute(bisect_plan, path, show))
    return bisected(lines)


def execute(
    bisect_plan: BisectPlan,
    path: Path,
    watch: ShowStatus,
    new_worker: Callable[[], Worker] = Worker,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[BisectLine | BuildLine | Record]:
    """Search: yields each line after it was appended to `path`. LabError if an end fails."""
    session = BisectSession(bisect_plan, path, watch, new_worker, clock)
    yield from session.run()


@dataclass
class BisectSession:
    """A search under way."""

    plan: BisectPlan
    path: Path
    watch: ShowStatus
    new_worker: Callable[[], Worker]
    clock: Callable[[], float]
    plans: dict[int, Plan] = field(default_factory=dict)  # of prepared builds, by place
    n_blocks: int = 0  # begun
    n_turns: int = 1  # runs of each build in the next block
    measured_s: float = 0.0
    crashes: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.search = RegressionSearch(
            len(self.plan.labels), self.plan.figures, self.plan.at_least
        )
        self.chance = random.Random(self.plan.base.seed)

    def run(self) -> Iterator[BisectLine | BuildLine | Record]:
        """Blocks until the search ends or the budget is spent."""
        line = self.first_line()
        save(self.path, line)
        yield line
        while True:
            upcoming = self.search.next_trial()
            if upcoming is None or self.is_spent():
                return
            unprepared = [
                place
                for place in upcoming.places
                if place != AGAIN and place not in self.plans
            ]
            for place in unprepared:
                yield self.prepare(place)
            if all(place == AGAIN or place in self.plans for place in upcoming.places):
                yield from self.block(upcoming)

    def is_spent(self) -> bool:
        """Whether another block like those so far would exceed the budget."""
        block_s = self.measured_s / max(1, self.n_blocks)
        return self.measured_s + block_s > self.plan.budget_s

    def first_line(self) -> BisectLine:
        base = self.plan.base
        has_versions = any(build.version for build in self.plan.series.builds)
        return BisectLine(
            session=self.path.stem,
            machine=base.machine,
            model=base.model,
            settings=base.settings,
            started_at=utc_now(),
            builds=self.plan.labels,
            figures=self.plan.figures,
            at_least=self.plan.at_least,
            compiler=package_index.compiler() if has_versions else None,
            command=stored_command.command(),
        )

    def prepare(self, place: int) -> BuildLine:
        """Make a build ready to run, or leave it out. LabError if it is an end."""
        build = self.plan.series.builds[place]

        def show(n_done: int, n_all: int) -> None:
            self.watch(Status(f"building {build.label}: file {n_done} of {n_all}"))

        self.watch(Status(f"preparing {build.label}"))
        try:
            setup = series.setup_of(build, show)
            started, defaults = self.started(setup)
            self.plans[place] = self.plan_of(setup, started)
        except NotSaved:
            raise
        except LabError as problem:
            return self.leave_out(place, problem)
        return self.build_line(place, defaults=defaults)

    def started(self, setup: ProcessSetup) -> tuple[Build, dict[str, str]]:
        """What a build says of itself, and the defaults of its structures."""
        with self.new_worker() as worker:
            worker.use(dataclasses.replace(setup, rpc=self.plan.base.setup.rpc))
            build = builds.of_worker(worker)
            layout = worker.libraries().layout
        defaults = {
            name.removeprefix(DEFAULTS): value
            for name, value in layout.items()
            if name.startswith(DEFAULTS) and OF_QUANTIZING not in name
        }
        return build, defaults

    def plan_of(self, setup: ProcessSetup, build: Build) -> Plan:
        """The common plan with a build. LabError if the build computes on other devices."""
        base = self.plan.base
        needed = [device.name for device in machine.used(base.machine, base.settings)]
        provided = [device.name for device in build.devices]
        if not set(needed) <= set(provided):
            raise LabError(
                f"It has no {', '.join(needed)}; it has {', '.join(provided)}.",
                "Compare on the CPU: --n-gpu-layers 0",
            )
        lib = builds.name_of(setup.lib) if setup.lib else None
        return dataclasses.replace(
            base,
            machine=machine.describe(build, lib),
            settings=dataclasses.replace(base.settings, lib=lib),
            setup=dataclasses.replace(base.setup, lib=setup.lib, package=setup.package),
        )

    def leave_out(self, place: int, problem: LabError) -> BuildLine:
        """Drop a build that does not run. LabError if it is an end."""
        label = self.plan.labels[place]
        if place in (GOOD, self.search.bad):
            raise LabError(f"{label} cannot be measured: {problem.what}", problem.hint)
        self.search.drop(place, problem.what)
        self.watch(Status("searching", note=f"{label} is left out: {problem.what}"))
        return self.build_line(place, problem=problem.what)

    def build_line(
        self, place: int, problem: str | None = None, defaults: dict[str, str] | None = None
    ) -> BuildLine:
        base = self.plans.get(place, self.plan.base)
        line = BuildLine(
            session=self.path.stem,
            machine=base.machine,
            model=base.model,
            settings=base.settings,
            started_at=utc_now(),
            place=place,
            n_blocks=self.n_blocks,
            problem=problem,
            defaults=defaults or {},
            command=stored_command.command(),
        )
        save(self.path, line)
        return line

    def block(self, upcoming: NextBlock) -> Iterator[BisectLine | BuildLine | Record]:
        """A run of each build in fresh engines, and what the search makes of it."""
        labels = self.plan.labels
        places = {variant(place, labels): place for place in upcoming.places}
        plans = {name: self.plans[max(place, GOOD)] for name, place in places.items()}
        if upcoming.n_blocks == 0:
            trial.check(plans)
        began = self.clock()
        cases = [case for plan in plans.values() for case in plan.cases]
        runs = RunList((0, case) for case in cases * self.n_turns)
        reporter = Reporter(self.shown(upcoming), runs, self.plan.base.n_tokens)
        one_block = trial.Blocks(1, self.n_turns)
        blocks = trial.Trial(
            plans, self.path, reporter, runs, self.chance, self.new_worker, one_block
        )
        records: list[Record] = []
        last_run, most_crashes = yield from keeping(blocks.block(self.n_blocks), records)
        self.n_blocks += 1
        self.measured_s += self.clock() - began
        self.learn_model(next(iter(blocks.plans.values())).model)
        if last_run.status != OK:
            place = max(GOOD, places[last_run.variant or ""])
            yield from self.after_failure(last_run, place, most_crashes)
            return
        take_complete_block(self.search, times_of_block(records, labels))
        self.n_turns = turns(median_s(records))

    def learn_model(self, model: Model) -> None:
        """Keep the checksum of the model's file, so that it is computed once."""
        base = dataclasses.replace(self.plan.base, model=model)
        self.plan = dataclasses.replace(self.plan, base=base)
        for place, plan in self.plans.items():
            self.plans[place] = dataclasses.replace(plan, model=model)

    def after_failure(self, run: Run, place: int, most_crashes: int) -> Iterator[BuildLine]:
        """Leave a build out that fails, or whose engine crashed too often."""
        self.crashes[place] += 1
        if is_given_up(run.status, self.crashes[place], most_crashes):
            reason = run.error or "its run failed"
            yield self.leave_out(place, LabError(reason, "Try it alone: lab measure"))

    def shown(self, upcoming: NextBlock) -> ShowStatus:
        """Shows the stage and its block instead of the runs of a single block."""
        labels = self.plan.labels
        place = upcoming.places[-1]
        if upcoming.stage == STEP:
            place = upcoming.places[1]
        stage = STAGES[upcoming.stage].format(labels[place])
        label = f"{stage}, block {upcoming.n_blocks + 1}"

        def show(status: Status) -> None:
            left_s = max(0.0, self.plan.budget_s - self.measured_s)
            changed = dataclasses.replace(status, part=label, n_runs=0, left_s=left_s)
            self.watch(dataclasses.replace(changed, announcement=""))

        return show


def median_s(records: Sequence[Record]) -> float:
    """The median of the seconds of a block's timed runs."""
    runs = [record.run for record in records if record.run.is_timed]
    return statistics.median(phases.e2e_ns(run) or 0 for run in runs) / 1e9


def turns(run_s: float) -> int:
    """The runs of each build in a block: as many as take TURNS_S together.

    Runs differ within an engine too, and a further run costs less than a further engine. An even
    number leaves a steady drift without effect.
    """
    n_pairs = round(TURNS_S / max(run_s, 0.001) / 2)
    return min(MOST_TURNS, max(1, 2 * n_pairs))


def keeping(
    block: Generator[Record, None, tuple[Run, int]], records: list[Record]
) -> Generator[Record, None, tuple[Run, int]]:
    """The records of a block, which are also kept in a list. Returns what the block returns."""
    while True:
        try:
            record = next(block)
        except StopIteration as end:
            last_run, most_crashes = end.value
            return last_run, most_crashes
        records.append(record)
        yield record


def most_built(labels: Sequence[str]) -> int:
    """The builds that a search of one figure measures: the ends, and one for each halving."""
    return min(len(labels), 2 + (len(labels) - 2).bit_length())


def in_cache(candidates: series.Series) -> list[str]:
    """The versions of a series that are in the cache."""
    if not any(build.version for build in candidates.builds):
        return []
    cached = set(package_index.built())
    return [build.label for build in candidates.builds if build.version in cached]


def cost_of_builds(candidates: series.Series) -> str:
    """What it takes to build the versions of a series; "" for folders."""
    if not any(build.version for build in candidates.builds):
        return ""
    n_missing = len(candidates.builds) - len(in_cache(candidates))
    n_most = min(n_missing, most_built(candidates.labels))
    if n_most == 0:
        return "All versions that it may need are in the lab's cache."
    minutes = n_most * package_index.USUAL_S / 60
    mb = n_most * package_index.USUAL_BYTES / 1e6
    return (
        f"Up to {plural(n_most, 'version')} will be built, each when it is needed: about "
        f"{minutes:.0f} min on two cores and {mb:.0f} MB in {package_index.folder()}"
    )
