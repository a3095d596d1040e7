"""Small functions for lists: group items, find the first known one, join words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key | None]) -> dict[Key, list[Item]]:
    """Items by key, in the order in which keys appear; omits items whose key is None."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        chosen = key(item)
        if chosen is not None:
            groups.setdefault(chosen, []).append(item)
    return groups


def first_known(items: Iterable[Item | None]) -> Item | None:
    """The first item that is not None, if any."""
    return next((item for item in items if item is not None), None)


def join_and(words: Sequence[str]) -> str:
    """`a, b and c`; "" for no words."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def plural(n: int, noun: str) -> str:
    """Such as `1 run` or `1,000 runs`; the plural must end in s."""
    return f"{n:,} {noun}{'s' * (n != 1)}"
