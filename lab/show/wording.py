"""Figures in words: numbers with three significant digits and a unit."""

from __future__ import annotations

import difflib
import math
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
    if math.isnan(value):
        return UNKNOWN
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def times(factor: float) -> str:
    """A factor with three significant digits: 1.93x, 5x, 1,200x."""
    return f"{factor:,.0f}x" if factor >= 100 else f"{factor:.3g}x"


def percent(share: float) -> str:
    """A share with one decimal: 0.5 %, 2.5 %, 12.3 %, 100 %."""
    if abs(share) < 0.001:
        return f"{100 * share:.1g} %"
    return f"{round(100 * share, 1):,g} %"


def seconds(value: float) -> str:
    """A time with three significant digits and a unit: 62.6 s, 2.58 ms, 640 us, 1.20 ns."""
    if math.isnan(value):
        return UNKNOWN
    if value == 0:
        return "0 s"
    if value >= 1:
        return f"{digits(value)} s"
    if value * 1e3 >= 1:
        return f"{digits(value * 1e3)} ms"
    if value * 1e6 >= 1:
        return f"{digits(value * 1e6)} us"
    return f"{digits(value * 1e9)} ns"


def ends(shown: Shown) -> str:
    """The interval or range of a figure; "" for a single run or a missing value."""
    if shown.low is None or shown.high is None or math.isnan(shown.value):
        return ""
    return f"{digits(shown.low)}-{digits(shown.high)}"


def labelled(label: str, sentence: str) -> str:
    """A sentence after the label of its subject: "B: a request takes 2 s." """
    return f"{label}: {sentence[:1].lower()}{sentence[1:]}"


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


def named(names: Sequence[str]) -> list[Term]:
    """The term that several words name together, else the term of each."""
    try:
        return [term(" ".join(names))]
    except LabError:
        return [term(name) for name in names]


def term(word: str) -> Term:
    """The term that is written so. LabError with the nearest one for an unknown word."""
    by_spelling: dict[str, Term] = {}
    for entry in reversed(terms()):  # of two terms with one spelling the first counts
        for spelling in (*entry.also, entry.name):
            by_spelling[plain(spelling)] = entry
    spelling = plain(word)
    if spelling in by_spelling:
        return by_spelling[spelling]
    (near,) = difflib.get_close_matches(spelling, by_spelling, n=1, cutoff=0.0)
    raise LabError(
        f"{word!r} is not one of the lab's terms.",
        f"The nearest is {by_spelling[near].name}. All: lab words",
    )


def plain(word: str) -> str:
    """A word as `lab words` compares it."""
    return re.sub(r"[\s_-]+", " ", word.strip().lower())
