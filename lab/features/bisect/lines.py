"""The lines of a session of `lab bisect` that are no runs: what was searched, and each build."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from lab.core.bounds import Count, Number, Text, Whole
from lab.core.record import SCHEMA, Machine, Model, Settings

PREFILL = "prefill"
DECODE = "decode"
FIGURES = (PREFILL, DECODE)
MOST_BUILDS = 1000


@dataclass(frozen=True, kw_only=True)
class BisectLine:
    """A search: the builds from the good end to the bad one, and the slowdown that is looked for.

    A run's variant is the name of its build, as `variant` makes it.
    """

    session: Text
    machine: Machine
    model: Model
    settings: Settings
    started_at: Text
    builds: tuple[Text, ...]
    figures: tuple[Text, ...]
    at_least: Number
    compiler: Text | None = None  # of versions that were built here
    command: tuple[Text, ...] | None = None
    schema: Whole = SCHEMA
    kind: Text = "bisect"
    is_good: ClassVar[bool] = True
    is_warmup: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 2 <= len(self.builds) <= MOST_BUILDS:
            raise ValueError(f"a search has 2 to {MOST_BUILDS} builds")
        if not self.figures or not set(self.figures) <= set(FIGURES):
            raise ValueError("a search is about prefill, decode or both")
        if not 0 < self.at_least < 10:
            raise ValueError("a search is for a slowdown above 0 and below 1000 %")

    @property
    def model_name(self) -> str:
        return self.model.name


@dataclass(frozen=True, kw_only=True)
class BuildLine:
    """A build of a search: its defaults, or why and after how many blocks it was left out."""

    session: Text
    machine: Machine
    model: Model
    settings: Settings
    started_at: Text
    place: Whole  # in the series
    n_blocks: Count
    problem: Text | None = None
    defaults: dict[Text, Text] = field(default_factory=dict)  # of llama.cpp's structures
    command: tuple[Text, ...] | None = None
    schema: Whole = SCHEMA
    kind: Text = "bisect build"
    is_good: ClassVar[bool] = True
    is_warmup: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.place < MOST_BUILDS or self.n_blocks < 0:
            raise ValueError("a build has a place in its series")

    @property
    def model_name(self) -> str:
        return self.model.name


def variant(place: int, labels: tuple[str, ...]) -> str:
    """The name of a build in records. Names are in the order of the series; -1 is the good end
    again."""
    if place < 0:
        return f"000 {labels[0]} again"
    return f"{place:03d} {labels[place]}"


def place_of(name: str | None, labels: tuple[str, ...]) -> int | None:
    """The place that a variant names; None: it names none of these builds."""
    digits = (name or "")[:3]
    if not digits.isdigit():
        return None
    place = int(digits)
    if place == 0 and name == variant(-1, labels):
        return -1
    return place if place < len(labels) and name == variant(place, labels) else None
