"""What `lab trace` finds, as lines of a results file: a token's trace, and attention weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from lab.core.bounds import Amount, Count, Number, Size, Text, Whole, Work
from lab.core.record import SCHEMA, Machine, Model, Placement, Settings

# Choosing a token: after a step's last operation and the copy of its logits
SAMPLING = "sampling"


@dataclass(frozen=True)
class TracedPart:
    """The operations of one kind in one layer, or the sum of several."""

    operation: Text
    layer: Whole | None  # None: before the first or after the last
    device: Text
    n_bytes: Amount | None  # that are read; None: not known
    flops: Work | None  # of products; None: there are none
    seconds: Number
    least_s: Number | None = None  # at the kernel's ceiling; None: none is known
    held_s: Number = 0.0  # the time of the operations that have a ceiling
    n: Size = 1


@dataclass(frozen=True)
class TracedPhase:
    """Prefill of a prompt, or a decode step after it. Times are medians over the traced steps."""

    name: Text  # prefill, decode
    n_tokens: Count
    n_past: Count
    parts: tuple[TracedPart, ...]
    stops_s: dict[Text, Number]  # by device: the cost of a stop, which is subtracted
    untraced_s: Number  # the same step without stops, and without sampling
    n_stops: Count  # in each step
    n_steps: Count
    threads_s: Number | None = None  # start and end of the CPU's threads; None for one thread

    def __post_init__(self) -> None:
        if not (0 < self.untraced_s < math.inf and 0 < self.total_s < math.inf):
            raise ValueError("a traced step needs a time")

    @property
    def total_s(self) -> float:
        """The sum of all parts, without noise: parts that were faster than their stops."""
        return sum(max(0.0, part.seconds) for part in self.parts)

    @property
    def sum_s(self) -> float:
        """The sum of all parts but the choice of the token."""
        return sum(part.seconds for part in self.parts if part.operation != SAMPLING)

    @property
    def off(self) -> float:
        """The difference between the sum and the step without stops, as a share of that step."""
        return self.sum_s / self.untraced_s - 1


@dataclass(frozen=True, kw_only=True)
class TraceLine:
    """The way of a token: prefill and decode, and when their ceilings were measured (if at all)."""

    session: Text
    machine: Machine
    model: Model
    settings: Settings
    started_at: Text
    prefill: TracedPhase
    decode: TracedPhase
    ceilings_measured_at: Text | None
    placement: Placement | None = None
    command: tuple[Text, ...] | None = None
    schema: Whole = SCHEMA
    kind: Text = "trace"

    is_good: ClassVar[bool] = True  # a line is written only if it is whole

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def phases(self) -> tuple[TracedPhase, TracedPhase]:
        return self.prefill, self.decode


Row = tuple[Number, ...]  # the attention weights of one token, for each token of the prompt


@dataclass(frozen=True)
class Looks:
    """Attention in a prompt of n tokens, by layer; weights are means over the layer's heads."""

    prefill: tuple[tuple[Row, ...], ...]  # a row of n weights for each token that asks
    decode: tuple[Row, ...]  # the row of the last token, decoded alone after the others
    # Of K and V of later tokens if a token is replaced
    changes: tuple[tuple[Number, Number], ...]


@dataclass(frozen=True, kw_only=True)
class AttentionLine:
    """The weights of every layer, the texts of the tokens, and which token was replaced by what."""

    session: Text
    machine: Machine
    model: Model
    settings: Settings
    started_at: Text
    text: Text
    tokens: tuple[Text, ...]
    replaced: Whole
    replacement: Text
    looks: Looks
    command: tuple[Text, ...] | None = None
    schema: Whole = SCHEMA
    kind: Text = "attention"
    is_good: ClassVar[bool] = True  # a line is written only if it is whole

    def __post_init__(self) -> None:
        looks = self.looks
        is_whole = 0 < len(looks.prefill) == len(looks.decode) == len(looks.changes)
        if not (
            is_whole and self._has_square_matrices() and self.replaced in range(self.n_tokens)
        ):
            raise ValueError("attention needs a weight for each pair of tokens in each layer")

    def _has_square_matrices(self) -> bool:
        n = self.n_tokens
        for rows in self.looks.prefill:
            if len(rows) != n or any(len(row) != n for row in rows):
                return False
        return all(len(row) == n for row in self.looks.decode)

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def differs(self) -> float:
        """The largest difference between the row of decode and the last row of prefill."""
        largest = 0.0
        for decoded, rows in zip(self.looks.decode, self.looks.prefill, strict=True):
            for weight, prefilled in zip(decoded, rows[-1], strict=True):
                largest = max(largest, abs(weight - prefilled))
        return largest
