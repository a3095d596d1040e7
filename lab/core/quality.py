"""What `lab quant` finds: how far a model's predictions of the next token are from a reference's, chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """One chunk of text. `kl` is the Kullback-Leibler divergence (in nats) at each scored position.

    `n_same`: at how many of them the most likely token is the reference's. `nll`: the mean negative log-probability of
    the text's own next token, of the candidate and of the reference. `most`: where only a part of the reference's
    predictions was kept, `kl` is the least that is possible and this the largest mean; None where `kl` is exact.
    """

    kl: tuple[float, ...]
    n_same: int
    nll: float
    reference_nll: float
    most: float | None = None

    def __post_init__(self) -> None:
        if not self.kl or not 0 <= self.n_same <= len(self.kl):
            raise ValueError("a chunk needs positions, and no more of them agree than there are")
        if min(self.kl) < -1e-3 or min(self.nll, self.reference_nll) < 0:
            raise ValueError("divergences and negative log-probabilities are not below zero")
        if self.most is not None and not sum(self.kl) / len(self.kl) <= self.most + 1e-6:
            raise ValueError("the largest possible divergence is not below the least")


@dataclass(frozen=True)
class Quality:
    """All chunks of one candidate. `texts` names the kind of text of each chunk."""

    reference: str  # the variant that it was compared with
    text: str  # the source of the text: the option --text, or the lab's own
    texts: tuple[str, ...]
    chunks: tuple[Divergence, ...]
    is_floor: bool = False  # the reference itself, with other settings
    budget_s: float | None = None  # the options --budget and --until; None: from before these were kept
    until: float | None = None

    def __post_init__(self) -> None:
        if not self.chunks or len(self.texts) != len(self.chunks):
            raise ValueError("a quality needs chunks, and the kind of text of each")
        if not 10 <= (self.budget_s or 10) <= 86400 or not 0.001 <= (self.until or 0.001) < 1:
            raise ValueError("a budget is 10 s to 24 h, and --until is a share")
