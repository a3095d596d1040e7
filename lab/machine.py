"""What machine this is, and what else it is doing.

A number without its machine is a rumour, so every record carries both. Each fact comes from the operating
system; where a system does not tell it, it is None.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.readings import Gpu, Noise, NoiseReading, NoiseSamples
from lab.record import Device, Machine

if TYPE_CHECKING:
    from psutil import Process

SLOWED_BY = {0x8: "hardware slowdown", 0x20: "heat", 0x40: "heat (hardware)", 0x80: "power brake"}
"""Bits of NVML's clock throttle reasons (nvml.h) that mean trouble."""

MAX_THREADS = 512
"""ggml's own limit, GGML_MAX_N_THREADS."""


def describe(
    llama_cpp_python: str, llama_cpp_commit: str | None, system_info: str, devices: tuple[Device, ...]
) -> Machine:
    """This machine together with the llama.cpp build that the engine reported."""
    import psutil

    return Machine(
        cpu=_cpu_name(),
        n_cores_physical=psutil.cpu_count(logical=False),
        n_cores_usable=n_cores_usable(),
        ram_bytes=psutil.virtual_memory().total,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        llama_cpp_python=llama_cpp_python,
        llama_cpp_commit=llama_cpp_commit,
        system_info=system_info,
        devices=devices,
        virtual=_is_virtual(),
        power=_power(),
    )


def n_cores_usable() -> int | None:
    """Logical cores that this process may use: affinity, and on Linux the container's quota, counted in."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    if n and quota.isdigit() and period.strip().isdigit():
        n = max(1, min(n, int(quota) // int(period)))
    return n


def default_threads() -> int:
    """llama-bench's default: physical cores, of the fast kind where there are two; at most the usable ones."""
    import psutil

    physical = _n_fast_cores() or psutil.cpu_count(logical=False)
    usable = n_cores_usable()
    return max(1, min(n for n in (physical, usable, MAX_THREADS) if n))


def accelerators(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The devices that layers can be offloaded to."""
    return tuple(device for device in devices if device.type in ("gpu", "igpu"))


def label(machine: Machine, n_gpu_layers: int = 0) -> str:
    """A short name for titles and tables: the accelerator where layers are on one, else the CPU."""
    offload = accelerators(machine.devices)
    if n_gpu_layers and offload:
        return offload[0].description
    cores = f", {machine.n_cores_usable} cores" if machine.n_cores_usable else ""
    return f"{machine.cpu or 'unknown CPU'}{cores}"


def slug(text: str) -> str:
    """`text` as a part of a file name: lower case, digits, dots and dashes."""
    text = re.sub(r"\(r\)|\(tm\)|\bcpu\b|\bprocessor\b|@.*", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")[:40] or "unknown"


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
    throttles = [_text(str(path)) for path in Path("/sys/devices/system/cpu").glob("cpu*/thermal_throttle/*_count")]
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


def memory_available() -> int:
    """Bytes that can be taken without swapping, as the operating system (or a Linux container) tells."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = _text("/sys/fs/cgroup/memory.max").strip(), _text("/sys/fs/cgroup/memory.current").strip()
    return min(available, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else available


def _n_fast_cores() -> int | None:
    """Physical performance cores of a CPU that has two kinds of cores; None for others."""
    if sys.platform == "darwin":
        count = _sysctl("hw.perflevel0.physicalcpu")
        return int(count) if count and count.isdigit() else None
    ranges = [part.partition("-") for part in _text("/sys/devices/cpu_core/cpus").strip().split(",") if part]
    cpus = [n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)]
    siblings = {_text(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in cpus}
    return len(siblings) or None


def _cpu_name() -> str | None:
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    if sys.platform == "win32":
        return platform.processor() or None
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else None


def _is_virtual() -> bool | None:
    if sys.platform == "darwin":
        answer = _sysctl("kern.hv_vmm_present")
        return None if answer is None else answer == "1"
    flags = re.search(r"^flags\s*:(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    return "hypervisor" in flags[1].split() if flags else None


def _power() -> str | None:
    import psutil

    read_battery = getattr(psutil, "sensors_battery", None)
    battery = None
    with contextlib.suppress(OSError):
        battery = read_battery() if read_battery else None
    if battery is None or battery.power_plugged is None:
        return None
    return "mains" if battery.power_plugged else "battery"


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
    match = re.search(r"^some .*total=(\d+)", _text(f"/proc/pressure/{resource}"), re.MULTILINE)
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


def _text(path: str) -> str:
    """A system file's text; empty where this system has no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _sysctl(name: str) -> str | None:
    try:
        answer = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
