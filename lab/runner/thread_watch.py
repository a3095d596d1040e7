"""Look at which processors an engine's threads are, and how often the system interrupts them.

A thread that spins at a barrier is runnable all the time. If two of them are on one processor, each
barrier lasts until the time slice of the spinning one ends, some milliseconds instead of one
microsecond. In 300 looks at llama.cpp beside a busy program, two threads were on one of two
processors 295 times if the program was of another session, and decode was 150 times slower; 134
times if it was of the same session, and decode was 2 to 3 times slower.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lab.core.files import listed
from lab.core.record import Threads

PROC = Path("/proc")
STATE = 0
PROCESSOR = 36
"""Columns of /proc/PID/task/TID/stat after the name in parentheses."""

RUNNABLE = "R"


class Counters(NamedTuple):
    """Of all threads since they started; None: the system does not say."""

    n_switches: int | None  # involuntary
    run_ns: int | None
    wait_ns: int | None  # runnable, but not running


class ThreadWatch:
    """Call `look` during a run, then `finish`."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._folder = proc / str(pid) / "task"
        self._n_looks = 0
        self._n_together = 0
        self._n_shared = 0
        self._n_processors = n_processors(pid)
        self._before = counters(self._folder)

    def look(self) -> None:
        """Count a look in which two threads could run, and one in which they shared a processor."""
        runnable = list(processors(self._folder))
        self._n_looks += 1
        if not 2 <= len(runnable) <= (self._n_processors or 0):
            return
        self._n_together += 1
        if max(collections.Counter(runnable).values()) > 1:
            self._n_shared += 1

    def finish(self) -> Threads | None:
        """What was seen; None where the system shows no threads."""
        after = counters(self._folder)
        if after.n_switches is None or self._n_processors is None:
            return None
        increases = []
        for first, last in zip(self._before, after, strict=True):
            is_known = first is not None and last is not None
            increases.append(max(0, (last or 0) - (first or 0)) if is_known else None)
        return Threads(
            self._n_processors, self._n_looks, self._n_together, self._n_shared, *increases
        )


def n_processors(pid: int) -> int | None:
    """The processors that a process may run on."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    with suppress(OSError):
        return len(os.sched_getaffinity(pid))
    return None


def processors(folder: Path) -> Iterator[int]:
    """The processor of each thread that runs or could run."""
    for task in listed(folder):
        columns = _text(task / "stat").rpartition(")")[2].split()
        if len(columns) > PROCESSOR and columns[STATE] == RUNNABLE:
            yield int(columns[PROCESSOR])


def counters(folder: Path) -> Counters:
    """The sums over all threads."""
    n_switches = None
    times: list[list[int]] = []
    for task in listed(folder):
        for line in _text(task / "status").splitlines():
            name, _, value = line.partition(":")
            if name == "nonvoluntary_ctxt_switches":
                n_switches = (n_switches or 0) + int(value)
        times.append([int(part) for part in _text(task / "schedstat").split()[:2]])
    if not times or min(map(len, times)) < 2:
        return Counters(n_switches, None, None)
    run_ns, wait_ns = map(sum, zip(*times, strict=True))
    return Counters(n_switches, run_ns, wait_ns)


def _text(path: Path) -> str:
    """The text of a file; "" for a thread that has ended."""
    try:
        return path.read_text()
    except OSError:
        return ""
