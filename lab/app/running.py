"""The one loop of the commands that measure: plan, measure with progress, keep, show."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.app.output import Output
from lab.core.lists import plural
from lab.core.record import Record
from lab.errors import EXIT_INTERRUPTED, LabError

if TYPE_CHECKING:
    from rich.console import Console

    from lab.core.lines import Lines, ResultLine
    from lab.process.worker import Worker
    from lab.runner.cases import MakesPlan, Plan
    from lab.runner.progress import ShowStatus
    from lab.show.console import Terminal


def introduce(
    plans: Sequence[Plan], out: Console, err: Console, notes: Sequence[str] = ()
) -> None:
    """Say what is measured where, and what the plans warn of; each sentence once."""
    from lab.show import text_plan

    lines: list[str] = []
    warnings: list[str] = []
    for plan in plans:
        lines += text_plan.describe(plan.machine, plan.model)
        warnings += plan.warnings
    for line in dict.fromkeys(lines):
        out.print(line)
    for warning in dict.fromkeys([*warnings, *notes]):
        err.print(f"Note: {warning}", style="yellow")


def carry_out(
    make: MakesPlan, out: str, dry_run: bool, stream: bool = False, **options: Any
) -> None:
    """Plan, measure and show. `make` gets an engine's process and what was asked for, and plans."""
    from lab.process.worker import Worker
    from lab.runner.session import execute, new_results_file
    from lab.show import console, text_doubts, text_plan

    options["out"] = out
    output = Output.taken_from(options)
    err = console.console(stderr=True)
    text_out = err if output.as_json else console.console()
    with Worker() as worker:
        with console.transfer(err) as show_transfer:
            plan = make(worker, **options, watch=None if dry_run else show_transfer)
        introduce([plan], text_out, err, text_plan.notes(plan))
        if dry_run:
            text_plan.print_plan(plan, output.as_json)
            err.print(expected_time(plan, worker))
            return
        path = new_results_file(plan, output.folder)
        records, problem = collect(
            lambda watch: execute(plan, worker, path, watch, stream),
            path,
            err,
            text_out if stream else None,
        )
    wide = text_doubts.still_wide(records, plan)
    has_failed = bool(text_doubts.failures(records))
    output.finish(records, path, problem, has_failed, sentences=wide, still_wide=wide)


def expected_time(plan: Plan, worker: Worker) -> str:
    """How long a plan will take, by a warm-up of its engine; why that is unknown, if it fails."""
    from lab.runner import pace
    from lab.runner.progress import duration

    if not plan.file.path.name:
        return "The time is unknown until the model is made."
    possible = tuple(case for case in plan.cases if case not in plan.refused)
    try:
        speed = pace.measured(worker, plan, lambda status: None)
    except LabError as problem:
        return f"The time is unknown: {problem.what}"
    planned = dataclasses.replace(plan, cases=possible)
    needed_s = speed.seconds([planned], plan.n_repeat)
    return f"Time: about {duration(needed_s)}, as fast as this machine is now"


def runs_in(records: Lines, path: Path) -> str:
    """How many runs went well, and where they are; "" if none did."""
    n_good = len([record for record in records if record.is_good])
    if n_good == 0:
        return ""
    if n_good == 1:
        return f"1 finished run is in {path}"
    return f"{plural(n_good, 'finished run')} are in {path}"


def collect(
    runs: Callable[[ShowStatus], Iterator[Any]],
    path: Path,
    err: Terminal,
    stream_to: Console | None = None,
    describe: Callable[[Any], str] | None = None,
    where: Callable[[list[Any], Path], str] = runs_in,
) -> tuple[list[Any], LabError | None]:
    """Measure and show progress. Returns the records, and the LabError that ended it, if one did.

    `where` says after Ctrl-C where what was measured is, "" where nothing was.
    """
    from lab.show import console, text_results
    from lab.show.so_far import SoFar

    records: list[ResultLine] = []
    try:
        describe_run = describe or text_results.finished
        with console.progress(err, stream_to, describe_run, SoFar()) as progress:
            watch, show_finished = progress
            for record in runs(watch):
                records.append(record)
                show_finished(record)
    except LabError as error:
        return records, error
    except KeyboardInterrupt:
        place = where(records, path)
        if place:
            err.print(f"\nInterrupted. {place}")
        else:
            err.print("\nInterrupted before a run was finished.")
        sys.exit(EXIT_INTERRUPTED)
    return records, None


def collect_search(
    lines: Callable[[ShowStatus], Iterator[ResultLine]],
    path: Path,
    err: Terminal,
    so_far: Callable[[list[ResultLine]], str],
) -> tuple[list[ResultLine], LabError | None]:
    """As `collect`, for a search: its lines are runs, and others about the search.

    `so_far` says what the search knows; Ctrl-C prints it.
    """
    from lab.show import text_results

    def describe(line: object) -> str:
        if isinstance(line, Record):
            return text_results.finished(line)
        return "searching"

    def where(measured: list[ResultLine], path: Path) -> str:
        place = runs_in([line for line in measured if isinstance(line, Record)], path)
        if not place:
            return ""
        return " ".join(filter(None, [f"{place}.", so_far(measured)]))

    return collect(lines, path, err, describe=describe, where=where)
