"""Why steps become slower through the context: the law of attention, a slow kernel, or a cliff.

A longer context adds work to a step: decode reads more of the KV cache, and prefill multiplies each
token with more positions. The added work over the added time is a rate. It is compared with the
rate at which the same session handles the weights, which needs no knowledge of the machine:

    slope    the rates are of one size: the added work explains the added time
    kernel   attention is much slower than memory and arithmetic have just shown to be
    unknown  between these, or the runs are too few, too different, or not long enough

Runs of one length can differ by 40 % on a shared machine, and a slow kernel is slow by a factor: so
the median decides, unless the runs that differ least would decide the opposite.

Shares of the rate of the weights, by which this is judged, with what honest sessions show: decode
0.2 to 0.7 for bytes of the cache and 0.29 to 2 if they count once for each query head (kernels of
CPUs read them so), prefill 0.36 to 1.4. Flash attention for heads of 64 on a CPU with AVX512-FP16,
which handles each number alone: 0.04 to 0.07 and 0.13 to 0.2. Of 53 decodes that others published
at two depths 51 show 0.19 to 4. Of the other two, builds with another kernel are 5 and 21 times as
fast on the same card.
"""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lab.core import breaks, cost
from lab.core.breaks import RunCurve
from lab.core.cost import StepCost
from lab.core.lists import grouped
from lab.core.phases import times_prefill_steps
from lab.core.record import DECODE, PREFILL, Record

SLOPE = "slope"
KERNEL = "kernel"
UNKNOWN = "unknown"

SLOW_BYTES = 1 / 8
SLOW_READS = 0.3
"""Decode has a slow kernel below both shares: of bytes, and of bytes for each query head."""
PLAUSIBLE_BYTES = 1 / 6
PLAUSIBLE_READS = 0.5
"""The added bytes explain the added time from either share on."""
SLOW_FLOPS = 1 / 12
PLAUSIBLE_FLOPS = 1 / 6
"""The same limits for prefill: the FLOP/s of attention over those of the weights."""

FEWEST_RUNS = 2  # at each end, whose ranges must not overlap
END_SHARE = 0.05  # of all positions, which count as one end of them
LEAST_BASE = 0.2  # share of the shortest step that must be left for the weights
N_BLOCK = 64  # decode steps of one run that make a point: their median time
FEWEST_STEPS = 4  # of a point

FEW = "it needs two undisturbed runs of each length"
OVERLAP = "the runs differ as much as the lengths do"
NO_BASE = "no run shows the weights alone, after a short prompt"
BETWEEN = "too slow for memory traffic, too fast for a broken kernel"


class Place(NamedTuple):
    """Steps of a run: their median position and time."""

    n_past: float
    seconds: float


@dataclass(frozen=True)
class Growth:
    """What attention costs a step. Rates are bytes/s in decode and FLOP/s in prefill.

    `seconds_per_1000`: what 1,000 more positions add to a token. `why`: of UNKNOWN, the reason.
    `rate_of_reads`: of decode, with the bytes in F16, once for each query head.
    """

    phase: str
    verdict: str
    why: str = ""
    seconds_per_1000: float = 0.0
    rate: float = 0.0
    weight_rate: float = 0.0
    rate_of_reads: float = 0.0


@dataclass(frozen=True)
class Cliff:
    """From `n_past` positions on (somewhere from `low` to `high`) steps follow another line.

    `factor`: what each position costs, over what it cost before; with `is_jump` the time of a step.
    Rates as in Growth, before and after.
    """

    phase: str
    n_past: float
    low: float
    high: float
    factor: float
    is_jump: bool
    rate_before: float | None
    rate_after: float | None


@dataclass(frozen=True)
class Ends:
    """The steps at the first and at the last positions: of each run there its median place."""

    shorts: list[Place]
    longs: list[Place]

    @property
    def short(self) -> Place:
        return _median_place(self.shorts)

    @property
    def long(self) -> Place:
        return _median_place(self.longs)

    @property
    def added_s(self) -> tuple[float, float, float]:
        """By what the long steps take longer: at least, in the median, at most."""
        short_s = [place.seconds for place in self.shorts]
        long_s = [place.seconds for place in self.longs]
        median_s = self.long.seconds - self.short.seconds
        return min(long_s) - max(short_s), median_s, max(long_s) - min(short_s)


def growth(records: Sequence[Record], phase: str) -> Growth | None:
    """Of runs of one setup. None if attention cannot be counted, or no two positions were timed."""
    n_tokens = _step_size(records, phase)
    ends = _ends([_places(record, phase, n_tokens) for record in records])
    if ends is None:
        return None
    short_cost = _cost(records[0], phase, n_tokens, ends.short.n_past)
    long_cost = _cost(records[0], phase, n_tokens, ends.long.n_past)
    if short_cost is None or long_cost is None:
        return None
    if min(len(ends.shorts), len(ends.longs)) < FEWEST_RUNS:
        return Growth(phase, UNKNOWN, FEW)
    least_s, added_s, most_s = ends.added_s
    if least_s <= 0:
        return Growth(phase, UNKNOWN, OVERLAP)
    short_work = _work(phase, short_cost)
    work = _work(phase, long_cost) - short_work
    if work <= 0:  # a window hides the further positions
        return None
    base_s = ends.short.seconds - short_work / work * added_s
    if base_s < LEAST_BASE * ends.short.seconds:
        return Growth(phase, UNKNOWN, NO_BASE)
    weights = short_cost.weight_bytes if phase == DECODE else short_cost.layer_flops
    weight_rate = weights / base_s
    works = _works(records[0], ends) if phase == DECODE else (work, work)
    by_time = [
        verdict(phase, *(work / seconds / weight_rate for work in works))
        for seconds in (least_s, added_s, most_s)
    ]
    per_1000 = 1e3 * added_s / n_tokens / (ends.long.n_past - ends.short.n_past)
    rates = (work / added_s, weight_rate, works[1] / added_s)
    return Growth(phase, *_together(*by_time), per_1000, *rates)


def _together(at_best: str, at_median: str, at_worst: str) -> tuple[str, str]:
    """The verdict, and why there is none: noise could have made the opposite of it."""
    if at_median == KERNEL and at_best != SLOPE:
        return KERNEL, ""
    if at_median == SLOPE and at_worst != KERNEL:
        return SLOPE, ""
    return UNKNOWN, BETWEEN


def verdict(phase: str, share: float, share_of_reads: float) -> str:
    """What shares of the rate of the weights mean; those of bytes and of reads differ in decode."""
    if phase == PREFILL:
        if share <= SLOW_FLOPS:
            return KERNEL
        return SLOPE if share >= PLAUSIBLE_FLOPS else UNKNOWN
    if share <= SLOW_BYTES and share_of_reads <= SLOW_READS:
        return KERNEL
    is_plausible = share >= PLAUSIBLE_BYTES or share_of_reads >= PLAUSIBLE_READS
    return SLOPE if is_plausible else UNKNOWN


def _works(record: Record, ends: Ends) -> tuple[float, float]:
    """The added bytes of an F16 cache, and on a CPU those if each query head reads its own.

    A packed cache has fewer bytes, but as many numbers to compute with. Attention needs 2 FLOPs for
    each number that a query head reads, which in F16 has 2 bytes.
    """
    short = cost.step(record.model, 1, round(ends.short.n_past), 1)
    long = cost.step(record.model, 1, round(ends.long.n_past), 1)
    if short is None or long is None:
        return 0.0, 0.0
    n_bytes = long.kv_read_bytes - short.kv_read_bytes
    if record.settings.n_gpu_layers:
        return n_bytes, n_bytes
    return n_bytes, long.attention_flops - short.attention_flops


def cliff(records: Sequence[Record], phase: str) -> Cliff | None:
    """Of runs of one setup; None unless at least two runs of a length show it at one place."""
    by_case = grouped(records, lambda record: (record.run.n_prompt, record.run.n_gen))
    curves_of_cases = [_curves(repeats, phase) for repeats in by_case.values()]
    repeated = [curves for curves in curves_of_cases if len(curves) >= FEWEST_RUNS]
    if not repeated:
        return None
    curves = max(repeated, key=lambda curves: len(curves[0].works))
    pieces = breaks.common(curves)
    if pieces is None:
        return None
    return Cliff(
        phase,
        curves[0].n_past(pieces.work),
        curves[0].n_past(pieces.low),
        curves[0].n_past(pieces.high),
        pieces.factor,
        pieces.is_jump,
        1 / pieces.slope_before if pieces.slope_before > 0 else None,
        1 / pieces.slope_after if pieces.slope_after > 0 else None,
    )


def _curves(repeats: Sequence[Record], phase: str) -> list[RunCurve]:
    """A curve of each run that has the places of the first one, by attention's work."""
    n_tokens = _step_size(repeats, phase)
    curves: list[RunCurve] = []
    for record in repeats:
        places = sorted(_places(record, phase, n_tokens))
        costs = [_cost(record, phase, n_tokens, place.n_past) for place in places]
        works = [_work(phase, step) for step in costs if step is not None]
        rises = all(before < after for before, after in itertools.pairwise(works))
        if len(works) < len(places) or not rises:  # a window, or chunks
            continue
        curve = RunCurve(
            tuple(works),
            tuple(place.seconds for place in places),
            tuple(place.n_past for place in places),
        )
        if not curves or curve.works == curves[0].works:
            curves.append(curve)
    return curves


def _ends(places_of_runs: Sequence[Sequence[Place]]) -> Ends | None:
    positions = [place.n_past for places in places_of_runs for place in places]
    if len(set(positions)) < 2:
        return None
    first = min(positions)
    last = max(positions)
    reach = END_SHARE * (last - first)
    shorts: list[Place] = []
    longs: list[Place] = []
    for places in places_of_runs:
        of_short = [place for place in places if place.n_past <= first + reach]
        of_long = [place for place in places if place.n_past >= last - reach]
        shorts += [_median_place(of_short)] if of_short else []
        longs += [_median_place(of_long)] if of_long else []
    return Ends(shorts, longs)


def _median_place(places: Sequence[Place]) -> Place:
    return Place(*map(statistics.median, zip(*places, strict=True)))


def _step_size(records: Sequence[Record], phase: str) -> int:
    """Tokens of the steps to compare: 1 of decode, the usual number of prefill."""
    if phase == DECODE:
        return 1
    sizes = collections.Counter[int]()
    for record in records:
        steps = record.run.steps
        for kind, n_tokens in zip(steps.kind, steps.n_tokens, strict=True):
            if kind == PREFILL:
                sizes[n_tokens] += 1
    return max(sizes, key=lambda n_tokens: (sizes[n_tokens], n_tokens), default=1)


def _cost(record: Record, phase: str, n_tokens: int, n_past: float) -> StepCost | None:
    types = (record.settings.type_k, record.settings.type_v)
    return cost.step(record.model, n_tokens, round(n_past), int(phase == DECODE), *types)


def _work(phase: str, step: StepCost) -> float:
    return step.kv_read_bytes if phase == DECODE else step.attention_flops


def _places(record: Record, phase: str, n_tokens: int) -> list[Place]:
    if record.run.imported_from is not None:
        return []
    if phase == DECODE:
        return list(_decode_places(record))
    if not times_prefill_steps(record.settings):
        return []
    return list(_prefill_places(record, n_tokens))


def _prefill_places(record: Record, n_tokens: int) -> Iterator[Place]:
    """The steps of this many tokens; one token's logits more do not count beside them."""
    steps = record.run.steps
    for index, kind in enumerate(steps.kind):
        is_usual = steps.n_tokens[index] == n_tokens and steps.n_outputs[index] <= 1
        if kind == PREFILL and is_usual:
            seconds = (steps.ready_ns[index] - steps.start_ns[index]) / 1e9
            yield Place(steps.n_past[index], seconds)


def _decode_places(record: Record) -> Iterator[Place]:
    """Of each stretch of decode steps one place for N_BLOCK of them."""
    steps = record.run.steps
    stretch: list[Place] = []
    for index, kind in enumerate(steps.kind):
        is_single = kind == DECODE and steps.n_tokens[index] == 1
        if stretch and (not is_single or steps.n_past[index] != stretch[-1].n_past + 1):
            yield from _blocks(stretch)
            stretch = []
        if is_single:
            seconds = (steps.ready_ns[index] - steps.start_ns[index]) / 1e9
            stretch.append(Place(steps.n_past[index], seconds))
    yield from _blocks(stretch)


def _blocks(stretch: Sequence[Place]) -> Iterator[Place]:
    for first in range(0, len(stretch), N_BLOCK):
        block = stretch[first : first + N_BLOCK]
        if len(block) >= FEWEST_STEPS:
            yield _median_place(block)
