"""Lists: items in groups by a key of each, the first that is known, and words in a sentence."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key | None]) -> dict[Key, list[Item]]:
    """Items by their key, in the order in which keys appear; items whose key is None are left out."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        chosen = key(item)
        if chosen is not None:
            groups.setdefault(chosen, []).append(item)
    return groups


def first_known(items: Iterable[Item | None]) -> Item | None:
    """The first item that is not None; None without one."""
    return next((item for item in items if item is not None), None)


def join_and(words: Sequence[str]) -> str:
    """`a, b and c`; "" for no words."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def plural(n: int, noun: str) -> str:
    """`1 run`, `1,000 runs`: a count and a noun whose plural ends in s."""
    return f"{n:,} {noun}{'s' * (n != 1)}"
