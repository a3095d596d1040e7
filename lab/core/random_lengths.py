"""Lengths in tokens that a user writes as one number or as a distribution, and random draws from
them.

A distribution becomes a pool of at most MOST_VALUES equally likely values, its quantiles. Draws
come from shuffled decks of the pool, so that after each deck all values came equally often.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

from lab.core.asked_settings import in_digits
from lab.errors import LabError

MOST_VALUES = 32
MOST_TOKENS = 10_000_000


class Lengths(NamedTuple):
    """What the user wrote, and the pool of values in ascending order."""

    text: str
    values: tuple[int, ...]


def parse(option: str, text: str | int) -> Lengths:
    """The lengths that `text` names; LabError, which names `option`, if there are none.

    `512`, `100-1000` (uniform), `normal:MEAN,SD` or `lognormal:MEDIAN,SIGMA` (of the logarithm).
    """
    digits = in_digits(str(text).strip())
    values = _uniform(digits) or _normal(digits)
    if not values or not 1 <= min(values) <= max(values) <= MOST_TOKENS:
        raise LabError(
            f"{option} {digits} is not possible.",
            f"Write {option} as 512, 100-1000, normal:500,100 or lognormal:300,0.8 "
            "(median, sigma of the logarithm).",
        )
    if min(values) == max(values):
        values = values[:1]
    return Lengths(digits, tuple(values))


def _uniform(digits: str) -> list[int]:
    """The quantiles of `512` or `100-1000`; empty for another text."""
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", digits)
    if match is None:
        return []
    low = int(match[1])
    high = int(match[2] or match[1])
    n_lengths = high + 1 - low
    n_values = min(n_lengths, MOST_VALUES)
    return [low + math.floor((i + 0.5) * n_lengths / n_values) for i in range(n_values)]


def _normal(digits: str) -> list[int]:
    """The quantiles of `normal:MEAN,SD` or `lognormal:MEDIAN,SIGMA`; empty for another text."""
    number = r"(\d{1,9}(?:\.\d+)?)"
    match = re.fullmatch(rf"(normal|lognormal):{number},\s*{number}", digits)
    if match is None:
        return []
    centre = float(match[2])
    spread = float(match[3])
    largest_exponent = math.log(2 * MOST_TOKENS)  # what is larger is refused anyway
    values = []
    for i in range(MOST_VALUES):
        deviation = spread * NormalDist().inv_cdf((i + 0.5) / MOST_VALUES)
        if match[1] == "normal":
            values.append(round(centre + deviation))
        else:
            values.append(round(centre * math.exp(min(deviation, largest_exponent))))
    return values


def draw(lengths: Lengths, n: int, seed: str) -> tuple[int, ...]:
    """`n` lengths from shuffled decks of the pool."""
    return tuple(itertools.islice(_decks(lengths.values, seed), n))


def _decks(values: Sequence[int], seed: str) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield from rng.sample(values, len(values))
