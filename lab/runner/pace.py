"""How long plans will take on this machine, from a short warm-up of its engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from lab.process.worker import Worker
from lab.runner.cases import Case, Plan
from lab.runner.forecast import Forecast, Phases, work_of_plan
from lab.runner.progress import Reporter, ShowStatus
from lab.runner.run_list import RunList
from lab.runner.warm_engine import N_SENTINEL, N_SENTINEL_SKIPPED, WarmEngine

WARMED_UP = Case(512, 4)
"""What the engine is warmed up for: a whole step, and some tokens."""


class Pace(NamedTuple):
    """How fast this machine is with the model of `plan`."""

    plan: Plan
    forecast: Forecast
    engine_s: float  # to start an engine, to load the model and to warm up

    def seconds(self, plans: Sequence[Plan], n_rounds: int) -> float:
        """The seconds of rounds in which each plan has a new engine and runs each case once.

        Half the threads take twice as long.
        """
        total_s = 0.0
        for plan in plans:
            work_of = work_of_plan(plan)
            slowness = self.plan.settings.n_threads / plan.settings.n_threads
            round_s = self.engine_s
            for case in plan.cases:
                run_s = sum(self.forecast.computed(work_of(case))) + self.sentinel_s
                round_s += slowness * run_s
            total_s += n_rounds * round_s
        return total_s

    @property
    def sentinel_s(self) -> float:
        """The seconds of the short decode after each run."""
        n_tokens = N_SENTINEL + N_SENTINEL_SKIPPED
        work: Phases = work_of_plan(self.plan)(Case(1, n_tokens))
        return sum(self.forecast.computed(work))


def measured(worker: Worker, plan: Plan, watch: ShowStatus) -> Pace:
    """Start an engine with the model of a plan, and warm it up: some seconds for a small model."""
    began = time.monotonic()
    reporter = Reporter(watch, RunList(), plan.n_tokens, work_of_plan(plan))
    engine = WarmEngine(plan, worker, reporter)
    worker.restart()
    engine.load()
    engine.open([WARMED_UP])
    for _ in engine.warm_up([WARMED_UP]):
        pass
    return Pace(plan, reporter.forecast, time.monotonic() - began)
