"""The limits that Linux sets to this process through its control groups, versions 1 and 2.

The limits of all groups above a process's own apply too. /proc/self/cgroup names the group in each
hierarchy, /proc/self/mountinfo where a hierarchy is mounted, and which group is at the mount point:
a container often sees only its own group, there (docs.kernel.org, admin-guide/cgroup-v1 and
cgroup-v2; scheduler/sched-bwc). Each file is of one version, so that no version need be known; a
machine can have both, with each controller in one of them. `root` replaces `/`.

The scheduler's affinity contains the limits of cpusets: see `own_cores` in machine.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lab.core.files import is_dir
from lab.runner.system_files import ROOT, system_number, system_text

CPU = "cpu"
MEMORY = "memory"
VERSION_2 = ""
"""Version 2 has one hierarchy for all controllers, which /proc/self/cgroup lists without a name."""

LIMITS_OF_MEMORY = ("memory.max", "memory.high", "memory.limit_in_bytes")
USES_OF_MEMORY = ("memory.current", "memory.usage_in_bytes")
RECLAIMABLE = ("total_inactive_file", "inactive_file")
"""In version 1 only the first of these counts groups below too."""

UNLIMITED = 2**60
"""Above every real limit: version 1 writes 2^63 less one page where there is none."""


class Mount(NamedTuple):
    """Where a hierarchy is mounted, and its group at that point.

    `hierarchy`: a controller of version 1, or VERSION_2.
    """

    hierarchy: str
    top: PurePosixPath
    point: Path


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU time that the groups of this process allow, in cores; None without a limit."""
    quotas = []
    for folder in groups(CPU, root):
        quota, _, period = system_text(folder / "cpu.max").strip().partition(" ")
        quota = quota or system_text(folder / "cpu.cfs_quota_us").strip()  # -1: none
        period = period or system_text(folder / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def throttled_s(root: Path = ROOT) -> float | None:
    """Seconds during which a group of this process was halted by its CPU quota.

    None if no group counts them.
    """
    seconds = []
    for folder in groups(CPU, root):
        count_us = _count(folder / "cpu.stat", "throttled_usec")
        count_ns = _count(folder / "cpu.stat", "throttled_time")
        if count_us is not None:
            seconds.append(count_us / 1e6)
        if count_ns is not None:
            seconds.append(count_ns / 1e9)
    return max(seconds, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """The most bytes that the groups of this process may use; None without a limit."""
    limits = [limit for folder in groups(MEMORY, root) for limit in _limits(folder)]
    return min(limits, default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes that the groups of this process may use beyond those that they use; None without a
    limit.

    Inactive page cache does not count as used: the kernel takes it back.
    """
    left = []
    for folder in groups(MEMORY, root):
        used = _first_number(folder, USES_OF_MEMORY)
        reclaimable = 0
        for name in RECLAIMABLE:
            reclaimable = reclaimable or _count(folder / "memory.stat", name) or 0
        if used is not None:
            left += [max(0, limit - used + reclaimable) for limit in _limits(folder)]
    return min(left, default=None)


def _limits(folder: Path) -> Iterator[int]:
    """The limits of a group's memory; in version 1 also the least of the groups above, which a
    container may not see."""
    for name in LIMITS_OF_MEMORY:
        limit = system_number(folder / name)
        if limit is not None and limit < UNLIMITED:
            yield limit
    limit = _count(folder / "memory.stat", "hierarchical_memory_limit")
    if limit is not None and limit < UNLIMITED:
        yield limit


def groups(controller: str, root: Path = ROOT) -> list[Path]:
    """The folders of this process's groups, from the innermost outwards, first those of version 1.

    Where the own group is not visible, these are the groups that the mount point shows.
    """
    paths = _paths(root)
    mounts = _mounts(root)
    folders = []
    for hierarchy in (controller, VERSION_2):
        path = paths.get(hierarchy)
        if path is None:
            continue
        longest: list[Path] = []
        for mount in mounts:
            chain = _chain(mount, path) if mount.hierarchy == hierarchy else []
            if len(chain) > len(longest):
                longest = chain
        folders += longest
    return folders


def own_group(controller: str, root: Path = ROOT) -> Path | None:
    """The folder of this process's own group; None if it is not visible."""
    paths = _paths(root)
    for hierarchy in (controller, VERSION_2):
        path = paths.get(hierarchy)
        for mount in _mounts(root):
            if path is not None and mount.hierarchy == hierarchy:
                folder = _folder(mount, path)
                if folder is not None and is_dir(folder):
                    return folder
    return None


def _chain(mount: Mount, path: PurePosixPath) -> list[Path]:
    """The visible folders of a group and of those above it, innermost first."""
    folder = _folder(mount, path) or mount.point
    chain = []
    while folder != mount.point:
        chain.append(folder)
        folder = folder.parent
    return [folder for folder in (*chain, mount.point) if is_dir(folder)]


def _folder(mount: Mount, path: PurePosixPath) -> Path | None:
    """Where a group should lie; None if it is not below the mount point."""
    if ".." in path.parts or not path.is_relative_to(mount.top):
        return None
    return mount.point / path.relative_to(mount.top)


def _paths(root: Path) -> dict[str, PurePosixPath]:
    """The paths of this process's groups by hierarchy: by controller, or VERSION_2."""
    paths = {}
    for line in system_text(root / "proc/self/cgroup").splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        for controller in controllers.split(","):
            paths[controller] = PurePosixPath(path)
    return paths


def _mounts(root: Path) -> list[Mount]:
    """All hierarchies that are mounted; where mounts are not listed, those of the usual places."""
    mounts = []
    for line in system_text(root / "proc/self/mountinfo").splitlines():
        fields, _, source = line.partition(" - ")
        kind, *options = source.split(" ")
        if kind not in ("cgroup", "cgroup2") or fields.count(" ") < 5:
            continue
        _, _, _, top, point, *_ = map(_unescaped, fields.split(" "))
        hierarchies = [VERSION_2] if kind == "cgroup2" else options[-1].split(",")
        for hierarchy in hierarchies:
            mounts.append(Mount(hierarchy, PurePosixPath(top), root / point.lstrip("/")))
    if mounts:
        return mounts
    usual = root / "sys/fs/cgroup"
    names = {CPU: usual / CPU, MEMORY: usual / MEMORY, VERSION_2: usual}
    return [Mount(name, PurePosixPath("/"), point) for name, point in names.items()]


def _unescaped(text: str) -> str:
    r"""A path of mountinfo, which writes a space as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _first_number(folder: Path, names: tuple[str, ...]) -> int | None:
    for name in names:
        number = system_number(folder / name)
        if number is not None:
            return number
    return None


def _count(path: Path, name: str) -> int | None:
    match = re.search(rf"^{name} (\d+)$", system_text(path), re.MULTILINE)
    if match is None:
        return None
    return int(match[1])
