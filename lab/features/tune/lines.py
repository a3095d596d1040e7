"""What a session of `lab tune` was about: a line at its beginning. Its runs name their stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lab.core.bounds import Count, Text, Whole
from lab.core.record import SCHEMA, Machine, Model, Settings

REQUEST = "request"
TTFT = "ttft"
TPOT = "tpot"
THROUGHPUT = "throughput"
GOALS = {
    REQUEST: "time of the whole request",
    TTFT: "time to the first token",
    TPOT: "time of all tokens after the first",
    THROUGHPUT: "time of all requests together",
}
"""What each goal minimizes."""

SEARCH = "tune search"  # the part of the runs that search
CONFIRM = "tune confirm"  # the part of the runs that confirm the winner
PARTS = (SEARCH, CONFIRM)


@dataclass(frozen=True, kw_only=True)
class TuningLine:
    """The goal, and the tokens of an answer; runs of the search generate at most a part of them."""

    session: Text
    machine: Machine
    model: Model
    settings: Settings  # the default
    started_at: Text
    goal: Text
    n_gen: Count
    command: tuple[Text, ...] | None = None
    schema: Whole = SCHEMA
    kind: Text = "tuning"
    is_good: ClassVar[bool] = True
    is_warmup: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.goal not in GOALS or self.n_gen < 1:
            raise ValueError("a tuning needs a goal of the lab, and tokens to generate")

    @property
    def model_name(self) -> str:
        return self.model.name
