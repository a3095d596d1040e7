"""What the measuring commands share: plan, measure with progress, show, draw."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.cli.files import any_good, as_json_rows, claim_drawings, draw, experiments, note, other_sessions
from lab.errors import LabError

if TYPE_CHECKING:
    from rich.console import Console

    from lab.core.record import Record
    from lab.core.request import RequestRecord
    from lab.experiments.claim_verdicts import Verdicts
    from lab.runner.planned import Plan
    from lab.runner.progress import ShowStatus
    from lab.show.lever_kinds import Section

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130


def carry_out(
    make: Callable[..., Plan],
    out: str,
    as_json: bool,
    no_plot: bool,
    report: bool,
    dry_run: bool,
    stream: bool = False,
    run: Callable[..., Iterator[Record]] | None = None,
    **asked: Any,
) -> None:
    """Plans, measures and shows. `make` gets an engine's process and what was asked for, and returns the plan.

    `run` executes it where the loop of `measure` is not all.
    """
    from lab.process.worker import Worker
    from lab.runner.session import execute, new_results_file
    from lab.show import console, text_results, text_setup

    err = console.console(stderr=True)
    text_out = err if as_json else console.console()
    with Worker() as worker:
        with console.transfer(err) as transferring:
            plan = make(worker, **asked, watch=transferring, fetch=not dry_run)
        for line in text_setup.describe(plan.machine, plan.model):
            text_out.print(line)
        for warning in [*plan.warnings, *text_setup.notes(plan)]:
            err.print(f"Note: {warning}", style="yellow")
        if dry_run:
            text_setup.print_plan(plan, as_json)
            return
        path = new_results_file(plan, Path(out))

        def runs(watch: ShowStatus) -> Iterator[Record]:
            return (run or execute)(plan, worker, path, watch, stream)

        records, problem = collect(runs, path, err, text_out if stream else None, in_blocks=True)
    _show(records, path, plan, not no_plot, report, as_json)
    if problem:
        raise problem
    if text_results.failures(records):
        sys.exit(EXIT_FAILED)


def collect(
    runs: Any,
    path: Path,
    err: Console,
    stream_to: Console | None,
    in_blocks: bool = False,
    describe: Callable[[Any], str] | None = None,
) -> tuple[list[Any], LabError | None]:
    """Measures and shows progress. Returns the records, and the LabError that ended it, if there was one.

    `describe` gives the line of a finished record, where they are not runs of the engine.
    """
    from lab.show import console, text_results

    records: list[Record | RequestRecord] = []
    try:
        with console.progress(err, stream_to, describe or text_results.finished, in_blocks) as (watch, finished):
            for record in runs(watch):
                records.append(record)
                finished(record)
    except LabError as error:
        return records, error
    except KeyboardInterrupt:
        n = sum(any_good([record]) for record in records)
        word = "1 finished run is" if n == 1 else f"{n} finished runs are"
        err.print(f"\nInterrupted. {word} in {path}" if n else "\nInterrupted before a run was finished.")
        sys.exit(EXIT_INTERRUPTED)
    return records, None


def _show(
    records: list[Record],
    path: Path,
    plan: Plan,
    plots: bool,
    report: bool,
    as_json: bool,
) -> None:
    """Prints the table, then draws: drawing may fail."""
    from lab.analysis.comparison import AT_LEAST
    from lab.show import console, levers, text_results

    if not records:
        return
    out = console.console()
    shown = experiments(records, (str(path),))
    if not as_json:
        text_results.print_results(records, out)
        levers.print_sections(shown, out)
        for sentence in text_results.still_wide(records, plan):
            out.print(sentence)
    files = write_files(records, path, plots, report, AT_LEAST, None if as_json else out, shown)
    if as_json:
        still_wide = text_results.still_wide(records, plan)
        rows = as_json_rows(records, shown)
        console.print_json({**files, **rows, "still_wide": still_wide})


def write_files(
    records: Sequence[Record | RequestRecord],
    path: Path,
    plots: bool,
    report: bool,
    at_least: float,
    out: Console | None,
    shown: Sequence[Section] = (),
    judged: Sequence[tuple[str, Verdicts]] = (),
) -> dict[str, Any]:
    """Draws and writes what was asked for, names it in `out` where given, and returns the files by kind."""
    from lab.analysis.request_table import of_engine
    from lab.experiments import claim_session
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
    of_claims = claim_drawings(runs, (str(path),)) if plots else []
    drawn = draw(records, path.parent, path.stem, shown, of_claims) if plots else []
    files["plots"] = [named("plot", plot) for plot in drawn]
    files["report"] = None
    if report and any_good(records):
        known, others = probing.kept(path.parent, note), other_sessions((str(path),), runs)
        if judged:
            known = claim_session.known_ceilings(path.parent)
        target = path.with_suffix(".html")
        files["report"] = named("report", page.report(target, records, known, at_least, others, judged))
    plain = [record for record in runs if record.run.lever is None and record.run.part is None]
    if out and any_good(plain):
        ceilings = " ".join(["lab ceilings", *_of_engine(plain[0])])
        out.print(f"next     what limited it: {ceilings} && lab explain {path}; a page to share: lab report {path}")
    return files


def _of_engine(record: Record) -> list[str]:
    """The options of `lab ceilings` without which it would measure another engine or another model."""
    from lab.models import catalog

    settings = record.settings
    spec = "FILE" if record.model.source == catalog.FILE else catalog.spec_of(record.model)
    options = [] if spec == catalog.DEFAULT else ["-m", shlex.quote(spec)]
    options += ["--rpc", ",".join(settings.rpc)] if settings.rpc else []
    return options + (["--lib", "FOLDER"] if settings.lib else [])
