"""A value with its doubts, as tables, sentences, pictures and JSON show it.

They use values of this type, or rows with `doubts`, so that a figure keeps its doubts wherever it
appears.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DISTURBED = "disturbed"
PARTLY = "partly disturbed"
FEW = "too few runs"
EXTRAPOLATED = "extrapolated"
ASSUMED = "assumed"
ABOVE = "above its ceiling"
LOADED = "ceilings of a loaded machine"
KINDS = (DISTURBED, PARTLY, FEW, EXTRAPOLATED, ASSUMED, ABOVE, LOADED)
"""All kinds of doubt, in the order in which they are named.

DISTURBED: at least half of the runs were disturbed, so their median is unreliable. PARTLY: fewer
were. FEW: too few runs for an interval. ABOVE: faster than its ceiling, which is wrong. LOADED:
other programs ran while the ceilings were measured.
"""

MARK = "!"
NOT_TO_BE_TRUSTED = "!!"  # some runs were disturbed; the figure is unreliable


@dataclass(frozen=True)
class Shown:
    """A value of `n` runs with its interval, or their range, and its doubts (some of KINDS).

    `low` and `high` are None for one run.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    doubts: tuple[str, ...] = ()


def is_unreliable(n: int, n_disturbed: int) -> bool:
    """Whether a median over n runs is unreliable: at least half of them were disturbed."""
    return n > 0 and 2 * n_disturbed >= n


def of_runs(n: int, n_disturbed: int, fewest: int) -> tuple[str, ...]:
    """The doubts of a median over n runs; an interval needs `fewest` runs."""
    doubts = []
    if is_unreliable(n, n_disturbed):
        doubts.append(DISTURBED)
    elif n_disturbed:
        doubts.append(PARTLY)
    if n < fewest:
        doubts.append(FEW)
    return tuple(doubts)


def may_promise(doubts: Sequence[str]) -> bool:
    """Whether gains may be predicted from a figure with these doubts."""
    return DISTURBED not in doubts and LOADED not in doubts


def is_firm(doubts: Sequence[str]) -> bool:
    """Whether a figure with these doubts is reliable."""
    return may_promise(doubts) and ABOVE not in doubts


def mark(doubts: Sequence[str]) -> str:
    """The mark of a figure in a table; "" without one."""
    if not is_firm(doubts):
        return NOT_TO_BE_TRUSTED
    return MARK if PARTLY in doubts else ""


def titled(label: str, n_disturbed: int, n: str) -> str:
    """The title of results from n runs or requests ("9 runs"), with the disturbed ones."""
    if n_disturbed == 0:
        return label
    return f"{label} ({MARK} {n_disturbed} of {n} disturbed)"


def no_conclusions(n_disturbed: int, n: str) -> str:
    """What is said of unreliable results in the place of sentences."""
    return f"No conclusions: {n_disturbed} of {n} were disturbed. Measure again."


def all_of(doubts_of_figures: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The doubts of a result from several figures, in the order of KINDS."""
    doubts: set[str] = set().union(*doubts_of_figures)
    return tuple(kind for kind in KINDS if kind in doubts)
