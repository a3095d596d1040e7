"""The command `lab bisect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lab.app.help import Command
from lab.app.options import (
    DRY_RUN,
    OUTPUT,
    SEED,
    SETTINGS,
    SHARE,
    budget_option,
    gen_option,
    prompt_len_option,
    with_options,
)
from lab.app.output import Output
from lab.app.reading import note
from lab.app.running import collect_search, introduce
from lab.core.lines import Lines
from lab.core.record import Record
from lab.errors import LabError
from lab.features.bisect import figures, issue, measuring, series
from lab.features.bisect.lines import FIGURES
from lab.features.bisect.section import section
from lab.features.bisect.sentences import answer
from lab.process.worker import Worker
from lab.runner.progress import duration
from lab.runner.session import new_results_file
from lab.show.section import Context, Section

OPTIONS = (
    click.option(
        "--good",
        required=True,
        metavar="BUILD",
        help="The build that was fast: a version of llama-cpp-python, or a folder with libllama.",
    ),
    click.option("--bad", required=True, metavar="BUILD", help="The build that is slow."),
    click.option(
        "--among",
        multiple=True,
        metavar="FOLDER",
        help="A folder that contains the builds between; or builds in order, one each time.  "
        "[default: all versions of the index; all folders beside --good]",
    ),
    prompt_len_option(measuring.PROMPT_LEN, "Prompt tokens of each run."),
    gen_option(measuring.GEN, "Tokens to generate in each run."),
    click.option(
        "--figure",
        type=click.Choice(FIGURES),
        help="What became slower.  [default: both are searched]",
    ),
    click.option(
        "--at-least",
        type=SHARE,
        default="3%",
        show_default=True,
        help="Smallest slowdown to look for.",
    ),
    budget_option(
        measuring.BUDGET,
        "Time to measure, such as 20min or 3h. Building versions comes on top.",
    ),
)


@click.command(
    "bisect",
    cls=Command,
    first=("good", "bad", "among", "figure", "prompt-len", "gen"),
)
@with_options(*OPTIONS, DRY_RUN, *SETTINGS, SEED, *OUTPUT)
def command(dry_run: bool, **options: Any) -> None:
    """Find the build of llama.cpp that became slower.

    \b
      lab bisect --good 0.3.20 --bad 0.3.36 -p 512 -n 64
      lab bisect --good ~/llama/b9100 --bad ~/llama/b9518 --among ~/llama

    Compares the two builds, and the good one with itself, in alternating blocks with fresh
    processes. If the bad one is slower, the builds between are halved until two neighbours remain,
    which new blocks compare.

    Versions are built with pip into the lab's cache, about 2 minutes and 35 MB each, and run with
    their own bindings. All builds get the same settings.
    """
    from lab.show import console

    output = Output.taken_from(options)
    err = console.console(stderr=True)
    if dry_run:
        show_plan(
            series.find(options["good"], options["bad"], options["among"]), output.as_json
        )
        return
    with Worker() as worker, console.transfer(err) as show_transfer:
        plan = measuring.plan(worker, **options, watch=show_transfer)
    introduce([plan.base], err, err, plan.series.notes)
    err.print(announcement(plan))
    path = new_results_file(plan.base, output.folder)
    lines, problem = collect_search(
        lambda watch: measuring.execute(plan, path, watch), path, err, so_far
    )
    finish(output, lines, path, problem)


def finish(output: Output, lines: Lines, path: Path, problem: LabError | None) -> None:
    """Print the answer, and write the text for an issue beside the results."""
    shown: list[Section] = []
    if any(isinstance(line, Record) and line.is_good for line in lines):
        result = figures.bisected(lines)
        shown = [section(result, Context())]
        text = path.with_name(f"{path.stem}-issue.md")
        try:
            text.write_text(issue.text(result) + "\n", encoding="utf-8")
            if not output.as_json:
                note(f"A text for an issue is in {text}")
        except OSError as error:
            note(f"The text for an issue cannot be written to {text}: {error.strerror}.")
    output.finish(lines, path, problem, shown=shown)


def announcement(plan: measuring.BisectPlan) -> str:
    """What the search will do at most."""
    n_builds = len(plan.labels)
    lines = [
        f"{n_builds} builds from {plan.labels[0]} to {plan.labels[-1]}; a search of one figure "
        f"measures up to {measuring.most_built(plan.labels)} of them, for at most about "
        f"{duration(plan.budget_s)}."
    ]
    cost = measuring.cost_of_builds(plan.series)
    return " ".join(filter(None, [*lines, cost]))


def show_plan(builds: series.Series, as_json: bool) -> None:
    """Print what --dry-run shows: the builds in order, and what would be built."""
    from lab.show import console

    if as_json:
        console.print_json(
            {
                "builds": list(builds.labels),
                "in_cache": measuring.in_cache(builds),
                "most_measured": measuring.most_built(builds.labels),
                "notes": list(builds.notes),
            }
        )
        return
    for sentence in builds.notes:
        note(sentence)
    out = console.console()
    cached = measuring.in_cache(builds)
    labels_at: dict[str, list[str]] = {}
    for build in builds.builds:
        place = str(build.folder) if build.folder else "to be built when it is needed"
        if build.label in cached:
            place = "in the cache"
        labels_at.setdefault(place, []).append(build.label)
    for place, labels in labels_at.items():
        out.print(f"{place}: {', '.join(labels)}")
    out.print(
        f"{len(builds.builds)} builds; a search of one figure measures up to "
        f"{measuring.most_built(builds.labels)} of them."
    )
    cost = measuring.cost_of_builds(builds)
    if cost:
        out.print(cost)


def so_far(lines: Lines) -> str:
    """What the search knows so far, in a sentence."""
    return answer(figures.bisected(lines))
