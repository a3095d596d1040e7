"""The command that compares results."""

from __future__ import annotations

from pathlib import Path

import click

from lab.app.help import Command
from lab.app.options import AT_LEAST, DETAILS, NO_PLOT, PLOTS_OUT, as_json_option
from lab.app.reading import draws, hint, nearby, plot_folder, read, without_parts
from lab.core import shell


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
    from lab.app import kinds
    from lab.features.compare import text_compare
    from lab.show import text_requests
    from lab.show import comparison, console, text_results
    from lab.show.section import Context

    reading = without_parts(read(results))
    groups = comparison.groups(reading.measured, base)
    others = nearby(results, reading.measured)
    spreads = comparison.known_spreads(
        [*reading.measured, *others.records, *(others.requests if reading.requests else ())]
    )
    comparisons = comparison.compare_groups(groups, at_least, spreads)
    made = []
    if draws(results, out, no_plot):
        apart = reading.measured if reading.requests else comparison.by_session(reading.records)
        made = kinds.sections(apart, Context(), ("runs", "requests"))
    plots = kinds.draw(made, plot_folder(results, out), f"{Path(results[0]).stem}-compared")
    if as_json:
        console.print_json(
            {**text_compare.as_json(groups, comparisons), "plots": list(map(str, plots))}
        )
        return
    stdout = console.console(details=hint(details))
    warnings = [*text_results.warnings(reading.records), *text_requests.warnings(reading.requests)]
    text_compare.print_comparisons(groups, comparisons, at_least, stdout, warnings)
    for line in [
        *(f"plot     {plot}" for plot in plots),
        f"next     a page to share: {shell.lab('report', *results)}",
    ]:
        stdout.print(line)
