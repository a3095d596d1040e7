"""Record what else the machine does during a run: counters of the operating system, read ten times a second.

A counter that the system does not have is None. The energy counters:

- RAPL: zones in /sys/class/powercap/intel-rapl:*, of Intel and AMD CPUs. The lab reads the packages and their memory
  (dram); core and uncore are parts of a package, psys contains it, intel-rapl-mmio:* is another interface to it. The
  unit: microjoules; it wraps at max_energy_range_uj; only root can read it (docs.kernel.org, power/powercap).
- NVML (nvidia-ml-py): millijoules of a whole graphics card since its driver was loaded, Volta and newer.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core.record import DRAM, GPU, PACKAGE, Gpu, Noise, NoiseReading, NoiseSamples
from lab.runner.machine import ROOT, own_cores, system_number, system_text, throttled_s

if TYPE_CHECKING:
    from psutil import Process


class NoiseWatch:
    """Call `sample` ten times a second during a run, then `finish`. The lab's own processes are not noise."""

    def __init__(self, pid: int) -> None:
        import psutil

        self._own = [psutil.Process()]
        with suppress(psutil.Error):
            self._own.append(psutil.Process(pid))
        self._gpus = GpuWatch([process.pid for process in self._own])
        self._before = read_noise(self._gpus)
        self._energy = EnergyWatch(self._gpus)
        self._started_ns = time.perf_counter_ns()
        self._rows = [(0, *_cpu_ms(self._own))]

    def sample(self) -> None:
        """Read all counters once."""
        at_ms = round((time.perf_counter_ns() - self._started_ns) / 1e6)
        self._energy.sample()
        self._rows.append((at_ms, *_cpu_ms(self._own)))
        self._gpus.sample()

    def finish(self) -> Noise:
        """All readings and samples since the beginning."""
        self.sample()
        at, *columns = zip(*self._rows, strict=True)
        known = (
            None if None in column else tuple(b - a for a, b in itertools.pairwise(column))
            for column in columns
        )
        samples = NoiseSamples(at[1:], *known)
        return Noise(self._before, read_noise(self._gpus), samples, joules=self._energy.joules())


def read_noise(gpus: GpuWatch) -> NoiseReading:
    """The counters that grow when something slows the machine."""
    waited = re.search(r"^some .*total=(\d+)", system_text("/proc/pressure/memory"), re.MULTILINE)
    throttles = [
        system_text(path)
        for path in Path("/sys/devices/system/cpu").glob("cpu*/thermal_throttle/*_count")
    ]
    return NoiseReading(
        memory_pressure_s=int(waited[1]) / 1e6 if waited else None,
        n_throttled=sum(int(text) for text in throttles) if throttles else None,
        gpus=gpus.read(),
        quota_wait_s=throttled_s(),
    )


def _cpu_ms(own: Sequence[Process]) -> tuple[int | None, int | None]:
    """CPU time of others on this process's cores, and time stolen by the host of a virtual machine, in ms."""
    import psutil

    cores = own_cores()
    times = [psutil.cpu_times()]
    if cores is not None and len(cores) < (os.cpu_count() or 0):
        by_core = psutil.cpu_times(percpu=True)
        if max(cores) < len(
            by_core
        ):  # otherwise some cores are offline, and the indices are not core numbers
            times = [by_core[core] for core in cores]
    parts = ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")
    busy = sum(getattr(row, part, 0.0) for row in times for part in parts)
    others = None
    with suppress(psutil.Error):  # the engine has died
        others = round(1e3 * (busy - sum(sum(process.cpu_times()[:2]) for process in own)))
    return others, round(1e3 * sum(row.steal for row in times)) if hasattr(
        times[0], "steal"
    ) else None


SLOWED_BY = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""The bits of NVML's clock throttle reasons (nvml.h) that indicate a problem."""

EVERY_S = 1.0  # of asking the driver who uses a GPU: it samples a few times a second, and a query takes time


class GpuWatch:
    """Reads NVIDIA GPUs, and their use by other processes. `own` are the process ids of the measurement itself."""

    def __init__(self, own: Collection[int]) -> None:
        self._own = frozenset(own)
        self._nvml: Any = None
        self._handles: list[Any] = []
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._handles = [
                    pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
                ]
                self._nvml = pynvml
        self._since = (
            time.time_ns() // 1000
        )  # like the driver's stamps: microseconds of the system clock
        self._most: list[int | None] = [None] * len(self._handles)
        self._sampled = time.monotonic()

    def sample(self, at_most_every_s: float = EVERY_S) -> None:
        """Note the highest percentage of each GPU's time that others used; None where NVML does not list the engine."""
        if time.monotonic() - self._sampled < at_most_every_s:
            return
        self._sampled = time.monotonic()
        for i, handle in enumerate(self._handles):
            processes = self._ask("nvmlDeviceGetComputeRunningProcesses", handle)
            if not self._own & {process.pid for process in processes or ()}:
                continue
            try:
                samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, self._since)
            except AttributeError:
                continue
            except self._nvml.NVMLError as problem:  # "not found" means that nobody used the GPU
                if getattr(problem, "value", None) != self._nvml.NVML_ERROR_NOT_FOUND:
                    continue
                samples = []
            latest = {
                sample.pid: sample
                for sample in sorted(samples, key=lambda sample: sample.timeStamp)
            }
            percent = int(
                min(100, sum(one.smUtil for pid, one in latest.items() if pid not in self._own))
            )
            self._most[i] = max(percent, self._most[i] or 0)

    def read(self) -> tuple[Gpu, ...] | None:
        """The current state of the GPUs. None without NVML, or without a GPU."""
        if self._nvml is None:
            return None
        self.sample(at_most_every_s=0)
        found = []
        for handle, most in zip(self._handles, self._most, strict=True):
            name = self._ask("nvmlDeviceGetName", handle)
            slowed = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
            words = ", ".join(words for bit, words in SLOWED_BY.items() if slowed & bit) or None
            found.append(Gpu(name.decode() if isinstance(name, bytes) else str(name), words, most))
        return tuple(found)

    def energy_counters(self) -> list[Callable[[], int | None]]:
        """For each GPU a function that reads the millijoules since its driver was loaded; None before Volta."""
        return [
            functools.partial(self._ask, "nvmlDeviceGetTotalEnergyConsumption", handle)
            for handle in self._handles
        ]

    def _ask(self, function: str, *arguments: Any) -> Any:
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
class Counter:
    covers: str  # PACKAGE, DRAM or GPU
    read: Callable[[], int | None]  # None: it cannot be read
    unit_j: float
    wraps_at: int = 0  # units at which it starts from 0 again; 0: it does not


def energy_counters(gpus: GpuWatch, root: Path = ROOT) -> list[Counter]:
    """The counters of this machine, also those that this user cannot read. `root` replaces `/`."""
    found = []
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        name = system_text(zone / "name").strip()
        if name == "dram" or re.fullmatch(r"package-\d+(-die-\d+)?", name):
            read = functools.partial(system_number, zone / "energy_uj")
            wraps_at = system_number(zone / "max_energy_range_uj") or 0
            found.append(Counter(DRAM if name == "dram" else PACKAGE, read, 1e-6, wraps_at))
    return [*found, *(Counter(GPU, read, 1e-3) for read in gpus.energy_counters())]


def describe_energy(found: list[Counter]) -> str:
    """What the counters of a machine cover, and how to make locked ones readable."""
    locked = {counter.covers for counter in found if counter.read() is None}
    known = [
        kind for kind in (PACKAGE, DRAM, GPU) if kind in {one.covers for one in found} - locked
    ]
    words = [*([", ".join(known)] if known else []), *([LOCKED] if locked - {GPU} else [])]
    return (
        "; ".join(words)
        or "no counter that can be read (RAPL on Linux, NVML of NVIDIA GPUs since Volta)"
    )


class EnergyWatch:
    """Adds up what the counters count from one call of `sample` to the next, as a counter may wrap during a run."""

    def __init__(self, gpus: GpuWatch) -> None:
        self._counters = energy_counters(gpus)
        self._last = [counter.read() for counter in self._counters]
        self._used: list[int | None] = [0] * len(self._last)

    def sample(self) -> None:
        """Read all counters."""
        for index, counter in enumerate(self._counters):
            last = self._last[index]
            used = self._used[index]
            now = counter.read()
            step = (
                None
                if now is None or last is None
                else now - last
                if now >= last
                else now - last + counter.wraps_at
            )
            self._used[index] = None if used is None or step is None or step < 0 else used + step
            self._last[index] = now

    def joules(self) -> dict[str, float] | None:
        """By kind, since the beginning. None without a kind whose counters could all be read all the time."""
        self.sample()
        total: dict[str, float] = {}
        for counter, used in zip(self._counters, self._used, strict=True):
            total[counter.covers] = (
                total.get(counter.covers, 0) + (math.nan if used is None else used) * counter.unit_j
            )
        return {
            kind: round(joules, 3) for kind, joules in total.items() if not math.isnan(joules)
        } or None
