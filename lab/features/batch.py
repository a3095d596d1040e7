"""`lab batch`: B sequences decoded together, one token of each in every step.

A decode step reads all weights to make one token; with B sequences it reads them once for B tokens.
Above some B arithmetic is the limit (the ridge of the roofline). Attention is never shared: every
sequence reads its own cache. T(B) is the mean compute of a decode step. Each sequence gets a token
per TPOT, which is T(B) and the choice of B tokens: throughput is B / TPOT in total, efficiency
B x TPOT of 1 / TPOT, at best B.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, overload

import click

from lab.app import server
from lab.app.collection import Results
from lab.app.command_words import words_of_values
from lab.app.experiment import REPEAT, Experiment, ExperimentTable, is_doubtful
from lab.app.experiment_tables import (
    MeasuredPoint,
    as_rows,
    cell,
    plot_series,
    prediction_errors,
    ranged,
)
from lab.app.options import (
    MODEL,
    PROMPT,
    SAMPLING,
    gen_option,
    lengths_option,
    setting_option,
)
from lab.core import cost, memory, phases
from lab.core.arguments import Numbers, Reaching, StrPath
from lab.core.experiments import ExperimentRuns, setup_of
from lab.core.keywords import EngineSettings, SamplerSettings
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, OK, PREFILL, Record, Run
from lab.core.request import RequestRecord
from lab.core.stored_command import storing
from lab.errors import LabError
from lab.models import catalog
from lab.remote import session as server_session
from lab.remote.formats import MOST_AT_ONCE
from lab.remote.session import ServerPlan
from lab.roofline import kernel_rates
from lab.roofline.step_prediction import StepPrediction
from lab.runner import batches
from lab.runner.batches import Batch, batch_of
from lab.runner.cases import Case
from lab.runner.disturbances import disturbances
from lab.runner.progress import Watch
from lab.runner.refusals import whole_numbers
from lab.show import canvas, volleys
from lab.show.cells import N_RUNS, Column
from lab.show.section import Context, Kind, Section
from lab.show.wording import UNKNOWN, digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REQUEST = ["n_prompt", "n_gen", "is_shared"]
"""Cases that differ only in n_seq are shown together: what each sequence asks for."""

CASE = [*REQUEST, "n_seq"]

Rate = Callable[[float, float], float]  # of n_seq and the seconds of a token of each


def figures(run: Run) -> dict[str, float]:
    """`prefill_s` of all prompts, and `tpot_ms`: a step gives each sequence one token.

    Empty for a failed run, and for one with steps that do not fit its case.
    """
    setup = batch_of(run)
    if setup is None or run.status != OK or run.n_prompt < 1 or run.n_gen < 1:
        return {}
    steps = run.steps.frame()
    prefill = steps[steps.kind == PREFILL]
    decode = steps[steps.kind == DECODE]
    tpot_ns = phases.tpot_ns(run)
    if prefill.empty or not tpot_ns or set(decode.n_tokens) != {setup.n_seq}:
        return {}
    prefill_s = float(prefill.ready_ns.iloc[-1]) / 1e9
    if prefill_s <= 0 or tpot_ns <= 0:
        return {}
    return {"prefill_s": prefill_s, "tpot_ms": tpot_ns / 1e6}


def step_s(run: Run) -> float:
    """Mean compute of the decode steps, without the choice of the tokens."""
    return statistics.fmean(phases.decode_compute_ns(run)) / 1e9


RUNS = ExperimentRuns(
    check=lambda case: setup_of(Batch, case),
    label=lambda case: setup_of(Batch, case).label,
    figures=figures,
    kv_unified="off",
)


class BatchSettings(EngineSettings, SamplerSettings, Reaching, total=False):
    pass


@overload
def batch(
    sequences: Numbers = ...,
    prompt_len: Numbers = ...,
    gen: int = ...,
    repeat: int | None = ...,
    model: str = ...,
    *,
    shared_prompt: bool = ...,
    url: None = ...,
    out: StrPath = ...,
    watch: Watch = ...,
    **settings: Unpack[BatchSettings],
) -> Results[Record]: ...


@overload
def batch(
    sequences: Numbers = ...,
    prompt_len: Numbers = ...,
    gen: int = ...,
    repeat: int | None = ...,
    model: str = ...,
    *,
    shared_prompt: bool = ...,
    url: str,
    out: StrPath = ...,
    watch: Watch = ...,
    **settings: Unpack[BatchSettings],
) -> Results[RequestRecord]: ...


def batch(
    sequences: Numbers = "1,2,4,8,16",
    prompt_len: Numbers = "256",
    gen: int = 32,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    shared_prompt: bool = False,
    url: str | None = None,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[BatchSettings],
) -> Results[Record] | Results[RequestRecord]:
    """Decode several sequences together, after prompts of prompt_len tokens each; returns a record
    per run.

        lab.batch("1,4,16", gen=32)

    With `shared_prompt` the prompts are equal except for their last 16 tokens, and are prefilled
    once. With `url` as many requests are sent to a server at once, as with `lab.measure`. LabError
    for impossible numbers.
    """
    server.check_side(settings, url)
    options = {
        "sequences": sequences,
        "prompt_len": prompt_len,
        "gen": gen,
        "repeat": repeat,
        "model": model,
        "shared_prompt": shared_prompt,
    }
    if url is None:
        return Results(EXPERIMENT.measure({**options, **settings}, out, watch))
    of_plan, reaching = server.split(settings)
    plan = volleys_plan(sequences, prompt_len, gen, repeat, shared_prompt, **of_plan)
    name = None if model == catalog.DEFAULT else model
    with storing(words_of_values(command, {**options, **settings, "url": url})):
        return Results(server_session.carry_out(url, plan, name, out, watch, **reaching))


def volleys_plan(
    sequences: Numbers,
    prompt_len: Numbers,
    gen: int,
    repeat: int | None,
    shared_prompt: bool,
    **texts: Any,
) -> ServerPlan:
    """The plan for a server: as many requests at once as there are sequences in process."""
    if shared_prompt:
        raise LabError(
            "--shared-prompt is only for the lab's own engine, not for a server.",
            "Leave it out: each request has a prompt of its own.",
        )
    if gen < 2:
        raise LabError(
            f"--gen {gen} leaves nothing to decode together.", "Give at least --gen 2."
        )
    n_seqs = whole_numbers("--sequences", sequences, MOST_AT_ONCE)
    plan = server_session.make_plan(prompt_len, gen, repeat, **texts)
    cases: list[Case] = []
    for plain in plan.cases:
        for n_seq in n_seqs:
            cases.append(
                replace(
                    plain,
                    experiment=batches.NAME,
                    setup=Batch(n_seq, is_shared=False),
                    sequences=(plain.n_prompt + gen,) * n_seq,
                )
            )
    return replace(plan, cases=tuple(cases))


def through_server(context: click.Context, url: str, options: dict[str, Any]) -> None:
    """`lab batch --url`."""
    plan = volleys_plan(
        options["sequences"],
        options["prompt_len"],
        options["gen"],
        options["repeat"],
        options["shared_prompt"],
        prompt=options["prompt"],
        seed=options["seed"],
    )
    model = None
    if "model" in server.given(context):
        model = options["model"]
    server.carry_out(url, plan, model, options)


def is_of_volley(record: object) -> bool:
    """Whether a line of a results file is a request of `lab batch --url`."""
    return isinstance(record, RequestRecord) and record.experiment == batches.NAME


def volley_sections(records: Sequence[RequestRecord], context: Context) -> list[Section]:
    return volleys.chapters(records, context, batches.NAME)


OPTIONS = (
    click.option(
        "--sequences",
        "-s",
        default="1,2,4,8,16",
        show_default=True,
        help="Numbers of sequences: 1,4,16.",
    ),
    lengths_option("256", "Prompt tokens of each sequence."),
    gen_option(32, "Tokens that each sequence generates."),
    REPEAT,
    click.option(
        "--shared-prompt",
        is_flag=True,
        help="All share a prompt but its last 16 tokens; it is prefilled once.",
    ),
    MODEL,
    PROMPT,
    setting_option("kv_unified", RUNS.kv_unified),
    *SAMPLING,
)


def runs_table(records: Sequence[Record]) -> pd.DataFrame:
    """A row per successful run: CASE, `step_s` (T(B)), `tpot_s`, `prefill_s`, `kv_bytes` of the
    caches at the end, `is_disturbed`.
    """
    import pandas as pd

    table = []
    for record in records:
        run = record.run
        measured = figures(run)
        if not measured:
            continue
        setup = setup_of(Batch, run.case)
        table.append(
            {
                "n_prompt": run.n_prompt,
                "n_gen": run.n_gen,
                "is_shared": setup.is_shared,
                "n_seq": setup.n_seq,
                "step_s": step_s(run),
                "tpot_s": measured["tpot_ms"] / 1e3,
                "prefill_s": measured["prefill_s"],
                "kv_bytes": kv_bytes(record, setup),
                "is_disturbed": bool(disturbances(record)),
            }
        )
    return pd.DataFrame(table)


def kv_bytes(record: Record, setup: Batch) -> float:
    """Bytes of the caches of all sequences at the end of a run; NaN if the model does not say."""
    settings = record.settings
    n_bytes = memory.kv_bytes_per_position(record.model, settings.type_k, settings.type_v)
    if not n_bytes:
        return math.nan
    run = record.run
    return n_bytes * sum(batches.cache_lengths(setup, run.n_prompt, run.n_gen, settings))


class BatchRow(NamedTuple):
    """The medians of a number of sequences."""

    n_prompt: int
    n_gen: int
    is_shared: bool
    n_seq: int
    step_s: float
    tpot_s: float
    prefill_s: float
    kv_bytes: int | None
    n_runs: int
    step_min_s: float
    step_max_s: float
    total_tps: float
    user_tps: float
    efficiency: float | None
    expected_s: float | None
    ridge: float | None


def rows(
    records: Sequence[Record], prediction: StepPrediction | None = None
) -> list[BatchRow]:
    """A row for each number of sequences of one setup: medians over the successful timed runs.

    `step_s` has the least and largest of a run beside it. `efficiency` is None where one sequence
    was not measured, `expected_s` (predicted) and `ridge` without ceilings.
    """
    runs = runs_table(records)
    if runs.empty:
        return []
    by_case = runs.groupby(CASE)
    table = by_case.agg(
        step_s=("step_s", "median"),
        tpot_s=("tpot_s", "median"),
        prefill_s=("prefill_s", "median"),
        kv_bytes=("kv_bytes", "median"),
        n_runs=("step_s", "size"),
        step_min_s=("step_s", "min"),
        step_max_s=("step_s", "max"),
    ).reset_index()
    alone = table[table.n_seq == 1].set_index(REQUEST)
    alone_s = table[REQUEST].join(alone.tpot_s, on=REQUEST).tpot_s
    table = table.assign(
        total_tps=table.n_seq / table.tpot_s,
        user_tps=1 / table.tpot_s,
        efficiency=table.n_seq * alone_s / table.tpot_s,
        kv_bytes=table.kv_bytes.round().astype("Int64"),
        expected_s=None,
        ridge=None,
    )
    if prediction is not None:
        lengths = list(zip(table.n_prompt, table.n_gen, table.n_seq, strict=True))
        table["expected_s"] = [expected_s(prediction, *of_row) for of_row in lengths]
        table["ridge"] = [ridge(prediction, n_prompt, n_gen) for n_prompt, n_gen, _ in lengths]
    return as_rows(table, BatchRow)


def by_request(rows: Sequence[BatchRow]) -> list[list[BatchRow]]:
    """Rows that differ only in the number of sequences, together."""
    return list(grouped(rows, lambda row: (row.n_prompt, row.n_gen, row.is_shared)).values())


def expected_s(
    prediction: StepPrediction, n_prompt: int, n_gen: int, n_seq: int
) -> float | None:
    """T(B) in the middle of the answers: a token of each sequence."""
    n_past = n_prompt + max(0, n_gen - 2) // 2
    other_sequences = [(1, n_past)] * (n_seq - 1)
    return prediction.seconds(1, n_past, n_seq, other_sequences)


def ridge(prediction: StepPrediction, n_prompt: int, n_gen: int) -> float | None:
    """The number of sequences at which arithmetic takes as long as memory traffic, from the
    ceilings.

    The weights are read once for all sequences; each adds FLOPs, and its own cache to the bytes.
    None if the model's cost is unknown, if each sequence adds more traffic than arithmetic, and for
    one cache of all (`kv_unified`).
    """
    settings = prediction.settings
    if settings.kv_unified:
        return None
    model = prediction.model
    types = (settings.type_k, settings.type_v)
    n_past = n_prompt + n_gen // 2
    of_one = cost.step(model, 1, n_past, 1, *types)
    of_two = cost.step(model, 1, n_past, 2, *types, [(1, n_past)])
    if of_one is None or of_two is None:
        return None
    roof = kernel_rates.roof(prediction.ceilings)
    arithmetic_ns = (of_two.flops - of_one.flops) / roof.gflops  # of each sequence
    traffic_ns = (of_two.n_bytes - of_one.n_bytes) / roof.gbps
    weights_ns = of_one.n_bytes / roof.gbps - traffic_ns
    if arithmetic_ns <= traffic_ns:
        return None
    return weights_ns / (arithmetic_ns - traffic_ns)


def conclude(rows: Sequence[BatchRow], records: Sequence[Record] = ()) -> list[str]:
    """What rows of one setup show, in sentences."""
    sentences: list[str] = []
    for request in by_request(rows):
        largest = request[-1]
        if largest.efficiency is not None and largest.n_seq > 1:
            sentences.append(gain(request))
        if largest.ridge is not None:
            sentences.append(
                f"Above about {digits(largest.ridge)} sequences arithmetic is the limit, if the "
                "kernels reach the machine's best rates."
            )
        errors = [(row.expected_s, row.step_s) for row in request]
        sentences += prediction_errors(errors, "step times")
    return sentences


def gain(request: Sequence[BatchRow]) -> str:
    """What the largest number of sequences gains, and whether a smaller one has more."""
    alone = request[0]
    largest = request[-1]
    fastest = max(request, key=lambda row: row.total_tps)
    sentence = f"{gain_of_largest(request)}."
    if alone.n_seq < fastest.n_seq < largest.n_seq:
        return f"{sentence} Throughput is highest with {fastest.n_seq}."
    return sentence


def gain_of_largest(request: Sequence[BatchRow]) -> str:
    """What the largest number of sequences gains over one sequence."""
    alone = request[0]
    largest = request[-1]
    total = digits(largest.efficiency or math.nan)
    user = digits(largest.user_tps / alone.user_tps)
    return (
        f"{largest.n_seq} sequences together: {total}x the tokens/s of one in total, "
        f"{user}x per user"
    )


def finding(rows: Sequence[BatchRow]) -> str | None:
    """The gain after the longest prompt; None if nothing was measured beside one sequence."""
    requests = by_request(rows)
    request = requests[-1]
    if request[-1].efficiency is None or request[-1].n_seq < 2:
        return None
    if len(requests) == 1:
        return gain_of_largest(request)
    return f"{gain_of_largest(request)} ({prompt_label(request[-1])})"


def draw(
    rows: Sequence[BatchRow], records: Sequence[Record], title: str, figure: Figure
) -> None:
    """The total rate (left) and the rate per user (right).

    Grey lines: the rates if sharing a step cost nothing, and the ridge, if anything is concluded.
    """
    runs = runs_table(records)
    has_ridges = not is_doubtful(records)
    total, user = figure.subplots(1, 2)
    draw_rates(total, rows, runs, total_rate, has_ridges)
    draw_rates(user, rows, runs, user_rate, has_ridges)
    total.set_ylabel("tokens per second, all sequences")
    user.set_ylabel("tokens per second, each sequence")
    canvas.finish(figure.axes, title)


def total_rate(n_seq: float, tpot_s: float) -> float:
    """Tokens per second of all sequences."""
    return n_seq / tpot_s


def user_rate(n_seq: float, tpot_s: float) -> float:
    """Tokens per second of each sequence."""
    return 1 / tpot_s


def draw_rates(
    ax: Axes, rows: Sequence[BatchRow], runs: pd.DataFrame, rate: Rate, has_ridges: bool
) -> None:
    """Draw rates over the number of sequences: of each run, their medians, and predicted."""
    runs_by_request = runs.groupby(REQUEST)
    requests = by_request(rows)
    styles = canvas.styles(len(requests), canvas.OF_DECODE)
    for request, style in zip(requests, styles, strict=True):
        first = request[0]
        label = prompt_label(first)
        measured = []
        of_request = runs_by_request.get_group((first.n_prompt, first.n_gen, first.is_shared))
        for run in of_request.itertuples():
            tps = rate(run.n_seq, run.tpot_s)
            measured.append(MeasuredPoint(run.n_seq, tps, run.is_disturbed))
        medians = [(row.n_seq, rate(row.n_seq, row.tpot_s)) for row in request]
        predicted = [
            (row.n_seq, rate(row.n_seq, row.expected_s)) for row in request if row.expected_s
        ]
        plot_series(ax, label, style, measured, medians, predicted)
    draw_ideal(ax, requests[0], rate)
    if has_ridges:
        draw_ridges(ax, requests)
    canvas.over_lengths(ax, [row.n_seq for row in rows])
    ax.set(xlabel="sequences in a step", yscale="log")


def draw_ideal(ax: Axes, request: Sequence[BatchRow], rate: Rate) -> None:
    """Draw the rates if sharing a step cost nothing."""
    first = request[0]
    if first.n_seq == 1:
        n_seqs = [row.n_seq for row in request]
        ideal = [rate(n_seq, first.tpot_s) for n_seq in n_seqs]
        label = "if sharing a step cost nothing"
        ax.plot(n_seqs, ideal, color=canvas.GUIDE, ls=":", lw=1.2, label=label)


def draw_ridges(ax: Axes, requests: Sequence[Sequence[BatchRow]]) -> None:
    """Draw the ridge of each prompt length that lies among the numbers of sequences.

    Without a measured batch below it, the picture shows nothing of what ends there.
    """
    for request in requests:
        last = request[-1]
        if last.ridge is None:
            continue
        batches_below = [row for row in request if 1 < row.n_seq < last.ridge]
        if batches_below and last.ridge <= last.n_seq:
            label = (
                f"ridge, {prompt_label(last)}: {digits(last.ridge)} sequences "
                "at the machine's best rates"
            )
            ax.axvline(last.ridge, color=canvas.GUIDE, ls="-.", lw=1, label=label)


def prompt_label(row: BatchRow) -> str:
    label = plural(row.n_prompt, "prompt token")
    return f"{label}, shared" if row.is_shared else label


def prompt_cell(row: BatchRow) -> str:
    return f"{row.n_prompt:,} shared" if row.is_shared else f"{row.n_prompt:,}"


def efficiency_cell(row: BatchRow) -> str:
    return UNKNOWN if row.efficiency is None else f"{digits(row.efficiency)}x"


TABLE: ExperimentTable[BatchRow] = ExperimentTable(
    name="batch",
    question="How many sequences at once, and what does it cost each?",
    title="sequences decoded together; medians over runs",
    below="their range",
    topic="Sequences decoded together",
    finding=finding,
    caption="Tokens per second in total and per user, over the number of sequences in a step. "
    "Points are runs, the line is the median, dashes are predictions.",
    columns=(
        Column("prompt\ntokens", prompt_cell, is_in_title=True),
        Column("sequences", lambda row: f"{row.n_seq:,}", is_in_title=True),
        N_RUNS,
        Column(
            "step\nms",
            lambda row: ranged(row.step_s, row.step_min_s, row.step_max_s, row.n_runs),
        ),
        Column("predicted\nms", lambda row: cell(row.expected_s, 1e3)),
        Column("tokens/s\nin total", lambda row: cell(row.total_tps)),
        Column("tokens/s\nper user", lambda row: cell(row.user_tps)),
        Column("efficiency", efficiency_cell),
        Column("prefill\ns", lambda row: cell(row.prefill_s)),
        Column("KV cache\nMB", lambda row: cell(row.kv_bytes, 1e-6), priority=-1),
    ),
    rows=rows,
    conclude=conclude,
    draw=draw,
)

EXPERIMENT = Experiment(
    name=batches.NAME,
    chapter="Batches",
    about="""Measure what decoding several answers together gains.

    \b
      lab batch --sequences 1,4,16 --prompt-len 256
      lab batch --sequences 1,8 --kv-unified on --shared-prompt
      lab batch --sequences 1,4,16 --url http://127.0.0.1:8080/v1

    A step with B sequences reads the weights once for B tokens. For each B the command shows the
    time of a step, the tokens per second in total and per user, and the prediction from the
    ceilings. It also shows from which B on arithmetic is the limit.

    With --url B requests are sent to a server at once, a volley. The command shows TTFT, TPOT, and
    the tokens per second in total and per user, beside the same batch in process if the folder of
    results has it. """,
    plan=batches.plan,
    options=OPTIONS,
    main_options=("model", "sequences", "prompt-len", "gen", "repeat", "shared-prompt"),
    tables=(TABLE,),
    through_server=through_server,
)

command = EXPERIMENT.as_command()
KINDS = (EXPERIMENT.as_kind(), Kind("volleys", is_of_volley, volley_sections))
