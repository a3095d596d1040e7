"""Curves of times over lengths or positions: their points, their slopes, and values between points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from lab.core import phases, stats
from lab.core.record import Record
from lab.experiments import claim_rules as rules
from lab.experiments.claim import Figure
from lab.experiments.claim_rules import Condition

Point = tuple[float, float]
"""A length or position, and a time there."""


def slope(name: str, points: Sequence[Point], unit: str, scale: float) -> Figure | None:
    """The slope of times over positions with its interval; None for fewer than 4 positions."""
    rise = stats.slope([place for place, _ in points], [time for _, time in points])
    if rise is None or not scale:
        return None
    return Figure(name, scale * rise.estimate, unit, scale * rise.low, scale * rise.high, len(points))


def rises(words: str, slope: Figure | None) -> Condition:
    """That a slope lies above 0."""
    return rules.at_least(words, slope, math.ulp(0.0))


def token_times(records: Sequence[Record]) -> list[Point]:
    """The mean position of the decoded tokens, and their TPOT in ms, of each length of each run."""
    legs = [leg for record in records for leg in phases.by_length(record.run)]
    times = [(leg.n_prompt + (leg.n_gen - 2) / 2, phases.tpot_ns(leg)) for leg in legs]
    return sorted((place, tpot / 1e6) for place, tpot in times if tpot and tpot > 0)


def line(points: Sequence[Point]) -> tuple[float, float]:
    """w and k of t(p) = w + k p, neither below 0."""
    places, times = zip(*points, strict=True)
    w, k = stats.fit([[1.0] * len(points), list(places)], list(times))
    return w, k


def at(curve: Sequence[Point], x: float) -> float:
    """A value between points; beyond them, that of the nearest."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x0 <= x < x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return curve[0][1] if x < curve[0][0] else curve[-1][1]
