"""The commands that compare results, and convert to and from formats of other tools."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from lab.app.help import Command
from lab.app.options import AT_LEAST, DETAILS, NO_PLOT, PLOTS_OUT, as_json_option, out_option
from lab.core import shell
from lab.errors import LabError, printable
from lab.app.running import draws, hint, nearby, note, plot_folder, read, without_tuning


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--base",
    metavar="TEXT",
    help="The base of the comparison, by a part of its label.  [default: the first]",
)
@AT_LEAST
@PLOTS_OUT
@NO_PLOT
@DETAILS
@as_json_option("tables")
def compare(
    results: tuple[str, ...],
    base: str | None,
    at_least: float,
    out: str | None,
    no_plot: bool,
    details: bool,
    as_json: bool,
) -> None:
    """Compare saved results: machines, builds, models, settings.

    \b
      lab compare before.jsonl after.jsonl
      lab compare results/ --at-least 5%

    Groups runs by machine, build, model and settings, and never pools groups. For each prompt length it prints the
    ratio of the other's time to the base's, its interval, and a verdict. It claims a difference between sessions
    only if it exceeds the spread between sessions of this machine.
    """
    from lab.app import known
    from lab.show import comparison
    from lab.features.compare import text_compare
    from lab.show import text_results
    from lab.remote import through_server
    from lab.show import console
    from lab.show.section import Context

    reading = without_tuning(read(results))
    groups = comparison.groups(reading.measured, base)
    others = nearby(results, reading.measured)
    spreads = comparison.known_spreads(
        [*reading.measured, *others.records, *(others.requests if reading.requests else ())]
    )
    comparisons = comparison.compare_groups(groups, at_least, spreads)
    made = []
    if draws(results, out, no_plot):
        apart = reading.measured if reading.requests else comparison.by_session(reading.records)
        made = known.sections(apart, Context(), ("runs", "requests", "loads"))
    plots = known.draw(made, plot_folder(results, out), f"{Path(results[0]).stem}-compared")
    if as_json:
        console.print_json(
            {**text_compare.as_json(groups, comparisons), "plots": list(map(str, plots))}
        )
        return
    stdout = console.console(details=hint(details))
    warnings = [*text_results.warnings(reading.records), *through_server.warnings(reading.requests)]
    text_compare.print_comparisons(groups, comparisons, at_least, stdout, warnings)
    for line in [
        *(f"plot     {plot}" for plot in plots),
        f"next     a page to share: {shell.lab('report', *results)}",
    ]:
        stdout.print(line)


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--format",
    "-f",
    "form",
    type=click.Choice(["llama-bench", "csv", "parquet"]),
    default="llama-bench",
    show_default=True,
    help="llama-bench's output, or a table of all runs or steps.",
)
@click.option(
    "--as",
    "kind",
    type=click.Choice(["json", "md"]),
    help="Which of llama-bench's output formats.  [default: json]",
)
@click.option(
    "--table",
    type=click.Choice(["runs", "steps"]),
    help="Which table, for csv and parquet.  [default: runs]",
)
@click.option("--out", "-o", metavar="FILE", help="Write into this file.  [default: stdout]")
def export(
    results: tuple[str, ...], form: str, kind: str | None, table: str | None, out: str | None
) -> None:
    """Export results as llama-bench's output, or as tables.

    \b
      lab export results/FILE.jsonl --format csv --table steps -o steps.csv
      lab export results/ --as md
    """
    from lab.formats import llama_bench_format
    from lab.show import disturbances, table as tables

    of_tables = "Use --format csv or parquet."
    if kind and form != "llama-bench":
        raise LabError(
            f"--as {kind} has no effect with --format {form}.",
            "Leave it out, or use --format llama-bench.",
        )
    if table and form == "llama-bench":
        raise LabError(f"--table {table} has no effect with --format {form}.", of_tables)
    reading = read(results)
    if form == "llama-bench":
        if not reading.records:
            raise LabError("llama-bench's format has no rows for requests to servers.", of_tables)
        if not (plain := [record for record in reading.records if record.run.lever is None]):
            what = (
                "The results are only experiments, and llama-bench's format has no rows for these."
            )
            raise LabError(what, of_tables)
        if n := sum(bool(disturbances.disturbances(record)) for record in plain):
            note(
                f"{n} of {len(plain)} runs were disturbed. llama-bench has no column for that; --format csv has one."
            )
        _write(
            llama_bench_format.write(
                llama_bench_format.llama_bench_rows(plain), kind or "json"
            ).encode(),
            out,
        )
        return
    if table == "steps" and not reading.records:
        raise LabError(
            "Requests to servers have no steps.", "Use --table runs: a row is a request."
        )
    rows = tables.steps(reading.records) if table == "steps" else tables.runs(reading.measured)
    if form == "csv":
        _write(llama_bench_format.harmless(rows).to_csv(index=False).encode(), out)
        return
    if out is None:
        raise LabError("Parquet is binary and cannot be printed.", "Name a file: --out FILE")
    try:
        _write(rows.to_parquet(index=False), out)
    except ImportError:
        raise LabError(
            "Parquet needs a library that is not installed.", "python3 -m uv pip install pyarrow"
        ) from None


@click.command("import", cls=Command)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--device", metavar="NAME", help="The device, for a table that does not name it.")
@out_option("Folder for the results files.")
def import_(files: tuple[str, ...], device: str | None, out: str) -> None:
    """Import results of llama-bench.

    \b
      lab import bench.json                    # llama-bench -o json (jsonl, csv)
      lab import post.txt --device "RTX 4090"  # a text with Markdown tables
      lab import -                             # paste it, then press Ctrl-D

    Names every test and every line of a table that it cannot read. llama-bench reports times of whole tests, so there
    are no steps, and of Markdown tables only the mean is kept. What llama-bench does not report stays unknown.
    """
    from lab.core.lines import to_json
    from lab.core.results import free_path
    from lab.formats import llama_bench_format

    for name in files:
        records, skipped = llama_bench_format.read_llama_bench(Path(name), device)
        for sentence in skipped:
            note(f"{name}: {sentence}")
        stem = "pasted" if name == llama_bench_format.STDIN else Path(name).stem
        target = free_path(Path(out), f"imported-{stem}")
        sessions = (dataclasses.replace(record, session=target.stem) for record in records)
        _write("".join(to_json(record) + "\n" for record in sessions).encode(), str(target))
        click.echo(printable(f"{target}  {len(records)} samples"))


def _write(data: bytes, out: str | None) -> None:
    """To a file, or to stdout."""
    from lab.core import results

    if out is None:
        click.echo(data, nl=False)  # bytes: Windows would change letters and the ends of lines
        return
    results.write_whole(Path(out), data, "The file")
