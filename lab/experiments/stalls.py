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
import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.analysis.wording import seconds
from lab.core import gaps, lever_figures
from lab.core.gaps import Gaps
from lab.core.levers import Stall, in_chunks
from lab.core.lists import grouped, plural
from lab.core.record import Record
from lab.experiments import cases, stall_chunks
from lab.experiments.stall_chunks import N_GEN, case, check_chunks, newcomer_ids, write
from lab.models import catalog
from lab.process.worker import Worker
from lab.runner import session
from lab.runner.plan import make_plan, with_cases
from lab.runner.planned import Plan
from lab.runner.progress import ShowStatus
from lab.why.step_prediction import StepPrediction

DEFAULT_PROMPT, DEFAULT_CHUNKS, DEFAULT_STREAMS = 4096, "64,256,1024", "1,4"

SEPARATE = (
    "Every sequence has a cache of its own (--kv-unified off): llama.cpp cuts each mixed step in two, one token of "
    "each sequence and the rest of the chunk, and reads the weights for both."
)
MOST_STREAMS = 255
"""LLAMA_MAX_SEQ of llama.cpp is 256; the newcomer is one of them."""


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


def stall(
    prompt_len: int | str | Sequence[int] = DEFAULT_PROMPT,
    chunk: str | Sequence[int] | None = None,
    streams: str | Sequence[int] = DEFAULT_STREAMS,
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    max_stall: str | float | None = None,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **settings: Any,
) -> list[Record]:
    """Prefill a long prompt in chunks of several sizes, and all at once, while other sequences decode.

        lab.stall(2048, "64,256", streams="4")

    With `max_stall` (seconds, or a text such as "100ms") the largest chunk that keeps every gap within it is searched
    for, and measured; `chunk` may then be left out. A record a run, as of `measure`.
    """

    def make(worker: Worker) -> Plan:
        return plan(worker, prompt_len, chunk, streams, repeat, max_stall=max_stall, model=model, **settings)

    if max_stall is None:
        return session.carry_out(make, out, watch)
    limit_s = stall_chunks.parse_duration(max_stall)
    return session.carry_out(make, out, watch, run=functools.partial(stall_chunks.execute, limit_s=limit_s))


def plan(
    worker: Worker,
    prompt_len: int | str | Sequence[int] = DEFAULT_PROMPT,
    chunk: str | Sequence[int] | None = None,
    streams: str | Sequence[int] = DEFAULT_STREAMS,
    repeat: int | None = None,
    *,
    max_stall: str | float | None = None,
    **asked: Any,
) -> Plan:
    """The plan of `stall`: for every number of streams each chunk, and the prompt all at once.

    Without `chunk`: the default ones that are no longer than the prompt, with `max_stall` none. LabError for what
    cannot be.
    """
    limit_s = None if max_stall is None else stall_chunks.parse_duration(max_stall)
    numbers = cases.numbers("--streams", streams, MOST_STREAMS)
    lengths = [prompt_len] if isinstance(prompt_len, int) else prompt_len
    asked["kv_unified"] = asked.get("kv_unified") or "on"
    made = make_plan(worker, lengths, N_GEN, repeat, **asked)
    cases.need_every_position(made.model)
    longest = min(case.n_prompt for case in made.cases)
    chunks: tuple[int, ...] = ()
    if chunk is not None:
        chunks = cases.numbers("--chunk", chunk, 2**30)
    elif max_stall is None:
        chunks = tuple(n for n in cases.numbers("--chunk", DEFAULT_CHUNKS, 2**30) if n <= longest)
    check_chunks(chunks, longest, max(numbers), made.settings.n_batch)
    sizes = [(n, of) for n in numbers for of in (*chunks, None)]
    planned = with_cases(made, [case(own.n_prompt, *size, limit_s) for own in made.cases for size in sizes], write)
    if not planned.settings.kv_unified:
        planned = dataclasses.replace(planned, warnings=(*planned.warnings, SEPARATE))
    return planned


def rows(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Row]:
    """One row for each number of streams and chunk, of timed runs of one setup that went well; all at once is last."""
    by_case: dict[tuple[int, int, Stall], list[Gaps]] = {}
    for record in records:
        run, known = record.run, gaps.of(record.run)
        if run.stall is not None and known is not None and lever_figures.figures(run):
            by_case.setdefault((run.n_prompt, run.n_gen, run.stall), []).append(known)
    at_once = {
        (n_prompt, n_gen, lever.n_streams): statistics.median(its.newcomer_s for its in alike)
        for (n_prompt, n_gen, lever), alike in by_case.items()
        if lever.chunk is None
    }
    made = []
    for key, alike in sorted(by_case.items(), key=lambda item: _place(item[0])):
        n_prompt, n_gen, lever = key
        is_whole = prediction and alike[0].n_steps == -(-n_prompt // (lever.chunk or prediction.settings.n_ubatch))
        expected = stall_chunks.expected(prediction, n_prompt, lever) if prediction and is_whole else None
        made.append(_row(n_prompt, lever, alike, at_once.get((n_prompt, n_gen, lever.n_streams)), expected))
    return made


def _place(key: tuple[int, int, Stall]) -> tuple[int, int, int, bool, int]:
    n_prompt, n_gen, lever = key
    return n_prompt, n_gen, lever.n_streams, lever.chunk is None, lever.chunk or 0


def _row(
    n_prompt: int, lever: Stall, alike: Sequence[Gaps], at_once_s: float | None, expected: tuple[float, float] | None
) -> Row:
    longest = [max(its.during_s) for its in alike]
    usual = statistics.median(its.usual_s for its in alike)
    newcomer = statistics.median(its.newcomer_s for its in alike)
    n_steps = alike[0].n_steps
    n_answered = 0 if lever.chunk is None else n_steps  # tokens of each stream meanwhile
    return Row(
        n_prompt=n_prompt,
        n_streams=lever.n_streams,
        chunk=lever.chunk,
        n_runs=len(alike),
        n_steps=n_steps,
        n_stalls=statistics.median_low(its.n_stalls for its in alike),
        longest_gap_s=statistics.median(longest),
        longest_min_s=min(longest),
        longest_max_s=max(longest),
        median_gap_s=statistics.median(statistics.median(its.during_s) for its in alike),
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
    words, alone, parted = [], {}, dict[str, list[int]]()
    for record in records:
        if record.run.stall and record.run.stall.chunk is None and gaps.of(record.run) is not None:
            alone[_texts_of(record)] = newcomer_ids(record.run)
    for record in records:
        lever, known = record.run.stall, gaps.of(record.run)
        if lever is None or known is None or lever.chunk is None:
            continue
        n_steps = -(-record.run.n_prompt // lever.chunk)
        if known.n_steps != n_steps:
            name = f"Repeat {record.run.repeat}, {in_chunks(lever.chunk)}"
            words.append(f"{name}: the prompt took {known.n_steps:,} steps, not {n_steps:,}.")
        ids, ids_alone = newcomer_ids(record.run), alone.get(_texts_of(record))
        if ids_alone and ids != ids_alone:
            n = next((i for i, pair in enumerate(zip(ids, ids_alone, strict=False)) if pair[0] != pair[1]), len(ids))
            parted.setdefault(in_chunks(lever.chunk), []).append(n + 1)
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
    off = {
        "the longest gap": cases.off_by((row.expected_gap_s, row.longest_gap_s) for row in measured),
        "the newcomer's TTFT": cases.off_by((row.expected_newcomer_s, row.newcomer_s) for row in measured),
    }
    return words + [f"Predictions of {name} are off {by}." for name, by in off.items() if prediction and by]


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
