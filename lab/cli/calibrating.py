"""The command that finds out how much a machine's sessions differ: calibrate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.options import SEED, SETTINGS, with_options
from lab.cli.running import collect
from lab.errors import LabError

if TYPE_CHECKING:
    from lab.core.record import Record
    from lab.runner.progress import ShowStatus


@click.command()
@with_options(
    click.option("--sessions", default=6, show_default=True, help="How many; 4 are the fewest."),
    click.option("--pause", default=45.0, show_default=True, help="Seconds between two sessions."),
    *SETTINGS,
    SEED,
    click.option("--out", "-o", default="results", show_default=True, help="Folder with the results."),
    click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout instead of the text."),
)
def calibrate(sessions: int, pause: float, out: str, as_json: bool, **asked: Any) -> None:
    """Find out how much this machine differs from itself, from one session to the next.

    Makes short sessions of one setup with pauses between them (about 5 minutes in all) and keeps them in the folder
    calibration inside of --out. lab compare takes from them how large a difference between two sessions must be to be
    claimed; without them it assumes a figure for the kind of machine. Spread over hours they see more.
    """
    from lab.analysis import disturbances
    from lab.analysis.spread import FIGURE_NAMES, known_spreads
    from lab.core.record import OK
    from lab.process.worker import Worker
    from lab.runner import calibration
    from lab.runner.plan import make_plan
    from lab.show import console, text_results

    err = console.console(stderr=True)
    calibration.check(sessions, pause)
    with Worker() as worker, console.transfer(err) as transferring:
        plan = make_plan(
            worker, calibration.LENGTHS, calibration.N_GEN, calibration.N_REPEAT, **asked, watch=transferring
        )

        if plan.refused:
            raise LabError(" ".join(plan.refused.values()), "Give a smaller model.")
        for warning in plan.warnings:
            err.print(f"Note: {warning}", style="yellow")

        def why_not(records: Sequence[Record]) -> str:
            timed = [record for record in records if record.run.status == OK and not record.run.warmup]
            if not timed:
                return "no run went well."
            return f"{'; '.join(disturbances.sentences(timed))}." if disturbances.is_doubtful(timed) else ""

        def runs(watch: ShowStatus) -> Iterator[Record]:
            return calibration.calibrate(plan, worker, Path(out), sessions, pause, watch, err.print, why_not)

        records, problem = collect(runs, Path(out) / calibration.FOLDER, err, None, in_blocks=True)
    if problem:
        raise problem
    spreads = {figure: spread for (_, figure), spread in known_spreads(records).items()}
    if as_json:
        console.print_json({figure: dataclasses.asdict(spread) for figure, spread in spreads.items()})
        return
    stdout = console.console()
    for figure, spread in spreads.items():
        stdout.print(f"{FIGURE_NAMES[figure]}: sessions differ by {spread.words}, one standard deviation")
    for line in text_results.failures(records):
        stdout.print(f"failed {line}")
    if not spreads:
        raise LabError(
            "Too few sessions went well and undisturbed to know how much sessions differ.",
            "Close what else runs, and calibrate again: what was measured counts.",
        )
    stdout.print("lab compare now claims differences between sessions of this machine only beyond that.")
