"""The figures of claims, from the runs of a session; claims.toml names these functions.

Settings are compared block by block, the cases of an experiment within each repeat: so slow changes
of the machine cancel. A curve gives one value for each walk or repeat, because its points share an
engine and are not independent.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from lab.core import cost, phases, stats
from lab.core.figures import PREFILL as PREFILL_TIME, TPOT, labels
from lab.core.lists import plural
from lab.core.record import DECODE, PREFILL, Record
from lab.errors import LabError
from lab.features.claims.evidence import LABELS, Evidence
from lab.features.stall import GAP, in_chunks
from lab.roofline import explanation, kernel_rates
from lab.roofline.explanation import ExplainedRow
from lab.show import session_spread

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 1024  # tokens of the longest prompt of the part `lengths`
TIME_OF = {PREFILL: PREFILL_TIME, DECODE: TPOT}
APART = 1.3  # two quantizations are compared if the larger has at least this factor of bytes
ASSUMED = math.exp(2 * math.sqrt(2) * session_spread.VIRTUAL)
"""The factor by which the range of one or two values is widened: two sessions of a virtual machine
rarely exceed it."""


@dataclass(frozen=True)
class ClaimFigure:
    """A figure with its 95 % interval; a value or high end of None is infinite."""

    name: str
    value: float | None
    low: float
    high: float | None
    unit: str
    n: int  # values behind it


Figures = list[ClaimFigure | None]
Point = tuple[float, float]  # position and time


def figure(name: str, values: Iterable[float | None], unit: str = "x") -> ClaimFigure | None:
    """The centre of positive values, one for each engine, walk or block; None for no values.

    6 and more: the median with its order-statistics interval. 3 to 5: the geometric mean with
    Student's t interval on logarithms. One or two: their range, widened by the factor ASSUMED. If
    one is infinite: from the least one upwards.
    """
    positive = sorted(value for value in values if value is not None and value > 0)
    if not positive:
        return None
    n = len(positive)
    least = positive[0]
    most = positive[-1]
    if most == math.inf:
        return ClaimFigure(name, None, least, None, unit, n)
    interval = stats.median_interval(positive)
    if interval:
        median = statistics.median(positive)
        return ClaimFigure(name, median, interval.low, interval.high, unit, n)
    interval = stats.log_interval(positive)
    if interval:
        mean = statistics.geometric_mean(positive)
        return ClaimFigure(name, mean, interval.low, interval.high, unit, n)
    mean = statistics.geometric_mean(positive)
    return ClaimFigure(name, mean, least / ASSUMED, most * ASSUMED, unit, n)


def ratios(baseline: pd.DataFrame, candidate: pd.DataFrame, time: str) -> list[float]:
    """The candidate's time over the baseline's, in each block that has both."""
    return list((by_block(candidate, time) / by_block(baseline, time)).dropna())


def by_block(runs: pd.DataFrame, time: str) -> pd.Series:
    """A time in each block: the geometric mean of its runs."""
    means: pd.Series = (
        runs.dropna(subset=[time]).groupby("block")[time].agg(statistics.geometric_mean)
    )
    return means


# What any claim can use


def value(
    evidence: Evidence,
    name: str,
    part: str,
    column: str,
    case: str,
    figure_name: str,
    unit: str = "x",
) -> Figures:
    """A figure of the runs with one value of a column."""
    runs = evidence.of(part)
    return [figure(name, runs[runs[column].astype(str) == case][figure_name], unit)]


def compared(
    evidence: Evidence, part: str, column: str, baseline: str, candidate: str, time: str
) -> Figures:
    """A time of the runs with one value of a column over the time of those with another."""
    runs = evidence.of(part)
    values = runs[column].astype(str)
    time_ratios = ratios(runs[values == baseline], runs[values == candidate], time)
    label = (labels() | LABELS)[time]
    return [figure(f"{label}, {candidate} over {baseline}", time_ratios)]


# What limits the phases


def prefill_of_best(evidence: Evidence) -> Figures:
    """The share of prefill's time, after the longest prompt, that its kernels need at their
    ceilings."""
    runs = evidence.of("lengths")
    longest = runs[runs.n_prompt == LONGEST]
    row = explained_phase(evidence, longest, "prefill")
    shares = 100 * row.least_s / longest.prefill_s
    return [figure(f"share of the best (kernels) at {plural(LONGEST, 'token')}", shares, "%")]


def decode_of_best(evidence: Evidence) -> Figures:
    """The share of decode's time, after the shortest prompt, in which a plain read moves its
    bytes."""
    runs = evidence.of("lengths")
    n_prompt = runs.n_prompt.min()
    shortest = runs[runs.n_prompt == n_prompt]
    row = explained_phase(evidence, shortest, "decode")
    least_ns = row.n_bytes / kernel_rates.roof(evidence.need_ceilings()).gbps
    shares = 100 * least_ns * 1e-6 / shortest.step_ms
    return [figure(f"share of the best (reading) at {plural(n_prompt, 'token')}", shares, "%")]


def explained_phase(evidence: Evidence, runs: pd.DataFrame, phase: str) -> ExplainedRow:
    """What the ceilings say of a phase of runs of one length."""
    rows = explanation.explain(list(runs.record), evidence.need_ceilings())
    row: ExplainedRow = next(rows[rows.phase == phase].itertuples())
    return row


def half_threads(evidence: Evidence, phase: str) -> Figures:
    """The time of a phase with half the threads over that with all; of prefill in % of the
    reduction in threads."""
    runs = evidence.of("settings")
    all_threads = runs[runs.variant == "base"]
    half = runs[runs.variant == "half"]
    if all_threads.empty or half.empty:
        raise LabError(
            "Runs with half the threads are missing; a single thread cannot be halved."
        )
    settings = all_threads.record.iloc[0].settings
    halved = half.record.iloc[0].settings
    if settings.n_gpu_layers:
        raise LabError(
            "The layers are on a GPU, where the number of CPU threads hardly matters."
        )
    name = f"{phase} with {halved.n_threads} of {settings.n_threads} threads over all"
    time_ratios = ratios(all_threads, half, TIME_OF[phase].name)
    if phase == "decode":
        return [figure(name, time_ratios)]
    percent = 100 * halved.n_threads_batch / settings.n_threads_batch
    return [figure(name, [percent * ratio for ratio in time_ratios], "%")]


def of_limit(evidence: Evidence) -> Figures:
    """The share of bandwidth / bytes that decode reaches, at each length and quantization."""
    gbps = kernel_rates.roof(evidence.need_ceilings()).gbps
    figures: Figures = []
    by_case = evidence.of("lengths", "quantizations").groupby(["format", "n_prompt"])
    for (kind, n_prompt), runs in by_case:
        first = runs.record.iloc[0]
        middle = n_prompt + max(0, first.run.n_gen - 2) // 2
        settings = first.settings
        step = cost.step(first.model, 1, middle, 1, settings.type_k, settings.type_v)
        if step is None:
            raise LabError(
                f"The cost of a step of {first.model.name} cannot be derived from its header."
            )
        shares = 100 * step.n_bytes / gbps * 1e-6 / runs.tpot_ms
        figures.append(figure(f"{kind} after {plural(n_prompt, 'token')}", shares, "%"))
    return figures


# How times grow


def rate_ratio(evidence: Evidence) -> Figures:
    """The tokens per second of prefill over those of decode."""
    runs = evidence.of("lengths")
    longest = runs[runs.n_prompt == LONGEST]
    rate_ratios = longest.prefill_tps / longest.decode_tps
    return [
        figure(f"prefill rate over decode rate at {plural(LONGEST, 'token')}", rate_ratios)
    ]


def growth_over_200(evidence: Evidence) -> Figures:
    """The 200th token of an answer over the first, after the beginning and after the middle of
    walks, by the slope of each walk.

    The tokens of one short answer do not show it: llama.cpp works on the cache in a length that it
    rounds up to a multiple of 256 (`get_n_kv` in src/llama-kv-cache.cpp), so their times can lie on
    one stair.
    """
    growths: dict[float, list[float]] = {}
    for points in walks(evidence, "decode"):
        positions = [position for position, _ in points]
        rise = stats.slope(positions, [time for _, time in points])
        if rise is None:
            continue
        middle_ns = statistics.median(time for _, time in points)
        for position in (positions[0], positions[len(positions) // 2]):
            first_ns = middle_ns + rise.estimate * (position - statistics.median(positions))
            growth_of_walk = 1 + 200 * rise.estimate / first_ns if first_ns > 0 else math.inf
            growths.setdefault(position, []).append(growth_of_walk)
    figures: Figures = []
    for position, growths_there in growths.items():
        after = f"after {plural(round(position), 'token')}"
        name = f"the 200th token over the first {after}, by the slope of walks"
        figures.append(figure(name, growths_there))
    return figures


def walks(evidence: Evidence, phase: str) -> list[list[Point]]:
    """Positions and times of each walk: of decoded tokens at each stop, or of prefill steps, if
    these are timed."""
    points_of_walks: list[list[Point]] = []
    for record in evidence.of("context").record:
        if phase == "decode":
            points_of_walks.append(decode_points(record))
        elif phases.times_prefill_steps(record.settings):
            points_of_walks.append(prefill_points(record))
    return points_of_walks


def decode_points(record: Record) -> list[Point]:
    points: list[Point] = []
    for leg in phases.by_length(record.run):
        token_ns = phases.tpot_ns(leg)
        if token_ns:
            points.append((leg.n_prompt, token_ns))
    return points


def prefill_points(record: Record) -> list[Point]:
    steps = record.run.steps
    points: list[Point] = []
    columns = zip(steps.kind, steps.n_past, steps.start_ns, steps.ready_ns, strict=True)
    for kind, n_past, start_ns, ready_ns in columns:
        if kind == PREFILL:
            points.append((n_past, ready_ns - start_ns))
    return points


def growth(evidence: Evidence, phase: str) -> Figures:
    """The end of a walk over its beginning, by the median slope of each walk."""
    growths: list[float] = []
    for points in walks(evidence, phase):
        positions = [position for position, _ in points]
        times = [time for _, time in points]
        rise = stats.slope(positions, times)
        if rise is None:
            continue
        middle = statistics.median(times)
        half = rise.estimate * (positions[-1] - positions[0]) / 2
        growths.append((middle + half) / (middle - half) if middle > half else math.inf)
    return [figure(f"{phase}: end of a walk over its beginning", growths)]


def bend(evidence: Evidence) -> Figures:
    """The middle third of a walk over the mean of the outer thirds: on a straight line 1."""
    bends: list[float] = []
    for points in walks(evidence, "decode"):
        times = [time for _, time in points]
        n = len(times) // 3
        if n:
            outer = [*times[:n], *times[-n:]]
            bends.append(statistics.fmean(times[n:-n]) / statistics.fmean(outer))
    return [figure("middle third of a walk over the outer thirds", bends)]


# What optimizations gain


def largest_batch(evidence: Evidence) -> Figures:
    """TPOT of the largest batch over TPOT of one sequence."""
    runs = evidence.of("batch")
    alone = runs[runs.n_seq == 1]
    n_most = runs.n_seq.max()
    if n_most == 1:
        return []
    largest = runs[runs.n_seq == n_most]
    return [
        figure(
            f"TPOT of {n_most:g} sequences over that of 1", ratios(alone, largest, TPOT.name)
        )
    ]


def batched_tokens(evidence: Evidence) -> Figures:
    """The time of each token of a batch over TPOT of one sequence."""
    runs = evidence.of("batch")
    alone = runs[runs.n_seq == 1]
    figures: Figures = []
    for n, together in runs[runs.n_seq > 1].groupby("n_seq"):
        token_ratios = [ratio / n for ratio in ratios(alone, together, TPOT.name)]
        figures.append(figure(f"a token of {n:g} over one alone", token_ratios))
    return figures


class Format(NamedTuple):
    """A quantization, and the runs of the model in it."""

    kind: str
    n_bytes: int
    runs: pd.DataFrame


def smaller_formats(evidence: Evidence) -> Figures:
    """A token in each format over F16, and over the next larger format whose size differs
    enough."""
    runs = evidence.of("quantizations")
    formats: list[Format] = []  # the largest first
    for (n_bytes, kind), of_kind in runs[runs.n_bytes > 0].groupby(["n_bytes", "format"]):
        formats.insert(0, Format(kind, n_bytes, of_kind))
    figures: Figures = []
    for small in formats:
        for large in larger_formats(small, formats):
            name = f"a token in {small.kind} over one in {large.kind}"
            figures.append(figure(name, ratios(large.runs, small.runs, TPOT.name)))
    return figures


def larger_formats(small: Format, formats: Sequence[Format]) -> list[Format]:
    """F16 and the next larger one of the formats, the largest first, if their sizes differ
    enough."""
    larger = [large for large in formats if large.n_bytes >= APART * small.n_bytes]
    chosen = [large for large in larger if large.kind == "F16"]
    if larger and larger[-1] not in chosen:
        chosen.append(larger[-1])
    return chosen


def speed_up(evidence: Evidence) -> Figures:
    """The speed-up of the median text, in each block."""
    runs = evidence.of("speculation").dropna(subset=["text", "tpot_ms"])
    has_drafts = runs.record.map(lambda record: record.run.case["n_draft"] > 0).astype(bool)
    keys = ["block", "text"]
    plain = runs[~has_drafts].groupby(keys).tpot_ms.last()
    drafted = runs[has_drafts].groupby(keys).tpot_ms.last()
    speed_ups = (plain / drafted).dropna().groupby("block").median()
    return [figure("speed-up of the median text", speed_ups)]


def gaps(evidence: Evidence) -> Figures:
    """The longest gap of a stream over that with the next larger chunk; all at once is the
    largest."""
    runs = evidence.of("stall")
    sizes = runs.chunk.fillna(runs.n_prompt)
    by_size = [of_size for _, of_size in runs.groupby(sizes)]
    by_size.reverse()
    figures: Figures = []
    for larger, smaller in itertools.pairwise(by_size):
        name = f"{chunk_label(smaller)} over {chunk_label(larger)}"
        figures.append(figure(name, ratios(larger, smaller, GAP)))
    return figures


def chunk_label(runs: pd.DataFrame) -> str:
    return in_chunks(runs.record.iloc[0].run.case["chunk"])
