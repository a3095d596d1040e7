"""A choice of settings, the phases of a request, and the times of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lab.features.tune.lines import TPOT, TTFT

Choice = tuple[tuple[str, object], ...]
"""The settings that differ from the default, by name."""
NO_CHANGE: Choice = ()  # the default itself

PREFILL = "prefill"
DECODE = "decode"
LOSSY = ("cache_type_k", "cache_type_v", "model")  # settings that change what the model writes


def is_lossy(choice: Choice) -> bool:
    """Whether a choice changes what the model writes."""
    return any(name in LOSSY for name, _ in choice)


@dataclass(frozen=True)
class TunedPhase:
    """A part of the time that is minimized: how often it counts, and settings without influence."""

    name: str
    n: float
    ignored: frozenset[str]

    def part_of(self, choice: Choice) -> Choice:
        """The settings of a choice that influence this phase."""
        return tuple(setting for setting in choice if setting[0] not in self.ignored)


def phases_of(goal: str, n_gen: int, is_batch: bool) -> tuple[TunedPhase, ...]:
    """The phases that a goal minimizes, for requests of `n_gen` generated tokens."""
    prefill = TunedPhase(PREFILL, 1, frozenset({"threads"}))
    if goal == TTFT or n_gen < 2:
        return (prefill,)
    threads_of_prompts = "threads" if is_batch else "threads_batch"
    decode = TunedPhase(DECODE, n_gen - 1, frozenset({"ubatch", "batch", threads_of_prompts}))
    return (decode,) if goal == TPOT else (prefill, decode)


@dataclass(frozen=True)
class Timing:
    """The seconds of each phase of one run."""

    block: int
    choice: Choice
    seconds: Mapping[str, float]
    is_disturbed: bool = False
