"""`lab export`: results as tables (CSV, Parquet), or as rows of llama-bench's JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lab.app.help import Command
from lab.app.reading import note, read
from lab.errors import LabError

if TYPE_CHECKING:
    import pandas as pd

    from lab.core.record import Record
    from lab.core.results import Contents

CSV = "csv"
PARQUET = "parquet"
JSON = "json"
RUNS = "runs"
STEPS = "steps"
OF_TABLES = "Use --as csv or --as parquet."


@click.command("export", cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--as",
    "form",
    type=click.Choice([JSON, CSV, PARQUET]),
    default=JSON,
    show_default=True,
    help="json: llama-bench's output; csv, parquet: a table of all runs or steps.",
)
@click.option(
    "--table",
    type=click.Choice([RUNS, STEPS]),
    help="Which table, for csv and parquet.  [default: runs]",
)
@click.option("--file", "-f", metavar="FILE", help="Write into this file.  [default: stdout]")
def command(results: tuple[str, ...], form: str, table: str | None, file: str | None) -> None:
    """Export results as llama-bench's JSON, or as tables.

    \b
      lab export results/FILE.jsonl --as csv --table steps -f steps.csv
      lab export results/ > bench.json
    """
    from lab.formats import spreadsheet

    if form == JSON and table:
        raise LabError(f"--table {table} has no effect with --as json.", OF_TABLES)
    if form == PARQUET and file is None:
        raise LabError("Parquet is binary and cannot be printed.", "Name a file: --file FILE")
    reading = read(results)
    if form == JSON:
        write(llama_bench_json(reading.records), file)
        return
    rows = table_of(reading, table or RUNS)
    if form == CSV:
        write(spreadsheet.without_formulas(rows).to_csv(index=False).encode(), file)
    else:
        write(as_parquet(rows), file)


def llama_bench_json(records: tuple[Record, ...]) -> bytes:
    """The plain runs as llama-bench prints them. LabError if there is none."""
    from lab.formats import llama_bench_export
    from lab.runner import disturbances

    if not records:
        raise LabError("llama-bench's format has no rows for requests to servers.", OF_TABLES)
    plain = [record for record in records if record.run.is_plain]
    if not plain:
        what = (
            "The results are only experiments, and llama-bench's format has no rows for these."
        )
        raise LabError(what, OF_TABLES)
    n_disturbed = disturbances.n_disturbed(plain)
    if n_disturbed:
        note(
            f"{n_disturbed} of {len(plain)} runs were disturbed. "
            "llama-bench has no column for that; --as csv has one."
        )
    return llama_bench_export.as_json(llama_bench_export.rows(plain)).encode()


def table_of(reading: Contents, table: str) -> pd.DataFrame:
    """The table of all runs, or of the steps of all runs. LabError if there are no steps."""
    from lab.show import table as tables

    if table == RUNS:
        return tables.runs(reading.measured)
    if not reading.records:
        raise LabError(
            "Requests to servers have no steps.", "Use --table runs: a row is a request."
        )
    return tables.steps(reading.records)


def as_parquet(rows: pd.DataFrame) -> bytes:
    """The rows as a Parquet file. LabError if no library for it is installed."""
    try:
        return bytes(rows.to_parquet(index=False))
    except ImportError:
        raise LabError(
            "Parquet needs a library that is not installed.",
            "python3 -m uv pip install pyarrow",
        ) from None


def write(data: bytes, out: str | None) -> None:
    """Write to a file, or to stdout: as bytes, because Windows would change the ends of lines."""
    from lab.core import results

    if out is None:
        click.echo(data, nl=False)
    else:
        results.write_whole(Path(out), data, "The file")
