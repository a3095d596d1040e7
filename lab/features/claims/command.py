"""`lab claims`: test every claim of the textbooks."""

from __future__ import annotations

from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import DRY_RUN, ENGINE, MODEL, OUTPUT, PROMPT, SEED, with_options
from lab.core.lists import plural
from lab.features.running import Output, collect, introduce, note


@click.command(cls=Command, first=("only", "model", "threads", "report", "out"))
@with_options(
    click.option("--only", metavar="NUMBERS", help="Test only these claims, such as 2,9."),
    MODEL,
    PROMPT,
    *ENGINE,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def claims(only: str | None, **asked: Any) -> None:
    """Test common claims about LLM inference on this machine.

    \b
      lab claims
      lab claims --only 2,9 --report

    Each claim has a criterion that is fixed before the measurement. The verdict is: holds here, does not hold here,
    cannot be told (too noisy), or not testable here, with the reason. What several claims need is measured once; all
    claims take about 5 minutes on two cores with the embedded model, and a minute more if the ceilings are unknown.
    Each run is written to one file as soon as it ends. lab show and lab report judge that file again, also after an
    interrupted session.
    """
    from lab.features.claims import judging, session, views
    from lab.features.limits import probing
    from lab.process.worker import Worker
    from lab.runner.progress import duration
    from lab.runner.session import new_results_file
    from lab.show import console
    from lab.show.section import Context

    output, dry_run = Output.taken_from(asked), asked.pop("dry_run")
    chosen, err = session.choose(only), console.console(stderr=True)
    with Worker() as worker:
        with console.transfer(err) as transferring:
            asked["watch"] = None if dry_run else transferring
            planned = session.plan(worker, chosen, output.folder, **asked)
        introduce([planned.base], err, err, planned.warnings)
        size = f"{plural(len(planned.expected_s), 'part')}: about {duration(sum(planned.expected_s.values()))}"
        err.print(f"{plural(len(chosen), 'claim')}, {size} on two cores of an EPYC")
        for part, reason in planned.problems.items():
            err.print(f"{part} cannot be measured: {reason}")
        if dry_run and output.as_json:
            problems = {name: str(why) for name, why in planned.problems.items()}
            numbers = [claim.number for claim in chosen]
            console.print_json({"claims": numbers, "parts": planned.expected_s, "problems": problems})
        if dry_run and not output.as_json:
            grid = console.Grid("part", "what it is", "time", "claims")
            for name, seconds in planned.expected_s.items():
                users = ",".join(str(claim.number) for claim in chosen if name in claim.parts)
                what = session.PARTS[name][0] if name in session.PARTS else "the best rate of each kernel"
                grid.add_row(name, what, duration(seconds), users)
            console.console().print(grid)
        if dry_run:
            return
        path = new_results_file(planned.base, output.folder)
        records, problem = collect(lambda watch: session.execute(planned, worker, path, watch, err.print), path, err)
    judged = judging.of_sessions(chosen, records, probing.kept(output.folder, note))
    has_failed = any(record.run.error and record.run.part not in planned.problems for record in records)
    output.end(records, path, problem, has_failed, made=views.sections(judged, Context()))
