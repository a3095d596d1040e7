"""A long prompt while answers are being written: how long do they stop?

Streams decode, a token of each in every step. Then a newcomer's long prompt comes. Prefilled all at once, it makes
every stream wait until it is done: one gap as long as the whole prefill. Cut into chunks that ride in the same steps as
the streams' tokens, it makes each of these steps a little longer: many short gaps. But every chunk reads all weights
once more: with small chunks the newcomer waits longer, and the work as a whole may take longer. That is the bargain of
"chunked prefill" (Agrawal et al., "Sarathi-Serve", 2024), where the chunk is chosen by the longest gap that the streams
may have.

A gap is the time between two tokens of a stream. llama.cpp computes all sequences of a step at once only where they
share one cache (`--kv-unified on`, the default here), and cuts a step of more than --ubatch tokens into parts, each of
which reads the weights: a chunk of 1,024 and 4 streams are 3 parts with the default of 512. The lab leaves --ubatch as
it is, as servers do, and predicts such steps part by part.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from lab.analysis.wording import seconds
from lab.core import gaps, lever_figures
from lab.core.gaps import Gaps
from lab.core.levers import Stall, in_chunks
from lab.core.lists import grouped, plural
from lab.core.record import Record, Run
from lab.experiments import stall_chunks
from lab.experiments.common import (
    as_lengths,
    cell,
    first_difference,
    listed,
    need_every_position,
    numbers,
    off_by,
    ranged,
)
from lab.experiments.experiment import REPEAT, Conclusions, Experiment, Keywords, Option, Table, for_plan, public
from lab.experiments.stall_chunks import N_GEN, case, check_chunks, n_mixed, newcomer_ids, write
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner.cases import Plan
from lab.runner.plan import make_plan, with_cases
from lab.why.step_prediction import StepPrediction

DEFAULT_CHUNKS = "64,256,1024"

SEPARATE = (
    "Every sequence has a cache of its own (--kv-unified off): llama.cpp cuts each mixed step in two, one token of "
    "each sequence and the rest of the chunk, and reads the weights for both."
)
MOST_STREAMS = 255
"""LLAMA_MAX_SEQ of llama.cpp is 256; the newcomer is one of them."""

MOST_TOKENS = 2**30


@dataclass(frozen=True)
class Row:
    """One chunk (None: all at once) and number of streams of one setup: medians over runs.

    `n_steps`: steps that the prompt took; `n_stalls`: gaps of more than twice the usual one meanwhile. The longest gap
    of a run also has its least and largest value; the median gap is that of the time while the prompt was prefilled,
    the usual one that of the time before. `newcomer_s` is the newcomer's TTFT.

    `lost` is the share of the throughput that mixing cost, 1 - apart / together. Together: newcomer_s, in which the
    prompt and n_steps tokens of each stream were computed. Apart: the same work done one after the other, the prompt
    all at once and n_steps steps of the streams at the usual gap. Negative where mixing was the faster way; None where
    the prompt was not also measured all at once.
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
    expected_gap_s: float | None  # the predicted longest gap; None without ceilings
    expected_newcomer_s: float | None


def plan(
    worker: Worker,
    /,
    prompt_len: str | int | Sequence[int] = "4096",
    chunk: str | Sequence[int] | None = None,
    streams: str | Sequence[int] = "1,4",
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    max_stall: str | float | None = None,
    **settings: Unpack[Keywords],
) -> Plan:
    """Prefill a long prompt in chunks of several sizes, and all at once, while other sequences decode.

        lab.stall(2048, "64,256", streams="4")

    Without `chunk`: the default ones that are no longer than the prompt. With `max_stall` (seconds, or a text such as
    "100ms") the largest chunk that keeps every gap within it is searched for, and measured; then `chunk` may be left
    out. A record a run, as of `measure`. LabError for what cannot be.
    """
    limit_s = None if max_stall is None else stall_chunks.parse_duration(max_stall)
    of_streams = numbers("--streams", streams, MOST_STREAMS)
    made = make_plan(worker, as_lengths(prompt_len), N_GEN, repeat, model, **for_plan(settings, kv_unified="on"))
    need_every_position(made.model)
    shortest = min(own.n_prompt for own in made.cases)
    chunks: tuple[int, ...] = ()
    if chunk is not None:
        chunks = numbers("--chunk", chunk, MOST_TOKENS)
    elif max_stall is None:
        chunks = tuple(n for n in numbers("--chunk", DEFAULT_CHUNKS, MOST_TOKENS) if n <= shortest)
    check_chunks(chunks, shortest, max(of_streams), made.settings.n_batch)
    sizes = [(n_streams, size) for n_streams in of_streams for size in (*chunks, None)]
    planned = with_cases(made, [case(own.n_prompt, *size, limit_s) for own in made.cases for size in sizes], write)
    if planned.settings.kv_unified:
        return planned
    return dataclasses.replace(planned, warnings=(*planned.warnings, SEPARATE))


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """One row for each number of streams and chunk, of timed runs of one setup that went well; all at once is last."""
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
        expected = stall_chunks.expected(prediction, n_prompt, lever) if prediction and is_whole else None
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
    n_answered = 0 if lever.chunk is None else n_steps  # tokens of each stream meanwhile
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
    """What runs show that should not be, or that one should know, in words; nothing where all is as planned.

    The prompt took ceil(prompt / chunk) steps; and with the same prompt the newcomer's answer is that of the run in
    which its prompt was prefilled by itself.
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
                f"Repeat {record.run.repeat}, {how}: the prompt took {known.n_steps:,} steps, not {n_steps:,}."
            )
        at = first_difference(newcomer_ids(record.run), alone.get(_texts_of(record), ()))
        if at is not None:
            parted.setdefault(how, []).append(at + 1)
    if parted:
        n_runs, first = sum(map(len, parted.values())), min(map(min, parted.values()))
        words.append(
            f"In {plural(n_runs, 'run')} ({', '.join(parted)}) the newcomer's answer is another than where "
            f"its prompt was prefilled by itself, from token {first} on at the earliest: a step of another size takes "
            "other paths through the kernels, which round differently."
        )
    return words


def _texts_of(record: Record) -> tuple[object, ...]:
    """Runs in which this is equal have the same prompts."""
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
    return [
        *words,
        *off_by(of_gaps, "Predictions of the longest gap are off"),
        *off_by(of_newcomer, "Predictions of the newcomer's TTFT are off"),
    ]


def _of_group(alike: Sequence[Row]) -> list[str]:
    """Of one prompt length and number of streams."""
    last = alike[-1]
    words = [
        f"With {plural(last.n_streams, 'stream')} a token usually comes every {seconds(last.usual_gap_s)}; a prompt of "
        f"{last.n_prompt:,} tokens {in_chunks(last.chunk)} makes {'it' if last.n_streams == 1 else 'them'} wait up to "
        f"{seconds(last.longest_gap_s)}."
    ]
    for row in alike:
        if row.chunk is None:
            continue
        stalls = plural(row.n_stalls, "stall")
        line = f"{in_chunks(row.chunk).capitalize()}: {stalls}, the longest gap {seconds(row.longest_gap_s)}; "
        line += f"the newcomer's first token comes after {seconds(row.newcomer_s)}"
        if last.chunk is None:
            line += f" ({row.newcomer_s / last.newcomer_s:.2f} times that of all at once)"
        if row.lost is not None:
            share = f"{abs(row.lost):.0%}"
            change = f"{share} {'lower' if row.lost > 0 else 'higher'} than" if share != "0%" else "as high as"
            line += f", and the throughput is {change} one after the other"
        words.append(line + ".")
    return words


def _conclude(rows: Sequence[Row], records: Sequence[Record], prediction: StepPrediction | None) -> Conclusions:
    verdicts = stall_chunks.verdicts(records, prediction)
    words = [*map(stall_chunks.sentence, verdicts), *sentences(rows, prediction), *check(records)]
    return words, {"max_stall": verdicts}


def _again(runs: Sequence[Run]) -> dict[str, object]:
    levers = [run.stall for run in runs if run.stall]
    limit_s = levers[0].limit_s
    return {
        "prompt_len": listed(run.n_prompt for run in runs),
        "chunk": listed(lever.chunk for lever in levers) if limit_s is None else None,
        "max_stall": None if limit_s is None else f"{1e3 * limit_s:g}ms",
        "streams": listed(lever.n_streams for lever in levers),
    }


TABLE = Table(
    name="stall",
    question="How long do running answers stop for a long prompt?",
    title="a long prompt beside running answers; medians over runs, below them their range",
    caption="The gap before each token of the streams, since the prompt came; a panel for each chunk. Points are "
    "tokens of all runs, the line is the run with the median longest gap.",
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
        ("newcomer\nTTFT s", lambda row: cell(row.newcomer_s)),
        ("predicted\ns", lambda row: cell(row.expected_newcomer_s)),
        ("lost\n%", lambda row: "-" if row.lost is None else str(round(100 * row.lost))),
    ),
    rows=rows,
    conclude=_conclude,
)

EXPERIMENT = Experiment(
    name="stall",
    chapter="Stalls",
    about="""Prefill a long prompt in chunks beside running answers, and time their stalls.

    \b
      lab stall --prompt-len 4096 --chunk 64,256,1024 --streams 1,4
      lab stall --prompt-len 4096 --streams 4 --max-stall 100ms

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
            "prompt; none with --max-stall]",
            "c",
        ),
        Option("streams", "Numbers of sequences that decode: 1,4.", "s"),
        Option(
            "max_stall", "Search for the largest chunk that keeps every gap below this, such as 100ms.", metavar="TIME"
        ),
        REPEAT,
    ),
    again=_again,
    tables=(TABLE,),
    kv_unified="on",
    run=stall_chunks.execute,
)

stall = public("stall", plan, run=stall_chunks.execute)
