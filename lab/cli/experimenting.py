"""The commands that try a lever: batch, prefix, stall, speculate.

The command that tries every claim of the textbooks: claims.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import click

from lab.cli.help import Command
from lab.cli.options import DRY_RUN, ENGINE, MODEL, OUTPUT, PROMPT, SEED, TOKENS, unified, with_options
from lab.cli.running import EXIT_FAILED, Output, as_json_rows, carry_out, collect, introduce
from lab.experiments.experiment import Experiment, planning
from lab.experiments.known import EXPERIMENTS

if TYPE_CHECKING:
    from lab.experiments.claims.claim_session import Session


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
        names = [f"--{option.name.replace('_', '-')}", *([f"-{option.short}"] if option.short else [])]
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


@click.command(cls=Command, first=("quick", "only", "model", "threads", "report", "out"))
@with_options(
    click.option("--only", metavar="NUMBERS", help="Test only these claims, such as 2,9."),
    click.option(
        "--quick",
        is_flag=True,
        help="Short prompts and few repeats: at most 4 minutes on two cores with the embedded model.",
    ),
    MODEL,
    PROMPT,
    *ENGINE,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def claims(only: str | None, quick: bool, **asked: Any) -> None:
    """Test common claims about LLM inference on this machine.

    \b
      lab claims --quick                    # what 4 minutes can test
      lab claims --only 2,9 --report

    Each claim has a criterion that is fixed before the measurement. The verdict is: holds here, does not hold here,
    cannot be told (too noisy), or not testable here, with the reason. What several claims need is measured once; all
    claims take at most 25 minutes on two cores with the embedded model. Each run is written to one file as soon as it
    ends. lab show and lab report judge that file again, also after an interrupted session.
    """
    from lab.experiments.claims import claim_session
    from lab.experiments.common import folder_in
    from lab.process.worker import Worker
    from lab.runner.session import new_results_file
    from lab.show import claim_views, console

    output, dry_run = Output.taken_from(asked), asked.pop("dry_run")
    folder = output.folder
    chosen = claim_session.choose(only)
    err = console.console(stderr=True)
    with Worker() as worker, folder_in(folder) as states:
        with console.transfer(err) as transferring:
            asked["watch"] = None if dry_run else transferring
            session = claim_session.plan(worker, chosen, quick, states, folder, **asked)
        introduce([session.base], err, err, session.warnings)
        for line in claim_views.plan_lines(session):
            err.print(line)
        if dry_run:
            _print_plan(session, output.as_json)
            return
        path = new_results_file(session.base, folder)
        records, problem = collect(
            lambda watch: claim_session.execute(session, worker, path, watch, err.print), path, err
        )
    base = session.base
    verdicts = claim_session.judge(chosen, records, claim_session.place_of(base), folder, quick)
    own, judged = list(verdicts.records), [(path.stem, verdicts)]
    rows = functools.partial(as_json_rows, own, judged=judged)
    output.finish(own, path, functools.partial(claim_views.print_verdicts, verdicts), rows, judged=judged)
    if problem:
        raise problem
    if any(record.run.error and record.run.part not in session.problems for record in records):
        sys.exit(EXIT_FAILED)


def _print_plan(session: Session, as_json: bool) -> None:
    """What `--dry-run` shows."""
    from lab.show import claim_views, console

    if not as_json:
        console.console().print(claim_views.plan_table(session))
        return
    n_runs = {name: sum(trial.n_runs for trial in trials) for name, trials in session.trials.items()}
    console.print_json(
        {
            "claims": [claim.number for claim in session.claims],
            "parts": [
                {"part": name, "runs": n_runs.get(name), "expected_s": seconds}
                for name, seconds in session.expected_s.items()
            ],
            "problems": {name: str(problem) for name, problem in session.problems.items()},
        }
    )
