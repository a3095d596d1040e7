"""What the commands share: reading results; planning, measuring with progress, showing, drawing."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.core import shell
from lab.errors import LabError, printable

if TYPE_CHECKING:
    from rich.console import Console

    from lab.core.record import Ceilings, Record
    from lab.core.request import RequestRecord
    from lab.core.results import Contents
    from lab.runner.cases import Plan
    from lab.runner.progress import ShowStatus
    from lab.show.kind import Context
    from lab.show.section import Section


RESULTS = "results"
"""The default folder of results."""


def read(results: tuple[str, ...], with_traces: bool = False) -> Contents:
    """The contents of files and folders; a note on stderr for what is skipped.

    LabError where there is neither a run nor a request, nor (`with_traces`) a run of lab trace or lab quant.
    """
    from lab.core.results import read as read_files

    reading = read_files(results)
    for sentence in reading.skipped:
        note(sentence)
    if not (reading.records or reading.requests or (with_traces and reading.traces)):
        what = "only results of lab trace or lab quant" if reading.traces else "no runs"
        raise LabError(f"{' '.join(results)} contains {what}.", "Measure some: lab measure")
    return reading


def read_runs(results: tuple[str, ...], what: str) -> Contents:
    """As `read`, for what needs steps of an engine, in words such as "explain". LabError where there are none."""
    reading = read(results)
    if not reading.records:
        raise LabError(
            f"{' '.join(results)} contains only requests to servers, and no steps of the engine to {what}.",
            "Measure the model in process: lab measure -m MODEL. To see the requests: lab show RESULTS",
        )
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


def nearby(results: tuple[str, ...], measured: Sequence[Record | RequestRecord], holding: bytes = b"") -> Contents:
    """Other sessions that lie where the results are, in files that contain `holding`: they show how sessions differ."""
    from lab.core import results as files

    folders = {Path(name) if Path(name).is_dir() else Path(name).parent for name in results}
    return files.nearby(folders, measured, holding)


def faster_settings(results: tuple[str, ...], records: Sequence[Record]) -> list[str]:
    """A sentence on settings that a session of lab tune, in these results or beside them, found to be faster."""
    from lab.features.tune import result as tuned

    if all(record.run.is_apart for record in records):
        return []
    beside = nearby(results, records, holding=b'"tuning":{').records
    return tuned.faster_settings(records, [*records, *beside])


def plot_folder(results: tuple[str, ...], out: str | None) -> Path:
    """The folder for plots: `out`, else that of the first results file."""
    first = Path(results[0])
    return Path(out) if out else first if first.is_dir() else first.parent


def draws(results: tuple[str, ...], out: str | None, no_plot: bool) -> bool:
    """Whether a command draws: nothing is written beside committed samples unless asked."""
    is_sample = Path(results[0]).name.startswith("sample-") and not out
    if is_sample and not no_plot:
        note(f"{Path(results[0]).name} is a sample of this repository, so no picture was drawn: --out FOLDER draws it.")
    return not (no_plot or is_sample)


def any_good(records: Sequence[Record | RequestRecord]) -> bool:
    """Whether there is a timed or traced run, or a request, without an error."""
    from lab.core.record import Record
    from lab.show.request_table import went_well

    return any(
        record.run.is_timed or record.run.is_traced if isinstance(record, Record) else went_well(record)
        for record in records
    )


def context(records: Sequence[Record | RequestRecord], results: tuple[str, ...], **more: Any) -> Context:
    """What sections of these records may use: for experiments and claims the ceilings and runs that lie beside them."""
    from lab.core.record import Record
    from lab.features.limits import probing
    from lab.show.kind import Context

    runs = [one.run for one in records if isinstance(one, Record)]
    is_lever = any(run.lever and not run.is_apart for run in runs)
    if is_lever or any(run.part for run in runs):
        more["ceilings"] = [*more.get("ceilings", ()), *probing.kept(plot_folder(results, None), note)]
    if is_lever:
        more["others"] = nearby(results, records).records
    return Context(**more)


def ceilings_of(reading: Contents, folder: str) -> list[Ceilings]:
    """The ceilings that came with results, and those in `folder`. LabError for a folder that is not there."""
    from lab.features.limits import probing

    if folder != RESULTS and not Path(folder).is_dir():
        raise LabError(f"There is no folder {folder} with ceilings.", "Name the one that lab ceilings wrote to.")
    return [*reading.ceilings, *probing.kept(Path(folder), note)]


def hint(details: bool = False, path: Path | None = None, command: str = "show") -> str:
    """How to see all lines below a table: by --details, or by a command on a results file; "" if it was given."""
    if details:
        return ""
    return shell.lab(command, "--details", path) if path else "add --details"


EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


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
        return cls(Path(asked.pop("out")), asked.pop("as_json"), not asked.pop("no_plot"), asked.pop("report", False))

    def finish(
        self,
        records: Sequence[Record | RequestRecord],
        path: Path,
        tables: Callable[[Console], object] | None = None,
        document: Callable[[], dict[str, Any]] | None = None,
        shown_by: str = "show",
        made: Sequence[Section] | None = None,
        at_least: float | None = None,
        sentences: Sequence[str] = (),
        **more: Any,
    ) -> None:
        """Prints the tables, then draws, which may fail, and names the files; or prints all as one JSON document.

        `tables` and `document` stand for those of the sections that are `made` of the records. `shown_by`: the command
        that prints the same tables of the results file. `at_least`: the smallest difference that is claimed. The
        `sentences` are printed last, `more` is of the JSON document.
        """
        from lab.features import known, page
        from lab.features.compare.comparison import AT_LEAST
        from lab.features.limits import probing
        from lab.show import console, request_table

        if made is None:
            made = known.sections(records, context(records, (str(path),)))
        out = None if self.as_json else console.console(details=hint(path=path, command=shown_by))
        if out and tables:
            tables(out)
        elif out:
            known.print_results(records, out, made, sentences)
        plots, target, runs = list[Path](), None, request_table.of_engine(records)

        def say(line: str) -> None:
            if out:
                out.print(line)

        say(f"\nresults  {path}")
        if self.plots:
            plots = known.draw(made, path.parent, path.stem)
            for plot in plots:
                say(f"plot     {plot}")
        if self.report and any_good(records):
            ceilings, others = probing.kept(path.parent, note), nearby((str(path),), runs).records
            target = page.report(path.with_suffix(".html"), records, ceilings, at_least or AT_LEAST, others)
            say(f"report   {target}")
        plain = [record for record in runs if record.run.lever is None and not record.run.is_apart]
        if any_good(runs):
            probe = shell.lab("ceilings", *_of_engine(plain[0])) if plain else ""
            for line in next_steps(runs, self.folder, f"{probe} && {shell.lab('explain', path)}"):
                say(line)
        elif any_good([*request_table.alone(records), *request_table.loads_of(records)]):
            say(f"next     a page to share: {shell.lab('report', path)}")
        if out:
            return
        files = {"session": path.stem, "results": str(path), "plots": [str(plot) for plot in plots]}
        report = {"report": None if target is None else str(target)}
        console.print_json({**files, **report, **more, **(document() if document else known.as_json(records, made))})

    def end(
        self,
        records: Sequence[Record | RequestRecord],
        path: Path,
        problem: LabError | None,
        failed: bool = False,
        **how: Any,
    ) -> None:
        """As `finish` if something was measured; then raises what ended it early, or exits if a run `failed`."""
        if records:
            self.finish(records, path, **how)
        if problem:
            raise problem
        if failed:
            sys.exit(EXIT_FAILED)


def introduce(plans: Sequence[Plan], out: Console, err: Console, notes: Sequence[str] = ()) -> None:
    """Says what is measured where, and what the plans warn of; each sentence once."""
    from lab.show import text_setup

    lines = [line for plan in plans for line in text_setup.describe(plan.machine, plan.model)]
    for line in dict.fromkeys(lines):
        out.print(line)
    for warning in dict.fromkeys([*(warning for plan in plans for warning in plan.warnings), *notes]):
        err.print(f"Note: {warning}", style="yellow")


def carry_out(
    make: Callable[..., Plan],
    out: str,
    dry_run: bool,
    stream: bool = False,
    **asked: Any,
) -> None:
    """Plans, measures and shows. `make` gets an engine's process and what was asked for, and returns the plan."""
    from lab.features.measure import text_results
    from lab.process.worker import Worker
    from lab.runner.session import execute, new_results_file
    from lab.show import console, text_setup

    output, err = Output.taken_from(asked | {"out": out}), console.console(stderr=True)
    settings = {name: value for name, value in asked.items() if name not in ("as_json", "no_plot", "report")}
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
            lambda watch: execute(plan, worker, path, watch, stream), path, err, text_out if stream else None
        )
    faster = faster_settings((str(path),), records)
    still_wide = text_results.still_wide(records, plan)
    more: dict[str, Any] = {"still_wide": still_wide, **({"faster_settings": faster} if faster else {})}
    has_failed = bool(text_results.failures(records))
    output.end(records, path, problem, has_failed, sentences=[*still_wide, *faster], **more)


def next_steps(records: Sequence[Record], folder: Path, explain: str) -> list[str]:
    """What to do next: measure unreliable sessions again, into the same folder, or else explain plain runs."""
    from lab.features import known
    from lab.features.measure import text_results
    from lab.show.kind import is_plain

    out = "" if folder == Path(RESULTS) else f" {shell.join('--out', folder)}"
    unreliable = text_results.unreliable([one for one in records if is_plain(one)])
    again = [f"next     measure again: {line}{out}" for own in unreliable if (line := known.command(own))]
    plain = [one for one in records if one.run.lever is None and not one.run.is_apart]
    return again or [f"next     what limited each phase: {explain}"] * any_good(plain)


def runs_in(records: Sequence[Record | RequestRecord], path: Path) -> str:
    """How many runs went well, and where they are."""
    n = sum(any_good([record]) for record in records)
    return f"1 finished run is in {path}" if n == 1 else f"{n} finished runs are in {path}" if n else ""


def collect(
    runs: Callable[[ShowStatus], Iterator[Any]],
    path: Path,
    err: Console,
    stream_to: Console | None = None,
    describe: Callable[[Any], str] | None = None,
    where: Callable[[list[Any], Path], str] = runs_in,
) -> tuple[list[Any], LabError | None]:
    """Measures and shows progress. Returns the records, and the LabError that ended it, if there was one.

    `describe` gives the line of a finished record, where they are not runs of the engine. `where` says after Ctrl-C
    where what was measured is, "" where nothing was.
    """
    from lab.features.measure import text_results
    from lab.show import console

    records: list[Record | RequestRecord] = []
    try:
        with console.progress(err, stream_to, describe or text_results.finished, in_blocks=True) as (watch, finished):
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


def _of_engine(record: Record) -> list[str]:
    """The options of `lab ceilings` without which it would measure another engine or another model."""
    from lab.models import catalog

    settings = record.settings
    spec = "FILE" if record.model.source == catalog.FILE else catalog.spec_of(record.model)
    options = [] if spec == catalog.DEFAULT else ["-m", spec]
    options += ["--rpc", ",".join(settings.rpc)] if settings.rpc else []
    return options + (["--lib", "FOLDER"] if settings.lib else [])
