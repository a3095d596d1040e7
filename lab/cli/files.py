"""What every command does with results: read them, print them, draw them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.core.record import Ceilings, Record
    from lab.core.results import Contents


RESULTS = "results"
"""The folder that commands write to and look into, if they are told no other."""


def read(results: tuple[str, ...]) -> Contents:
    """What files and folders hold; what is skipped is told. LabError where there is no run."""
    from lab.core.results import read as read_files

    reading = read_files(results)
    for sentence in reading.skipped:
        note(sentence)
    if not reading.records:
        raise LabError(f"There is no run in {' '.join(results)}.", "Measure some: lab measure")
    return reading


def note(sentence: str) -> None:
    """Say on stderr what was passed over."""
    click.echo(f"Note: {sentence}", err=True)


def plot_folder(results: tuple[str, ...], out: str | None) -> Path:
    """Where plots go: `out`, else where the first results file is."""
    first = Path(results[0])
    return Path(out) if out else first if first.is_dir() else first.parent


def any_good(records: Sequence[Record]) -> bool:
    """Whether a timed run went well."""
    from lab.core.record import OK

    return any(record.run.status == OK and not record.run.warmup for record in records)


def draw(records: list[Record], folder: Path, stem: str) -> list[Path]:
    """The plots that there is data for."""
    from lab.show.plot_runs import save

    return save(records, folder, stem) if any_good(records) else []


def ceilings_of(reading: Contents, folder: str) -> list[Ceilings]:
    """The ceilings that came with results, and those in `folder`. LabError for a folder that is not there."""
    from lab.why import probing

    if folder != RESULTS and not Path(folder).is_dir():
        raise LabError(f"There is no folder {folder} with ceilings.", "Name the one that lab ceilings wrote to.")
    return [*reading.ceilings, *probing.kept(Path(folder), note)]


def as_json_rows(records: list[Record]) -> dict[str, Any]:
    """The summary's rows, what disturbed the runs, and what failed."""
    from lab.analysis import table
    from lab.show import text_results

    rows = table.summary(table.runs(records))
    return {
        "rows": rows.to_dict("records"),
        "warnings": text_results.warnings(records),
        "failures": text_results.failures(records),
    }
