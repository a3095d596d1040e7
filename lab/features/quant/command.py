"""The command `lab quant`, and its kind of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from lab.app.help import Command
from lab.app.options import (
    DRY_RUN,
    ENGINE,
    OUTPUT,
    SEED,
    Unstored,
    budget_option,
    gen_option,
    prompt_len_option,
    with_options,
)
from lab.app.output import Output
from lab.app.running import collect, introduce
from lab.core.lists import join_and, plural
from lab.core.record import Record
from lab.errors import LabError
from lab.features.quant import caches, figures, measuring, planning, texts
from lab.features.quant.lines import QualityLine, QuantLine
from lab.features.quant.section import sections
from lab.process.worker import Worker
from lab.runner.progress import duration
from lab.runner.session import new_results_file
from lab.show import text_results
from lab.show.section import Kind


def is_mine(line: object) -> bool:
    is_run = isinstance(line, Record) and line.run.part == planning.PART
    return is_run or isinstance(line, QualityLine)


KINDS = (Kind("quant", is_mine, lambda lines, _: sections(lines)),)

OPTIONS = (
    click.option(
        "--cache",
        is_flag=False,
        flag_value=caches.TYPES,
        default="",
        metavar="TYPES",
        help=f"Compare types of the KV cache by depth; K:V for both.  [alone: {caches.TYPES}]",
    ),
    click.option(
        "--prompt",
        help="A text file, or the lab's own: code,dialogue.  [default: all]",
    ),
    budget_option(
        None,
        f"Time to spend, such as 2min or 1h.  [default: {planning.BUDGET}; with --cache "
        f"{planning.BUDGET_OF_CACHE}]",
    ),
    click.option(
        "--repeat",
        "-r",
        default=planning.BLOCKS,
        show_default=True,
        help="Blocks for speed; each runs every file twice.",
    ),
    prompt_len_option(
        None,
        "Prompt tokens of the runs for speed; with --cache also of the texts.  [default: "
        f"{planning.PROMPT_LEN}; with --cache {planning.DEPTH:,}]",
    ),
    gen_option(planning.GEN, "Tokens that these runs generate."),
)
CSV = click.option(
    "--csv",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Also write the table to a CSV file.",
)
YES = click.option(
    "--yes",
    cls=Unstored,
    is_flag=True,
    help="Download what a name of the catalog needs without asking.",
)


@click.command("quant", cls=Command, first=("cache", "prompt", "budget", "repeat"))
@click.argument("files", nargs=-1, metavar="[REFERENCE FILE...]")
@with_options(*OPTIONS, CSV, YES, *ENGINE, SEED, *OUTPUT, DRY_RUN)
def command(
    files: tuple[str, ...],
    cache: str,
    csv: str | None,
    yes: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Show what quantizations cost in quality and gain in speed.

    \b
      lab quant                           # the embedded model, requantized
      lab quant model-F16.gguf model-Q8_0.gguf model-Q4_K_M.gguf
      lab quant model.gguf --cache f16,q8_0,q8_0:q4_0 -p 4000    # its KV cache

    The first file is the reference. All files predict the same text, in chunks of 512 tokens: the
    table shows how far each one's predictions are from the reference's (mean Kullback-Leibler
    divergence), and how often both find the same token most likely. The reference against itself
    with other settings shows the noise floor. Chunks are added until all files are told apart (or
    differ by less than 10 %), the text ends or 60 % of the --budget is spent. Then the speeds are
    measured in blocks, as lab ab does, as far as the rest of it goes. The --budget is for the whole
    command; after the first chunk it says how long it will take.

    With --cache each file is compared with itself under other types of its KV cache: K and V alike,
    or K:V. All predict the same texts of -p tokens, and the table shows the harm by depth, in bins
    of positions. In a reasoning chain and in calls of tools only the tokens that decide are scored.
    Speeds are measured after the same depths.

    The output names the files that no other one beats in both. It does not say how well a model
    does a task. Files of other models, and files that do not fit into memory together, are refused.
    A FILE is a SPEC: see lab models --help. The name of a catalog's model stands for its files,
    which are downloaded: lab quant llama-3.2-1b
    """
    from lab.show import console

    output = Output.taken_from(options)
    err = console.console(stderr=True)
    if not (yes or cache or dry_run):
        confirm_downloads(files)
    if dry_run and not cache and planning.missing(files):
        console.console().print(download_of(planning.missing(files)))
        return
    with Worker() as worker, console.transfer(err) as show_transfer:
        plan = planning.plan(worker, *files, cache=cache, **options, watch=show_transfer)
    introduce(list(plan.plans.values()), err, err)
    if dry_run:
        print_plan(plan, output.as_json)
        return
    noun = "cache type" if plan.depth else "file"
    err.print(f"{plural(len(plan.plans), noun)}: at most about {duration(plan.budget_s)}")
    path = new_results_file(plan.plans[plan.reference], output.folder)
    lines, problem = collect(
        lambda watch: measuring.execute(plan, path, watch), path, err, describe=finished
    )
    if csv and figures.candidates(lines):
        write_csv(lines, csv)
    output.finish(lines, path, problem)


def confirm_downloads(files: tuple[str, ...]) -> None:
    """Ask before files that a name of the catalog stands for are downloaded."""
    sizes = planning.missing(files)
    if not sizes:
        return
    click.confirm(f"{download_of(sizes)}?", abort=True, err=True)


def download_of(sizes: dict[str, int]) -> str:
    """What is to be downloaded, by its bytes."""
    names = [f"{spec} {n_bytes / 1e9:.1f} GB" for spec, n_bytes in sizes.items()]
    total = f"{plural(len(sizes), 'file')}, {sum(sizes.values()) / 1e9:.1f} GB"
    return f"Download {total}: {', '.join(names)}"


def print_plan(plan: planning.QuantPlan, as_json: bool) -> None:
    """What would be measured."""
    from lab.show import console

    files = {name: file.model.n_bytes for name, file in plan.plans.items()}
    depths = texts.bin_ends(plan.depth) if plan.depth else []
    if as_json:
        planned = {"files": files, "budget_s": plan.budget_s, "repeat": plan.repeat}
        print(json.dumps({**planned, "depths": depths}))
        return
    out = console.console()
    for name, n_bytes in files.items():
        out.print(f"{name}, {(n_bytes or 0) / 1e6:,.0f} MB")
    quality = (
        f"chunks of {measuring.N_CHUNK} tokens through each file, until all are told apart"
    )
    speed = f"at most {plural(plan.repeat, 'block')}"
    if plan.depth:
        lengths = join_and([f"{end:,}" for end in depths])
        quality = (
            f"texts of {plan.depth:,} tokens through each type, in bins to {lengths} tokens"
        )
        speed = f"{speed}, after as many tokens"
    out.print(f"Quality: {quality}. Speed: {speed}. At most {duration(plan.budget_s)} in all.")


def finished(line: QuantLine) -> str:
    """A progress line for what was measured."""
    if not isinstance(line, QualityLine):
        return text_results.finished(line)
    divergence = figures.mean([figures.mean_kl(chunk) for chunk in line.chunks])
    n_chunks = plural(len(line.chunks), "chunk")
    return f"{line.variant}: mean divergence {divergence:.3g} in {n_chunks}"


def write_csv(lines: list[object], csv: str) -> None:
    from lab.formats import spreadsheet

    table = spreadsheet.without_formulas(figures.quant_table(lines))
    try:
        table.to_csv(Path(csv), index=False)
    except OSError as problem:
        raise LabError(
            f"{csv} cannot be written: {problem.strerror}.", "Choose another --csv."
        ) from None
