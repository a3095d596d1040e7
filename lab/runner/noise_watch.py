"""What else the machine does while a run lasts: the counters of the operating system, read ten times a second.

Where a system does not have a counter, its reading is None.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core.noise import Gpu, Noise, NoiseReading, NoiseSamples
from lab.runner.limits import memory_available, system_text

if TYPE_CHECKING:
    from psutil import Process

SLOWED_BY = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of NVML's clock throttle reasons (nvml.h) that mean trouble."""


class NoiseWatch:
    """Reads what else the machine does while a run lasts: call `sample` ten times a second, then `finish`.

    `pid` is the engine's process, whose CPU time (with that of this process) is not noise.
    """

    def __init__(self, pid: int) -> None:
        import psutil

        self._own = [psutil.Process()]
        with contextlib.suppress(psutil.Error):
            self._own.append(psutil.Process(pid))
        self._before = read_noise(self._own)
        self._started = time.monotonic()
        self._rows = [(0, *self._counters())]

    def sample(self) -> None:
        """Take one more row of samples."""
        self._rows.append((round(1e3 * (time.monotonic() - self._started)), *self._counters()))

    def finish(self) -> Noise:
        """All that was read since the beginning."""
        self.sample()
        at, *columns = zip(*self._rows, strict=True)
        samples = NoiseSamples(at[1:], *map(_differences, columns))
        return Noise(self._before, read_noise(self._own), samples)

    def _counters(self) -> tuple[int | None, int | None, int | None, int | None]:
        """CPU time of others, steal and pressure in ms, and how often the engine was put off a core."""
        busy, steal = _cpu_times()
        own, pressure = _own_cpu_s(self._own), _pressure_s("cpu")
        others = None if own is None else round(1e3 * (busy - own))
        return others, _ms(steal), _ms(pressure), _switches(self._own)


def read_noise(own: Sequence[Process]) -> NoiseReading:
    """What the machine is doing now. `own` are this process and the engine's. Counters count from its start."""
    import psutil

    busy, steal = _cpu_times()
    frequency = None
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
        own_cpu_s=_own_cpu_s(own),
        switches=_switches(own),
        n_throttled=sum(int(text) for text in throttles) if throttles else None,
        gpus=_gpus(),
    )


def _cpu_times() -> tuple[float, float | None]:
    """Seconds that all cores together were busy, and that the host of a virtual machine took."""
    import psutil

    times = psutil.cpu_times()
    parts = ("user", "nice", "system", "irq", "softirq", "interrupt", "dpc")
    return sum(getattr(times, part, 0.0) for part in parts), getattr(times, "steal", None)


def _own_cpu_s(own: Sequence[Process]) -> float | None:
    import psutil

    try:
        return round(sum(sum(process.cpu_times()[:2]) for process in own), 2)
    except psutil.Error:  # the engine has died meanwhile
        return None


def _switches(own: Sequence[Process]) -> int | None:
    import psutil

    try:
        return int(own[-1].num_ctx_switches().involuntary) if len(own) > 1 else None
    except (psutil.Error, RuntimeError):  # RuntimeError: a system that does not count them
        return None


def _pressure_s(resource: str) -> float | None:
    """Seconds in which some task had to wait for `resource`, cpu or memory, since the start."""
    match = re.search(r"^some .*total=(\d+)", system_text(f"/proc/pressure/{resource}"), re.MULTILINE)
    return int(match[1]) / 1e6 if match else None


def _gpus() -> tuple[Gpu, ...] | None:
    """The NVIDIA GPUs, where nvidia-ml-py is installed and finds some."""
    try:
        import pynvml
    except ImportError:
        return None

    def ask(function: str, *arguments: Any) -> Any:
        try:
            return getattr(pynvml, function)(*arguments)
        except pynvml.NVMLError:  # this GPU does not tell
            return None

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return None
    gpus = []
    for handle in handles:
        power, slowed = ask("nvmlDeviceGetPowerUsage", handle), ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        name = ask("nvmlDeviceGetName", handle)
        gpus.append(
            Gpu(
                name=name.decode() if isinstance(name, bytes) else str(name),
                clock_mhz=ask("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
                temperature_c=ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
                power_w=None if power is None else power / 1e3,
                slowed=", ".join(name for bit, name in SLOWED_BY.items() if (slowed or 0) & bit) or None,
            )
        )
    return tuple(gpus)


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(1e3 * seconds)


def _differences(column: Sequence[int | None]) -> tuple[int, ...] | None:
    """From each value to the next; None where one of them is unknown."""
    known = [value for value in column if value is not None]
    return tuple(b - a for a, b in itertools.pairwise(known)) if len(known) == len(column) else None
