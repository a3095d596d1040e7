"""The command `lab claims`."""

from __future__ import annotations

from typing import Any

import click

from lab.app.help import Command
from lab.app.options import (
    ENGINE,
    MODEL,
    OUTPUT,
    PROMPT,
    SEED,
    budget_option,
    with_options,
)
from lab.app.output import Output
from lab.app.reading import note
from lab.app.running import collect, introduce
from lab.core.lists import plural
from lab.errors import LabError
from lab.features.claims import judging, section
from lab.features.claims.measuring import N_REPEAT, ClaimsSession, Measurement, choose, plan
from lab.process.worker import Worker
from lab.roofline import measuring, probing
from lab.runner import pace, session
from lab.runner.progress import duration
from lab.show.section import Context


@click.command(
    "claims", cls=Command, first=("only", "budget", "model", "threads", "report", "out")
)
@with_options(
    click.option("--only", metavar="NUMBERS", help="Test only these claims, such as 2,6."),
    budget_option(None, "Measure undecided claims again until this time is spent."),
    MODEL,
    PROMPT,
    *ENGINE,
    SEED,
    *OUTPUT,
)
def command(only: str | None, budget: float | None, **options: Any) -> None:
    """Test common claims about LLM inference on this machine.

    \b
      lab claims
      lab claims --only 2,6 --report

    Each claim has a criterion that is fixed before the measurement. The verdict is: holds here,
    does not hold here, cannot be told (too noisy), or not testable here, with the reason. What
    several claims need is measured once; all claims take about 5 minutes on two cores with the
    embedded model, and a minute more if the ceilings are unknown. Each run is written to one file
    as soon as it ends. lab show and lab report judge that file again, also after an interrupted
    session.
    """
    from lab.show import console

    output = Output.taken_from(options)
    chosen = choose(only)
    err = console.console(stderr=True)
    with Worker() as worker:
        with console.transfer(err) as transferring:
            planned = plan(worker, chosen, output.folder, **options, watch=transferring)
        warnings: list[str] = []
        for planned_part in planned.all_plans:
            warnings += planned_part.warnings
        introduce([planned.base], err, err, warnings)
        size = f"{plural(len(chosen), 'claim')}, {plural(len(planned.plans), 'part')}"
        err.print(f"{size}{expected_time(planned, worker)}")
        for part, reason in planned.problems.items():
            err.print(f"{part} cannot be measured: {reason}")
        path = session.new_results_file(planned.base, output.folder)
        records, problem = collect(
            lambda watch: Measurement(
                planned, worker, path, watch, err.print, budget_s=budget or 0.0
            ).execute(),
            path,
            err,
        )
    ceilings = probing.kept(output.folder, note)
    judged = judging.of_sessions(chosen, records, ceilings)
    failed = [record for record in records if record.run.error]
    is_unexpected = any(record.run.part not in planned.problems for record in failed)
    sections = section.sections(judged, Context())
    output.finish(records, path, problem, is_unexpected, shown=sections)


def expected_time(planned: ClaimsSession, worker: Worker) -> str:
    """The time of a session in words; "" for a model that does not run, which the parts explain."""
    try:
        speed = pace.measured(worker, planned.base, lambda status: None)
    except LabError:
        return ""
    expected_s = measuring.expected_s(planned.probes)
    for variants in planned.plans.values():
        expected_s += speed.seconds(list(variants.values()), N_REPEAT)
    return f": about {duration(expected_s)}"
