"""Describe the machine for every record: each fact comes from the operating system, or is None.

Also the cores and the memory that this process may use. Linux limits processes by control groups (version 2); the
limits of all groups above a process's own apply too (docs.kernel.org, admin-guide/cgroup-v2). `root` replaces `/`.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from lab.core.asked_settings import MAX_THREADS
from lab.core.record import Device, Machine, Settings
from lab.models import catalog
from lab.process.wire import Build

ROOT = Path("/")

_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader", "microsoft basic render")
"""Parts of the names of Vulkan devices in software: Mesa's, Google's, and that of Windows."""


def describe(build: Build | None = None, lib: str | None = None) -> Machine:
    """This machine, with the llama.cpp build that the engine reported, if any."""
    import psutil

    usable = n_cores_usable()
    quota = cpu_quota()
    battery = None
    flags = re.search(r"^flags\s*:(.+)$", system_text("/proc/cpuinfo"), re.MULTILINE)
    virtual = "hypervisor" in flags[1].split() if flags else None
    if sys.platform == "darwin":
        virtual = {"1": True, "0": False}.get(sysctl("kern.hv_vmm_present") or "")
    with contextlib.suppress(
        OSError, AttributeError
    ):  # AttributeError: psutil has no such function for this system
        battery = psutil.sensors_battery()
    plugged = battery.power_plugged if battery else None
    return Machine(
        cpu=_cpu_name(),
        n_cores_physical=psutil.cpu_count(logical=False),
        n_cores_usable=None if usable is None else max(1, math.floor(usable)),
        ram_bytes=psutil.virtual_memory().total,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        llama_cpp_python=build.llama_cpp_python if build else None,
        llama_cpp_commit=build.llama_cpp_commit if build else None,
        system_info=build.system_info if build else None,
        devices=build.devices if build else (),
        lib=lib,
        virtual=True if _emulated_on(ROOT) else virtual,
        power=None if plugged is None else "mains" if plugged else "battery",
        cpu_quota=quota if quota == usable else None,
    )


def cores(machine: Machine) -> float | None:
    """Logical cores that the lab may use there, a fraction with a CPU quota; None if unknown."""
    return machine.n_cores_usable if machine.cpu_quota is None else machine.cpu_quota


def accelerators(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that layers can be offloaded to (GPUs)."""
    return tuple(device for device in devices if device.type in ("gpu", "igpu"))


def by_default(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The default devices for layers: GPUs, or else integrated GPUs."""
    offload = accelerators(devices)
    return tuple(device for device in offload if device.type == "gpu") or offload


def used(machine: Machine, settings: Settings) -> tuple[Device, ...]:
    """The devices with layers, except the CPU, in llama.cpp's order (llama_prepare_model_devices)."""
    if settings.n_gpu_layers == 0:
        return ()
    if settings.devices is None:
        return by_default(machine.devices)
    known = {device.name: device for device in accelerators(machine.devices)}
    return tuple(known[name] for name in settings.devices if name in known)


def is_software(device: Device) -> bool:
    """Whether a "GPU" is a program that runs on the CPU, so that its figures are not those of a GPU."""
    return any(name in device.description.lower() for name in _SOFTWARE)


def describe_device(device: Device) -> str:
    """llama.cpp's description, with a remark for software: `llvmpipe (software; LLVM 15.0.6)`."""
    if not is_software(device):
        return device.description
    name, _, rest = device.description.removesuffix(")").partition(" (")
    return f"{name} (software{f'; {rest}' if rest else ''})"


def in_words(devices: Sequence[Device]) -> str:
    """Devices such as `2 x NVIDIA H200`."""
    counts = Counter(map(describe_device, devices))
    return ", ".join(name if n == 1 else f"{n} x {name}" for name, n in sorted(counts.items()))


def label(machine: Machine, settings: Settings | None = None) -> str:
    """A short name for titles and tables: the devices with layers, or else the CPU."""
    return named(machine, used(machine, settings) if settings else ())


def named(machine: Machine, devices: Sequence[Device]) -> str:
    """These devices in words; without devices, the CPU."""
    if devices:
        return in_words(devices)
    n_cores = cores(machine)
    return f"{machine.cpu or 'unknown CPU'}{f', {n_cores:g} cores' if n_cores else ''}"


def slug(text: str) -> str:
    """`text` as a part of a file name: lower-case letters, digits, dots and dashes."""
    text = re.sub(r"\(r\)|\(tm\)|\bcpu\b|\bprocessor\b|@.*", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")[:40] or "unknown"


def _cpu_name(root: Path = ROOT) -> str | None:
    """The CPU's name; of an Arm CPU with its cores, such as `Board (4 x Cortex-A76, 4 x Cortex-A55)`."""
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string")
    if sys.platform == "win32":
        return platform.processor() or None
    if kernel := _emulated_on(root):
        return f"{platform.machine()} emulated on {kernel}"
    text = system_text(root / "proc/cpuinfo")
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    name = system_text(root / "proc/device-tree/model").strip("\0\n ") or (
        match[1].strip() if match else None
    )
    makers, parts = (
        re.findall(rf"^CPU {what}\s*:\s*(\w+)", text, re.MULTILINE)
        for what in ("implementer", "part")
    )
    with catalog.data_file("arm_cores.toml").open("rb") as file:
        known = tomllib.load(file)
    both = zip(makers, parts, strict=False)
    counts = Counter(
        known.get(maker, {}).get(part, f"Arm core {maker}/{part}") for maker, part in both
    )
    cores = ", ".join(f"{n} x {core}" for core, n in counts.items()) or None
    return f"{name} ({cores})" if name and cores else name or cores


def _emulated_on(root: Path) -> str | None:
    """The kernel's architecture if this program is emulated on it; i686 and armv8l are 32-bit programs."""
    kernel = system_text(root / "proc/sys/kernel/arch").strip()
    return kernel if kernel and platform.machine() not in (kernel, "i686", "armv8l") else None


def own_cores() -> tuple[int, ...] | None:
    """The numbers of the logical cores that this process may run on; None if the system does not limit them."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def n_cores_usable(root: Path = ROOT) -> float | None:
    """Logical cores that this process may use; a fraction if a container limits its CPU time."""
    cores = own_cores()
    quota = cpu_quota(root)
    n = os.cpu_count() if cores is None else len(cores)
    return n if n is None or quota is None or quota >= n else quota


def default_threads(root: Path = ROOT) -> int:
    """The default number of threads: one for each fast physical core that this process may use.

    Two threads on one physical core share its arithmetic units; a slow core delays the fast ones, as a step lasts as
    long as its slowest thread. On a machine without slow cores this is llama-bench's default.
    """
    import psutil

    physical = _n_fast_cores(root) or psutil.cpu_count(logical=False)
    known = [math.floor(n) for n in (physical, n_cores_usable(root)) if n]
    return max(1, min(*known, MAX_THREADS)) if known else 1


def memory_available(root: Path = ROOT) -> int:
    """Bytes that can be allocated without swapping; a group's inactive page cache does not count as used."""
    import psutil

    left = [int(psutil.virtual_memory().available)]
    for folder in _groups(root):
        used = system_number(folder / "memory.current")
        reclaimed = _count(folder / "memory.stat", "inactive_file") or 0
        limits = [system_number(folder / name) for name in ("memory.max", "memory.high")]
        left += [
            max(0, limit - used + reclaimed)
            for limit in limits
            if limit is not None and used is not None
        ]
    return min(left)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU time that the groups of this process allow, in cores (a fraction); None without a limit."""
    parts = [system_text(folder / "cpu.max").split() for folder in _groups(root)]
    return min(
        (int(part[0]) / int(part[1]) for part in parts if part and part[0].isdigit()), default=None
    )


def throttled_s(root: Path = ROOT) -> float | None:
    """Seconds during which a group of this process was halted by its CPU quota; None if no group counts them."""
    counts = [_count(folder / "cpu.stat", "throttled_usec") for folder in _groups(root)]
    return max((count / 1e6 for count in counts if count is not None), default=None)


def _groups(root: Path) -> list[Path]:
    """The folders of this process's groups, from the innermost to the outermost."""
    own = re.search(r"^0::/(.*)$", system_text(root / "proc/self/cgroup"), re.MULTILINE)
    below = (
        PurePosixPath(own[1]) if own and not own[1].startswith("..") else PurePosixPath()
    )  # outside this namespace
    return [root / "sys/fs/cgroup" / folder for folder in (below, *below.parents)]


def _count(path: Path, name: str) -> int | None:
    found = re.search(rf"^{name} (\d+)$", system_text(path), re.MULTILINE)
    return int(found[1]) if found else None


def _n_fast_cores(root: Path) -> int | None:
    """Fast physical cores among those that this process may run on; None if the system does not say.

    Linux lists Intel's in /sys/devices/cpu_core (ABI/testing, sysfs-bus-event_source-devices); for Arm it gives each
    core's capacity relative to the fastest one (sysfs-devices-system-cpu), or its highest frequency.
    """
    if sys.platform == "darwin":
        count = sysctl("hw.perflevel0.physicalcpu")
        return int(count) if count and count.isdigit() else None
    folders = {n: root / f"sys/devices/system/cpu/cpu{n}" for n in own_cores() or ()}
    listed = system_text(root / "sys/devices/cpu_core/cpus").strip()  # such as 0-3,8
    ranges = [part.partition("-") for part in listed.split(",") if part]
    fast = {
        n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)
    } & folders.keys()
    # If equally many slow and fast cores share the work equally, slow cores help only above half the speed.
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = {n: system_number(folder / name) or 0 for n, folder in folders.items()}
        if not fast and all(speeds.values()):
            fast = {n for n, speed in speeds.items() if 2 * speed >= max(speeds.values())}
    siblings = {system_text(folders[n] / "topology/thread_siblings_list") for n in fast or folders}
    return len(siblings - {""}) or None


def system_text(path: str | Path) -> str:
    """A system file's text; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def system_number(path: Path) -> int | None:
    """The non-negative integer in a system file, if any."""
    text = system_text(path).strip()
    return int(text) if text.isdecimal() else None


def sysctl(name: str) -> str | None:
    return answer("sysctl", "-n", name)


def answer(*command: str) -> str | None:
    """The output of a system program; None if it is missing, fails, or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
