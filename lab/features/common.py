"""Shared by the experiments: parsing numbers, where two answers first differ, prediction errors, cells of tables,
and models whose cache can be copied and cut.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lab.core import shape
from lab.core.asked_settings import in_digits
from lab.core.record import Model
from lab.errors import LabError
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd


def numbers(
    option: str, asked: str | int | Sequence[int], most: int, more: str = "; use --repeat for more runs"
) -> tuple[int, ...]:
    """A list such as `1,2,4`: different numbers from 1 to `most`, in ascending order. LabError for anything else.

    `more` is added to the hint for a number that is given twice.
    """
    given = [asked] if isinstance(asked, int) else asked.split(",") if isinstance(asked, str) else list(asked)
    values = []
    for part in (str(part).strip() for part in given):
        if not re.fullmatch(r"-?\d{1,12}", in_digits(part)):
            raise LabError(f"{option} {asked}: {part!r} is not a whole number.", f"For example: {option} 1,2,4")
        value = int(in_digits(part))
        if not 1 <= value <= most:
            raise LabError(f"{option} {value:,} is not possible.", f"Give whole numbers from 1 to {most:,}.")
        if value in values:
            raise LabError(f"{option} has {value:,} twice.", f"Give each number once{more}.")
        values.append(value)
    return tuple(sorted(values))


def as_lengths(prompt_len: str | int | Sequence[int]) -> str | Sequence[int]:
    """Prompt lengths as `make_plan` takes them."""
    return [prompt_len] if isinstance(prompt_len, int) else prompt_len


def listed(values: Iterable[object]) -> str:
    """Numbers as an option takes them: each once, ascending, without None."""
    return ",".join(str(value) for value in sorted({value for value in values if isinstance(value, int)}))


KEEPS_NO_POSITIONS = {
    shape.UNCOUNTED["llama4"],
    *(shape.SINGLE[key] for key in ("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")),
}
"""`Model.uncounted` of models that do not keep a key and a value of every position."""


def need_every_position(model: Model) -> None:
    """LabError for models that do not keep the keys and values of every position."""
    reason = model.uncounted if model.uncounted in KEEPS_NO_POSITIONS else None
    if model.n_state:
        reason = shape.SINGLE["ssm.state_size"]
    if any(model.windows or ()):
        reason = "some of its layers use sliding-window attention"
    if reason:
        raise LabError(
            f"The cache of {model.name} cannot be copied and cut: {reason}.",
            "Use a model in which every layer attends to all positions, such as -m smollm2-135m.",
        )


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The first position at which two answers to one prompt differ; None if they agree as far as both go."""
    pairs = enumerate(zip(ids, others, strict=False))
    return next((i for i, (own, other) in pairs if own != other), None)


def sentence(words: str) -> str:
    """The words with a capital letter and a full stop."""
    return f"{words[:1].upper()}{words[1:]}."


def off_by(pairs: Iterable[tuple[float | None, float | None]], what: str, which: str = "") -> list[str]:
    """A sentence on prediction errors, from pairs of predicted and measured values; none if no pair is known."""
    known = [(expected, measured) for expected, measured in pairs if expected and measured and measured > 0]
    errors = [abs(expected / measured - 1) for expected, measured in known]
    if not errors:
        return []
    middle, most = (100 * error for error in (statistics.median(errors), max(errors)))
    return [f"Prediction error of {what}: median {middle:.0f} %, maximum {most:.0f} %{which}."]


def cell(value: float | None, scale: float = 1.0, form: str = "") -> str:
    """A number in a table, `-` if unknown; three significant digits unless a `form` is given."""
    if value is None:
        return "-"
    return format(scale * value, form) if form else digits(scale * value)


def ranged(values: tuple[float, float, float], n_runs: int) -> str:
    """Milliseconds in a table, with their range over several runs below."""
    value, low, high = (1e3 * seconds for seconds in values)
    ends = f"\n{digits(low)}-{digits(high)}".replace(",", "")  # as narrow as can be
    return digits(value) + (ends if n_runs > 1 else "")


def as_rows(table: pd.DataFrame) -> list[Any]:
    """The rows of a table as named tuples, with None for an unknown figure."""
    known = table.astype(object)
    return list(known.where(known.notna(), None).itertuples(index=False, name="Row"))
