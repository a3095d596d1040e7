"""The datasheet of the reader's machine: each lesson adds its figures to `datasheet.toml`.

`lab predict --device datasheet.toml` predicts from it. The same rows show how sessions vary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.core import results
from lab.core.files import exists
from lab.core.lists import grouped, join_and
from lab.core.record import Machine, Record
from lab.errors import LabError
from lab.features.lessons import statements
from lab.features.lessons.exercises import judgement, number_of
from lab.models import catalog, devices, own_sheet, processors
from lab.models.own_sheet import FIGURES, SPREAD, OwnSheet, SheetRow
from lab.runner import machine
from lab.show.sweep_laws import Law
from lab.show.wording import digits, times

if TYPE_CHECKING:
    import pandas as pd

FILE = Path(own_sheet.NAME)  # in the folder of the notebooks, where their kernels run
FLAGS = {"i8mm": "MATMUL_INT8", "rvv": "RISCV_V"}
"""llama.cpp's names of instructions that do not begin like those of `lab predict`."""

NO_SHEET = f"There is no {FILE} in this folder yet: lesson.note writes it."


def note(
    lesson: int,
    records: Sequence[Record],
    guesses: Mapping[str, object] | None = None,
    **measured: float | None,
) -> None:
    """Add the figures that a lesson measured to the datasheet, in the place of its earlier ones.

        lesson.note(1, records, {"w": guess_1}, w=5.1, k=19.0)

    `records` say which machine and model they are of; `guesses` is what the reader expected. A
    figure that is None or not finite is not known, and its earlier row goes. LabError for an
    unknown figure, and if the file is of another machine.
    """
    timed = [record for record in records if record.run.is_timed]
    if not timed:
        raise LabError("These records have no run that went well.", "Measure again.")
    unknown = [name for name in measured if name not in FIGURES]
    if unknown:
        raise LabError(
            f"The datasheet has no figure {join_and(unknown)}.",
            f"It has {join_and(list(FIGURES))}.",
        )
    sheet = sheet_for(timed[0])
    names = []
    unknown_now = []
    for figure, value in measured.items():
        number = number_of(value)
        if number is None or number <= 0:
            sheet = sheet.without_row(lesson, figure)
            unknown_now.append(figure)
            continue
        guess = number_of((guesses or {}).get(figure, ...))
        if guess is not None and guess <= 0:
            guess = None
        sheet = sheet.with_row(SheetRow(lesson, figure, number, guess))
        names.append(f"{figure} = {digits(number)} {FIGURES[figure].unit}")
    if names or exists(FILE):
        text = own_sheet.text_of_sheet(sheet)
        results.write_whole(FILE, text.encode(), "The datasheet")
    if not names:
        print(f"Lesson {lesson} adds nothing to {FILE}: {join_and(unknown_now)} is not known.")
        return
    print(f"{FILE}, lesson {lesson}: {', '.join(names)}")
    if unknown_now:
        print(f"Left out, because it is not known: {join_and(unknown_now)}")


def lawful(decode: Law, short: tuple[float, Sequence[float]]) -> dict[str, float | None]:
    """The rows w and k: k of the law, and w of the steps after a short prompt.

    `short`: that position, and the seconds of its runs. A law can miss short prompts.
    """
    position, runs_s = short
    token_s = statements.middle(runs_s) - decode.b * position
    return {own_sheet.TOKEN: 1e3 * token_s, own_sheet.POSITION: 1e6 * decode.b}


def noted(lesson: int, figure: str) -> float | None:
    """What a lesson wrote into the datasheet; None without it."""
    if not exists(FILE):
        return None
    for row in own_sheet.read(FILE).rows:
        if (row.lesson, row.figure) == (lesson, figure):
            return row.value
    return None


def sheet_for(record: Record) -> OwnSheet:
    """The datasheet in this folder, or an empty one for a record's machine and model.

    LabError if it is of another machine.
    """
    name = machine.label(record.machine, record.settings)
    spec = catalog.spec_of(record.model)
    if not exists(FILE):
        return OwnSheet(name, facts_of(record), spec)
    sheet = own_sheet.read(FILE)
    if (sheet.machine, sheet.model) != (name, spec):
        raise LabError(
            f"{FILE} is of {sheet.model} on {sheet.machine}, and these runs are of {spec} on "
            f"{name}.",
            "Move the file to another folder; the next lesson then begins a new one.",
        )
    return sheet


def facts_of(record: Record) -> str:
    """A record's machine as `--device` takes it: a GPU's name, or a CPU with the cores in use."""
    here = record.machine
    for device in machine.used(here, record.settings):
        known = devices.recognise(device.description, device.memory_bytes)
        if known is not None:
            return known.name
    n_threads = record.settings.n_threads
    facts = [f"cores={min(n_threads, here.n_cores_physical or n_threads)}"]
    simd = instructions_of(here)
    if simd:
        facts.append(f"simd={simd}")
    if here.ram_bytes:
        facts.append(f"memory={here.ram_bytes / 1e9:.0f}")
    return " ".join(facts)


def instructions_of(here: Machine) -> str | None:
    """The fastest instruction set that llama.cpp uses there; None if nobody says it."""
    flags = re.findall(r"(\w+) = 1\b", here.system_info or "")
    best = None
    for name in processors.instruction_sets():
        begin = FLAGS.get(name, name.upper())
        if any(flag.startswith(begin) for flag in flags):
            best = name
    return best


def guesses_and_errors() -> pd.DataFrame | None:
    """All rows of the datasheet: what was guessed and measured, and how far the guess was off.

    None, with a printed sentence, without a datasheet.
    """
    import pandas as pd

    if not exists(FILE):
        print(NO_SHEET)
        return None
    rows = []
    for row in own_sheet.read(FILE).rows:
        guess = "none"
        verdict = ""
        if row.guess is not None:
            guess = digits(row.guess)
            verdict = judgement(row.guess, row.value)
        cells = {
            "lesson": row.lesson,
            "figure": f"{row.figure}: {FIGURES[row.figure].meaning}",
            "your guess": guess,
            "measured": f"{digits(row.value)} {row.unit}",
            "": verdict,
        }
        rows.append(cells)
    return pd.DataFrame(rows).set_index("lesson")


def sessions_vary() -> pd.DataFrame | None:
    """The figures that several lessons measured, side by side: a column for each lesson.

    Prints for each by what factor the largest exceeds the smallest. None, with a printed sentence,
    without a datasheet.
    """
    import pandas as pd

    if not exists(FILE):
        print(NO_SHEET)
        return None
    rows = [row for row in own_sheet.read(FILE).rows if row.figure in SPREAD]
    if not rows:
        raise LabError(
            f"{FILE} has no {join_and(list(SPREAD))}.", "Notebooks 1, 5 and 7 measure them."
        )
    columns: dict[str, dict[str, str]] = {}
    for row in rows:
        label = f"{row.figure}, {row.unit}"
        columns.setdefault(f"lesson {row.lesson}", {})[label] = digits(row.value)
    for figure, of_figure in grouped(rows, lambda row: row.figure).items():
        print(spread_in_words(figure, [row.value for row in of_figure]))
    return pd.DataFrame(columns).fillna("-")


def spread_in_words(figure: str, values: Sequence[float]) -> str:
    """How far the sessions of the lessons differ in a figure."""
    meaning = FIGURES[figure].meaning
    if len(values) < 2:
        return f"{figure} ({meaning}) was measured once: run another lesson."
    factor = max(values) / min(values)
    return (
        f"{figure} ({meaning}): {len(values)} sessions, the largest {times(factor)} the smallest. "
        "Sessions differ by at least as much, so a difference between two that is not larger says "
        "nothing."
    )
