"""The command that finds the fastest settings for a workload: tune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.help import Command
from lab.cli.options import DRY_RUN, OUTPUT, SEED, SETTINGS, TOKENS, with_options
from lab.core import shell
from lab.core.lists import plural
from lab.core.record import Record
from lab.errors import LabError
from lab.features.running import Output, collect, introduce, note, runs_in

if TYPE_CHECKING:
    from lab.features.tune.tuning import TunePlan


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
    """Find the fastest settings for your requests, and prove it.

    \b
      lab tune -p 2000 -n 300
      lab tune --goal ttft --budget 3min --save quick

    The lab predicts what it can (from the ceilings and runs in --out), measures the promising combinations in blocks
    with fresh engines, and measures the best one again, side by side with the default. Only these last blocks give the
    gain. If nothing beats the default beyond noise, nothing is recommended. Settings that you give stay fixed.

    Every run is written to one file as soon as it ends; lab show, lab plot and lab report read it.
    """
    from lab.features.tune import tuning
    from lab.process.worker import Worker
    from lab.runner import saved_settings
    from lab.runner.session import new_results_file
    from lab.show import console

    if save is not None:
        saved_settings.path_of(save)  # an odd name is known before the search, not after it
    output, err = Output.taken_from(asked), console.console(stderr=True)
    with Worker() as worker:
        with console.transfer(err) as transferring:
            plan = tuning.plan(worker, **asked, known=output.folder, watch=None if dry_run else transferring)
        introduce([plan.default], err, err, plan.notes)
        if dry_run:
            return _print_plan(plan, output.as_json)
        path = new_results_file(plan.default, output.folder)
        records, problem = collect(lambda watch: tuning.execute(plan, worker, path, watch), path, err, where=_so_far)
    output.end(records, path, problem)
    if save is not None:
        _save(save, records)


def _save(name: str, records: Sequence[Record]) -> None:
    """Keep the recommended settings, and say so; LabError if nothing is recommended."""
    from lab.features.tune import text_tune
    from lab.features.tune.result import tuned
    from lab.runner import as_options, saved_settings
    from lab.show import setup_columns

    found = tuned(records)
    if found is None or not found.is_recommended or found.winner is None:
        raise LabError(
            f"Nothing is saved as {name}: no settings are recommended.",
            "Keep the default, or search longer: --budget 30min",
        )
    about = f"{text_tune.workload(found)}, {setup_columns.model_label(found.winner)}"
    path = saved_settings.save(name, as_options.asked(found.winner.settings), about)
    model = dict(found.choice).get("model")
    options = shell.join("--settings", name, *(["--model", model] if model else []))
    note(f"The settings are saved as {path}: {options} uses them.")


def _print_plan(plan: TunePlan, as_json: bool) -> None:
    """What `--dry-run` shows: the settings that can be tried, and what is predicted."""
    from lab.features.tune.tuning import variant
    from lab.runner import as_options
    from lab.runner.progress import duration
    from lab.show import console

    values: dict[str, list[Any]] = {}
    for choice in plan.choices:
        for name, value in choice:
            if value not in values.setdefault(name, []):
                values[name].append(value)
    if as_json:
        predicted = {
            phase: [{"settings": variant(choice, plan.default), "ratio": ratio} for choice, ratio in ratios.items()]
            for phase, ratios in plan.predicted.items()
        }
        console.print_json({"budget_s": plan.budget_s, "choices": len(plan.choices), **values, "predicted": predicted})
        return
    click.echo(f"{plural(len(plan.choices), 'choice')} besides the default, of these settings:")
    for name, of_name in sorted(values.items()):
        words = [as_options.option(name, value) for value in of_name]
        click.echo(f"  {words[0][0]:18} {', '.join(value for _, *values in words for value in values)}".rstrip())
    n_predicted = len({choice for ratios in plan.predicted.values() for choice in ratios})
    click.echo(f"{n_predicted:,} of them have a predicted time. The budget is {duration(plan.budget_s)}.")


def _so_far(records: list[Any], path: Path) -> str:
    """What Ctrl-C prints: where the runs are, and the best settings so far."""
    from lab.features.tune import result as tuning
    from lab.features.tune import text_tune

    found = [text_tune.sentences(one)[0] for one in tuning.of_sessions(records)]
    kept = runs_in(records, path)
    return " ".join([f"{kept}.", *found]) if kept else ""
