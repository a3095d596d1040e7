"""What experiments refuse before anything is measured: numbers that are not possible, models that
cannot do it.
"""

from __future__ import annotations

import re

from lab.core import arguments, layers
from lab.core.arguments import Numbers
from lab.core.asked_settings import in_digits
from lab.core.record import Model
from lab.errors import LabError


def whole_numbers(option: str, numbers: Numbers, most: int) -> tuple[int, ...]:
    """A list such as `1,2,4`: different numbers from 1 to `most`, ascending. LabError for anything
    else.
    """
    items = arguments.whole_numbers(option, numbers)
    parts = items.split(",") if isinstance(items, str) else list(map(str, items))
    values: list[int] = []
    for part in parts:
        digits = in_digits(part.strip())
        if not re.fullmatch(r"-?\d{1,12}", digits):
            raise LabError(
                f"{option} {numbers}: {part.strip()!r} is not a whole number.",
                f"For example: {option} 1,2,4",
            )
        value = int(digits)
        if not 1 <= value <= most:
            raise LabError(
                f"{option} {value:,} is not possible.",
                f"Give whole numbers from 1 to {most:,}.",
            )
        if value in values:
            raise LabError(f"{option} has {value:,} twice.", "Give each number once.")
        values.append(value)
    return tuple(sorted(values))


def need_every_position(model: Model) -> None:
    """LabError for models that do not keep the keys and values of every position."""
    reason = None
    if any(model.windows or ()):
        reason = "some of its layers use sliding-window attention"
    elif model.n_state:
        reason = layers.RECURRENT
    elif model.uncounted in layers.reasons_without_cache():
        reason = model.uncounted
    if reason:
        raise LabError(
            f"The cache of {model.name} cannot be copied and cut: {reason}.",
            "Use a model in which every layer attends to all positions, such as -m smollm2-135m.",
        )
