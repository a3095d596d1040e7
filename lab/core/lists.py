"""Small functions for lists: group items, find the first known one, join words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def grouped(items: Iterable[Item], key: Callable[[Item], Key | None]) -> dict[Key, list[Item]]:
    """Items by key, in the order in which keys appear; omits items with the key None."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        group = key(item)
        if group is not None:
            groups.setdefault(group, []).append(item)
    return groups


def first_known(items: Iterable[Item | None]) -> Item | None:
    """The first item that is not None, if any."""
    for item in items:
        if item is not None:
            return item
    return None


def join_and(names: Sequence[str]) -> str:
    """`a, b and c`; "" for no names."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def plural(n: int, noun: str) -> str:
    """Such as `1 run` or `1,000 runs`; the plural must end in s."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
