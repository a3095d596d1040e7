"""What the commands share: reading results, and drawing them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.errors import LabError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lab.core.record import Ceilings, Record
    from lab.core.results import Contents
    from lab.show.lever_kinds import Section


MOST_NEARBY = 50_000_000

RESULTS = "results"
"""The default folder of results."""


def read(results: tuple[str, ...]) -> Contents:
    """The contents of files and folders; a note on stderr for what is skipped. LabError where there is no run."""
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


def other_sessions(results: tuple[str, ...], records: Sequence[Record]) -> list[Record]:
    """Sessions that lie where the results are, and in their calibration folder: they show how much sessions differ.

    At most MOST_NEARBY bytes are read, the newest files first; those that cannot be read are left out.
    """
    from lab.core.results import read as read_files
    from lab.runner.calibration import FOLDER

    folders = {Path(name) if Path(name).is_dir() else Path(name).parent for name in results}
    paths = [path for folder in folders for path in (*folder.glob("*.jsonl"), *(folder / FOLDER).glob("*.jsonl"))]
    nearby, n_bytes = [], 0
    named = {record.session for record in records}
    for path in sorted(
        filter(Path.is_file, paths), key=lambda path: path.name, reverse=True
    ):  # names begin with a time
        with suppress(OSError, LabError):  # nobody asked for this file: one that cannot be read teaches nothing
            n_bytes += path.stat().st_size
            if n_bytes > MOST_NEARBY:
                break
            nearby += [record for record in read_files([path]).records if record.session not in named]
    return nearby


def plot_folder(results: tuple[str, ...], out: str | None) -> Path:
    """The folder for plots: `out`, else that of the first results file."""
    first = Path(results[0])
    return Path(out) if out else first if first.is_dir() else first.parent


def any_good(records: Sequence[Record]) -> bool:
    """Whether there is a timed run without an error."""
    from lab.core.record import OK

    return any(record.run.status == OK and not record.run.warmup for record in records)


def draw(records: Sequence[Record], folder: Path, stem: str, shown: Sequence[Section] = ()) -> list[Path]:
    """Draws the plots that there is data for, of experiments those `shown`; their paths: `<stem>-prefill.png` ..."""
    from lab.show import canvas, levers, plot_runs

    if not any_good(records):
        return []
    drawings = {**plot_runs.drawings(records), **levers.drawings(shown)}
    return [
        path
        for name, drawing in drawings.items()
        for path in canvas.write(drawing, folder, f"{stem}-{name}", (8 if name in ("prefill", "decode") else 11, 5))
    ]


def experiments(
    records: Sequence[Record], results: tuple[str, ...], ceilings: Sequence[Ceilings] = ()
) -> list[Section]:
    """What experiments among the records of these files showed, predicted from ceilings and what lies beside them."""
    from lab.show import levers
    from lab.why import probing

    if not any(record.run.lever for record in records):
        return []
    known = [*ceilings, *probing.kept(plot_folder(results, None), note)]
    return levers.sections(records, known, other_sessions(results, records))


def ceilings_of(reading: Contents, folder: str) -> list[Ceilings]:
    """The ceilings that came with results, and those in `folder`. LabError for a folder that is not there."""
    from lab.why import probing

    if folder != RESULTS and not Path(folder).is_dir():
        raise LabError(f"There is no folder {folder} with ceilings.", "Name the one that lab ceilings wrote to.")
    return [*reading.ceilings, *probing.kept(Path(folder), note)]


def as_json_rows(records: Sequence[Record], shown: Sequence[Section] = ()) -> dict[str, Any]:
    """The rows of the summary and of experiments, what disturbed the runs, and what failed."""
    from lab.analysis import table
    from lab.show import levers, text_results

    rows = table.summary(table.runs(records))
    return {
        "rows": [*rows.to_dict("records"), *levers.as_rows(shown)],
        **levers.more(shown),
        "warnings": text_results.warnings(records),
        "failures": text_results.failures(records),
    }
