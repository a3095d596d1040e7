"""`lab stall`: how long a new request's long prompt stops running answers.

Streams decode, one token of each in every step. A long prompt that is prefilled all at once is one long gap in every
stream; in chunks that share steps with the streams' tokens it is many short gaps. But every chunk reads all weights
again, so with small chunks the new request waits longer. This is the trade-off of chunked prefill (Agrawal et al.,
"Sarathi-Serve", 2024).

llama.cpp computes all sequences of a step together only if they share one cache (`--kv-unified on`, the default here).
It cuts a step of more than --ubatch tokens into parts, and each part reads the weights: a chunk of 1,024 with 4 streams
is 3 parts with the default of 512. The lab keeps --ubatch, as servers do, and predicts such steps part by part.
The new request ("newcomer" in the code) is sequence 0, the streams are 1, 2, ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from lab.app import experiment
from lab.app.experiment import REPEAT, Numbers, Option, cell, ranged
from lab.core import script
from lab.core.experiments import ExperimentRuns, setup_of
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
from lab.show import canvas
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

DEFAULT_CHUNKS = "64,256,1024"
CHUNK = Option(
    f"Sizes of the chunks: 64,256.  [default: those of {DEFAULT_CHUNKS} that fit the prompt]"
)

MOST_STREAMS = 255  # LLAMA_MAX_SEQ of llama.cpp is 256; the new request is one of them

N_CONTEXT = 128
N_BEFORE = 32
N_GEN = 9
"""Tokens of each stream's own prompt, steps of the streams alone, and tokens of the new request's answer."""

MOST_PREDICTED = 2**20  # prompt tokens of a run that is predicted step by step
CASE = ["n_prompt", "n_gen", "n_streams", "chunk"]
STALL = 2.0  # a gap longer than STALL times the usual gap is a stall


@dataclass(frozen=True)
class Stall:
    """`lab stall`: a prompt of n_prompt tokens was prefilled in chunks while other sequences decoded."""

    n_streams: int
    chunk: int | None  # None: all at once, while the streams waited
    n_context: int  # tokens of each stream's own prompt
    n_before: int  # steps of the streams alone, before the prompt came

    @property
    def label(self) -> str:
        return f"{in_chunks(self.chunk)} beside {plural(self.n_streams, 'stream')}"


def in_chunks(chunk: int | None) -> str:
    return "all at once" if chunk is None else f"in chunks of {chunk:,}"


def stall_of(run: Run) -> Stall | None:
    """The stall of a run; None for runs of other experiments."""
    return setup_of(Stall, run.case) if run.experiment == "stall" else None


def prompt_steps(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps of the new prompt of `lab stall`: those with prompt tokens after the first decode step."""
    return steps[steps.kind.eq(DECODE).cummax() & steps.kind.isin((MIXED, PREFILL))]


def gaps(steps: pd.DataFrame) -> pd.DataFrame:
    """A row per token of the streams of `lab stall`: `at_s` since the new prompt arrived, `gap_s`, and `when`.

    All streams get a token in the same steps, so they share one list of gaps. `steps`, measured or predicted, has
    `kind`, `start_s`, `end_s`. `when` is before the prompt, during its prefill (the gap overlaps it), or after.
    """
    import pandas as pd

    prompt = prompt_steps(steps)
    tokens = steps[steps.kind.eq(DECODE).cummax() & steps.kind.isin((DECODE, MIXED))]
    arrived = prompt.start_s.min()
    done = prompt.end_s.max()
    end = tokens.end_s
    previous = tokens.end_s.shift()
    when = (
        pd.Series("after", tokens.index)
        .mask(previous < done, "during")
        .mask(end <= arrived, "before")
    )
    return tokens.assign(at_s=end - arrived, gap_s=end - previous, when=when).iloc[1:].reset_index()


def stall_figures(steps: pd.DataFrame) -> dict[str, float]:
    """The figures of a run of `lab stall`. `usual_gap_s` is the median gap before the new prompt came."""
    tokens = gaps(steps)
    prompt = prompt_steps(steps)
    during = tokens.gap_s[tokens.when == "during"]
    usual = tokens.gap_s[tokens.when == "before"].median()
    return {
        "n_steps": len(prompt),
        "n_stalls": int((during > STALL * usual).sum()),
        "longest_gap_s": during.max(),
        "median_gap_s": during.median(),
        "usual_gap_s": usual,
        "newcomer_s": prompt.end_s.max() - prompt.start_s.min(),
    }


def stall_steps(run: Run) -> pd.DataFrame | None:
    """The steps of a run of `lab stall`; None for other runs, and if its steps are not those of its script."""
    lever = stall_of(run)
    if (
        lever is None
        or lever.n_streams < 1
        or (lever.chunk is not None and lever.chunk < 1)
        or lever.n_before < 2
    ):
        return None
    steps = run.steps.frame()
    prompt = prompt_steps(steps)
    n_before = (steps.loc[: prompt.index.min() - 1].kind == DECODE).sum() if len(prompt) else 0
    n_beside = lever.n_streams * (prompt.kind == MIXED).sum()
    is_whole = n_before == lever.n_before and prompt.n_tokens.sum() - n_beside == run.n_prompt
    return steps if is_whole and (steps.kind == DECODE).sum() > n_before else None


def figures(run: Run) -> dict[str, float]:
    """`gap_ms`, the longest gap between two tokens of a stream; `newcomer_s`, the new request's TTFT.

    Empty for a failed run, and for one whose steps do not fit its case.
    """
    if run.status != OK or run.n_prompt < 1 or run.n_gen < 1:
        return {}
    steps = stall_steps(run)
    if steps is None:
        return {}
    of_stall = stall_figures(steps)
    times = {"gap_ms": 1e3 * of_stall["longest_gap_s"], "newcomer_s": of_stall["newcomer_s"]}
    return times if min(times.values()) > 0 else {}


RUNS = ExperimentRuns(
    check=lambda case: setup_of(Stall, case),
    label=lambda case: setup_of(Stall, case).label,
    figures=figures,
    figure_names={"gap_ms": "longest gap", "newcomer_s": "TTFT of the newcomer"},
    kv_unified="on",
)


def case(n_prompt: int, n_streams: int, chunk: int | None) -> Case:
    """n_streams streams, and a prompt of n_prompt tokens in chunks or (None) all at once."""
    n_stream = N_CONTEXT + N_BEFORE + n_mixed(n_prompt, chunk) + N_GEN
    lever = Stall(n_streams, chunk, N_CONTEXT, N_BEFORE)
    return Case(
        n_prompt,
        N_GEN,
        experiment="stall",
        setup=lever,
        sequences=(n_prompt + N_GEN, *(n_stream,) * n_streams),
    )


def n_mixed(n_prompt: int, chunk: int | None) -> int:
    """The number of steps that mix a part of the prompt with the streams' tokens."""
    return math.ceil(n_prompt / chunk) if chunk else 0


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: the streams' own prompts, their steps alone, the new prompt, and steps of all."""
    lever = case.setup
    prompt = text(0, case.n_prompt)
    assert isinstance(lever, Stall)
    streams = range(1, 1 + lever.n_streams)
    operations = [
        step
        for i in streams
        for step in script.prefill(i, text(i, lever.n_context), settings.n_ubatch)
    ]
    operations += script.decode(streams, lever.n_before)
    if lever.chunk is None:
        operations += script.prefill(0, prompt, settings.n_ubatch)
    else:
        others = [Part(i, None, 1) for i in streams]
        for first in range(0, len(prompt), lever.chunk):
            end = first + lever.chunk
            operations.append(
                Operation(
                    MIXED, (Part(0, tuple(prompt[first:end]), int(end >= len(prompt))), *others)
                )
            )
    return [*operations, *script.decode([0, *streams], case.n_gen - 1)]


def plan(
    worker: Worker,
    /,
    prompt_len: Annotated[Numbers, Option("Tokens of the new prompt.", "-p")] = "4096",
    chunk: Annotated[Numbers | None, CHUNK] = None,
    streams: Annotated[Numbers, Option("Numbers of sequences that decode: 1,4.")] = "1,4",
    repeat: Annotated[int | None, REPEAT] = None,
    model: str = catalog.DEFAULT,
    **settings: Any,
) -> Plan:
    """Prefill a long prompt in chunks of several sizes, and all at once, while other sequences decode.

        lab.stall(2048, "64,256", streams="4")

    Without `chunk`: the default sizes up to the length of the prompt. Returns a record per run. LabError for impossible
    values.
    """
    of_streams = experiment.numbers("--streams", streams, MOST_STREAMS)
    made = make_plan(worker, prompt_len, N_GEN, repeat, model, **{"kv_unified": "on", **settings})
    experiment.need_every_position(made.model)
    shortest = min(own.n_prompt for own in made.cases)
    chunks = experiment.numbers("--chunk", DEFAULT_CHUNKS if chunk is None else chunk, 2**30)
    if chunk is None:
        chunks = tuple(n for n in chunks if n <= shortest)
    longest = max(chunks, default=1)
    n_most = max(of_streams)
    if longest > shortest:
        what = f"--chunk {longest:,} is longer than the prompt of {shortest:,} tokens."
        raise LabError(
            what, "Give smaller chunks; the lab always measures the prompt all at once too."
        )
    if longest + n_most > made.settings.n_batch:
        raise LabError(
            f"A chunk of {longest:,} tokens and {n_most:,} streams do not fit into a batch of "
            f"{made.settings.n_batch:,} tokens.",
            f"Use --batch {longest + n_most}, a smaller --chunk, or fewer --streams.",
        )
    sizes = [(n_streams, size) for n_streams in of_streams for size in (*chunks, None)]
    return with_cases(
        made, [case(own.n_prompt, *size) for own in made.cases for size in sizes], write
    )


def _measured(records: Sequence[Record]) -> list[tuple[Record, Stall, pd.DataFrame]]:
    """The records with steps that show a stall."""
    known = [(one, stall_of(one.run), stall_steps(one.run)) for one in records]
    return [(one, lever, steps) for one, lever, steps in known if lever and steps is not None]


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Any]:
    """A row for each prompt, number of streams and chunk (all at once last): medians over the successful timed runs.

    `n_stalls`: gaps during prefill of more than twice the usual one. `longest_gap_s` has the range over runs beside it,
    `newcomer_s` is the new request's TTFT. `lost` is the share of throughput lost by mixing: the time that the same
    work takes in sequence (the prompt all at once, then n_steps steps of the streams at the usual gap) against
    newcomer_s, in which it was done together; negative if mixing was faster.
    """
    import pandas as pd

    runs = [
        dict(
            zip(CASE, (one.run.n_prompt, one.run.n_gen, lever.n_streams, lever.chunk), strict=True)
        )
        | stall_figures(steps)
        for one, lever, steps in _measured(records)
        if figures(one.run)
    ]
    if not runs:
        return []
    of_cases = pd.DataFrame(runs).astype({"chunk": "Int64"}).groupby(CASE, dropna=False)
    longest = of_cases.longest_gap_s
    made = of_cases.median().assign(
        n_runs=of_cases.size(), longest_min_s=longest.min(), longest_max_s=longest.max()
    )
    made = made.assign(
        n_steps=of_cases.n_steps.first(), n_stalls=of_cases.n_stalls.quantile(interpolation="lower")
    )
    made = made.reset_index().astype({"n_steps": int, "n_stalls": int})
    is_mixed = made.chunk.notna()
    at_once_s = (
        made.newcomer_s.mask(is_mixed).groupby([made[name] for name in CASE[:3]]).transform("max")
    )
    made["lost"] = (
        1 - (at_once_s + made.n_steps.where(is_mixed, 0) * made.usual_gap_s) / made.newcomer_s
    )
    cases = experiment.as_rows(made[["n_prompt", "n_streams", "chunk", "n_steps"]])
    made[["expected_gap_s", "expected_newcomer_s"]] = [
        expected_s(prediction, *one) for one in cases
    ]
    return experiment.as_rows(made)


def expected_s(
    prediction: StepPrediction | None,
    n_prompt: int,
    n_streams: int,
    chunk: int | None,
    n_steps: int,
) -> tuple[float, float]:
    """Predicted seconds of a case: the longest gap, and the new request's TTFT; NaN if they are unknown."""
    is_short = n_prompt <= MOST_PREDICTED and n_streams <= MOST_STREAMS
    if (
        prediction
        and is_short
        and n_steps == n_mixed(n_prompt, chunk or max(1, prediction.settings.n_ubatch))
    ):
        operations = write(
            case(n_prompt, n_streams, chunk), lambda sequence, n: [0] * n, prediction.settings
        )
        if (steps := prediction.steps(operations)) is not None:
            known = stall_figures(steps)
            return known["longest_gap_s"], known["newcomer_s"]
    return math.nan, math.nan


def sentences(measured: Sequence[Any]) -> list[str]:
    """What rows of one setup show, in words, and how good their predictions are."""
    words = []
    for alike in grouped(measured, lambda row: (row.n_prompt, row.n_streams)).values():
        last = alike[-1]
        words.append(
            f"With {plural(last.n_streams, 'stream')}, a prompt of {last.n_prompt:,} tokens {in_chunks(last.chunk)} "
            f"causes a gap of up to {seconds(last.longest_gap_s)} (usual gap {seconds(last.usual_gap_s)})."
        )
        parts = list[str]()
        for row in alike[:-1] if last.chunk is None else ():
            lost = round(100 * row.lost)
            change = (
                f", {abs(lost)} % {'lower' if lost > 0 else 'higher'} throughput" if lost else ""
            )
            ttft = f"{digits(row.newcomer_s / last.newcomer_s)}x the TTFT of the new request"
            parts.append(f"{seconds(row.longest_gap_s)} {in_chunks(row.chunk)} ({ttft}{change})")
        if parts:
            words.append(f"The longest gap is {'; '.join(parts)}.")
    gaps = [(row.expected_gap_s, row.longest_gap_s) for row in measured]
    ttfts = [(row.expected_newcomer_s, row.newcomer_s) for row in measured]
    errors = experiment.off_by(gaps, "the longest gap") + experiment.off_by(
        ttfts, "the new request's TTFT"
    )
    return [*words, " ".join(errors)] if errors else words


MOST_CHUNKS = 4


def draw(rows: Sequence[Any], records: Sequence[Record], subject: str, figure: Figure) -> None:
    """The gap before each token of the streams over the time since the new prompt came: prompts down, chunks across.

    A point is a token of a run; the line is the median of each token, each step as wide as the wait. The vertical line
    is the new request's first token. Of more than 4 chunks it draws the smallest, the largest and two between.
    """
    import pandas as pd

    of_cases = grouped(
        _measured(records), lambda one: (one[0].run.n_prompt, one[1].n_streams, one[1].chunk)
    )
    lengths = sorted({case[0] for case in of_cases})
    streams = sorted({case[1] for case in of_cases})
    chunks = sorted({case[2] for case in of_cases}, key=lambda size: size or math.inf)
    if len(chunks) > MOST_CHUNKS:
        chunks = [
            chunks[round(i * (len(chunks) - 1) / (MOST_CHUNKS - 1))] for i in range(MOST_CHUNKS)
        ]
    styles = dict(zip(streams, canvas.styles(len(streams), canvas.OF_DECODE), strict=True))
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(lengths)))
    axes = figure.subplots(len(lengths), len(chunks), sharex=True, sharey=True, squeeze=False)
    for (n_prompt, n_streams, chunk), own in sorted(of_cases.items(), key=lambda item: item[0][:2]):
        if chunk in chunks:
            ax = axes[lengths.index(n_prompt), chunks.index(chunk)]
            style = styles[n_streams]
            parts = [
                gaps(steps).assign(hollow=bool(disturbances(record))) for record, _, steps in own
            ]
            tokens = pd.concat(parts)
            canvas.points(
                ax, tokens.at_s, 1e3 * tokens.gap_s, tokens.hollow, **style, ms=3.5, alpha=0.5
            )
            middle = tokens[["at_s", "gap_s"]].groupby(level=0).median()
            at_s = [middle.at_s[0] - middle.gap_s[0], *middle.at_s]
            gaps_ms = [1e3 * gap_s for gap_s in (middle.gap_s[0], *middle.gap_s)]
            ax.step(at_s, gaps_ms, where="pre", color=style["color"], lw=1.6)
            ax.plot([], [], **style, ms=3.5, lw=1.6, label=plural(n_streams, "stream"))
            ttft_s = pd.Series([stall_figures(steps)["newcomer_s"] for *_, steps in own]).median()
            ax.axvline(ttft_s, color=style["color"], ls=":", lw=1.2)
            prompt = f"prompt of {n_prompt:,} tokens " if len(lengths) > 1 else ""
            ax.set_title(f"{prompt}{in_chunks(chunk)}", fontsize=10)
            ax.set(
                yscale="log",
                xlabel="time since the prompt came (s)",
                ylabel="time since the previous token (ms)",
            )
            ax.label_outer()
    axes[-1, -1].plot(
        [], [], color=canvas.GUIDE, ls=":", lw=1.2, label="first token of the new request"
    )
    prompt = f"a prompt of {lengths[0]:,} tokens" if len(lengths) == 1 else "long prompts"
    repeats = plural(1 + max(record.run.repeat for record in records), "repeat")
    title = f"Gaps between tokens of the streams when {prompt} comes\n{subject} ({repeats})"
    canvas.finish(list(axes.flat), title, is_apart=True)


TABLE = experiment.Table(
    name="stall",
    question="How long does a long prompt stop running answers?",
    title="a long prompt beside running answers; medians over runs, their range below; lost: throughput lost by mixing",
    caption="The gap before each token of the streams, over the time since the prompt came; a panel for each chunk. "
    "Points are tokens of all runs, the line is the median of each token.",
    columns=(
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        ("streams", lambda row: f"{row.n_streams:,}"),
        ("chunk", lambda row: "at once" if row.chunk is None else f"{row.chunk:,}"),
        ("runs", lambda row: str(row.n_runs)),
        ("stalls", lambda row: f"{row.n_stalls:,}"),
        (
            "longest\ngap ms",
            lambda row: ranged(row.longest_gap_s, row.longest_min_s, row.longest_max_s, row.n_runs),
        ),
        ("predicted\nms", lambda row: cell(row.expected_gap_s, 1e3)),
        ("usual\ngap ms", lambda row: cell(row.usual_gap_s, 1e3)),
        ("new TTFT\ns", lambda row: cell(row.newcomer_s)),
        ("predicted\ns", lambda row: cell(row.expected_newcomer_s)),
        ("lost\n%", lambda row: "-" if row.lost is None else str(round(100 * row.lost))),
    ),
    rows=rows,
    conclude=lambda rows, _: sentences(rows),
    draw=draw,
)

EXPERIMENT = experiment.Experiment(
    name="stall",
    chapter="Stalls",
    about="""Measure how long a new prompt interrupts running answers.

    \b
      lab stall --prompt-len 4096
      lab stall --prompt-len 4096 --chunk 64,256,1024 --streams 1,4

    Each chunk shares a step with one token of each stream. In the last row the prompt is prefilled all at once while
    the streams wait. The command shows the number of stalls (gaps over twice as long as usual), the longest gap, the
    new prompt's time to first token, and the lost throughput, each with the prediction from the ceilings.
    """,
    plan=plan,
    tables=(TABLE,),
)

command = EXPERIMENT.as_command()
KINDS = (EXPERIMENT.as_kind(),)
stall = experiment.public("stall", plan)
