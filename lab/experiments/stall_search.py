"""The largest chunk that keeps every gap of the streams within a limit: aimed at by a law, then measured.

A gap grows with the chunk about as a straight line, from the usual gap at none. Where to begin is predicted from the
ceilings, or read off the run in which the prompt came all at once. Then each measured chunk says where the next one is
to be: between the largest that kept the limit and the smallest that did not. What is named has been measured with all
repeats, and every gap of every run was within the limit.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.analysis.wording import seconds
from lab.core import gaps, phases
from lab.core.gaps import Gaps
from lab.core.levers import Stall
from lab.core.record import OK, PREFILL, Record, Run
from lab.errors import LabError
from lab.experiments import stall_prediction, stall_script
from lab.process.worker import Worker
from lab.runner import session
from lab.runner.case import Case
from lab.runner.plan import with_cases
from lab.runner.planned import Plan
from lab.runner.progress import ShowStatus
from lab.why.step_prediction import StepPrediction

MAX_TRIES = 5
"""Chunks that are measured in search of one, for each prompt length and number of streams."""

AIM = 0.95
"""Of the limit: what the next chunk is meant to take, since the longest of many gaps counts."""

CLOSE = 0.1
"""A chunk is not made larger by less than this share."""

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
    """What the search ended with. `kept`: the largest chunk that kept the limit; `broken`: the next larger, or (where
    none kept it) the smallest, that did not. None where there is none. `expected`: the chunk that was predicted.
    `usual_s`: the gap without any prompt."""

    n_prompt: int
    n_streams: int
    limit_s: float
    kept: Tried | None
    broken: Tried | None
    expected: int | None
    usual_s: float


def parse_duration(asked: str | float) -> float:
    """Seconds of `100ms`, `0.5s` or a number of seconds. LabError for anything else, and for nothing."""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*(us|ms|s)\s*", asked) if isinstance(asked, str) else None
    value = float(match[1]) * units[match[2]] if match else asked
    if isinstance(value, str) or not 0 < value < 1e9:
        raise LabError(f"--max-stall {asked} is not a time.", "Give a number and its unit: 100ms, or 1.5s.")
    return float(value)


def execute(
    plan: Plan,
    worker: Worker,
    path: Path,
    watch: ShowStatus,
    stream: bool = False,
    *,
    limit_s: float,
    predict: Predict = lambda record: None,
) -> Iterator[Record]:
    """The plan's runs, then those of the search, for each prompt length and number of streams of the plan."""
    records = []
    for record in session.execute(plan, worker, path, watch, stream):
        records.append(record)
        yield record
    if records:  # the file's sum is made once
        plan = dataclasses.replace(plan, model=records[-1].model)
    groups = dict.fromkeys((case.n_prompt, _lever(case).n_streams) for case in plan.cases)
    for n_prompt, n_streams in groups:
        while True:
            own = [record for record in records if _belongs(record, n_prompt, n_streams)]
            chunk = propose(plan, own, limit_s, predict)
            if chunk is None:
                break
            try:
                narrowed = with_cases(
                    plan, [stall_script.case(n_prompt, n_streams, chunk, limit_s)], stall_script.write
                )
            except LabError:  # so small a chunk needs more steps than a run can have: the others go on
                break
            worker.restart()
            n_starts = 1 + max(record.run.engine or 0 for record in records)
            for record in session.execute(narrowed, worker, path, watch, n_starts=n_starts):
                records.append(record)
                yield record


def propose(plan: Plan, records: Sequence[Record], limit_s: float, predict: Predict) -> int | None:
    """The chunk to measure next, from all records of one prompt length and number of streams; None: no further one."""
    timed = [record for record in records if _is_timed(record)]
    measured = [one for one in tried(timed) if one.n_runs >= plan.n_repeat]
    at_once = [record for record in timed if _lever(record.run).chunk is None]
    if not at_once or not measured or any(one.chunk is None and one.longest_s <= limit_s for one in measured):
        return None
    planned = {_lever(case).chunk for case in plan.cases}
    searched = {_lever(record.run).chunk for record in records} - planned
    if len(searched) >= MAX_TRIES or not searched <= {one.chunk for one in measured}:
        return None  # enough, or one could not be measured: its records say why
    most = min(at_once[0].run.n_prompt, plan.settings.n_batch - _lever(at_once[0].run).n_streams)
    usual_s = statistics.median(known.usual_s for known in map(_gaps, timed))
    if usual_s > limit_s:
        return None  # without any prompt the gaps are longer
    if {one.chunk for one in measured} == {None}:
        return first_chunk(at_once, usual_s, limit_s, predict(at_once[0]), most)
    return next_chunk(measured, usual_s, limit_s, most)


def first_chunk(
    at_once: Sequence[Record], usual_s: float, limit_s: float, prediction: StepPrediction | None, most: int
) -> int:
    """Where to begin: what is predicted, else what the last full step of the prompt all at once took a token."""
    run = at_once[0].run
    if prediction is not None:
        expected = expected_chunk(prediction, run.n_prompt, _lever(run), AIM * limit_s, most)
        if expected is not None:
            return max(1, expected)
    per_token = statistics.median(_last_full_step_s(record) for record in at_once)
    return max(1, min(most, int((AIM * limit_s - usual_s) / per_token)))


def expected_chunk(prediction: StepPrediction, n_prompt: int, lever: Stall, limit_s: float, most: int) -> int | None:
    """The largest chunk whose predicted longest gap is within the limit, 0 where none is; None without prediction."""
    low, high = 0, most + 1  # the largest that is within, and one that is not
    while high - low > 1:
        middle = (low + high) // 2
        gap = stall_prediction.longest_gap(prediction, n_prompt, dataclasses.replace(lever, chunk=middle))
        if gap is None:
            return None
        low, high = (middle, high) if gap <= limit_s else (low, middle)
    return low


def next_chunk(measured: Sequence[Tried], usual_s: float, limit_s: float, most: int) -> int | None:
    """The chunk to measure after these; None where the search is over. `usual_s` is the gap without any chunk."""
    points = sorted((one.chunk, one.longest_s) for one in measured if one.chunk is not None)
    low = max((point for point in points if point[1] <= limit_s), default=(0, usual_s))
    high = min((point for point in points if point[1] > limit_s and point[0] > low[0]), default=None)
    if low[0] >= most or (high and high[0] - low[0] <= max(1, CLOSE * high[0])):
        return None
    slope = (high[1] - low[1]) / (high[0] - low[0]) if high else (low[1] - usual_s) / low[0]
    aim = low[0] + int((AIM * limit_s - low[1]) / slope) if slope > 0 else most
    if low[0] and aim <= (1 + CLOSE) * low[0]:
        return None
    if not low[0] and len(points) > 1:
        aim = min(aim, points[0][0] // 2)
    return max(low[0] + 1, min(aim, high[0] - 1 if high else most))


def tried(records: Sequence[Record]) -> list[Tried]:
    """What runs of one prompt length and number of streams showed of each chunk, in ascending order."""
    longest: dict[int | None, list[float]] = {}
    for record in records:
        if _is_timed(record):
            longest.setdefault(_lever(record.run).chunk, []).append(max(_gaps(record).during_s))
    of_all = [Tried(chunk, max(values), len(values)) for chunk, values in longest.items()]
    return sorted(of_all, key=lambda one: (one.chunk is None, one.chunk or 0))


def verdicts(records: Sequence[Record], prediction: StepPrediction | None = None) -> list[Verdict]:
    """What runs of one setup say about their limit, for each prompt length and number of streams; none without one.

    A chunk counts that has as many runs as the prompt all at once.
    """
    timed = [record for record in records if _is_timed(record)]
    results = []
    groups = dict.fromkeys((r.run.n_prompt, _lever(r.run).n_streams, _lever(r.run).limit_s) for r in timed)
    for n_prompt, n_streams, limit_s in groups:
        own = [r for r in timed if _belongs(r, n_prompt, n_streams) and _lever(r.run).limit_s == limit_s]
        n_repeat = max((one.n_runs for one in tried(own) if one.chunk is None), default=1)
        measured = [one for one in tried(own) if one.n_runs >= n_repeat]
        if limit_s is None:
            continue
        n_kept = max((i + 1 for i, one in enumerate(measured) if one.longest_s <= limit_s), default=0)
        most = min(n_prompt, own[0].settings.n_batch - n_streams)
        results.append(
            Verdict(
                n_prompt,
                n_streams,
                limit_s,
                measured[n_kept - 1] if n_kept else None,
                measured[n_kept] if n_kept < len(measured) else None,
                expected_chunk(prediction, n_prompt, _lever(own[0].run), limit_s, most) if prediction else None,
                statistics.median(known.usual_s for known in map(_gaps, own)),
            )
        )
    return results


def sentence(result: Verdict) -> str:
    """What the search ended with, in words."""
    streams = f"{result.n_streams} stream{'s' * (result.n_streams > 1)}"
    what = f"a prompt of {result.n_prompt:,} tokens and {streams}"
    limit, kept, broken = seconds(result.limit_s), result.kept, result.broken
    expected = f" Predicted: {result.expected:,}." if result.expected is not None else ""
    if result.usual_s > result.limit_s:
        return (
            f"With {streams} a token comes every {seconds(result.usual_s)} without any prompt: no chunk keeps {limit}."
        )
    if kept is not None and kept.chunk is None:
        return f"With {what} no gap is longer than {limit} even all at once (longest {seconds(kept.longest_s)})."
    if kept is not None:
        next_larger = f"; {_how(broken)} it was {seconds(broken.longest_s)}" if broken else ""
        return (
            f"With {what}, chunks of {kept.chunk:,} keep every gap within {limit}: the longest of {kept.n_runs} runs "
            f"was {seconds(kept.longest_s)}{next_larger}.{expected}"
        )
    if broken is not None and broken.chunk == 1:
        return f"With {what} even a chunk of 1 makes gaps longer than {limit}: up to {seconds(broken.longest_s)}."
    smallest = f" The smallest, {_how(broken)}, made one of {seconds(broken.longest_s)}." if broken else ""
    return f"With {what} no chunk that was measured keeps every gap within {limit}.{smallest}{expected}"


def _how(one: Tried) -> str:
    return "all at once" if one.chunk is None else f"in chunks of {one.chunk:,}"


def _lever(of: Case | Run) -> Stall:
    lever = of.lever
    assert isinstance(lever, Stall)
    return lever


def _gaps(record: Record) -> Gaps:
    known = gaps.of(record.run)
    assert known is not None
    return known


def _is_timed(record: Record) -> bool:
    return record.run.status == OK and not record.run.warmup and gaps.of(record.run) is not None


def _belongs(record: Record, n_prompt: int, n_streams: int) -> bool:
    lever = record.run.stall
    return lever is not None and (record.run.n_prompt, lever.n_streams) == (n_prompt, n_streams)


def _last_full_step_s(record: Record) -> float:
    """Seconds a token of the last full step of the newcomer's prompt; of all, where single ones are not timed."""
    steps = record.run.steps
    rows = list(zip(steps.kind, steps.n_tokens, steps.start_ns, steps.ready_ns, strict=True))
    prefill = [(n_tokens, ready - start) for kind, n_tokens, start, ready in rows if kind == PREFILL]
    if not phases.times_prefill_steps(record.settings):
        return sum(ns for _, ns in prefill) / sum(n_tokens for n_tokens, _ in prefill) / 1e9
    widest = max(n_tokens for n_tokens, _ in prefill)
    return next(ns / n_tokens for n_tokens, ns in reversed(prefill) if n_tokens == widest) / 1e9
