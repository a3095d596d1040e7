"""What disturbed a run, in words.

Disturbed runs are kept and marked. A median is reliable if fewer than half of its runs were disturbed; otherwise the
lab warns. Machines also drift, for example when they become hot. Around each run the lab times the same short decode
(the sentinel); if its time changes during a session, the machine's speed changed.

The load of other processes disturbs a run only if it uses cores that the run needs. A new cause goes into CAUSES
and `disturbances`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import stats
from lab.core.lists import grouped, plural
from lab.core.record import OK, Noise, Record
from lab.runner import machine
from lab.show import wording

MEAN_CORES, WORST_CORES = 0.15, 0.5
"""Cores used by others from which a run counts as disturbed: mean of the run, and in its worst second."""
N_JUDGED = 2
"""Both limits apply to this number of threads: 0.15 cores is 7.5 % of what two threads use."""
WAIT_SHARE = 0.02
"""Share of a run's time spent waiting from which the run counts as disturbed."""
GPU_PERCENT = 5
DRIFT, DRIFT_CHANCE = 0.03, 0.01
"""Drift is reported if the sentinel changed by more than DRIFT and chance alone does that less often than this."""
MIN_MS = 200
"""Shorter runs cannot be judged: the system counts CPU time in ticks of 10 ms."""


@dataclass(frozen=True)
class Cause:
    """What can disturb a run: a sentence with {} for the amount, and the amount's format."""

    words: str
    unit: str = "{}"

    def sentence(self, amount: float) -> str:
        """The words with the amount in them."""
        return self.words.format(_cores(amount) if self.unit == CORES else self.unit.format(amount))


CORES = "cores"
OTHERS = Cause("other processes used {}", CORES)
STEAL = Cause("the host took {} from the virtual machine", CORES)
MEMORY = Cause("memory was short")
HEAT = Cause("heat or a power limit slowed the CPU or GPU")
QUOTA = Cause("the container used up its quota of CPU time")
GPU_OTHERS = Cause("other processes used {} of the GPU", "{:.0f} %")
CAUSES = (OTHERS, STEAL, MEMORY, HEAT, QUOTA, GPU_OTHERS)
"""All known causes, in the order of reports."""


def _cores(amount: float) -> str:
    text = f"{amount:.2g}"
    return f"{text} core{'s' * (text != '1')}"


def cores(noise: Noise, column: Sequence[int] | None) -> tuple[float, float]:
    """Cores used, from a column of CPU time (ms per row): mean of the run, and its worst second."""
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


def disturbances(record: Record) -> dict[Cause, float]:
    """What disturbed a run: each cause with its amount, in the unit of its words."""
    noise = record.run.noise
    if noise is None or noise.samples is None or noise.samples.at_ms[-1] < MIN_MS:
        return {}

    def increase(name: str, over: float = 1.0) -> float:
        """The increase of a counter during the run; NaN if the system does not report it."""
        before, after = getattr(noise.before, name), getattr(noise.after, name)
        return math.nan if before is None or after is None else (after - before) / over

    seconds, gpus = noise.samples.at_ms[-1] / 1e3, (noise.after.gpus or ()) if record.settings.n_gpu_layers else ()
    others, steal = (cores(noise, column) for column in (noise.samples.others_ms, noise.samples.steal_ms))
    seen = [  # an amount above its limit shows the cause
        *((OTHERS, used, _limit(limit, record)) for used, limit in zip(others, (MEAN_CORES, WORST_CORES), strict=True)),
        *((STEAL, used, limit) for used, limit in zip(steal, (MEAN_CORES, WORST_CORES), strict=True)),
        (MEMORY, increase("memory_pressure_s", seconds), WAIT_SHARE),
        (HEAT, increase("n_throttled"), 0),
        (HEAT, sum(gpu.slowed is not None for gpu in gpus), 0),
        (QUOTA, increase("quota_wait_s", seconds), WAIT_SHARE),
        *((GPU_OTHERS, gpu.others_percent or 0, GPU_PERCENT) for gpu in gpus),
    ]
    return {
        cause: max(amount for other, amount, _ in seen if other is cause and amount == amount)
        for cause in dict.fromkeys(cause for cause, amount, limit in seen if amount > limit)
    }


def n_threads(record: Record) -> int:
    """Busy threads of a run. With all layers on a GPU only one thread is busy: it feeds the GPU."""
    settings, n_layer = record.settings, record.model.n_layer
    all_layers = settings.n_gpu_layers < 0 or (n_layer is not None and settings.n_gpu_layers > n_layer)
    return 1 if all_layers else max(settings.n_threads, settings.n_threads_batch)


def n_cores(record: Record) -> float | None:
    """Logical cores whose CPU time was watched. With a container's quota these are the host's cores."""
    here = record.machine
    return machine.cores(here) if here.cpu_quota is None else here.n_cores_physical


def _limit(cores: float, record: Record) -> float:
    """Cores that others may use during this run; `cores` is the limit for a run that needs all cores.

    Others can use the cores that the run leaves free. If two logical cores share a physical core, load on the second
    slows the first, but by less than a whole core: it counts as a share of the run's threads.
    """
    usable, threads = n_cores(record), n_threads(record)
    if usable is None:
        return cores
    n_free = max(0.0, usable - threads)
    n_free_physical = max(0.0, min(usable, record.machine.n_cores_physical or usable) - threads)
    return max(n_free_physical + cores, min(n_free, n_free_physical + cores * threads / N_JUDGED))


def during(noise: Noise, n_free: float) -> str:
    """What other processes and the host used while something other than a run was measured; "" for nothing.

    `n_free` cores were idle, so others can use them without a disturbance.
    """
    if noise.samples is None or noise.samples.at_ms[-1] < MIN_MS:
        return ""
    seen = (OTHERS, noise.samples.others_ms, n_free), (STEAL, noise.samples.steal_ms, 0)
    amounts = ((cause, max(cores(noise, column)), WORST_CORES + free) for cause, column, free in seen)
    return "; ".join(cause.sentence(amount) for cause, amount, limit in amounts if amount > limit)


def sentences(records: Sequence[Record]) -> list[str]:
    """What disturbed these runs (repeats of one measurement), and whether their threads had too few cores."""

    def in_runs(n: int) -> str:
        n_all = len(records)
        if n < n_all:
            return f"in {n} of {n_all} runs"
        return f"in {({1: 'the only run', 2: 'both runs'}).get(n, f'all {n} runs')}"

    by_run, words = [disturbances(record) for record in records], []
    for cause in CAUSES:
        if amounts := [amounts[cause] for amounts in by_run if cause in amounts]:
            words.append(f"{cause.sentence(max(amounts))} {in_runs(len(amounts))}")
    short = []  # cores that were free, in the worst second or over the whole run, and threads that needed them
    for record in records:
        noise, usable, threads = record.run.noise, n_cores(record), n_threads(record)
        if noise is None or noise.samples is None or noise.samples.at_ms[-1] < MIN_MS or usable is None:
            continue
        columns = [column for column in (noise.samples.others_ms, noise.samples.steal_ms) if column is not None]
        taken = [sum(row) for row in zip(*columns, strict=True)]
        left = min(usable - max(cores(noise, taken)), record.machine.cpu_quota or math.inf)
        if left < threads - WORST_CORES:
            short.append((left, threads))
    if short:
        left, threads = min(short)
        fewer, causes = math.floor(left), {cause for amounts in by_run for cause in amounts}
        advice = ["stop other programs"] if OTHERS in causes or STEAL not in causes else []
        advice += [f"if that is usual there, use --threads {fewer}"] if advice and 1 <= fewer < threads else []
        free = f"only {_cores(max(0.0, left))} were free for {plural(threads, 'thread')}"
        words.append(f"{free} {in_runs(len(short))}" + f" ({'; '.join(advice)})" * bool(advice))
    return words


def is_doubtful(records: Sequence[Record]) -> bool:
    """Whether at least half of the runs were disturbed, which makes their median unreliable."""
    return 2 * sum(bool(disturbances(record)) for record in records) >= len(records) > 0


def drift(records: Sequence[Record]) -> list[str]:
    """A sentence for each session and variant whose sentinel became slower or faster."""
    counted, changes = (one for one in records if one.run.status == OK and not one.run.warmup), []
    for (_, variant), own in grouped(counted, lambda one: (one.session, one.run.variant)).items():
        noises = [one.run.noise for one in own if one.run.noise]
        times = [noise.sentinel_after_ns for noise in noises if noise.sentinel_after_ns]
        change, chance = stats.trend(times)
        if abs(change - 1) > DRIFT and chance < DRIFT_CHANCE:
            word = "slower" if change > 1 else "faster"
            changes.append(
                f"{f'{variant}: the' if variant else 'The'} machine became {word} during the session: the same short "
                f"decode, timed after each of {len(times)} runs, took {wording.times(change)} as long at the end."
            )
    return changes
