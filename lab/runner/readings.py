"""What the operating system says of power, clocks, memory modules and GPUs, without measuring. Unknown is None.

`root` is the folder that stands for `/`, as in limits.py.
"""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

from lab.runner.limits import ROOT, answer, system_number, system_text

OWN_GOVERNOR = ("intel_pstate", "amd-pstate-epp")
"""Drivers with which the governor `powersave` is the usual one: they choose the clock by the energy preference."""

VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
"""PCI vendors of GPUs that llama.cpp can use: not of servers' consoles and virtual displays."""


def power_savers(root: Path = ROOT) -> list[str] | None:
    """What holds the CPU's clock down to save power, in words; None where Linux has no files about it."""
    cpus = sorted((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    supplies = sorted((root / "sys/class/power_supply").glob("*/status"))
    profile = system_text(root / "sys/firmware/acpi/platform_profile").strip()
    found = []
    for cpu in cpus:
        driver, governor = (system_text(cpu / f"scaling_{name}").strip() for name in ("driver", "governor"))
        if governor == "powersave" and driver not in OWN_GOVERNOR:
            found.append("the governor is powersave")
        if system_text(cpu / "energy_performance_preference").strip() == "power":
            found.append("the energy preference is power")
    if profile in ("low-power", "quiet"):
        found.append(f"the platform profile is {profile}")
    if any(system_text(status).strip() == "Discharging" for status in supplies):
        found.append("the machine runs on battery")
    return list(dict.fromkeys(found)) if cpus or supplies or profile else None


def clock_ghz(root: Path = ROOT) -> tuple[float, float] | None:
    """The clock of the core that is fastest now, and the highest that any core can have."""
    cpus = list((root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq"))
    now = max((system_number(cpu / "scaling_cur_freq") or 0 for cpu in cpus), default=0)
    most = max((system_number(cpu / "cpuinfo_max_freq") or 0 for cpu in cpus), default=0)
    return (now / 1e6, most / 1e6) if now and most else None


def modules_gbps() -> float | None:
    """10^9 bytes/s that the memory modules transfer, if each has a channel of its own. Only root may ask (Linux)."""
    modules = (answer("dmidecode", "-t", "memory") or "").split("Memory Device")
    fields = [re.findall(r"(?:Data Width|Configured Memory Speed): (\d+) (?:bits|MT/s)", text) for text in modules]
    return sum(int(pair[0]) / 8 * int(pair[1]) / 1e3 for pair in fields if len(pair) == 2) or None


def gpus(root: Path = ROOT) -> list[str]:
    """The GPUs that the system lists and llama.cpp has a backend for, such as `NVIDIA 10de:2684`."""
    if sys.platform == "darwin":
        return ["Apple GPU"] if platform.machine() == "arm64" else []
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind, vendor, number = (system_text(device / name).strip() for name in ("class", "vendor", "device"))
        if kind.startswith("0x03") and vendor in VENDORS:
            found.append(f"{VENDORS[vendor]} {vendor[2:]}:{number[2:]}")
    return found
