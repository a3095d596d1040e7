"""The cores and the memory that this process may use, including the limits of containers. Unknown is None.

Linux limits processes by control groups (version 2), which containers, systemd, Slurm and Kubernetes use. The limits of
all groups above a process's own apply too. `root` replaces `/`. Source: docs.kernel.org, admin-guide/cgroup-v2.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

from lab.core.asked_settings import MAX_THREADS

ROOT = Path("/")


def own_cores() -> tuple[int, ...] | None:
    """The numbers of the logical cores that this process may run on; None if the system does not limit them."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None


def n_cores_usable(root: Path = ROOT) -> float | None:
    """Logical cores that this process may use; a fraction if a container limits its CPU time."""
    cores, quota = own_cores(), cpu_quota(root)
    n = os.cpu_count() if cores is None else len(cores)
    return n if n is None or quota is None or quota >= n else quota


def default_threads(root: Path = ROOT) -> int:
    """The default number of threads: one for each fast physical core that this process may use.

    Two threads on one physical core share its arithmetic units. A step lasts as long as its slowest thread, so a slow
    core delays the fast ones. All NUMA nodes count, because each adds memory bandwidth; a container's CPU quota limits
    the number. On a machine without slow cores this is llama-bench's default.
    """
    import psutil

    physical = _n_fast_cores(root) or psutil.cpu_count(logical=False)
    known = [math.floor(n) for n in (physical, n_cores_usable(root)) if n]
    return max(1, min(*known, MAX_THREADS)) if known else 1


def memory_available(root: Path = ROOT) -> int:
    """Bytes that can be allocated without swapping, according to the system and the container.

    A group's inactive page cache (`inactive_file`) can be reclaimed, so it does not count as used.
    """
    import psutil

    left = [int(psutil.virtual_memory().available)]
    for folder in _groups(root):
        used, reclaimed = system_number(folder / "memory.current"), _count(folder / "memory.stat", "inactive_file") or 0
        limits = [system_number(folder / name) for name in ("memory.max", "memory.high")]
        left += [max(0, limit - used + reclaimed) for limit in limits if limit is not None and used is not None]
    return min(left)


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU time that the groups of this process allow, in cores (a fraction); None without a limit."""
    parts = [system_text(folder / "cpu.max").split() for folder in _groups(root)]
    return min((int(part[0]) / int(part[1]) for part in parts if part and part[0].isdigit()), default=None)


def throttled_s(root: Path = ROOT) -> float | None:
    """Seconds during which a group of this process was halted by its CPU quota; None if no group counts them."""
    counts = [_count(folder / "cpu.stat", "throttled_usec") for folder in _groups(root)]
    return max((count / 1e6 for count in counts if count is not None), default=None)


def _groups(root: Path) -> list[Path]:
    """The folders of this process's groups, from the innermost to the outermost."""
    own = re.search(r"^0::/(.*)$", system_text(root / "proc/self/cgroup"), re.MULTILINE)
    below = PurePosixPath(own[1]) if own and not own[1].startswith("..") else PurePosixPath()  # outside this namespace
    return [root / "sys/fs/cgroup" / folder for folder in (below, *below.parents)]


def _count(path: Path, name: str) -> int | None:
    """A count in a file with lines `name count`, if it has it."""
    found = re.search(rf"^{name} (\d+)$", system_text(path), re.MULTILINE)
    return int(found[1]) if found else None


def _n_fast_cores(root: Path) -> int | None:
    """Fast physical cores among those that this process may run on; None if the system does not say.

    macOS counts performance cores. Linux lists Intel's in /sys/devices/cpu_core (ABI/testing,
    sysfs-bus-event_source-devices); for Arm it gives each core's capacity relative to the fastest one
    (sysfs-devices-system-cpu), or its highest frequency.
    """
    if sys.platform == "darwin":
        count = sysctl("hw.perflevel0.physicalcpu")
        return int(count) if count and count.isdigit() else None
    folders = {n: root / f"sys/devices/system/cpu/cpu{n}" for n in own_cores() or ()}
    listed = system_text(root / "sys/devices/cpu_core/cpus").strip()  # such as 0-3,8
    ranges = [part.partition("-") for part in listed.split(",") if part]
    fast = {n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)} & folders.keys()
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
    """macOS's value of `name`, if any."""
    return answer("sysctl", "-n", name)


def answer(*command: str) -> str | None:
    """The output of a system program; None if it is missing, fails, or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
