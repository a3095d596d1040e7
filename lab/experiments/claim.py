"""A claim of the textbooks, and what it takes to judge it on this machine: figures against a criterion.

The criterion is fixed before the measurement: words, and a function that turns evidence into a verdict. It can be tried
on made-up evidence both ways, and it says so where the evidence is too noisy, or cannot be had here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lab.core.record import OK, Ceilings, Record

HOLDS, HOLDS_NOT = "holds here", "does not hold here"
UNSURE, UNTESTABLE = "cannot be told", "not testable here"


@dataclass(frozen=True)
class Figure:
    """A measured or computed value, with the ends of its interval or range where it has one.

    `n`: how many runs, blocks or points of a curve it rests on; None for a computed one.
    """

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclass(frozen=True)
class Evidence:
    """What was measured for all claims: the records of a session, and what is known of the machine.

    `others` are records of other machines and `other_ceilings` what these can do, `is_quick` whether only the short
    measurements were made.
    """

    records: tuple[Record, ...]
    ceilings: Ceilings | None = None
    others: tuple[Record, ...] = ()
    other_ceilings: tuple[Ceilings, ...] = ()
    is_quick: bool = False

    def of(self, part: str) -> tuple[Record, ...]:
        """Timed runs of a part of the session that went well."""
        return tuple(
            record
            for record in self.records
            if record.run.part == part and record.run.status == OK and not record.run.warmup
        )


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim: one of the four words, why in a sentence, and the figures that it rests on."""

    verdict: str
    words: str
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A claim, its criterion in words, the parts of the session that it needs, and the function that judges it.

    `source`: who claims it, where that is known.
    """

    number: int
    words: str
    criterion: str
    parts: tuple[str, ...]
    judge: Callable[[Evidence], Judgement] = field(repr=False)
    source: str = ""
