"""Joules and watts of a run's phases, from what counters of energy counted while it lasted.

A counter is read ten times a second, together with the other samples of noise, so a phase begins and ends between two
readings. Between two readings that differ the power is taken as constant. Where it changes there from P to Q watts, as
it does where a phase ends, the joules up to that change are wrong by at most h * |P - Q| / 4, h being the seconds
between the readings (most if it is half way). So are those of a phase, at its beginning and at its end. A counter shows
its latest update, which is up to u seconds old: that adds at most u * power at each end. (u is about 1 ms of RAPL, 20
to 100 ms of NVML, seconds of a battery.) Therefore a phase in which a counter was not seen to move FEWEST_UPDATES times
has no joules.

Joules are those of whole parts of the machine (packages, memory, graphics cards, or the laptop), with everything that
ran on them, and with what they draw when idle. `above_idle` takes the latter away, where it is known. Of a run on
devices of other machines only this machine's joules are known.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from lab.core import phases
from lab.core.noise import BATTERY, DRAM, GPU, PACKAGE, EnergyCounter
from lab.core.record import Record

FIGURES = (
    "prefill_j",
    "decode_j_per_token",
    "prefill_w",
    "decode_w",
    "idle_w",
    "prefill_above_idle_j",
    "decode_above_idle_j_per_token",
)
"""Of a run. Prefill is that of the whole prompt; a decoded token is one after the first, which comes out of prefill."""

COMPARED = ("prefill_j", "decode_j_per_token")
"""Those by which setups are compared."""

FEWEST_UPDATES = 4
"""So often a counter must have moved during a phase."""

ROUNDING_MS = 1.0
"""Times of samples are whole milliseconds: a run may seem to end so long after the last one."""


def used_mj(readings: Sequence[int | None], mj_per_unit: float, wraps_at: int | None) -> tuple[int, ...] | None:
    """Millijoules from each reading of a counter to the next.

    A counter that falls has begun again after `wraps_at`; one that does not wrap was set back. None where that
    happened, and where a reading is unknown. Rounding does not add up: it is that of the sum so far.
    """
    units = 0
    sums = [0]
    for before, after in itertools.pairwise(readings):
        if before is None or after is None:
            return None
        step = after - before
        if step < 0:
            step += wraps_at or 0
        if step < 0:
            return None
        units += step
        sums.append(round(units * mj_per_unit))
    return tuple(after - before for before, after in itertools.pairwise(sums))


def between_j(at_ms: Sequence[int], column_mj: Sequence[int], start_ms: float, end_ms: float) -> float | None:
    """Joules between two times, of a counter's column of samples taken at `at_ms`; the first reading was at 0.

    None where the counter moved less than FEWEST_UPDATES times between them, or where they are not within the samples.
    """
    moved = [mj > 0 for mj in column_mj]
    n_updates = sum(start_ms < at <= end_ms for at in itertools.compress(at_ms, moved))
    if n_updates < FEWEST_UPDATES or start_ms < 0 or end_ms > at_ms[-1] + ROUNDING_MS:
        return None
    moved[-1] = True  # what the last reading shows is all that is known of the time after the last update
    times = [0, *itertools.compress(at_ms, moved)]
    sums = [0, *itertools.compress(itertools.accumulate(column_mj), moved)]
    return (_interpolated(times, sums, end_ms) - _interpolated(times, sums, start_ms)) / 1e3


def _interpolated(times: Sequence[int], sums: Sequence[int], at: float) -> float:
    right = min(bisect.bisect_left(times, at), len(times) - 1)
    left = max(0, right - 1)
    width = times[right] - times[left]
    share = min(1.0, (at - times[left]) / width) if width > 0 else 1.0
    return sums[left] + share * (sums[right] - sums[left])


def counters_of(record: Record) -> tuple[EnergyCounter, ...]:
    """The counters whose sum is the energy of a run; none of them covers what another one covers.

    Packages, memory and, where the build can compute on one, graphics cards; the battery (which feeds all of them)
    where none of these could be read.
    """
    energy = None if record.run.noise is None else record.run.noise.energy
    if energy is None:
        return ()
    can_offload = any(device.type in ("gpu", "igpu") for device in record.machine.devices)
    chips = (PACKAGE, DRAM, GPU) if can_offload else (PACKAGE, DRAM)
    of_chips = tuple(counter for counter in energy.counters if counter.covers in chips)
    return of_chips or tuple(counter for counter in energy.counters if counter.covers == BATTERY)


def source(record: Record) -> str | None:
    """What the joules of a run are of, such as "package + dram" or "battery"; None where no counter was read."""
    covered = {counter.covers for counter in counters_of(record)}
    return " + ".join(kind for kind in (PACKAGE, DRAM, GPU, BATTERY) if kind in covered) or None


def figures(record: Record) -> dict[str, float]:
    """The FIGURES of a plain run that are known. Sweeps and experiments, whose phases alternate, have none."""
    run, counters = record.run, counters_of(record)
    if not counters or run.lever is not None or run.every is not None:
        return {}
    idle_w = [counter.idle_w for counter in counters if counter.idle_w is not None]
    idle = sum(idle_w) if len(idle_w) == len(counters) else None
    known = {} if idle is None else {"idle_w": idle}
    prefill, first, last = phases.prefill_ns(run), phases.ttft_ns(run), phases.e2e_ns(run)
    if prefill and (joules := _joules(record, counters, 0, prefill)) is not None:
        known |= {"prefill_j": joules, "prefill_w": joules / (prefill / 1e9)}
        if idle is not None:
            known["prefill_above_idle_j"] = joules - idle * prefill / 1e9
    n_tokens = run.n_gen - 1
    if first is None or last is None or n_tokens < 1 or last <= first:
        return known
    if (joules := _joules(record, counters, first, last)) is not None:
        known |= {"decode_j_per_token": joules / n_tokens, "decode_w": joules / ((last - first) / 1e9)}
        if idle is not None:
            known["decode_above_idle_j_per_token"] = (joules - idle * (last - first) / 1e9) / n_tokens
    return known


def _joules(record: Record, counters: Sequence[EnergyCounter], start_ns: int, end_ns: int) -> float | None:
    """The sum of all counters between two times of a run's steps; None where it is not known of one of them."""
    noise = record.run.noise
    if noise is None or noise.samples is None or noise.energy is None or noise.energy.first_start_ms is None:
        return None
    start_ms, end_ms = (noise.energy.first_start_ms + ns / 1e6 for ns in (start_ns, end_ns))
    parts = [between_j(noise.samples.at_ms, counter.used_mj, start_ms, end_ms) for counter in counters]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
