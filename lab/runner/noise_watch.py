"""Record what else the machine does during a run: counters of the operating system, read ten times
a second.

A counter that the system does not have is None. The energy counters:

- RAPL: zones in /sys/class/powercap/intel-rapl:*, of Intel and AMD CPUs. The lab reads the packages
  and their memory (dram); core and uncore are parts of a package, psys contains it,
  intel-rapl-mmio:* is another interface to it. The unit: microjoules; it wraps at
  max_energy_range_uj; only root can read it (docs.kernel.org, power/powercap).
- NVML (nvidia-ml-py): millijoules of a whole graphics card since its driver was loaded, Volta and
  newer.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core.files import listed
from lab.core.record import DRAM, GPU, PACKAGE, Gpu, Noise, NoiseReading, NoiseSamples
from lab.runner import neighbours
from lab.runner.cgroups import throttled_s
from lab.runner.machine import own_cores
from lab.runner.system_files import ROOT, system_number, system_text
from lab.runner.thread_watch import ThreadWatch

if TYPE_CHECKING:
    from psutil import Process


class NoiseWatch:
    """Call `sample` ten times a second during a run, then `finish`.

    The lab's own process and those of the engine, `pids`, are not noise, nor are planted
    neighbours. The threads of the first of `pids` are watched.
    """

    def __init__(self, *pids: int) -> None:
        import psutil

        self._lab = [psutil.Process()]
        for pid in (*pids, *neighbours.pids):
            with suppress(psutil.Error):
                self._lab.append(psutil.Process(pid))
        self._threads = None
        if (
            pids and not neighbours.pids
        ):  # beside planted ones, taking turns is what is measured
            self._threads = ThreadWatch(pids[0])
        self._gpus = GpuWatch([process.pid for process in self._lab])
        self._before = read_noise(self._gpus)
        self._energy = EnergyWatch(self._gpus)
        self._started_ns = time.perf_counter_ns()
        self._rows = [(0, *_cpu_ms(self._lab))]

    def sample(self) -> None:
        """Read all counters once."""
        at_ms = round((time.perf_counter_ns() - self._started_ns) / 1e6)
        self._energy.sample()
        self._rows.append((at_ms, *_cpu_ms(self._lab)))
        self._gpus.sample()
        if self._threads:
            self._threads.look()

    def finish(self) -> Noise:
        """All readings and samples since the beginning."""
        self.sample()
        at_ms, others_ms, steal_ms = zip(*self._rows, strict=True)
        samples = NoiseSamples(at_ms[1:], _differences(others_ms), _differences(steal_ms))
        return Noise(
            self._before,
            read_noise(self._gpus),
            samples,
            joules=self._energy.joules(),
            threads=self._threads.finish() if self._threads else None,
        )


def pids_listening(port: int) -> list[int]:
    """The processes that listen on a TCP port here, and their children; none if this user cannot
    see them."""
    import psutil

    pids: list[int] = []
    try:
        connections = psutil.net_connections(kind="tcp")
    except (psutil.Error, OSError):
        return []
    for connection in connections:
        address: Any = connection.laddr
        is_server = connection.status == psutil.CONN_LISTEN and address.port == port
        if not is_server or connection.pid is None or connection.pid in pids:
            continue
        pids.append(connection.pid)
        with suppress(psutil.Error):
            children = psutil.Process(connection.pid).children(recursive=True)
            pids += [child.pid for child in children if child.pid not in pids]
    return pids


def _differences(counts: Sequence[int | None]) -> tuple[int, ...] | None:
    """What a counter counted from each reading to the next; None if it could not always be read."""
    differences = []
    for previous, count in itertools.pairwise(counts):
        if previous is None or count is None:
            return None
        differences.append(count - previous)
    return tuple(differences)


def read_noise(gpus: GpuWatch) -> NoiseReading:
    """The counters that grow when something slows the machine."""
    waited_s = None
    waited = re.search(
        r"^some .*total=(\d+)", system_text("/proc/pressure/memory"), re.MULTILINE
    )
    if waited:
        waited_s = int(waited[1]) / 1e6
    n_throttled = None
    for file in listed(Path("/sys/devices/system/cpu"), "cpu*/thermal_throttle/*_count"):
        n_throttled = (n_throttled or 0) + int(system_text(file))
    return NoiseReading(waited_s, n_throttled, gpus.read(), throttled_s())


BUSY = ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")
"""Psutil's names of the times of a core in which it works."""


def _cpu_ms(lab: Sequence[Process]) -> tuple[int | None, int | None]:
    """CPU time of other processes on this process's cores, and time stolen by a host, in ms."""
    import psutil

    busy_s = 0.0
    stolen_s = None
    for core in _core_times():
        busy_s += sum(getattr(core, name, 0.0) for name in BUSY)
        if hasattr(core, "steal"):
            stolen_s = (stolen_s or 0.0) + core.steal
    others_ms = None
    with suppress(psutil.Error):  # the engine has died
        for process in lab:
            times = process.cpu_times()
            busy_s -= times.user + times.system
        others_ms = round(1e3 * busy_s)
    stolen_ms = None if stolen_s is None else round(1e3 * stolen_s)
    return others_ms, stolen_ms


def _core_times() -> list[object]:
    """The times of the cores that this process may run on, or their sum if these are all."""
    import psutil

    cores = own_cores()
    if cores is not None and len(cores) < (os.cpu_count() or 0):
        times = psutil.cpu_times(percpu=True)
        # Otherwise some are offline, and indices are no core numbers
        if max(cores) < len(times):
            return [times[core] for core in cores]
    return [psutil.cpu_times()]


SLOWED_BY = {
    0x8: "hardware slowdown",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
"""The bits of NVML's clock throttle reasons (nvml.h) that indicate a problem."""

EVERY_S = 1.0  # between questions to the driver, which take time, about who uses a GPU


class GpuWatch:
    """Reads NVIDIA GPUs, and their use by other processes.

    `lab` are the process ids of the measurement itself.
    """

    def __init__(self, lab: Collection[int]) -> None:
        self._lab = frozenset(lab)
        self._nvml: Any = None
        self._handles: list[object] = []
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                indices = range(pynvml.nvmlDeviceGetCount())
                self._handles = list(map(pynvml.nvmlDeviceGetHandleByIndex, indices))
                self._nvml = pynvml
        # Of the system's clock, like the driver's stamps
        self._since_us = time.time_ns() // 1000
        self._most_percent: list[int | None] = [None] * len(self._handles)
        self._sampled = time.monotonic()

    def sample(self, at_most_every_s: float = EVERY_S) -> None:
        """Note the highest percentage of each GPU's time that others used."""
        if time.monotonic() - self._sampled < at_most_every_s:
            return
        self._sampled = time.monotonic()
        for index, handle in enumerate(self._handles):
            percent = self._others_percent(handle)
            if percent is not None:
                self._most_percent[index] = max(percent, self._most_percent[index] or 0)

    def _others_percent(self, handle: object) -> int | None:
        """The part of a GPU's time that others used lately.

        None if NVML does not say it, or does not list the engine (its process ids are then of
        another namespace).
        """
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()
        if not self._lab & {process.pid for process in processes}:
            return None
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, self._since_us)
        except AttributeError:
            return None
        except self._nvml.NVMLError as problem:
            if getattr(problem, "value", None) != self._nvml.NVML_ERROR_NOT_FOUND:
                return None
            samples = []  # nobody used the GPU
        latest: dict[int, int] = {}  # by process
        for sample in sorted(samples, key=lambda sample: sample.timeStamp):
            latest[sample.pid] = sample.smUtil
        other_pids = latest.keys() - self._lab
        return min(100, sum(latest[pid] for pid in other_pids))

    def read(self) -> tuple[Gpu, ...] | None:
        """The current state of the GPUs. None without NVML, or without a GPU."""
        if self._nvml is None:
            return None
        self.sample(at_most_every_s=0)
        gpus = []
        for handle, percent in zip(self._handles, self._most_percent, strict=True):
            name = self._ask("nvmlDeviceGetName", handle)
            if isinstance(name, bytes):
                name = name.decode()
            gpus.append(Gpu(str(name), self._slowed_by(handle), percent))
        return tuple(gpus)

    def _slowed_by(self, handle: object) -> str | None:
        """What limits a GPU's clock."""
        bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        reasons = [reason for bit, reason in SLOWED_BY.items() if bits & bit]
        return ", ".join(reasons) or None

    def energy_counters(self) -> list[Callable[[], int | None]]:
        """For each GPU a function that reads the millijoules since its driver was loaded; None
        before Volta."""
        ask = functools.partial(self._ask, "nvmlDeviceGetTotalEnergyConsumption")
        return [functools.partial(ask, handle) for handle in self._handles]

    def _ask(self, function: str, *arguments: object) -> Any:
        """NVML's answer; None if this driver or GPU does not support the function."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except (self._nvml.NVMLError, AttributeError):
            return None


LOCKED = (
    "Only root can read RAPL. To allow all users until the next boot: "
    "sudo chmod a+r /sys/class/powercap/intel-rapl:*/{energy_uj,max_energy_range_uj}"
)


@dataclass(frozen=True)
class EnergyCounter:
    covers: str  # PACKAGE, DRAM or GPU
    read: Callable[[], int | None]  # None: it cannot be read
    unit_j: float
    wraps_at: int = 0  # units at which it starts from 0 again; 0: it does not


def energy_counters(gpus: GpuWatch, root: Path = ROOT) -> list[EnergyCounter]:
    """The counters of this machine, also those that this user cannot read. `root` replaces `/`."""
    counters = []
    for zone in listed(root / "sys/class/powercap", "intel-rapl:*"):
        name = system_text(zone / "name").strip()
        if name == "dram" or re.fullmatch(r"package-\d+(-die-\d+)?", name):
            covers = DRAM if name == "dram" else PACKAGE
            read = functools.partial(system_number, zone / "energy_uj")
            wraps_at = system_number(zone / "max_energy_range_uj") or 0
            counters.append(EnergyCounter(covers, read, 1e-6, wraps_at))
    for read_mj in gpus.energy_counters():
        counters.append(EnergyCounter(GPU, read_mj, 1e-3))
    return counters


def describe_energy(counters: list[EnergyCounter]) -> str:
    """What the counters of a machine cover, and how to make locked ones readable."""
    locked = {counter.covers for counter in counters if counter.read() is None}
    covered = {counter.covers for counter in counters}
    readable = [kind for kind in (PACKAGE, DRAM, GPU) if kind in covered - locked]
    sentences = []
    if readable:
        sentences.append(", ".join(readable))
    if locked - {GPU}:
        sentences.append(LOCKED)
    if not sentences:
        return "no counter that can be read (RAPL on Linux, NVML of NVIDIA GPUs since Volta)"
    return "; ".join(sentences)


class EnergyWatch:
    """Adds up what the counters count from one call of `sample` to the next.

    A counter may wrap during a run.
    """

    def __init__(self, gpus: GpuWatch) -> None:
        self._counters = energy_counters(gpus)
        self._last = [counter.read() for counter in self._counters]
        self._used: list[int | None] = [0] * len(self._last)

    def sample(self) -> None:
        """Read all counters."""
        for index, counter in enumerate(self._counters):
            count = counter.read()
            step = _step(counter, self._last[index], count)
            used = self._used[index]
            if used is not None and step is not None:
                self._used[index] = used + step
            else:
                self._used[index] = None
            self._last[index] = count

    def joules(self) -> dict[str, float] | None:
        """By kind, since the beginning.

        None without a kind whose counters could all be read all the time.
        """
        self.sample()
        totals: dict[str, float] = {}
        unreadable = set()
        for counter, used in zip(self._counters, self._used, strict=True):
            if used is None:
                unreadable.add(counter.covers)
            else:
                used_j = used * counter.unit_j
                totals[counter.covers] = totals.get(counter.covers, 0) + used_j
        readable = {kind: round(j, 3) for kind, j in totals.items() if kind not in unreadable}
        return readable or None


def _step(counter: EnergyCounter, last: int | None, count: int | None) -> int | None:
    """Units from one reading to the next; None if one failed, or the counter was set back."""
    if last is None or count is None:
        return None
    step = count - last
    if step < 0:
        step += counter.wraps_at
    return step if step >= 0 else None
