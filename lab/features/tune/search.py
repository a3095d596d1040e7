"""The search of `lab tune`: each setting alone, then the most promising combinations, in blocks with the default.

A *choice* is the settings in which a combination differs from the default. A request has two phases, prefill and
decode, and a setting may influence one of them or both. For each phase the logarithm of the time is

    speed of the machine in this block + effects of settings + effects of pairs of settings + noise

Least squares find these effects from all runs; small ones are preferred, as the standard deviations below say. A block
measures the choice that is expected to be the fastest, and new ones that may be faster.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

Choice = tuple[tuple[str, Any], ...]  # the settings that differ from the default, by name; empty: the default
SINGLE, PAIR, BLOCK = 0.3, 0.12, 1.0
"""Expected standard deviations, in logarithms: of the effect of a setting, of a pair, and of the speed in a block."""

NOISE, DISTURBED, LEAST_NOISE, MOST_NOISE, NOISE_RUNS = 0.02, 0.3, 0.004, 0.3, 2
"""Those of a run before it is known, and of a disturbed run; bounds; how many runs NOISE counts for."""

ALONE = {"mmap"}  # settings whose effect does not depend on the others'
PER_BLOCK, ENOUGH = 6, 2
"""Choices in a block besides the default, and runs of the best one among the combinations: then the search ends."""

SIMPLER, UNSURE = 0.01, 0.5
"""A choice with fewer changes wins if it is slower by at most this share. A change is left out, too, if its gain is
smaller than this many standard deviations."""


@dataclass(frozen=True)
class Phase:
    """A part of the time that is minimized: how often it counts, and the settings that do not influence it."""

    name: str
    n: float
    ignored: frozenset[str]

    def part_of(self, choice: Choice) -> Choice:
        """The settings of a choice that influence this phase."""
        return tuple(one for one in choice if one[0] not in self.ignored)


@dataclass(frozen=True)
class Timing:
    """The seconds of each phase of one run."""

    block: int
    choice: Choice
    seconds: Mapping[str, float]
    is_disturbed: bool = False


class Search:
    """The state of a search: `next_block` says what to measure; `timings` and `drop` take what came of it."""

    def __init__(self, choices: Iterable[Choice], of: Sequence[Phase]) -> None:
        self.phases, self.timings, self.dropped = tuple(of), list[Timing](), dict[Choice, str]()
        matters = {one for choice in choices for one in choice if any(phase.part_of((one,)) for phase in of)}
        self.choices = list(dict.fromkeys([(), *(choice for choice in choices if matters.issuperset(choice))]))
        self._n_alone: int | None = None  # runs before the first combination

    @property
    def open(self) -> list[Choice]:
        """The choices that were not dropped, the default first."""
        return [choice for choice in self.choices if choice not in self.dropped]

    def drop(self, choice: Choice, reason: str) -> None:
        """Do not try a choice again, nor choices that contain it."""
        self.dropped |= {other: reason for other in self.open if set(choice) <= set(other)}

    def next_block(self) -> list[Choice]:
        """The choices of the next block, the default first, a disturbed one again; empty if the best is known."""
        n_runs = Counter(one.choice for one in self.timings)
        calm = {one.choice for one in self.timings if not one.is_disturbed}
        tried = {choice for choice, n in n_runs.items() if choice in calm or n > 1}
        if alone := [choice for choice in self.open if len(choice) == 1 and choice not in tried]:
            return [(), *alone[:PER_BLOCK]]
        self._n_alone = len(self.timings) if self._n_alone is None else self._n_alone
        best = self.best()
        if sum(one.choice == best for one in self.timings[self._n_alone :]) >= ENOUGH:
            return []
        ratio, deviation = self.expected(self.open)
        promising = [self.open[i] for i in (ratio - deviation).argsort()]
        wanted = [best, *(choice for choice in promising if choice not in tried and choice != best)]
        return [(), *[choice for choice in wanted if choice][:PER_BLOCK]]

    def best(self) -> Choice:
        """The choice with the least expected time; of nearly equal ones that with the fewest changes."""
        choices, (ratio, deviation) = self.open, self.expected(self.open)
        fastest = min(range(len(choices)), key=lambda i: ratio[i])
        simpler = math.log(1 + SIMPLER)
        spare = {True: max(simpler, UNSURE * deviation[fastest]), False: simpler}  # by whether it is a part of it
        near = (i for i, one in enumerate(choices) if ratio[i] <= ratio[fastest] + spare[{*one} <= {*choices[fastest]}])
        return choices[min(near, key=lambda i: (len(choices[i]), ratio[i]))]

    def default_s(self) -> dict[str, float]:
        """The median seconds of each phase of the default, as often as it counts."""
        own = [one.seconds for one in self.timings if not one.choice]
        known = {phase: [times[phase.name] for times in own if phase.name in times] for phase in self.phases}
        return {phase.name: phase.n * statistics.median(times) for phase, times in known.items() if times}

    def expected(self, choices: Sequence[Choice]) -> tuple[Array, Array]:
        """log(time / the default's time) of choices and its standard deviation; NaN without a run of the default."""
        import numpy as np

        base, unknown = self.default_s(), np.full(len(choices), math.nan)
        if not base:
            return unknown, unknown
        found = [(base[phase.name], *self._effects(phase, choices)) for phase in self.phases if phase.name in base]
        times = sum((base_s * np.exp(mean) for base_s, mean, _ in found), np.zeros(len(choices)))
        variance = sum((base_s * np.exp(mean) / times) ** 2 * own for base_s, mean, own in found)
        return np.log(times / sum(base.values())), np.sqrt(variance)

    def _effects(self, phase: Phase, choices: Sequence[Choice]) -> tuple[Array, Array]:
        """The effects of choices on log(time) of a phase, and their variances, from all runs."""
        import numpy as np

        runs = [one for one in self.timings if phase.name in one.seconds]
        of_all = list[set[Choice]]()
        for own in (phase.part_of(choice) for choice in (*choices, *(run.choice for run in runs))):
            pairs = itertools.combinations((one for one in own if one[0] not in ALONE), 2)
            of_all.append({*((one,) for one in own), *pairs})
        names = list(dict.fromkeys(itertools.chain(*of_all)))
        has = np.array([[name in own for name in names] for own in of_all], float).reshape(len(of_all), len(names))
        wanted, measured = has[: len(choices)], has[len(choices) :]
        blocks = [run.block for run in runs]
        x = np.hstack([measured, np.equal.outer(blocks, sorted(set(blocks)))])
        y = np.log([run.seconds[phase.name] for run in runs])
        y -= y.mean()
        sizes = [*(SINGLE if len(name) == 1 else PAIR for name in names), *(BLOCK for _ in set(blocks))]
        prior, noise, disturbed = np.diag(np.array(sizes) ** -2.0), NOISE, np.array([one.is_disturbed for one in runs])
        for _ in range(4):  # the noise follows from the fit, and the fit from the noise
            weighted = (x / np.where(disturbed, max(DISTURBED, noise), noise)[:, None] ** 2).T
            covariance = np.linalg.inv(weighted @ x + prior)
            found = covariance @ weighted @ y
            wrong = (y - x @ found)[~disturbed]
            n_free = max(0.0, len(wrong) - float(np.einsum("ij,jk,ki->i", x, covariance, weighted)[~disturbed].sum()))
            seen = min(MOST_NOISE, max(LEAST_NOISE, math.sqrt(wrong @ wrong / n_free))) if n_free > 0.01 else NOISE
            noise = math.sqrt((n_free * seen**2 + NOISE_RUNS * NOISE**2) / (n_free + NOISE_RUNS))
        n = len(names)
        return wanted @ found[:n], np.einsum("ij,jk,ik->i", wanted, covariance[:n, :n], wanted)
