"""What disturbed a run, told in words: noise is watched, never averaged away.

A run under disturbance is kept and marked. A median over runs stands as long as most of them were quiet;
once half were disturbed it is worth little, and the lab says so. Drift is the other enemy: machines grow
hot and slow. Around every run the same short decode is timed (the sentinel); if it changes over a session,
so did everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import stats
from lab.core.noise import Noise
from lab.core.record import OK, Record, Run

OTHERS, STEAL = "another process used", "the machine's host took"
HEAT, MEMORY = "the CPU or GPU was slowed down by heat or power", "memory was short"

MEAN_CORES, WORST_CORES = 0.15, 0.5
"""CPU time per second that is told as a disturbance: as the mean of a run, and in its worst second."""
MEMORY_SHARE = 0.02
DRIFT, DRIFT_CHANCE = 0.03, 0.01
"""A drift is told from this change of the sentinel on, where chance alone does it this rarely."""
MIN_MS = 200
"""The system counts CPU time in ticks of 10 ms: shorter runs cannot be judged by it."""


def disturbances(run: Run) -> dict[str, float]:
    """What disturbed a run: the cause, and its amount (cores for OTHERS and STEAL, a share of time, a count)."""
    noise = run.noise
    if noise is None or noise.samples is None or noise.samples.at_ms[-1] < MIN_MS:
        return {}
    found: dict[str, float] = {}
    for cause, column in ((OTHERS, noise.samples.others_ms), (STEAL, noise.samples.steal_ms)):
        mean, worst = cores(noise, column)
        if mean > MEAN_CORES or worst > WORST_CORES:
            found[cause] = max(mean, worst)
    before, after = noise.before, noise.after
    if before.memory_pressure_s is not None and after.memory_pressure_s is not None:
        share = (after.memory_pressure_s - before.memory_pressure_s) / (noise.samples.at_ms[-1] / 1e3)
        if share > MEMORY_SHARE:
            found[MEMORY] = share
    throttled = (after.n_throttled or 0) - (before.n_throttled or 0)
    throttled += sum(gpu.slowed is not None for gpu in after.gpus or ())
    if throttled:
        found[HEAT] = throttled
    return found


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


def during(noise: Noise) -> str:
    """What other processes and the host took while something else than a run was measured; "" for nothing."""
    samples = noise.samples
    if samples is None:
        return ""
    amounts = {OTHERS: max(cores(noise, samples.others_ms)), STEAL: max(cores(noise, samples.steal_ms))}
    return "; ".join(f"{cause} {amount:.2g} of a core" for cause, amount in amounts.items() if amount > WORST_CORES)


def sentences(runs: Sequence[Run]) -> list[str]:
    """What disturbed these runs (repeats of one measurement), in words."""
    found = [disturbances(run) for run in runs]
    said = []
    for cause in (OTHERS, STEAL, MEMORY, HEAT):
        amounts = [each[cause] for each in found if cause in each]
        if amounts:
            amount = f" {max(amounts):.2g} of a core" if cause in (OTHERS, STEAL) else ""
            said.append(f"{cause}{amount} during {len(amounts)} of {len(runs)} runs")
    return said


def is_doubtful(runs: Sequence[Run]) -> bool:
    """Whether half of the runs or more were disturbed: their median is then not to be trusted."""
    return 2 * sum(bool(disturbances(run)) for run in runs) >= len(runs) > 0


def drift(records: Sequence[Record]) -> list[str]:
    """A sentence for each session whose sentinel became slower or faster."""
    by_series: dict[tuple[str, str | None], list[Run]] = {}
    for record in records:
        if record.run.status == OK and not record.run.warmup:
            by_series.setdefault((record.session, record.run.variant), []).append(record.run)
    said = []
    for (_, variant), runs in by_series.items():
        times = [run.noise.sentinel_after_ns for run in runs if run.noise and run.noise.sentinel_after_ns]
        change, chance = stats.trend(times)
        if abs(change - 1) > DRIFT and chance < DRIFT_CHANCE:
            word = "slower" if change > 1 else "faster"
            times_word = f"{change:.2f}x" if change > 1 else f"{1 / change:.2f}x"
            said.append(
                f"{f'{variant}: the' if variant else 'The'} machine became {word} meanwhile: "
                f"the same short decode, timed after each of {len(times)} runs, was "
                f"{times_word} as {'slow' if change > 1 else 'fast'} at the end as at the beginning."
            )
    return said
