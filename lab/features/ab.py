"""Compare settings or models, measured alternately: `lab.ab` and the command."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import click
from click.core import ParameterSource

from lab.app.collection import Results
from lab.app.command_words import words_of_values
from lab.app.help import Command
from lab.app.options import (
    AT_LEAST,
    DRY_RUN,
    OUTPUT,
    SAMPLING,
    SEED,
    SETTINGS,
    budget_option,
    gen_option,
    lengths_option,
    with_options,
)
from lab.app.output import Output
from lab.app.running import collect, introduce
from lab.core import shell, stats
from lab.core.arguments import Numbers, StrPath
from lab.core.keywords import EngineSettings, SamplerSettings
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.stored_command import storing
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import progress, trial
from lab.runner.cases import MakesPlan, Plan
from lab.runner.plan import make_plan
from lab.runner.progress import Watch, duration
from lab.runner.session import new_results_file
from lab.runner.trial import N_BLOCKS, Blocks

BUDGET_S = 120.0
CURE = "Measure longer: add --budget 10min, or more blocks with --repeat."


class AbSettings(EngineSettings, SamplerSettings, total=False):
    pass


def ab(
    variants: Sequence[Mapping[str, object]],
    prompt_len: Numbers = "256",
    gen: int = 32,
    repeat: int = N_BLOCKS,
    model: str = catalog.DEFAULT,
    *,
    out: StrPath = "results",
    watch: Watch = None,
    **shared: Unpack[AbSettings],
) -> Results[Record]:
    """Measure settings side by side in `repeat` blocks and return the records.

        lab.compare(lab.ab([{"threads": 1}, {"threads": 2}]))

    The first variant is the base. A variant has its own settings (and model, if it differs),
    `shared` those of all.
    """
    labelled = trial.named(variants)
    options: dict[str, Any] = {"prompt_len": prompt_len, "gen": gen, "model": model, **shared}
    with Worker() as worker:
        plans = trial.plan(worker, labelled, repeat, **options)
    path = new_results_file(next(iter(plans.values())), Path(out))
    labels = [label for label, _ in labelled]
    words = words_of_values(command, {"variants": labels, "repeat": repeat, **options})
    with progress.shown_to(watch) as show, storing(words):
        return Results(trial.execute(plans, Blocks(repeat), path, show))


class WithVariants(Command):
    """A command whose arguments may be options in quotes, such as "--threads 2"."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put a space before a variant: click takes what begins with a dash for an option."""
        arguments = []
        for arg in args:
            is_variant = re.match(r"--?[\w-]+\s", arg)
            arguments.append(f" {arg}" if is_variant else arg)
        return super().parse_args(ctx, arguments)


def parse_variant(text: str) -> dict[str, Any]:
    """The settings that a variant names, such as `--threads 1 --flash-attn off`.

    LabError if it is not understood.
    """
    variant = click.Command("variant", add_help_option=False)
    for option in (*SETTINGS, *SAMPLING):
        option(variant)
    try:
        context = variant.make_context("variant", shell.split(text))
    except click.ClickException as problem:
        raise _not_understood(text, problem.format_message()) from None
    except ValueError as problem:
        raise _not_understood(text, str(problem)) from None
    named_by = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP)
    settings: dict[str, Any] = {}
    for name, value in context.params.items():
        if context.get_parameter_source(name) in named_by:
            settings[name] = value
    return settings


def notes_on_blocks(plans: Sequence[Plan], n_blocks: int) -> list[str]:
    """A note if the blocks are too few for an interval: all intervals hold together."""
    n_figures = 0
    for case in plans[0].cases:
        n_figures += 1 if case.n_gen < 2 else 2  # prefill and TPOT
    n_compared = n_figures * (len(plans) - 1)
    share_outside = (1 - stats.CONFIDENCE) / max(1, n_compared)
    n_needed = stats.fewest_for_interval(1 - share_outside)
    if n_blocks >= n_needed:
        return []
    return [
        f"{plural(n_blocks, 'block')} are too few for a verdict on {n_compared} figures: "
        f"it needs at least --repeat {n_needed}."
    ]


def _is_default(name: str) -> bool:
    """Whether an option was not given."""
    source = click.get_current_context().get_parameter_source(name)
    return source is ParameterSource.DEFAULT


def _not_understood(text: str, message: str) -> LabError:
    return LabError(
        f"The variant {text!r} is not understood: {message}",
        "Write it as options: --threads 2",
    )


@click.command(
    "ab",
    cls=WithVariants,
    first=("prompt-len", "gen", "repeat", "sequences", "at-least", "report"),
)
@click.argument("variants", nargs=-1, required=True, metavar="VARIANT VARIANT...")
@with_options(
    lengths_option("256", "Prompt lengths, as for measure."),
    gen_option(32, "Tokens to generate in each run."),
    click.option(
        "--sequences",
        "-s",
        help="Sequences to decode together, as in lab batch.  [default: one sequence]",
    ),
    click.option(
        "--repeat",
        "-r",
        default=N_BLOCKS,
        help=f"Blocks; each runs every variant twice.  [default: {N_BLOCKS}, as far as the budget "
        "allows]",
    ),
    budget_option(
        None,
        "Time to spend, such as 10min: no block starts that would end after it.  [default: "
        "2min, without a limit if --repeat is given]",
    ),
    DRY_RUN,
    AT_LEAST,
    *SETTINGS,
    *SAMPLING,
    SEED,
    *OUTPUT,
)
def command(
    variants: tuple[str, ...],
    repeat: int,
    budget: float | None,
    dry_run: bool,
    at_least: float,
    sequences: str | None,
    **options: Any,
) -> None:
    """Compare settings or models, measured alternately.

    \b
      lab ab "--flash-attn on" "--flash-attn off" --prompt-len 256,2k
      lab ab "-m smollm2-135m" "-m smollm2-135m:Q8_0" --threads 2

    A VARIANT is options in quotes; the first is the base. Options outside quotes apply to all
    variants.

    In each block every variant gets a fresh engine and runs twice: in random order, then in reverse
    order. Changes of the machine's speed therefore affect all variants equally.
    """
    from lab.runner import batches
    from lab.show import comparison, console, text_comparison, text_doubts, text_plan

    output = Output.taken_from(options)
    err = console.console(stderr=True)
    labelled = [(text.strip(), parse_variant(text)) for text in variants]
    make: MakesPlan = make_plan
    if sequences is not None:
        make = partial(batches.plan, sequences=sequences)
    with Worker() as worker, console.transfer(err) as transferring:
        plans = trial.plan(worker, labelled, repeat, make, **options, watch=transferring)
    introduce(list(plans.values()), err, err, notes_on_blocks(list(plans.values()), repeat))
    if budget is None and _is_default("repeat"):
        budget = BUDGET_S
    if dry_run:
        text_plan.print_plans(plans, output.as_json)
        if budget is not None:
            err.print(f"No block begins that would end after {duration(budget)} (--budget).")
        return
    path = new_results_file(next(iter(plans.values())), output.folder)
    blocks = Blocks(repeat, budget_s=math.inf if budget is None else budget)
    records, problem = collect(
        lambda watch: trial.execute(plans, blocks, path, watch), path, err
    )
    if problem:
        raise problem
    groups = comparison.groups(records)
    comparisons = comparison.compare_groups(groups, at_least)
    warnings = text_doubts.warnings(records)
    tables = partial(
        text_comparison.print_comparisons,
        groups,
        comparisons,
        at_least,
        warnings=warnings,
        cure=CURE,
    )
    document = partial(text_comparison.as_json, groups, comparisons)
    output.finish(records, path, tables=tables, document=document, at_least=at_least)
