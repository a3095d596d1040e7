"""What is evaluated and scored, and how far a candidate's predictions are from the reference's: a
line of a results file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lab.core.bounds import Count, Number, Text, Whole
from lab.core.record import SCHEMA, Machine, Model, Record, Settings

SHORTEST_BUDGET_S = 10
LONGEST_BUDGET_S = 86_400


@dataclass(frozen=True)
class Stretch:
    """Tokens of a text that are evaluated in one call, after `n_past` tokens of the same text."""

    n_past: int
    tokens: tuple[int, ...]
    scored: tuple[int, ...]  # the places in `tokens` at which the prediction is scored
    next_tokens: tuple[int, ...]  # the text's own next token at each of these places


@dataclass(frozen=True)
class Divergence:
    """One chunk of text, or a part of it, scored by a candidate and by the reference."""

    kl: tuple[Number, ...]  # Kullback-Leibler divergence in nats at each scored position
    n_same: Count  # positions where the most likely token is the reference's
    nll: Number  # mean negative log-probability of the text's own next token
    reference_nll: Number

    def __post_init__(self) -> None:
        if not self.kl or not 0 <= self.n_same <= len(self.kl):
            raise ValueError(
                "a chunk needs positions, and no more of them agree than there are"
            )
        if min(self.kl) < -1e-3 or min(self.nll, self.reference_nll) < 0:
            raise ValueError("divergences and negative log-probabilities are not below zero")


@dataclass(frozen=True, kw_only=True)
class QualityLine:
    """All chunks of one candidate, or of the reference with other settings (the noise floor)."""

    session: Text
    machine: Machine
    model: Model
    settings: Settings
    started_at: Text
    variant: Text
    reference: Text  # the variant that it was compared with
    text: Text  # the source of the text: the option --prompt, or "" for the lab's own
    texts: tuple[Text, ...]  # the kind of text of each chunk
    chunks: tuple[Divergence, ...]
    # With --cache: where each of `chunks`, then a part of a text, ends; the parts of a text follow
    # one another. Empty: each is a text of its own
    depths: tuple[Whole, ...] = ()
    items: tuple[Divergence, ...] = ()  # tokens that decide, such as a call's arguments
    item_texts: tuple[Text, ...] = ()  # the kind of text of each
    cache_log: tuple[Text, ...] = ()  # what llama.cpp logs of changes of the cache
    is_floor: bool = False
    budget_s: Number | None = None
    command: tuple[Text, ...] | None = None
    schema: Whole = SCHEMA
    kind: Text = "quality"
    is_good: ClassVar[bool] = True  # a line is written only if it is whole
    is_warmup: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.chunks or len(self.texts) != len(self.chunks):
            raise ValueError("a quality needs chunks, and the kind of text of each")
        if self.depths and len(self.depths) != len(self.chunks):
            raise ValueError("a quality by depth needs the depth of each part")
        if len(self.items) != len(self.item_texts):
            raise ValueError("a quality needs the kind of text of each of its items")
        budget_s = self.budget_s
        if budget_s is not None and not SHORTEST_BUDGET_S <= budget_s <= LONGEST_BUDGET_S:
            raise ValueError("a budget is 10 s to 24 h")

    @property
    def model_name(self) -> str:
        return self.model.name


QuantLine = QualityLine | Record  # of a session
