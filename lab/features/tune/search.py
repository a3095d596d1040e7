"""The search of `lab tune`: which combination of settings is the fastest, from few runs in blocks.

A *choice* is the settings in which a combination differs from the default. A request has two phases, prefill and
decode, and a setting may influence one of them or both. For each phase the logarithm of the time is

    speed of the machine in this block + effects of single settings + of pairs + of the whole choice + noise

All effects are normal around 0, or around what the ceilings predict, with the standard deviations below. This is a
Gaussian process (Rasmussen & Williams, Gaussian Processes for Machine Learning, 2.2), so a run of one choice also tells
something about choices that share settings with it. The first blocks try each setting alone. Each further block
measures choices drawn with the probability that they are the best (Thompson, 1933), so contenders get most blocks.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lab.core import stats
from lab.core.stats import Ratio

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

Choice = tuple[tuple[str, Any], ...]
"""The settings that differ from the default, by name; empty: the default."""

SINGLE, PREDICTED, PAIR, WHOLE, BLOCK = 0.3, 0.2, 0.12, 0.005, 1.0
"""Standard deviations, in logarithms: of a setting's effect without and with a prediction, of the effect of a pair, of
a whole choice, and of the machine's speed in a block."""

ALONE = {"mmap"}
"""Settings whose effect does not depend on the others'."""

NOISES = (0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
"""Standard deviations of a run that are considered: the most likely pair is taken, the larger for disturbed runs."""

USUAL_NOISE, NOISE_FACTOR = 0.015, 0.7
"""The noise expected before any run: its middle, and the standard deviation of its logarithm."""

TAIL = 4.0
"""Degrees of freedom of the noise (Student's t): a single disturbed run must not decide."""

N_DRAWS = 400
KNOWN_WITHIN = 0.02
"""The search ends when the best choice is expected to be at most this share slower than the unknown best one."""

SIMPLER, UNSURE = 0.01, 0.025
"""A choice with fewer changes wins if it is slower by at most this share, or faster with at least this probability."""

HOPELESS = 1.5
"""Choices that are predicted to take this factor of the default's time are not tried."""


@dataclass(frozen=True)
class Phase:
    """A part of the time that is minimized: the settings that influence it (None: all), and how often it counts."""

    name: str
    settings: frozenset[str] | None = None
    n: float = 1.0

    def part_of(self, choice: Choice) -> Choice:
        """The settings of a choice that influence this phase."""
        return tuple(one for one in choice if self.settings is None or one[0] in self.settings)


@dataclass(frozen=True)
class Timing:
    """The seconds of each phase of one run."""

    block: int
    choice: Choice
    seconds: Mapping[str, float]
    is_disturbed: bool = False


@dataclass(frozen=True)
class Standing:
    """What a search knows of a choice: its expected time and its ratio to the default's, with a 95 % interval."""

    choice: Choice
    seconds: float
    ratio: Ratio


class Search:
    """The state of a search: `next_block` says what to measure, `learn` and `drop` take what came of it.

    `predicted` has the predicted times over the default's: for each phase, by the part of a choice that influences it.
    `choices` may omit the default.
    """

    def __init__(
        self,
        choices: Iterable[Choice],
        of: Sequence[Phase],
        predicted: Mapping[str, Mapping[Choice, float]] | None = None,
        seed: int = 1,
        n_per_block: int = 5,
    ) -> None:
        import numpy as np

        self.phases, self.predicted, self.n_per_block = tuple(of), predicted or {}, n_per_block
        self.choices = [(), *(choice for choice in dict.fromkeys(choices) if self._matters(choice))]
        self.timings: list[Timing] = []
        self.dropped: dict[Choice, str] = {}
        self._rng = np.random.default_rng(seed)
        self._first: list[Choice] = []

    def _matters(self, choice: Choice) -> bool:
        return bool(choice) and all(any(phase.part_of((one,)) for phase in self.phases) for one in choice)

    def cut(self, shares: Mapping[str, float]) -> list[Choice]:
        """Drop the choices whose predicted time is HOPELESS; `shares` are those of the phases in the default's time.

        Returns the dropped choices. Single settings are tried in the order of their predicted times.
        """
        times = {
            choice: sum(
                shares[phase.name] * self.predicted.get(phase.name, {}).get(phase.part_of(choice), 1.0)
                for phase in self.phases
            )
            for choice in self.choices
        }
        for choice, time in times.items():
            if choice and time > HOPELESS:
                self.dropped[choice] = f"predicted to take {time:.2g}x the default's time"
        self._first = sorted((one for one in self.open if len(one) == 1), key=times.__getitem__)
        return list(self.dropped)

    @property
    def open(self) -> list[Choice]:
        """The choices that were not dropped, the default first."""
        return [choice for choice in self.choices if choice not in self.dropped]

    def learn(self, timings: Iterable[Timing]) -> None:
        """Take the times of runs."""
        self.timings += timings

    def drop(self, choice: Choice, reason: str) -> None:
        """Do not try a choice again, nor choices that contain it."""
        for other in self.open:
            if set(choice) <= set(other):
                self.dropped[other] = reason
        self._first = [one for one in self._first if one not in self.dropped]

    def next_block(self) -> list[Choice]:
        """The choices of the next block: the default, the best so far, and draws; empty if the best is known."""
        if not self.timings and not self._first:
            self._first = [one for one in self.open if len(one) == 1]
        if self._first:
            now, self._first = self._first[: self.n_per_block], self._first[self.n_per_block :]
            return [(), *now]
        choices, draws = self._draws()
        best = _simplest(choices, draws)
        if _regret(draws, best) <= KNOWN_WITHIN and choices[best] in {timing.choice for timing in self.timings}:
            return []
        wanted = [choices[i] for i in dict.fromkeys([best, *draws.argmin(axis=1).tolist()])]
        return [(), *[choice for choice in wanted if choice][: self.n_per_block]]

    def best(self) -> Choice:
        """The choice with the least expected time; of nearly equal ones that with the fewest changes."""
        choices, draws = self._draws()
        return choices[_simplest(choices, draws)]

    def standings(self) -> list[Standing]:
        """What is known of the measured choices, the fastest first."""
        import numpy as np

        choices, draws = self._draws(list(dict.fromkeys([(), *(timing.choice for timing in self.timings)])))
        ratios = draws / draws[:, :1]
        low, high = np.quantile(ratios, [(1 - stats.CONFIDENCE) / 2, (1 + stats.CONFIDENCE) / 2], axis=0)
        middle, seconds = np.exp(np.log(ratios).mean(axis=0)), np.median(draws, axis=0)
        made = [
            Standing(choice, float(seconds[i]), Ratio(float(middle[i]), float(low[i]), float(high[i])))
            for i, choice in enumerate(choices)
        ]
        return sorted(made, key=lambda one: one.seconds)

    def _draws(self, choices: list[Choice] | None = None) -> tuple[list[Choice], Array]:
        """Choices, and N_DRAWS possible sets of their times in seconds, a column for each choice."""
        import numpy as np

        chosen = self.open if choices is None else choices
        total = np.zeros((N_DRAWS, len(chosen)))
        for phase in self.phases:
            default = [t.seconds[phase.name] for t in self.timings if not t.choice and phase.name in t.seconds]
            scale = phase.n * (statistics.median(default) if default else 1.0)
            mean, covariance = self._believed(phase, chosen)
            root = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(chosen)))
            total += scale * np.exp(mean + self._rng.standard_normal((N_DRAWS, len(chosen))) @ root.T)
        return chosen, total

    def _believed(self, phase: Phase, choices: Sequence[Choice]) -> tuple[Array, Array]:
        """Means and covariances of log(time / the default's time) in this phase, after all runs."""
        import numpy as np

        seen = [timing for timing in self.timings if phase.name in timing.seconds]
        known = self.predicted.get(phase.name, {})
        parts = [phase.part_of(choice) for choice in (*choices, *(timing.choice for timing in seen))]
        ratios = [known.get(part, 1.0) for part in parts]
        prior, mean, n = covariances(parts, bool(known)), np.log(np.array(ratios)), len(choices)
        if not seen:
            return mean, prior
        logs = np.array([math.log(timing.seconds[phase.name]) for timing in seen])
        blocks = np.array([timing.block for timing in seen])
        least = prior[n:, n:] + BLOCK**2 * (blocks[:, None] == blocks[None, :])
        wrong = logs - mean[n:]
        wrong = wrong - wrong.mean()
        noisy = least + np.diag(noise_variance(least, wrong, np.array([timing.is_disturbed for timing in seen])))
        gain = np.linalg.solve(noisy, prior[n:, :n]).T
        return mean[:n] + gain @ wrong, prior[:n, :n] - gain @ prior[n:, :n]


def _simplest(choices: Sequence[Choice], draws: Array) -> int:
    """The index of the choice with the least expected time, without changes that hardly or not certainly help.

    It may be slower by SIMPLER. A change is also left out if the choice without it is faster with a chance of UNSURE.
    """
    means = draws.mean(axis=0)
    fastest = int(means.argmin())
    parts = set(choices[fastest])
    near = [
        i
        for i, choice in enumerate(choices)
        if means[i] <= (1 + SIMPLER) * means[fastest]
        or (choice and parts.issuperset(choice) and (draws[:, i] < draws[:, fastest]).mean() >= UNSURE)
    ]
    return min(near, key=lambda i: (len(choices[i]), means[i]))


def _regret(draws: Array, best: int) -> float:
    return float((draws[:, best] / draws.min(axis=1)).mean() - 1)


def covariances(parts: Sequence[Choice], is_predicted: bool) -> Array:
    """The covariances of the effects of choices: by the settings, the pairs, and the whole that they share.

    Neighbouring values of a number share half of their effect.
    """
    import numpy as np

    values: dict[str, set[Any]] = {}
    for part in parts:
        for name, value in part:
            values.setdefault(name, set()).add(value)
    shared, paired, squares = (np.zeros((len(parts), len(parts))) for _ in range(3))
    whole = np.ones((len(parts), len(parts)))
    for name, of_name in values.items():
        ordered = sorted(of_name, key=lambda value: (not isinstance(value, (int, float)), str(type(value)), value))
        alike = np.eye(len(ordered) + 1)
        for i, one in enumerate(ordered):
            for j, other in enumerate(ordered):
                if type(one) is type(other) is int:
                    alike[i, j] = 0.5 ** abs(i - j)
        alike[-1, -1] = 0  # the default's value has no effect
        places = [ordered.index(dict(part)[name]) if name in dict(part) else -1 for part in parts]
        own = alike[np.ix_(places, places)]
        shared = shared + own
        if name not in ALONE:
            paired, squares = paired + own, squares + own**2
        whole *= np.equal.outer(places, places)
    whole *= np.array([bool(part) for part in parts])
    single = PREDICTED if is_predicted else SINGLE
    return np.asarray(single**2 * shared + PAIR**2 * (paired**2 - squares) / 2 + WHOLE**2 * whole)


def noise_variance(least: Array, wrong: Array, disturbed: Array) -> Array:
    """The variance of each run's noise: the most likely of NOISES, larger for runs far from what the others say."""
    import numpy as np

    pairs = list(itertools.combinations_with_replacement(NOISES, 2)) if disturbed.any() else [(n, n) for n in NOISES]
    weights = np.ones(len(wrong))
    for _ in range(3):
        found = [
            (np.where(disturbed, more**2, usual**2) / weights, math.log(usual / USUAL_NOISE) / NOISE_FACTOR)
            for usual, more in pairs
        ]
        variance, _ = max(found, key=lambda one: _evidence(least, one[0], wrong) - one[1] ** 2 / 2)
        inverse = np.linalg.inv(least + np.diag(variance))
        left_out = 1 / np.diag(inverse)  # variances of each run's residual when it is left out
        residuals = (inverse @ wrong) * left_out
        weights = np.minimum(1.0, (TAIL + 1) / (TAIL + residuals**2 / left_out))
    return np.asarray(variance)


def _evidence(least: Array, variance: Array, wrong: Array) -> float:
    """The logarithm of the probability of the runs (Rasmussen & Williams, 2.30), up to a constant."""
    import numpy as np

    root = np.linalg.cholesky(least + np.diag(variance))
    half = np.linalg.solve(root, wrong)
    return float(-0.5 * half @ half - np.log(np.diag(root)).sum())
