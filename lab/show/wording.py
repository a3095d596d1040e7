"""Figures in words: numbers with three significant digits and a unit."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lab.core.shown import Shown
from lab.errors import LabError

UNKNOWN = "-"  # the cell of an unknown figure


def digits(value: float) -> str:
    """A number with three significant digits, and thousands separated."""
    if value != value:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def times(factor: float) -> str:
    """A factor with three significant digits: 1.93x, 5x, 1,200x."""
    return f"{factor:,.0f}x" if factor >= 100 else f"{factor:.3g}x"


def percent(share: float) -> str:
    """A share with one decimal: 0.5 %, 2.5 %, 12.3 %, 100 %."""
    return f"{100 * share:.1g} %" if abs(share) < 0.001 else f"{round(100 * share, 1):,g} %"


def seconds(value: float) -> str:
    """A time with three significant digits and a unit: 62.6 s, 2.58 ms, 640 us, 1.20 ns."""
    if value != value or not value:
        return "-" if value else "0 s"
    units = {"s": 1.0, "ms": 1e3, "us": 1e6}
    unit = next((unit for unit, factor in units.items() if value * factor >= 1), "ns")
    return f"{digits(value * units.get(unit, 1e9))} {unit}"


def ends(one: Shown) -> str:
    """The interval or range of a figure; "" for a single run or a missing value."""
    if one.low is None or one.high is None or one.value != one.value:
        return ""
    return f"{digits(one.low)}-{digits(one.high)}"


class Term(NamedTuple):
    """A term. `also`: its other spellings; `shown`: where it appears."""

    name: str
    meaning: str
    unit: str = ""
    shown: str = ""
    also: Sequence[str] = ()


@cache
def terms() -> tuple[Term, ...]:
    """All terms, in the order of a first reading."""
    text = Path(__file__).with_name("terms.toml").read_text(encoding="utf-8")
    return tuple(Term(name, **fields) for name, fields in tomllib.loads(text).items())


def term(word: str) -> Term:
    """The term that is written so. LabError with the nearest one for an unknown word."""
    known = {plain(name): term for term in reversed(terms()) for name in (*term.also, term.name)}
    if found := known.get(plain(word)):
        return found
    (near,) = difflib.get_close_matches(plain(word), known, n=1, cutoff=0.0)
    raise LabError(
        f"{word!r} is not one of the lab's terms.",
        f"The nearest is {known[near].name}. All: lab words",
    )


def plain(word: str) -> str:
    """A word as `lab words` compares it."""
    return re.sub(r"[\s_-]+", " ", word.strip().lower())
