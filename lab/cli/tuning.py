"""The command that finds the fastest settings for a workload: tune."""

from __future__ import annotations

from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import DRY_RUN, OUTPUT, SEED, SETTINGS, TOKENS, with_options
from lab.cli.running import Output, collect, introduce


@click.command(cls=Command, first=("prompt-len", "gen", "model", "goal", "budget", "save"))
@with_options(
    click.option(
        "--prompt-len", "-p", type=TOKENS, default=1000, show_default=True, help="Prompt tokens of your requests."
    ),
    click.option("--gen", "-n", type=TOKENS, default=200, show_default=True, help="Tokens that an answer has."),
    click.option(
        "--goal",
        type=click.Choice(("request", "ttft", "tpot", "throughput")),
        default="request",
        show_default=True,
        help="What to make short: the whole request, the time to the first token, or that per further token; or the "
        "tokens per second of all users.",
    ),
    click.option("--users", default=1, show_default=True, help="Requests that are answered together, as in lab batch."),
    click.option("--budget", default="10min", show_default=True, help="Time to spend, such as 2min, 90s or 1h."),
    click.option(
        "--allow-lossy",
        is_flag=True,
        help="Also try settings that change what the model writes: cache types and other quantizations.",
    ),
    click.option("--save", metavar="NAME", help="Keep the recommended settings: --settings NAME uses them."),
    *SETTINGS,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def tune(save: str | None, dry_run: bool, **asked: Any) -> None:
    """Find the fastest settings for your requests, and prove the gain.

    \b
      lab tune -p 2000 -n 300
      lab tune --goal ttft --budget 3min --save quick

    The lab predicts what it can (from the ceilings and runs in --out), measures the promising combinations in blocks
    with fresh engines, and measures the best one again, side by side with the default. Only these last blocks give the
    gain. If nothing beats the default beyond noise, nothing is recommended. Settings that you give stay fixed.

    Every run is written to one file as soon as it ends; lab show, lab plot and lab report read it.
    """
    from lab.analysis.tuning import tuned
    from lab.experiments import tuning
    from lab.process.worker import Worker
    from lab.runner.session import new_results_file
    from lab.show import console

    output, err = Output.taken_from(asked), console.console(stderr=True)
    with Worker() as worker:
        with console.transfer(err) as transferring:
            plan = tuning.plan(worker, **asked, known=output.folder, watch=None if dry_run else transferring)
        introduce([plan.default], err, err, plan.notes)
        path = new_results_file(plan.default, output.folder, 40)
        records, problem = collect(lambda watch: tuning.execute(plan, worker, path, watch), path, err)
    found = tuned(records)
    if problem:
        raise problem
    if found:
        click.echo(f"{found.choice} {found.gain}")
