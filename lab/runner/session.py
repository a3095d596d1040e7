"""The main loop: make all runs of a plan, and write each to disk as soon as it ends.

Runs of different prompt lengths are interleaved in rounds, because machines drift: the first round
goes from the shortest prompt to the longest, later rounds are shuffled. Every round starts a new
engine: where a process's memory was allocated makes it some percent faster or slower until it ends,
so only runs of different processes are independent. Each engine first makes warm-up runs, which do
not count, because llama.cpp repacks weights and touches memory on first use.

With `--until` a fixed number of pilot rounds gives the spread, from which the lab computes once how
many rounds each length needs (Stein, "A two-sample test for a linear hypothesis", 1945): to stop as
soon as an interval is narrow would prefer intervals that are narrow by chance, which contain the
true value too rarely.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lab.core import phases, results, stats
from lab.core.arguments import StrPath
from lab.core.lists import plural
from lab.core.record import Record, Run, Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError, warn
from lab.models import catalog
from lab.process.worker import Worker, WorkerDied
from lab.runner import attention_probe, machine, progress
from lab.runner.cases import Case, Plan, Until, failed_run, is_given_up, status_of
from lab.runner.diagnosis import Diagnosed
from lab.runner.forecast import work_of_plan
from lab.runner.progress import Reporter, ShowStatus, Watch
from lab.runner.run_list import PlannedRun, RunList
from lab.runner.warm_engine import WarmEngine

EXTRA_SHARE = 0.25
"""Maximum time of the extra rounds of quick lengths, as a share of the planned rounds' time."""

DEAR_SHARE = 0.5
"""A length whose run takes more than this share of a round's runs is dear: it gets fewer runs."""

DEAR_S = 10.0  # runs that take less are not dear
DEAR_REPEATS = 2  # runs of a dear length that are as sure as those of the others


def carry_out(
    make: Callable[[Worker], Plan],
    out: StrPath,
    watch: Watch = None,
    stream: bool = False,
) -> list[Record]:
    """Make a plan and all its runs, with warnings of the plan and for failed runs."""
    with Worker() as worker, progress.shown_to(watch) as show:
        plan = make(worker)
        path = new_results_file(plan, Path(out))
        records = list(execute(plan, worker, path, show, stream))
    messages = list(plan.warnings)
    failures = [record.run for record in records if record.run.error]
    messages += dict.fromkeys(str(run.error) for run in failures if run.warmup)
    errors = [run.error for run in failures if not run.warmup]
    if errors:
        messages.append(f"{plural(len(errors), 'run')} failed: {errors[0]}")
    for message in messages:
        warn(message)
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
        runs = RunList(plan.order)
        reporter = Reporter(watch, runs, plan.n_tokens, work_of_plan(plan))
        engine = WarmEngine(plan, worker, reporter, stream, n_starts)
        for settings, run in _Loop(engine, runs).made():
            record = engine.record(path.stem, run, settings)
            save(path, record)
            yield record


class _Loop:
    """A running plan. Its methods yield each run with the settings that it was made with."""

    def __init__(self, engine: WarmEngine, runs: RunList) -> None:
        self.engine = engine
        self.plan = engine.plan
        self.started = time.monotonic()
        self.runs = runs
        self.is_begun = False  # attention was timed for the forecast
        self.is_extended = False  # the runs after the planned ones are in the list
        self.done: list[tuple[Case, Run]] = []
        self.n_crashes = collections.Counter[Case]()
        self.abandoned: set[Case] = set()
        engine.reporter.expected_runs = self._expected_runs

    def made(self) -> Iterator[tuple[Settings, Run]]:
        """All runs, warm-ups and failures of the plan, each round with a fresh engine."""
        for case, reason in self.plan.refused.items():
            yield self.plan.settings, failed_run(case, 0, LabError(reason))
        while self.runs or self._extend():
            next_round, next_case = self.runs.next
            if self.engine.warm and self.engine.round != next_round:
                if self._is_out_of_time():
                    return
                if self._drop_sure():
                    continue
                self.engine.renew()
            elif self.engine.warm and not self.engine.can_run(next_case):
                self.engine.renew()
            if self.engine.warm:
                yield from self._next_run()
            else:
                yield from self._warm_up()

    def _next_run(self) -> Iterator[tuple[Settings, Run]]:
        """The next run of the list, or the record of its failure."""
        repeat, case = self.runs.take()
        try:
            run = self.engine.run(case, repeat)
        except LabError as problem:
            settings, run = self._failed(case, repeat, problem, self.engine.most_crashes)
            if run.warmup:  # does not count, because another setting works: try again
                self.runs.put_back((repeat, case))
            yield settings, run  # is saved before the engine starts again: that may fail too
            if isinstance(problem, WorkerDied):  # after other failures the engine can continue
                self.engine.renew()
        else:
            self.done.append((case, run))
            yield self.engine.settings, run

    def _is_out_of_time(self) -> bool:
        """Whether `--budget` forbids a new round."""
        budget_s = self.plan.until.budget_s if self.plan.until else None
        return budget_s is not None and time.monotonic() - self.started >= budget_s

    def _extend(self) -> bool:
        """Add the rounds after the planned ones to the list, once; whether there are any."""
        if self.is_extended or not self._runs_that_count() or self._is_out_of_time():
            return False
        self.runs.add(self._extension(time.monotonic() - self.started))
        self.is_extended = True
        return len(self.runs) > 0

    def _extension(self, planned_s: float) -> list[PlannedRun]:
        """The rounds after the planned ones, which take `planned_s`, by what is known now."""
        runs = self._runs_that_count()
        n_repeats: dict[Case, int] = {}
        if self.plan.until:
            if min(map(len, runs.values()), default=0) < 2:
                return []
            n_repeats = repeats_until(runs, self.plan.until)
        elif self.plan.may_change_repeats:
            spare_s = EXTRA_SHARE * planned_s
            n_repeats = cheap_repeats(self._forecast_s(), self.plan.n_repeat, spare_s)
        extension: list[PlannedRun] = []
        for repeat in range(self.plan.n_repeat, max(n_repeats.values(), default=0)):
            cases = [case for case, n_repeat in n_repeats.items() if repeat < n_repeat]
            extension += self.plan.round(repeat, cases)
        return extension

    def _forecast_s(self) -> dict[Case, float]:
        """The forecast seconds of a run of each case."""
        run_s: dict[Case, float] = {}
        for case in self.plan.cases:
            seconds = self.engine.reporter.forecast.seconds(case)
            if seconds and case not in self.abandoned and case not in self.plan.refused:
                run_s[case] = sum(seconds)
        return run_s

    def _expected_runs(self) -> list[PlannedRun]:
        """The list with the rounds that will probably follow, without those that will not."""
        expected = list(self.runs)
        if self.is_extended:
            return expected
        run_s = self._forecast_s()
        if (
            self.plan.may_change_repeats
            and len(run_s) > 1
            and self.engine.round < DEAR_REPEATS
        ):
            expected = without(expected, dear_case(run_s), DEAR_REPEATS)
        planned_s = sum(run_s[case] for _, case in expected if case in run_s)
        planned_s += time.monotonic() - self.started
        return [*expected, *self._extension(planned_s)]

    def _drop_sure(self) -> bool:
        """Drop the runs of a dear length from the list if its figures are as sure as the others'.

        Whether any was dropped.
        """
        if not self.plan.may_change_repeats or self.runs.next[0] < DEAR_REPEATS:
            return False
        case = dear_case(self._forecast_s())
        if case is None or not is_as_sure(case, self._runs_that_count()):
            return False
        n_before = len(self.runs)
        self.runs.keep(without(self.runs, case, DEAR_REPEATS))
        return len(self.runs) < n_before

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
        if not self.is_begun:
            self.is_begun = True
            engine.reporter.report_status("timing attention at the longest length")
            rates = attention_probe.time_attention(engine.worker, self.plan)
            engine.reporter.forecast.attention = rates
        try:
            engine.load()
        except LabError as problem:
            if not isinstance(problem, Diagnosed) or problem.change is None:
                raise
            yield from self._failed_start(possible, problem, is_warmup=False)
            return
        try:
            engine.round, _ = self.runs.next
            engine.open(possible)
        except LabError as problem:
            yield from self._failed_start(possible, problem, is_warmup=False)
            return
        try:
            engine.reporter.begin_round(engine.round)
            for run in engine.warm_up(self._next_in_one_engine()):
                yield engine.settings, run
            engine.reporter.announce()
        except LabError as problem:
            yield from self._failed_start(possible, problem, is_warmup=True)

    def _failed_start(
        self, possible: Sequence[Case], problem: LabError, is_warmup: bool
    ) -> Iterator[tuple[Settings, Run]]:
        """The failed run of the largest case; an engine that died is made again after it."""
        largest = max(possible, key=self._size)
        most_crashes = (
            self.engine.most_crashes if is_warmup else 1
        )  # a context fails every time
        yield self._failed(largest, 0, problem, most_crashes, is_warmup=is_warmup)
        if isinstance(problem, WorkerDied):
            self.engine.renew()

    def _next_in_one_engine(self) -> set[Case]:
        """The cases for which the engine is warmed up: all, or the next one if it is a cold
        case."""
        _, next_case = self.runs.next
        return {next_case} if next_case.is_cold else {case for _, case in self.runs}

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
        is_last = is_given_up(status_of(problem), self.n_crashes[case], most_crashes)
        if is_last:
            self.abandoned.add(case)
            self.runs.keep(without(self.runs, case, 0))
        return settings, failed_run(case, repeat, problem, warmup=is_warmup and not is_last)


def repeats_until(runs: Mapping[Case, Sequence[Run]], until: Until) -> dict[Case, int]:
    """The repeats that each case needs for intervals within the share; its worst figure counts."""
    n_repeats: dict[Case, int] = {}
    for case, runs_of_case in runs.items():
        figures = _figures(runs_of_case).values()
        needed = [stats.repeats_needed(values, until.share) for values in figures]
        n_repeats[case] = min(until.max_repeats, max(needed, default=0))
    return n_repeats


def cheap_repeats(
    run_s: Mapping[Case, float], n_repeat: int, spare_s: float
) -> dict[Case, int]:
    """The repeats of the quickest cases that an interval needs, as far as the spare time lasts."""
    n_for_interval = stats.fewest_for_interval()
    n_more = n_for_interval - n_repeat
    n_repeats: dict[Case, int] = {}
    for case in sorted(run_s, key=lambda case: run_s[case]):
        spare_s -= n_more * run_s[case]
        if spare_s >= 0:
            n_repeats[case] = n_for_interval
    return n_repeats


def without(runs: Iterable[PlannedRun], case: Case | None, first: int) -> list[PlannedRun]:
    """A list of runs without those of a case from the round `first` on."""
    return [run for run in runs if run[1] != case or run[0] < first]


def dear_case(run_s: Mapping[Case, float]) -> Case | None:
    """The case whose run takes more than DEAR_SHARE of a round and more than DEAR_S, if any."""
    if not run_s:
        return None
    dearest = max(run_s, key=lambda case: run_s[case])
    limit_s = max(DEAR_S, DEAR_SHARE * sum(run_s.values()))
    return dearest if run_s[dearest] > limit_s else None


def is_as_sure(case: Case, runs: Mapping[Case, Sequence[Run]]) -> bool:
    """Whether no figure of a case varied more than the most variable figure of the other cases.

    All are compared over the first DEAR_REPEATS runs: over more, a range is wider.
    """
    ranges_of_case: list[float] = []
    ranges_of_others: list[float] = []
    for measured, runs_of_case in runs.items():
        first = [run for run in runs_of_case if run.is_timed][:DEAR_REPEATS]
        if len(first) < DEAR_REPEATS:
            return False
        ranges = [max(values) / min(values) for values in _figures(first).values()]
        if measured == case:
            ranges_of_case += ranges
        else:
            ranges_of_others += ranges
    return max(ranges_of_case, default=math.inf) <= max(ranges_of_others, default=1.0)


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
