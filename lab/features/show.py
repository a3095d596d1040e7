"""`lab show` and `lab plot`: saved results as tables, and their pictures."""

from __future__ import annotations

from pathlib import Path

import click

from lab.app import kinds
from lab.app.help import Command
from lab.app.options import DETAILS, PLOTS_OUT, as_json_option
from lab.app.output import next_steps
from lab.app.reading import any_good, context, folder_of, hint, note, plot_folder, read
from lab.core import shell
from lab.errors import LabError, printable


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@DETAILS
@as_json_option("tables")
def show(results: tuple[str, ...], details: bool, as_json: bool) -> None:
    """Show saved results (files or folders) as tables.

    \b
      lab show results/FILE.jsonl
      lab show results/ --details
    """
    from lab.show import console

    contents = read(results, with_findings=True)
    lines = contents.all_lines
    sections = kinds.sections(
        lines, context(lines, results, ceilings=contents.ceilings, details=details)
    )
    if as_json:
        console.print_json(kinds.as_json(lines, sections))
        return
    out = console.console(details=hint(details))
    kinds.print_results(lines, out, sections)
    explain = shell.lab("explain", *results)
    for line in next_steps(contents.records, folder_of(results[0]), explain):
        out.print(line)


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@PLOTS_OUT
def plot(results: tuple[str, ...], out: str | None) -> None:
    """Draw the plots of saved results (files or folders).

    \b
      lab plot results/FILE.jsonl
      lab plot before.jsonl after.jsonl --out pictures
    """
    from lab.show import text_doubts

    contents = read(results, with_findings=True)
    lines = contents.all_lines
    if not any_good(lines):
        hint_to_errors = "Look at the errors: lab show RESULTS"
        raise LabError("There is nothing to draw: no run succeeded.", hint_to_errors)
    for sentence in text_doubts.imported(contents.records):
        note(sentence)
    stem = Path(results[0]).stem
    if len(results) > 1:
        stem += f"-and-{len(results) - 1}-more"
    sections = kinds.sections(lines, context(lines, results, ceilings=contents.ceilings))
    for path in kinds.draw(sections, plot_folder(results, out), stem):
        click.echo(printable(str(path)))
