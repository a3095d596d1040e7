"""What the experiments share: numbers as users write them, and the timed runs of a setup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lab.errors import LabError


def numbers(option: str, asked: str | Sequence[int], most: int) -> tuple[int, ...]:
    """A list such as `1,2,4`, each from 1 to `most` and given once, in ascending order. LabError for anything else."""
    parts = [part.strip() for part in asked.split(",")] if isinstance(asked, str) else list(asked)
    values = []
    for part in parts:
        if isinstance(part, str) and not re.fullmatch(r"\d{1,12}", part):
            raise LabError(f"{part!r} is not a whole number (in {option} {asked}).", f"For example: {option} 1,2,4")
        value = int(part)
        if not 1 <= value <= most:
            raise LabError(f"{option} {value:,} is not possible.", f"Give whole numbers from 1 to {most:,}.")
        if value in values:
            raise LabError(f"{option} has {value:,} twice.", "Give each number once; --repeat measures it more often.")
        values.append(value)
    return tuple(sorted(values))
