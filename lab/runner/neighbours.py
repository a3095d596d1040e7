"""Programs that keep cores busy, planted to see what they do to a measurement."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lab.core.files import exists, is_dir
from lab.errors import LabError
from lab.process import spawning

SESSION = "session"  # the lab's own: one terminal
OTHER_SESSION = "other session"  # another terminal, or a service
GROUP = "control group"  # a container
CPU_GROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))
GROUP_NAME = "minilab-beside-{pid}-{number}"
REMOVE_S = 5

pids: list[int] = []
"""The planted programs: part of what is measured beside them, and no noise."""

PAUSE_S = 0.05

_SPIN = """
import os, sys
from lab.process.spawning import end_with_parent

group, is_apart = sys.argv[1:]
if group:
    open(group, "w").write("0")
if is_apart:
    child = os.fork()  # the leader of a process group cannot leave its session
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    os.setsid()
end_with_parent()
print(os.getpid(), flush=True)
while True:
    pass
"""


class NoPlace(LabError):
    """The system has no such place, or this user may not make it."""


@contextmanager
def planted(n: int, place: str = OTHER_SESSION) -> Iterator[None]:
    """Keep `n` cores busy by programs in a place. NoPlace where that is not possible."""
    if place != SESSION and not hasattr(os, "fork"):
        raise NoPlace("A neighbour in another session needs Linux or macOS.", "Leave it out.")
    with ExitStack() as stack:
        for number in range(n):
            folder = stack.enter_context(_group(number)) if place == GROUP else None
            stack.enter_context(_program(folder, place == OTHER_SESSION))
        yield


@contextmanager
def _program(group: Path | None, is_apart: bool) -> Iterator[None]:
    """One program; it ends when its pipe is closed, also after a crash of this process."""
    path = str(group / "cgroup.procs") if group else ""
    process = spawning.start(
        _SPIN, path, "apart" if is_apart else "", stderr=subprocess.DEVNULL
    )
    try:
        pid = process.stdout.readline() if process.stdout else b""
        if not pid:
            raise NoPlace(
                "A program that keeps a core busy did not start.",
                "A control group needs root on Linux.",
            )
        pids.append(int(pid))
        yield
    finally:
        pids.clear()
        if process.stdin:
            process.stdin.close()
        spawning.wait_for_end(process)


@contextmanager
def _group(number: int) -> Iterator[Path]:
    """A control group with a share of its own, which is removed at the end."""
    for root in CPU_GROUPS:
        if exists(root / "cpu.shares") or exists(root / "cgroup.controllers"):
            break
    else:
        raise NoPlace("This system has no control groups.", "Leave this place out.")
    folder = root / GROUP_NAME.format(pid=os.getpid(), number=number)
    try:
        folder.mkdir()
    except OSError as problem:
        what = f"No control group can be made in {root}: {problem.strerror}."
        raise NoPlace(what, "Run as root, or leave this place out.") from None
    try:
        yield folder
    finally:
        deadline = time.monotonic() + REMOVE_S
        while is_dir(folder) and time.monotonic() < deadline:
            with suppress(OSError):
                folder.rmdir()
            time.sleep(PAUSE_S)
