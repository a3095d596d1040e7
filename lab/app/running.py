"""The one loop of the commands: read results, or plan and measure them; then show, draw, and name
the files.

Below it the commands that only show: show, plot, report, words. Their kinds of results are those of
known.py.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.app import asked
from lab.app.help import EXIT_FAILED, EXIT_INTERRUPTED, Command
from lab.app.options import AT_LEAST, DETAILS, PLOTS_OUT, as_json_option
from lab.core import shell
from lab.errors import LabError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from lab.core.record import Ceilings, Record
    from lab.core.request import RequestRecord
    from lab.core.results import Contents
    from lab.runner.cases import Plan
    from lab.runner.progress import ShowStatus
    from lab.show.console import Terminal
    from lab.show.section import Context, Section

RESULTS = "results"  # the default folder of results


def read(results: tuple[str, ...], with_traces: bool = False, steps_to: str = "") -> Contents:
    """The contents of files and folders; notes on what is skipped. LabError where there is nothing
    to show."""
    from lab.core import results as files

    reading = files.read(results)
    for sentence in reading.skipped:
        note(sentence)
    if not (reading.records or reading.requests or (with_traces and reading.traces)):
        what = "only results of lab trace or lab quant" if reading.traces else "no runs"
        raise LabError(f"{' '.join(results)} contains {what}.", "Measure some: lab measure")
    if steps_to and not reading.records:
        what = f"{' '.join(results)} contains only requests to servers, and no steps of the engine to {steps_to}."
        hint = "Measure the model in process: lab measure -m MODEL. To see the requests: lab show RESULTS"
        raise LabError(what, hint)
    return reading


def without_tuning(reading: Contents) -> Contents:
    """What was read, without sessions of lab tune. LabError where nothing else was read."""
    from lab.features.tune.result import without

    records = without(reading.records)
    if not (records or reading.requests):
        raise LabError("These results are only of lab tune.", "To see them: lab show RESULTS")
    return dataclasses.replace(reading, records=tuple(records))


def note(sentence: str) -> None:
    """Say on stderr what was passed over."""
    click.echo(printable(f"Note: {sentence}"), err=True)


def nearby(results: tuple[str, ...], measured: Sequence[Record | RequestRecord]) -> Contents:
    """Other sessions that lie where the results are: they show how sessions differ."""
    from lab.core import results as files

    folders = {Path(name) if Path(name).is_dir() else Path(name).parent for name in results}
    return files.nearby(folders, measured)


def plot_folder(results: tuple[str, ...], out: str | None) -> Path:
    """The folder for plots: `out`, else that of the first results file."""
    first = Path(results[0])
    return Path(out) if out else first if first.is_dir() else first.parent


def draws(results: tuple[str, ...], out: str | None, no_plot: bool) -> bool:
    """Whether a command draws: nothing is written beside committed samples unless asked."""
    is_sample = Path(results[0]).name.startswith("sample-") and not out
    if is_sample and not no_plot:
        note(
            f"{Path(results[0]).name} is a sample of this repository, so no picture was drawn: --out FOLDER draws it."
        )
    return not (no_plot or is_sample)


def any_good(records: Sequence[Record | RequestRecord]) -> bool:
    """Whether there is a timed or traced run, or a request, without an error."""
    return any(record.is_good for record in records)


def context(
    records: Sequence[Record | RequestRecord], results: tuple[str, ...], **more: Any
) -> Context:
    """What sections of these records may use: for experiments and claims the ceilings and runs that
    lie beside them."""
    from lab.core.record import Record
    from lab.show.section import Context

    runs = [one.run for one in records if isinstance(one, Record)]
    is_lever = any(not run.is_plain and not run.is_apart for run in runs)
    if is_lever or any(run.part for run in runs):
        from lab.roofline import probing

        more["ceilings"] = [
            *more.get("ceilings", ()),
            *probing.kept(plot_folder(results, None), note),
        ]
    if is_lever:
        more["others"] = nearby(results, records).records
    return Context(**more)


def ceilings_of(reading: Contents, folder: str) -> list[Ceilings]:
    """The ceilings that came with results, and those in `folder`. LabError for a folder that is not
    there."""
    from lab.roofline import probing

    if folder != RESULTS and not Path(folder).is_dir():
        raise LabError(
            f"There is no folder {folder} with ceilings.",
            "Name the one that lab ceilings wrote to.",
        )
    return [*reading.ceilings, *probing.kept(Path(folder), note)]


def hint(details: bool = False, path: Path | None = None, command: str = "show") -> str:
    """How to see all lines below a table: by --details, or by a command on a results file; "" if it
    was given."""
    return "" if details else shell.lab(command, "--details", path) if path else "add --details"


@dataclass(frozen=True)
class Output:
    """How a command that measured ends: what the options of OUTPUT ask for."""

    folder: Path
    as_json: bool
    plots: bool
    report: bool = False

    @classmethod
    def taken_from(cls, asked: dict[str, Any]) -> Output:
        """Takes these options out of those of a command."""
        return cls(
            Path(asked.pop("out")),
            asked.pop("as_json"),
            not asked.pop("no_plot"),
            asked.pop("report", False),
        )

    def finish(
        self,
        records: Sequence[Record | RequestRecord],
        path: Path,
        problem: LabError | None = None,
        failed: bool = False,
        made: Sequence[Section] | None = None,
        tables: Callable[[Console], object] | None = None,
        document: Callable[[], dict[str, Any]] | None = None,
        at_least: float | None = None,
        sentences: Sequence[str] = (),
        **more: Any,
    ) -> None:
        """Prints the tables, then draws, which may fail, and names the files; or prints all as one
        JSON document.

        Then raises the `problem` that ended the measurement early, or exits if a run `failed`.
        `tables` (those of lab compare) and `document` stand for those of the sections that are
        `made` of the records. The `sentences` are printed last, `more` is of the JSON document.
        """
        from lab.app import kinds
        from lab.features import report as page
        from lab.roofline import probing
        from lab.show import console, table
        from lab.show.comparison import AT_LEAST

        if records:
            if made is None:
                made = kinds.sections(records, context(records, (str(path),)))
            out = console.console(details=hint(path=path, command="compare" if tables else "show"))
            runs = table.of_engine(records)
            if tables and not self.as_json:
                tables(out)
            elif not self.as_json:
                kinds.print_results(records, out, made, sentences)
            plots = kinds.draw(made, path.parent, path.stem) if self.plots else []
            files = [f"\nresults  {path}", *(f"plot     {plot}" for plot in plots)]
            target = path.with_suffix(".html") if self.report and any_good(records) else None
            if target:
                ceilings = probing.kept(path.parent, note)
                others = nearby((str(path),), runs).records
                page.report(target, records, ceilings, at_least or AT_LEAST, others)
                files.append(f"report   {target}")
            if any_good(runs):
                files += next_steps(
                    runs, self.folder, f"{ceilings_command(runs)} && {shell.lab('explain', path)}"
                )
            elif any_good(table.alone(records)):
                files.append(f"next     a page to share: {shell.lab('report', path)}")
            if self.as_json:
                named = {
                    "session": path.stem,
                    "results": str(path),
                    "plots": [str(plot) for plot in plots],
                }
                more = {"report": None if target is None else str(target), **more}
                console.print_json(
                    {**named, **more, **(document() if document else kinds.as_json(records, made))}
                )
            for line in () if self.as_json else files:
                out.print(line)
        if problem:
            raise problem
        if failed:
            sys.exit(EXIT_FAILED)


def ceilings_command(runs: Sequence[Record]) -> str:
    """The commands that measure the ceilings of the engine, the model and the settings of plain runs."""
    from lab.roofline import probing

    plain = [one for one in runs if one.run.is_plain and not one.run.is_apart]
    return " && ".join(probing.commands(plain)) or shell.lab("ceilings")


def introduce(plans: Sequence[Plan], out: Console, err: Console, notes: Sequence[str] = ()) -> None:
    """Says what is measured where, and what the plans warn of; each sentence once."""
    from lab.show import text_setup

    for line in dict.fromkeys(
        line for plan in plans for line in text_setup.describe(plan.machine, plan.model)
    ):
        out.print(line)
    for warning in dict.fromkeys(
        [*(warning for plan in plans for warning in plan.warnings), *notes]
    ):
        err.print(f"Note: {warning}", style="yellow")


def carry_out(
    make: Callable[..., Plan], out: str, dry_run: bool, stream: bool = False, **asked: Any
) -> None:
    """Plans, measures and shows. `make` gets an engine's process and what was asked for, and
    returns the plan."""
    from lab.process.worker import Worker
    from lab.runner.session import execute, new_results_file
    from lab.show import console, text_results, text_setup

    output = Output.taken_from(asked | {"out": out})
    err = console.console(stderr=True)
    settings = {
        name: value for name, value in asked.items() if name not in ("as_json", "no_plot", "report")
    }
    text_out = err if output.as_json else console.console()
    with Worker() as worker:
        with console.transfer(err) as transferring:
            plan = make(worker, **settings, watch=None if dry_run else transferring)
        introduce([plan], text_out, err, text_setup.notes(plan))
        if dry_run:
            text_setup.print_plan(plan, output.as_json)
            return
        path = new_results_file(plan, output.folder)
        records, problem = collect(
            lambda watch: execute(plan, worker, path, watch, stream),
            path,
            err,
            text_out if stream else None,
        )
    wide = text_results.still_wide(records, plan)
    has_failed = bool(text_results.failures(records))
    output.finish(records, path, problem, has_failed, sentences=wide, still_wide=wide)


def next_steps(records: Sequence[Record], folder: Path, explain: str) -> list[str]:
    """What to do next: measure unreliable sessions again, into the same folder, or else explain
    plain runs."""
    from lab.show import text_results
    from lab.show.section import is_plain

    out = "" if folder == Path(RESULTS) else f" {shell.join('--out', folder)}"
    unreliable = text_results.unreliable([one for one in records if is_plain(one)])
    again = [
        f"next     measure again: {line}{out}" for own in unreliable if (line := asked.line(own))
    ]
    plain = [one for one in records if one.run.is_plain and not one.run.is_apart]
    return again or [f"next     what limited each phase: {explain}"] * any_good(plain)


def runs_in(records: Sequence[Record | RequestRecord], path: Path) -> str:
    """How many runs went well, and where they are."""
    n = sum(any_good([record]) for record in records)
    return f"{n} finished {'run is' if n == 1 else 'runs are'} in {path}" if n else ""


def collect(
    runs: Callable[[ShowStatus], Iterator[Any]],
    path: Path,
    err: Terminal,
    stream_to: Console | None = None,
    describe: Callable[[Any], str] | None = None,
    where: Callable[[list[Any], Path], str] = runs_in,
) -> tuple[list[Any], LabError | None]:
    """Measures and shows progress. Returns the records, and the LabError that ended it, if there
    was one.

    `where` says after Ctrl-C where what was measured is, "" where nothing was.
    """
    from lab.show import console, text_results

    records: list[Record | RequestRecord] = []
    try:
        with console.progress(err, stream_to, describe or text_results.finished) as (
            watch,
            finished,
        ):
            for record in runs(watch):
                records.append(record)
                finished(record)
    except LabError as error:
        return records, error
    except KeyboardInterrupt:
        kept = where(records, path)
        err.print(f"\nInterrupted. {kept}" if kept else "\nInterrupted before a run was finished.")
        sys.exit(EXIT_INTERRUPTED)
    return records, None


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
    from lab.app import kinds
    from lab.show import console

    reading = read(results, with_traces=True)
    records = list(reading.records)
    measured: list[Record | RequestRecord] = [*records, *reading.requests, *reading.traces]
    made = kinds.sections(
        measured, context(measured, results, ceilings=reading.ceilings, details=details)
    )
    if as_json:
        console.print_json(kinds.as_json(measured, made))
    else:
        out = console.console(details=hint(details))
        kinds.print_results(measured, out, made)
        for line in next_steps(records, plot_folder(results, None), shell.lab("explain", *results)):
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
    from lab.app import kinds
    from lab.show import text_results

    reading = read(results, with_traces=True)
    first = Path(results[0])
    measured = [*reading.measured, *reading.traces]
    if not any_good(measured):
        raise LabError(
            "There is nothing to draw: no run succeeded.", "Look at the errors: lab show RESULTS"
        )
    for sentence in text_results.imported(reading.records):
        note(sentence)
    stem = first.stem + (f"-and-{len(results) - 1}-more" if len(results) > 1 else "")
    made = kinds.sections(measured, context(measured, results, ceilings=reading.ceilings))
    for path in kinds.draw(made, plot_folder(results, out), stem):
        click.echo(printable(str(path)))


@click.command(cls=Command)
@click.argument("results", nargs=-1, required=True)
@click.option(
    "--out",
    "-o",
    metavar="FILE",
    help="The page.  [default: the first results file's name, with .html]",
)
@click.option("--ceilings", default=RESULTS, show_default=True, help="Folder with the ceilings.")
@AT_LEAST
@click.option(
    "--no-explore",
    is_flag=True,
    help="Leave out the sliders that predict other requests and devices.",
)
def report(
    results: tuple[str, ...], out: str | None, ceilings: str, at_least: float, no_explore: bool
) -> None:
    """Write results as one HTML page with the raw data inside.

    \b
      lab report results/FILE.jsonl
      lab report results/ --out report.html

    The page contains the data and needs no network, so you can mail it or put it on any server. lab
    show and lab compare read the records in it. If the ceilings of a machine are known (lab
    ceilings), it says what limited each phase, and has sliders for prompts, answers, users and
    devices, which predict as lab predict does.
    """
    from lab.features import report as page

    reading = read(results, with_traces=True)
    first = Path(results[0])
    default = first / "report.html" if first.is_dir() else first.with_suffix(".html")
    if first.name.startswith("sample-"):
        default = Path(default.name)  # not beside the samples of this repository
    path = Path(out) if out else default
    if path.suffix != ".html":
        raise LabError(
            f"A page's name must end in .html, and {path} does not.",
            "For example: --out report.html",
        )
    if path.resolve() in {Path(each).resolve() for each in results}:
        raise LabError(
            f"--out {path} would overwrite the results.", "Choose another name: --out report.html"
        )
    others = nearby(results, reading.records).records
    known = ceilings_of(reading, ceilings)
    measured = [*reading.measured, *reading.traces]
    click.echo(printable(str(page.report(path, measured, known, at_least, others, not no_explore))))


@click.command(cls=Command)
@click.argument("term", nargs=-1)
@as_json_option("text")
def words(term: tuple[str, ...], as_json: bool) -> None:
    """Explain the lab's terms, such as TTFT, ridge or ubatch.

    \b
      lab words                             # all terms
      lab words ttft
    """
    from lab.show import console, wording

    found = [wording.term(" ".join(term))] if term else wording.terms()
    if as_json:
        console.print_json([one._asdict() for one in found])
        return
    rows = [(one.name, one.meaning.replace("`", "")) for one in found]
    if term:
        rows += [
            ("unit", found[0].unit),
            ("shown in", found[0].shown),
            ("also", ", ".join(found[0].also)),
        ]
    formatter = click.HelpFormatter(max_width=100)
    formatter.write_dl([row for row in rows if row[1]])
    click.echo(formatter.getvalue(), nl=False)
