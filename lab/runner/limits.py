"""What of the machine this process may use: cores and memory, with the limits of containers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MAX_THREADS = 512
"""ggml's own limit, GGML_MAX_N_THREADS."""


def n_cores_usable() -> int | None:
    """Logical cores that this process may use: affinity, and on Linux the container's quota, counted in."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota, _, period = system_text("/sys/fs/cgroup/cpu.max").partition(" ")
    if n and quota.isdigit() and period.strip().isdigit():
        n = max(1, min(n, int(quota) // int(period)))
    return n


def default_threads() -> int:
    """llama-bench's default: physical cores, of the fast kind where there are two; at most the usable ones."""
    import psutil

    physical = _n_fast_cores() or psutil.cpu_count(logical=False)
    usable = n_cores_usable()
    return max(1, min(n for n in (physical, usable, MAX_THREADS) if n))


def memory_available() -> int:
    """Bytes that can be taken without swapping, as the operating system (or a Linux container) tells."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = system_text("/sys/fs/cgroup/memory.max").strip(), system_text("/sys/fs/cgroup/memory.current").strip()
    return min(available, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else available


def _n_fast_cores() -> int | None:
    """Physical performance cores of a CPU that has two kinds of cores; None for others."""
    if sys.platform == "darwin":
        count = sysctl("hw.perflevel0.physicalcpu")
        return int(count) if count and count.isdigit() else None
    ranges = [part.partition("-") for part in system_text("/sys/devices/cpu_core/cpus").strip().split(",") if part]
    cpus = [n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)]
    siblings = {system_text(f"/sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in cpus}
    return len(siblings) or None


def system_text(path: str) -> str:
    """A system file's text; empty where this system has no such file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def sysctl(name: str) -> str | None:
    try:
        answer = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
