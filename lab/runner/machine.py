"""Describe the machine for every record: each fact comes from the operating system, or is None.

Also the cores and the memory that this process may use (limits of containers: cgroups.py). `root`
replaces `/`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.core.asked_settings import MAX_THREADS
from lab.core.files import data_file
from lab.core.record import Device, Machine, Settings
from lab.process.wire import Build
from lab.runner import cgroups
from lab.runner.system_files import ROOT, system_number, system_text

_SOFTWARE = ("llvmpipe", "lavapipe", "swiftshader", "microsoft basic render")
"""Parts of the names of Vulkan devices in software: Mesa's, Google's, and that of Windows."""


def describe(build: Build | None = None, lib: str | None = None) -> Machine:
    """This machine, with the llama.cpp build that the engine reported, if any."""
    import psutil

    usable = n_cores_usable()
    quota = cgroups.cpu_quota()
    whole_cores = None
    if usable is not None:
        whole_cores = max(1, math.floor(usable))
    is_limited = quota is not None and quota == usable
    here = Machine(
        cpu=_cpu_name(),
        n_cores_physical=psutil.cpu_count(logical=False),
        n_cores_usable=whole_cores,
        ram_bytes=psutil.virtual_memory().total,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        devices=(),
        lib=lib,
        virtual=_is_virtual(),
        power=_power(),
        cpu_quota=quota if is_limited else None,
        n_cores_affinity=n_cores_affinity() if is_limited else None,
    )
    if build is None:
        return here
    return dataclasses.replace(
        here,
        llama_cpp_python=build.llama_cpp_python,
        llama_cpp_commit=build.llama_cpp_commit,
        system_info=build.system_info,
        devices=build.devices,
    )


def _is_virtual() -> bool | None:
    """Whether this is a virtual machine, or a program of another CPU is emulated."""
    if _emulated_on(ROOT):
        return True
    if sys.platform == "darwin":
        return {"1": True, "0": False}.get(sysctl("kern.hv_vmm_present") or "")
    flags = re.search(r"^flags\s*:(.+)$", system_text("/proc/cpuinfo"), re.MULTILINE)
    if not flags:
        return None
    return "hypervisor" in flags[1].split()


def _power() -> str | None:
    """Where the power comes from: mains or battery."""
    import psutil

    try:
        battery = psutil.sensors_battery()
    except (OSError, AttributeError):  # psutil has no such function for this system
        return None
    if battery is None or battery.power_plugged is None:
        return None
    return "mains" if battery.power_plugged else "battery"


def n_cores_allowed(machine: Machine) -> float | None:
    """Logical cores whose time the lab may use there, a fraction with a CPU quota; None if
    unknown."""
    if machine.cpu_quota is not None:
        return machine.cpu_quota
    return machine.n_cores_usable


def n_cores_watched(machine: Machine) -> float | None:
    """Logical cores that the lab may run on there, whatever its quota: samples of noise count the
    CPU time of others on all of them. None if unknown.

    With a CPU quota, records of older versions tell only the machine's physical cores.
    """
    if machine.cpu_quota is None:
        return machine.n_cores_usable
    return machine.n_cores_affinity or machine.n_cores_physical


def n_cores_free(machine: Machine, taken: float) -> float | None:
    """Cores that the lab can use while others take `taken` of those watched; None if unknown."""
    watched = n_cores_watched(machine)
    if watched is None:
        return None
    return min(watched - taken, machine.cpu_quota or math.inf)


def accelerators(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices that layers can be offloaded to (GPUs)."""
    return tuple(device for device in devices if device.type in ("gpu", "igpu"))


def by_default(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The default devices for layers: those of RPC servers, then GPUs, or else integrated GPUs."""
    available = accelerators(devices)
    remote = tuple(filter(is_remote, available))
    gpus = tuple(
        device for device in available if device.type == "gpu" and device not in remote
    )
    integrated = tuple(device for device in available if device not in remote)
    return remote + (gpus or integrated)


def names(devices: Sequence[Device]) -> list[str]:
    """llama.cpp's names of devices, such as `CUDA0`."""
    return [device.name for device in devices]


def is_remote(device: Device) -> bool:
    """Whether a device is behind an RPC server. llama.cpp names them RPC0, RPC1, and so on."""
    return re.fullmatch(r"RPC\d+", device.name) is not None


def used(machine: Machine, settings: Settings) -> tuple[Device, ...]:
    """The devices with layers, except the CPU.

    In llama.cpp's order (llama_prepare_model_devices).
    """
    if settings.n_gpu_layers == 0:
        return ()
    devices = by_default(machine.devices)
    if settings.devices is not None:
        available = accelerators(machine.devices)
        by_name = dict(zip(names(available), available, strict=True))
        devices = tuple(by_name[name] for name in settings.devices if name in by_name)
    if settings.split_mode == "none":
        index = settings.main_gpu or 0
        return devices[index : index + 1]
    return devices


def is_software(device: Device) -> bool:
    """Whether a "GPU" is a program that runs on the CPU, so that its figures are not those of a
    GPU."""
    return re.search("|".join(_SOFTWARE), device.description.lower()) is not None


def describe_device(device: Device) -> str:
    """llama.cpp's description, with a remark for software: `llvmpipe (software; LLVM 15.0.6)`."""
    if not is_software(device):
        return device.description
    name, _, remark = device.description.removesuffix(")").partition(" (")
    if remark:
        return f"{name} (software; {remark})"
    return f"{name} (software)"


def in_words(devices: Sequence[Device]) -> str:
    """Devices such as `2 x NVIDIA H200`."""
    labels = []
    for kind, n in sorted(Counter(map(_kind, devices)).items()):
        labels.append(kind if n == 1 else f"{n} x {kind}")
    return ", ".join(labels)


def _kind(device: Device) -> str:
    """A device's description; without its address if it is behind an RPC server."""
    return "RPC server" if is_remote(device) else describe_device(device)


def label(machine: Machine, settings: Settings | None = None) -> str:
    """A short name for titles and tables: the devices with layers, or else the CPU."""
    if settings is None:
        return named(machine, ())
    return named(machine, used(machine, settings))


def named(machine: Machine, devices: Sequence[Device]) -> str:
    """These devices in words; without devices, the CPU."""
    if devices:
        return in_words(devices)
    name = machine.cpu or "unknown CPU"
    n_cores = n_cores_allowed(machine)
    if n_cores:
        return f"{name}, {cores_in_words(n_cores)}"
    return name


def cores_in_words(n_cores: float) -> str:
    """Such as `1 core`, `2.5 cores`."""
    text = f"{n_cores:.0f}" if n_cores >= 10 else f"{n_cores:.2g}"
    return f"{text} core" if text == "1" else f"{text} cores"


def slug(text: str) -> str:
    """`text` as a part of a file name: lower-case letters, digits, dots and dashes."""
    text = re.sub(r"\(r\)|\(tm\)|\bcpu\b|\bprocessor\b|@.*", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")[:40] or "unknown"


def _cpu_name(root: Path = ROOT) -> str | None:
    """The CPU's name; of an Arm CPU with its cores, such as `Board (4 x Cortex-A76, 4 x
    Cortex-A55)`."""
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string")
    if sys.platform == "win32":
        return platform.processor() or None
    kernel = _emulated_on(root)
    if kernel:
        return f"{platform.machine()} emulated on {kernel}"
    text = system_text(root / "proc/cpuinfo")
    name = system_text(root / "proc/device-tree/model").strip("\0\n ")
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    if match and not name:
        name = match[1].strip()
    cores = _arm_cores(text)
    if name and cores:
        return f"{name} ({cores})"
    return name or cores or None


def _arm_cores(cpuinfo: str) -> str:
    """The cores of an Arm CPU, such as `4 x Cortex-A76, 4 x Cortex-A55`."""
    makers = re.findall(r"^CPU implementer\s*:\s*(\w+)", cpuinfo, re.MULTILINE)
    parts = re.findall(r"^CPU part\s*:\s*(\w+)", cpuinfo, re.MULTILINE)
    with data_file("arm_cores.toml").open("rb") as file:
        names_by_maker = tomllib.load(file)
    counts = Counter[str]()
    for maker, part in zip(makers, parts, strict=False):
        names_by_part = names_by_maker.get(maker, {})
        counts[names_by_part.get(part, f"Arm core {maker}/{part}")] += 1
    return ", ".join(f"{n} x {core}" for core, n in counts.items())


def _emulated_on(root: Path) -> str | None:
    """The kernel's architecture if this program is emulated on it; i686 and armv8l are 32-bit
    programs."""
    kernel = system_text(root / "proc/sys/kernel/arch").strip()
    if not kernel or platform.machine() in (kernel, "i686", "armv8l"):
        return None
    return kernel


def own_cores() -> tuple[int, ...] | None:
    """The numbers of the logical cores that this process may run on; None if the system does not
    limit them."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return tuple(sorted(os.sched_getaffinity(0)))


def n_cores_affinity() -> int | None:
    """Logical cores that this process may run on, whatever its CPU quota."""
    cores = own_cores()
    return os.cpu_count() if cores is None else len(cores)


def n_cores_usable(root: Path = ROOT) -> float | None:
    """Logical cores that this process may use; a fraction if a container limits its CPU time."""
    n_cores = n_cores_affinity()
    quota = cgroups.cpu_quota(root)
    if n_cores is None or quota is None:
        return n_cores
    return min(quota, n_cores)


def default_threads(root: Path = ROOT) -> int:
    """The default number of threads: one for each fast physical core that this process may use.

    Two threads on one physical core share its arithmetic units; a slow core delays the fast ones,
    as a step lasts as long as its slowest thread. On a machine without slow cores this is
    llama-bench's default.
    """
    import psutil

    physical = _n_fast_cores(root) or psutil.cpu_count(logical=False)
    usable = n_cores_usable(root)
    if not physical and not usable:
        return 1
    return max(1, math.floor(min(physical or MAX_THREADS, usable or MAX_THREADS, MAX_THREADS)))


def memory_available(root: Path = ROOT) -> int:
    """Bytes that this process can allocate without swapping, within the limits of its groups."""
    import psutil

    available = int(psutil.virtual_memory().available)
    left = cgroups.memory_left(root)
    return available if left is None else min(available, left)


def _n_fast_cores(root: Path) -> int | None:
    """Fast physical cores among those that this process may run on.

    None if the system does not say.
    """
    if sys.platform == "darwin":
        count = sysctl("hw.perflevel0.physicalcpu") or ""
        return int(count) if count.isdigit() else None
    folders = {n: root / f"sys/devices/system/cpu/cpu{n}" for n in own_cores() or ()}
    fast = _intel_fast_cores(root) & folders.keys() or _fast_by_speed(folders) or set(folders)
    physical = set()  # named by the logical cores that share it
    for core in fast:
        siblings = system_text(folders[core] / "topology/thread_siblings_list")
        if siblings:
            physical.add(siblings)
    return len(physical) or None


def _intel_fast_cores(root: Path) -> set[int]:
    """Intel's fast cores (ABI/testing, sysfs-bus-event_source-devices), listed such as 0-3,8."""
    listed = system_text(root / "sys/devices/cpu_core/cpus").strip()
    cores: set[int] = set()
    for text in filter(None, listed.split(",")):
        first, _, last = text.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def _fast_by_speed(folders: Mapping[int, Path]) -> set[int]:
    """Cores with at least half the highest capacity or frequency (sysfs-devices-system-cpu).

    If equally many slow and fast cores share the work equally, slow cores help only above half the
    speed. Empty if the system does not say the speed of each.
    """
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = [system_number(folder / name) or 0 for folder in folders.values()]
        if speeds and all(speeds):
            least = max(speeds) / 2
            return {
                core for core, speed in zip(folders, speeds, strict=True) if speed >= least
            }
    return set()


def sysctl(name: str) -> str | None:
    return answer("sysctl", "-n", name)


def answer(*command: str) -> str | None:
    """The output of a system program; None if it is missing, fails, or prints nothing."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
