"""What machine this is, and what else it is doing.

A number without its machine is a rumour, so every record carries both. Each fact comes from the operating
system; where a system does not tell it, it is None.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from lab.record import Device, Machine, NoiseReading

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


def read_noise() -> NoiseReading:
    """What the rest of the machine is doing now. Counters count from the machine's start."""
    import psutil

    times = psutil.cpu_times()
    frequency = None
    with contextlib.suppress(OSError, RuntimeError):
        frequency = psutil.cpu_freq()
    return NoiseReading(
        load_1min=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        cpu_busy_s=round(times.user + times.system, 2),
        cpu_steal_s=getattr(times, "steal", None),
        cpu_pressure_s=_cpu_pressure_s(),
        cpu_mhz=frequency.current if frequency and frequency.current else None,
        memory_available_bytes=memory_available(),
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


def _cpu_pressure_s() -> float | None:
    match = re.search(r"^some .*total=(\d+)", _text("/proc/pressure/cpu"), re.MULTILINE)
    return int(match[1]) / 1e6 if match else None


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
