"""The main loop: make all runs of a plan, and write each to disk as soon as it ends.

Runs of different prompt lengths are interleaved in rounds and shuffled within each round, because
machines drift. Every round starts a new engine: where a process's memory was allocated makes it
some percent faster or slower until it ends, so only runs of different processes are independent.
Each engine first makes warm-up runs, which do not count, because llama.cpp repacks weights and
touches memory on first use.

With `--until` a fixed number of pilot rounds gives the spread, from which the lab computes once how
many rounds each length needs (Stein, "A two-sample test for a linear hypothesis", 1945): to stop as
soon as an interval is narrow would prefer intervals that are narrow by chance, which contain the
true value too rarely.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from lab.core import phases, results, stats
from lab.core.record import Record, Run, Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Worker, WorkerDied
from lab.runner import machine, progress
from lab.runner.cases import Case, Plan, Until, failed_run
from lab.runner.diagnosis import Diagnosed
from lab.runner.progress import Reporter, ShowStatus
from lab.runner.warm_engine import WarmEngine

EXTRA_SHARE = 0.25
"""Maximum time of the extra rounds of quick lengths, as a share of the planned rounds' time."""


def carry_out(
    make: Callable[[Worker], Plan],
    out: str | Path,
    watch: ShowStatus | None = None,
    stream: bool = False,
) -> list[Record]:
    """Make a plan and all its runs, with warnings of the plan and for failed runs."""
    with Worker() as worker, progress.in_notebook() as show_in_notebook:
        plan = make(worker)
        path = new_results_file(plan, Path(out))
        records = list(execute(plan, worker, path, watch or show_in_notebook, stream))
    messages = list(plan.warnings)
    errors = [record.run.error for record in records if record.run.error]
    if errors:
        messages.append(f"{len(errors)} runs failed: {errors[0]}")
    for message in messages:
        warnings.warn(message, stacklevel=3)
    return records


def new_results_file(plan: Plan, folder: Path) -> Path:
    device = machine.label(plan.machine, plan.settings).partition(",")[0]
    return results.new_file(folder, f"{machine.slug(plan.model.name)}-{machine.slug(device)}")


def execute(
    plan: Plan,
    worker: Worker,
    path: Path,
    watch: ShowStatus,
    stream: bool = False,
    n_starts: int = 1,
) -> Iterator[Record]:
    """Make the plan's runs, append each to `path` when it ends, and yield its record. A failure
    becomes a record."""
    if stream and plan.file.source == catalog.SYNTHETIC:
        message = "A model with random weights generates no text to stream."
        raise LabError(message, "Omit --stream.")
    with unless_empty(path):
        planned = plan.order
        reporter = Reporter(watch, planned, plan.n_tokens)
        engine = WarmEngine(plan, worker, reporter, stream, n_starts)
        for settings, run in _Loop(engine, planned).runs():
            record = engine.record(path.stem, run, settings)
            save(path, record)
            yield record


class _Loop:
    """A running plan. Its methods yield each run with the settings that it was made with."""

    def __init__(self, engine: WarmEngine, planned: list[tuple[int, Case]]) -> None:
        self.engine = engine
        self.plan = engine.plan
        self.started = time.monotonic()
        self.todo = planned  # (repeat, case), in the order of the runs
        self.is_extended = False  # the runs after the planned ones are in the list
        self.done: list[tuple[Case, Run]] = []
        self.n_crashes = collections.Counter[Case]()
        self.abandoned: set[Case] = set()

    def runs(self) -> Iterator[tuple[Settings, Run]]:
        """All runs, warm-ups and failures of the plan, each round with a fresh engine."""
        for case, reason in self.plan.refused.items():
            yield self.plan.settings, failed_run(case, 0, LabError(reason))
        while self.todo or self._extend():
            next_round = self.todo[0][0]
            if self.engine.warm and self.engine.round != next_round:
                if self._is_out_of_time():
                    return
                self.engine.renew()
            if self.engine.warm:
                yield from self._next_run()
            else:
                yield from self._warm_up()

    def _next_run(self) -> Iterator[tuple[Settings, Run]]:
        """The next run of the list, or the record of its failure."""
        repeat, case = self.todo.pop(0)
        try:
            run = self.engine.run(case, repeat)
        except LabError as problem:
            settings, run = self._failed(case, repeat, problem, self.engine.most_crashes)
            if run.warmup:  # does not count, because another setting works: try again
                self.todo.insert(0, (repeat, case))
            yield settings, run  # is saved before the engine starts again: that may fail too
            if isinstance(problem, WorkerDied):  # after other failures the engine can continue
                self.engine.renew()
        else:
            self.done.append((case, run))
            yield self.engine.settings, run

    def _is_out_of_time(self) -> bool:
        """Whether `--max-minutes` forbids a new round."""
        minutes = self.plan.until.max_minutes if self.plan.until else None
        return minutes is not None and time.monotonic() - self.started >= 60 * minutes

    def _extend(self) -> bool:
        """Add the rounds after the planned ones to the list, once; whether there are any."""
        runs = self._runs_that_count()
        if self.is_extended or not runs or self._is_out_of_time():
            return False
        self.is_extended = True
        n_repeats: dict[Case, int] = {}
        if self.plan.until:
            n_repeats = repeats_until(runs, self.plan.until)
        elif self.plan.is_more_if_cheap:
            spent_s = time.monotonic() - self.started
            n_repeats = cheap_repeats(runs, self.plan.n_repeat, EXTRA_SHARE * spent_s)
        last_repeat = max(run.repeat for _, run in self.done)
        for repeat in range(last_repeat + 1, max(n_repeats.values(), default=0)):
            cases = [case for case, n_repeat in n_repeats.items() if repeat < n_repeat]
            self.todo += self.plan.round(repeat, cases)
        self.engine.reporter.n_runs += len(self.todo)
        return bool(self.todo)

    def _runs_that_count(self) -> dict[Case, list[Run]]:
        """The runs of each case that was not abandoned."""
        runs: dict[Case, list[Run]] = {}
        for case, run in self.done:
            if case not in self.abandoned:
                runs.setdefault(case, []).append(run)
        return runs

    def _warm_up(self) -> Iterator[tuple[Settings, Run]]:
        """Load, make a context and warm up. A failure is the largest case's, which sets the
        context's size."""
        engine = self.engine
        excluded = {*self.plan.refused, *self.abandoned}
        possible = [case for case in self.plan.cases if case not in excluded]
        is_loaded = False
        is_open = False
        try:
            engine.load()
            is_loaded = True
            engine.round = self.todo[0][0]
            engine.open(possible)
            is_open = True
            for run in engine.warm_up({case for _, case in self.todo}):
                yield engine.settings, run
        except LabError as problem:
            can_change = isinstance(problem, Diagnosed) and problem.change is not None
            if not is_loaded and not can_change:
                raise
            largest = max(possible, key=self._size)
            most_crashes = engine.most_crashes if is_open else 1  # a context fails every time
            yield self._failed(largest, 0, problem, most_crashes, is_warmup=is_open)
            if isinstance(problem, WorkerDied):
                engine.renew()

    def _size(self, case: Case) -> tuple[float, int]:
        return self.engine.plan.memory(case).total_bytes, case.n_prompt

    def _failed(
        self,
        case: Case,
        repeat: int,
        problem: LabError,
        most_crashes: int,
        is_warmup: bool = False,
    ) -> tuple[Settings, Run]:
        """The run that records a failure; it counts as a warm-up if a changed setting helps.

        Otherwise abandons the case after the most crashes, or at once after any other failure.
        """
        self.n_crashes[case] += 1
        settings = self.engine.settings
        change = self.engine.adopt_change(problem)
        if change is not None:
            run = failed_run(case, repeat, problem, warmup=True)
            return settings, dataclasses.replace(run, error=change)
        may_be_chance = isinstance(problem, WorkerDied) and self.n_crashes[case] < most_crashes
        if not may_be_chance:
            self.abandoned.add(case)
            self.todo[:] = [(n, planned) for n, planned in self.todo if planned != case]
        return settings, failed_run(case, repeat, problem, warmup=is_warmup and may_be_chance)


def repeats_until(runs: Mapping[Case, Sequence[Run]], until: Until) -> dict[Case, int]:
    """The repeats that each case needs for intervals within the share; its worst figure counts."""
    n_repeats: dict[Case, int] = {}
    for case, runs_of_case in runs.items():
        figures = _figures(runs_of_case).values()
        needed = [stats.repeats_needed(values, until.share) for values in figures]
        n_repeats[case] = min(until.max_repeats, max(needed, default=0))
    return n_repeats


def cheap_repeats(
    runs: Mapping[Case, Sequence[Run]], n_repeat: int, spare_s: float
) -> dict[Case, int]:
    """The repeats that an interval needs: of the quickest cases, as far as the spare time lasts."""
    run_s: dict[Case, float] = {}
    for case, runs_of_case in runs.items():
        times_ns = [ns for ns in map(phases.e2e_ns, runs_of_case) if ns is not None]
        if times_ns:
            run_s[case] = statistics.median(times_ns) / 1e9
    n_for_interval = stats.fewest_for_interval()
    n_more = n_for_interval - n_repeat
    n_repeats: dict[Case, int] = {}
    for case in sorted(run_s, key=lambda case: run_s[case]):
        spare_s -= n_more * run_s[case]
        if spare_s >= 0:
            n_repeats[case] = n_for_interval
    return n_repeats


def wide_figures(runs: Sequence[Run], share: float) -> list[tuple[int, str, float | None]]:
    """The figures whose interval exceeds +- `share` of the median: prompt length, name, width.

    The width is the larger distance of an end from the median, as a share of it; None without an
    interval.
    """
    wide: list[tuple[int, str, float | None]] = []
    for (n_prompt, name), values in sorted(_figures(runs).items()):
        interval = stats.median_interval(values)
        median = statistics.median(values)
        width = None
        if interval is not None:
            width = max(interval.high - median, median - interval.low) / median
        if width is None or width > share:
            wide.append((n_prompt, name, width))
    return wide


def _figures(runs: Sequence[Run]) -> dict[tuple[int, str], list[float]]:
    """Prefill times and TPOTs in ns of the successful timed runs, by prompt length and name."""
    figures: dict[tuple[int, str], list[float]] = {}
    for run in runs:
        if not run.is_timed:
            continue
        for part in phases.by_length(run):
            values = {"prefill": phases.prefill_ns(part), "TPOT": phases.tpot_ns(part)}
            for name, value in values.items():
                if value:
                    figures.setdefault((part.n_prompt, name), []).append(value)
    return figures
