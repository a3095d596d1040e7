"""The command that finds the fastest settings for a workload: tune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from lab.cli.help import Command
from lab.cli.options import DRY_RUN, OUTPUT, SEED, SETTINGS, TOKENS, with_options
from lab.core import shell
from lab.core.lists import plural
from lab.core.record import Record
from lab.errors import LabError
from lab.features.running import Output, collect, introduce, note, runs_in


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
        help="Minimize the time of the whole request, to the first token (ttft) or per further token (tpot), or "
        "maximize the tokens per second of all users.",
    ),
    click.option("--users", default=1, show_default=True, help="Requests that are answered together, as in lab batch."),
    click.option("--budget", default="10min", show_default=True, help="Time to spend, such as 2min, 90s or 1h."),
    click.option(
        "--allow-lossy",
        is_flag=True,
        help="Also try settings that change what the model writes: cache types and other quantizations.",
    ),
    click.option("--save", metavar="NAME", help="Save the recommended settings; --settings NAME uses them."),
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

    Measures each setting alone, then the combinations that promise most, and then the best one again, side by side with
    the default. Only these last blocks give the gain. If nothing is faster than the default beyond noise, nothing is
    recommended. Settings that you give stay fixed.

    Every run is written to one file as soon as it ends; lab show, lab plot and lab report read it. lab show --details
    adds the recommended settings for other programs, and the lengths for which they are faster.
    """
    from lab.features.quant import views as quant_views
    from lab.features.tune import result, tuning
    from lab.process.worker import Worker
    from lab.runner import as_options
    from lab.runner.progress import duration
    from lab.runner.session import new_results_file
    from lab.show import console, setup_columns

    if save is not None:
        as_options.path_of(save)  # an odd name is known before the search, not after it
    output, err = Output.taken_from(asked), console.console(stderr=True)
    with Worker() as worker:
        with console.transfer(err) as transferring:
            plan = tuning.plan(worker, **asked, watch=None if dry_run else transferring)
        introduce([plan.default], err, err)
        if dry_run:
            pairs = dict.fromkeys(pair for choice in plan.choices for pair in choice)
            values = {name: [value for other, value in pairs if other == name] for name, _ in sorted(pairs, key=str)}
            if output.as_json:
                console.print_json({"budget_s": plan.budget_s, "choices": len(plan.choices), **values})
                return
            click.echo(f"{plural(len(plan.choices), 'choice')} besides the default, of these settings:")
            for name, of_name in values.items():
                words = [as_options.option(name, value) for value in of_name]
                click.echo(f"  {words[0][0]:18} {', '.join(value for _, *rest in words for value in rest)}".rstrip())
            click.echo(f"The budget is {duration(plan.budget_s)}.")
            return
        path = new_results_file(plan.default, output.folder)

        def so_far(records: Sequence[Any], path: Any) -> str:
            """What Ctrl-C prints: where the runs are, and the best settings so far."""
            kept = runs_in(list(records), path)
            found = [" ".join(result.sentences(one)) for one in result.of_sessions(records)]
            return " ".join([f"{kept}.", *found]) if kept else ""

        records, problem = collect(lambda watch: tuning.execute(plan, worker, path, watch), path, err, where=so_far)
    output.end(records, path, problem)
    if asked["allow_lossy"] and not output.as_json:
        for line in quant_views.known_lines(output.folder, [plan.default.model]):
            click.echo(line)
    if save is None:
        return
    found = result.tuned([record for record in records if isinstance(record, Record)])
    if found is None or not found.is_recommended or found.winner is None:
        raise LabError(
            f"Nothing is saved as {save}: no settings are recommended.",
            "Keep the default, or search longer: --budget 30min",
        )
    about = f"{result.workload(found)}, {setup_columns.model_label(found.winner)}"
    kept = as_options.save(save, as_options.asked(found.winner.settings), about)
    model = dict(found.choice).get("model")
    options = shell.join("--settings", save, *(["--model", model] if model else []))
    note(f"The settings are saved as {kept}: {options} uses them.")
