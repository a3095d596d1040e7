"""The model behind the search of `lab tune`: which choices of settings resemble each other, and how noisy runs are.

The effect of a choice is the sum of the effects of its settings, of their pairs, and of the whole. Choices that share
settings share these effects, so their times vary together: the covariances of a Gaussian process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

Choice = tuple[tuple[str, Any], ...]
"""The settings that differ from the default, by name; empty: the default."""

SINGLE, PREDICTED, PAIR, WHOLE, BLOCK = 0.3, 0.2, 0.12, 0.005, 1.0
"""Standard deviations, in logarithms: of a setting's effect without and with a prediction, of the effect of a pair, of
a whole choice, and of the machine's speed in a block."""

ALONE = {"mmap", "poll", "priority"}
"""Settings whose effect does not depend on the others'."""

NOISES = (0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
"""Standard deviations of a run that are considered: the most likely pair is taken, the larger for disturbed runs."""

USUAL_NOISE, NOISE_FACTOR = 0.015, 0.7
"""The noise expected before any run: its middle, and the standard deviation of its logarithm."""

TAIL = 4.0
"""Degrees of freedom of the noise (Student's t): a single disturbed run must not decide."""


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
