"""What one busy program of another terminal, service or container does to decode, and its cure.

Linux shares processor time among sessions and control groups first. A planted neighbour of another
one keeps a core busy for the seconds of two measurements.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from lab.core import script as scripts
from lab.core.asked_settings import DEFAULT
from lab.core.record import DECODE
from lab.features.doctor.checks import FINE, LOOK, Check
from lab.process.setup import BOUNDED_SPINS
from lab.process.wire import Progress
from lab.process.worker import Worker, WorkerDied
from lab.runner import disturbances, neighbours
from lab.runner.cases import Plan
from lab.runner.progress import ShowStatus, Status
from lab.show.wording import digits

MOST_S = 2.0  # of a measurement
N_GEN = 400
HARM = 4.0  # times slower, from which the neighbour is worth a look
NAME = "beside others"


@dataclass(frozen=True)
class Rates:
    """Tokens per second of decode, quiet and beside one busy program."""

    quiet: float
    beside: float
    quiet_bounded: float
    beside_bounded: float


def examine(plan: Plan, watch: ShowStatus) -> list[Check]:
    """The check; none where the CPU's threads need not wait for each other, or not on Linux."""
    n_busy = disturbances.busy_threads(plan.settings, plan.model)
    if sys.platform != "linux" or n_busy < 2:
        return []
    return [check(rates(plan, watch))]


def rates(plan: Plan, watch: ShowStatus, most_s: float = MOST_S) -> Rates:
    """The rates with the default and with few spins, each measured for up to `most_s`."""
    tps: dict[tuple[int, int | str], float] = {}
    for n_programs in (0, 1):
        with _apart(n_programs):
            for wait in (DEFAULT, BOUNDED_SPINS):
                name = "one busy program" if n_programs else "nothing"
                watch(Status(f"decode beside {name}, --wait {wait}"))
                tps[n_programs, wait] = decode_tps(plan, wait, most_s)
    return Rates(
        quiet=tps[0, DEFAULT],
        beside=tps[1, DEFAULT],
        quiet_bounded=tps[0, BOUNDED_SPINS],
        beside_bounded=tps[1, BOUNDED_SPINS],
    )


@contextmanager
def _apart(n: int) -> Iterator[None]:
    """Busy programs in a control group, or without the right to make one in another session."""
    try:
        with neighbours.planted(n, neighbours.GROUP):
            yield
    except neighbours.NoPlace:
        with neighbours.planted(n, neighbours.OTHER_SESSION):
            yield


def decode_tps(plan: Plan, wait: int | str, most_s: float) -> float:
    """Tokens per second of up to `most_s` of decode, in a process of its own."""
    seen: list[tuple[float, int]] = []  # when how many tokens were chosen

    def look(progress: Progress) -> None:
        if progress.token_ids:
            seen.append((time.monotonic(), len(progress.token_ids)))

    with Worker() as worker:
        worker.use(dataclasses.replace(plan.setup, wait=wait))
        vocabulary = worker.load(plan.file.path, plan.settings)
        worker.new_context(dataclasses.replace(plan.settings, n_ctx=N_GEN + 1))
        script = scripts.run([vocabulary.bos or 0], N_GEN, 1)
        began = time.monotonic()
        with suppress(WorkerDied), worker.ended_after(most_s):
            steps = worker.run(script, look).steps
            times_ns = [
                end - start
                for kind, start, end in zip(
                    steps.kind, steps.start_ns, steps.end_ns, strict=True
                )
                if kind == DECODE
            ]
            return 1e9 * len(times_ns) / sum(times_ns)
    n_chosen = seen[-1][1] if seen else 1  # at most one, if none was seen
    return n_chosen / (time.monotonic() - began)


def check(rates: Rates) -> Check:
    """The verdict: the harm of a neighbour, and what few spins save and cost."""
    figure = f"decode {digits(rates.quiet)}, beside one busy program {digits(rates.beside)}"
    command = f"GOMP_SPINCOUNT={BOUNDED_SPINS} llama-server ...    (--wait {BOUNDED_SPINS})"
    if rates.quiet * HARM < rates.quiet_bounded:
        sentence = (
            f"Other programs slow decode now: {digits(rates.quiet)} tokens/s; with "
            f"GOMP_SPINCOUNT={BOUNDED_SPINS} {digits(rates.quiet_bounded)}."
        )
        return Check(NAME, f"{figure} tokens/s", LOOK, sentence, command)
    if rates.beside * HARM >= rates.quiet:
        return Check(NAME, f"{figure} tokens/s", FINE)
    cost = 1 - rates.quiet_bounded / rates.quiet
    price = f"{cost:.0%}".replace("%", " %") + " slower when quiet"
    if cost < 0.01:
        price = "as fast when quiet"
    sentence = (
        f"Beside one busy program of another terminal, service or container decode falls from "
        f"{digits(rates.quiet)} to {digits(rates.beside)} tokens/s; with "
        f"GOMP_SPINCOUNT={BOUNDED_SPINS} to {digits(rates.beside_bounded)} ({price})."
    )
    return Check(NAME, f"{figure} tokens/s", LOOK, sentence, command)
