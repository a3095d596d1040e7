"""What disturbed a run, in words.

A median is reliable if fewer than half of its runs were disturbed. Load of other processes disturbs
a run only if it uses cores that the run needs. If the time of the sentinel (the same short decode
around each run) changes, the machine drifts. A cause is its sentence, with {} for the amount; a new
one goes into CAUSES and `_readings`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lab.core import memory, shown, stats
from lab.core.lists import grouped, plural
from lab.core.record import (
    Machine,
    Model,
    Noise,
    NoiseReading,
    NoiseSamples,
    Record,
    Settings,
)
from lab.core.request import RequestRecord
from lab.runner import machine, waiting

MEAN_CORES = 0.15
WORST_CORES = 0.5
"""Cores used by others from which a run counts as disturbed: mean of the run, and in its worst
second."""
N_JUDGED = 2  # threads that both limits apply to: 0.15 cores are 7.5 % of what two threads use
WAIT_SHARE = 0.02  # share of a run's time spent waiting from which the run counts as disturbed
GPU_PERCENT = 5
DRIFT = 0.03
DRIFT_CHANCE = 0.01
"""Drift is reported if the sentinel changed by more than DRIFT and chance alone does that less
often than DRIFT_CHANCE."""
FEWEST_UNWATCHED = 3
SLOW_FIRST = 1.1
UNWATCHED_CHANCE = 0.05
"""Of repeats that nobody watched: a first one is slow if it took SLOW_FIRST times as long as any
other, and a change is named if chance alone makes it less often. Five repeats in order have
1.7 %."""
APART = 1.1
MUCH_WIDER = 3
"""Repeats are of two kinds if a gap of APART lies between them that is MUCH_WIDER than both."""
MIN_MS = 200  # shorter runs cannot be judged: the system counts CPU time in ticks of 10 ms
WINDOW_MS = 1000  # the worst second

OTHERS = "other processes used {}"
STEAL = "the host took {} from the virtual machine"
MEMORY = "memory was short"
HEAT = "heat or a power limit slowed the CPU or GPU"
QUOTA = "the container used up its quota of CPU time"
GPU_OTHERS = "other processes used {} of the GPU"
PILE_UP = "two of llama.cpp's threads took turns on one core beside another program"
CAUSES = (PILE_UP, OTHERS, STEAL, MEMORY, HEAT, QUOTA, GPU_OTHERS)  # in the order of reports


class CoresUsed(NamedTuple):
    """CPU cores: the mean of a run, and its worst second."""

    mean: float
    worst: float


class Reading(NamedTuple):
    """An amount that disturbed a run if it is above its limit."""

    cause: str
    amount: float
    limit: float


def sentence(cause: str, amount: float) -> str:
    """The cause with its amount: a percentage of a GPU, otherwise cores."""
    if cause == GPU_OTHERS:
        return cause.format(f"{amount:.0f} %")
    return cause.format(machine.cores_in_words(amount))


def _judged_samples(noise: Noise | None) -> NoiseSamples | None:
    """The samples of a run; None if nothing was read, or the run was too short."""
    if noise is None or noise.samples is None or noise.samples.at_ms[-1] < MIN_MS:
        return None
    return noise.samples


def cores(samples: NoiseSamples | None, column: Sequence[int] | None) -> CoresUsed:
    """Cores used, from a column of CPU time (ms per row)."""
    if samples is None or column is None:
        return CoresUsed(0.0, 0.0)
    at_ms = [0, *samples.at_ms]
    worst = 0.0
    first = 0
    used_ms = 0
    for last, ms in enumerate(column):
        used_ms += ms
        end_ms = at_ms[last + 1]
        # Without its first row it is long enough
        while end_ms - at_ms[first + 1] >= WINDOW_MS:
            used_ms -= column[first]
            first += 1
        window_ms = end_ms - at_ms[first]
        if window_ms >= WINDOW_MS:
            worst = max(worst, used_ms / window_ms)
    return CoresUsed(sum(column) / at_ms[-1], worst)


def disturbances(record: Record) -> dict[str, float]:
    """What disturbed a run: each cause with its amount, in the unit of its words."""
    noise = record.run.noise
    samples = _judged_samples(noise)
    if noise is None or samples is None:
        return {}
    largest: dict[str, float] = {}
    has_cause: dict[str, bool] = {}
    for cause, amount, limit in _readings(record, noise, samples):
        if amount == amount:  # not NaN
            largest[cause] = max(amount, largest.get(cause, amount))
            has_cause[cause] = has_cause.get(cause, False) or amount > limit
    return {cause: amount for cause, amount in largest.items() if has_cause[cause]}


def _readings(record: Record, noise: Noise, samples: NoiseSamples) -> Iterator[Reading]:
    """All that was read of a run, with the limits."""
    used = cores(samples, samples.others_ms)
    steal = cores(samples, samples.steal_ms)
    yield Reading(PILE_UP, waiting.pile_up_share(record), waiting.PILE_UP_SHARE)
    yield Reading(OTHERS, used.mean, _limit_of_others(record, MEAN_CORES))
    yield Reading(OTHERS, used.worst, _limit_of_others(record, WORST_CORES))
    yield Reading(STEAL, steal.mean, MEAN_CORES)
    yield Reading(STEAL, steal.worst, WORST_CORES)
    seconds = samples.at_ms[-1] / 1e3
    waited = _increase(noise.before, noise.after, "memory_pressure_s") / seconds
    yield Reading(MEMORY, waited, WAIT_SHARE)
    yield Reading(HEAT, _increase(noise.before, noise.after, "n_throttled"), 0)
    yield Reading(
        QUOTA, _increase(noise.before, noise.after, "quota_wait_s") / seconds, WAIT_SHARE
    )
    if record.settings.n_gpu_layers:
        gpus = noise.after.gpus or ()
        n_slowed = len([gpu for gpu in gpus if gpu.slowed is not None])
        yield Reading(HEAT, n_slowed, 0)
        for gpu in gpus:
            yield Reading(GPU_OTHERS, gpu.others_percent or 0, GPU_PERCENT)


def of_request(request: RequestRecord) -> dict[str, float]:
    """What disturbed a request to a server on this machine: each cause with its amount.

    The server's threads are not known: it may need every core.
    """
    samples = _judged_samples(request.noise)
    amounts: dict[str, float] = {}
    if samples is None:
        return amounts
    for cause, column in ((OTHERS, samples.others_ms), (STEAL, samples.steal_ms)):
        used = cores(samples, column)
        if used.mean > MEAN_CORES or used.worst > WORST_CORES:
            amounts[cause] = max(used)
    return amounts


def request_sentences(requests: Sequence[RequestRecord]) -> list[str]:
    """What disturbed these requests."""
    by_request = [of_request(request) for request in requests]
    sentences_of_causes = []
    for cause in (OTHERS, STEAL):
        amounts = [causes[cause] for causes in by_request if cause in causes]
        if amounts:
            place = f"during {len(amounts)} of {plural(len(requests), 'request')}"
            sentences_of_causes.append(f"{sentence(cause, max(amounts))} {place}.")
    return [text[:1].upper() + text[1:] for text in sentences_of_causes]


def _increase(before: NoiseReading, after: NoiseReading, name: str) -> float:
    """The increase of a counter during a run; NaN if the system does not report it."""
    start = getattr(before, name)
    end = getattr(after, name)
    if start is None or end is None:
        return math.nan
    return float(end - start)


def _limit_of_others(record: Record, cores_used: float) -> float:
    """The cores that others may use: those that the run leaves free, and a share of its threads.

    If two logical cores share a physical core, load on the second slows the first, but by less than
    a whole core: it counts as a share of the run's threads.
    """
    watched = machine.n_cores_watched(record.machine)
    if watched is None:
        return cores_used
    threads = n_threads(record)
    n_free = max(0.0, watched - threads)
    n_physical = min(watched, record.machine.n_cores_physical or watched)
    physical_free = max(0.0, n_physical - threads)
    scaled = physical_free + cores_used * threads / N_JUDGED
    return max(physical_free + cores_used, min(n_free, scaled))


def n_threads(record: Record) -> int:
    """Busy threads of a run."""
    return busy_threads(record.settings, record.model)


def busy_threads(settings: Settings, model: Model) -> int:
    """Where the CPU computes nothing only one thread is busy: it feeds the GPU."""
    if not memory.computes_on_cpu(settings, model):
        return 1
    return max(settings.n_threads, settings.n_threads_batch)


def seen_before(noise: Noise, here: Machine, model: Model, settings: Settings) -> str:
    """What other programs will do to a session, seen before its first run; "" if nothing."""
    samples = _judged_samples(noise)
    watched = machine.n_cores_watched(here)
    if samples is None or watched is None:
        return ""
    used = cores(samples, samples.others_ms).mean
    n_busy = busy_threads(settings, model)
    return waiting.before_first_run(noise.threads, settings, n_busy, watched, used)


def during(noise: Noise, n_free: float) -> str:
    """What others used beyond `n_free` cores while something other than a run was measured.

    "" if nothing disturbed it.
    """
    samples = _judged_samples(noise)
    if samples is None:
        return ""
    clauses = []
    used = max(cores(samples, samples.others_ms))
    if used > WORST_CORES + n_free:
        clauses.append(sentence(OTHERS, used))
    steal = max(cores(samples, samples.steal_ms))
    if steal > WORST_CORES:
        clauses.append(sentence(STEAL, steal))
    return "; ".join(clauses)


def sentences(records: Sequence[Record]) -> list[str]:
    """What disturbed these runs (repeats of one measurement), and whether cores were missing."""
    by_run = [disturbances(record) for record in records]
    clauses: list[str] = []
    for cause in CAUSES:
        amounts = [run[cause] for run in by_run if cause in run]
        if amounts:
            place = _in_runs(len(amounts), len(records))
            cost = waiting.cost_and_cure(records) if cause == PILE_UP else ""
            clauses.append(f"{sentence(cause, max(amounts))} {place}{cost}")
    causes = set().union(*by_run)
    clauses += _missing_cores(records, causes)
    return clauses


def _in_runs(n: int, n_all: int) -> str:
    if n < n_all:
        return f"in {n} of {n_all} runs"
    if n_all == 1:
        return "in the only run"
    return "in both runs" if n_all == 2 else f"in all {n_all} runs"


def _missing_cores(records: Sequence[Record], causes: set[str]) -> list[str]:
    """A clause on the run with the fewest free cores, if others left runs fewer than their threads
    need."""
    if not causes & {OTHERS, STEAL}:
        return []
    short: list[tuple[float, int]] = []  # free cores, and the threads that needed them
    for record in records:
        n_free = _free_cores(record)
        threads = n_threads(record)
        if n_free is not None and n_free < threads - WORST_CORES:
            short.append((n_free, threads))
    if not short:
        return []
    n_free, threads = min(short)
    free = machine.cores_in_words(max(0.0, n_free))
    clause = f"only {free} were free for {plural(threads, 'thread')}"
    clause += f" {_in_runs(len(short), len(records))}"
    may_be_programs = OTHERS in causes
    fewer = math.floor(n_free)
    if may_be_programs and 1 <= fewer < threads:
        advice = f"stop other programs; if that is usual there, use --threads {fewer}"
        return [f"{clause} ({advice})"]
    return [f"{clause} (stop other programs)" if may_be_programs else clause]


def _free_cores(record: Record) -> float | None:
    """Cores that were free in the worst second of a run, or over the whole run; None if unknown."""
    samples = _judged_samples(record.run.noise)
    if samples is None:
        return None
    columns = [
        column for column in (samples.others_ms, samples.steal_ms) if column is not None
    ]
    taken_ms = [sum(row) for row in zip(*columns, strict=True)]
    return machine.n_cores_free(record.machine, max(cores(samples, taken_ms)))


def n_disturbed(records: Iterable[Record]) -> int:
    """How many of the runs were disturbed."""
    return len([record for record in records if disturbances(record)])


def is_doubtful(records: Sequence[Record]) -> bool:
    """Whether the median of these runs is unreliable."""
    return shown.is_unreliable(len(records), n_disturbed(records))


def drift(records: Sequence[Record]) -> list[str]:
    """A sentence for each session and variant whose sentinel became slower or faster."""
    timed = [record for record in records if record.run.is_timed]
    lines: list[str] = []
    by_variant = grouped(timed, lambda record: (record.session, record.run.variant))
    for (_, variant), runs in by_variant.items():
        times_ns = []
        for record in runs:
            noise = record.run.noise
            if noise and noise.sentinel_after_ns:
                times_ns.append(noise.sentinel_after_ns)
        change, chance = stats.trend(times_ns)
        if abs(change - 1) > DRIFT and chance < DRIFT_CHANCE:
            lines.append(_drift_sentence(variant, change, len(times_ns)))
    return lines


def of_unwatched(times: Sequence[float]) -> list[str]:
    """What the times of repeats show that nobody watched, in their order: a slow first one, a
    change over the repeats, two kinds of repeats."""
    sentences_of_times = []
    rest = list(times)
    if len(times) >= FEWEST_UNWATCHED and times[0] > SLOW_FIRST * max(times[1:]):
        factor = times[0] / statistics.median(times[1:])
        sentences_of_times.append(
            f"the first run took {factor:.3g}x as long as the others: it was not warmed up"
        )
        rest = rest[1:]
    change, chance = stats.trend(rest)
    if abs(change - 1) > DRIFT and chance < UNWATCHED_CHANCE:
        direction = "slower" if change > 1 else "faster"
        sentences_of_times.append(
            f"the runs became {direction}: they took {change:.3g}x as long at the end"
        )
        return sentences_of_times
    low, high = _two_groups(rest)
    if low and high:
        factor = statistics.median(high) / statistics.median(low)
        sentences_of_times.append(
            f"the runs are of two kinds, {len(low)} fast and {len(high)} slow, which took "
            f"{factor:.3g}x as long: their median describes neither"
        )
    return sentences_of_times


def _two_groups(times: Sequence[float]) -> tuple[list[float], list[float]]:
    """The times below and above a gap that is much wider than both groups; two empty lists where
    there is none."""
    ordered = sorted(times)
    for n in range(2, len(ordered) - 1):
        low = ordered[:n]
        high = ordered[n:]
        widest = max(low[-1] / low[0], high[-1] / high[0])
        gap = high[0] / low[-1]
        if gap > APART and gap - 1 > MUCH_WIDER * (widest - 1):
            return low, high
    return [], []


def _drift_sentence(variant: str | None, change: float, n_runs: int) -> str:
    direction = "slower" if change > 1 else "faster"
    what = f"became {direction} during the session: the same short decode, timed after each of"
    took = f"{n_runs} runs, took {change:.3g}x as long at the end. Measure again."
    if variant:
        return f"{variant}: the machine {what} {took}"
    return f"The machine {what} {took}"
