"""Numbers in sentences."""

from __future__ import annotations


def plural(n: int, noun: str) -> str:
    """`1 run`, `1,000 runs`: a count and a noun whose plural ends in s."""
    return f"{n:,} {noun}{'s' * (n != 1)}"
