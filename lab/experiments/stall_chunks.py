"""A long prompt in chunks beside running answers: its script, its predicted steps, the largest chunk within a limit.

The new request ("newcomer" in the code) is sequence 0, the streams are 1, 2, ... llama.cpp cuts a step of more than
n_ubatch tokens (llama-batch.cpp, 0c1e570) and runs its parts one after the other. If all sequences share one cache
(kv_unified), it cuts every n_ubatch tokens (split_simple), the new request's tokens first. With separate caches a part
has equally many tokens of each sequence (split_equal): first one of each, then the rest of the new request's.

In a shared cache every token's attention is computed over the cells of all sequences, and masked. The CPU's kernel for
64 and more tokens skips what is masked for 64 of them at once (a tile; ggml-cpu/ops.cpp, flash_attn_ext_tiled), so the
streams' few tokens cost a whole tile over the caches of all streams.

The search: a gap grows about linearly with the chunk, from the usual gap without any. The first chunk is predicted from
the ceilings, or from the run with the prompt all at once. Each measured chunk then decides the next one, between the
largest that kept the limit and the smallest that did not. The reported chunk was measured with all repeats, and every
gap of every run was within the limit.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.analysis.wording import seconds
from lab.core import cost, gaps, phases, script
from lab.core.gaps import Gaps
from lab.core.levers import Stall, in_chunks
from lab.core.lists import grouped, plural
from lab.core.record import MIXED, PREFILL, Record, Run, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.process.worker import Worker
from lab.runner import repeatability, session
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import with_cases
from lab.runner.progress import ShowStatus
from lab.why import probing, step_kernels, step_prediction
from lab.why.step_prediction import StepPrediction

N_CONTEXT, N_BEFORE, N_GEN = 128, 32, 9
"""Tokens of each stream's own prompt, steps of the streams alone, and tokens of the new request's answer."""


def case(n_prompt: int, n_streams: int, chunk: int | None, limit_s: float | None = None) -> Case:
    """n_streams streams, and a prompt of n_prompt tokens in chunks or (None) all at once; `limit_s` of --max-stall."""
    n_stream = N_CONTEXT + N_BEFORE + n_mixed(n_prompt, chunk) + N_GEN
    return Case(
        n_prompt,
        N_GEN,
        lever=Stall(n_streams, chunk, N_CONTEXT, N_BEFORE, limit_s),
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
    most = max(most, 1)  # of the search, or the new request's own tokens
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


def expected(prediction: StepPrediction, n_prompt: int, lever: Stall) -> tuple[float, float] | None:
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


def longest_gap(prediction: StepPrediction, n_prompt: int, lever: Stall) -> float | None:
    """The predicted time of the last full chunk, whose positions are most: the longest gap in chunks."""
    assert lever.chunk is not None
    last_full = max(0, n_prompt // lever.chunk - 1)
    return _seconds(prediction, mixed(lever, n_prompt, last_full, prediction.settings))


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


MAX_TRIES = 5
"""Most chunks that the search measures, for each prompt length and number of streams."""

AIM = 0.95
"""The share of the limit that the next chunk aims at, because the longest of many gaps counts."""

CLOSE = 0.1
"""The search ends if the next chunk would be larger by less than this share."""

Predict = Callable[[Record], StepPrediction | None]
"""Gives the prediction for the setup of a record."""


@dataclass(frozen=True)
class Tried:
    """A measured chunk (None: all at once), and the longest gap of all its runs."""

    chunk: int | None
    longest_s: float
    n_runs: int


@dataclass(frozen=True)
class Verdict:
    """The result of the search.

    `kept`: the largest chunk within the limit; None if there is none. `broken`: the next larger chunk, or the smallest
    if none kept the limit; None if all did. `expected`: the predicted chunk. `usual_s`: the gap without any prompt.
    """

    n_prompt: int
    n_streams: int
    limit_s: float
    kept: Tried | None
    broken: Tried | None
    expected: int | None
    usual_s: float


def parse_duration(asked: str | float) -> float:
    """Seconds of `100ms`, `0.5s` or a number of seconds. LabError for anything else, and for 0."""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(us|ms|s)\s*", asked) if isinstance(asked, str) else None
    value = float(match[1]) * units[match[2]] if match else asked
    if isinstance(value, str) or not 0 < value < 1e9:
        raise LabError(f"--max-stall {asked} must be a time above 0 with its unit.", "For example: 100ms or 1.5s")
    return float(value)


def execute(
    plan: Plan, worker: Worker, path: Path, watch: ShowStatus, stream: bool = False, predict: Predict | None = None
) -> Iterator[Record]:
    """The plan's runs; with a limit also those of the search, for each prompt length and number of streams.

    Without `predict` it predicts from the ceilings and runs in the results folder.
    """
    records = []
    for record in session.execute(plan, worker, path, watch, stream):
        records.append(record)
        yield record
    limit_s = _lever(plan.cases[0]).limit_s
    if limit_s is None or not records:
        return
    plan = dataclasses.replace(plan, model=records[-1].model)  # the file's sum is made once
    predict = predict or _predictor(path.parent)
    for n_prompt, n_streams in dict.fromkeys((case.n_prompt, _lever(case).n_streams) for case in plan.cases):
        while True:
            own = [record for record in records if _belongs(record, n_prompt, n_streams)]
            chunk = propose(plan, own, limit_s, predict)
            if chunk is None:
                break
            try:
                narrowed = with_cases(plan, [case(n_prompt, n_streams, chunk, limit_s)], write)
            except LabError:  # a small chunk may need more steps than a run can have: the others go on
                break
            worker.restart()
            n_starts = 1 + max(record.run.engine or 0 for record in records)
            for record in session.execute(narrowed, worker, path, watch, n_starts=n_starts):
                records.append(record)
                yield record


def _predictor(folder: Path) -> Predict:
    """Predicts from the ceilings and runs in a folder, read with the first prediction."""

    def predict(record: Record) -> StepPrediction | None:
        known, others = probing.kept(folder, lambda text: None), repeatability.nearby({folder}).records
        return step_prediction.prediction_for(record, known, others)

    return predict


def propose(plan: Plan, records: Sequence[Record], limit_s: float, predict: Predict) -> int | None:
    """The chunk to measure next, from all records of one prompt length and number of streams; None ends the search."""
    timed = [record for record in records if _is_timed(record)]
    measured = [one for one in tried(timed) if one.n_runs >= plan.n_repeat]
    at_once = [record for record in timed if _lever(record.run).chunk is None]
    if not at_once or not measured or any(one.chunk is None and one.longest_s <= limit_s for one in measured):
        return None
    planned = {_lever(case).chunk for case in plan.cases}
    searched = {_lever(record.run).chunk for record in records} - planned
    if len(searched) >= MAX_TRIES or not searched <= {one.chunk for one in measured}:
        return None  # enough, or one failed: its records say why
    usual_s = _usual_s(timed)
    if usual_s > limit_s:
        return None  # gaps are longer even without a prompt
    most = _largest_chunk(at_once[0])
    if any(one.chunk is not None for one in measured):
        return next_chunk(measured, usual_s, limit_s, most)
    return first_chunk(at_once, usual_s, limit_s, predict(at_once[0]), most)


def first_chunk(
    at_once: Sequence[Record], usual_s: float, limit_s: float, prediction: StepPrediction | None, most: int
) -> int:
    """The first chunk: as predicted, else from the time per token of the prompt's last full step all at once."""
    run = at_once[0].run
    chunk = expected_chunk(prediction, run.n_prompt, _lever(run), AIM * limit_s, most)
    if chunk is not None:
        return max(1, chunk)
    per_token = statistics.median(_last_full_step_s(record) for record in at_once)
    return max(1, min(most, int((AIM * limit_s - usual_s) / per_token)))


def expected_chunk(
    prediction: StepPrediction | None, n_prompt: int, lever: Stall, limit_s: float, most: int
) -> int | None:
    """The largest chunk whose predicted longest gap is within the limit, 0 if none is; None without prediction."""
    if prediction is None:
        return None
    low, high = 0, most + 1  # the largest that is within, and one that is not
    while high - low > 1:
        middle = (low + high) // 2
        gap = longest_gap(prediction, n_prompt, dataclasses.replace(lever, chunk=middle))
        if gap is None:
            return None
        low, high = (middle, high) if gap <= limit_s else (low, middle)
    return low


def next_chunk(measured: Sequence[Tried], usual_s: float, limit_s: float, most: int) -> int | None:
    """The chunk to measure after these; None ends the search. `usual_s` is the gap without any chunk."""
    points = sorted((one.chunk, one.longest_s) for one in measured if one.chunk is not None)
    none = (0, usual_s)
    kept = max((point for point in points if point[1] <= limit_s), default=none)
    broken = min((point for point in points if point[1] > limit_s and point[0] > kept[0]), default=None)
    n_kept, n_most = kept[0], most if broken is None else broken[0] - 1
    if n_kept >= n_most or (broken and broken[0] - n_kept <= CLOSE * broken[0]):
        return None
    (x0, y0), (x1, y1) = (none, kept) if broken is None else (kept, broken)
    slope = (y1 - y0) / (x1 - x0)
    aim = n_kept + int((AIM * limit_s - kept[1]) / slope) if slope > 0 else most
    if n_kept and aim <= (1 + CLOSE) * n_kept:
        return None
    if not n_kept and len(points) > 1:  # the line was wrong once: go down quickly
        aim = min(aim, points[0][0] // 2)
    return max(n_kept + 1, min(aim, n_most))


def tried(records: Sequence[Record]) -> list[Tried]:
    """The results of each chunk for one prompt length and number of streams, in ascending order."""
    # None is a chunk too, so the key is a tuple
    by_chunk = grouped(filter(_is_timed, records), lambda record: (_lever(record.run).chunk,))
    of_all = [Tried(chunk, max(map(_longest_s, own)), len(own)) for (chunk,), own in by_chunk.items()]
    return sorted(of_all, key=lambda one: (one.chunk is None, one.chunk or 0))


def verdicts(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Verdict]:
    """The verdicts on the limit, for each prompt length and number of streams of one setup; none without a limit.

    Only chunks with as many runs as the prompt all at once count.
    """
    timed = [record for record in records if _is_timed(record) and _lever(record.run).limit_s is not None]
    groups = grouped(timed, lambda record: (record.run.n_prompt, dataclasses.replace(_lever(record.run), chunk=None)))
    return [_verdict(own, lever, prediction) for (_, lever), own in groups.items()]


def _verdict(records: Sequence[Record], lever: Stall, prediction: StepPrediction | None) -> Verdict:
    """The verdict of runs that differ only in the chunk."""
    n_prompt, limit_s = records[0].run.n_prompt, lever.limit_s or 0.0
    of_chunks = tried(records)
    n_repeat = max((one.n_runs for one in of_chunks if one.chunk is None), default=1)
    measured = [one for one in of_chunks if one.n_runs >= n_repeat]
    n_kept = max((i for i, one in enumerate(measured, 1) if one.longest_s <= limit_s), default=0)
    return Verdict(
        n_prompt=n_prompt,
        n_streams=lever.n_streams,
        limit_s=limit_s,
        kept=measured[n_kept - 1] if n_kept else None,
        broken=measured[n_kept] if n_kept < len(measured) else None,
        expected=expected_chunk(prediction, n_prompt, lever, limit_s, _largest_chunk(records[0])),
        usual_s=_usual_s(records),
    )


def sentence(result: Verdict) -> str:
    """The result of the search in a sentence."""
    streams = plural(result.n_streams, "stream")
    what = f"With a prompt of {result.n_prompt:,} tokens and {streams}"
    limit, kept, broken = seconds(result.limit_s), result.kept, result.broken
    expected = f" Predicted chunk: {result.expected:,}." if result.expected is not None else ""
    if result.usual_s > result.limit_s:
        usual = seconds(result.usual_s)
        return f"No chunk meets {limit}: with {streams} the gap is {usual} even without a new prompt."
    if kept is not None and kept.chunk is None:
        return f"{what}, no chunks are needed for {limit}: the longest gap all at once is {seconds(kept.longest_s)}."
    if kept is not None:
        next_larger = f"; {in_chunks(broken.chunk)} it was {seconds(broken.longest_s)}" if broken else ""
        return (
            f"{what}, chunks of {kept.chunk:,} keep every gap within {limit}: the longest in "
            f"{plural(kept.n_runs, 'run')} was {seconds(kept.longest_s)}{next_larger}.{expected}"
        )
    if broken is not None and broken.chunk == 1:
        return f"{what}, gaps exceed {limit} even with a chunk of 1: up to {seconds(broken.longest_s)}."
    longest = f" The longest gap {in_chunks(broken.chunk)} was {seconds(broken.longest_s)}." if broken else ""
    return f"{what}, no measured chunk keeps every gap within {limit}.{longest}{expected}"


def _lever(of: Case | Run) -> Stall:
    assert isinstance(of.lever, Stall)
    return of.lever


def _gaps(record: Record) -> Gaps:
    known = gaps.of(record.run)
    assert known is not None
    return known


def _longest_s(record: Record) -> float:
    return max(_gaps(record).during_s)


def _usual_s(records: Sequence[Record]) -> float:
    return statistics.median(_gaps(record).usual_s for record in records)


def _largest_chunk(record: Record) -> int:
    """The whole prompt, or what fits into a batch beside a token of each stream."""
    return min(record.run.n_prompt, record.settings.n_batch - _lever(record.run).n_streams)


def _is_timed(record: Record) -> bool:
    return record.run.is_timed and gaps.of(record.run) is not None


def _belongs(record: Record, n_prompt: int, n_streams: int) -> bool:
    lever = record.run.stall
    return lever is not None and (record.run.n_prompt, lever.n_streams) == (n_prompt, n_streams)


def _last_full_step_s(record: Record) -> float:
    """Seconds per token of the last full step of the new prompt; of the whole prompt if single steps are not timed."""
    steps = record.run.steps
    rows = list(zip(steps.kind, steps.n_tokens, steps.start_ns, steps.ready_ns, strict=True))
    prefill = [(n_tokens, ready - start) for kind, n_tokens, start, ready in rows if kind == PREFILL]
    if not phases.times_prefill_steps(record.settings):
        return sum(ns for _, ns in prefill) / sum(n_tokens for n_tokens, _ in prefill) / 1e9
    widest = max(n_tokens for n_tokens, _ in prefill)
    return next(ns / n_tokens for n_tokens, ns in reversed(prefill) if n_tokens == widest) / 1e9
