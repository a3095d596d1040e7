"""The whole checkup: build, engine, threads and machine. An engine that fails is one of the checks.

runner/warm_engine.py diagnoses crashes.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lab.core import phases
from lab.core.record import Machine, Model, Record, Settings
from lab.errors import LabError
from lab.features.doctor import attention, beside, checks, system, threads
from lab.features.doctor.checks import BROKEN, FINE, LOOK, UNKNOWN, Check
from lab.process.setup import ProcessSetup
from lab.process.wire import Build
from lab.process.worker import Worker, WorkerDied
from lab.runner import builds, machine, noise_watch, prompts
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from lab.runner.progress import ShowStatus, Status
from lab.runner.system_files import ROOT
from lab.show.wording import digits

WORK_S = 0.2  # one core is timed for so long, three times


@dataclass(frozen=True)
class Checkup:
    """The machine and all checks. Model and settings are None if the engine could not plan a
    run."""

    machine: Machine
    energy: str  # what its energy counters cover
    model: Model | None
    settings: Settings | None
    checks: tuple[Check, ...]
    seconds: float


@dataclass
class EngineExam:
    """What was found out about the engine, as far as it came."""

    build: Build | None = None
    plan: Plan | None = None
    runs: list[Record] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)


def examine(
    options: Mapping[str, Any],
    watch: ShowStatus,
    root: Path = ROOT,
    plants_neighbour: bool = False,
) -> Checkup:
    """Check build, engine, threads and machine, in half a minute; and what a busy program does."""
    start_s = time.monotonic()
    best = machine.default_threads(root)
    settings: dict[str, Any] = {"threads": best, "prompt": prompts.RANDOM}
    for name, value in options.items():
        if value is not None:
            settings[name] = value
    named(watch, "one core")(Status("working"))
    work_s = least_work_s()
    exam = examine_engine(settings, best, watch)
    slowdown = least_work_s() / work_s if exam.runs else None
    plan = exam.plan
    if plan:
        here = plan.machine
    else:
        here = machine.describe(exam.build, builds.name_of(settings.get("lib")))
    readings = checks.read(here, plan, exam.runs, slowdown, root)
    beside_others = list[Check]()
    if plants_neighbour and plan and exam.runs and not plan.refused:
        try:
            beside_others = beside.examine(plan, watch)
        except LabError as problem:
            beside_others = [Check(beside.NAME, None, UNKNOWN, problem.what)]
    counters = noise_watch.energy_counters(noise_watch.GpuWatch([]))
    return Checkup(
        machine=here,
        energy=noise_watch.describe_energy(counters),
        model=plan.model if plan else None,
        settings=plan.settings if plan else None,
        checks=(*exam.checks, *checks.checks_of(readings), *beside_others),
        seconds=time.monotonic() - start_s,
    )


def named(watch: ShowStatus, subject: str) -> ShowStatus:
    """Tells of all statuses only the check that they belong to, and once known how long it takes.

    A check loads a model many times, which says nothing.
    """
    doing = f"checking {subject}"

    def show(status: Status) -> None:
        nonlocal doing
        if status.announcement:
            doing = f"checking {subject}: {status.announcement}"
        watch(dataclasses.replace(status, doing=doing, announcement=""))

    return show


def least_work_s() -> float:
    """Seconds of a unit of work on one core, the least of three."""
    return min(system.work_s(WORK_S) for _ in range(3))


def examine_engine(settings: Mapping[str, Any], best: int, watch: ShowStatus) -> EngineExam:
    """Load the build, plan and run. LabError for settings that cannot be."""
    exam = EngineExam()
    lib = builds.folder_of(settings.get("lib"))
    with Worker() as worker:
        worker.use(ProcessSetup(lib=lib))
        try:
            named(watch, "the build")(Status("starting"))
            exam.build = builds.of_worker(worker)
            exam.checks.append(checks.build(exam.build.system_info))
            exam.plan = make_plan(worker, [threads.LENGTHS[0]], threads.N_GEN, 1, **settings)
            worker.use(exam.plan.setup)
            exam.runs, of_threads = threads.examine(
                worker, exam.plan, settings, best, partial(named, watch), Worker
            )
            exam.checks = [engine_check(exam.runs), *exam.checks, of_threads]
            named(watch, attention.NAME)(Status("timing kernels"))
            exam.checks.append(attention_check(worker, exam))
        except LabError as problem:
            is_planned = exam.plan is not None
            if exam.build and not is_planned and not isinstance(problem, WorkerDied):
                raise
            hint = problem.hint or None
            exam.checks.insert(0, Check("engine", "does not run", BROKEN, problem.what, hint))
    return exam


def attention_check(worker: Worker, exam: EngineExam) -> Check:
    """The check of attention; that of a kernel that this build lacks cannot be told."""
    assert exam.plan is not None
    try:
        return attention.examine(worker, exam.plan, exam.runs)
    except WorkerDied:
        raise
    except LabError as problem:
        return Check(attention.NAME, None, UNKNOWN, problem.what)


def engine_check(records: Sequence[Record]) -> Check:
    """The rates of the median run that has them; worth a look if other programs took CPU time."""
    prefill_tps: list[float] = []
    decode_tps: list[float] = []
    for record in records:
        run = record.run
        prefill_ns = phases.prefill_ns(run)
        tpot_ns = phases.tpot_ns(run)
        if prefill_ns and tpot_ns:
            prefill_tps.append(1e9 * run.n_prompt / prefill_ns)
            decode_tps.append(1e9 / tpot_ns)
    if not decode_tps:
        return Check("engine", None, UNKNOWN, checks.NO_TPOT)
    prefill = statistics.median(prefill_tps)
    decode = statistics.median(decode_tps)
    figure = f"prefill {digits(prefill)}, decode {digits(decode)} tokens/s"
    taken_cpu = checks.taken_cpu(records)
    if not taken_cpu:
        return Check("engine", figure, FINE)
    sentence = f"These are not this machine's rates: during the runs {'; '.join(taken_cpu)}."
    return Check("engine", figure, LOOK, sentence, checks.STOP_PROGRAMS)
