"""`lab stall`: how long a new request's long prompt stops running answers.

Streams decode, one token of each in every step. A long prompt that is prefilled all at once is one
long gap in every stream; in chunks that share steps with the streams' tokens it is many short gaps.
But every chunk reads all weights again, so with small chunks the new request waits longer. This is
the trade-off of chunked prefill (Agrawal et al., "Sarathi-Serve", 2024).

llama.cpp computes all sequences of a step together only if they share one cache (`--kv-unified on`,
the default here). It cuts a step of more than --ubatch tokens into parts, and each part reads the
weights: a chunk of 1,024 with 4 streams is 3 parts with the default of 512. The lab keeps --ubatch,
as servers do, and predicts such steps part by part. The new request ("newcomer" in the code) is
sequence 0, the streams are 1, 2, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import click

from lab.app.collection import Results
from lab.app.experiment import REPEAT, Experiment, ExperimentTable
from lab.app.experiment_tables import as_rows, cell, prediction_errors, ranged
from lab.app.options import (
    MODEL,
    PROMPT,
    lengths_option,
    setting_option,
)
from lab.core import script
from lab.core.arguments import Numbers, StrPath
from lab.core.experiments import ExperimentRuns, setup_of
from lab.core.keywords import EngineSettings
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, MIXED, OK, PREFILL, Record, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.models import catalog
from lab.process.worker import Worker
from lab.roofline.step_prediction import StepPrediction
from lab.runner.cases import Case, Plan, Text
from lab.runner.disturbances import disturbances
from lab.runner.plan import make_plan, with_cases
from lab.runner.progress import Watch
from lab.runner.refusals import need_every_position, whole_numbers
from lab.show import canvas
from lab.show.cells import N_RUNS, PROMPT_TOKENS, Cell, Column
from lab.show.wording import UNKNOWN, digits, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_CHUNKS = "64,256,1024"
MOST_STREAMS = 255  # LLAMA_MAX_SEQ of llama.cpp is 256; the new request is one of them
N_CONTEXT = 128  # tokens of each stream's own prompt
N_BEFORE = 32  # steps of the streams alone
N_GEN = 9  # tokens of the new request's answer
MOST_PREDICTED = 2**20  # prompt tokens of a run that is predicted step by step
GAP = "gap_ms"  # the figure: the longest gap between two tokens of a stream
STALL = 2.0  # a gap longer than STALL times the usual gap is a stall
MOST_CHUNKS = 4  # panels in a row of the picture
# Cases that differ only in the chunk are compared
REQUEST = ["n_prompt", "n_gen", "n_streams"]
CASE = [*REQUEST, "chunk"]


@dataclass(frozen=True)
class Stall:
    """A prompt of n_prompt tokens was prefilled in chunks while other sequences decoded."""

    n_streams: int
    chunk: int | None  # None: all at once, while the streams waited
    n_context: int  # tokens of each stream's own prompt
    n_before: int  # steps of the streams alone, before the prompt came

    @property
    def label(self) -> str:
        return f"{in_chunks(self.chunk)} beside {plural(self.n_streams, 'stream')}"

    @property
    def is_possible(self) -> bool:
        """Whether there are streams, chunks, and a usual gap."""
        has_chunks = self.chunk is None or self.chunk >= 1
        return self.n_streams >= 1 and has_chunks and self.n_before >= 2


def in_chunks(chunk: int | None) -> str:
    return "all at once" if chunk is None else f"in chunks of {chunk:,}"


def stall_of(run: Run) -> Stall | None:
    """The stall of a run; None for runs of other experiments."""
    return setup_of(Stall, run.case) if run.experiment == "stall" else None


def prompt_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps of the new prompt: those with prompt tokens after the first decode step."""
    streams_decode = steps.kind.eq(DECODE).cummax()  # from the first decode step on
    return steps[streams_decode & steps.kind.isin((MIXED, PREFILL))]


def gaps(steps: pd.DataFrame) -> pd.DataFrame:
    """A row per token of the streams: `at_s` since the new prompt arrived, `gap_s`, and `when`.

    All streams get a token in the same steps, so they share one list of gaps. `steps`, measured or
    predicted, has `kind`, `start_s`, `end_s`. `when` is before the prompt, during its prefill (the
    gap overlaps it), or after.
    """
    prompt = prompt_steps(steps)
    arrived_s = prompt.start_s.min()
    done_s = prompt.end_s.max()
    tokens = steps[steps.kind.isin((DECODE, MIXED))].assign(when="after")
    previous_s = tokens.end_s.shift()
    tokens.loc[previous_s < done_s, "when"] = "during"
    tokens.loc[tokens.end_s <= arrived_s, "when"] = "before"  # of those just called "during"
    tokens["at_s"] = tokens.end_s - arrived_s
    tokens["gap_s"] = tokens.end_s - previous_s
    return tokens.iloc[1:].reset_index()  # no gap ends with the first token


def stall_figures(steps: pd.DataFrame) -> dict[str, float]:
    """The figures of a run. `usual_gap_s` is the median gap before the new prompt came."""
    tokens = gaps(steps)
    prompt = prompt_steps(steps)
    gaps_during_s = tokens.gap_s[tokens.when == "during"]
    usual_gap_s = tokens.gap_s[tokens.when == "before"].median()
    return {
        "n_steps": len(prompt),
        "n_stalls": int((gaps_during_s > STALL * usual_gap_s).sum()),
        "longest_gap_s": gaps_during_s.max(),
        "median_gap_s": gaps_during_s.median(),
        "usual_gap_s": usual_gap_s,
        "newcomer_s": prompt.end_s.max() - prompt.start_s.min(),
    }


def stall_steps(run: Run) -> pd.DataFrame | None:
    """The steps of a run; None for runs of other experiments, and if its steps are not those of its
    script.
    """
    stall = stall_of(run)
    if stall is None or not stall.is_possible:
        return None
    steps = run.steps.frame()
    prompt = prompt_steps(steps)
    is_decode = steps.kind == DECODE
    n_before = is_decode[steps.index < prompt.index.min()].sum()  # 0 without prompt steps
    n_stream_tokens = stall.n_streams * (prompt.kind == MIXED).sum()
    has_whole_prompt = prompt.n_tokens.sum() - n_stream_tokens == run.n_prompt
    has_answer = is_decode.sum() > n_before
    return steps if n_before == stall.n_before and has_whole_prompt and has_answer else None


def figures(run: Run) -> dict[str, float]:
    """GAP and `newcomer_s`, the new request's TTFT.

    Empty for a failed run, and for one with steps that do not fit its case.
    """
    if run.status != OK or run.n_prompt < 1 or run.n_gen < 1:
        return {}
    steps = stall_steps(run)
    if steps is None:
        return {}
    measured = stall_figures(steps)
    times = {GAP: 1e3 * measured["longest_gap_s"], "newcomer_s": measured["newcomer_s"]}
    return times if min(times.values()) > 0 else {}


RUNS = ExperimentRuns(
    check=lambda case: setup_of(Stall, case),
    label=lambda case: setup_of(Stall, case).label,
    figures=figures,
    figure_names={GAP: "longest gap", "newcomer_s": "TTFT of the newcomer"},
    kv_unified="on",
)


def case(n_prompt: int, n_streams: int, chunk: int | None) -> Case:
    """n_streams streams, and a prompt of n_prompt tokens in chunks or (None) all at once."""
    n_stream = N_CONTEXT + N_BEFORE + n_mixed(n_prompt, chunk) + N_GEN  # tokens of each stream
    return Case(
        n_prompt,
        N_GEN,
        experiment="stall",
        setup=Stall(n_streams, chunk, N_CONTEXT, N_BEFORE),
        sequences=(n_prompt + N_GEN, *(n_stream,) * n_streams),
    )


def n_mixed(n_prompt: int, chunk: int | None) -> int:
    """The number of steps that mix a part of the prompt with the streams' tokens."""
    return math.ceil(n_prompt / chunk) if chunk else 0


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: the streams' own prompts, their steps alone, the new prompt, and steps of all."""
    stall = case.setup
    assert isinstance(stall, Stall)
    prompt = text(0, case.n_prompt)
    streams = range(1, 1 + stall.n_streams)
    operations: list[Operation] = []
    for stream in streams:
        operations += script.prefill(stream, text(stream, stall.n_context), settings.n_ubatch)
    operations += script.decode(streams, stall.n_before)
    if stall.chunk is None:
        operations += script.prefill(0, prompt, settings.n_ubatch)
    else:
        stream_parts = [Part(stream, None, 1) for stream in streams]
        for first in range(0, len(prompt), stall.chunk):
            end = first + stall.chunk
            n_outputs = 1 if end >= len(prompt) else 0
            prompt_part = Part(0, tuple(prompt[first:end]), n_outputs)
            operations.append(Operation(MIXED, (prompt_part, *stream_parts)))
    operations += script.decode([0, *streams], case.n_gen - 1)
    return operations


def plan(
    worker: Worker,
    prompt_len: Numbers,
    chunk: Numbers | None,
    sequences: Numbers,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    **settings: Any,
) -> Plan:
    """Every length, number of streams and chunk, and all at once. LabError if impossible."""
    stream_counts = whole_numbers("--sequences", sequences, MOST_STREAMS)
    settings = {"kv_unified": "on", **settings}
    plain = make_plan(worker, prompt_len, N_GEN, repeat, model, **settings)
    need_every_position(plain.model)
    lengths = [plain_case.n_prompt for plain_case in plain.cases]
    shortest = min(lengths)
    if chunk is None:
        default_chunks = whole_numbers("--chunk", DEFAULT_CHUNKS, 2**30)
        chunks = [size for size in default_chunks if size <= shortest]
    else:
        chunks = list(whole_numbers("--chunk", chunk, 2**30))
    longest = max(chunks, default=1)
    if longest > shortest:
        raise LabError(
            f"--chunk {longest:,} is longer than the prompt of {shortest:,} tokens.",
            "Give smaller chunks; the lab always measures the prompt all at once too.",
        )
    n_most = max(stream_counts)
    if longest + n_most > plain.settings.n_batch:
        raise LabError(
            f"A chunk of {longest:,} tokens and {n_most:,} streams do not fit into a batch of "
            f"{plain.settings.n_batch:,} tokens.",
            f"Use --batch {longest + n_most}, a smaller --chunk, or fewer --sequences.",
        )
    cases: list[Case] = []
    for n_prompt in lengths:
        for n_streams in stream_counts:
            cases += [case(n_prompt, n_streams, size) for size in (*chunks, None)]
    return with_cases(plain, cases, write)


def stall(
    prompt_len: Numbers = "4096",
    chunk: Numbers | None = None,
    sequences: Numbers = "1,4",
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    out: StrPath = "results",
    watch: Watch = None,
    **settings: Unpack[EngineSettings],
) -> Results[Record]:
    """Prefill a long prompt in chunks of several sizes, and all at once, while other sequences
    decode.

        lab.stall(2048, "64,256", sequences="4")

    Without `chunk`: the default sizes up to the length of the prompt. Returns a record per run.
    LabError for impossible values.
    """
    options = {
        "prompt_len": prompt_len,
        "chunk": chunk,
        "sequences": sequences,
        "repeat": repeat,
        "model": model,
    }
    return Results(EXPERIMENT.measure({**options, **settings}, out, watch))


OPTIONS = (
    lengths_option("4096", "Tokens of the new prompt."),
    click.option(
        "--chunk",
        help="Sizes of the chunks: 64,256.  "
        f"[default: those of {DEFAULT_CHUNKS} that fit the prompt]",
    ),
    click.option(
        "--sequences",
        "-s",
        default="1,4",
        show_default=True,
        help="Numbers of sequences that decode when the prompt comes: 1,4.",
    ),
    REPEAT,
    MODEL,
    PROMPT,
    setting_option("kv_unified", RUNS.kv_unified),
)


class StallRun(NamedTuple):
    """A record with steps that show a stall."""

    record: Record
    stall: Stall
    steps: pd.DataFrame


def stall_runs(records: Sequence[Record]) -> list[StallRun]:
    runs = []
    for record in records:
        stall = stall_of(record.run)
        steps = stall_steps(record.run)
        if stall is not None and steps is not None:
            runs.append(StallRun(record, stall, steps))
    return runs


class StallRow(NamedTuple):
    """The medians of a case."""

    n_prompt: int
    n_gen: int
    n_streams: int
    chunk: int | None
    n_steps: int
    n_stalls: int
    longest_gap_s: float
    median_gap_s: float
    usual_gap_s: float
    newcomer_s: float
    n_runs: int
    longest_min_s: float
    longest_max_s: float
    lost: float | None
    expected_gap_s: float | None
    expected_newcomer_s: float | None


def rows(
    records: Sequence[Record], prediction: StepPrediction | None = None
) -> list[StallRow]:
    """A row for each prompt, number of streams and chunk (all at once last): medians over the
    successful timed runs.

    `n_stalls`: gaps during prefill of more than twice the usual one. `longest_gap_s` has the range
    over runs beside it, `newcomer_s` is the new request's TTFT. `lost` is the share of throughput
    lost by mixing: the time that the same work takes in sequence (the prompt all at once, then
    n_steps steps of the streams at the usual gap) against newcomer_s, in which it was done
    together; negative if mixing was faster.
    """
    import pandas as pd

    runs = []
    for record, stall, steps in stall_runs(records):
        run = record.run
        if figures(run):
            case = (run.n_prompt, run.n_gen, stall.n_streams, stall.chunk)
            runs.append({**dict(zip(CASE, case, strict=True)), **stall_figures(steps)})
    if not runs:
        return []
    by_case = pd.DataFrame(runs).astype({"chunk": "Int64"}).groupby(CASE, dropna=False)
    table = by_case.median().assign(
        n_runs=by_case.size(),
        longest_min_s=by_case.longest_gap_s.min(),
        longest_max_s=by_case.longest_gap_s.max(),
        n_steps=by_case.n_steps.first(),
        n_stalls=by_case.n_stalls.quantile(interpolation="lower"),  # a median that is whole
    )
    table = table.reset_index().astype({"n_steps": int, "n_stalls": int})
    table["lost"] = lost_share(table)
    chunks = [None if pd.isna(chunk) else chunk for chunk in table.chunk]
    cases = zip(table.n_prompt, table.n_streams, chunks, table.n_steps, strict=True)
    predicted = [expected_s(prediction, *case) for case in cases]
    table[["expected_gap_s", "expected_newcomer_s"]] = predicted
    return as_rows(table, StallRow)


def lost_share(table: pd.DataFrame) -> pd.Series:
    """The share of throughput that mixing loses in each case; NaN without a run all at once."""
    is_at_once = table.chunk.isna()
    at_once = table[is_at_once].set_index(REQUEST)
    prompt_s = table[REQUEST].join(at_once.newcomer_s, on=REQUEST).newcomer_s
    streams_s = table.n_steps * table.usual_gap_s
    in_sequence_s = prompt_s + streams_s.mask(is_at_once, 0)
    return 1 - in_sequence_s / table.newcomer_s


def expected_s(
    prediction: StepPrediction | None,
    n_prompt: int,
    n_streams: int,
    chunk: int | None,
    n_steps: int,
) -> tuple[float, float]:
    """Predicted seconds of a case: the longest gap, and the new request's TTFT; NaN if they are
    unknown.
    """
    unknown = (math.nan, math.nan)
    if prediction is None or n_prompt > MOST_PREDICTED or n_streams > MOST_STREAMS:
        return unknown
    n_ubatch = max(1, prediction.settings.n_ubatch)
    if n_steps != n_mixed(n_prompt, chunk or n_ubatch):
        return unknown
    operations = write(
        case(n_prompt, n_streams, chunk), lambda sequence, n: [0] * n, prediction.settings
    )
    steps = prediction.steps(operations)
    if steps is None:
        return unknown
    predicted = stall_figures(steps)
    return predicted["longest_gap_s"], predicted["newcomer_s"]


def conclude(rows: Sequence[StallRow], records: Sequence[Record] = ()) -> list[str]:
    """What rows of one setup show, in sentences, and how good their predictions are."""
    sentences: list[str] = []
    for chunks in grouped(rows, lambda row: (row.n_prompt, row.n_streams)).values():
        last = chunks[-1]
        sentences.append(
            f"With {plural(last.n_streams, 'stream')}, a prompt of {last.n_prompt:,} tokens "
            f"{in_chunks(last.chunk)} causes a gap of up to {seconds(last.longest_gap_s)} "
            f"(usual gap {seconds(last.usual_gap_s)})."
        )
        if last.chunk is None and len(chunks) > 1:
            costs = [cost_of_chunk(row, last) for row in chunks[:-1]]
            sentences.append(f"The longest gap is {'; '.join(costs)}.")
    gap_pairs = [(row.expected_gap_s, row.longest_gap_s) for row in rows]
    ttft_pairs = [(row.expected_newcomer_s, row.newcomer_s) for row in rows]
    errors = [
        *prediction_errors(gap_pairs, "the longest gap"),
        *prediction_errors(ttft_pairs, "the new request's TTFT"),
    ]
    if errors:
        sentences.append(" ".join(errors))
    return sentences


def cost_of_chunk(row: StallRow, at_once: StallRow) -> str:
    """The longest gap of a chunk, and what it costs the new request and the throughput."""
    gap = f"{seconds(row.longest_gap_s)} {in_chunks(row.chunk)}"
    ttft = (
        f"TTFT of the new request {digits(row.newcomer_s / at_once.newcomer_s)}x that at once"
    )
    lost_percent = round(100 * (row.lost or 0.0))
    if lost_percent > 0:
        return f"{gap} ({ttft}, throughput {lost_percent} % lower)"
    if lost_percent < 0:
        return f"{gap} ({ttft}, throughput {-lost_percent} % higher)"
    return f"{gap} ({ttft})"


def finding(rows: Sequence[StallRow]) -> str:
    """The longest gap of the largest case, all at once and in the smallest chunks."""
    *_, chunks = grouped(rows, lambda row: (row.n_prompt, row.n_streams)).values()
    last = chunks[-1]
    gap = f"{seconds(last.longest_gap_s)} {in_chunks(last.chunk)}"
    if len(chunks) > 1:
        smallest = chunks[0]
        gap = f"{gap}, {seconds(smallest.longest_gap_s)} {in_chunks(smallest.chunk)}"
    return (
        f"A prompt of {last.n_prompt:,} tokens stops {plural(last.n_streams, 'stream')} for up to "
        f"{gap}"
    )


def draw(
    rows: Sequence[StallRow], records: Sequence[Record], title: str, figure: Figure
) -> None:
    """The gap before each token of the streams over the time since the new prompt came: prompts
    down, chunks across.

    A point is a token of a run; the line is the median of each token, each step as wide as the
    wait. The vertical line is the new request's first token. Of more than 4 chunks it draws the
    smallest, the largest and two between.
    """
    runs_by_streams = sorted(stall_runs(records), key=lambda run: run.stall.n_streams)
    by_case = grouped(
        runs_by_streams,
        lambda run: (run.record.run.n_prompt, run.stall.n_streams, run.stall.chunk),
    )
    lengths = sorted({n_prompt for n_prompt, _, _ in by_case})
    streams = sorted({n_streams for _, n_streams, _ in by_case})
    chunks = drawn_chunks({chunk for _, _, chunk in by_case})
    styles = dict(zip(streams, canvas.styles(len(streams), canvas.OF_DECODE), strict=True))
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(lengths)))
    axes = figure.subplots(len(lengths), len(chunks), sharex=True, sharey=True, squeeze=False)
    for (n_prompt, n_streams, chunk), runs in by_case.items():
        if chunk not in chunks:
            continue
        ax = axes[lengths.index(n_prompt), chunks.index(chunk)]
        draw_gaps(ax, runs, styles[n_streams], plural(n_streams, "stream"))
        panel_title = in_chunks(chunk)
        if len(lengths) > 1:
            panel_title = f"prompt of {n_prompt:,} tokens {panel_title}"
        ax.set_title(panel_title, fontsize=canvas.PANEL_SIZE)
    colour = canvas.GUIDE
    if len(streams) == 1:
        colour = styles[streams[0]]["color"]
    first_token = {"color": colour, "ls": ":", "lw": 1.2}
    axes[-1, -1].plot([], [], **first_token, label="first token of the new request")
    repeats = plural(1 + max(record.run.repeat for record in records), "repeat")
    canvas.finish(list(axes.flat), f"{title} ({repeats})", is_apart=True)


def drawn_chunks(chunks: set[int | None]) -> list[int | None]:
    """The chunks with a panel: all, or the smallest, the largest and two between; all at once is
    the largest.
    """
    ordered = sorted(chunks, key=lambda chunk: chunk or math.inf)
    if len(ordered) <= MOST_CHUNKS:
        return ordered
    stride = (len(ordered) - 1) / (MOST_CHUNKS - 1)
    return [ordered[round(panel * stride)] for panel in range(MOST_CHUNKS)]


def draw_gaps(ax: Axes, runs: Sequence[StallRun], style: canvas.Style, label: str) -> None:
    """Draw the gaps of the runs of a case as points, the median of each token as a line, and the
    first token.
    """
    import pandas as pd

    parts = []
    ttfts_s = []
    for run in runs:
        parts.append(gaps(run.steps).assign(is_hollow=bool(disturbances(run.record))))
        ttfts_s.append(stall_figures(run.steps)["newcomer_s"])
    tokens = pd.concat(parts)  # the index is the number of the token in its run
    tokens["gap_ms"] = 1e3 * tokens.gap_s
    canvas.points(ax, tokens.at_s, tokens.gap_ms, tokens.is_hollow, **style, ms=3.5, alpha=0.5)
    medians = tokens.groupby(level=0)[["at_s", "gap_s", "gap_ms"]].median()
    first = medians.loc[0]
    at_s = [first.at_s - first.gap_s, *medians.at_s]
    gaps_ms = [first.gap_ms, *medians.gap_ms]
    ax.step(at_s, gaps_ms, where="pre", color=style["color"], lw=1.6)
    ax.plot([], [], **style, ms=3.5, lw=1.6, label=label)
    ax.axvline(pd.Series(ttfts_s).median(), color=style["color"], ls=":", lw=1.2)
    ax.set(
        yscale="log",
        xlabel="time since the prompt came (s)",
        ylabel="time since the previous token (ms)",
    )
    ax.label_outer()


def chunk_cell(row: StallRow) -> str:
    return "at once" if row.chunk is None else f"{row.chunk:,}"


def gap_cell(row: StallRow) -> Cell:
    return ranged(row.longest_gap_s, row.longest_min_s, row.longest_max_s, row.n_runs)


def lost_cell(row: StallRow) -> str:
    return UNKNOWN if row.lost is None else str(round(100 * row.lost))


TABLE: ExperimentTable[StallRow] = ExperimentTable(
    name="stall",
    question="How long does a long prompt stop running answers?",
    title="a long prompt beside running answers; medians over runs; "
    "lost: throughput lost by mixing",
    below="their range",
    topic="Gaps between tokens of the streams when a long prompt comes",
    finding=finding,
    caption="The gap before each token of the streams, over the time since the prompt came; "
    "a panel for each chunk. Points are tokens of all runs, the line is the median of each token.",
    columns=(
        PROMPT_TOKENS,
        Column("streams", lambda row: f"{row.n_streams:,}", is_in_title=True),
        Column("chunk", chunk_cell),
        N_RUNS,
        Column("stalls", lambda row: f"{row.n_stalls:,}"),
        Column("longest\ngap ms", gap_cell),
        Column("predicted\nms", lambda row: cell(row.expected_gap_s, 1e3)),
        Column("usual\ngap ms", lambda row: cell(row.usual_gap_s, 1e3)),
        Column("new TTFT\ns", lambda row: cell(row.newcomer_s)),
        Column("predicted\ns", lambda row: cell(row.expected_newcomer_s)),
        Column("lost\n%", lost_cell),
    ),
    rows=rows,
    conclude=conclude,
    draw=draw,
)

EXPERIMENT = Experiment(
    name="stall",
    chapter="Stalls",
    about="""Measure how long a new prompt interrupts running answers.

    \b
      lab stall --prompt-len 4096
      lab stall --prompt-len 4096 --chunk 64,256,1024 --sequences 1,4

    Each chunk shares a step with one token of each stream. In the last row the prompt is prefilled
    all at once while the streams wait. The command shows the number of stalls (gaps over twice as
    long as usual), the longest gap, the new prompt's time to first token, and the lost throughput,
    each with the prediction from the ceilings. """,
    plan=plan,
    options=OPTIONS,
    main_options=("model", "prompt-len", "chunk", "sequences", "repeat"),
    tables=(TABLE,),
)

command = EXPERIMENT.as_command()
KINDS = (EXPERIMENT.as_kind(),)
