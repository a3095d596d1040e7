"""`lab stall`: how long a new request's long prompt stops running answers.

Streams decode, one token of each in every step. Then a new request with a long prompt comes. Prefilled all at once, the
prompt makes every stream wait until it is done: one gap as long as the whole prefill. In chunks that share steps with
the streams' tokens it makes each of these steps longer: many short gaps. But every chunk reads all weights again. With
small chunks the new request waits longer, and the total work may take longer. This is the trade-off of chunked prefill
(Agrawal et al., "Sarathi-Serve", 2024), where the longest allowed gap decides the chunk.

A gap is the time between two tokens of a stream. llama.cpp computes all sequences of a step together only if they
share one cache (`--kv-unified on`, the default here). It cuts a step of more than --ubatch tokens into parts, and each
part reads the weights: a chunk of 1,024 with 4 streams is 3 parts with the default of 512. The lab keeps --ubatch, as
servers do, and predicts such steps part by part.

The new request ("newcomer" in the code) is sequence 0, the streams are 1, 2, ... If all sequences share one cache,
llama.cpp cuts a step every n_ubatch tokens (llama-batch.cpp, 0c1e570, split_simple), the new request's tokens first.
With separate caches a part has equally many tokens of each sequence (split_equal): first one of each, then the rest of
the new request's. In a shared cache every token's attention is computed over the cells of all sequences, and masked.
The CPU's kernel for 64 and more tokens skips what is masked for 64 of them at once (a tile; ggml-cpu/ops.cpp,
flash_attn_ext_tiled), so the streams' few tokens cost a whole tile over the caches of all streams.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from lab.core import cost, gaps, lever_figures, script
from lab.core.gaps import Gaps
from lab.core.levers import Stall, in_chunks
from lab.core.lists import grouped, plural
from lab.core.record import MIXED, Record, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.features.common import (
    as_lengths,
    cell,
    first_difference,
    listed,
    need_every_position,
    numbers,
    off_by,
    ranged,
    sentence,
)
from lab.features.experiment import REPEAT, Experiment, Keywords, Option, Table, for_plan, public
from lab.features.limits import step_kernels
from lab.features.limits.step_prediction import StepPrediction
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.show import canvas, setup_columns
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_CHUNKS = "64,256,1024"

SEPARATE = (
    "With separate caches (--kv-unified off) llama.cpp splits each mixed step in two, one token of each sequence and "
    "the rest of the chunk, and reads the weights for both."
)
MOST_STREAMS = 255
"""LLAMA_MAX_SEQ of llama.cpp is 256; the new request is one of them."""

MOST_TOKENS = 2**30


N_CONTEXT, N_BEFORE, N_GEN = 128, 32, 9
"""Tokens of each stream's own prompt, steps of the streams alone, and tokens of the new request's answer."""


def case(n_prompt: int, n_streams: int, chunk: int | None) -> Case:
    """n_streams streams, and a prompt of n_prompt tokens in chunks or (None) all at once."""
    n_stream = N_CONTEXT + N_BEFORE + n_mixed(n_prompt, chunk) + N_GEN
    return Case(
        n_prompt,
        N_GEN,
        lever=Stall(n_streams, chunk, N_CONTEXT, N_BEFORE),
        sequences=(n_prompt + N_GEN, *(n_stream,) * n_streams),
    )


def n_mixed(n_prompt: int, chunk: int | None) -> int:
    """The number of steps that mix a part of the prompt with the streams' tokens."""
    return 0 if chunk is None else -(-n_prompt // chunk)


def write(case: Case, text: Text, settings: Settings) -> list[Operation]:
    """The script: the streams' own prompts, their steps alone, the new prompt, and steps of all."""
    lever = case.lever
    assert isinstance(lever, Stall)
    streams, prompt = range(1, 1 + lever.n_streams), text(0, case.n_prompt)
    operations = [step for i in streams for step in script.prefill(i, text(i, lever.n_context), settings.n_ubatch)]
    operations += script.decode(streams, lever.n_before)
    if lever.chunk is None:
        operations += script.prefill(0, prompt, settings.n_ubatch)
    else:
        others = tuple(Part(i, None, 1) for i in streams)
        for first in range(0, len(prompt), lever.chunk):
            tokens = tuple(prompt[first : first + lever.chunk])
            is_last = first + lever.chunk >= len(prompt)
            operations.append(Operation(MIXED, (Part(0, tokens, int(is_last)), *others)))
    return [*operations, *script.decode([0, *streams], case.n_gen - 1)]


def newcomer_ids(run: Run) -> tuple[int, ...]:
    """The tokens of the new request's answer; empty for other runs."""
    if run.stall is None:
        return ()
    n_streams, chunk = run.stall.n_streams, run.stall.chunk
    n_before = n_streams * (1 + run.stall.n_before)  # sampled for the streams before the prompt came
    if chunk is None:
        first, answers = n_before, n_before + 1
    else:  # the last mixed step samples the new request's first token, and one of each stream
        first = n_before + n_streams * max(0, n_mixed(run.n_prompt, chunk) - 1)
        answers = first + 1 + n_streams
    return (*run.token_ids[first : first + 1], *run.token_ids[answers :: n_streams + 1])


def check_chunks(chunks: Sequence[int], n_prompt: int, n_streams: int, n_batch: int) -> None:
    """LabError if the largest chunk is longer than the prompt, or does not fit into a batch with the streams."""
    most = max(chunks, default=0)
    if most > n_prompt:
        raise LabError(
            f"--chunk {most:,} is longer than the prompt of {n_prompt:,} tokens.",
            "Give smaller chunks; the lab always measures the prompt all at once too.",
        )
    most = max(most, 1)  # the new request's own tokens
    if most + n_streams > n_batch:
        raise LabError(
            f"A chunk of {most:,} tokens and {n_streams:,} streams do not fit into a batch of {n_batch:,} tokens.",
            f"Use --batch {most + n_streams}, a smaller --chunk, or fewer --streams.",
        )


TILE = 64
"""Tokens of a tile of attention on the CPU (ggml-cpu/common.h, ggml_fa_tile_config)."""


@dataclass(frozen=True)
class Piece:
    """A part of a step that is computed in one go, as StepPrediction.seconds takes it."""

    n_tokens: int
    n_past: int
    n_outputs: int
    others: tuple[cost.Span, ...] = ()


def expected_s(prediction: StepPrediction, n_prompt: int, lever: Stall) -> tuple[float, float] | None:
    """Predicted seconds: the longest gap, and the new request's TTFT; None if a step cannot be predicted."""
    if lever.chunk is None:
        alone, step = prediction.prefill(n_prompt), _seconds(prediction, answering(lever, n_prompt))
        return None if alone is None or step is None else (alone + step, alone)
    steps = [
        _seconds(prediction, mixed(lever, n_prompt, number, prediction.settings))
        for number in range(n_mixed(n_prompt, lever.chunk))
    ]
    known = [step for step in steps if step is not None]
    return (max(known), sum(known)) if len(known) == len(steps) else None


def mixed(lever: Stall, n_prompt: int, number: int, settings: Settings) -> Iterator[Piece]:
    """The pieces of a mixed step, the steps counted from 0."""
    assert lever.chunk is not None
    n_streams, n_ubatch, n_past = lever.n_streams, max(1, settings.n_ubatch), number * lever.chunk
    n_new = min(lever.chunk, n_prompt - n_past)
    is_last = n_past + n_new == n_prompt
    stream = (1, lever.n_context + lever.n_before + number)
    if not settings.kv_unified:
        yield Piece(1, n_past, n_streams + int(is_last and n_new == 1), (stream,) * n_streams)
        for start in range(1, n_new, n_ubatch):
            end = min(start + n_ubatch, n_new)
            yield Piece(end - start, n_past + start, int(is_last and end == n_new))
        return
    for start in range(0, n_new + n_streams, n_ubatch):
        end = min(start + n_ubatch, n_new + n_streams)
        n_own = max(0, min(end, n_new) - start)
        n_others = end - start - n_own
        n_outputs = n_others + int(is_last and start < n_new <= end)
        if n_own:
            yield Piece(n_own, n_past + start, n_outputs, (stream,) * n_others)
        else:
            yield Piece(*stream, n_outputs, (stream,) * (n_others - 1))


def answering(lever: Stall, n_prompt: int) -> Iterator[Piece]:
    """The streams' first step after a prompt that was prefilled all at once; it includes the new request."""
    stream = (1, lever.n_context + lever.n_before)
    yield Piece(1, n_prompt, 1 + lever.n_streams, (stream,) * lever.n_streams)


def _seconds(prediction: StepPrediction, pieces: Iterable[Piece]) -> float | None:
    total = 0.0
    for piece in pieces:
        taken = prediction.seconds(piece.n_tokens, piece.n_past, piece.n_outputs, piece.others)
        if taken is None:
            return None
        total += taken + _tile_s(prediction, piece)
    return total


def _tile_s(prediction: StepPrediction, piece: Piece) -> float:
    """Seconds of the streams' tile of attention on the CPU; 0 if there is none."""
    settings = prediction.settings
    is_tiled = settings.kv_unified and settings.n_gpu_layers == 0 and piece.n_tokens + len(piece.others) >= TILE
    if not is_tiled or not piece.others or (settings.flash_attn_resolved or settings.flash_attn) == "off":
        return 0.0
    n_cells = sum(n_past for _, n_past in piece.others)
    tile = step_kernels.total(prediction.model, settings, prediction.ceilings, TILE, n_cells, 0)
    return tile.attention_s if tile else 0.0


@dataclass(frozen=True)
class Row:
    """One chunk (None: all at once) and number of streams of one setup: medians over runs.

    `n_steps`: steps for the prompt; `n_stalls`: gaps during them of more than twice the usual one. `longest_gap_s` is
    the median over runs, with the least and largest run. `median_gap_s` is the gap during prefill, `usual_gap_s` that
    before the prompt came. `newcomer_s` is the new request's TTFT.

    `lost` is the share of throughput lost by mixing, 1 - apart / together. Together: newcomer_s, in which the prompt
    and n_steps tokens of each stream were computed. Apart: the same work in sequence, the prompt all at once and
    n_steps steps of the streams at the usual gap. Negative if mixing was faster; None if the prompt was not also
    measured all at once.
    """

    n_prompt: int
    n_streams: int
    chunk: int | None
    n_runs: int
    n_steps: int
    n_stalls: int
    longest_gap_s: float
    longest_min_s: float
    longest_max_s: float
    median_gap_s: float
    usual_gap_s: float
    newcomer_s: float
    lost: float | None
    expected_gap_s: float | None  # predicted longest gap; None without ceilings
    expected_newcomer_s: float | None


def plan(
    worker: Worker,
    /,
    prompt_len: str | int | Sequence[int] = "4096",
    chunk: str | Sequence[int] | None = None,
    streams: str | Sequence[int] = "1,4",
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    **settings: Unpack[Keywords],
) -> Plan:
    """Prefill a long prompt in chunks of several sizes, and all at once, while other sequences decode.

        lab.stall(2048, "64,256", streams="4")

    Without `chunk`: the default sizes up to the length of the prompt. Returns a record per run. LabError for impossible
    values.
    """
    of_streams = numbers("--streams", streams, MOST_STREAMS)
    made = make_plan(worker, as_lengths(prompt_len), N_GEN, repeat, model, **for_plan(settings, kv_unified="on"))
    need_every_position(made.model)
    shortest = min(own.n_prompt for own in made.cases)
    if chunk is None:
        chunks = tuple(n for n in numbers("--chunk", DEFAULT_CHUNKS, MOST_TOKENS) if n <= shortest)
    else:
        chunks = numbers("--chunk", chunk, MOST_TOKENS)
    check_chunks(chunks, shortest, max(of_streams), made.settings.n_batch)
    sizes = [(n_streams, size) for n_streams in of_streams for size in (*chunks, None)]
    planned = with_cases(made, [case(own.n_prompt, *size) for own in made.cases for size in sizes], write)
    if planned.settings.kv_unified:
        return planned
    return dataclasses.replace(planned, warnings=(*planned.warnings, SEPARATE))


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """One row for each number of streams and chunk (all at once last), from the successful timed runs of one setup."""
    by_case: dict[tuple[int, int, Stall], list[Gaps]] = {}
    for run in (record.run for record in records):
        known = gaps.of(run)
        if run.stall is not None and known is not None and lever_figures.figures(run):
            by_case.setdefault((run.n_prompt, run.n_gen, run.stall), []).append(known)
    at_once_s = {
        (n_prompt, n_gen, lever.n_streams): statistics.median(one.newcomer_s for one in alike)
        for (n_prompt, n_gen, lever), alike in by_case.items()
        if lever.chunk is None
    }
    made = []
    for (n_prompt, n_gen, lever), alike in by_case.items():
        is_whole = prediction and alike[0].n_steps == n_mixed(n_prompt, lever.chunk or prediction.settings.n_ubatch)
        expected = expected_s(prediction, n_prompt, lever) if prediction and is_whole else None
        row = _row(n_prompt, lever, alike, at_once_s.get((n_prompt, n_gen, lever.n_streams)), expected)
        made.append((n_prompt, n_gen, lever.n_streams, lever.chunk is None, lever.chunk or 0, row))
    return [row for *_, row in sorted(made, key=lambda placed: placed[:-1])]


def _row(
    n_prompt: int, lever: Stall, alike: Sequence[Gaps], at_once_s: float | None, expected: tuple[float, float] | None
) -> Row:
    longest = [max(one.during_s) for one in alike]
    usual = statistics.median(one.usual_s for one in alike)
    newcomer = statistics.median(one.newcomer_s for one in alike)
    n_steps = alike[0].n_steps
    n_answered = 0 if lever.chunk is None else n_steps  # tokens of each stream during prefill
    return Row(
        n_prompt=n_prompt,
        n_streams=lever.n_streams,
        chunk=lever.chunk,
        n_runs=len(alike),
        n_steps=n_steps,
        n_stalls=statistics.median_low(one.n_stalls for one in alike),
        longest_gap_s=statistics.median(longest),
        longest_min_s=min(longest),
        longest_max_s=max(longest),
        median_gap_s=statistics.median(statistics.median(one.during_s) for one in alike),
        usual_gap_s=usual,
        newcomer_s=newcomer,
        lost=None if at_once_s is None else 1 - (at_once_s + n_answered * usual) / newcomer,
        expected_gap_s=expected[0] if expected else None,
        expected_newcomer_s=expected[1] if expected else None,
    )


def check(records: Sequence[Record]) -> list[str]:
    """Sentences on unexpected results.

    The prompt should take ceil(prompt / chunk) steps, and the new request's answer should be the same as when its
    prompt was prefilled all at once.
    """
    runs = [(record, record.run.stall) for record in records if gaps.of(record.run) is not None]
    alone = {_texts_of(record): newcomer_ids(record.run) for record, lever in runs if lever and lever.chunk is None}
    words, parted = [], dict[str, list[int]]()
    for record, lever in runs:
        known = gaps.of(record.run)
        if lever is None or known is None or lever.chunk is None:
            continue
        n_steps, how = n_mixed(record.run.n_prompt, lever.chunk), in_chunks(lever.chunk)
        if known.n_steps != n_steps:
            words.append(
                f"Repeat {record.run.repeat}, {how}: the prompt took {known.n_steps:,} steps instead of {n_steps:,}."
            )
        at = first_difference(newcomer_ids(record.run), alone.get(_texts_of(record), ()))
        if at is not None:
            parted.setdefault(how, []).append(at + 1)
    if parted:
        n_runs, first = sum(map(len, parted.values())), min(map(min, parted.values()))
        words.append(
            f"In {plural(n_runs, 'run')} ({', '.join(parted)}) the new request's answer differs from that without "
            f"chunks, from token {first} at the earliest: kernels for steps of other sizes round differently."
        )
    return words


def _texts_of(record: Record) -> tuple[object, ...]:
    """A key that is equal for runs with the same prompts."""
    run, settings = record.run, record.settings
    n_streams = run.stall.n_streams if run.stall else 0
    return run.n_prompt, run.n_gen, run.repeat, run.prompt_offset, n_streams, settings.seed, settings.prompt_sha256


def sentences(measured: Sequence[Row], prediction: StepPrediction | None = None) -> list[str]:
    """What rows of one setup show, in words."""
    groups = grouped(measured, lambda row: (row.n_prompt, row.n_streams))
    words = [sentence for alike in groups.values() for sentence in _of_group(alike)]
    if prediction is None:
        return words
    of_gaps = [(row.expected_gap_s, row.longest_gap_s) for row in measured]
    of_newcomer = [(row.expected_newcomer_s, row.newcomer_s) for row in measured]
    errors = [*off_by(of_gaps, "the longest gap"), *off_by(of_newcomer, "the new request's TTFT")]
    return [*words, " ".join(errors)] if errors else words


def _of_group(alike: Sequence[Row]) -> list[str]:
    """Sentences on one prompt length and number of streams."""
    last, chunked = alike[-1], [row for row in alike if row.chunk is not None]
    words = [
        f"With {plural(last.n_streams, 'stream')}, a prompt of {last.n_prompt:,} tokens {in_chunks(last.chunk)} causes "
        f"a gap of up to {seconds(last.longest_gap_s)} (usual gap {seconds(last.usual_gap_s)})."
    ]
    if last.chunk is not None or not chunked:
        return words
    parts: list[str] = []
    for row in chunked:
        lost = None if row.lost is None else round(100 * row.lost)
        change = f", {abs(lost)} % {'lower' if lost > 0 else 'higher'} throughput" if lost else ""
        gap = f"{'' if parts else 'the longest gap is '}{seconds(row.longest_gap_s)}"
        ttft = f"{digits(row.newcomer_s / last.newcomer_s)}x the TTFT of the new request"
        parts.append(f"{in_chunks(row.chunk)} {gap} ({ttft}{change})")
    return [*words, sentence("; ".join(parts))]


MOST_CHUNKS = 4


def draw(
    rows: Sequence[Row], records: Sequence[Record], prediction: StepPrediction | None, subject: str, figure: Figure
) -> None:
    """The gap before each token of the streams over the time since the new prompt came, a panel for each chunk.

    A point is a token of a run; the line is the median of each token, each step as wide as the wait. The vertical line
    is the new request's first token. Of more than 4 chunks it draws the smallest, the largest and two between.
    """
    known = [(record, run.stall, one) for record in records if (one := gaps.of(run := record.run)) and run.stall]
    chunks = sorted({lever.chunk for _, lever, _ in known}, key=lambda chunk: (chunk is None, chunk or 0))
    if len(chunks) > MOST_CHUNKS:
        chunks = [chunks[round(i * (len(chunks) - 1) / (MOST_CHUNKS - 1))] for i in range(MOST_CHUNKS)]
    lengths = sorted({record.run.n_prompt for record, _, _ in known})

    def line(record: Record, lever: Stall) -> str:
        length = f", prompt of {record.run.n_prompt:,}" if len(lengths) > 1 else ""
        return plural(lever.n_streams, "stream") + length

    of_lines = grouped(known, lambda one: (line(*one[:2]), one[1].chunk))
    parts = canvas.in_parts(sorted({name for name, chunk in of_lines if chunk in chunks}))
    figure.set_figheight(figure.get_figheight() * (0.5 + 0.5 * len(parts)))
    axes = figure.subplots(len(parts), len(chunks), sharex=True, sharey=True, squeeze=False)
    for part, own_axes in zip(parts, axes, strict=True):
        for ax, chunk in zip(own_axes, chunks, strict=True):
            for name, style in zip(part, canvas.styles(len(part)), strict=True):
                if own := of_lines.get((name, chunk)):
                    _draw_line(ax, name, [(one, record) for record, _, one in own], style)
            words = "all at once" if chunk is None else f"chunks of {chunk:,}"
            words = words if len(parts) == 1 else f"{part[0]}\n{words}"
            ax.set_title(words, fontsize=11 if len(parts) == 1 else 9)
            ax.plot([], [], color=canvas.GUIDE, ls=":", lw=1.2, label="first token of the new request")
            ax.set_yscale("log")
        own_axes[0].set_ylabel("time since the previous token (ms)")
    for ax in axes[-1]:
        ax.set_xlabel("time since the prompt came (s)")
    prompt = f"a prompt of {lengths[0]:,} tokens" if len(lengths) == 1 else "long prompts"
    repeats = plural(1 + max(record.run.repeat for record in records), "repeat")
    title = f"Gaps between tokens of the streams when {prompt} comes\n{setup_columns.where(records)} ({repeats})"
    canvas.finish(list(axes.flat), title, is_apart=True)


def _draw_line(ax: Axes, name: str, runs: Sequence[tuple[Gaps, Record]], style: dict[str, Any]) -> None:
    tokens = [(at, 1e3 * gap, record) for run, record in runs for at, gap in zip(run.ends_s, run.gaps_s, strict=True)]
    canvas.runs(ax, tokens, **style, ms=3.5, alpha=0.5)
    gaps_s, ends_s = (
        [statistics.median(token) for token in zip(*(getattr(run, which) for run, _ in runs), strict=False)]
        for which in ("gaps_s", "ends_s")
    )
    heights, colour = [1e3 * gap for gap in gaps_s], style["color"]
    ax.step([ends_s[0] - gaps_s[0], *ends_s], [heights[0], *heights], where="pre", color=colour, lw=1.6, label=name)
    ax.axvline(statistics.median(run.newcomer_s for run, _ in runs), color=colour, ls=":", lw=1.2)


def _again(runs: Sequence[Run]) -> dict[str, object]:
    levers = [run.stall for run in runs if run.stall]
    return {
        "prompt_len": listed(run.n_prompt for run in runs),
        "chunk": listed(lever.chunk for lever in levers),
        "streams": listed(lever.n_streams for lever in levers),
    }


TABLE = Table(
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
            lambda row: ranged((row.longest_gap_s, row.longest_min_s, row.longest_max_s), row.n_runs),
        ),
        ("predicted\nms", lambda row: cell(row.expected_gap_s, 1e3)),
        ("usual\ngap ms", lambda row: cell(row.usual_gap_s, 1e3)),
        ("new TTFT\ns", lambda row: cell(row.newcomer_s)),
        ("predicted\ns", lambda row: cell(row.expected_newcomer_s)),
        ("lost\n%", lambda row: "-" if row.lost is None else str(round(100 * row.lost))),
    ),
    rows=rows,
    conclude=lambda rows, records, prediction: ([*sentences(rows, prediction), *check(records)], {}),
    draw=draw,
)

EXPERIMENT = Experiment(
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
    lever=Stall,
    plan=plan,
    options=(
        Option("prompt_len", "Tokens of the new prompt.", "p"),
        Option(
            "chunk",
            "Sizes of the chunks in tokens: 64,256.  [default: those of 64,256,1024 that are no longer than the "
            "prompt]",
        ),
        Option("streams", "Numbers of sequences that decode: 1,4."),
        REPEAT,
    ),
    again=_again,
    tables=(TABLE,),
)

stall = public("stall", plan)
