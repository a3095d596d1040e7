"""Does lab tune find the best settings, and nothing where there is nothing to find?

    python -m tests.bench.tune planted        # made-up machines, a minute
    python -m tests.bench.tune equal          # 20 sessions here, all settings equal, 15 minutes

`planted`: settings and pairs of settings have random effects of 15 and 8 %; the search has to end
within 2 % of the best of 192 choices in 18 of 20. `equal`: settings that change nothing for the
workload; a gain may be recommended in at most 1 of 20.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import tempfile
from typing import Any

from lab.features.tune import measuring, planning
from lab.features.tune.choices import DECODE, PREFILL, Choice, Timing, TunedPhase, phases_of
from lab.features.tune.effects import ALONE
from lab.features.tune.lines import REQUEST
from lab.features.tune.search import Search

N_PLANTED = 20
N_EQUAL = 20
WITHIN = 0.02
BASE_S = {PREFILL: 6.0, DECODE: 0.01}
SPACE: dict[str, list[Any]] = {
    "threads": [1],
    "threads_batch": [1],
    "ubatch": [64, 128, 256, 1024, 2048],
    "flash_attn": ["off"],
    "repack": [False],
    "mmap": [False],
}


def all_choices(space: dict[str, list[Any]]) -> list[Choice]:
    """All combinations."""
    choices = []
    for values in itertools.product(*([None, *values] for values in space.values())):
        settings = zip(space, values, strict=True)
        choices.append(
            tuple(sorted(setting for setting in settings if setting[1] is not None))
        )
    return choices


class Machine:
    """A made-up machine: the effects of settings and pairs on the time of each phase."""

    def __init__(
        self,
        chance: random.Random,
        phases: tuple[TunedPhase, ...],
    ) -> None:
        self.phases = phases
        settings = []
        for name, values in SPACE.items():
            settings += [(name, value) for value in values]
        self.effects: dict[tuple[str, Any], float] = {}
        for phase in phases:
            for setting in settings:
                self.effects[phase.name, setting] = chance.gauss(0.08, 0.15)
            for pair in itertools.combinations(settings, 2):
                names = {name for name, _ in pair}
                if len(names) == 2 and not names & ALONE:
                    self.effects[phase.name, frozenset(pair)] = chance.gauss(0, 0.08)

    def seconds(self, choice: Choice) -> dict[str, float]:
        times = {}
        for phase in self.phases:
            settings = phase.part_of(choice)
            effect = sum(self.effects[phase.name, setting] for setting in settings)
            for pair in itertools.combinations(settings, 2):
                effect += self.effects.get((phase.name, frozenset(pair)), 0.0)
            times[phase.name] = BASE_S[phase.name] * math.exp(effect)
        return times

    def total_s(self, choice: Choice) -> float:
        times = self.seconds(choice)
        return sum(phase.n * times[phase.name] for phase in self.phases)


def planted(seed: int, noise: float) -> tuple[float, int]:
    """The loss of a search on a made-up machine, and its runs."""
    chance = random.Random(seed)
    choices = all_choices(SPACE)
    phases = phases_of(REQUEST, 300, False)
    machine = Machine(chance, phases)
    search = Search(choices, phases)
    for block in range(40):
        mood = math.exp(chance.gauss(0, 0.03))
        for choice in search.next_block():
            times = {}
            for name, seconds in machine.seconds(choice).items():
                times[name] = mood * seconds * math.exp(chance.gauss(0, noise))
            search.timings.append(Timing(block, choice, times))
    fastest_s = min(map(machine.total_s, choices))
    return machine.total_s(search.best()) / fastest_s - 1, len(search.timings)


def bench_planted() -> None:
    n_choices = len(all_choices(SPACE))
    print(f"{n_choices} choices; the search has to find one within {WITHIN:.0%} of the best")
    for noise in (0.005, 0.01, 0.02, 0.04):
        losses = []
        counts = []
        for seed in range(N_PLANTED):
            loss, n_runs = planted(seed, noise)
            losses.append(loss)
            counts.append(n_runs)
        n_good = len([loss for loss in losses if loss <= WITHIN])
        runs = f"median {statistics.median(counts):.0f} runs"
        print(f"noise {noise:.1%}: {n_good} of {N_PLANTED}, worst {max(losses):.1%}; {runs}")


def bench_equal() -> None:
    """Values of ubatch above the prompt's length change nothing."""
    planning.space = lambda *_: {"ubatch": [64, 128, 256, 1024]}
    n_recommended = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, N_EQUAL + 1):
            result = measuring.tune(
                32,
                8,
                budget="25s",
                seed=seed,
                out=folder,
            )
            if result.is_recommended:
                n_recommended += 1
            gain = "none"
            if result.gain:
                gain = f"{result.gain.estimate:.3f} ({result.gain.low:.3f}-{result.gain.high:.3f})"
            what = f"{result.choice}, gain {gain}, {result.n_confirmed} blocks"
            print(f"session {seed}: {what}", flush=True)
    print(f"recommended in {n_recommended} of {N_EQUAL} sessions; at most 1 is right")


BENCHMARKS = {"planted": bench_planted, "equal": bench_equal}

if __name__ == "__main__":
    name, *_ = sys.argv[1:] or ["planted"]
    BENCHMARKS[name]()
