"""What disturbed a run, in words.

A median is reliable if fewer than half of its runs were disturbed. Load of other processes disturbs a run only if it
uses cores that the run needs. If the time of the sentinel (the same short decode around each run) changes, the machine
drifts. A cause is its sentence, with {} for the amount; a new one goes into CAUSES and `disturbances`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.core import stats
from lab.core.lists import grouped, plural
from lab.core.record import OK, Noise, NoiseSamples, Record
from lab.runner import machine

MEAN_CORES = 0.15
WORST_CORES = 0.5
"""Cores used by others from which a run counts as disturbed: mean of the run, and in its worst second."""
N_JUDGED = (
    2  # both limits apply to this number of threads: 0.15 cores is 7.5 % of what two threads use
)
WAIT_SHARE = 0.02  # share of a run's time spent waiting from which the run counts as disturbed
GPU_PERCENT = 5
DRIFT = 0.03
DRIFT_CHANCE = 0.01
"""Drift is reported if the sentinel changed by more than DRIFT and chance alone does that less often than this."""
MIN_MS = 200  # shorter runs cannot be judged: the system counts CPU time in ticks of 10 ms
OTHERS = "other processes used {}"
STEAL = "the host took {} from the virtual machine"
MEMORY = "memory was short"
HEAT = "heat or a power limit slowed the CPU or GPU"
QUOTA = "the container used up its quota of CPU time"
GPU_OTHERS = "other processes used {} of the GPU"
CAUSES = (
    OTHERS,
    STEAL,
    MEMORY,
    HEAT,
    QUOTA,
    GPU_OTHERS,
)  # all known causes, in the order of reports


def sentence(cause: str, amount: float) -> str:
    """The cause with its amount: a percentage of a GPU, otherwise cores."""
    return cause.format(f"{amount:.0f} %" if cause == GPU_OTHERS else _cores(amount))


def _cores(amount: float) -> str:
    text = f"{amount:.2g}"
    return f"{text} core{'s' * (text != '1')}"


def _judged(noise: Noise | None) -> tuple[Noise, NoiseSamples] | None:
    """The noise and its samples; None if nothing was read, or the run was too short."""
    return (
        (noise, noise.samples)
        if noise and noise.samples and noise.samples.at_ms[-1] >= MIN_MS
        else None
    )


def cores(noise: Noise, column: Sequence[int] | None) -> tuple[float, float]:
    """Cores used, from a column of CPU time (ms per row): mean of the run, and its worst second."""
    if noise.samples is None or column is None:
        return 0.0, 0.0
    at = [0, *noise.samples.at_ms]
    mean = sum(column) / at[-1]
    worst = 0.0
    first = 0
    within = 0
    for last, ms in enumerate(column):
        within += ms
        while at[last + 1] - at[first + 1] >= 1000:  # without its first row it is still a second
            within -= column[first]
            first += 1
        if at[last + 1] - at[first] >= 1000:
            worst = max(worst, within / (at[last + 1] - at[first]))
    return mean, worst


def disturbances(record: Record) -> dict[str, float]:
    """What disturbed a run: each cause with its amount, in the unit of its words."""
    if not (known := _judged(record.run.noise)):
        return {}
    noise, samples = known

    def increase(name: str, over: float = 1.0) -> float:
        """The increase of a counter during the run; NaN if the system does not report it."""
        before = getattr(noise.before, name)
        after = getattr(noise.after, name)
        return math.nan if before is None or after is None else (after - before) / over

    # Others can use the cores that the run leaves free. If two logical cores share a physical core, load on the second
    # slows the first, but by less than a whole core: it counts as a share of the run's threads.
    usable = n_cores(record)
    threads = n_threads(record)
    limits = (MEAN_CORES, WORST_CORES)
    of_others: Sequence[float] = limits
    if usable is not None:
        n_free = max(0.0, usable - threads)
        physical = max(0.0, min(usable, record.machine.n_cores_physical or usable) - threads)
        of_others = [
            max(physical + one, min(n_free, physical + one * threads / N_JUDGED)) for one in limits
        ]
    seconds = samples.at_ms[-1] / 1e3
    gpus = (noise.after.gpus or ()) if record.settings.n_gpu_layers else ()
    others, steal = (cores(noise, column) for column in (samples.others_ms, samples.steal_ms))
    seen = [  # an amount above its limit shows the cause
        *((OTHERS, used, limit) for used, limit in zip(others, of_others, strict=True)),
        *((STEAL, used, limit) for used, limit in zip(steal, limits, strict=True)),
        (MEMORY, increase("memory_pressure_s", seconds), WAIT_SHARE),
        (HEAT, increase("n_throttled"), 0),
        (HEAT, sum(gpu.slowed is not None for gpu in gpus), 0),
        (QUOTA, increase("quota_wait_s", seconds), WAIT_SHARE),
        *((GPU_OTHERS, gpu.others_percent or 0, GPU_PERCENT) for gpu in gpus),
    ]
    return {
        cause: max(amount for other, amount, _ in seen if other == cause and amount == amount)
        for cause in dict.fromkeys(cause for cause, amount, limit in seen if amount > limit)
    }


def n_threads(record: Record) -> int:
    """Busy threads of a run. With all layers on a GPU only one thread is busy: it feeds the GPU."""
    settings = record.settings
    n_layer = record.model.n_layer
    all_layers = settings.n_gpu_layers < 0 or (
        n_layer is not None and settings.n_gpu_layers > n_layer
    )
    return 1 if all_layers else max(settings.n_threads, settings.n_threads_batch)


def n_cores(record: Record) -> float | None:
    """Logical cores whose CPU time was watched. With a container's quota these are the host's cores."""
    here = record.machine
    return machine.cores(here) if here.cpu_quota is None else here.n_cores_physical


def during(noise: Noise, n_free: float) -> str:
    """What others used beyond `n_free` cores while something other than a run was measured; "" for nothing."""
    if not (known := _judged(noise)):
        return ""
    seen = (OTHERS, known[1].others_ms, n_free), (STEAL, known[1].steal_ms, 0)
    amounts = (
        (cause, max(cores(noise, column)), WORST_CORES + free) for cause, column, free in seen
    )
    return "; ".join(sentence(cause, amount) for cause, amount, limit in amounts if amount > limit)


def sentences(records: Sequence[Record]) -> list[str]:
    """What disturbed these runs (repeats of one measurement), and whether their threads had too few cores."""

    def in_runs(n: int) -> str:
        every = {1: "the only run", 2: "both runs"}.get(n, f"all {n} runs")
        return f"in {n} of {len(records)} runs" if n < len(records) else f"in {every}"

    by_run = [disturbances(record) for record in records]
    words = []
    for cause in CAUSES:
        if amounts := [amounts[cause] for amounts in by_run if cause in amounts]:
            words.append(f"{sentence(cause, max(amounts))} {in_runs(len(amounts))}")
    short = []  # cores that were free, in the worst second or over the whole run, and threads that needed them
    for record in records:
        known = _judged(record.run.noise)
        usable = n_cores(record)
        threads = n_threads(record)
        if known and usable is not None:
            columns = [
                column for column in (known[1].others_ms, known[1].steal_ms) if column is not None
            ]
            taken = [sum(row) for row in zip(*columns, strict=True)]
            left = min(usable - max(cores(known[0], taken)), record.machine.cpu_quota or math.inf)
            short += [(left, threads)] if left < threads - WORST_CORES else []
    if short:
        left, threads = min(short)
        fewer = math.floor(left)
        causes = {cause for amounts in by_run for cause in amounts}
        advice = ["stop other programs"] if OTHERS in causes or STEAL not in causes else []
        advice += (
            [f"if that is usual there, use --threads {fewer}"]
            if advice and 1 <= fewer < threads
            else []
        )
        free = f"only {_cores(max(0.0, left))} were free for {plural(threads, 'thread')}"
        words.append(f"{free} {in_runs(len(short))}" + f" ({'; '.join(advice)})" * bool(advice))
    return words


def is_doubtful(records: Sequence[Record]) -> bool:
    """Whether at least half of the runs were disturbed, which makes their median unreliable."""
    return 2 * sum(bool(disturbances(record)) for record in records) >= len(records) > 0


def drift(records: Sequence[Record]) -> list[str]:
    """A sentence for each session and variant whose sentinel became slower or faster."""
    counted = (one for one in records if one.run.status == OK and not one.run.warmup)
    changes = []
    for (_, variant), own in grouped(counted, lambda one: (one.session, one.run.variant)).items():
        times = [
            noise.sentinel_after_ns
            for one in own
            if (noise := one.run.noise) and noise.sentinel_after_ns
        ]
        change, chance = stats.trend(times)
        if abs(change - 1) > DRIFT and chance < DRIFT_CHANCE:
            word = "slower" if change > 1 else "faster"
            changes.append(
                f"{f'{variant}: the' if variant else 'The'} machine became {word} during the session: the same short "
                f"decode, timed after each of {len(times)} runs, took {change:.3g}x as long at the end. "
                "Measure again."
            )
    return changes
