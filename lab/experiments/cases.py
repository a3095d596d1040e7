"""What the experiments share: numbers as users write them, how far predictions are off, and which models have a cache
that can be copied and cut.

Saved states: the folder that they go to, whether there is room for them, and which models have one to save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lab.core import layers
from lab.core.levers import Prefix
from lab.core.memory import kv_bytes_per_position
from lab.core.record import Model
from lab.errors import LabError
from lab.runner import limits
from lab.runner.planned import Plan

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


def off_by(pairs: Iterable[tuple[float | None, float | None]]) -> str:
    """How far predictions are off, in words, of pairs of what is predicted and what is measured; "" without one."""
    known = [(expected, measured) for expected, measured in pairs if expected and measured and measured > 0]
    errors = [abs(expected / measured - 1) for expected, measured in known]
    return f"by {statistics.median(errors):.0%}, the median; at most {max(errors):.0%}" if errors else ""


@contextlib.contextmanager
def folder_in(out: str | Path) -> Iterator[Path]:
    """A folder for saved states, deleted afterwards: in `out`, or above it where that is yet to be made.

    Where nothing can be written there, it is in the system's folder for temporary files.
    """
    with contextlib.ExitStack() as stack:
        try:
            there = next(path for path in (Path(out).absolute(), *Path(out).absolute().parents) if path.is_dir())
            str(there).encode()  # the engine is told in UTF-8
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".lab-states-", dir=there))
        except (OSError, UnicodeError, StopIteration):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-states-"))
        yield Path(folder)


def check(model: Model, n_prefix: int, n_suffix: int) -> None:
    """LabError for prompts longer than the model's context, and for models that do not keep every position.

    What is to be used again must be there for every position: as a key and a value.
    """
    need_every_position(model)
    n_left = None if model.n_ctx_train is None else model.n_ctx_train - n_suffix - 1
    if n_left is not None and n_prefix > n_left:
        raise LabError(
            f"A prefix of {n_prefix:,} tokens and a suffix of {n_suffix:,} are longer than the context of "
            f"{model.n_ctx_train:,} tokens that {model.name} was trained for.",
            f"Give at most --prefix-len {n_left}." if n_left > 0 else "Give a shorter --suffix-len.",
        )


def with_room(plan: Plan, folder: Path) -> Plan:
    """The same plan, that refuses cases whose saved states do not fit into memory next to the context, or on disk."""
    refused = {}
    available, free = limits.memory_available(), shutil.disk_usage(folder).free
    per_position = kv_bytes_per_position(plan.model, plan.settings.type_k, plan.settings.type_v)
    for case in plan.cases:
        if per_position is None or not isinstance(case.lever, Prefix):
            continue
        n_bytes = case.lever.n_prefix * per_position
        on_host = 0 if plan.settings.n_gpu_layers else plan.memory(case).total_bytes
        what = f"The saved state of a prefix of {case.lever.n_prefix:,} tokens takes {n_bytes / 1e9:,.1f} GB"
        if n_bytes + on_host > available:
            refused[case] = (
                f"{what} of memory, and its context {on_host / 1e9:,.1f} GB; {available / 1e9:,.1f} GB are available."
            )
        elif n_bytes > free:
            refused[case] = f"{what}; {free / 1e9:,.1f} GB are free on the disk."
    return dataclasses.replace(plan, refused={**refused, **plan.refused})
