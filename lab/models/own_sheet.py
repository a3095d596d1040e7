"""The datasheet of a reader's machine: figures that the lessons measured, in a TOML file.

It says of a machine what `lab predict --device` takes in words (`described`), and the rates that
`--measured` takes: it is another way to write both. Each row is a figure of a lesson, so that
figures of several sessions stand side by side.
"""

from __future__ import annotations

import json
import statistics
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.core import files
from lab.core.lists import join_and
from lab.errors import LabError, printable

NAME = "datasheet.toml"
MOST_BYTES = 100_000
MOST_ROWS = 500
SMALLEST = 1e-9
LARGEST = 1e12
HINT = (
    "lesson.note in the notebooks writes it (notebook 9 has the lines); without it, describe the "
    'machine: --device "gbps=30 cores=2 avx2"'
)
FIRST_LINE = (
    "# What the lessons measured on this machine: lab predict --device datasheet.toml\n"
)


@dataclass(frozen=True)
class SheetFigure:
    """A figure of the sheet: its unit, and what it is."""

    unit: str
    meaning: str


READ_RATE = "read_rate"
TOKEN = "w"
POSITION = "k"
PREFILL = "prefill"
FIGURES = {
    READ_RATE: SheetFigure("GB/s", "the most that kernels or a plain read get from memory"),
    "ridge": SheetFigure("FLOPs/byte", "above it arithmetic limits a step, below it memory"),
    "kernel": SheetFigure("GFLOP/s", "this quantization's kernel with many tokens at once"),
    TOKEN: SheetFigure("ms", "a step of one token without context"),
    POSITION: SheetFigure("us", "what one more position adds to such a step"),
    PREFILL: SheetFigure("tokens/s", "prefill of 512 tokens"),
    "longest_gap": SheetFigure("ms", "the longest wait between two tokens"),
    "alone": SheetFigure("ms", "a step of a batch with one user"),
    "user": SheetFigure("ms", "what each further user adds to such a step, up to 4"),
    "server": SheetFigure("ms", "what a server adds to each token"),
}
"""The figures that a row may have."""

SPREAD = (TOKEN, POSITION, PREFILL, "longest_gap")
"""Figures that several lessons measure, so that they show how sessions vary."""


@dataclass(frozen=True)
class SheetRow:
    """A figure that a lesson measured, with the reader's guess (None: none entered)."""

    lesson: int
    figure: str
    value: float
    guess: float | None = None

    @property
    def unit(self) -> str:
        return FIGURES[self.figure].unit


@dataclass(frozen=True)
class OwnSheet:
    """The facts of a machine, the model of its rates, and the rows of the lessons."""

    machine: str
    facts: str  # as --device takes them, without the read rate, such as "cores=2 simd=amx"
    model: str  # a SPEC
    rows: tuple[SheetRow, ...] = field(default_factory=tuple)

    def value(self, figure: str) -> float | None:
        """The median of the lessons; None if no lesson measured it."""
        values = [row.value for row in self.rows if row.figure == figure]
        return statistics.median(values) if values else None

    def with_row(self, row: SheetRow) -> OwnSheet:
        """The sheet with a row in the place of the one of the same lesson and figure."""
        by_key = {}
        for entry in (*self.rows, row):
            by_key[entry.lesson, entry.figure] = entry
        return replace(self, rows=tuple(by_key[key] for key in sorted(by_key)))

    def without_row(self, lesson: int, figure: str) -> OwnSheet:
        """The sheet without a figure of a lesson."""
        key = (lesson, figure)
        return replace(
            self, rows=tuple(row for row in self.rows if (row.lesson, row.figure) != key)
        )

    def device(self, path: str | Path) -> str:
        """The words for `--device`. LabError without a read rate, which nothing replaces."""
        gbps = self.value(READ_RATE)
        if gbps is None:
            raise LabError(
                f"{path} has no row {READ_RATE}, from which the lab predicts.",
                "Run notebook 2, which measures it, or add the row by hand.",
            )
        return f"gbps={gbps:.6g} {self.facts}".strip()

    def rates(self, decode_at: int) -> list[str]:
        """The rates for `--measured`: of prefill, and of decode after `decode_at` positions."""
        rates = []
        prefill_tps = self.value(PREFILL)
        token_ms = self.value(TOKEN)
        if prefill_tps is not None:
            rates.append(f"{self.model}=pp:{prefill_tps:.6f}")
        if token_ms is not None:
            step_ms = token_ms + decode_at * (self.value(POSITION) or 0.0) / 1e3
            rates.append(f"{self.model}=tg:{1e3 / step_ms:.6f}")
        return rates


def is_sheet(name: str) -> bool:
    """Whether the name of a device is that of a file of this kind."""
    return name.lower().endswith(".toml")


def read(path: str | Path) -> OwnSheet:
    """A sheet from its file. LabError for a file that is missing, or that is none."""
    text = files.read_text(path, "The datasheet", HINT, MOST_BYTES)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        reason = printable(str(problem))
        raise LabError(f"The datasheet {path} is not TOML: {reason}.", HINT) from None
    machine = table_of(document, path)
    entries = document.get("row", [])
    if not isinstance(entries, list) or len(entries) > MOST_ROWS:
        raise not_a_sheet(path, f"row is not a list of at most {MOST_ROWS} tables")
    return OwnSheet(
        machine=text_of(machine, "name", path),
        facts=text_of(machine, "facts", path),
        model=text_of(machine, "model", path),
        rows=tuple(row_of(entry, path) for entry in entries),
    )


def table_of(document: dict[str, object], path: str | Path) -> dict[str, object]:
    machine = document.get("machine")
    if not isinstance(machine, dict):
        raise not_a_sheet(path, "it has no table [machine]")
    return machine


def text_of(machine: dict[str, object], key: str, path: str | Path) -> str:
    """A text of the table, printable and in one line; "" if it is missing."""
    value = machine.get(key, "")
    if not isinstance(value, str):
        raise not_a_sheet(path, f"{key} of [machine] is not a text")
    return printable(" ".join(value.split()))


def row_of(entry: object, path: str | Path) -> SheetRow:
    """A row of the file. LabError for an unknown figure, and for what is no possible number."""
    if not isinstance(entry, dict):
        raise not_a_sheet(path, "a row is not a table")
    figure = entry.get("figure")
    if not isinstance(figure, str) or figure not in FIGURES:
        raise not_a_sheet(path, f"{figure!r} is no figure: {join_and(list(FIGURES))}")
    lesson = entry.get("lesson")
    if type(lesson) is not int or not 0 <= lesson <= 99:
        raise not_a_sheet(path, f"the lesson of {figure} is {lesson!r}, not a number to 99")
    value = number_of(entry, "value", path)
    guess = number_of(entry, "guess", path) if "guess" in entry else None
    return SheetRow(lesson, figure, value, guess)


def number_of(entry: dict[str, object], key: str, path: str | Path) -> float:
    value = entry.get(key)
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and SMALLEST <= value <= LARGEST  # false for NaN
    ):
        return float(value)
    raise not_a_sheet(path, f"{key} of {entry['figure']} is {value!r}, not a number above 0")


def not_a_sheet(path: str | Path, why: str) -> LabError:
    return LabError(f"{path} is no datasheet of a machine: {printable(why)}.", HINT)


def text_of_sheet(sheet: OwnSheet) -> str:
    """The file of a sheet."""
    lines = [FIRST_LINE, "[machine]"]
    for key, value in (
        ("name", sheet.machine),
        ("facts", sheet.facts),
        ("model", sheet.model),
    ):
        lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    for row in sheet.rows:
        lines += ["", "[[row]]", f"lesson = {row.lesson}", f'figure = "{row.figure}"']
        lines.append(f"value = {row.value!r}  # {row.unit}: {FIGURES[row.figure].meaning}")
        if row.guess is not None:
            lines.append(f"guess = {row.guess!r}")
    return "\n".join(lines) + "\n"
