"""What every command does with results: read them, print them, draw them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.record import Ceilings, Record
    from lab.results import Reading


def read(results: tuple[str, ...]) -> Reading:
    """What files and folders hold; what is skipped is told. LabError where there is no run."""
    from lab.results import read as read_files

    reading = read_files(results)
    for sentence in reading.skipped:
        click.echo(f"Note: {sentence}", err=True)
    if not reading.records:
        raise LabError(f"There is no run in {' '.join(results)}.", "Measure some: lab measure")
    return reading


def plot_folder(results: tuple[str, ...], out: str | None) -> Path:
    """Where plots go: `out`, else where the first results file is."""
    first = Path(results[0])
    return Path(out) if out else first if first.is_dir() else first.parent


def draw(records: list[Record], folder: Path, stem: str) -> list[Path]:
    """The plots that there is data for."""
    from lab.plot import save
    from lab.record import OK

    if any(record.run.status == OK and not record.run.warmup for record in records):
        return save(records, folder, stem)
    return []


def as_json_rows(records: list[Record]) -> dict[str, Any]:
    """The summary's rows, what disturbed the runs, and what failed."""
    from lab import printing, table

    rows = table.summary(table.runs(records))
    return {
        "rows": rows.to_dict("records"),
        "warnings": printing.warnings(records),
        "failures": printing.failures(records),
    }


def write_report(records: list[Record], given: Sequence[Ceilings], folder: str | Path, path: Path) -> Path | None:
    """The report of records, explained by the ceilings that came with them or are in `folder`; None without a run."""
    from lab import ceilings, report
    from lab.record import OK

    if not any(record.run.status == OK and not record.run.warmup for record in records):
        return None
    return report.write(path, records, [*given, *ceilings.kept(Path(folder))])
