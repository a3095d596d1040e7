"""What the experiments share: numbers as users write them, and which models have a cache that can be copied and cut."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lab.core import layers
from lab.core.record import Model
from lab.errors import LabError

KEEPS_NO_POSITIONS = {
    layers.UNCOUNTED["llama4"],
    *(layers.SINGLE[key] for key in ("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")),
}
"""What `Model.uncounted` says of models that do not keep a key and a value of every position."""


def need_every_position(model: Model) -> None:
    """LabError for models that do not keep the keys and values of every position."""
    reason = model.uncounted if model.uncounted in KEEPS_NO_POSITIONS else None
    if any(model.windows or ()):
        reason = "some of its layers look back only through a sliding window"
    if reason:
        raise LabError(
            f"The cache of {model.name} cannot be copied and cut: {reason}.",
            "Take a model in which every layer sees all positions, such as -m smollm2-135m.",
        )


def numbers(
    option: str, asked: str | int | Sequence[int], most: int, more: str = "; --repeat measures it more often"
) -> tuple[int, ...]:
    """A list such as `1,2,4`, each from 1 to `most` and given once, in ascending order. LabError for anything else.

    `more`: what the hint adds for a number that is given twice.
    """
    given = [asked] if isinstance(asked, int) else asked.split(",") if isinstance(asked, str) else list(asked)
    values = []
    for part in (str(part).strip() for part in given):
        if not re.fullmatch(r"-?\d{1,12}", part):
            raise LabError(f"{part!r} is not a whole number (in {option} {asked}).", f"For example: {option} 1,2,4")
        value = int(part)
        if not 1 <= value <= most:
            raise LabError(f"{option} {value:,} is not possible.", f"Give whole numbers from 1 to {most:,}.")
        if value in values:
            raise LabError(f"{option} has {value:,} twice.", f"Give each number once{more}.")
        values.append(value)
    return tuple(sorted(values))
