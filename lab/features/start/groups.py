"""Limit the memory of an engine's process, where the system allows it.

Linux limits the memory of control groups: page cache counts too, for the group whose process read
the page first. A group below this process's own is made where that is allowed (version 1, or a
version 2 group that hands its controller on). Otherwise systemd makes one, as a scope. Only the
engine enters it, before its Python starts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lab.core.files import exists, is_dir
from lab.errors import LabError
from lab.runner import cgroups
from lab.runner.system_files import ROOT

ENTER = 'echo 0 > "$0" && exec "$@"'
"""A shell enters the group that is its first word, and becomes the words after it."""

LIMIT_FILES = ("memory.limit_in_bytes", "memory.max")
NO_SWAP = {"memory.swappiness": "0", "memory.swap.max": "0"}
"""What keeps the process's own memory out of the swap, in version 1 and version 2."""

SCOPE = ("systemd-run", "--user", "--scope", "--quiet", "--collect")
TRY_S = 10  # for systemd to make a scope
REMOVE_S = 5  # for an ended process to leave its group
PAUSE_S = 0.05
HINT = "On Linux, run as root, or in a session of systemd (systemd-run --user)."


@dataclass(frozen=True)
class MemoryGroups:
    """How groups with a limit are made here: below a folder, or by systemd (no folder)."""

    parent: Path | None

    @contextmanager
    def limited(self, n_bytes: int) -> Iterator[tuple[str, ...]]:
        """The command that starts a process with at most n_bytes of memory.

        The group is removed at the end, when its process has ended.
        """
        if self.parent is None:
            yield (*SCOPE, "-p", f"MemoryMax={n_bytes}", "-p", "MemorySwapMax=0", "--")
            return
        folder = self.parent / f"mini-lab-{os.getpid()}"
        try:
            folder.mkdir()
            set_limit(folder, n_bytes)
            yield ("/bin/sh", "-c", ENTER, str(folder / "cgroup.procs"))
        finally:
            remove(folder)


def find_groups(root: Path = ROOT) -> MemoryGroups:
    """How memory is limited on this machine. LabError with the reason where it cannot be."""
    if sys.platform != "linux":
        raise LabError("--memory is not possible: only Linux limits page cache too.", HINT)
    reason = "this process has no memory group"
    parent = cgroups.own_group(cgroups.MEMORY, root)
    if parent is not None:
        try:
            check(parent)
            return MemoryGroups(parent)
        except OSError as problem:
            reason = f"no group can be made in {parent}: {problem.strerror}"
    if has_scopes():
        return MemoryGroups(None)
    raise LabError(f"--memory is not possible: {reason}, and systemd makes none.", HINT)


def check(parent: Path) -> None:
    """OSError unless a group below can be made and limited."""
    folder = parent / f"mini-lab-{os.getpid()}"
    folder.mkdir()
    try:
        set_limit(folder, 1 << 30)
    finally:
        remove(folder)


def set_limit(folder: Path, n_bytes: int) -> None:
    """OSError if the group has no limit of memory."""
    names = [name for name in LIMIT_FILES if exists(folder / name)]
    if not names:
        raise FileNotFoundError(0, "the group has no limit of memory")
    (folder / names[0]).write_text(str(n_bytes))
    for name, value in NO_SWAP.items():
        if exists(folder / name):
            (folder / name).write_text(value)


def remove(folder: Path) -> None:
    """Remove a group; its ended process may take a moment to leave."""
    ends_at = time.monotonic() + REMOVE_S
    while is_dir(folder) and time.monotonic() < ends_at:
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(PAUSE_S)


def has_scopes() -> bool:
    """Whether systemd runs a command in a scope with a limit."""
    if shutil.which(SCOPE[0]) is None:
        return False
    command = [*SCOPE, "-p", "MemoryMax=100M", "--", "true"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, timeout=TRY_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
