"""What only the runs of one feature hold: `Run` of record.py has a field for each."""

from __future__ import annotations

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
