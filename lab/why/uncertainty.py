"""How far off a prediction may be: taken from points that were held out of the fit and predicted from the others.

Each way of going beyond what was learned from (a longer or shorter context, another model, another quantization,
other settings) has a variance of its own: the mean squared error of the points that were held out in this way,
together with a figure of the lab's own bench where few or none could be (PRIOR). So has what lies inside of it, and
what changes from one session to the next. Points of disturbed runs add theirs by their share of all points. The
variances of all that apply to a prediction are added.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lab.core.lists import grouped
from lab.core.record import DECODE, PREFILL
from lab.why.learning import Case, Point, fit

INSIDE, SESSION, DISTURBED, LONGER, SHORTER = "inside", "session", "disturbed", "longer", "shorter"
MODEL, QUANTIZATION, SETTINGS = "model", "quantization", "settings"

PRIOR = {
    INSIDE: {PREFILL: 0.07, DECODE: 0.06},
    SESSION: {PREFILL: 0.05, DECODE: 0.08},
    DISTURBED: {PREFILL: 0.28, DECODE: 0.25},
    LONGER: {PREFILL: 0.08, DECODE: 0.08},
    SHORTER: {PREFILL: 0.12, DECODE: 0.06},
    MODEL: {PREFILL: 0.12, DECODE: 0.12},
    QUANTIZATION: {PREFILL: 0.10, DECODE: 0.10},
    SETTINGS: {PREFILL: 0.12, DECODE: 0.12},
}
"""Standard deviations of log(measured / predicted); of LONGER and SHORTER for one doubling of the length.

Measured on two virtual cores of an EPYC, and rounded up. tests/bench/held_out.py: other lengths 0.06; Q4_0 and Q8_0
from Q4_1 0.10; 3B models from small ones 0.02 in prefill and 0.11 in decode. The samples in results/: sessions 0.04
in prefill and 0.08 in decode; longer prompts 0.08 and 0.02; shorter ones 0.12 and 0.04. DISTURBED: between sessions of
one thread while other processes used 1.5 of the two cores, 0.28 and 0.25. Other settings were not measured: they count
as another model does.
"""

PRIOR_WEIGHT = 4
"""As how many groups of held-out points a figure of PRIOR counts."""

DEVIATIONS = 2.0
"""Half the width of a range, in standard deviations."""

MOST_LENGTHS = 12
"""Lengths at which points are parted: a sweep has hundreds."""

NEAR = 1.5
"""Lengths up to so many times the longest learned from are no extrapolation."""


@dataclass(frozen=True)
class Known:
    """What the points of one phase cover: from which to which length, which models, quantizations and settings."""

    shortest: float
    longest: float
    quantizations: dict[object, set[str | None]]  # of each model's shape
    settings: set[object]

    def beyond(self, case: Case) -> dict[str, float]:
        """In which ways a case lies beyond, and how far: in doublings of the length, else 1."""
        ways = {}
        if case.length > NEAR * self.longest:
            ways[LONGER] = math.log2(case.length / self.longest)
        if case.length * NEAR < self.shortest:
            ways[SHORTER] = math.log2(self.shortest / max(1.0, case.length))
        if case.shape not in self.quantizations:
            ways[MODEL] = 1.0
        if case.quantization not in self.quantizations.get(case.shape, set().union(*self.quantizations.values())):
            ways[QUANTIZATION] = 1.0
        if case.settings not in self.settings:
            ways[SETTINGS] = 1.0
        return ways


@dataclass(frozen=True)
class HeldOut:
    """A point that was predicted from others: log(measured / predicted), and in which ways it lay beyond them."""

    group: str  # points of one group were held out together, so they are one piece of information
    case: Case
    beyond: dict[str, float]
    error: float


@dataclass(frozen=True)
class Uncertainty:
    """What was learned from, by phase, and the errors of points that were held out of it."""

    points: tuple[Point, ...]
    known: dict[str, Known]
    held_out: tuple[HeldOut, ...]

    def factor(self, case: Case) -> float:
        """By what factor a range reaches to either side of the expectation."""
        disturbed = statistics.fmean(point.is_disturbed for point in self.points if point.case.phase == case.phase)
        ways = {INSIDE: 1.0, SESSION: 1.0, DISTURBED: disturbed, **self.known[case.phase].beyond(case)}
        variance = sum(distance * self.variance(case.phase, way) for way, distance in ways.items())
        return math.exp(DEVIATIONS * math.sqrt(variance))

    def fastest(self, phase: str) -> float:
        """The smallest part of its kernels' least time that a point took: 1, or less where ceilings are too low."""
        alike = [point for point in self.points if point.case.phase == phase]
        return min(1.0, *(point.seconds / point.costs.kernels_s for point in alike))

    def variance(self, phase: str, way: str) -> float:
        """Of one way: the mean over the groups that were held out, and PRIOR as so many more."""
        if way == SESSION:
            squares = _between_sessions([point for point in self.points if point.case.phase == phase])
        else:
            squares = {}
            for point in self.held_out:
                if point.case.phase == phase and [*point.beyond] == ([] if way == INSIDE else [way]):
                    squares.setdefault(point.group, []).append(point.error**2 / point.beyond.get(way, 1.0))
        means = [statistics.fmean(group) for group in squares.values()]
        return (sum(means) + PRIOR_WEIGHT * PRIOR[way][phase] ** 2) / (len(means) + PRIOR_WEIGHT)


def of(points: Sequence[Point]) -> Uncertainty:
    """The uncertainty of predictions from these points."""
    return Uncertainty(tuple(points), _known(points), tuple(_hold_out(points)))


def _known(points: Sequence[Point]) -> dict[str, Known]:
    """What points cover, by phase."""
    by_phase = grouped((point.case for point in points), lambda case: case.phase)
    known = {}
    for phase, cases in by_phase.items():
        quantizations: dict[object, set[str | None]] = {}
        for case in cases:
            quantizations.setdefault(case.shape, set()).add(case.quantization)
        lengths = [case.length for case in cases]
        known[phase] = Known(min(lengths), max(lengths), quantizations, {case.settings for case in cases})
    return known


def _hold_out(points: Sequence[Point]) -> Iterator[HeldOut]:
    """Points predicted from others, in every way in which some can be held out."""
    for group, is_held in _splits(points):
        kept = [point for point in points if not is_held(point)]
        known = _known(kept)
        held = [point for point in points if is_held(point) and point.case.phase in known]
        if not held:
            continue
        fitted = fit(kept)
        for point in held:
            error = math.log(point.seconds / fitted.seconds(point.case, point.costs))
            beyond = known[point.case.phase].beyond(point.case)
            yield HeldOut(group or str(point.case.setup), point.case, beyond, error)


def _splits(points: Sequence[Point]) -> Iterator[tuple[str, Callable[[Point], bool]]]:
    """What is held out together: a name (empty: that of each point's setup), and which points these are."""
    lengths = sorted({point.n_prompt for point in points})
    lengths = sorted({lengths[i * (len(lengths) - 1) // MOST_LENGTHS] for i in range(MOST_LENGTHS + 1)})
    for n in lengths[1:-1]:
        for setup in {point.case.setup for point in points}:
            yield "", partial(_is, (n, setup), lambda point: (point.n_prompt, point.case.setup))
    for n in lengths[1:]:
        for is_longer in (True, False):
            yield "", partial(_is, is_longer, partial(_is_longer, n))
    for part in (
        lambda point: point.case.shape,
        lambda point: (point.case.shape, point.case.quantization),
        lambda point: point.case.settings,
    ):
        for value in {part(point) for point in points}:
            yield str(value), partial(_is, value, part)


def _is(value: object, part: Callable[[Point], object], point: Point) -> bool:
    return part(point) == value


def _is_longer(n: int, point: Point) -> bool:
    return point.n_prompt >= n


def _between_sessions(points: Sequence[Point]) -> dict[str, list[float]]:
    """By session: squared deviations of its medians from those of all sessions, of points that several measured."""
    squares: dict[str, list[float]] = {}
    for point in points:
        n = len(point.by_session)
        for session, seconds in point.by_session.items() if n > 1 else ():
            squares.setdefault(session, []).append(math.log(seconds / point.seconds) ** 2 * n / (n - 1))
    return squares
