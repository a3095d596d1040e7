"""A results file with one field changed, and what every command that reads results does with it.

A command may give a result or a LabError. A traceback, a warning of Python, a figure that is no
number, or more time and memory than a file of this size may take is a finding.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core.lines import parse_line
from tests.support.bounds import largest
from tests.support.command import run_lab

RESULTS = Path("results")
START_S = 12.0  # of CPU time that a command may take for the smallest file, on a busy machine
START_BYTES = 400_000_000
S_A_MB = 1.0
BYTES_A_BYTE = 50
"""What a command may take for a file, beyond its start: 1 s and 50 MB for each MB."""
MOST_BYTES = 3_000_000_000  # of address space beyond what the process had: then MemoryError
LINES = ("first", "last", "half", "all")  # which lines are changed
COMMANDS: dict[str, tuple[str, ...]] = {
    "show": ("show", "FILE", "--details"),
    "json": ("show", "FILE", "--json"),
    "plot": ("plot", "FILE", "-o", "OUT"),
    "report": ("report", "FILE", "-f", "OUT/page.html"),
    "explain": ("explain", "FILE", "--details", "--no-plot"),
    "compare": ("compare", "FILE", "SAMPLE"),
    "bench": ("export", "FILE"),
    "runs": ("export", "FILE", "--as", "csv"),
    "steps": ("export", "FILE", "--as", "csv", "--table", "steps"),
    "why": ("why", "SAMPLE", "FILE", "--budget", "0", "--no-plot", "-o", "OUT"),
    "why-prefill": ("why", "FILE", "SAMPLE", "--budget", "0", "--prefill", "-o", "OUT"),
    "predict": ("predict", "-d", "here", "--ceilings", "FOLDER"),
}
NO_NUMBER = re.compile(r"(?<![\w./-])(?:nan|-?inf)(?![\w.-])")


class TooLong(BaseException):
    """The command took more CPU time than it may."""


@dataclass(frozen=True)
class Case:
    """One changed field of a sample: its place, such as run.steps.end_ns, the kind of change, and
    the lines that are changed."""

    sample: str
    field: str
    change: str
    lines: str


@dataclass(frozen=True)
class Finding:
    case: Case
    command: str
    problem: str  # with the place in the code, so that equal problems are counted once
    details: str


def fields(value: Any, place: str = "") -> Iterator[str]:
    """The places of a JSON document; of a list of objects the first and the last."""
    if place:
        yield place
    prefix = f"{place}." if place else ""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from fields(part, prefix + key)
    elif isinstance(value, list) and value and isinstance(value[0], dict | list):
        for index in dict.fromkeys([0, len(value) - 1]):
            yield from fields(value[index], f"{prefix}{index}")


def in_first(change: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """The change of the first part of a list."""
    return lambda name, value: [change(name, value[0]), *value[1:]] if value else []


def in_last(change: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: [*value[:-1], change(name, value[-1])] if value else []


def in_all(change: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: [change(name, part) for part in value]


NUMBERS: dict[str, Callable[[str, Any], Any]] = {
    "zero": lambda name, value: 0,
    "one": lambda name, value: 1,
    "largest": lambda name, value: largest(name),
    "negative": lambda name, value: -1,
    "half": lambda name, value: value // 2 if isinstance(value, int) else value / 2,
    "tiny": lambda name, value: 1e-300,
    "thousandfold": lambda name, value: value * 1000,
}
TEXTS: dict[str, Callable[[str, Any], Any]] = {
    "no letters": lambda name, value: "",
    "10,000 letters": lambda name, value: "x" * 10_000,
    "another word": lambda name, value: "decode" if value != "decode" else "prefill",
    "marks": lambda name, value: "[b]$x_{1$%s{0}\\frac<&\x1b[2J",
}
ANY: dict[str, Callable[[str, Any], Any]] = {
    "null": lambda name, value: None,
    "a text": lambda name, value: "x",
    "a number": lambda name, value: 7,
    "a list": lambda name, value: [],
    "an object": lambda name, value: {},
}
COLUMNS: dict[str, Callable[[str, Any], Any]] = {
    "backwards": lambda name, value: value[::-1],
    "one less": lambda name, value: value[:-1],
    "twice": lambda name, value: value * 2,
}
OF_DOCUMENT = ("missing", "swapped")  # with the field behind it


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def changes(value: Any) -> dict[str, Callable[[str, Any], Any]]:
    """The changes that a value of this type can have, by name."""
    if is_number(value):
        return NUMBERS | ANY
    if isinstance(value, str):
        return TEXTS | ANY
    if isinstance(value, list) and value and not isinstance(value[0], dict | list):
        parts = NUMBERS if is_number(value[0]) else TEXTS
        columns = dict(COLUMNS)
        for name, change in parts.items():
            columns[f"first {name}"] = in_first(change)
            columns[f"last {name}"] = in_last(change)
            columns[f"all {name}"] = in_all(change)
        return columns | ANY
    if isinstance(value, list):
        return COLUMNS | ANY
    return ANY


def part_of(document: Any, place: str) -> Any:
    """The part of a JSON document at a place. KeyError where it has none."""
    for key in filter(None, place.split(".")):
        try:
            document = document[int(key) if isinstance(document, list) else key]
        except (IndexError, TypeError, ValueError):
            raise KeyError(place) from None
    return document


def changed(document: dict[str, Any], case: Case) -> dict[str, Any]:
    """A copy of a line with the case's change. KeyError where it has no such field."""
    document = json.loads(json.dumps(document))
    folder, _, key = case.field.rpartition(".")
    parent = part_of(document, folder)
    value = part_of(document, case.field)
    index: Any = int(key) if isinstance(parent, list) else key
    if case.change == "missing":
        del parent[index]
    elif case.change == "swapped":
        keys = list(range(len(parent))) if isinstance(parent, list) else list(parent)
        neighbour = keys[(keys.index(index) + 1) % len(keys)]
        parent[index] = parent[neighbour]
        parent[neighbour] = value
    else:
        parent[index] = changes(value)[case.change](key, value)
    return document


def file_of(case: Case) -> tuple[bytes, bool]:
    """The changed file, and whether the lab reads any changed line of it."""
    lines = (RESULTS / case.sample).read_text(encoding="utf-8").splitlines()
    documents = [json.loads(line) for line in lines]
    places = list(range(len(documents)))
    is_read = False
    with_field = []
    for number in places:
        try:
            changed(documents[number], case)
        except KeyError:
            continue
        with_field.append(number)
    for number in chosen(with_field, case.lines):
        documents[number] = changed(documents[number], case)
        is_read = is_read or can_be_read(documents[number])
    return b"".join(json.dumps(line).encode() + b"\n" for line in documents), is_read


def chosen(numbers: list[int], lines: str) -> list[int]:
    if lines == "first":
        return numbers[:1]
    if lines == "last":
        return numbers[-1:]
    if lines == "half":
        return numbers[::2]
    return numbers


def can_be_read(document: dict[str, Any]) -> bool:
    try:
        parse_line(json.dumps(document).encode() + b"\n")
    except ValueError:
        return False
    return True


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """TooLong after so much CPU time, MemoryError beyond MOST_BYTES."""

    def stop(*_: object) -> None:
        raise TooLong

    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") + MOST_BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def memory(name: str) -> int:
    """Bytes of this process, by the kernel's name."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def place_of(error: BaseException) -> str:
    """Where an error was raised: the innermost line of the lab, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    of_lab = [frame for frame in frames if "/lab/" in frame.filename]
    name = type(error).__name__
    if not of_lab:
        return name
    frame = of_lab[-1]
    return f"{name} in {frame.filename.partition('/lab/')[2]}:{frame.lineno} {frame.name}"


def run(
    command: str, case: Case, folder: Path, most_s: float, most_bytes: int
) -> Finding | None:
    """Run a command on `folder`/x.jsonl and judge what came out; None if all is well."""
    names = {
        "FILE": str(folder / "x.jsonl"),
        "FOLDER": str(folder),
        "OUT": str(folder / "out"),
        "SAMPLE": str(RESULTS / case.sample),
    }
    words = [
        names.get(word, word.replace("OUT/", names["OUT"] + "/")) for word in COMMANDS[command]
    ]
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    forget_peak()
    used = memory("VmRSS")
    began = time.process_time()
    try:
        with at_most(3 * most_s), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            _, out, _ = run_lab(*words)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        details = "".join(traceback.format_exception(error))
        return Finding(case, command, place_of(error), details)
    took_s = time.process_time() - began
    took_bytes = memory("VmHWM") - used
    if took_s > most_s:
        return Finding(case, command, "too slow", f"{took_s:.1f} s of {most_s:.1f}")
    if took_bytes > most_bytes:
        return Finding(case, command, "too large", f"{took_bytes / 1e6:.0f} MB")
    pattern = r"NaN|Infinity" if command == "json" else NO_NUMBER
    match = re.search(pattern, out)
    if match is not None:
        start = max(0, match.start() - 200)
        return Finding(case, command, f"{match[0]} shown", out[start : match.end() + 100])
    return None


def attack(
    case: Case, folder: Path, commands: tuple[str, ...] = tuple(COMMANDS)
) -> tuple[list[Finding], bool]:
    """The findings of a case, and whether the lab reads a changed line at all."""
    data, is_read = file_of(case)
    (folder / "x.jsonl").write_bytes(data)
    most_s = START_S + S_A_MB * len(data) / 1e6
    most_bytes = START_BYTES + BYTES_A_BYTE * len(data)
    findings = []
    for command in commands if is_read else ():
        finding = run(command, case, folder, most_s, most_bytes)
        if finding is not None:
            findings.append(finding)
    return findings, is_read
