"""How many requests of a load kept their limits, and how much load a server stands.

Attainment is the share of requests that meet every limit, of all that were due in the steady window: failures and
unknown figures count as bad. An arm holds where at least 90 % do. Slow requests come in bunches (they wait in the same
queue), so a plain binomial interval of attainment is far too narrow (tests/bench/load_truth.py): it is widened by how
much batches of requests that followed each other differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lab.analysis.loads import Arm
from lab.core import stats
from lab.core.server_load import CLOSED, Slo

SHARE = 0.9
"""Attainment from which on an arm holds."""

N_BATCHES = 5
FAR = 2
"""Where all requests used less than half of their limits, or all more than twice, how slow ones come in bunches says
nothing about who breaks a limit."""

HOLDS, FAILS, UNSURE = "holds", "does not hold", "cannot be told"


@dataclass(frozen=True)
class Attainment:
    """The share of requests that met every limit, with its 95 % interval."""

    n_good: int
    n: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.n_good / self.n

    @property
    def verdict(self) -> str:
        return HOLDS if self.low >= SHARE else FAILS if self.high < SHARE else UNSURE


@dataclass(frozen=True)
class Capacity:
    """The most load that 90 % of requests survive: `at_least`, and `below`; None where no arm shows that end.

    `best` is the highest arm that held by its share alone, with all lower ones.
    """

    unit: str  # users, requests/s
    at_least: float | None
    below: float | None
    best: float | None
    words: str


def attainment(arm: Arm, slo: Slo) -> Attainment | None:
    """Attainment of an arm; None where no request was due."""
    used = [[one.figures.used(slo) for one in of_round.inside] for of_round in arm.rounds]
    everything = sorted(value for own in used for value in own)
    if not everything:
        return None
    per_round = math.ceil(N_BATCHES / len(used))
    batches = [batch for own in used for batch in _split(own, per_round)]
    is_far = everything[-1] * FAR < 1 or everything[0] > FAR
    worst = everything[math.ceil(0.9 * len(everything)) - 1]
    met = [[value <= 1 for value in batch] for batch in batches]
    not_slow = [[value <= worst for value in batch] for batch in batches] if not is_far else []
    interval = stats.share_interval(met, not_slow)
    return Attainment(sum(map(sum, met)), len(everything), interval.low, interval.high)


def _split(values: Sequence[float], n: int) -> list[Sequence[float]]:
    """`values` in n parts of about equal size."""
    return [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]


def capacity(arms: Sequence[Arm], slo: Slo | None = None) -> Capacity | None:
    """The highest load at which 90 % of requests meet every limit, and at all lower ones too.

    Of closed loops in users, else of open ones in requests per second. `slo`: that of the loads, if it is None. None
    without limits, and where there is neither.
    """
    known = [(arm, arm.level, arm.load.slo if slo is None else slo) for arm in arms]
    first = next((arm.load.arrivals for arm, level, limits in known if level is not None and limits), None)
    measured = [
        (level, of_arm, arm.is_overloaded)
        for arm, level, limits in known
        if arm.load.arrivals == first and level is not None and limits and (of_arm := attainment(arm, limits))
    ]
    if not measured:
        return None
    at_least, below, best, holding = None, None, None, True
    for level, of_arm, is_overloaded in measured:
        verdict = UNSURE if is_overloaded and of_arm.verdict == HOLDS else of_arm.verdict
        holding = holding and of_arm.share >= SHARE
        best = level if holding else best
        at_least = level if holding and verdict == HOLDS else at_least
        below = level if verdict == FAILS and below is None else below
    unit = "users" if first == CLOSED else "requests/s"
    ends = measured[0][0], measured[-1][0]
    return Capacity(unit, at_least, below, best, _words(unit, at_least, below, best, ends))


def _words(
    unit: str, at_least: float | None, below: float | None, best: float | None, ends: tuple[float, float]
) -> str:
    by_share = f"; by its share alone it is {best:g}" if best not in (None, at_least) else ""
    if at_least is not None and below is not None:
        return f"between {at_least:g} and {_amount(below, unit)}{by_share}"
    if at_least is not None:
        why = "all arms hold" if at_least == ends[1] else "no arm surely does not hold"
        return f"{why}: it is at least {_amount(at_least, unit)}{by_share}"
    if below is not None:
        why = "none holds" if below == ends[0] else "no arm surely holds"
        return f"{why}: it is below {_amount(below, unit)}{by_share}"
    return f"it cannot be told from so few requests{by_share}"


def _amount(level: float, unit: str) -> str:
    return f"{level:g} {'user' if level == 1 and unit == 'users' else unit}"
