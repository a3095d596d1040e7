"""The main loop: make all runs of a plan, and write each to disk as soon as it ends.

Runs of different prompt lengths are interleaved in rounds and shuffled within each round, because machines drift.
Every round starts a new engine: where a process's memory was allocated makes it some percent faster or slower until it
ends, so only runs of different processes are independent. Each engine first makes warm-up runs, which do not count,
because llama.cpp repacks weights and touches memory on first use.

With `--until` a fixed number of pilot rounds gives the spread, from which the lab computes once how many rounds each
length needs (Stein, "A two-sample test for a linear hypothesis", 1945): to stop as soon as an interval is narrow would
prefer intervals that are narrow by chance, which contain the true value too rarely.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lab.core import phases, results, stats
from lab.core.record import Record, Run, Settings
from lab.core.results import save, unless_empty
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Worker, WorkerDied
from lab.runner import machine, progress
from lab.runner.cases import Case, Plan, failed_run
from lab.runner.progress import Reporter, ShowStatus
from lab.runner.warm_engine import Diagnosed, WarmEngine

EXTRA_SHARE = 0.25  # maximum time of the extra rounds of quick lengths, as a share of the planned rounds' time


def carry_out(
    make: Callable[[Worker], Plan],
    out: str | Path,
    watch: ShowStatus | None = None,
    stream: bool = False,
) -> list[Record]:
    """Make a plan and all its runs, with warnings of the plan and for failed runs."""
    with Worker() as worker, progress.in_notebook() as watching:
        plan = make(worker)
        path = new_results_file(plan, Path(out))
        records = list(execute(plan, worker, path, watch or watching, stream))
    errors = [record.run.error for record in records if record.run.error]
    for warning in (
        *plan.warnings,
        *([f"{len(errors)} runs failed: {errors[0]}"] if errors else []),
    ):
        warnings.warn(warning, stacklevel=3)
    return records


def new_results_file(plan: Plan, folder: Path) -> Path:
    where = machine.label(plan.machine, plan.settings).partition(",")[0]
    return results.new_file(folder, f"{machine.slug(plan.model.name)}-{machine.slug(where)}")


def execute(
    plan: Plan,
    worker: Worker,
    path: Path,
    watch: ShowStatus,
    stream: bool = False,
    n_starts: int = 1,
) -> Iterator[Record]:
    """Make the plan's runs, append each to `path` when it ends, and yield its record. A failure becomes a record."""
    if stream and plan.file.source == catalog.SYNTHETIC:
        raise LabError("A model with random weights generates no text to stream.", "Omit --stream.")
    with unless_empty(path):
        todo = plan.order
        engine = WarmEngine(plan, worker, Reporter(watch, todo, plan.n_tokens), stream, n_starts)
        for settings, run in _Loop(engine, todo).runs():
            line = engine.record(path.stem, run, settings)
            save(path, line)
            yield line


class _Loop:
    """The state of a running plan: the runs done and still to do, the crashes of each case, the abandoned cases."""

    def __init__(self, engine: WarmEngine, todo: list[tuple[int, Case]]) -> None:
        self.engine = engine
        self.plan = engine.plan
        self.todo = todo
        self.started = time.monotonic()
        self.is_decided = False  # whether the runs after the planned ones are known
        self.done: list[tuple[Case, Run]] = []
        self.given_up: set[Case] = set()
        self.crashes = collections.Counter[Case]()

    def runs(self) -> Iterator[tuple[Settings, Run]]:
        for case, reason in self.plan.refused.items():
            yield self.plan.settings, failed_run(case, 0, LabError(reason))
        while self.todo or self._extend():
            if not self.engine.warm:
                yield from self._warm_up()
                continue
            if self.engine.round != self.todo[0][0]:
                if self._is_out_of_time():
                    break
                self.engine.renew()
                continue
            repeat, case = self.todo.pop(0)
            try:
                run = self.engine.run(case, repeat)
            except LabError as problem:
                settings, run = self._failed(case, repeat, problem, self.engine.most_crashes)
                if run.warmup:  # the engine found a setting that works: try again
                    self.todo.insert(0, (repeat, case))
                yield settings, run
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
        """Add the rounds after the planned ones to the list, once, if any are needed and there is time."""
        plan = self.plan
        done = [(case, run) for case, run in self.done if case not in self.given_up]
        if self.is_decided or not done or self._is_out_of_time():
            return False
        self.is_decided = True
        runs = {case: [run for its_case, run in done if its_case == case] for case, _ in done}
        targets = dict[Case, int]()
        if (
            until := plan.until
        ):  # for intervals within the share; in a sweep the worst length counts
            for case, own in runs.items():
                needed = [
                    stats.repeats_needed(values, until.share) for values in _figures(own).values()
                ]
                targets[case] = min(until.max_repeats, max(needed, default=0))
        else:
            times = {
                case: [ns for run in own if (ns := phases.e2e_ns(run)) is not None]
                for case, own in runs.items()
            }
            cost_s = {
                case: statistics.median(own) / 1e9 if own else math.inf
                for case, own in times.items()
            }
            left_s = EXTRA_SHARE * (time.monotonic() - self.started)
            n_all = stats.fewest_for_interval()
            for case in (
                sorted(cost_s, key=lambda case: cost_s[case]) if plan.is_more_if_cheap else ()
            ):
                left_s -= cost_s[case] * (n_all - plan.n_repeat)
                if left_s >= 0:
                    targets[case] = n_all
        for n in range(1 + max(run.repeat for _, run in done), max(targets.values(), default=0)):
            self.todo += plan.round(n, [case for case in targets if n < targets[case]])
        self.engine.reporter.n_runs += len(self.todo)
        return bool(self.todo)

    def _warm_up(self) -> Iterator[tuple[Settings, Run]]:
        """Load, make a context and warm up. A failure is the largest case's, which sets the context's size."""
        engine = self.engine
        possible = [
            case for case in self.plan.cases if case not in {*self.plan.refused, *self.given_up}
        ]
        is_loaded = is_open = False
        try:
            engine.load()
            is_loaded = True
            engine.round = self.todo[0][0]
            engine.open(possible)
            is_open = True
            for run in engine.warm_up({case for _, case in self.todo}):
                yield engine.settings, run
        except LabError as problem:
            if not is_loaded and (not isinstance(problem, Diagnosed) or problem.change is None):
                raise
            largest = max(
                possible, key=lambda case: (engine.plan.memory(case).total_bytes, case.n_prompt)
            )
            yield self._failed(
                largest, 0, problem, engine.most_crashes if is_open else 1, is_warmup=is_open
            )
            if isinstance(problem, WorkerDied):
                engine.renew()

    def _failed(
        self, case: Case, repeat: int, problem: LabError, most: int, is_warmup: bool = False
    ) -> tuple[Settings, Run]:
        """The run that records a failure. Abandons the case after `most` crashes, unless a changed setting helps."""
        self.crashes[case] += 1
        settings = self.engine.settings
        words = self.engine.mend(problem)
        if is_over := not words and (
            not isinstance(problem, WorkerDied) or self.crashes[case] >= most
        ):
            self.given_up.add(case)
            self.todo[:] = [
                (repeat, its_case) for repeat, its_case in self.todo if its_case != case
            ]
        run = failed_run(case, repeat, problem, warmup=bool(words) or (is_warmup and not is_over))
        return settings, dataclasses.replace(run, error=words or run.error)


def wide_figures(runs: Sequence[Run], share: float) -> list[tuple[int, str, float | None]]:
    """The figures (prompt length, name) whose interval exceeds +- `share` of the median, and its farther end."""
    wide = []
    for (n_prompt, name), values in sorted(_figures(runs).items()):
        interval = stats.median_interval(values)
        middle = statistics.median(values)
        width = (
            None
            if interval is None
            else max(interval.high - middle, middle - interval.low) / middle
        )
        if width is None or width > share:
            wide.append((n_prompt, name, width))
    return wide


def _figures(runs: Sequence[Run]) -> dict[tuple[int, str], list[float]]:
    """Prefill times and TPOTs in ns of the successful timed runs, by prompt length and name."""
    figures: dict[tuple[int, str], list[float]] = {}
    timed = (run for run in runs if run.is_timed)
    for leg in (leg for run in timed for leg in phases.by_length(run)):
        for name, value in (("prefill", phases.prefill_ns(leg)), ("TPOT", phases.tpot_ns(leg))):
            if value:
                figures.setdefault((leg.n_prompt, name), []).append(value)
    return figures
