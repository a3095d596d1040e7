"""Does lab tune find the best settings, and nothing where there is nothing to find?

    python3 -m uv run python -m tests.bench.tune planted        # made-up machines, a minute
    python3 -m uv run python -m tests.bench.tune equal          # 20 sessions here, all settings equal, 15 minutes
    python3 -m uv run python -m tests.bench.tune search [CASE]  # against an exhaustive search, 5 minutes a case

`planted`: settings and pairs of settings have random effects of 15 and 8 %; the search has to end within 2 % of the
best of 192 choices in 18 of 20. `equal`: settings that change nothing for the workload; a gain may be recommended in at
most 1 of 20. `search`: every choice is measured ROUNDS times in fresh engines; then lab tune gets a tenth of that time.
Its winner and the best of the exhaustive search are measured side by side: the winner may be 2 % slower.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lab.core import stats
from lab.core.record import Record
from lab.errors import LabError
from lab.features.tune import tuning
from lab.features.tune.result import DECODE, PREFILL, REQUEST, SEARCH, phases_of, timing, tuned
from lab.features.tune.search import ALONE, Choice, Search, Timing
from lab.features.tune.tuning import TunePlan, variant
from lab.process.worker import Worker

N_PLANTED, N_EQUAL, ROUNDS, N_BLOCKS = 20, 20, 3, 6
WITHIN = 0.02
SPACE: dict[str, list[Any]] = {
    "threads": [1],
    "threads_batch": [1],
    "ubatch": [64, 128, 256, 1024, 2048],
    "flash_attn": ["off"],
    "repack": [False],
    "mmap": [False],
}
CASES: dict[str, dict[str, Any]] = {
    "short chat": {"prompt_len": 64, "gen": 32},
    "long document": {"prompt_len": 384, "gen": 8, "threads": 2},
    "many users": {"prompt_len": 64, "gen": 24, "users": 4, "goal": "throughput", "repack": True},
    "long answer": {"prompt_len": 32, "gen": 128},
}
"""Workloads, with settings that stay fixed so that an exhaustive search takes minutes; mmap, which changes nothing
here, always is."""


def every(space: dict[str, list[Any]]) -> list[Choice]:
    """All combinations."""
    values = itertools.product(*([None, *values] for values in space.values()))
    return [tuple(sorted((n, v) for n, v in zip(space, own, strict=True) if v is not None)) for own in values]


def planted(seed: int, noise: float) -> tuple[float, int]:
    """The loss of a search on a made-up machine, and its runs."""
    chance, choices, of = random.Random(seed), every(SPACE), phases_of(REQUEST, 300, False)
    base = {PREFILL: 6.0, DECODE: 0.01}
    values = [(name, value) for name, values in SPACE.items() for value in values]
    single = {(phase.name, one): chance.gauss(0.08, 0.15) for phase in of for one in values}
    pairs = {
        (phase.name, frozenset(two)): chance.gauss(0, 0.08)
        for phase in of
        for two in itertools.combinations(values, 2)
        if two[0][0] != two[1][0] and not {two[0][0], two[1][0]} & ALONE
    }

    def seconds(choice: Choice) -> dict[str, float]:
        made = {}
        for phase in of:
            own = phase.part_of(choice)
            effect = sum(single[phase.name, one] for one in own)
            effect += sum(pairs.get((phase.name, frozenset(two)), 0.0) for two in itertools.combinations(own, 2))
            made[phase.name] = base[phase.name] * math.exp(effect)
        return made

    def total(choice: Choice) -> float:
        return sum(phase.n * seconds(choice)[phase.name] for phase in of)

    search = Search(choices, of)
    for block in range(40):
        mood = math.exp(chance.gauss(0, 0.03))
        for choice in search.next_block():
            own = {name: mood * s * math.exp(chance.gauss(0, noise)) for name, s in seconds(choice).items()}
            search.learn(Timing(block, choice, own))
    return total(search.best()) / min(map(total, choices)) - 1, len(search.timings)


def bench_planted() -> None:
    n_choices = len(every(SPACE))
    print(f"{n_choices} choices, of which the search has to find one within {WITHIN:.0%} of the best")
    for noise in (0.005, 0.01, 0.02, 0.04):
        found = [planted(seed, noise) for seed in range(N_PLANTED)]
        n_good, runs = sum(loss <= WITHIN for loss, _ in found), statistics.median(n for _, n in found)
        worst = max(loss for loss, _ in found)
        print(
            f"noise {noise:.1%}: {n_good} of {N_PLANTED}, worst {worst:.1%}; median {runs:.0f} runs, "
            f"{runs / (n_choices * ROUNDS):.1%} of an exhaustive search in {ROUNDS} rounds"
        )


def bench_equal() -> None:
    """Values of ubatch above the prompt's length change nothing."""
    tuning._space = lambda *_: {"ubatch": [64, 128, 256, 1024]}
    n_recommended = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, N_EQUAL + 1):
            found = tuning.tune(32, 8, budget="25s", seed=seed, out=folder)
            n_recommended += found.is_recommended
            gain = found.gain and f"{found.gain.estimate:.3f} ({found.gain.low:.3f} to {found.gain.high:.3f})"
            print(f"session {seed}: {found.choice}, gain {gain}, {found.n_confirmed} blocks", flush=True)
    print(f"recommended in {n_recommended} of {N_EQUAL} sessions; at most 1 wanted")


def runs_of(plan: TunePlan, worker: Worker, choices: dict[str, Choice], folder: Path, block: int) -> list[Record]:
    """One block with a run of each choice, each in a fresh engine; choices that cannot run are left out."""
    run = tuning.Session(plan, worker, folder / "exhaustive.jsonl", lambda status: None)
    run.n_blocks = block
    made: list[Record] = []
    for name, choice in random.Random(block).sample(list(choices.items()), len(choices)):
        with contextlib.suppress(LabError):
            made += run.block({name: choice}, SEARCH)
    return [record for record in made if record.run.is_timed]


def seconds(plan: TunePlan, record: Record) -> float:
    found = timing(record, ())
    assert found
    return sum(phase.n * found.seconds[phase.name] for phase in plan.phases)


def bench_search(case: str) -> None:
    with tempfile.TemporaryDirectory() as name, Worker() as worker:
        folder = Path(name)
        asked = {"mmap": True, **CASES[case]}
        plan = tuning.plan(worker, **asked)
        choices = {variant(choice, plan.default): choice for choice in [(), *plan.choices]}
        begun = time.monotonic()
        times: dict[str, list[float]] = {}
        for block in range(ROUNDS):
            for record in runs_of(plan, worker, choices, folder, block):
                times.setdefault(record.run.variant or "", []).append(seconds(plan, record))
        exhaustive_s = time.monotonic() - begun
        best = min(times, key=lambda name: statistics.median(times[name]))
        print(f"{case}: {len(times)} of {len(choices)} choices can run; {exhaustive_s:.0f} s in {ROUNDS} rounds")
        print(f"  exhaustive: {best}, {statistics.median(times['default']) / statistics.median(times[best]):.2f}x")
        begun = time.monotonic()
        shorter = dataclasses.replace(plan, budget_s=exhaustive_s / 10)
        records = list(tuning.Session(shorter, worker, folder / "tune.jsonl", lambda status: None).confirmed())
        tune_s, found = time.monotonic() - begun, tuned(records)
        assert found
        n_search = sum(bool(r.run.tuning and r.run.tuning.stage == SEARCH and r.run.is_timed) for r in records)
        gain = found.gain and f"{found.gain.estimate:.2f}x ({found.gain.low:.2f} to {found.gain.high:.2f})"
        won = variant(found.choice, plan.default)
        print(f"  lab tune: {won}, {gain}; {tune_s:.0f} s ({tune_s / exhaustive_s:.0%}), {n_search} runs of the search")
        if won != best:
            both = {name: choices[name] for name in (best, won)}
            ratios = []
            for block in range(N_BLOCKS):
                own = {
                    record.run.variant: seconds(plan, record) for record in runs_of(plan, worker, both, folder, block)
                }
                ratios.append(own[won] / own[best])
            interval = stats.log_interval(ratios)
            middle = statistics.geometric_mean(ratios)
            ends = interval and f"{interval.low:.3f} to {interval.high:.3f}"
            print(f"  the winner's time over the exhaustive best's: {middle:.3f} ({ends}), {N_BLOCKS} blocks")
        print(flush=True)


def main() -> None:
    what, *cases = sys.argv[1:] or ["planted"]
    if what == "planted":
        bench_planted()
    elif what == "equal":
        bench_equal()
    else:
        for case in cases or CASES:
            bench_search(case)


if __name__ == "__main__":
    main()
