"""What the operating system says about power, memory and graphics cards, and how fast a core is."""

from __future__ import annotations

import hashlib
import platform
import sys
import time
from pathlib import Path

from lab.core.files import listed
from lab.runner.system_files import system_text

CHOOSE_THEIR_CLOCK = ("intel_pstate", "amd-pstate-epp")
"""Drivers whose usual governor is `powersave`: they choose the clock by the energy preference."""

VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
"""PCI vendors of GPUs that llama.cpp can use; others are server consoles and virtual displays."""

DISPLAY = "0x03"  # the PCI class of graphics cards


def swap_used() -> int:
    """Bytes in swap."""
    import psutil

    return int(psutil.swap_memory().used)


def power_savers(root: Path) -> list[str] | None:
    """The power-saving settings that lower the CPU's clock, in words; None if Linux has no files
    about them."""
    folders = listed(root / "sys/devices/system/cpu", "cpu[0-9]*/cpufreq")
    if not folders:
        return None
    savers: dict[str, None] = {}
    for folder in folders:
        driver = system_text(folder / "scaling_driver").strip()
        governor = system_text(folder / "scaling_governor").strip()
        preference = system_text(folder / "energy_performance_preference").strip()
        if governor == "powersave" and driver not in CHOOSE_THEIR_CLOCK:
            savers["the governor is powersave"] = None
        if preference == "power":
            savers["the energy preference is power"] = None
    return list(savers)


def gpus(root: Path) -> list[str]:
    """The system's GPUs that llama.cpp has a backend for, such as `NVIDIA 10de:2684`."""
    if sys.platform == "darwin":
        return ["Apple GPU"] if platform.machine() == "arm64" else []
    names: list[str] = []
    for folder in listed(root / "sys/bus/pci/devices"):
        pci_class = system_text(folder / "class").strip()
        vendor = system_text(folder / "vendor").strip()
        number = system_text(folder / "device").strip()
        if pci_class.startswith(DISPLAY) and vendor in VENDORS:
            names.append(f"{VENDORS[vendor]} {vendor[2:]}:{number[2:]}")
    return names


def work_s(seconds: float) -> float:
    """Seconds of CPU time of a unit of work (SHA-256 within the caches).

    It keeps one core busy for `seconds`.
    """
    data = bytes(2**16)
    n_units = 0
    start = time.perf_counter()
    start_cpu = time.thread_time()
    while time.perf_counter() - start < seconds:
        hashlib.sha256(data).digest()
        n_units += 1
    return (time.thread_time() - start_cpu) / n_units
