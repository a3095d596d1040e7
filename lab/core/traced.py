"""What `lab trace` finds: the time of each operation of each layer, or the attention weights of each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

SAMPLING = "sampling"
"""The part of a step after its last operation and the copy of its logits: choosing a token."""


@dataclass(frozen=True)
class Part:
    """The operations of one kind in one layer (None: before the first or after the last), or the sum of several.

    `n_bytes` are read; None where that is not known. `flops` are those of products; None if there are none. `least_s`:
    at the kernel's ceiling, None where none is known; `held_s` is the time of the operations that have one.
    """

    operation: str
    layer: int | None
    device: str
    n_bytes: float | None
    flops: float | None
    seconds: float
    least_s: float | None = None
    held_s: float = 0.0
    n: int = 1


@dataclass(frozen=True)
class Phase:
    """Prefill of a prompt, or a decode step after it. Times are medians over the traced steps.

    The last parts are what lies before the first operation and after the last one, and sampling.
    """

    name: str  # prefill, decode
    n_tokens: int
    n_past: int
    parts: tuple[Part, ...]
    stops_s: dict[str, float]  # by device the cost of a stop, taken off; without a device that shows none
    untraced_s: float  # the same step without stops, and without sampling
    n_stops: int  # in each step
    n_steps: int
    threads_s: float | None = None  # the start and end of the CPU's threads, taken off too; None for one thread

    def __post_init__(self) -> None:
        if not (0 < self.untraced_s < math.inf and 0 < self.total_s < math.inf):
            raise ValueError("a traced step needs a time")

    @property
    def total_s(self) -> float:
        """All parts, without those that were faster than their stops: of such a part noise is left, below zero."""
        return sum(max(0.0, part.seconds) for part in self.parts)

    @property
    def sum_s(self) -> float:
        """All parts without sampling."""
        return sum(part.seconds for part in self.parts if part.operation != SAMPLING)

    @property
    def off(self) -> float:
        """How far that is from the step without stops, as a share of it."""
        return self.sum_s / self.untraced_s - 1


@dataclass(frozen=True)
class TokenTrace:
    """A token's way: prefill and decode, and which ceilings the operations are held against (None: none known)."""

    prefill: Phase
    decode: Phase
    ceilings_measured_at: str | None

    @property
    def phases(self) -> tuple[Phase, Phase]:
        return self.prefill, self.decode


@dataclass(frozen=True)
class Looks:
    """What a model looks at in a prompt of n tokens, for each layer: attention weights, the means over its heads.

    `prefill`: n rows (one for each token that asks) of n weights. `decode`: the row of the last token, decoded alone
    after the others. `changes`: how far K and V of the later tokens move when one token is replaced, as shares of
    their size.
    """

    prefill: tuple[tuple[tuple[float, ...], ...], ...]
    decode: tuple[tuple[float, ...], ...]
    changes: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Attention:
    """The weights of every layer, the texts of the tokens, and which of them was replaced by which other one."""

    text: str
    tokens: tuple[str, ...]
    replaced: int
    replacement: str
    looks: Looks

    def __post_init__(self) -> None:
        looks, n = self.looks, len(self.tokens)
        rows = [row for layer in (*looks.prefill, looks.decode) for row in layer]
        is_whole = 0 < len(looks.prefill) == len(looks.decode) == len(looks.changes)
        is_square = all(len(layer) == n for layer in looks.prefill) and all(len(row) == n for row in rows)
        if not (is_whole and is_square and 0 <= self.replaced < n):
            raise ValueError("attention needs a weight for each pair of tokens in each layer")

    @property
    def differs(self) -> float:
        """The largest difference between the row of decode and the last row of prefill."""
        pairs = zip(self.looks.decode, (rows[-1] for rows in self.looks.prefill), strict=True)
        return max(abs(one - other) for row, last in pairs for one, other in zip(row, last, strict=True))
