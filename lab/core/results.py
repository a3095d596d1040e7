"""Write and read results files, or reports that contain one: one JSON line for each run or
request."""

from __future__ import annotations

import base64
import binascii
import codecs
import errno
import gc
import gzip
import io
import itertools
import os
import re
import zlib
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from lab.core.lines import Line, parse_line, to_json
from lab.core.record import Ceilings, Record
from lab.core.request import RequestRecord
from lab.errors import LabError, printable

MOST_UNPACKED = (
    1 << 26
)  # bytes of a report's records, because a small compressed file could expand without end
MOST_LINE = 1 << 25  # bytes of a line
MOST_NEARBY = 50_000_000  # bytes read of other sessions


@dataclass(frozen=True)
class Contents:
    """The contents of results files, and a sentence about each skipped line."""

    records: tuple[Record, ...] = ()
    ceilings: tuple[Ceilings, ...] = ()
    skipped: tuple[str, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    findings: tuple[Any, ...] = ()  # lines of features that are no runs of steps

    @property
    def all_lines(self) -> list[Any]:
        """Runs, requests and findings."""
        return [*self.records, *self.requests, *self.findings]

    @property
    def measured(self) -> list[Record | RequestRecord]:
        return [*self.records, *self.requests]


def nearby(folders: Iterable[Path], measured: Iterable[Record | RequestRecord] = ()) -> Contents:
    """The newest MOST_NEARBY bytes of results in these folders, except the sessions of
    `measured`."""
    known = {one.session for one in measured}
    n_bytes = 0
    contents = list[Contents]()
    paths = [path for folder in folders for path in folder.glob("*.jsonl") if path.is_file()]
    for path in sorted(paths, key=lambda path: path.name, reverse=True):  # names are times
        with suppress(
            OSError, LabError
        ):  # the user did not name this file, so errors do not matter
            n_bytes += path.stat().st_size
            if n_bytes > MOST_NEARBY:
                break
            contents.append(read([path]))
    found = {
        name: tuple(
            one for each in contents for one in getattr(each, name) if one.session not in known
        )
        for name in ("records", "requests", "findings")
    }
    return Contents(**found, ceilings=tuple(one for each in contents for one in each.ceilings))


def save(path: Path, *lines: Line) -> None:
    """Append lines and sync them to the disk. LabError if they cannot be written; the file is then
    as before."""
    data = "".join(to_json(line) + "\n" for line in lines).encode()
    size = 0
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
    except OSError as problem:
        what = f"The results file {path} cannot be written{' any more' if size else ''}: {problem.strerror}."
        kept = "It contains the earlier runs; this one is lost. " if size else ""
        raise LabError(
            what, f"{kept}Free some space, or choose another folder: --out FOLDER"
        ) from None


def write_whole(path: Path, data: bytes, what: str) -> None:
    """Write a complete file or none, and create its folder. `what` names the file in the LabError.

    What is no regular file, such as a device or a link, is written to and not replaced.
    """
    beside = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)
            return
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as problem:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        words = f"{what} {path} cannot be written: {problem.strerror}."
        raise LabError(words, "Free some space, or choose another path: --out") from None


def new_file(folder: Path, name: str) -> Path:
    """Create `<UTC time>-<name>.jsonl` in `folder`, with a number if that exists already."""
    stem = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:  # two sessions can begin at once
            path = free_path(folder, stem)
            with suppress(FileExistsError), path.open("xb"):
                return path
    except OSError as problem:
        what = f"Results cannot be written to {folder}: {problem.strerror}."
        raise LabError(what, "Choose another folder: --out FOLDER") from None


def free_path(folder: Path, stem: str) -> Path:
    """`<stem>.jsonl` in `folder`, with a number if that exists already."""
    names = (f"{stem}{'' if n == 1 else f'-{n}'}.jsonl" for n in itertools.count(1))
    return next(folder / name for name in names if not (folder / name).exists())


@contextmanager
def unless_empty(path: Path) -> Iterator[None]:
    """Delete the file at the end if it is empty."""
    try:
        yield
    finally:
        if path.exists() and path.stat().st_size == 0:
            path.unlink()


def read(paths: Iterable[str | Path]) -> Contents:
    """Read results files, or all in a folder. Unreadable lines are reported in `skipped`, and
    duplicates count once.

    records = lab.read(["results"]).records
    """
    found: dict[str, list[Any]] = {
        "records": [],
        "ceilings": [],
        "requests": [],
        "findings": [],
    }
    known = set[Hashable]()
    skipped = list[str]()
    thresholds = gc.get_threshold()
    gc.set_threshold(
        0
    )  # collecting garbage would take a quarter of the reading time, and records have no cycles
    try:
        for path in _files(paths):
            problems: dict[str, list[int]] = {}
            for number, line in _lines(path):
                try:
                    if not line:
                        raise ValueError(f"it has over {MOST_LINE:,} bytes")
                    parsed = parse_line(line)
                except ValueError as problem:
                    problems.setdefault(str(problem), []).append(number)
                    continue
                name = "findings"
                if isinstance(parsed, Ceilings):
                    name = "ceilings"
                elif isinstance(parsed, RequestRecord):
                    name = "requests"
                elif isinstance(parsed, Record):
                    name = "records"
                identity = _identity(parsed)
                if identity not in known:
                    known.add(identity)
                    found[name].append(parsed)
                elif name != "ceilings":  # the same ceilings may be in many files
                    problems.setdefault("it is a duplicate", []).append(number)
            for reason, numbers in problems.items():
                more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
                skipped.append(f"{printable(path.name)} line {numbers[0]}{more} skipped: {reason}")
    finally:
        gc.set_threshold(*thresholds)
    made = {name: tuple(lines) for name, lines in found.items()}
    return Contents(**made, skipped=tuple(skipped))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The number of each line that is not blank, and the line; empty if it is longer than
    MOST_LINE."""
    try:
        opened: IO[bytes] = io.BytesIO(_unpack(path)) if path.suffix == ".html" else path.open("rb")
    except OSError as problem:
        what = f"The results file {path} cannot be read: {problem.strerror}."
        raise LabError(what, "Check its permissions.") from None
    with opened as file:
        for number in itertools.count(1):
            line = file.readline(MOST_LINE)
            if not line:
                return
            if len(line) == MOST_LINE:
                while (rest := file.readline(MOST_LINE)) and not rest.endswith(b"\n"):
                    pass
                line = b""
            elif number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.isspace():
                yield number, line


def _identity(line: Line) -> Hashable:
    """What identifies a line in different files, also if another version of the lab wrote it anew."""
    if isinstance(line, RequestRecord):
        request = line.request
        source = (line.session, line.endpoint.url, line.model, to_json(request.asked))
        stamps = (request.started_at, request.sent_ns, request.ended_ns)
        answer = (request.status, request.error, request.events.arrive_ns[:1], request.usage)
        return source, stamps, answer
    if isinstance(line, Record):
        run = line.run
        place = (line.session, run.started_at, run.engine, run.part, run.block, run.variant)
        case = (run.n_prompt, run.n_gen, run.repeat, run.warmup, run.experiment, *run.case.items())
        outcome = (run.status, run.error, run.steps.end_ns, to_json(run.noise))
        if run.imported_from is None:
            return place, case, outcome
        setup = (line.machine, line.model.name, line.model.quantization, line.settings)
        return place, case, outcome, setup
    return to_json(line)


def pack(lines: Iterable[Line]) -> str:
    """The lines of a results file, compressed and base64-encoded for a page."""
    text = "".join(to_json(line) + "\n" for line in lines)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _unpack(path: Path) -> bytes:
    """The lines that `pack` wrote to a page."""
    match = re.search(rb'id="mini-lab-records">([A-Za-z0-9+/=]*)<', path.read_bytes())
    if match is None:
        raise LabError(
            f"{path} contains no records of the lab.",
            "Give a page from lab report, or a .jsonl file.",
        )
    try:
        unpacker = zlib.decompressobj(wbits=31)  # gzip
        lines = unpacker.decompress(base64.b64decode(match[1], validate=True), MOST_UNPACKED)
    except (binascii.Error, zlib.error):
        raise LabError(
            f"The records in {path} are damaged.", "Get the page, or its .jsonl file, again."
        ) from None
    if not unpacker.eof:
        raise LabError(
            f"The records in {path} are truncated or too large.", "Use the .jsonl file instead."
        )
    return lines


def _files(paths: Iterable[str | Path]) -> list[Path]:
    """The results files. In folders, what is no file (pipes, devices, dangling links) is passed
    over."""
    files: list[Path] = []
    for path in map(Path, paths):
        inside = (
            [path]
            if path.is_file()
            else [file for file in sorted(path.glob("*.jsonl")) if file.is_file()]
        )
        if not inside:
            what = (
                f"The folder {path} has no results file (*.jsonl)."
                if path.is_dir()
                else f"{path} is not a file."
            )
            what = what if path.exists() else f"There is no results file {path}."
            raise LabError(
                what, "Name a results file or a folder with results files. To make one: lab measure"
            )
        files += inside
    return files
