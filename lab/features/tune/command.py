"""The command `lab tune`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from lab.app.help import Command
from lab.app.options import (
    OUTPUT,
    SEED,
    SETTINGS,
    Unstored,
    budget_option,
    gen_option,
    prompt_len_option,
    with_options,
)
from lab.app.output import Output
from lab.app.reading import note
from lab.app.running import collect_search, introduce
from lab.core import shell
from lab.errors import LabError
from lab.features.tune import figures, measuring, planning
from lab.features.tune.lines import GOALS, REQUEST
from lab.features.tune.section import sentences
from lab.process.worker import Worker
from lab.runner import as_options
from lab.runner.progress import duration
from lab.runner.session import new_results_file

GOAL_HELP = (
    "Minimize the time of the whole request, to the first token (ttft) or per further token "
    "(tpot), or maximize the tokens per second of all users."
)
OPTIONS = (
    prompt_len_option(planning.PROMPT_LEN, "Prompt tokens of your requests."),
    gen_option(planning.GEN, "Tokens that an answer has."),
    click.option(
        "--goal",
        type=click.Choice(tuple(GOALS)),
        default=REQUEST,
        show_default=True,
        help=GOAL_HELP,
    ),
    click.option(
        "--sequences",
        "-s",
        default=1,
        show_default=True,
        help="Requests that are answered together, as in lab batch.",
    ),
    budget_option(planning.BUDGET, "Time to spend, such as 2min, 90s or 1h."),
    click.option(
        "--beside",
        type=int,
        metavar="N",
        default=0,
        help="Tune for a machine in use: N busy programs of another session run all the time, "
        "and how threads wait is tried, too.",
    ),
    click.option(
        "--allow-lossy",
        is_flag=True,
        help="Also try settings that change what the model writes: cache types and other "
        "quantizations.",
    ),
)
SAVE = click.option(
    "--save",
    cls=Unstored,
    metavar="NAME",
    help="Save the recommended settings; --settings NAME uses them.",
)


@click.command(
    "tune", cls=Command, first=("prompt-len", "gen", "model", "goal", "budget", "save")
)
@with_options(*OPTIONS, SAVE, *SETTINGS, SEED, *OUTPUT)
def command(save: str | None, **options: Any) -> None:
    """Find the fastest settings for your requests, and prove it.

    \b
      lab tune -p 2000 -n 300
      lab tune --goal ttft --budget 3min --save quick

    Measures each setting alone, then the combinations that promise most, and then the best one
    again, side by side with the default. Only these last blocks give the gain. If nothing is faster
    than the default beyond noise, nothing is recommended. Settings that you give stay fixed.

    Every run is written to one file as soon as it ends; lab show, lab plot and lab report read it.
    lab show --details adds the command line of llama-server.
    """
    from lab.show import console

    if save is not None:
        as_options.path_of(save)  # an odd name is known before the search, not after it
    output = Output.taken_from(options)
    err = console.console(stderr=True)
    with Worker() as worker:
        with console.transfer(err) as show_transfer:
            plan = planning.plan(worker, **options, watch=show_transfer)
        introduce([plan.default], err, err)
        err.print(f"At most about {duration(plan.budget_s)}")
        path = new_results_file(plan.default, output.folder)
        lines, problem = collect_search(
            lambda watch: measuring.execute(plan, worker, path, watch), path, err, so_far
        )
    output.finish(lines, path, problem)
    if save:
        save_settings(save, figures.tuned(lines))


def so_far(lines: Sequence[object]) -> str:
    """The best settings so far, in sentences."""
    answers: list[str] = []
    for result in figures.of_sessions(lines):
        answers += sentences(result)
    return " ".join(answers)


def save_settings(name: str, result: figures.Tuned | None) -> None:
    """Save the recommended settings. LabError without a recommendation."""
    if result is None or result.winner is None or not result.is_recommended:
        raise LabError(
            f"Nothing is saved as {name}: no settings are recommended.",
            "Keep the default, or search longer: --budget 30min",
        )
    path = as_options.save(name, as_options.keywords_of(result.winner.settings))
    options = ["--settings", name]
    model = dict(result.choice).get("model")
    if model:
        options += ["--model", str(model)]
    note(f"The settings are saved as {path}: {shell.join(*options)} uses them.")
