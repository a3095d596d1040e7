"""The effects of settings on the time of a phase, from all runs.

The logarithm of the time is

    speed of the machine in this block + effects of settings + effects of pairs of settings + noise

Least squares find these effects; small ones are preferred, as the standard deviations below say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.features.tune.choices import Choice, Timing, TunedPhase

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

SINGLE = 0.3
PAIR = 0.12
BLOCK = 1.0
"""Expected standard deviations of logarithms: a setting, a pair, the speed of a block."""

NOISE = 0.02  # of runs, at first
NOISE_RUNS = 2  # runs for which this first value counts
LEAST_NOISE = 0.004
MOST_NOISE = 0.3
DISTURBED = 0.3  # noise of a disturbed run
LEAST_FREE = 0.01  # degrees of freedom that say something about the noise
N_ROUNDS = 4
ALONE = {"mmap"}  # settings whose effect does not depend on the others'


def effects(
    phase: TunedPhase, timings: Sequence[Timing], choices: Sequence[Choice]
) -> tuple[Array, Array]:
    """The effects of choices on log(time) of a phase, and their variances."""
    import numpy as np

    runs = [timing for timing in timings if phase.name in timing.seconds]
    terms_of_choices = [terms(phase.part_of(choice)) for choice in choices]
    terms_of_runs = [terms(phase.part_of(run.choice)) for run in runs]
    names = list(dict.fromkeys(itertools.chain(*terms_of_choices, *terms_of_runs)))
    blocks = [run.block for run in runs]
    of_block = np.equal.outer(blocks, sorted(set(blocks)))
    x = np.hstack([indicators(terms_of_runs, names), of_block])
    y = np.log([run.seconds[phase.name] for run in runs])
    deviations = [SINGLE if len(name) == 1 else PAIR for name in names]
    deviations += [BLOCK] * len(set(blocks))
    is_disturbed = np.array([run.is_disturbed for run in runs])
    coefficients, covariance = fit(x, y - y.mean(), np.array(deviations), is_disturbed)
    n = len(names)
    asked = indicators(terms_of_choices, names)
    variance = np.einsum("ij,jk,ik->i", asked, covariance[:n, :n], asked)
    return asked @ coefficients[:n], variance


def terms(choice: Choice) -> list[Choice]:
    """The settings of a choice, and their pairs."""
    singles = [(setting,) for setting in choice]
    paired = [setting for setting in choice if setting[0] not in ALONE]
    return [*singles, *itertools.combinations(paired, 2)]


def indicators(terms_of_rows: Sequence[Sequence[Choice]], names: Sequence[Choice]) -> Array:
    """1 where a row has a term, else 0."""
    import numpy as np

    matrix = np.zeros((len(terms_of_rows), len(names)))
    for i, terms_of_row in enumerate(terms_of_rows):
        for name in terms_of_row:
            matrix[i, names.index(name)] = 1
    return matrix


def fit(x: Array, y: Array, deviations: Array, is_disturbed: Array) -> tuple[Array, Array]:
    """Coefficients and their covariance. The noise follows from the fit, the fit from the noise."""
    import numpy as np

    prior = np.diag(deviations**-2.0)
    noise = NOISE
    for _ in range(N_ROUNDS):
        noise_of_runs = np.where(is_disturbed, max(DISTURBED, noise), noise)
        weighted = (x / noise_of_runs[:, None] ** 2).T
        covariance = np.linalg.inv(weighted @ x + prior)
        coefficients = covariance @ weighted @ y
        is_calm = np.logical_not(is_disturbed)
        residuals = (y - x @ coefficients)[is_calm]
        leverage = np.einsum("ij,jk,ki->i", x, covariance, weighted)[is_calm]
        noise = next_noise(residuals, len(residuals) - float(leverage.sum()))
    return coefficients, covariance


def next_noise(residuals: Array, n_free: float) -> float:
    """The noise from residuals with n_free degrees of freedom, and the first value."""
    n_free = max(0.0, n_free)
    observed = NOISE
    if n_free > LEAST_FREE:
        observed = math.sqrt(residuals @ residuals / n_free)
        observed = min(MOST_NOISE, max(LEAST_NOISE, observed))
    squares = n_free * observed**2 + NOISE_RUNS * NOISE**2
    return math.sqrt(squares / (n_free + NOISE_RUNS))
