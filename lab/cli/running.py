"""What the commands share: reading results; planning, measuring with progress, showing, drawing."""

from __future__ import annotations

import dataclasses
import functools
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
    from lab.experiments.claims.judging import Verdicts
    from lab.runner.cases import Plan
    from lab.runner.progress import ShowStatus
    from lab.show.section import Picture, Section


RESULTS = "results"
"""The default folder of results."""


def read(results: tuple[str, ...], with_traces: bool = False) -> Contents:
    """The contents of files and folders; a note on stderr for what is skipped.

    LabError where there is neither a run nor a request, nor (`with_traces`) a run of lab trace.
    """
    from lab.core.results import read as read_files

    reading = read_files(results)
    for sentence in reading.skipped:
        note(sentence)
    if not (reading.records or reading.requests or (with_traces and reading.traces)):
        what = "only runs of lab trace" if reading.traces else "no runs"
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
    from lab.analysis.tuning import without

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
    from lab.show import text_tune

    if all(record.run.is_apart for record in records):
        return []
    beside = nearby(results, records, holding=b'"tuning":{').records
    return text_tune.faster_settings(records, [*records, *beside])


def plot_folder(results: tuple[str, ...], out: str | None) -> Path:
    """The folder for plots: `out`, else that of the first results file."""
    first = Path(results[0])
    return Path(out) if out else first if first.is_dir() else first.parent


def any_good(records: Sequence[Record | RequestRecord]) -> bool:
    """Whether there is a timed or traced run, or a request, without an error."""
    from lab.analysis.request_table import went_well
    from lab.core.record import Record

    return any(
        record.run.is_timed or record.run.is_traced if isinstance(record, Record) else went_well(record)
        for record in records
    )


def draw(
    records: Sequence[Record | RequestRecord],
    folder: Path,
    stem: str,
    shown: Sequence[Section] = (),
    of_claims: Sequence[Picture] = (),
    by_session: bool = False,
) -> list[Path]:
    """Draws the plots that there is data for, of experiments those `shown`; their paths: `<stem>-prefill.png` ...

    Of runs that were made for claims those in `of_claims`. Requests share pictures with runs; with `by_session`
    sessions of one setup are drawn apart.
    """
    from lab.analysis import request_table, tuning
    from lab.drawing import canvas
    from lab.show import levers, plot_runs, section, text_load, text_tune, trace_views

    if not (any_good(records) or request_table.loads_of(records)):
        return []
    sizes: dict[str, tuple[float, float]] = {"prefill": (8, 5), "decode": (8, 5)}
    of_engine = request_table.of_engine(records)
    plain = [record for record in tuning.without(of_engine) if record.run.part is None]
    drawings = plot_runs.drawings([*plain, *request_table.alone(records)], by_session=by_session)
    drawings |= levers.drawings(shown)
    wanted = [(name, drawing, sizes.get(name, (11, 5))) for name, drawing in drawings.items()]
    of_tune = section.numbered([one.pictures for one in text_tune.sections(of_engine)])
    of_loads = section.numbered([one.pictures for one in text_load.sections(records)])
    of_traces = section.numbered_alike([one for each in trace_views.sections(of_engine) for one in each.pictures])
    wanted += [(one.name, one.draw, one.file_size) for one in (*of_claims, *of_tune, *of_loads, *of_traces)]
    return [path for name, drawing, size in wanted for path in canvas.write(drawing, folder, f"{stem}-{name}", size)]


def claim_pictures(judged: Sequence[Verdicts]) -> list[Picture]:
    """The pictures of sessions of claims."""
    from lab.show import claim_views, section

    return section.numbered([claim_views.pictures(verdicts) for verdicts in judged])


def experiments(
    records: Sequence[Record], results: tuple[str, ...], ceilings: Sequence[Ceilings] = ()
) -> list[Section]:
    """What experiments among the records of these files showed, predicted from ceilings and what lies beside them."""
    from lab.show import levers
    from lab.why import probing

    records = [record for record in records if not record.run.is_apart]
    if not any(record.run.lever for record in records):
        return []
    known = [*ceilings, *probing.kept(plot_folder(results, None), note)]
    return levers.sections(records, known, nearby(results, records).records)


def ceilings_of(reading: Contents, folder: str) -> list[Ceilings]:
    """The ceilings that came with results, and those in `folder`. LabError for a folder that is not there."""
    from lab.why import probing

    if folder != RESULTS and not Path(folder).is_dir():
        raise LabError(f"There is no folder {folder} with ceilings.", "Name the one that lab ceilings wrote to.")
    return [*reading.ceilings, *probing.kept(Path(folder), note)]


def verdicts_of(
    records: Sequence[Record], results: tuple[str, ...], ceilings: Sequence[Ceilings] = ()
) -> list[Verdicts]:
    """The verdicts of each session of claims among the records of these files."""
    from lab.experiments.claims import judging
    from lab.experiments.claims.figures import CLAIMS
    from lab.why import probing

    if not any(record.run.part for record in records):
        return []
    return list(judging.of_sessions(CLAIMS, records, [*ceilings, *probing.kept(plot_folder(results, None), note)]))


def as_json_rows(
    records: Sequence[Record],
    shown: Sequence[Section] = (),
    judged: Sequence[Verdicts] = (),
    requests: Sequence[RequestRecord] = (),
    faster: Sequence[str] = (),
    traces: Sequence[Record] = (),
) -> dict[str, Any]:
    """The rows of the summary, of experiments, claims and requests, traces, what disturbed the runs, and what failed.

    `faster`: sentences on faster settings.
    """
    from lab.analysis import table
    from lab.show import levers, text_load, text_requests, text_results, text_tune, trace_views

    rows = table.summary(table.runs([record for record in records if not record.run.is_apart]))
    return {
        "rows": [
            *rows.to_dict("records"),
            *levers.as_rows(shown),
            *(row for verdicts in judged for row in verdicts.rows),
            *text_requests.as_rows(requests),
        ],
        **levers.more(shown),
        **({"tunings": tuned} if (tuned := text_tune.as_rows(records)) else {}),
        **({"loads": of_loads} if (of_loads := text_load.as_rows(requests)) else {}),
        **({"faster_settings": list(faster)} if faster else {}),
        **({"traces": trace_views.as_rows(traces)} if traces else {}),
        "warnings": [*text_results.warnings(records), *text_requests.warnings(requests)],
        "failures": [*text_results.failures(records), *text_requests.failures(requests)],
    }


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
        tables: Callable[[Console], object],
        document: Callable[[], dict[str, Any]],
        shown_by: str = "show",
        **more: Any,
    ) -> None:
        """Prints the tables, then draws, which may fail, and names the files; or prints all as one JSON document.

        `shown_by`: the command that prints the same tables of the results file.

        `more`: the smallest difference that is claimed (`at_least`), sections that are `shown`.
        """
        from lab.show import console

        out = None if self.as_json else console.console(details=hint(path=path, command=shown_by))
        if out:
            tables(out)
        written = self._write(records, path, out, **more) if records else {}
        if self.as_json:
            console.print_json({**written, **document()})

    def _write(
        self,
        records: Sequence[Record | RequestRecord],
        path: Path,
        out: Console | None,
        at_least: float | None = None,
        shown: Sequence[Section] = (),
    ) -> dict[str, Any]:
        """Draws and writes what was asked for, names it in `out` where given, and returns the files by kind."""
        from lab.analysis.comparison import AT_LEAST
        from lab.analysis.request_table import of_engine
        from lab.show import page
        from lab.why import probing

        runs = of_engine(records)

        def named(kind: str, file: Path) -> str:
            if out:
                out.print(f"{kind:8} {file}")
            return str(file)

        if out:
            out.print()
        files: dict[str, Any] = {"session": path.stem, "results": named("results", path)}
        of_claims = claim_pictures(verdicts_of(runs, (str(path),))) if self.plots else []
        drawn = draw(records, path.parent, path.stem, shown, of_claims) if self.plots else []
        files["plots"] = [named("plot", plot) for plot in drawn]
        files["report"] = None
        if self.report and any_good(records):
            known, others = probing.kept(path.parent, note), nearby((str(path),), runs).records
            target = path.with_suffix(".html")
            files["report"] = named("report", page.report(target, records, known, at_least or AT_LEAST, others))
        plain = [record for record in runs if record.run.lever is None and not record.run.is_apart]
        if out and any_good(plain):
            ceilings = shell.lab("ceilings", *_of_engine(plain[0]))
            out.print(f"next     what limited each phase: {ceilings} && {shell.lab('explain', path)}")
            out.print(f"next     a page to share: {shell.lab('report', path)}")
        return files


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
    from lab.process.worker import Worker
    from lab.runner.session import execute, new_results_file
    from lab.show import console, text_results, text_setup

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
    if records:
        shown = experiments(records, (str(path),))
        still_wide = text_results.still_wide(records, plan)
        faster = faster_settings((str(path),), records)

        def tables(stdout: Console) -> None:
            text_results.print_results(records, stdout, shown)
            for sentence in (*still_wide, *faster):
                stdout.print(sentence)

        rows = functools.partial(as_json_rows, records, shown, faster=faster)
        output.finish(records, path, tables, lambda: {**rows(), "still_wide": still_wide}, shown=shown)
    if problem:
        raise problem
    if text_results.failures(records):
        sys.exit(EXIT_FAILED)


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
    from lab.show import console, text_results

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
