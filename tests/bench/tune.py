"""Does lab tune find the best settings, and nothing where there is nothing to find?

    python3 -m uv run python -m tests.bench.tune planted        # made-up machines, a minute
    python3 -m uv run python -m tests.bench.tune equal          # 20 sessions here, all settings equal, 15 minutes

`planted`: settings and pairs of settings have random effects of 15 and 8 %; the search has to end within 2 % of the
best of 192 choices in 18 of 20. `equal`: settings that change nothing for the workload; a gain may be recommended in at
most 1 of 20.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import tempfile
from typing import Any

from lab.features.tune import tuning
from lab.features.tune.result import (
    ALONE,
    DECODE,
    PREFILL,
    REQUEST,
    Choice,
    Search,
    Timing,
    phases_of,
)

N_PLANTED = 20
N_EQUAL = 20
WITHIN = 0.02
SPACE: dict[str, list[Any]] = {
    "threads": [1],
    "threads_batch": [1],
    "ubatch": [64, 128, 256, 1024, 2048],
    "flash_attn": ["off"],
    "repack": [False],
    "mmap": [False],
}


def every(space: dict[str, list[Any]]) -> list[Choice]:
    """All combinations."""
    values = itertools.product(*([None, *values] for values in space.values()))
    return [
        tuple(sorted((n, v) for n, v in zip(space, own, strict=True) if v is not None))
        for own in values
    ]


def planted(seed: int, noise: float) -> tuple[float, int]:
    """The loss of a search on a made-up machine, and its runs."""
    chance = random.Random(seed)
    choices = every(SPACE)
    of = phases_of(REQUEST, 300, False)
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
            effect += sum(
                pairs.get((phase.name, frozenset(two)), 0.0)
                for two in itertools.combinations(own, 2)
            )
            made[phase.name] = base[phase.name] * math.exp(effect)
        return made

    def total(choice: Choice) -> float:
        return sum(phase.n * seconds(choice)[phase.name] for phase in of)

    search = Search(choices, of)
    for block in range(40):
        mood = math.exp(chance.gauss(0, 0.03))
        for choice in search.next_block():
            own = {
                name: mood * s * math.exp(chance.gauss(0, noise))
                for name, s in seconds(choice).items()
            }
            search.timings.append(Timing(block, choice, own))
    return total(search.best()) / min(map(total, choices)) - 1, len(search.timings)


def bench_planted() -> None:
    n_choices = len(every(SPACE))
    print(
        f"{n_choices} choices, of which the search has to find one within {WITHIN:.0%} of the best"
    )
    for noise in (0.005, 0.01, 0.02, 0.04):
        found = [planted(seed, noise) for seed in range(N_PLANTED)]
        n_good = sum(loss <= WITHIN for loss, _ in found)
        runs = statistics.median(n for _, n in found)
        worst = max(loss for loss, _ in found)
        print(
            f"noise {noise:.1%}: {n_good} of {N_PLANTED}, worst {worst:.1%}; median {runs:.0f} runs"
        )


def bench_equal() -> None:
    """Values of ubatch above the prompt's length change nothing."""
    tuning._space = lambda *_: {"ubatch": [64, 128, 256, 1024]}
    n_recommended = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, N_EQUAL + 1):
            found = tuning.tune(32, 8, budget="25s", seed=seed, out=folder)
            n_recommended += found.is_recommended
            gain = (
                found.gain
                and f"{found.gain.estimate:.3f} ({found.gain.low:.3f} to {found.gain.high:.3f})"
            )
            print(
                f"session {seed}: {found.choice}, gain {gain}, {found.n_confirmed} blocks",
                flush=True,
            )
    print(f"recommended in {n_recommended} of {N_EQUAL} sessions; at most 1 wanted")


def main() -> None:
    {"planted": bench_planted, "equal": bench_equal}[(sys.argv[1:] or ["planted"])[0]]()


if __name__ == "__main__":
    main()
