"""Times the kernels of a machine, in rounds, and keeps their rates. The best pass of several rounds
counts.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from lab.core.lists import plural
from lab.core.record import Ceilings, Model, Rate, Settings
from lab.process.wire import DOWNLOAD, UPLOAD, Probe
from lab.process.worker import Worker
from lab.roofline import probes, probing
from lab.roofline.probes import OFTEN, READ, ProbeKey, key
from lab.roofline.probing import CPU, Say, Where
from lab.runner import disturbances, machine, noise_watch
from lab.runner.cases import utc_now
from lab.runner.progress import KERNEL, ShowStatus, Status

ROUNDS = 2  # every probe is timed in each, unless the machine is disturbed and its rate sure
STEADY = 1.03  # the best passes of a steady probe's rounds differ by no more than this factor
SURE_PASSES = 3  # a rate is sure if this many passes of a round are as near to its best
LATE = 1.5  # a disturbed machine that is slower by this factor times sure rates only once
SPENT = 2.5  # after this multiple of the announced time no kernel is timed a third time
EACH_S = 0.5  # a probe takes, about
SURE = 20  # the forecast trusts EACH_S as much as SURE measured probes
LEAST_READ = 256 * 2**20  # bytes that a plain read goes through
READ_PASSES = 8


def expected_s(todo: Sequence[Probe]) -> float:
    """The estimated seconds of these probes in all rounds, on a quiet machine."""
    return EACH_S * ROUNDS * len(todo)


def unknown(
    model: Model,
    settings: Settings,
    types: Sequence[str],
    where: Where,
    sessions: Sequence[Ceilings],
) -> list[Probe]:
    """The probes of a model on every device of `where` that no session answers. LabError for two
    GPUs.
    """
    probing.check_one_gpu(where)
    todo = []
    for name in where.devices:
        place = Where(where.machine, (name,), where.repack)
        ceilings = probing.known(sessions, place)
        rates = () if ceilings is None else ceilings.rates
        todo += probes.missing(probes.probes(model, settings, types, name), rates)
    return todo


def obtain(
    worker: Worker,
    where: Where,
    todo: Sequence[Probe],
    watch: ShowStatus,
    warn: Say,
    folder: Path,
) -> Ceilings:
    """Time these probes (those that are `unknown`), keep them in `folder`, and return all ceilings
    of `where`.

    `watch` is told before each probe which it is, how long all of them will still take, and what
    disturbs this round; `warn` what disturbed the last round.
    """
    forecast = ProbeForecast(ROUNDS * len(todo))
    for name in dict.fromkeys(probe.device for probe in todo):
        of_device = [probe for probe in todo if probe.device == name]
        session = ProbeSession(worker, where, name, of_device)
        try:
            session.measure(forecast, watch)
        finally:
            session.save(folder)
        if session.disturbed:
            warn(
                f"While the ceilings of {name or CPU} were measured, {session.disturbed}, also in "
                "the last round. Some can be too low. Measure again: --again"
            )
    ceilings = probing.known(probing.kept(folder, lambda sentence: None), where)
    assert ceilings is not None
    return ceilings


class ProbeForecast:
    """How many probes are timed, and how long the others will take."""

    def __init__(self, n_probes: int) -> None:
        self.n_probes = n_probes
        self.announced_s = EACH_S * n_probes
        self.n_done = 0
        self.started = time.monotonic()

    @property
    def is_late(self) -> bool:
        elapsed_s = time.monotonic() - self.started
        return elapsed_s > LATE * EACH_S * self.n_done

    @property
    def is_spent(self) -> bool:
        return time.monotonic() - self.started > SPENT * self.announced_s

    @property
    def left_s(self) -> float:
        elapsed_s = time.monotonic() - self.started
        mean_s = (elapsed_s + SURE * EACH_S) / (self.n_done + SURE)
        return (self.n_probes - self.n_done) * mean_s


class ProbeSession:
    """The rates of a device's probes, round by round.

    Every probe is timed once in each of ROUNDS rounds, so that a bad moment spoils none of them.
    After a disturbed round another follows, of the probes that are not steady, and if it was quiet
    also of the others. `disturbed` says what disturbed the last round.
    """

    def __init__(
        self, worker: Worker, where: Where, device: str | None, todo: Sequence[Probe]
    ) -> None:
        self.worker = worker
        self.where = where
        self.device = device
        self.todo = todo
        self.disturbed = ""
        self.passes: dict[ProbeKey, list[Rate]] = collections.defaultdict(list)
        self.n_threads = max(probe.n_threads for probe in todo)
        n_watched = machine.n_cores_watched(where.machine) or self.n_threads
        self.n_free = max(0.0, n_watched - self.n_threads)

    def measure(self, forecast: ProbeForecast, watch: ShowStatus) -> None:
        for _ in range(ROUNDS):
            self.measure_round(self.todo, forecast, watch)
        if not self.disturbed:
            return
        steady = [probe for probe in self.todo if is_steady(self.passes[key(probe)])]
        others = [probe for probe in self.todo if probe not in steady]
        for again in (others, steady):
            if again:
                forecast.n_probes += len(again)
                self.measure_round(again, forecast, watch)
            if self.disturbed:
                break

    def measure_round(
        self, todo: Sequence[Probe], forecast: ProbeForecast, watch: ShowStatus
    ) -> None:
        noise = noise_watch.NoiseWatch(self.worker.pid)
        for probe in todo:
            if self.has_enough(self.passes.get(key(probe), ()), forecast):
                forecast.n_probes -= 1
                continue
            doing = (
                f"{KERNEL} {forecast.n_done + 1} of {forecast.n_probes}: {description(probe)}"
            )
            if self.disturbed:
                doing = f"{doing} (slower: {self.disturbed})"
            watch(Status(doing, left_s=forecast.left_s))
            rate = self.worker.probe(probe)
            forecast.n_done += 1
            self.passes[key(rate)].append(rate)
            self.disturbed = disturbances.during(noise.finish(), self.n_free)
        if self.device is None:
            rate = read_rate(self.n_threads)
            self.passes[key(rate)].append(rate)

    def has_enough(self, passes: Sequence[Rate], forecast: ProbeForecast) -> bool:
        """Whether a probe is not timed again: beside other work, where that would take long."""
        if not self.disturbed:
            return False
        if len(passes) >= ROUNDS and forecast.is_spent:
            return True
        return forecast.is_late and is_sure(passes)

    def save(self, folder: Path) -> None:
        """Keep the kernels that were timed at all their sizes: nothing lies between the sizes of
        the others.
        """
        unfinished = {
            probes.kernel(probe) for probe in self.todo if key(probe) not in self.passes
        }
        rates = []
        for passes in self.passes.values():
            if probes.kernel(passes[0]) in unfinished:
                continue
            times_ns: list[int] = []
            for rate in passes:
                times_ns += rate.times_ns
            rates.append(dataclasses.replace(passes[0], times_ns=tuple(times_ns)))
        if not rates:
            return
        ceilings = Ceilings(
            utc_now(),
            self.where.machine,
            on_gpu=self.device is not None,
            rates=tuple(rates),
            device=self.device,
            repack=self.where.repack if self.device is None else None,
            disturbed=self.disturbed or None,
        )
        probing.save(ceilings, folder)


def is_steady(passes: Sequence[Rate]) -> bool:
    """Whether the rounds of a probe agree, or one was enough."""
    bests = [min(rate.times_ns) for rate in passes]
    if len(bests) < ROUNDS:
        return is_sure(passes)
    return max(bests) <= STEADY * min(bests)


def is_sure(passes: Sequence[Rate]) -> bool:
    """Whether in a round several passes of a probe were about as fast as the best of all."""
    best_ns = min((min(rate.times_ns) for rate in passes), default=0)
    for rate in passes:
        near = [ns for ns in rate.times_ns if ns <= STEADY * best_ns]
        if len(near) >= SURE_PASSES:
            return True
    return False


def description(probe: Probe) -> str:
    """A probe in words, for the line of progress."""
    what = probe.op.replace("_", " ")
    if probe.n_positions:
        what = f"{what} over {probe.n_positions:,} positions"
    if probe.op in (UPLOAD, DOWNLOAD):
        size = f"{probe.n_bytes:,} bytes"
    else:
        size = plural(probe.n_tokens, "column")
    where = plural(probe.n_threads, "thread") if probe.device is None else probe.device
    return f"{what}, {probe.type}, {size}, {where}"


def read_rate(n_threads: int, n_bytes: int | None = None) -> Rate:
    """How fast memory can be read without any kernel: the maximum of numbers (a random MiB,
    repeated), a slice each.
    """
    import numpy as np

    n_bytes = n_bytes or max(LEAST_READ, probes.pass_bytes(OFTEN))
    n_numbers = n_bytes // 8
    data = np.resize(np.random.default_rng(1).integers(0, 2**62, 2**17), n_numbers)
    slices = np.array_split(data, n_threads)
    times_ns = []
    with concurrent.futures.ThreadPoolExecutor(n_threads) as pool:
        for _ in range(READ_PASSES):
            start_ns = time.perf_counter_ns()
            list(pool.map(np.max, slices))
            times_ns.append(time.perf_counter_ns() - start_ns)
    times_ns.pop(0)  # the first pass faults the pages
    return Rate(READ, "I64", "numpy", 1, n_numbers, 1, n_threads, n_bytes, 0, tuple(times_ns))
