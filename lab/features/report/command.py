"""The command `lab report`."""

from __future__ import annotations

from pathlib import Path

import click

from lab.app.help import Command
from lab.app.options import AT_LEAST
from lab.app.reading import RESULTS, ceilings_of, nearby, read
from lab.core.files import is_dir
from lab.errors import LabError, printable


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--file",
    "-f",
    metavar="FILE",
    help="The page.  [default: the first results file's name, with .html]",
)
@click.option(
    "--ceilings", default=RESULTS, show_default=True, help="Folder with the ceilings."
)
@AT_LEAST
@click.option(
    "--no-explore",
    is_flag=True,
    help="Leave out the sliders that predict other requests and devices.",
)
def report(
    results: tuple[str, ...],
    file: str | None,
    ceilings: str,
    at_least: float,
    no_explore: bool,
) -> None:
    """Write results as one HTML page with the raw data inside.

    \b
      lab report results/FILE.jsonl
      lab report results/ --file report.html

    The page contains the data and needs no network, so you can mail it or put it on any server. lab
    show and lab compare read the records in it. If the ceilings of a machine are known (lab
    ceilings), it says what limited each phase, and has sliders for prompts, answers, users and
    devices, which predict as lab predict does.
    """
    from lab.features.report import page

    contents = read(results, with_findings=True)
    path = Path(file) if file else default_path(results)
    check_path(path, results)
    written = page.report(
        path,
        contents.all_lines,
        ceilings_of(contents, ceilings),
        at_least,
        nearby(results, contents.records).records,
        explore=not no_explore,
    )
    click.echo(printable(str(written)))


def default_path(results: tuple[str, ...]) -> Path:
    """The page's path where none is given; not beside the samples of this repository."""
    first = Path(results[0])
    if is_dir(first):
        return first / "report.html"
    path = first.with_suffix(".html")
    return Path(path.name) if first.name.startswith("sample-") else path


def check_path(path: Path, results: tuple[str, ...]) -> None:
    """LabError for another suffix, and for a page that would replace its results."""
    if path.suffix != ".html":
        message = f"A page's name must end in .html, and {path} does not."
        raise LabError(message, "For example: --file report.html")
    if path.resolve() in {Path(name).resolve() for name in results}:
        message = f"--file {path} would overwrite the results."
        raise LabError(message, "Choose another name: --file report.html")
