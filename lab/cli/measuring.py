"""The commands that measure: measure, sweep, ab."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lab.cli.files import any_good, as_json_rows, draw, note, other_sessions
from lab.cli.options import DRY_RUN, OUTPUT, SEED, SETTINGS, UNTIL, Share, WithVariants, parse_variant, with_options
from lab.errors import LabError

if TYPE_CHECKING:
    from rich.console import Console

    from lab.core.record import Record
    from lab.runner.plan import Plan, Until
    from lab.runner.progress import ShowStatus

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
LEAST_SHARE = 1e-4


@click.command()
@with_options(
    click.option(
        "--prompt-len",
        "-p",
        default="10,100,1000",
        show_default=True,
        help="Prompt lengths in tokens: 10,1000,10000 or 100-500+100 or 512-4096*2.",
    ),
    click.option("--gen", "-n", default=64, show_default=True, help="Tokens to generate in each run."),
    click.option(
        "--repeat",
        "-r",
        type=int,
        help="Runs of each prompt length, each in a fresh engine.  [default: 3; 6 of lengths that cost little]",
    ),
    *UNTIL,
    *SETTINGS,
    SEED,
    *OUTPUT,
    click.option("--stream", is_flag=True, help="Show the generated text as it comes."),
    DRY_RUN,
)
def measure(**asked: Any) -> None:
    """Time every token of generations at several prompt lengths.

    Without options: a first look that takes about half a minute on two cores. Each run prefills a prompt and
    generates --gen tokens; its time stamps go into a new file in --out the moment it ends. Exit status: 0
    when all runs went well, 1 when some failed, 130 after Ctrl-C.
    """
    _measure(**asked)


@click.command()
@with_options(
    click.option("--max-len", "-p", default=8192, show_default=True, help="Prompt tokens at the end of the walk."),
    click.option(
        "--every", "-e", default=512, show_default=True, help="Prompt tokens between two measurements of decode."
    ),
    click.option("--gen", "-n", default=16, show_default=True, help="Tokens to generate at each measurement."),
    click.option("--repeat", "-r", default=3, show_default=True, help="Walks through the context."),
    *UNTIL,
    *SETTINGS,
    SEED,
    *OUTPUT,
    DRY_RUN,
)
def sweep(max_len: int, **asked: Any) -> None:
    """Measure both curves, prefill and decode, in one walk through the context.

    After each --every prompt tokens, --gen tokens are generated and removed again; then the prompt goes
    on. Prefill time at any length is the sum of the steps up to it, so no prefix is computed twice. Shows
    the law behind each curve.
    """
    _measure(prompt_len=str(max_len), stream=False, **asked)


@click.command(cls=WithVariants)
@click.argument("variants", nargs=-1, required=True, metavar="VARIANT VARIANT...")
@with_options(
    click.option("--prompt-len", "-p", default="256", show_default=True, help="Prompt lengths, as for measure."),
    click.option("--gen", "-n", default=32, show_default=True, help="Tokens to generate in each run."),
    click.option("--blocks", default=10, show_default=True, help="Blocks; each runs every variant twice."),
    click.option(
        "--at-least", type=Share(), default="1%", show_default=True, help="Claim no difference smaller than this."
    ),
    *SETTINGS,
    SEED,
    *OUTPUT,
)
def ab(variants: tuple[str, ...], blocks: int, at_least: float, out: str, **asked: Any) -> None:
    """Compare settings or models in turns, so that changes of the machine's speed affect all of them alike.

    \b
    A VARIANT is options in quotes; the first is the base. Options outside of quotes hold for all:
      lab ab "--flash-attn on" "--flash-attn off" --prompt-len 256,2048
      lab ab "--threads 1" "--threads 2" "--threads 4" --gen 64
      lab ab "-m smollm2-135m" "-m smollm2-135m:Q8_0"

    In each block every variant gets a fresh engine and runs twice: in random order, then in reverse order.
    """
    from lab.analysis import comparison
    from lab.process.worker import Worker
    from lab.runner import side_by_side
    from lab.runner.session import new_results_file
    from lab.show import console, text_compare, text_results, text_setup

    as_json, no_plot, report = asked.pop("as_json"), asked.pop("no_plot"), asked.pop("report")
    err = console.console(stderr=True)
    named = [(text.strip(), parse_variant(text)) for text in variants]
    with Worker() as worker, console.transfer(err) as transferring:
        plans = side_by_side.plan(worker, named, blocks, **asked, watch=transferring)
    first = next(iter(plans.values()))
    for line in text_setup.describe(first.machine, first.model):
        err.print(line)
    for warning in dict.fromkeys(warning for plan in plans.values() for warning in plan.warnings):
        err.print(f"Note: {warning}", style="yellow")
    path = new_results_file(first, Path(out), len(plans))

    def runs(watch: ShowStatus) -> Iterator[Record]:
        return side_by_side.execute(plans, blocks, path, watch)

    records, problem = collect(runs, path, err, None, in_blocks=True)
    if problem:
        raise problem
    groups = comparison.groups(records)
    comparisons = comparison.compare_groups(groups, at_least)
    stdout = console.console()
    if not as_json:
        text_compare.print_comparisons(groups, comparisons, at_least, stdout)
        for sentence in text_results.warnings(records):
            stdout.print(f"{text_results.DISTURBED} {sentence}")
    files = _files(records, path, not no_plot, report, at_least, None if as_json else stdout)
    if as_json:
        console.print_json({**files, **text_compare.comparisons_as_json(groups, comparisons)})


def _measure(out: str, as_json: bool, stream: bool, no_plot: bool, report: bool, dry_run: bool, **asked: Any) -> None:
    """Plans, measures and shows: what measure and sweep have in common."""
    from lab.process.worker import Worker
    from lab.runner.plan import make_plan
    from lab.runner.session import execute, new_results_file
    from lab.show import console, text_results, text_setup

    err = console.console(stderr=True)
    text_out = err if as_json else console.console()
    asked["until"] = _until(asked.pop("until"), asked.pop("max_repeats"), asked.pop("max_minutes"))
    with Worker() as worker:
        with console.transfer(err) as transferring:
            plan = make_plan(worker, **asked, watch=transferring, fetch=not dry_run)
        for line in text_setup.describe(plan.machine, plan.model):
            text_out.print(line)
        for warning in [*plan.warnings, *([text_setup.refused_cases(plan)] if plan.refused else [])]:
            err.print(f"Note: {warning}", style="yellow")
        if dry_run:
            text_setup.print_plan(plan, as_json)
            return
        path = new_results_file(plan, Path(out))

        def runs(watch: ShowStatus) -> Iterator[Record]:
            return execute(plan, worker, path, watch, stream)

        records, problem = collect(runs, path, err, text_out if stream else None, in_blocks=True)
    _show(records, path, plan, not no_plot, report, as_json)
    if problem:
        raise problem
    if text_results.failures(records):
        sys.exit(EXIT_FAILED)


def collect(
    runs: Any, path: Path, err: Console, stream_to: Console | None, in_blocks: bool = False
) -> tuple[list[Record], LabError | None]:
    """Measures and shows progress. Returns the records, and the LabError that ended it, if there was one."""
    from lab.show import console, text_results

    records: list[Record] = []
    try:
        with console.progress(err, stream_to, text_results.finished, in_blocks) as (watch, finished):
            for record in runs(watch):
                records.append(record)
                finished(record)
    except LabError as error:
        return records, error
    except KeyboardInterrupt:
        n = sum(record.run.status == "ok" and not record.run.warmup for record in records)
        word = "1 finished run is" if n == 1 else f"{n} finished runs are"
        err.print(f"\nInterrupted. {word} in {path}" if n else "\nInterrupted before a run was finished.")
        sys.exit(EXIT_INTERRUPTED)
    return records, None


def _show(records: list[Record], path: Path, plan: Plan, plots: bool, report: bool, as_json: bool) -> None:
    """Prints the table, then draws: drawing may fail."""
    from lab.analysis.comparison import AT_LEAST
    from lab.show import console, text_results

    if not records:
        return
    out = console.console()
    if not as_json:
        text_results.print_results(records, out)
        for sentence in text_results.still_wide(records, plan):
            out.print(sentence)
    files = _files(records, path, plots, report, AT_LEAST, None if as_json else out)
    if as_json:
        console.print_json({**files, **as_json_rows(records), "still_wide": text_results.still_wide(records, plan)})


def _files(
    records: list[Record], path: Path, plots: bool, report: bool, at_least: float, out: Console | None
) -> dict[str, Any]:
    """Draws and writes what was asked for, names it in `out` where given, and returns the files by kind."""
    from lab.show import page
    from lab.why import probing

    def named(kind: str, file: Path) -> str:
        if out:
            out.print(f"{kind:8} {file}")
        return str(file)

    if out:
        out.print()
    files: dict[str, Any] = {"session": path.stem, "results": named("results", path)}
    files["plots"] = [named("plot", plot) for plot in (draw(records, path.parent, path.stem) if plots else [])]
    files["report"] = None
    if report and any_good(records):
        known, others = probing.kept(path.parent, note), other_sessions((str(path),), records)
        files["report"] = named("report", page.report(path.with_suffix(".html"), records, known, at_least, others))
    if out and any_good(records):
        out.print(f"next     what limited it: lab ceilings && lab explain {path}; a page to hand on: lab report {path}")
    return files


def _until(share: float | None, max_repeats: int, max_minutes: float | None) -> Until | None:
    from lab.runner.plan import N_PILOT, Until

    if share is None:
        return None
    if share < LEAST_SHARE:
        raise LabError(f"--until {share:.2g} is not possible.", f"Give at least {LEAST_SHARE:.2%}, such as 2%.")
    if max_repeats < N_PILOT:
        raise LabError(f"--max-repeats {max_repeats} is too few to see the spread.", f"Allow at least {N_PILOT}.")
    return Until(share, max_repeats, max_minutes)
