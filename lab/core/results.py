"""Write and read results files, or pages that contain one: one JSON line for each run or
request."""

from __future__ import annotations

import base64
import binascii
import codecs
import dataclasses
import errno
import gc
import gzip
import io
import itertools
import os
import re
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from lab.core import files
from lab.core.arguments import Paths, StrPath
from lab.core.lines import Line, ResultLine, parse_line, to_json
from lab.core.lists import plural
from lab.core.record import Ceilings, Record
from lab.core.request import RequestRecord
from lab.errors import LabError, printable, warn

MOST_UNPACKED = 1 << 26  # bytes of a page's records
LEAST_UNPACKED = 1 << 20
MOST_RATIO = 40
"""Records of a page have up to LEAST_UNPACKED bytes, or MOST_RATIO times their packed ones: a small
compressed file could expand without end."""

MOST_PAGE = 1 << 27  # bytes of a page
MOST_LINE = 1 << 25  # bytes of a line
MOST_PIECES = 4  # of MOST_LINE bytes, of a longer line that is skipped
MOST_NEARBY = 50_000_000  # bytes read of other sessions
MOST_SKIPPED = 10_000  # lines of a file
MOST_REASONS = 20
MOST_NAMED = 3  # files in a message
MEASURED = (Record, RequestRecord)


@dataclass(frozen=True)
class Contents:
    """The contents of results files, and a sentence about each skipped line."""

    records: tuple[Record, ...] = ()
    ceilings: tuple[Ceilings, ...] = ()
    skipped: tuple[str, ...] = ()
    requests: tuple[RequestRecord, ...] = ()
    findings: tuple[ResultLine, ...] = ()  # lines of features that are no runs of steps

    @property
    def all_lines(self) -> list[ResultLine]:
        """Runs, requests and findings."""
        return [*self.records, *self.requests, *self.findings]

    @property
    def measured(self) -> list[Record | RequestRecord]:
        return [*self.records, *self.requests]


Readable = Contents | StrPath | Iterable[object]
"""What functions of records take: records, what was read, a path, or a list of these."""


class NotSaved(LabError):
    """A results file that cannot be written: no setting of llama.cpp helps."""


def save(path: Path, *lines: Line) -> None:
    """Append lines and sync them to the disk.

    NotSaved if they cannot be written; the file is then as before.
    """
    data = "".join(to_json(line) + "\n" for line in lines).encode()
    size = 0
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                _write_and_sync(file, data)
            except OSError:
                file.truncate(size)
                raise
    except OSError as problem:
        raise _not_saved(path, problem, has_earlier_runs=size > 0) from None


def _write_and_sync(file: io.FileIO, data: bytes) -> None:
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def _not_saved(path: Path, problem: OSError, has_earlier_runs: bool) -> NotSaved:
    hint = "Free some space, or choose another folder: --out FOLDER"
    if has_earlier_runs:
        message = f"The results file {path} cannot be written any more: {problem.strerror}."
        return NotSaved(message, f"It contains the earlier runs; this one is lost. {hint}")
    return NotSaved(f"The results file {path} cannot be written: {problem.strerror}.", hint)


def write_whole(path: Path, data: bytes, what: str) -> None:
    """Write a complete file or none, and create its folder. `what` names the file in the LabError.

    What is no regular file, such as a device or a link, is written to and not replaced.
    """
    path = files.expanded(path)
    part = path.with_name(f"{path.name}.part-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or (files.exists(path) and not files.is_file(path)):
            path.write_bytes(data)
            return
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as problem:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        message = f"{what} {path} cannot be written: {problem.strerror}."
        hint = "Choose another path, or check the permissions of this one."
        if problem.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            hint = "Free some space, or choose another path."
        raise LabError(message, hint) from None


def new_file(folder: Path, name: str) -> Path:
    """Create `<UTC time>-<name>.jsonl` in `folder`, with a number if that exists already."""
    folder = files.expanded(folder)
    stem = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:  # two sessions can begin at once
            path = free_path(folder, stem)
            with suppress(FileExistsError), path.open("xb"):
                return path
    except OSError as problem:
        message = f"Results cannot be written to {folder}: {problem.strerror}."
        raise LabError(message, "Choose another folder: --out FOLDER") from None


def free_path(folder: Path, stem: str) -> Path:
    """`<stem>.jsonl` in `folder`, with a number if that exists already."""
    path = folder / f"{stem}.jsonl"
    for number in itertools.count(2):
        if not files.exists(path):
            break
        path = folder / f"{stem}-{number}.jsonl"
    return path


@contextmanager
def unless_empty(path: Path) -> Iterator[None]:
    """Delete the file at the end if it is empty."""
    try:
        yield
    finally:
        if files.exists(path) and path.stat().st_size == 0:
            path.unlink()


def nearby(folders: Iterable[Path], measured: Iterable[ResultLine] = ()) -> Contents:
    """The newest MOST_NEARBY bytes of results in these folders, except the sessions of `measured`.

    Files that cannot be read are passed over: the user did not name them.
    """
    sessions = {record.session for record in measured}
    paths: list[Path] = []
    for folder in folders:
        paths += [path for path in files.listed(folder, "*.jsonl") if files.is_file(path)]
    lines = _Lines()
    n_bytes = 0
    for path in sorted(paths, key=lambda path: path.name, reverse=True):  # names are times
        with suppress(OSError, LabError):
            n_bytes += path.stat().st_size
            if n_bytes > MOST_NEARBY:
                break
            lines.read(path)
    contents = lines.contents()
    return Contents(
        records=tuple(line for line in contents.records if line.session not in sessions),
        requests=tuple(line for line in contents.requests if line.session not in sessions),
        findings=tuple(line for line in contents.findings if line.session not in sessions),
        ceilings=contents.ceilings,
    )


def read(paths: Iterable[StrPath]) -> Contents:
    """Read results files, or all in a folder.

    Unreadable lines are reported in `skipped`, and duplicates count once.

        records = lab.read(["results"]).records
    """
    lines = _Lines()
    thresholds = gc.get_threshold()
    # Collecting garbage would take a quarter of the reading time, and records have no cycles.
    gc.set_threshold(0)
    try:
        for path in _files(paths):
            lines.read(path)
    finally:
        gc.set_threshold(*thresholds)
    return lines.contents()


def contents_of(paths: Paths) -> Contents:
    """What a user's results files hold, with a warning of what is skipped. LabError if that is
    nothing.
    """
    names = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not names:
        raise LabError("No results file is named.", 'Name some, such as "results".')
    contents = read(names)
    if not contents.all_lines and not contents.ceilings:
        shown_names = ", ".join(map(str, names[:MOST_NAMED]))
        reason = contents.skipped[0] if contents.skipped else "it is empty"
        raise LabError(
            f"{shown_names} holds no results of the lab: {reason}.",
            "Name a results file (.jsonl), or a page of lab report. Results of llama-bench are "
            "imported first: lab import FILE",
        )
    if contents.skipped:
        more = len(contents.skipped) - 1
        others = f" (and {plural(more, 'more note')}: see skipped)" if more else ""
        warn(f"{contents.skipped[0]}{others}")
    return contents


def lines_of(records: Readable) -> list[Any]:
    """The lines that a function of records is given: records, contents, paths, or a list of them.

    LabError for anything else, such as a table.
    """
    if isinstance(records, Contents):
        return records.all_lines
    if isinstance(records, (str, os.PathLike)):
        return contents_of(records).all_lines
    if isinstance(records, Record | RequestRecord):
        return [records]
    if hasattr(records, "keys") or not isinstance(records, Iterable):
        raise _no_records(records)
    lines: list[Any] = []
    paths: list[StrPath] = []
    for item in records:
        if isinstance(item, MEASURED):
            lines.append(item)
        elif isinstance(item, (str, os.PathLike)):
            paths.append(item)
        else:
            lines += _lines_of_item(item)
    if paths:
        lines += contents_of(paths).all_lines
    return lines


def measured_of(records: Readable) -> list[Record | RequestRecord]:
    """The runs and requests of what a function is given. LabError if it holds others only."""
    lines = lines_of(records)
    measured = [line for line in lines if isinstance(line, MEASURED)]
    if lines and not measured:
        raise LabError(
            f"These results hold no runs: they are {type(lines[0]).__name__}s.",
            "Give the results of a function that measures runs, such as lab measure",
        )
    return measured


def _lines_of_item(item: object) -> list[Any]:
    """The lines of an item that is neither a record nor a path: a list, or a feature's own line."""
    if isinstance(item, (Contents, list, tuple)):
        return lines_of(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [item]
    raise _no_records(item)


def _no_records(given: object) -> LabError:
    kind = type(given).__name__
    return LabError(
        f"Records are needed, and this is a {kind}.",
        "Give what lab.measure or lab.read returned, or the path of a results file.",
    )


@dataclass
class _Skipped:
    """The lines of a file that are skipped: of each reason the first line, and how many."""

    name: str
    n_lines: int = 0
    first: dict[str, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, number: int, reason: str) -> None:
        self.n_lines += 1
        if len(self.first) >= MOST_REASONS and reason not in self.first:
            reason = "for other reasons"
        self.first.setdefault(reason, number)
        self.counts[reason] += 1

    def sentences(self) -> Iterator[str]:
        for reason, number in self.first.items():
            place = f"line {number}"
            if self.counts[reason] > 1:
                place += f" and {self.counts[reason] - 1:,} more"
            yield f"{self.name} {place} skipped: {reason}"
        if self.n_lines == MOST_SKIPPED:
            yield f"{self.name} is not read any further: {MOST_SKIPPED:,} lines were skipped"


class _Lines:
    """Lines of several files by kind, each once."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.requests: list[RequestRecord] = []
        self.ceilings: list[Ceilings] = []
        self.findings: list[ResultLine] = []
        self.skipped: list[str] = []
        self._identities: set[Hashable] = set()

    def contents(self) -> Contents:
        return Contents(
            records=tuple(self.records),
            ceilings=tuple(self.ceilings),
            skipped=tuple(self.skipped),
            requests=tuple(self.requests),
            findings=tuple(self.findings),
        )

    def read(self, path: Path) -> None:
        """Add the lines of a file; those that cannot be read are skipped, with the reason.

        LabError for a file that cannot be read.
        """
        skipped = _Skipped(printable(path.name))
        try:
            for number, line in _numbered_lines(path):
                try:
                    self._add(line)
                except ValueError as problem:
                    skipped.add(number, str(problem))
                if skipped.n_lines == MOST_SKIPPED:
                    break
        except OSError as problem:
            message = f"The results file {path} cannot be read: {problem.strerror}."
            hint = "Give a results file (.jsonl), or a page of lab report."
            if isinstance(problem, PermissionError):
                hint = "Check its permissions."
            raise LabError(message, hint) from None
        self.skipped += skipped.sentences()

    def _add(self, line: bytes) -> None:
        if not line:
            raise ValueError(f"it has over {MOST_LINE:,} bytes")
        parsed = parse_line(line)
        identity = _identity(parsed)
        is_duplicate = identity in self._identities
        self._identities.add(identity)
        if isinstance(parsed, Ceilings):
            if not is_duplicate:  # the same ceilings may be in many files
                self.ceilings.append(parsed)
            return
        if is_duplicate:
            raise ValueError("it is a duplicate")
        if isinstance(parsed, Record):
            self.records.append(parsed)
        elif isinstance(parsed, RequestRecord):
            self.requests.append(parsed)
        else:
            self.findings.append(parsed)


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The number of each line that is not blank, and the line; empty if longer than MOST_LINE."""
    with _opened(path) as file:
        for number in itertools.count(1):
            line = file.readline(MOST_LINE)
            if not line:
                return
            if len(line) == MOST_LINE:
                _skip_to_next_line(file)
                line = b""
            elif number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.isspace():
                yield number, line


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".html":
        return io.BytesIO(_unpack(path))
    return files.opened(path)


def _skip_to_next_line(file: IO[bytes]) -> None:
    """Read to the end of a long line; of an endless one to the end of the file."""
    for _ in range(MOST_PIECES):
        piece = file.readline(MOST_LINE)
        if not piece or piece.endswith(b"\n"):
            return
    file.seek(0, os.SEEK_END)


def _identity(line: Line) -> Hashable:
    """What identifies a line in different files, also if another version of the lab wrote it
    anew."""
    if isinstance(line, RequestRecord):
        request = line.request
        source = (line.session, line.endpoint.url, line.model, to_json(request.asked))
        stamps = (request.started_at, request.sent_ns, request.ended_ns)
        answer = (request.status, request.error, request.events.arrive_ns[:1], request.usage)
        return source, stamps, answer
    if isinstance(line, Record):
        run = line.run
        place = (line.session, run.started_at, run.engine, run.part, run.block, run.variant)
        case = (
            run.n_prompt,
            run.n_gen,
            run.repeat,
            run.warmup,
            run.experiment,
            *run.case.items(),
        )
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
    page = files.read(path, "The page", "Use the .jsonl file instead.", MOST_PAGE)
    match = re.search(rb'id="mini-lab-records">([A-Za-z0-9+/=]*)<', page)
    if match is None:
        raise LabError(
            f"{path} contains no records of the lab.",
            "Give a page from lab report, or a .jsonl file.",
        )
    try:
        unpacker = zlib.decompressobj(wbits=31)  # gzip
        packed = base64.b64decode(match[1], validate=True)
        most = min(MOST_UNPACKED, max(LEAST_UNPACKED, MOST_RATIO * len(packed)))
        lines = unpacker.decompress(packed, most)
    except (binascii.Error, zlib.error):
        raise LabError(
            f"The records in {path} are damaged.", "Get the page, or its .jsonl file, again."
        ) from None
    if not unpacker.eof:
        raise LabError(
            f"The records in {path} are truncated or too large.",
            "Use the .jsonl file instead.",
        )
    return lines


def _files(paths: Iterable[StrPath]) -> list[Path]:
    """The results files. In folders, what is no file (pipes, devices, dangling links) is passed
    over."""
    named: list[Path] = []
    for path in map(files.expanded, paths):
        if files.is_file(path):
            named.append(path)
            continue
        of_folder = [file for file in files.listed(path, "*.jsonl") if files.is_file(file)]
        if not of_folder:
            raise _no_results(path)
        named += of_folder
    return named


def _no_results(path: Path) -> LabError:
    reason = files.obstacle(path)
    if reason:
        return LabError(f"{path} cannot be read: {reason}.", "Check its permissions.")
    if files.is_dir(path):
        message = f"The folder {path} has no results file (*.jsonl)."
    elif files.exists(path):
        message = f"{path} is not a file."
    else:
        message = f"There is no results file {path}."
    hint = "Name a results file or a folder with results files. To make one: lab measure"
    return LabError(message, hint)
