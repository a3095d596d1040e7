"""The commands that try a lever: batch, prefix, turns, stall, speculate.

The command that tries every claim of the textbooks: claims.
"""

from __future__ import annotations

from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import DRY_RUN, ENGINE, MODEL, OUTPUT, PROMPT, SEED, TOKENS, unified, with_options
from lab.features.experiment import Experiment, planning
from lab.features.experiments import EXPERIMENTS
from lab.features.running import Output, carry_out, collect, introduce, note


def _command(experiment: Experiment) -> click.Command:
    """The command of an experiment: its own options, then those of the engine."""
    names = [option.name for option in experiment.options]
    prompt = [] if "prompt" in names else [PROMPT]
    kv_unified = [unified(default)] if (default := experiment.lever.kv_unified) else []

    @with_options(*_options(experiment), MODEL, *prompt, *ENGINE, *kv_unified, SEED, *OUTPUT, DRY_RUN)
    def measure(out: str, **asked: Any) -> None:
        with planning(experiment.plan, out, experiment.saves_states) as make:
            carry_out(make, out, **asked)

    first = ("model", *(name.replace("_", "-") for name in names))[:6]
    return click.command(experiment.name, cls=Command, first=first, help=experiment.about)(measure)


def _options(experiment: Experiment) -> list[Any]:
    made = []
    for option in experiment.options:
        default = experiment.default(option)
        flag = option.flag or option.name.replace("_", "-")
        names = [option.name, f"--{flag}", *([f"-{option.short}"] if option.short else [])]
        is_flag = default is False
        is_tokens = option.name in ("gen", "suffix_len")
        made.append(
            click.option(
                *names,
                type=TOKENS if is_tokens and option.type is None else option.type,
                default=default,
                is_flag=is_flag,
                show_default=default is not None and not is_flag,
                metavar=option.metavar,
                help=option.help,
            )
        )
    return made


experiments = tuple(map(_command, EXPERIMENTS))


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
    from lab.features import known
    from lab.features.claims import judging, session
    from lab.features.claims import views as claim_views
    from lab.features.common import folder_in
    from lab.features.limits import probing
    from lab.process.worker import Worker
    from lab.runner.session import new_results_file
    from lab.show import console

    output, dry_run = Output.taken_from(asked), asked.pop("dry_run")
    folder = output.folder
    chosen = session.choose(only)
    err = console.console(stderr=True)
    with Worker() as worker, folder_in(folder) as states:
        with console.transfer(err) as transferring:
            asked["watch"] = None if dry_run else transferring
            planned = session.plan(worker, chosen, states, folder, **asked)
        introduce([planned.base], err, err, planned.warnings)
        for line in claim_views.plan_lines(planned):
            err.print(line)
        if dry_run:
            if output.as_json:
                problems = {name: str(reason) for name, reason in planned.problems.items()}
                numbers = [claim.number for claim in chosen]
                console.print_json({"claims": numbers, "parts": planned.expected_s, "problems": problems})
            else:
                console.console().print(claim_views.plan_table(planned))
            return
        path = new_results_file(planned.base, folder)
        records, problem = collect(lambda watch: session.execute(planned, worker, path, watch, err.print), path, err)
    judged = judging.of_sessions(chosen, records, probing.kept(folder, note))
    has_failed = any(record.run.error and record.run.part not in planned.problems for record in records)
    made = claim_views.sections(judged, known.warnings, with_criteria=False)
    output.end(records, path, problem, has_failed, made=made)
