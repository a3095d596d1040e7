"""`lab compare`: saved results side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from lab.app import kinds
from lab.app.help import Command
from lab.app.options import AT_LEAST, DETAILS, as_json_option
from lab.app.reading import hint, nearby, read, without_parts
from lab.core import shell
from lab.core.results import Contents


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--base",
    metavar="TEXT",
    help="The base of the comparison, by a part of its label.  [default: the first]",
)
@AT_LEAST
@click.option("--out", "-o", help="Folder for plots; without it none is drawn.")
@DETAILS
@as_json_option("tables")
def compare(
    results: tuple[str, ...],
    base: str | None,
    at_least: float,
    out: str | None,
    details: bool,
    as_json: bool,
) -> None:
    """Compare saved results: machines, builds, models, settings.

    \b
      lab compare before.jsonl after.jsonl
      lab compare results/ --at-least 5%

    Groups runs by machine, build, model and settings, and never pools groups. For each prompt
    length it prints the ratio of the other's time to the base's, its interval, and a verdict. It
    claims a difference between sessions only if it exceeds the spread between sessions of this
    machine.
    """
    from lab.show import (
        comparison,
        console,
        session_spread,
        text_comparison,
        text_doubts,
        text_requests,
    )

    contents = without_parts(read(results))
    groups = comparison.groups(contents.measured, base)
    others = nearby(results, contents.measured)
    sessions = [*contents.measured, *others.records]
    if contents.requests:
        sessions += others.requests
    spreads = session_spread.known_spreads(sessions)
    comparisons = comparison.compare_groups(groups, at_least, spreads)
    if as_json:
        document = text_comparison.as_json(groups, comparisons)
        plots = draw(contents, results, out) if out else []
        console.print_json({**document, "plots": [str(plot) for plot in plots]})
        return
    stdout = console.console(details=hint(details))
    warnings = text_doubts.warnings(contents.records)
    warnings += text_requests.warnings(contents.requests)
    text_comparison.print_comparisons(groups, comparisons, at_least, stdout, warnings)
    if out:
        stem = Path(out) / _stem(results)
        for line in kinds.plot_lines(stem, draw(contents, results, out)):
            stdout.print(line)
    stdout.print(f"next     a page to share: {shell.lab('report', *results)}")


def draw(contents: Contents, results: Sequence[str], out: str) -> list[Path]:
    """Write the pictures of what is compared into the folder `out`; returns their paths."""
    from lab.show import comparison
    from lab.show.section import Context

    records = (
        contents.measured if contents.requests else comparison.by_session(contents.records)
    )
    sections = kinds.sections(records, Context(), ("runs", "requests"))
    return kinds.draw_what_can_be(sections, Path(out), _stem(results))


def _stem(results: Sequence[str]) -> str:
    return f"{Path(results[0]).stem}-compared"
