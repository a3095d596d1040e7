"""What only the runs of one feature hold: `Run` of record.py has a field for each."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """`lab tune`: its goal, and the stage in which a run was made."""

    goal: str  # request, ttft, tpot, throughput
    stage: str  # search, confirm
    n_gen: int  # asked for; in the stage `search` runs generate at most a part of them


@dataclass(frozen=True)
class Divergence:
    """One chunk of text, scored by a candidate and by the reference."""

    kl: tuple[float, ...]  # Kullback-Leibler divergence in nats at each scored position
    n_same: int  # positions where the most likely token is the reference's
    nll: float  # mean negative log-probability of the text's own next token
    reference_nll: float
    most: float | None = (
        None  # largest mean, if only a part of the reference was kept: `kl` is then the least
    )

    def __post_init__(self) -> None:
        if not self.kl or not 0 <= self.n_same <= len(self.kl):
            raise ValueError("a chunk needs positions, and no more of them agree than there are")
        if min(self.kl) < -1e-3 or min(self.nll, self.reference_nll) < 0:
            raise ValueError("divergences and negative log-probabilities are not below zero")
        if self.most is not None and not sum(self.kl) / len(self.kl) <= self.most + 1e-6:
            raise ValueError("the largest possible divergence is not below the least")


@dataclass(frozen=True)
class Quality:
    """All chunks of one candidate."""

    reference: str  # the variant that it was compared with
    text: str  # the source of the text: the option --text, or the lab's own
    texts: tuple[str, ...]  # the kind of text of each chunk
    chunks: tuple[Divergence, ...]
    is_floor: bool = False  # the reference itself, with other settings
    budget_s: float | None = None  # the option --budget; None: from before it was kept

    def __post_init__(self) -> None:
        if not self.chunks or len(self.texts) != len(self.chunks):
            raise ValueError("a quality needs chunks, and the kind of text of each")
        if not 10 <= (self.budget_s or 10) <= 86400:
            raise ValueError("a budget is 10 s to 24 h")


SAMPLING = "sampling"  # the part of a step after its last operation and the copy of its logits: choosing a token


@dataclass(frozen=True)
class Part:
    """The operations of one kind in one layer, or the sum of several."""

    operation: str
    layer: int | None  # None: before the first or after the last
    device: str
    n_bytes: float | None  # that are read; None: not known
    flops: float | None  # of products; None: there are none
    seconds: float
    least_s: float | None = None  # at the kernel's ceiling; None: none is known
    held_s: float = 0.0  # the time of the operations that have a ceiling
    n: int = 1


@dataclass(frozen=True)
class Phase:
    """Prefill of a prompt, or a decode step after it. Times are medians over the traced steps."""

    name: str  # prefill, decode
    n_tokens: int
    n_past: int
    parts: tuple[
        Part, ...
    ]  # the last ones: before the first operation, after the last one, and sampling
    stops_s: dict[
        str, float
    ]  # by device the cost of a stop, taken off; without a device that shows none
    untraced_s: float  # the same step without stops, and without sampling
    n_stops: int  # in each step
    n_steps: int
    threads_s: float | None = (
        None  # the start and end of the CPU's threads, taken off too; None for one thread
    )

    def __post_init__(self) -> None:
        if not (0 < self.untraced_s < math.inf and 0 < self.total_s < math.inf):
            raise ValueError("a traced step needs a time")

    @property
    def total_s(self) -> float:
        """All parts, without those that were faster than their stops: of such a part noise is left, below zero."""
        return sum(max(0.0, part.seconds) for part in self.parts)

    @property
    def sum_s(self) -> float:
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
    """What a model looks at in a prompt of n tokens, for each layer: attention weights, the means over its heads."""

    prefill: tuple[
        tuple[tuple[float, ...], ...], ...
    ]  # n rows (one for each token that asks) of n weights
    decode: tuple[
        tuple[float, ...], ...
    ]  # the row of the last token, decoded alone after the others
    changes: tuple[
        tuple[float, float], ...
    ]  # how far K and V of later tokens move if a token is replaced: shares


@dataclass(frozen=True)
class Attention:
    """The weights of every layer, the texts of the tokens, and which of them was replaced by which other one."""

    text: str
    tokens: tuple[str, ...]
    replaced: int
    replacement: str
    looks: Looks

    def __post_init__(self) -> None:
        looks = self.looks
        n = len(self.tokens)
        rows = [row for layer in (*looks.prefill, looks.decode) for row in layer]
        is_whole = 0 < len(looks.prefill) == len(looks.decode) == len(looks.changes)
        is_square = all(len(layer) == n for layer in looks.prefill) and all(
            len(row) == n for row in rows
        )
        if not (is_whole and is_square and 0 <= self.replaced < n):
            raise ValueError("attention needs a weight for each pair of tokens in each layer")

    @property
    def differs(self) -> float:
        """The largest difference between the row of decode and the last row of prefill."""
        pairs = zip(self.looks.decode, (rows[-1] for rows in self.looks.prefill), strict=True)
        return max(
            abs(one - other) for row, last in pairs for one, other in zip(row, last, strict=True)
        )
