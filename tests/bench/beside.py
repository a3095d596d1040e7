"""What a busy program beside llama.cpp costs, where it runs, and what avoids it.

    python -m tests.bench.beside speed 5           # five interleaved rounds: about 12 minutes
    python -m tests.bench.beside bench 5           # the lab over llama-bench: about 3 minutes
    python -m tests.bench.beside named 20          # 20 sessions of each kind: about 60 minutes

speed: rates of prefill of 128 tokens and decode of 16, quiet and beside one program of the same
session, of another one, and (as root) of another control group; threads that wait by default, with
300 spins, asleep, and one thread less. A phase that takes longer than MOST_S is stopped: the rate
of decode is then that of the tokens so far, that of prefill is 0. bench: the lab and llama-bench,
quiet and beside a program of their session; goals: at most 4 times slower, and equal within 1.3.
named: a pile-up is named in every session that has one, and in none that has none. A session has
one if its tokens take 20 times as long as when quiet.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any

import lab
from lab.core import phases, script as scripts
from lab.core.asked_settings import DEFAULT, SLEEP
from lab.process.setup import BOUNDED_SPINS
from lab.process.wire import Progress
from lab.process.worker import Worker, WorkerDied
from lab.runner import disturbances, machine, neighbours, prompts
from lab.runner.cases import Plan
from lab.runner.plan import make_plan
from tests.bench import llama_bench

QUIET = "quiet"
N_PROMPT = 128
N_GEN = 16
MOST_S = 10.0
PILED_UP = 20.0  # times the quiet time of a token
PLACES = [QUIET, neighbours.SESSION, neighbours.OTHER_SESSION]
if hasattr(os, "geteuid") and os.geteuid() == 0:
    PLACES.append(neighbours.GROUP)

Rates = dict[str, float]


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else "speed"
    n = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    {"speed": speed, "bench": bench, "named": named}[part](n)


@contextmanager
def beside(place: str) -> Iterator[None]:
    """One busy program in a place; none if quiet."""
    if place == QUIET:
        yield
        return
    with neighbours.planted(1, place):
        yield


def ways(n_threads: int) -> dict[str, tuple[int | str, int]]:
    """How to wait, and with how many threads."""
    return {
        "default": (DEFAULT, n_threads),
        f"{BOUNDED_SPINS} spins": (BOUNDED_SPINS, n_threads),
        "sleep": (SLEEP, n_threads),
        "one thread less": (DEFAULT, max(1, n_threads - 1)),
    }


def speed(n_rounds: int) -> None:
    n_threads = machine.default_threads()
    with Worker() as worker:
        plan = make_plan(worker, [N_PROMPT], N_GEN, 1, prompt="random")
    rates: dict[tuple[str, str], list[Rates]] = {}
    cells = [(place, way) for place in PLACES for way in ways(n_threads)]
    for number in range(n_rounds):
        for place, way in random.Random(number).sample(cells, len(cells)):
            with beside(place):
                measured = engine_rates(plan, *ways(n_threads)[way])
            rates.setdefault((place, way), []).append(measured)
            print(number, place, way, in_words(measured), flush=True)
    print(f"\n{plan.machine.cpu}, {n_threads} threads, {n_rounds} rounds, medians, tokens/s")
    print(f"| {'beside':14} | {'wait':15} | prefill | decode |")
    print("| --- | --- | ---: | ---: |")
    for place, way in cells:
        of_cell = rates[place, way]
        prefill = statistics.median(row["prefill"] for row in of_cell)
        decode = statistics.median(row["decode"] for row in of_cell)
        print(f"| {place:14} | {way:15} | {prefill:7.0f} | {decode:6.3g} |")


def in_words(rates: Rates) -> str:
    return ", ".join(f"{name} {rate:.3g}" for name, rate in rates.items())


def engine_rates(plan: Plan, wait: int | str, n_threads: int) -> Rates:
    """The rates of a fresh engine, after a warm-up."""
    settings = dataclasses.replace(
        plan.settings, n_threads=n_threads, n_threads_batch=n_threads
    )
    rates = {}
    for phase, n_prompt, n_gen in (("prefill", N_PROMPT, 1), ("decode", 1, N_GEN + 1)):
        with Worker() as worker:
            worker.use(dataclasses.replace(plan.setup, wait=wait))
            n_vocab = worker.load(plan.file.path, settings).n_vocab
            worker.new_context(settings)
            tokens = prompts.random_ids(n_prompt, n_vocab, None, 1, 0)
            script = scripts.run(tokens, n_gen, settings.n_ubatch)
            rates[phase] = rate(worker, script, n_prompt if phase == "prefill" else N_GEN)
    return rates


def rate(worker: Worker, script: Any, n_tokens: int) -> float:
    """Tokens per second of a phase: the second run, or of the first if that is stopped."""
    tps = 0.0
    for _ in range(2):
        n_done = 0

        def look(progress: Progress) -> None:
            nonlocal n_done
            n_done = max(n_done, len(progress.token_ids) - 1)

        began = time.monotonic()
        with suppress(WorkerDied), worker.ended_after(MOST_S):
            steps = worker.run(script, look).steps
            times = zip(steps.kind, steps.start_ns, steps.ready_ns, strict=True)
            kind = "decode" if "decode" in steps.kind else "prefill"
            ns = sum(ready - start for name, start, ready in times if name == kind)
            tps = 1e9 * n_tokens / ns
            continue
        return n_done / (time.monotonic() - began)
    return tps


def bench(n_rounds: int) -> None:
    llama_bench.program()
    with Worker() as worker:
        plan = make_plan(worker, [N_PROMPT], N_GEN, 1, prompt="random")
    n_threads = plan.settings.n_threads
    decode: dict[tuple[str, str], list[float]] = {}
    for _ in range(n_rounds):
        for place in (QUIET, neighbours.SESSION):
            with beside(place):
                ours = engine_rates(plan, DEFAULT, n_threads)["decode"]
                rows = llama_bench.run(
                    plan.file.path, *f"-p 0 -n {N_GEN} -r 2 -t {n_threads}".split()
                )
            decode.setdefault((place, "lab"), []).append(ours)
            decode.setdefault((place, "llama-bench"), []).append(rows[0]["samples_ts"][-1])
    medians = {cell: statistics.median(values) for cell, values in decode.items()}
    for (place, program), tps in medians.items():
        print(f"{place:14} {program:12} {tps:6.1f} tokens/s")
    slower = medians[QUIET, "lab"] / medians[neighbours.SESSION, "lab"]
    ratio = medians[neighbours.SESSION, "lab"] / medians[neighbours.SESSION, "llama-bench"]
    print(f"beside a program of its session the lab is {slower:.2f} times slower (goal: 4)")
    print(f"and {ratio:.2f} times as fast as llama-bench there (goal: within 1.3)")


def named(n_sessions: int) -> None:
    with TemporaryDirectory() as folder:
        quiet_ns = statistics.median(token_ns(session(QUIET, folder)) for _ in range(3))
        print(f"quiet: {quiet_ns / 1e6:.1f} ms a token")
        counts: dict[tuple[bool, bool], int] = {}
        apart = PLACES[-1]
        for number in range(n_sessions):
            for place in (apart, QUIET if number % 2 else neighbours.SESSION):
                records = session(place, folder)
                has_pile_up = token_ns(records) > PILED_UP * quiet_ns
                causes = map(disturbances.disturbances, records)
                is_named = any(disturbances.PILE_UP in found for found in causes)
                cell = (has_pile_up, is_named)
                counts[cell] = counts.get(cell, 0) + 1
                times = token_ns(records) / quiet_ns
                looks = [r.run.noise and r.run.noise.threads for r in records]
                print(number, place, f"{times:.1f}x, named {is_named}, {looks}", flush=True)
    for has_pile_up, what in ((True, "a pile-up"), (False, "none")):
        n_named = counts.get((has_pile_up, True), 0)
        n_all = n_named + counts.get((has_pile_up, False), 0)
        print(f"{n_all} sessions with {what}: named in {n_named}")


def session(place: str, folder: str) -> Sequence[Any]:
    """The timed runs of a session as a user has it, beside a busy program."""
    with beside(place):
        # The planted program shall look like any other.
        neighbours.pids.clear()
        records = lab.measure("10", 6, 1, wait="default", out=folder)
    return [record for record in records if record.run.is_timed]


def token_ns(records: Sequence[Any]) -> float:
    return statistics.median(phases.tpot_ns(record.run) or 0 for record in records)


if __name__ == "__main__":
    main()
