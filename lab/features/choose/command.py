"""`lab choose`: the command, the function, and the section of its results."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import click

from lab.app.collection import Results
from lab.app.command_words import words_of_values
from lab.app.experiment import REPEAT, title_and_doubt
from lab.app.experiment_tables import cell, ranged
from lab.app.help import Command
from lab.app.options import (
    ENGINE,
    MODEL,
    OUTPUT,
    PROMPT,
    SEED,
    gen_option,
    prompt_len_option,
    setting_option,
    with_options,
)
from lab.app.output import Output
from lab.app.running import collect, introduce
from lab.core.arguments import Numbers, StrPath
from lab.core.keywords import EngineSettings
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.stored_command import storing
from lab.errors import LabError
from lab.features.choose import planning
from lab.features.choose.figures import ChainRow, figures, is_of_size
from lab.features.choose.picture import draw_sizes, draw_steps
from lab.features.choose.sentences import sentences
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import progress, session
from lab.runner.cases import Plan
from lab.runner.progress import ShowStatus, Watch
from lab.show import table
from lab.show.cells import N_RUNS, Column
from lab.show.section import Columns, Context, Kind, Picture, Section, tabled
from lab.show.wording import UNKNOWN

OF_SIZES = ("threads", "threads_batch", "gen", "repeat", "seed", "lib")
"""Settings that models of other vocabularies are measured with too."""


def choose(
    sequences: Numbers = planning.DEFAULT_SEQUENCES,
    chain: Sequence[str] = (),
    vocabulary: Numbers = planning.DEFAULT_VOCABULARIES,
    prompt_len: int = planning.PROMPT_LEN,
    gen: int = planning.GEN,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[EngineSettings],
) -> Results[Record]:
    """Measure what choosing a token costs; returns a record per run.

        lab.choose(sequences="1,8", vocabulary="")

    `chain`: chains of one's own as options, in the place of the lab's. `vocabulary`: sizes of the
    vocabularies of models with random weights, "" for none. LabError for a sampler that llama.cpp
    does not have.
    """
    options: dict[str, Any] = {
        "sequences": sequences,
        "chain": chain,
        "vocabulary": vocabulary,
        "prompt_len": prompt_len,
        "gen": gen,
        "repeat": repeat,
        "model": model,
        **settings,
    }
    with (
        tempfile.TemporaryDirectory(prefix="lab-vocabularies-") as folder,
        Worker() as worker,
        progress.shown_to(watch) as show,
        storing(words_of_values(command, options)),
    ):
        plans = plans_of(worker, Path(folder), **options)
        path = session.new_results_file(plans[0], Path(out))
        return Results(execute(plans, worker, path, show))


def plans_of(
    worker: Worker,
    folder: Path,
    vocabulary: str = planning.DEFAULT_VOCABULARIES,
    **options: Any,
) -> list[Plan]:
    """The plan of the model, then those of vocabularies of other sizes."""
    sizes = planning.sizes(vocabulary)
    plans = [planning.plan(worker, **options)]
    if options.get("chain"):
        return plans
    of_sizes = {name: options[name] for name in OF_SIZES if options.get(name) is not None}
    for size in sizes:
        plans.append(planning.plan_of_size(worker, size, folder, **of_sizes))
    return plans


def execute(
    plans: Sequence[Plan], worker: Worker, path: Path, watch: ShowStatus
) -> Iterator[Record]:
    """Measure one plan after the other, each with engines of its own."""
    n_starts = 1
    for plan in plans:
        if n_starts > 1:
            worker.restart()
        for record in session.execute(plan, worker, path, watch, n_starts=n_starts):
            n_starts = max(n_starts, record.run.engine or 0)
            yield record
        n_starts += 1


CAPTION_OF_STEPS = "The parts of a step; above a bar: the share of choosing."
CAPTION_OF_SIZES = (
    "The time to choose a token over the size of the vocabulary; points are runs with random "
    "weights, lines their law, diamonds the model itself."
)
OPTIONS = (
    click.option(
        "--sequences",
        "-s",
        default=planning.DEFAULT_SEQUENCES,
        show_default=True,
        help="Numbers of sequences that are decoded together: 1,8.",
    ),
    click.option(
        "--chain",
        multiple=True,
        metavar="OPTIONS",
        help='A chain of your own, as options in quotes: "--temp 0.8 --top-k 0".',
    ),
    click.option(
        "--vocabulary",
        default=planning.DEFAULT_VOCABULARIES,
        show_default=True,
        help="Sizes of vocabularies to measure with random weights; 0: none.",
    ),
    prompt_len_option(
        planning.PROMPT_LEN, "Tokens of the prompt, which the penalties look at."
    ),
    gen_option(planning.GEN, "Steps with each chain, twice; fewer with several sequences."),
    REPEAT,
    MODEL,
    PROMPT,
    setting_option("kv_unified", "on"),
)


@click.command(
    "choose", cls=Command, first=("model", "sequences", "chain", "vocabulary", "repeat")
)
@with_options(*OPTIONS, *ENGINE, SEED, *OUTPUT)
def command(**options: Any) -> None:
    """Measure what choosing a token costs: samplers, grammars.

    \b
      lab choose
      lab choose --chain "--temp 0.8 --top-k 0" --chain "--repeat-penalty 1.1"

    After each step a chain of llama.cpp's samplers chooses a token from the logits of the whole
    vocabulary, for one sequence after the other. The command decodes with each chain in turn, forth
    and back, and shows the time of a token and its share of a step. Grammars are applied both ways:
    check the choice and choose again if it does not fit (llama-server), or mask the vocabulary
    first. Tiny models with random weights show how the cost grows with the vocabulary. The options
    of a chain are those of lab measure (see its --help-all)."""
    from lab.show import console

    output = Output.taken_from(options)
    err = console.console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="lab-vocabularies-") as folder,
        Worker() as worker,
    ):
        with console.transfer(err) as show_transfer:
            plans = plans_of(worker, Path(folder), **options, watch=show_transfer)
        introduce(plans[:1], err, err)
        err.print(announced(worker, plans))
        path = session.new_results_file(plans[0], output.folder)
        records, problem = collect(
            lambda watch: execute(plans, worker, path, watch), path, err
        )
    has_failed = any(record.run.error for record in records)
    output.finish(records, path, problem, has_failed)


def announced(worker: Worker, plans: Sequence[Plan]) -> str:
    """How much is measured, and how long it will take on this machine."""
    n_runs = sum(plan.n_repeat * len(plan.cases) for plan in plans)
    amount = f"{plural(len(plans), 'model')}, {plural(n_runs, 'run')} in all"
    try:
        expected_s = planning.expected_s(worker, plans)
    except LabError:
        return amount
    return f"{amount}: about {progress.duration(expected_s)}"


def sections(records: Sequence[Record], context: Context) -> list[Section]:
    """A part for each setup of a model; the runs of other vocabularies belong to all of them."""
    timed = [record for record in records if record.run.is_timed]
    of_sizes = [record for record in timed if is_of_size(record)]
    model_runs = [record for record in timed if not is_of_size(record)] or timed
    parts: list[Section] = []
    for label, runs in table.by_setup(model_runs):
        part = section(label, runs, of_sizes, context.is_page)
        if part is not None:
            parts.append(part)
    if not parts:
        return []
    first = parts[0]
    return [Section("Choosing a token", name=first.name, question=first.question, parts=parts)]


def section(
    label: str, runs: Sequence[Record], of_sizes: Sequence[Record], is_page: bool
) -> Section | None:
    """The table of a setup, its sentences and its picture. On a terminal the first sentence is the
    answer."""
    measured = figures(runs, of_sizes)
    if measured is None:
        return None
    title, doubt = title_and_doubt(label, runs)
    lines = [doubt]
    if not doubt:
        lines = sentences(measured)
    answer = ""
    if lines and not is_page:
        answer, *lines = lines
    rows = measured.rows()
    draw = functools.partial(draw_steps, rows, title)
    pictures = [Picture("choose", CAPTION_OF_STEPS, draw)]
    if measured.laws:
        draw = functools.partial(draw_sizes, measured, runs[0].model, title)
        pictures.append(Picture("vocabulary", CAPTION_OF_SIZES, draw))
    return Section(
        title,
        "medians over runs; share: of a step's time",
        "their range",
        name="choose",
        question="What does choosing a token cost?",
        answer=answer,
        **tabled(COLUMNS, rows),
        sentences=lines,
        pictures=pictures,
        data=lambda: {"rows": [document(row, label) for row in rows]},
    )


def document(row: ChainRow, setup: str) -> dict[str, object]:
    return {"experiment": "choose", "setup": setup, **row._asdict()}


def share_cell(row: ChainRow) -> str:
    return f"{100 * row.share:.1f}"


def law_cell(row: ChainRow) -> str:
    return UNKNOWN if row.n_seq > 1 else cell(row.law_s, 1e3)


def expected_cell(row: ChainRow) -> str:
    return UNKNOWN if row.n_seq == 1 else cell(row.expected_s, 1e3)


def built_cell(row: ChainRow) -> str:
    return cell(row.built_s, 1e3) if row.n_seq == 1 else UNKNOWN


COLUMNS: Columns[ChainRow] = (
    Column("sequences", lambda row: f"{row.n_seq:,}", is_in_title=True),
    Column("chain", lambda row: row.name),
    N_RUNS,
    Column(
        "a token\nms",
        lambda row: ranged(row.choose_s, row.least_s, row.most_s, row.n_runs),
    ),
    Column("by its\nlaw ms", law_cell),
    Column("all\nms", lambda row: cell(row.step_choose_s, 1e3)),
    Column("predicted\nms", expected_cell),
    Column("compute\nms", lambda row: cell(row.compute_s, 1e3)),
    Column("share\n%", share_cell),
    Column("build\nms", built_cell),
)

KINDS = (Kind("choose", planning.is_mine, sections),)
