"""Record what else the machine does during a run: counters of the operating system, read ten times a second.

A counter that the system does not have is None.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.core.noise import Noise, NoiseReading, NoiseSamples
from lab.runner.energy import EnergyWatch
from lab.runner.gpu_watch import GpuWatch
from lab.runner.limits import memory_available, own_cores, system_text, throttled_s

if TYPE_CHECKING:
    from psutil import Process


class NoiseWatch:
    """Call `sample` ten times a second during a run, then `finish`.

    The CPU time of this process, of the engine's process (`pid`) and of its RPC `servers` is not noise.
    """

    def __init__(self, pid: int, servers: Sequence[int] = ()) -> None:
        import psutil

        self._own = [psutil.Process()]
        for own in (*servers, pid):
            with contextlib.suppress(psutil.Error):
                self._own.append(psutil.Process(own))
        self._gpus = GpuWatch([process.pid for process in self._own])
        self._before = read_noise(self._own, self._gpus)
        self._energy = EnergyWatch(self._gpus)
        self._started_ns = time.perf_counter_ns()
        self._rows = [(0, *self._counters())]

    def sample(self) -> None:
        """Read all counters once."""
        at_ms = round((time.perf_counter_ns() - self._started_ns) / 1e6)
        self._energy.sample()
        self._rows.append((at_ms, *self._counters()))
        self._gpus.sample()

    def finish(self) -> Noise:
        """All readings and samples since the beginning."""
        self.sample()
        at, *columns = zip(*self._rows, strict=True)
        known = (None if None in column else tuple(b - a for a, b in itertools.pairwise(column)) for column in columns)
        samples = NoiseSamples(at[1:], *known)
        joules = self._energy.joules()
        return Noise(self._before, read_noise(self._own, self._gpus), samples, joules=joules)

    def _counters(self) -> tuple[int | None, int | None, int | None, int | None]:
        """CPU time of others, steal and pressure in ms, and how often the engine was preempted."""
        busy, steal = _cpu_times()
        (own, switches), pressure = _of_own(self._own), _pressure_s("cpu")
        others = None if own is None else round(1e3 * (busy - own))
        in_ms = [None if seconds is None else round(1e3 * seconds) for seconds in (steal, pressure)]
        return others, in_ms[0], in_ms[1], switches


def read_noise(own: Sequence[Process], gpus: GpuWatch) -> NoiseReading:
    """The state of the machine now, with counters since boot. `own` are the lab's processes, the engine's last."""
    import psutil

    busy, steal = _cpu_times()
    (own_cpu_s, switches), frequency = _of_own(own), None
    with contextlib.suppress(OSError, RuntimeError):
        frequency = psutil.cpu_freq()
    throttles = [
        system_text(str(path)) for path in Path("/sys/devices/system/cpu").glob("cpu*/thermal_throttle/*_count")
    ]
    return NoiseReading(
        load_1min=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        cpu_busy_s=round(busy, 2),
        cpu_steal_s=steal,
        cpu_pressure_s=_pressure_s("cpu"),
        cpu_mhz=frequency.current if frequency and frequency.current else None,
        memory_available_bytes=memory_available(),
        memory_pressure_s=_pressure_s("memory"),
        own_cpu_s=own_cpu_s,
        switches=switches,
        n_throttled=sum(int(text) for text in throttles) if throttles else None,
        gpus=gpus.read(),
        quota_wait_s=throttled_s(),
    )


def _cpu_times() -> tuple[float, float | None]:
    """Seconds during which this process's cores were busy, and seconds stolen by the host of a virtual machine."""
    import psutil

    cores = own_cores()
    times = [psutil.cpu_times()]
    if cores is not None and len(cores) < (os.cpu_count() or 0):
        by_core = psutil.cpu_times(percpu=True)
        if max(cores) < len(by_core):  # otherwise some cores are offline, and the indices are not core numbers
            times = [by_core[core] for core in cores]
    parts = ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")
    busy = sum(getattr(row, part, 0.0) for row in times for part in parts)
    return busy, sum(row.steal for row in times) if hasattr(times[0], "steal") else None


def _of_own(own: Sequence[Process]) -> tuple[float | None, int | None]:
    """CPU seconds of the lab's processes, and how often the engine (the last one) was preempted."""
    import psutil

    cpu_s = switches = None
    with contextlib.suppress(psutil.Error):  # the engine has died
        cpu_s = round(sum(sum(process.cpu_times()[:2]) for process in own), 2)
    with contextlib.suppress(psutil.Error, RuntimeError):  # RuntimeError: a system that does not count them
        switches = int(own[-1].num_ctx_switches().involuntary) if len(own) > 1 else None
    return cpu_s, switches


def _pressure_s(resource: str) -> float | None:
    """Seconds since boot in which some task waited for `resource` (cpu or memory)."""
    match = re.search(r"^some .*total=(\d+)", system_text(f"/proc/pressure/{resource}"), re.MULTILINE)
    return int(match[1]) / 1e6 if match else None
