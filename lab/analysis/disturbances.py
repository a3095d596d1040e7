"""What disturbed a run, in words: noise is watched, never averaged away.

A disturbed run is kept and marked. A median over runs counts as long as most of them were quiet; where half or more
were disturbed, the lab warns. Machines also drift: they grow hot and slow. Around every run the same short decode is
timed (the sentinel); where its time changes over a session, the machine's speed changed.

What another process takes is a disturbance only where the run needs it: a core that the run leaves free can be
used by others. To add a cause, add it to CAUSES.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.core import stats
from lab.core.noise import Noise
from lab.core.record import OK, Record, Run
from lab.runner import machine

MEAN_CORES, WORST_CORES = 0.15, 0.5
"""CPU time per second that is a disturbance: as the mean of a run, and in its worst second."""
N_JUDGED = 2
"""The threads for which those two are meant: 0.15 of a core is 7.5 % of what two threads use."""
WAIT_SHARE = 0.02
"""Share of a run's time in which it had to wait that is a disturbance."""
GPU_PERCENT = 5
DRIFT, DRIFT_CHANCE = 0.03, 0.01
"""A drift is reported from this change of the sentinel on, where chance alone does it this rarely."""
JUMP_NS = 10_000_000
"""Differences of the clock below this are not reported: samples are rounded to milliseconds."""
MIN_MS = 200
"""The system counts CPU time in ticks of 10 ms: shorter runs cannot be judged by it."""


@dataclass(frozen=True)
class Sign:
    """A figure that shows a cause when it is above `limit`. None of `figure`: the system does not give it."""

    figure: Callable[[Noise], float | None]
    limit: float
    spares: bool = False  # free cores can take it: the limit is that of a run that needs all of them
    on_gpu: bool = False  # it concerns only runs with layers on a GPU


@dataclass(frozen=True)
class Cause:
    """What can disturb a run: a sentence, with {} where its amount stands, and the signs of it.

    The amount is the largest figure of the signs.
    """

    words: str
    signs: tuple[Sign, ...]
    unit: Callable[[float], str] = str

    def sentence(self, amount: float) -> str:
        """The words with the amount in them."""
        return self.words.format(self.unit(amount))


def cores(noise: Noise, column: Sequence[int] | None) -> tuple[float, float]:
    """Cores that a column of CPU time (ms per row) amounts to: over the whole run, and in its worst second."""
    if noise.samples is None or column is None:
        return 0.0, 0.0
    at = [0, *noise.samples.at_ms]
    mean = sum(column) / at[-1]
    worst, first, within = 0.0, 0, 0
    for last, ms in enumerate(column):
        within += ms
        while at[last + 1] - at[first + 1] >= 1000:  # without its first row it is still a second
            within -= column[first]
            first += 1
        if at[last + 1] - at[first] >= 1000:
            worst = max(worst, within / (at[last + 1] - at[first]))
    return mean, worst


def _cpu_signs(name: str, spares: bool) -> tuple[Sign, ...]:
    """The signs of a column of CPU time in NoiseSamples."""

    def figure(noise: Noise, which: int) -> float | None:
        column = getattr(noise.samples, name)
        return None if column is None else cores(noise, column)[which]

    return (
        Sign(lambda noise: figure(noise, 0), MEAN_CORES, spares),
        Sign(lambda noise: figure(noise, 1), WORST_CORES, spares),
    )


def _increase(name: str) -> Callable[[Noise], float | None]:
    """By how much a counter of NoiseReading rose during the run."""

    def increase(noise: Noise) -> float | None:
        before, after = getattr(noise.before, name), getattr(noise.after, name)
        return None if before is None or after is None else after - before

    return increase


def _share(name: str) -> Callable[[Noise], float | None]:
    """The same of a counter of seconds, as a share of the run's time."""

    def share(noise: Noise) -> float | None:
        seconds = _increase(name)(noise)
        return None if seconds is None or noise.samples is None else seconds / (noise.samples.at_ms[-1] / 1e3)

    return share


def _of_a_core(amount: float) -> str:
    return f"{amount:.2g} of a core" if round(amount, 1) <= 1 else f"{amount:.2g} cores"


def _n_slowed(noise: Noise) -> float:
    return sum(gpu.slowed is not None for gpu in noise.after.gpus or ())


def _gpu_percent(noise: Noise) -> float | None:
    return max((gpu.others_percent for gpu in noise.after.gpus or () if gpu.others_percent is not None), default=None)


OTHERS = Cause("another process used {}", _cpu_signs("others_ms", spares=True), _of_a_core)
STEAL = Cause("the machine's host took {}", _cpu_signs("steal_ms", spares=False), _of_a_core)
MEMORY = Cause("memory was short", (Sign(_share("memory_pressure_s"), WAIT_SHARE),))
HEAT = Cause(
    "the CPU or GPU was slowed down by heat or power",
    (Sign(_increase("n_throttled"), 0), Sign(_n_slowed, 0, on_gpu=True)),
)
QUOTA = Cause("the container's quota of CPU time was used up", (Sign(_share("quota_wait_s"), WAIT_SHARE),))
GPU_OTHERS = Cause(
    "another process used {} of the GPU", (Sign(_gpu_percent, GPU_PERCENT, on_gpu=True),), "{:.0f} %".format
)
CLOCK = Cause("the clock jumped by {} s", (), "{:.3g}".format)

CAUSES = (OTHERS, STEAL, MEMORY, HEAT, QUOTA, GPU_OTHERS, CLOCK)
"""Every cause that is known, in the order in which they are reported."""


def disturbances(record: Record) -> dict[Cause, float]:
    """What disturbed a run, each cause with its amount (the unit is in its words)."""
    noise, jump_s = record.run.noise, _clock_jump_s(record)
    amounts = {CLOCK: jump_s} if jump_s else {}
    if noise is None or noise.samples is None or noise.samples.at_ms[-1] < MIN_MS:
        return amounts
    for cause in CAUSES:
        signs = [sign for sign in cause.signs if record.settings.n_gpu_layers or not sign.on_gpu]
        known = [(figure, sign) for sign in signs if (figure := sign.figure(noise)) is not None]
        if any(figure > (_limit(sign.limit, record) if sign.spares else sign.limit) for figure, sign in known):
            amounts[cause] = max(figure for figure, _ in known)
    return amounts


def _clock_jump_s(record: Record) -> float:
    """Seconds by which stamps of a run's steps go back, or last longer than the time in which it was watched; else 0.

    Both are read from one monotonic clock, and the watch begins before the run and ends after it.
    """
    steps, noise = record.run.steps, record.run.noise
    if not steps.kind:
        return 0.0
    pairs = ((steps.start_ns, steps.ready_ns), (steps.ready_ns, steps.end_ns), (steps.end_ns, steps.start_ns[1:]))
    back_ns = max(max(map(operator.sub, before, after), default=0) for before, after in pairs)
    if back_ns <= 0 and noise is not None and noise.samples is not None and noise.samples.at_ms[-1] >= MIN_MS:
        back_ns = steps.end_ns[-1] - steps.start_ns[0] - round(1e6 * noise.samples.at_ms[-1])
    return back_ns / 1e9 if back_ns > JUMP_NS else 0.0


def n_threads(record: Record) -> int:
    """Threads that a run keeps busy. With all layers on a GPU it is the one that feeds it."""
    settings, n_layer = record.settings, record.model.n_layer
    all_layers = settings.n_gpu_layers < 0 or (n_layer is not None and settings.n_gpu_layers > n_layer)
    return 1 if all_layers else max(settings.n_threads, settings.n_threads_batch)


def n_cores(record: Record) -> float | None:
    """Logical cores whose CPU time was watched. Under a container's quota those are the host's."""
    here = record.machine
    return machine.cores(here) if here.cpu_quota is None else here.n_cores_physical


def _limit(cores: float, record: Record) -> float:
    """What others may use, where a run that needs all cores is disturbed by `cores`.

    A core that the run leaves free can be used by others. Where two logical cores are one physical core, what runs on
    the second one slows down the first, but takes less than a whole core: it counts as a share of the run's threads.
    """
    usable, threads = n_cores(record), n_threads(record)
    if usable is None:
        return cores
    n_free = max(0.0, usable - threads)
    n_free_physical = max(0.0, min(usable, record.machine.n_cores_physical or usable) - threads)
    return max(n_free_physical + cores, min(n_free, n_free_physical + cores * threads / N_JUDGED))


def during(noise: Noise, n_free: float) -> str:
    """What other processes and the host took while something else than a run was measured; "" for nothing.

    `n_free` cores were not in use: what others take of these disturbs nothing.
    """
    if noise.samples is None or noise.samples.at_ms[-1] < MIN_MS:
        return ""
    columns = {OTHERS: noise.samples.others_ms, STEAL: noise.samples.steal_ms}
    amounts = {cause: max(cores(noise, column)) for cause, column in columns.items()}
    limits = {OTHERS: WORST_CORES + n_free, STEAL: WORST_CORES}
    return "; ".join(cause.sentence(amount) for cause, amount in amounts.items() if amount > limits[cause])


def sentences(records: Sequence[Record]) -> list[str]:
    """What disturbed these runs (repeats of one measurement), in words."""
    by_run = [disturbances(record) for record in records]
    words = []
    for cause in CAUSES:
        amounts = [amounts[cause] for amounts in by_run if cause in amounts]
        if amounts:
            words.append(f"{cause.sentence(max(amounts))} during {len(amounts)} of {len(records)} runs")
    return words + _too_few_cores(records)


def _too_few_cores(records: Sequence[Record]) -> list[str]:
    """A sentence where the load of others left fewer free cores than threads, for a second or a whole run."""
    free = {i: left for i, record in enumerate(records) if (left := _free_cores(record)) is not None}
    short = {i: left for i, left in free.items() if left < n_threads(records[i]) - WORST_CORES}
    if not short:
        return []
    worst = min(short, key=lambda i: short[i])
    left, threads = short[worst], n_threads(records[worst])
    fewer = max(1, math.floor(left))
    option = f"use --threads {fewer}, or " if fewer < threads else ""
    return [
        f"{max(0.0, left):.2g} free cores were left for {threads} thread{'s' * (threads != 1)} in {len(short)} of "
        f"{len(records)} runs, and a thread without a core makes the others wait: this, not the model, is what was "
        f"measured ({option}stop what else runs)"
    ]


def _free_cores(record: Record) -> float | None:
    """Cores that others and the host left free, in the worst second of a run or over all of it; None if not known."""
    noise, usable = record.run.noise, n_cores(record)
    if noise is None or noise.samples is None or noise.samples.at_ms[-1] < MIN_MS or usable is None:
        return None
    columns = [column for column in (noise.samples.others_ms, noise.samples.steal_ms) if column is not None]
    taken = [sum(row) for row in zip(*columns, strict=True)]
    left, quota = usable - max(cores(noise, taken)), record.machine.cpu_quota
    return left if quota is None else min(left, quota)


def is_doubtful(records: Sequence[Record]) -> bool:
    """Whether half of the runs or more were disturbed: their median is then not to be trusted."""
    return 2 * sum(bool(disturbances(record)) for record in records) >= len(records) > 0


def drift(records: Sequence[Record]) -> list[str]:
    """A sentence for each session whose sentinel became slower or faster."""
    by_series: dict[tuple[str, str | None], list[Run]] = {}
    for record in records:
        if record.run.status == OK and not record.run.warmup:
            by_series.setdefault((record.session, record.run.variant), []).append(record.run)
    changes = []
    for (_, variant), runs in by_series.items():
        times = [run.noise.sentinel_after_ns for run in runs if run.noise and run.noise.sentinel_after_ns]
        change, chance = stats.trend(times)
        if abs(change - 1) > DRIFT and chance < DRIFT_CHANCE:
            word = "slower" if change > 1 else "faster"
            times_word = f"{change:.2f}x" if change > 1 else f"{1 / change:.2f}x"
            changes.append(
                f"{f'{variant}: the' if variant else 'The'} machine became {word} meanwhile: "
                f"the same short decode, timed after each of {len(times)} runs, was "
                f"{times_word} as {'slow' if change > 1 else 'fast'} at the end as at the beginning."
            )
    return changes
