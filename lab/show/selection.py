"""Which runs and requests the pictures of plain runs show, and the words for them in titles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lab.core.lists import plural
from lab.core.record import Record
from lab.core.request import RequestRecord, short_name
from lab.core.results import Readable, measured_of
from lab.core.shown import is_unreliable
from lab.errors import LabError
from lab.show import table, text_setup
from lab.show.table import Records
from lab.show.text_setup import one_of

if TYPE_CHECKING:
    import pandas as pd

MOST_TABLES = 50  # of setups that are shown
MOST_PANELS = 12  # of setups that a picture shows
Groups = Sequence[tuple[str, "pd.DataFrame"]]  # the label and rows of a setup


def newest(groups: Groups, most: int) -> Groups:
    """The groups of rows that were measured last, `most` at most, in the same order."""
    if len(groups) <= most:
        return groups
    starts = [str(rows.started_at.fillna("").max()) for _, rows in groups]
    by_start = sorted(range(len(groups)), key=starts.__getitem__)
    return [groups[number] for number in sorted(by_start[-most:])]


def left_out(n_shown: int, n_setups: int) -> list[str]:
    """A sentence on setups that are not shown."""
    if n_shown == n_setups:
        return []
    return [
        f"{n_shown:,} of {n_setups:,} setups are shown, the newest. To see others, name fewer "
        "results files."
    ]


def plain_runs(records: Records) -> list[Record]:
    """The timed runs of the engine without experiments."""
    runs = table.of_engine(records)
    return [record for record in runs if record.run.is_timed and record.run.is_plain]


def answered(records: Records) -> list[RequestRecord]:
    """The successful requests that ran alone."""
    return [record for record in table.alone(records) if record.is_good]


def timed_rows(records: Readable) -> tuple[list[Record | RequestRecord], pd.DataFrame]:
    """The plain runs and requests that went well, and their rows: `run` is the place in the list.

    Warm requests and short answers have rows only where there are no others. LabError if nothing
    went well.
    """
    measured_lines = measured_of(records)
    timed: list[Record | RequestRecord] = [
        *plain_runs(measured_lines),
        *answered(measured_lines),
    ]
    if not timed:
        raise _nothing_to_draw(measured_lines)
    rows = table.runs(timed)
    measured = table.measured(rows)
    rows = rows if measured.empty else measured
    setups = table.setups(rows)
    shown = newest(setups, MOST_PANELS)
    if len(shown) < len(setups):
        rows = rows[rows.run.isin([run for _, part in shown for run in part.run])]
    return timed, rows


def _nothing_to_draw(records: Records) -> LabError:
    if not records:
        return LabError(
            "There is nothing to draw: no records are given.", "Measure some: lab measure"
        )
    runs = table.of_engine(records)
    if any(not record.run.is_plain for record in runs):
        return LabError(
            "There is nothing to draw: these are experiments.",
            "Their pictures: lab plot RESULTS",
        )
    hint = "Look at the errors: lab show RESULTS"
    if table.alone(records) and not runs:
        return LabError("There is nothing to draw: no request went well.", hint)
    return LabError("There is nothing to draw: no run went well.", hint)


def stated_at_ends(
    rows: pd.DataFrame, name: str, write: Callable[[float], str], preposition: str
) -> str:
    """The medians of a figure at the shortest and the longest prompt, for a title: "6.55 ms after
    10 prompt tokens, 32.1 ms after 10,000".

    Empty for several setups, without a value, and if half of the runs of such a prompt were
    disturbed.
    """
    measured = rows[rows[name].notna() & rows.n_prompt.notna()]
    if len(table.setups(measured)) != 1:
        return ""
    stated = []
    unit = " prompt tokens"
    for n_prompt in sorted({measured.n_prompt.min(), measured.n_prompt.max()}):
        runs = measured[measured.n_prompt == n_prompt]
        if is_unreliable(len(runs), int(runs.disturbed.sum())):
            return ""
        median = write(float(runs[name].median()))
        stated.append(f"{median} {preposition} {n_prompt:,.0f}{unit}")
        unit = ""
    return ", ".join(stated)


def subject(timed: Records, rows: pd.DataFrame) -> str:
    """Model, machine and number of repeats, for a title; for requests also server and client."""
    setup_and_length = [*text_setup.fields(rows), "n_prompt", "n_gen"]
    repeats = _repeats(rows.groupby(setup_and_length, dropna=False).size())
    if len(table.setups(rows)) == MOST_PANELS:
        n_setups = len(table.setups(table.runs(timed)))
        if n_setups > MOST_PANELS:
            repeats += f"; the newest {MOST_PANELS} of {n_setups:,} setups"
    if not table.alone(timed):
        return f"{text_setup.where(table.of_engine(timed))} ({repeats})"
    requests = rows[rows.server.notna()]
    models = one_of(rows.model.map(short_name), "models")
    servers = one_of(requests.server, "servers")
    clients = one_of(requests.machine, "machines")
    if len(requests) < len(rows):
        return f"{models} in process and through {servers}\nclient {clients}; {repeats}"
    return f"{models} through {servers}\nclient {clients}; {repeats}"


def _repeats(numbers: pd.Series) -> str:
    fewest = int(numbers.min())
    most = int(numbers.max())
    return plural(most, "repeat") if fewest == most else f"{fewest} to {most} repeats"
