"""What the search measures next.

The search measures each setting alone, then the most promising combinations, in blocks with the
default. A *choice* is the settings in which a combination differs from the default. A request has
two phases, prefill and decode, and a setting may influence one of them or both. A block measures
the choice that is expected to be the fastest, and new ones that may be faster (effects.py says what
is expected).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lab.features.tune.choices import NO_CHANGE, Choice, Timing, TunedPhase
from lab.features.tune.effects import effects

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

PER_BLOCK = 6  # choices in a block besides the default
ENOUGH = 2  # runs of the best choice that end the search
SIMPLER = 0.01  # a choice with fewer changes wins if it is slower by at most this share
UNSURE = 0.5  # standard deviations: a change with a smaller gain is left out, too


class Search:
    """The state of a search: `next_block` says what to measure; `timings`, `drop` take results."""

    def __init__(self, choices: Iterable[Choice], phases: Sequence[TunedPhase]) -> None:
        self.phases = tuple(phases)
        self.timings: list[Timing] = []
        self.dropped: dict[Choice, str] = {}
        self.choices: list[Choice] = [NO_CHANGE]
        for choice in choices:
            if choice not in self.choices and all(map(self._matters, choice)):
                self.choices.append(choice)
        self._n_alone: int | None = None  # runs before the first combination

    def _matters(self, setting: tuple[str, object]) -> bool:
        return any(setting[0] not in phase.ignored for phase in self.phases)

    @property
    def open(self) -> list[Choice]:
        """The choices that were not dropped, the default first."""
        return [choice for choice in self.choices if choice not in self.dropped]

    def drop(self, choice: Choice, reason: str) -> None:
        """Do not try a choice again, nor choices that contain it."""
        for candidate in self.open:
            if set(choice) <= set(candidate):
                self.dropped[candidate] = reason

    def next_block(self) -> list[Choice]:
        """The choices of the next block, the default first; empty if the best is known.

        A choice whose only run was disturbed is tried again.
        """
        tried = self._tried()
        alone = [choice for choice in self.open if len(choice) == 1 and choice not in tried]
        if alone:
            return [NO_CHANGE, *alone[:PER_BLOCK]]
        if self._n_alone is None:
            self._n_alone = len(self.timings)
        best = self.best()
        later = [timing.choice for timing in self.timings[self._n_alone :]]
        if later.count(best) >= ENOUGH:
            return []
        ratio, deviation = self.expected(self.open)
        candidates = [best]
        for i in (ratio - deviation).argsort():  # the most promising first
            choice = self.open[i]
            if choice not in tried and choice != best:
                candidates.append(choice)
        changes = [choice for choice in candidates if choice]
        return [NO_CHANGE, *changes[:PER_BLOCK]]

    def _tried(self) -> set[Choice]:
        """The choices with a run that was not disturbed, or with several runs."""
        n_runs = Counter(timing.choice for timing in self.timings)
        tried = {choice for choice, n in n_runs.items() if n > 1}
        for timing in self.timings:
            if not timing.is_disturbed:
                tried.add(timing.choice)
        return tried

    def best(self) -> Choice:
        """The choice with the least expected time; of nearly equal ones, fewest changes."""
        choices = self.open
        ratio, deviation = self.expected(choices)
        fastest = min(range(len(choices)), key=lambda i: ratio[i])
        simpler = math.log(1 + SIMPLER)
        near = []
        for i, choice in enumerate(choices):
            spare = simpler
            if set(choice) <= set(choices[fastest]):
                spare = max(simpler, UNSURE * deviation[fastest])
            if ratio[i] <= ratio[fastest] + spare:
                near.append(i)
        return choices[min(near, key=lambda i: (len(choices[i]), ratio[i]))]

    def default_s(self) -> dict[str, float]:
        """The median seconds of each phase of the default, as often as it counts."""
        medians = {}
        for phase in self.phases:
            times = []
            for timing in self.timings:
                if not timing.choice and phase.name in timing.seconds:
                    times.append(timing.seconds[phase.name])
            if times:
                medians[phase.name] = phase.n * statistics.median(times)
        return medians

    def expected(self, choices: Sequence[Choice]) -> tuple[Array, Array]:
        """log(time / the default's time) of choices, and its standard deviation.

        NaN without a run of the default.
        """
        import numpy as np

        default_s = self.default_s()
        if not default_s:
            unknown = np.full(len(choices), math.nan)
            return unknown, unknown
        times = np.zeros(len(choices))
        spreads = np.zeros(len(choices))
        for phase in self.phases:
            if phase.name in default_s:
                mean, variance = effects(phase, self.timings, choices)
                times_of_phase = default_s[phase.name] * np.exp(mean)
                times = times + times_of_phase
                spreads = spreads + times_of_phase**2 * variance
        return np.log(times / sum(default_s.values())), np.sqrt(spreads) / times
