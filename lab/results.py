"""Results files: one JSON line a run, appended when the run ends, read back line by line.

A line that is broken, newer than this lab, or read already is named and passed over; the others are read.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from lab.errors import LabError
from lab.record import Ceilings, Record, parse_line, to_json


@dataclass(frozen=True)
class Reading:
    """What was read from results files, and one sentence for each line that was not."""

    records: tuple[Record, ...]
    ceilings: tuple[Ceilings, ...]
    skipped: tuple[str, ...]


def append(path: Path, record: Record | Ceilings) -> None:
    """Append one line and flush it to the disk. After a failed write the file ends as before, whole."""
    line = (to_json(record) + "\n").encode(errors="surrogateescape")
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            if file.write(line) != len(line):
                raise OSError("the disk is full")
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def free_path(folder: Path, stem: str) -> Path:
    """`<stem>.jsonl` in `folder`, or with a number where that exists already."""
    names = (f"{stem}{'' if n == 1 else f'-{n}'}.jsonl" for n in itertools.count(1))
    return next(folder / name for name in names if not (folder / name).exists())


def read(paths: Iterable[str | Path]) -> Reading:
    """Records of results files, or of folders of them. Lines that cannot be read are named, not fatal.

    A line that was read before (a file and a concatenation with it, say) does not count twice.
    """
    records: list[Record] = []
    ceilings: list[Ceilings] = []
    skipped: list[str] = []
    seen: set[bytes] = set()
    for path in _files(paths):
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                digest = hashlib.blake2b(line, digest_size=16).digest()
                if digest in seen:
                    skipped.append(f"{path.name} line {number} skipped: the same run was read before")
                    continue
                seen.add(digest)
                try:
                    parsed = parse_line(line)
                    if isinstance(parsed, Record):
                        records.append(parsed)
                    else:
                        ceilings.append(parsed)
                except ValueError as problem:
                    skipped.append(f"{path.name} line {number} skipped: {problem}")
    return Reading(tuple(records), tuple(ceilings), tuple(skipped))


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as problem:
        raise LabError(
            f"The results file {path} cannot be read: {problem.strerror}.", "Check its permissions."
        ) from None


def _files(paths: Iterable[str | Path]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(path.glob("*.jsonl"))
            if not inside:
                raise LabError(f"There is no results file (*.jsonl) in the folder {path}.", "Make one: lab measure")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise LabError(f"There is no results file {path}.", "See what there is: ls results")
    return found
