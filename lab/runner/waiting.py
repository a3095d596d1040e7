"""How the CPU's threads wait for each other, and what that costs beside another program.

A pile-up is a run in which two spinning threads were on one processor nearly all the time, though
each could have had its own. It needs a share of looks that an ordinary neighbour does not reach
(`thread_watch`), and threads that spin: threads that sleep wake each other on one processor, and
that costs little. More threads than processors are the user's choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lab.core.asked_settings import DEFAULT, SLEEP
from lab.core.lists import plural
from lab.core.record import DECODE, Record, Settings, Threads
from lab.process.setup import (
    BOUNDED_SPINS,
    LIBGOMP,
    LIBOMP,
    NO_OPENMP,
    SPINS_PER_MS,
    VCOMP,
)

PILE_UP_SHARE = 0.75  # of the looks at a run; an ordinary neighbour gives 0.45
MISSED_CORES = 0.5  # that threads may lack before the first run
LEAST_LOOKS = 20  # two seconds: a pile-up takes that long for a few tokens
LEAST_COST = 5  # times slower than the fastest step, for a figure in the sentence

NO_EFFECT = {
    NO_OPENMP: "this build of llama.cpp has no OpenMP, and its own threads spin without a limit",
    VCOMP: "the OpenMP runtime of this build (vcomp) documents no variable for it",
}


def warnings(wait: int | str | None, openmp: str | None) -> list[str]:
    """A sentence if `--wait` has no effect, or another one, with the runtime of this build."""
    if wait in (None, DEFAULT):
        return []
    if openmp in NO_EFFECT and (openmp, wait) != (VCOMP, SLEEP):
        advice = "Beside other programs use one thread less: --threads"
        return [f"--wait {wait} has no effect: {NO_EFFECT[openmp]}. {advice}"]
    if openmp == LIBOMP and wait != SLEEP:
        ms = int(wait or 0) // SPINS_PER_MS
        return [f"The OpenMP runtime of this build counts no spins: --wait {wait} is {ms} ms."]
    return []


def spins_long(settings: Settings) -> bool:
    """Whether the CPU's threads spin so long that two of them on one core block each other."""
    wait = settings.thread_wait
    if isinstance(wait, int):
        return wait >= 10 * BOUNDED_SPINS
    return wait != SLEEP


def pile_up_share(record: Record) -> float:
    """The share of looks at a run in which two spinning threads were on one core."""
    noise = record.run.noise
    return share_of_looks(noise.threads if noise else None, record.settings)


def share_of_looks(threads: Threads | None, settings: Settings) -> float:
    """NaN without threads that spin, or too few looks."""
    if threads is None or threads.n_looks < LEAST_LOOKS or not spins_long(settings):
        return math.nan
    return threads.n_shared / threads.n_looks


def before_first_run(
    threads: Threads | None, settings: Settings, n_busy: int, n_cores: float, used: float
) -> str:
    """What another program will do to `n_busy` threads, seen while the model was loaded and warmed
    up; "" if there is none. `used`: the cores that others used of the `n_cores` watched."""
    if n_busy < 2 or not spins_long(settings):
        return ""
    advice = f"{cure(settings)}."
    share = share_of_looks(threads, settings)
    if share >= PILE_UP_SHARE:
        return (
            "Two of llama.cpp's threads take turns on one core beside another program, so every "
            f"step takes many times as long: {advice}"
        )
    if n_cores - used >= n_busy - MISSED_CORES:
        return ""
    n_used = max(1, round(min(used, n_cores)))
    return (
        f"Other programs use about {n_used} of {n_cores:.0f} cores."
        f" {plural(n_busy, 'thread')} of llama.cpp need a core each and spin while they wait, so"
        f" steps can take many times as long: {advice}"
    )


def cost_and_cure(records: Sequence[Record]) -> str:
    """What a pile-up cost these repeats, and what avoids it."""
    decode_ns: list[int] = []
    for record in records:
        steps = record.run.steps
        for kind, start, ready in zip(steps.kind, steps.start_ns, steps.ready_ns, strict=True):
            if kind == DECODE:
                decode_ns.append(ready - start)
    cost = ""
    if decode_ns:
        times = sum(decode_ns) / len(decode_ns) / max(1, min(decode_ns))
        if times >= LEAST_COST:
            cost = f": at least {times:.0f} times slower than its fastest step"
    return f"{cost}; {cure(records[0].settings)}"


def cure(settings: Settings) -> str:
    """What avoids a pile-up."""
    if settings.openmp in (LIBGOMP, None):
        spins = BOUNDED_SPINS
        return f"--wait {spins} (GOMP_SPINCOUNT={spins} for llama-server) avoids it"
    if settings.openmp == LIBOMP:
        return f"--wait {SLEEP} (KMP_BLOCKTIME=0 for llama-server) avoids it"
    return f"--threads {max(1, settings.n_threads - 1)} avoids it"
