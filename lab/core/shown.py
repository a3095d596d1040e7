"""A value as it is shown, with everything that speaks against it.

Tables, sentences, pictures and JSON are made from values of this type, or from rows that have `doubts` of their own, so
that a figure keeps its doubts wherever it appears.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DISTURBED, PARTLY, FEW = "disturbed", "partly disturbed", "too few runs"
EXTRAPOLATED, ASSUMED, ABOVE = "extrapolated", "assumed", "above its ceiling"
LOADED, INCOMPLETE = "ceilings of a loaded machine", "incomplete ceilings"
KINDS = (DISTURBED, PARTLY, FEW, EXTRAPOLATED, ASSUMED, ABOVE, LOADED, INCOMPLETE)
"""Every kind of doubt, in the order in which doubts are named.

DISTURBED: half of the runs or more were disturbed, so their median is not to be trusted. PARTLY: fewer were, and the
median stands. FEW: too few runs for an interval. ABOVE: faster than its ceiling, so the ceiling is wrong. LOADED:
other programs ran while the ceilings were measured. INCOMPLETE: the session that measured the ceilings ended early.
"""

MARK, NOT_TO_BE_TRUSTED = "!", "!!"
"""What stands beside a figure of which some runs were disturbed, and beside one that nothing is concluded from."""


@dataclass(frozen=True)
class Shown:
    """A value of `n` runs with its interval, or their range (None: one run), and its doubts (some of KINDS)."""

    value: float
    low: float | None
    high: float | None
    n: int
    doubts: tuple[str, ...] = ()


def of_runs(n: int, n_disturbed: int, fewest: int) -> tuple[str, ...]:
    """The doubts of a median over n runs, of which `fewest` would give an interval."""
    disturbed = (DISTURBED,) if 2 * n_disturbed >= n > 0 else (PARTLY,) if n_disturbed else ()
    return disturbed + ((FEW,) if n < fewest else ())


def may_promise(doubts: Sequence[str]) -> bool:
    """Whether gains may be predicted from a figure with these doubts."""
    return not {DISTURBED, LOADED}.intersection(doubts)


def is_firm(doubts: Sequence[str]) -> bool:
    """Whether something may be concluded from it."""
    return may_promise(doubts) and ABOVE not in doubts


def mark(doubts: Sequence[str]) -> str:
    """What a table has beside it; "" for nothing."""
    return NOT_TO_BE_TRUSTED if not is_firm(doubts) else MARK if PARTLY in doubts else ""


def all_of(many: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The doubts of what is made of several figures."""
    return tuple(kind for kind in KINDS if any(kind in doubts for doubts in many))
