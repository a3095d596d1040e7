"""What machine this is.

A figure means nothing without the machine it was measured on, so every record carries its description. Each fact
comes from the operating system; where a system does not give it, it is None.
"""

from __future__ import annotations

import contextlib
import math
import platform
import re
import sys

from lab.core.record import Device, Machine
from lab.runner import limits
from lab.runner.limits import sysctl, system_text


def describe(
    llama_cpp_python: str, llama_cpp_commit: str | None, system_info: str, devices: tuple[Device, ...]
) -> Machine:
    """This machine together with the llama.cpp build that the engine reported."""
    import psutil

    usable, quota = limits.n_cores_usable(), limits.cpu_quota()
    return Machine(
        cpu=_cpu_name(),
        n_cores_physical=psutil.cpu_count(logical=False),
        n_cores_usable=None if usable is None else max(1, math.floor(usable)),
        ram_bytes=psutil.virtual_memory().total,
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        llama_cpp_python=llama_cpp_python,
        llama_cpp_commit=llama_cpp_commit,
        system_info=system_info,
        devices=devices,
        virtual=_is_virtual(),
        power=_power(),
        cpu_quota=quota if quota == usable else None,
    )


def cores(machine: Machine) -> float | None:
    """Logical cores whose time the lab may use there, a fraction where a quota is one; None where it is not known."""
    return machine.n_cores_usable if machine.cpu_quota is None else machine.cpu_quota


def accelerators(devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The devices that layers can be offloaded to."""
    return tuple(device for device in devices if device.type in ("gpu", "igpu"))


def own_addresses() -> list[str]:
    """The IPv4 addresses at which other machines can reach this one."""
    import socket

    import psutil

    addresses = [address for of_card in psutil.net_if_addrs().values() for address in of_card]
    numbers = [address.address for address in addresses if address.family == socket.AF_INET]
    return [number for number in numbers if not number.startswith("127.")]


def label(machine: Machine, n_gpu_layers: int = 0) -> str:
    """A short name for titles and tables: the accelerator where layers are on one, else the CPU."""
    offload = accelerators(machine.devices)
    if n_gpu_layers and offload:
        return offload[0].description
    n_cores = cores(machine)
    return f"{machine.cpu or 'unknown CPU'}{f', {n_cores:g} cores' if n_cores else ''}"


def slug(text: str) -> str:
    """`text` as a part of a file name: lower case, digits, dots and dashes."""
    text = re.sub(r"\(r\)|\(tm\)|\bcpu\b|\bprocessor\b|@.*", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")[:40] or "unknown"


def _cpu_name() -> str | None:
    if sys.platform == "darwin":
        return sysctl("machdep.cpu.brand_string")
    if sys.platform == "win32":
        return platform.processor() or None
    match = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", system_text("/proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else None


def _is_virtual() -> bool | None:
    if sys.platform == "darwin":
        answer = sysctl("kern.hv_vmm_present")
        return None if answer is None else answer == "1"
    flags = re.search(r"^flags\s*:(.+)$", system_text("/proc/cpuinfo"), re.MULTILINE)
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
