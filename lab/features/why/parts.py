"""The parts of a ratio: named factors with ranges, how they are known, and what they leave over.

All is done in logarithms, in which factors add up. Ranges are 95 % intervals, combined in
quadrature. A factor without a known range has none, and then neither has what is left over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.core.shown import is_unreliable
from lab.features.why.facts import Facts
from lab.features.why.figure import Figure
from lab.show import session_spread

ARITHMETIC = "arithmetic"
MEASURED = "measured here"
FROM_RECORDS = "from the records"
PREDICTED = "predicted"
EQUAL = "equal"
NOT_KNOWN = "unknown"
NOT_MEASURED = "not measured"
REST = "the rest"
NO_RANGE = "range unknown"
"""How a factor is known."""

COUNTED = "what is counted"
CONCURRENCY = "concurrency"
SPECULATION = "speculation"
SAMPLING = "sampling"
CHOOSING = "choosing tokens"
DEPTH = "depth"
LENGTH = "length"
MODEL = "model"
QUANTIZATION = "quantization"
MACHINE = "machine"
SYSTEM = "system and driver"
BUILD = "build"
PROGRAM = "program and build"
STATE = "machine state"
OTHER_SETTINGS = "other settings"
LABEL = "label"
MORE_SETTINGS = "more settings"
NOT_EXPLAINED = "not explained"
"""Names of parts."""

LEAST = 0.02
LEAST_ALONE = 0.1
"""Causes are named from these shares, with and without a known range."""

WIDEST = math.log(3)
"""Half of a range, in logarithms, above which a factor does not say enough to be called a cause."""

BETWEEN_SESSIONS = session_spread.VIRTUAL
"""The spread between sessions of an unknown machine, as a standard deviation of logarithms."""

FEWEST = 3  # blocks, runs or sessions that a range needs
ORDERS_DIFFER = math.log(1.05)


@dataclass(frozen=True)
class Pair:
    """The two figures that are compared, the faster one first, and their letters."""

    fast: Figure
    slow: Figure
    letters: tuple[str, str] = ("A", "B")  # of fast and slow

    @classmethod
    def of(cls, a: Figure, b: Figure) -> Pair:
        """The figures of A and B."""
        if a.each_tps >= b.each_tps:
            return cls(a, b, ("A", "B"))
        return cls(b, a, ("B", "A"))

    @property
    def sides(self) -> list[tuple[str, Figure]]:
        """Letters and figures, the faster first."""
        return [(self.letters[0], self.fast), (self.letters[1], self.slow)]

    @property
    def in_order(self) -> list[tuple[str, Figure]]:
        """Letters and figures, A first."""
        return sorted(self.sides, key=lambda side: side[0])

    @property
    def has_records(self) -> bool:
        """Whether both are measurements of the lab."""
        return all(figure.records or figure.requests for _, figure in self.sides)

    @property
    def facts_in_order(self) -> list[tuple[str, Facts]]:
        """Letters and facts, A first."""
        return [(letter, figure.facts) for letter, figure in self.in_order]

    @property
    def ratio(self) -> float:
        return self.fast.each_tps / self.slow.each_tps


@dataclass(frozen=True)
class GapPart:
    """A factor of the ratio: its logarithm, half of its range (None: unknown), and how both are
    known.

    `changes` are the keywords that change on the way from the faster setup to the slower one, if a
    trial can measure the part. `orders` are its logarithms in both orders of the changes.
    """

    name: str
    log: float = 0.0
    half: float | None = 0.0
    how: str = NOT_KNOWN
    reason: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    orders: tuple[float, float] | None = None
    differs: bool = False  # both sides give it, and give different values
    lacking: Sequence[str] = ()  # letters of the sides that do not give it
    n_runs: int = 0  # of a trial
    n_disturbed: int = 0

    @property
    def factor(self) -> float:
        return math.exp(self.log)

    @property
    def has_factor(self) -> bool:
        """Whether the factor is known at all."""
        return self.how not in (NOT_KNOWN, NOT_MEASURED)

    @property
    def range(self) -> tuple[float, float] | None:
        if self.half is None:
            return None
        return math.exp(self.log - self.half), math.exp(self.log + self.half)

    @property
    def is_doubtful(self) -> bool:
        """Whether too many of the trial's runs were disturbed."""
        return is_unreliable(self.n_runs, self.n_disturbed)

    @property
    def depends_on_order(self) -> bool:
        """Whether it differs by what else has changed already."""
        return self.orders is not None and abs(self.orders[0] - self.orders[1]) > ORDERS_DIFFER

    @property
    def is_cause(self) -> bool:
        """Whether it changes the ratio for certain, by at least LEAST."""
        if self.how == REST or not self.has_factor or self.is_doubtful:
            return False
        if self.half is None:
            return abs(self.log) > math.log1p(LEAST_ALONE)
        is_certain = abs(self.log) - self.half > math.log1p(LEAST) / 2
        return is_certain and self.half < WIDEST


def unknown(name: str, reason: str, **more: Any) -> GapPart:
    """A part whose factor is not known, and why."""
    return GapPart(name, how=NOT_KNOWN, reason=reason, **more)


def equal(name: str, how: str = EQUAL, reason: str = "") -> GapPart:
    """A part that is the same on both sides."""
    return GapPart(name, how=how, reason=reason)


def left_over(pair: Pair, parts: Sequence[GapPart]) -> GapPart:
    """What the parts leave of the ratio.

    Its range combines the ranges of the parts and of both figures; figures of different sessions
    also differ as sessions do.
    """
    log = math.log(pair.ratio) - sum(part.log for part in parts)
    lacking = [part.name for part in parts if part.half is None]
    squares = [part.half**2 for part in parts if part.half is not None]
    sessions_of_fast = {record.session for record in pair.fast.records}
    sessions_of_slow = {record.session for record in pair.slow.records}
    is_one_session = bool(sessions_of_fast & sessions_of_slow)
    for letter, figure in pair.sides:
        if figure.spread is None:
            lacking.append(f"the figure of {letter}")
            continue
        between = BETWEEN_SESSIONS if figure.between is None else figure.between
        if is_one_session:
            between = 0.0
        squares.append(1.96**2 * (figure.spread**2 + between**2))
    if lacking:
        names = ", ".join(dict.fromkeys(lacking))
        return GapPart(NOT_EXPLAINED, log, None, REST, f"{NO_RANGE}, like that of {names}")
    return GapPart(NOT_EXPLAINED, log, math.sqrt(sum(squares)), REST)
