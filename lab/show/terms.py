"""The lab's terms, from terms.toml."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.errors import LabError


@dataclass(frozen=True)
class Term:
    """A term. `also`: its other spellings; `shown`: where it appears."""

    name: str
    meaning: str
    unit: str = ""
    shown: str = ""
    also: tuple[str, ...] = ()


@cache
def terms() -> tuple[Term, ...]:
    """All terms, in the order of a first reading."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return tuple(
        Term(name, **{**fields, "also": tuple(fields.get("also", ()))}) for name, fields in tomllib.loads(text).items()
    )


def find(word: str) -> Term:
    """The term that is written so. LabError with the nearest one for an unknown word."""
    known = {_plain(name): term for term in reversed(terms()) for name in (*term.also, term.name)}
    if term := known.get(_plain(word)):
        return term
    (near,) = difflib.get_close_matches(_plain(word), known, n=1, cutoff=0.0)
    raise LabError(f"{word!r} is not one of the lab's terms.", f"The nearest is {known[near].name}. All: lab words")


def _plain(word: str) -> str:
    return re.sub(r"[\s_-]+", " ", word.strip().lower())
