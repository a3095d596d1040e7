"""`lab doctor`: reads and measures this machine, build and settings in about a minute.

Each changed setting is measured both ways in turns, in fresh engines if it concerns the engine. checks.py has the
verdicts.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.analysis import disturbances
from lab.core import phases
from lab.core.asked_settings import AskedSettings
from lab.core.record import Machine, Model, Record, Settings
from lab.core.shape import ATTENTION, BLOCKS, FEED_FORWARD, matrices
from lab.errors import LabError
from lab.models import catalog
from lab.process.wire import MUL_MAT, Probe
from lab.process.worker import Worker, WorkerDied
from lab.runner import builds, limits, machine, placing, prompts, side_by_side
from lab.runner.cases import Case, Plan
from lab.runner.plan import make_plan
from lab.runner.progress import Reporter, ShowStatus, Status
from lab.runner.warm_engine import WarmEngine
from lab.why import checks, plain_read, probe_plan
from lab.why.checks import BROKEN, FINE, LOOK, UNKNOWN, Change, Check, Effect
from lab.why.probing import gbps

N_BLOCKS, N_TURNS = 3, 2
"""Six pairs, the fewest for a 95 % interval."""

LENGTHS, N_GEN, RUN_S, MOST_RUN_S = (512, 256, 128, 64, 32), 16, 0.8, 10.0
"""A trial uses the longest of these prompts that takes up to RUN_S; there is none if 32 tokens take MOST_RUN_S."""

AS_IT_IS = "as it is"


@dataclass(frozen=True)
class Checkup:
    """All checks. Model and settings are None if the engine could not plan a run."""

    machine: Machine
    model: Model | None
    settings: Settings | None
    checks: tuple[Check, ...]
    seconds: float

    @property
    def causes(self) -> list[Check]:
        """The broken checks, then those worth a look; the largest measured effect first."""

        def rank(check: Check) -> tuple[bool, float]:
            return check.verdict != BROKEN, -max((one.ratio.estimate for one in check.effects.values()), default=0.0)

        return sorted((check for check in self.checks if check.verdict in (BROKEN, LOOK)), key=rank)


def in_turns(as_it_is: Callable[[], float], changed: Callable[[], float]) -> Effect | None:
    """The effect of a change, from two functions that measure in the order A B B A, block by block."""
    sides: tuple[list[list[float]], list[list[float]]] = [], []
    for _ in range(N_BLOCKS):
        first, *middle, last = as_it_is(), changed(), changed(), as_it_is()
        sides[0].append([first, last])
        sides[1].append(middle)
    return checks.effect(*sides)


def changes(plan: Plan, best: int) -> list[Change]:
    """The settings to try with another value. `best`: the default number of threads."""
    settings, n_all = plan.settings, (plan.model.n_layer or 10_000) + 1
    n, on_gpu = _n_threads(settings), settings.n_gpu_layers
    tried = []
    other = best if n != best else max(1, best // 2)
    if 0 <= on_gpu < n_all and other != n:
        threads = {"threads": other, "threads_batch": other}
        words, command = f"With {other} instead of {n}", f"lab measure --threads {other}"
        tried.append(Change("threads", f"{n}; {best} by default", words, command, threads))
    flip = "on" if settings.flash_attn == "off" else "off"
    if flip == "on" or settings.type_v in ("f16", "f32", "bf16"):
        figure, command = settings.flash_attn, f"lab measure --flash-attn {flip}"
        tried.append(Change("flash attention", figure, f"Switched {flip}", command, {"flash_attn": flip}))
    if settings.repack is False:
        tried.append(Change("repacking", "off", "Switched on", "lab measure --repack", {"repack": True}))
    if 0 <= on_gpu < n_all and machine.accelerators(plan.machine.devices):
        figure, command = f"{on_gpu} of {n_all} on devices", "lab measure --n-gpu-layers auto"
        most = {"n_gpu_layers": "auto", "device": None}
        tried.append(Change("layers", figure, "With all layers that fit", command, most))
    return tried


def examine(asked: Mapping[str, Any], watch: ShowStatus, root: Path = limits.ROOT) -> Checkup:
    """Check machine, build and settings, in about a minute. An engine that fails is one of the checks.

    LabError for settings that `make_plan` rejects.
    """
    began, swapped, best = time.monotonic(), limits.swap(), limits.default_threads(root)
    chosen = {name: value for name, value in asked.items() if value is not None}
    given: dict[str, Any] = {"threads": best, "prompt": prompts.RANDOM} | chosen
    with Worker() as worker:
        planned = _planned(worker, given)
    watch(Status("working on one core"))
    steady = in_turns(lambda: plain_read.work_s(0.3)[0], plain_read.burst_s)
    before, clock = min(plain_read.work_s(0.2)[1] for _ in range(3)), limits.clock_ghz(root)
    watch(Status("reading memory"))
    free = limits.memory_available(root)
    size = None if free > 4 * 2**30 else free // 4
    rates = {n: gbps(plain_read.read_rate(n, size)) for n in sorted({1, best})}
    plan, found, base = planned if isinstance(planned, Plan) else None, list[Check](), list[Record]()
    with Worker() as worker:
        try:
            if not isinstance(planned, Plan):
                raise planned
            plan = planned
            worker.use(plan.backend)
            watch(Status("trying kernels and the disk"))
            found += [
                checks.of_build(worker.build.system_info, _product(worker)),
                _disk(plan),
                *_quantization(worker, plan),
            ]
            base += _settings(worker, plan, given, best, found, watch)
            found.insert(0, _engine(base))
        except LabError as problem:
            found.insert(0, Check("engine", "does not run", BROKEN, problem.what, problem.hint or None))
    slower = min(plain_read.work_s(0.2)[1] for _ in range(3)) / before if base else None
    here = plan.machine if plan else machine.describe()
    need = plan.memory(plan.cases[0]).total_bytes if plan else None
    own = [disturbances.disturbances(record) for record in base]
    n_halted, n_short = (sum(c in a for a in own) for c in (disturbances.QUOTA, disturbances.MEMORY))
    fewer = next((check for check in found if check.name == "threads" and check.verdict == FINE), None)
    used, _, back = limits.swap()
    found += [
        checks.of_limits(limits.cpu_quota(root), limits.memory_left(root), n_halted, steady),
        checks.of_others(_cores_of_others(base), _others(base), fewer),
        checks.of_power(limits.power_savers(root), here.power),
        checks.of_clocks(clock, slower),
        checks.of_bandwidth(rates, limits.modules_gbps()),
        checks.of_memory(limits.memory_available(root), need, n_short, (used, back - swapped[2]), here.ram_bytes),
        *([checks.of_gpu(limits.gpus(root), here)] if plan else []),  # else the build's devices are not known
    ]
    model, settings = (plan.model, plan.settings) if plan else (None, None)
    return Checkup(here, model, settings, tuple(found), time.monotonic() - began)


def _planned(worker: Worker, given: dict[str, Any]) -> Plan | LabError:
    """The plan of a short run, or the error of the engine. LabError for impossible settings."""
    worker.use(placing.backend(AskedSettings(rpc=given.get("rpc"), lib=given.get("lib"))))
    try:
        builds.of_worker(worker)
    except LabError as problem:
        return problem
    try:
        return make_plan(worker, [LENGTHS[0]], N_GEN, 1, **given)
    except WorkerDied as death:
        return death


def _product(worker: Worker) -> Effect | None:
    """An F32 product on one core by ggml against NumPy's BLAS. Not on a Mac, where BLAS uses a coprocessor."""
    probe = Probe(MUL_MAT, "F32", 512, 512, None, 128, 2**21, 1, None, 0.1)
    if sys.platform == "darwin":
        return None
    return in_turns(lambda: _flop_ns(worker, probe), lambda: plain_read.flop_ns(0.1))


def _flop_ns(worker: Worker, probe: Probe) -> float:
    rate = worker.probe(probe)
    return min(rate.times_ns) / rate.flops


def _disk(plan: Plan) -> Check:
    """Pieces of the model's file, read from the disk and from the page cache in turns, before anything maps it."""
    n_bytes, places, cold = plan.file.path.stat().st_size, itertools.count(), list[float]()

    def read(from_disk: bool) -> float:
        at = next(places) * n_bytes // (4 * N_BLOCKS) // 4096 * 4096
        seconds = plain_read.piece_s(plan.file.path, at, from_disk)
        cold.extend([seconds] * from_disk)
        return seconds

    cached = in_turns(lambda: read(True), lambda: read(False)) if hasattr(os, "posix_fadvise") else None
    read_bytes = min(n_bytes, plain_read.PIECE) * len(cold)
    return checks.of_disk(n_bytes, cached, read_bytes / sum(cold) / 1e9 if cold else 0.0)


def _quantization(worker: Worker, plan: Plan) -> list[Check]:
    """The kernels of the model's largest matrix against those of Q4_0 or Q8_0, if the CPU computes with them."""
    settings, known = plan.settings, matrices(plan.model) or ()
    kind = probe_plan.used_types(plan.model)[0] if known else ""
    fits = [m for m in known if m.type == kind and m.part in (ATTENTION, FEED_FORWARD) and not m.columns % 32]
    if settings.n_gpu_layers or not fits:
        return []
    other = "Q4_0" if BLOCKS[kind][1] / BLOCKS[kind][0] < 0.7 else "Q8_0"
    if other == kind:
        return [Check("quantization", kind, FINE)]
    matrix, effects = max(fits, key=lambda m: m.n_weights), dict[str, Effect]()
    for phase, n_tokens, times in (("prefill", 128, probe_plan.FEW), ("decode", 1, probe_plan.MANY)):
        size = min(matrix.rows, 4096), matrix.columns, None, n_tokens, probe_plan.pass_bytes(times)
        own, theirs = (
            Probe(MUL_MAT, one, *size, settings.n_threads, None, 0.05, repack=settings.repack) for one in (kind, other)
        )
        try:
            both = in_turns(lambda p=own: _flop_ns(worker, p), lambda p=theirs: _flop_ns(worker, p))  # type: ignore[misc]
        except WorkerDied:
            raise
        except LabError as problem:
            return [Check("quantization", kind, UNKNOWN, problem.what)]
        effects |= {phase: both} if both else {}
    spec = catalog.spec_of(plan.model)
    command = f'lab ab "-m {spec}" "-m {catalog.spec_of(plan.model, other)}"'
    check = checks.of_change(Change("quantization", kind, f"Kernels of {other} instead", command, {}), effects)
    verdict = LOOK if check.verdict == BROKEN else FINE  # a choice; small gains may cost quality
    return [dataclasses.replace(check, verdict=verdict)]


def _settings(
    worker: Worker, plan: Plan, given: dict[str, Any], best: int, found: list[Check], watch: ShowStatus
) -> list[Record]:
    """Try each change side by side with the given settings. Adds checks to `found`; returns the unchanged runs."""
    case, first = _case(plan, worker, watch)
    base, n = list[Record](), _n_threads(plan.settings)
    has_room = 2 * plan.memory(plan.cases[0]).total_bytes < limits.memory_available()
    worker.restart()  # without the model
    for change in changes(plan, best):
        records = list[Record]()
        try:
            if case and has_room:
                records = _trial(worker, {AS_IT_IS: given, change.name: {**given, **change.asked}}, case, watch)
        except LabError as problem:
            if problem.what.startswith(AS_IT_IS):
                raise
            found.append(Check(change.name, change.figure, UNKNOWN, problem.what))
            continue
        base += [record for record in records if record.run.variant == AS_IT_IS]
        effects = _effects(records, change.name)
        if change.name == "threads":
            found.append(checks.of_threads(change, effects, n, best, bool(_others(records))))
        else:
            found.append(checks.of_change(change, effects))
    return base or [first]


def _trial(worker: Worker, sides: Mapping[str, Mapping[str, Any]], case: Case, watch: ShowStatus) -> list[Record]:
    """The timed runs of settings side by side, in turns."""
    size = [case.n_prompt], case.n_gen, N_BLOCKS * N_TURNS
    plans = {name: make_plan(worker, *size, **side) for name, side in sides.items()}
    with tempfile.TemporaryDirectory() as folder:
        done = side_by_side.execute(plans, N_BLOCKS, Path(folder) / "doctor.jsonl", watch, Worker)
        return [record for record in done if not record.run.warmup]


def _n_threads(settings: Settings) -> int:
    return max(settings.n_threads, settings.n_threads_batch)


def _case(plan: Plan, worker: Worker, watch: ShowStatus) -> tuple[Case | None, Record]:
    """The case of the trials' runs, chosen by a short run, which is returned too; None if a run takes too long."""
    if plan.refused:
        raise LabError(" ".join(plan.refused.values()), "Take a smaller model, or end other programs.")
    engine, case = WarmEngine(plan, worker, Reporter(watch, [], plan.n_tokens)), Case(LENGTHS[-1], 4)
    engine.load()
    engine.open(plan.cases)
    run = [engine.run(case, repeat, warmup=True) for repeat in range(2)][-1]
    first = Record("doctor", plan.machine, engine.model, engine.settings, run)
    token_s, prompt_s = (phases.tpot_ns(run) or 0) / 1e9, (phases.prefill_ns(run) or 0) / case.n_prompt / 1e9
    for n in LENGTHS:
        if n * prompt_s + N_GEN * token_s <= RUN_S:
            return Case(n, N_GEN), first
    return (case if case.n_prompt * prompt_s + case.n_gen * token_s <= MOST_RUN_S else None), first


def _effects(records: Sequence[Record], name: str) -> dict[str, Effect]:
    """The effects of a change on both phases."""
    effects = {}
    for phase, figure in (("prefill", phases.prefill_ns), ("decode", phases.tpot_ns)):
        sides: dict[str, dict[int, list[float]]] = {AS_IT_IS: {}, name: {}}
        for record in records:
            if record.run.variant in sides and (value := figure(record.run)):
                sides[record.run.variant].setdefault(record.run.block or 0, []).append(value)
        if both := checks.effect(*(list(side.values()) for side in sides.values())):
            effects[phase] = both
    return effects


def _engine(base: Sequence[Record]) -> Check:
    """The check of the engine, with its rates."""
    runs = [record.run for record in base]
    prefill = statistics.median(run.n_prompt * 1e9 / (phases.prefill_ns(run) or 1) for run in runs)
    decode = statistics.median(1e9 / (phases.tpot_ns(run) or 1) for run in runs)
    return Check("engine", f"prefill {prefill:,.0f}, decode {decode:,.0f} tokens/s", FINE)


def _others(records: Sequence[Record]) -> list[str]:
    """Sentences on the CPU time that other programs and the host took during these runs."""
    own, causes = [disturbances.disturbances(record) for record in records], (disturbances.OTHERS, disturbances.STEAL)
    amounts = {cause: [amounts[cause] for amounts in own if cause in amounts] for cause in causes}
    return [cause.sentence(max(known)) for cause, known in amounts.items() if known]


def _cores_of_others(records: Sequence[Record]) -> float | None:
    """The median over runs of the cores used by other programs; None if the system does not report them."""
    noises = [record.run.noise for record in records if record.run.noise]
    known = [(noise, noise.samples.others_ms) for noise in noises if noise.samples and noise.samples.others_ms]
    return statistics.median(max(0.0, disturbances.cores(*pair)[0]) for pair in known) if known else None
