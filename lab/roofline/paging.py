"""Decode of a model that is larger than memory: how long each token waits for the disk.

With mmap every token goes through the file in order, and the kernel reads again what it has
evicted. What it must read lies between two bounds: the part of the file that has no room, if the
kernel kept the rest; and the whole file, if it always evicted what was used longest ago. Measured,
it changes from start to start: few bytes in small pieces, or the whole file quickly. The wait for
them changes less. So the law has one number for a machine, its kernel and a disk: the seconds of
wait for each byte of the file, as long as the file does not fit. Its range is for a further start:
by Student's t on logarithms, and at least that of the starts measured, a little wider. Where the
file nearly fits, the wait may be anything from none to that of the whole file.
"""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from lab.core.bounds import Count, Number, Size, Text, Whole
from lab.core.lists import grouped
from lab.core.record import SCHEMA, Machine, Model, Settings
from lab.core.stats import Range, further_half_width

MOST_COLD = 0.01
"""The share of a file's pages that may be in the page cache before the file counts as dropped."""

NEARLY = 0.95
FITS = 1.02
"""From these shares of the file that have room on, it nearly fits, and fits."""

WIDER = 1.1
"""A range is at least this factor wider at each end than what was measured."""

CONFIDENCE = 0.9
"""The share of further starts that a range shall hold."""

LEAST_STARTS = 4


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """Some tokens decoded by a fresh engine with limited memory; a line of a results file."""

    session: Text
    machine: Machine
    model: Model
    settings: Settings
    started_at: Text
    kernel: Text | None  # the system's release
    disk: Text | None  # the number of the device that holds the file
    round: Count
    file_bytes: Size
    limit_bytes: Size | None  # of the whole process; None: no limit
    own_bytes: Size | None  # memory of the process beside the file's pages
    resident: Number | None  # share of the file's pages in the cache before; None: unknown
    n_tokens: Count
    decode_s: Number  # of all tokens
    read_bytes: Size | None  # from disks in this time
    n_faults: Count | None  # major page faults in this time
    disk_s: Number | None  # for the same file, read in order after its pages were dropped
    command: tuple[Text, ...] | None = None
    schema: Whole = SCHEMA
    kind: Text = "memory"
    is_good: ClassVar[bool] = True  # a line is written only if it is whole
    is_warmup: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.decode_s < math.inf or self.n_tokens < 1 or self.file_bytes < 1:
            raise ValueError("decode with limited memory needs tokens, a file and a time")
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise ValueError("a limit of memory is positive")
        if self.disk_s is not None and not 0 < self.disk_s < math.inf:
            raise ValueError("reading a file needs a time")

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def token_s(self) -> float:
        return self.decode_s / self.n_tokens

    @property
    def room(self) -> float | None:
        """The share of the file that has room in memory; None: without a limit, or not known."""
        if self.limit_bytes is None or self.own_bytes is None:
            return None
        return max(0.0, (self.limit_bytes - self.own_bytes) / self.file_bytes)

    @property
    def read_share(self) -> float | None:
        """The share of the file that is read from the disk for each token."""
        if self.read_bytes is None:
            return None
        return self.read_bytes / self.n_tokens / self.file_bytes

    @property
    def is_confirmed(self) -> bool:
        """Whether the file's pages were dropped before, so that the limit holds for them too."""
        if self.limit_bytes is None:
            return True
        return self.resident is not None and self.resident <= MOST_COLD


@dataclass(frozen=True)
class PagingLaw:
    """The wait of each token on a disk, in seconds for each byte of the file."""

    wait_s: float
    low_s: float
    high_s: float
    n_starts: int

    def token_s(self, file_bytes: int, room: float, compute_s: Range) -> Range:
        """The range of a token's time, from the range without a limit."""
        fastest_s, slowest_s = compute_s
        if room >= FITS:
            return compute_s
        longest_s = slowest_s + file_bytes * self.high_s
        if room >= NEARLY:
            return fastest_s, longest_s
        return fastest_s + file_bytes * self.low_s, longest_s

    def wait_of(self, file_bytes: int, room: float) -> float | None:
        """The expected wait of a token; None where the file nearly fits."""
        if room >= FITS:
            return 0.0
        if room >= NEARLY:
            return None
        return file_bytes * self.wait_s


def learn(lines: Sequence[MemoryLine]) -> PagingLaw | None:
    """The law of lines of one machine, kernel and disk; None if they are too few."""
    waits = []
    for lines_of_file in grouped(lines, file_of).values():
        compute_s = compute_span(lines_of_file)
        if compute_s is not None:
            waits += waits_of(lines_of_file, math.sqrt(compute_s[0] * compute_s[1]))
    if len(waits) < LEAST_STARTS:
        return None
    logs = list(map(math.log, waits))
    middle = statistics.fmean(logs)
    half = further_half_width(logs, CONFIDENCE)
    low_s = min(min(waits) / WIDER, math.exp(middle - half))
    high_s = max(max(waits) * WIDER, math.exp(middle + half))
    return PagingLaw(statistics.median(waits), low_s, high_s, len(waits))


def file_of(line: MemoryLine) -> tuple[str, str | None, int, int]:
    """What has the same time without a limit: a model's file, with a number of threads."""
    model = line.model
    return model.name, model.quantization, line.file_bytes, line.settings.n_threads


def compute_span(lines: Sequence[MemoryLine]) -> Range | None:
    """The range of a token's time without a limit, for the lines of one file."""
    times_s = [line.token_s for line in lines if line.limit_bytes is None]
    if not times_s:
        return None
    return min(times_s) / WIDER, max(times_s) * WIDER


def waits_of(lines: Sequence[MemoryLine], compute_s: float) -> list[float]:
    """The waits for each byte of the file, of the starts in which it did not fit."""
    waits = []
    for line in lines:
        if line.is_confirmed and line.room is not None and line.room < NEARLY:
            wait_s = (line.token_s - compute_s) / line.file_bytes
            if wait_s > 0:
                waits.append(wait_s)
    return waits


def disk_of(path: Path) -> str:
    """The number of the device that holds a file."""
    return str(path.stat().st_dev)


def in_same_place(
    lines: Sequence[MemoryLine], machine: Machine, disk: str | None
) -> list[MemoryLine]:
    """The lines of this machine, its kernel and a disk; with disk None, of any disk."""
    same = []
    for line in lines:
        is_here = (line.machine.cpu, line.kernel) == (machine.cpu, platform.release())
        if is_here and disk in (None, line.disk):
            same.append(line)
    return same
