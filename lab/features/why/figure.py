"""A figure: a rate in tokens per second, and what is known of how it came about.

What a text does not say is None, a missing fact, or one of the words for unknown: nothing is
guessed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lab.core.lists import plural
from lab.core.record import Record
from lab.core.request import RequestRecord, short_name
from lab.errors import printable
from lab.features.why import facts
from lab.features.why.facts import Fact

PREFILL = "prefill"
DECODE = "decode"
BOTH = "prefill and decode"
UNKNOWN = "unknown"
"""Phases that a rate is of."""

PROMPT = "prompt tokens over the time of prefill"
STEPS = "tokens over the time of their decode steps"
FIRST_FREE = "the first token too, but not its time"
MAYBE_FIRST = "tokens over the time of decode; it does not say whether the first token counts"
WHOLE = "tokens over the time of prefill and decode"
WINDOW = "an average over logging windows of decode alone"
MIXED_WINDOW = "an average over a logging window"
SERVED = "all answers of a benchmark over its whole duration"
SEVERAL_LENGTHS = "an average over several lengths"
MIXED = "prompt and generated tokens together"
"""What a rate counts; or UNKNOWN."""

MOST_TPS = 1e9
SIZES_OF_BLOCKS = {" - Small": "_S", " - Medium": "_M", " - Large": "_L"}
"""What llama-bench writes for the end of a quantization's name."""

LONGEST_NAME = 40  # letters of what an author calls a figure
FEWEST_TOKENS = 20  # of an answer whose rate is that of many steps
SMALL_PIECE = 64  # tokens of a prefill that is mostly latency, below
CACHED_TIMES = 3  # a prefill this many times as fast as its request allows was cached


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A rate and its setup. None: unknown.

    `depth` is the number of tokens in the context before the phase began: before the first
    processed token of a prefill, before the first generated token otherwise. `n_prompt` counts the
    tokens that were processed, without cached ones. `n_steps` decode steps took `decode_s`.
    """

    source: str  # the program
    tps: float
    phase: str
    counts: str
    n_prompt: int | None = None
    n_gen: int | None = None
    depth: int | None = None
    # Answers that the rate sums up, or that were decoded together
    n_streams: int | None = None
    n_steps: int | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    total_s: float | None = None
    sampling_s: float | None = None  # of a token, beside the rate
    drafted: int | None = None  # tokens
    accepted: int | None = None  # of the drafted tokens
    tokens_per_step: float | None = None  # of a draft's verification
    facts: Mapping[str, Fact] = field(default_factory=dict)
    spread: float | None = None  # the standard deviation of the figure's logarithm
    between: float | None = None  # the same between sessions
    compute_tps: float | None = None  # of decode steps without sampling
    line: int | None = None  # of the text
    about: str = ""
    heading: Fact | None = None  # what the author of a text calls it
    is_of_server: bool = False
    has_named_device: bool = False  # the user named it, as lab predict takes it
    was_cached: bool = False  # the prompt, so that its rate is none
    records: tuple[Record, ...] = ()
    requests: tuple[RequestRecord, ...] = ()

    @property
    def is_prefill(self) -> bool:
        return self.phase == PREFILL

    @property
    def model(self) -> str | None:
        name: str | None = facts.value_of(self.facts, facts.MODEL)
        return name

    @property
    def quantization(self) -> str | None:
        name: str | None = facts.value_of(self.facts, facts.QUANTIZATION)
        return name

    @property
    def n_params(self) -> int | None:
        number: int | None = facts.value_of(self.facts, facts.PARAMETERS)
        return number

    @property
    def device(self) -> str | None:
        name: str | None = facts.value_of(self.facts, facts.HARDWARE)
        return name

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a trial can measure."""
        return facts.settings_of(self.facts)

    @property
    def is_speculative(self) -> bool | None:
        """Whether it drafts tokens; None: unknown."""
        if self.drafted or self.tokens_per_step:
            return True
        said = facts.value_of(self.facts, facts.SPECULATION)
        return None if said is None else said != facts.NO_DRAFTS

    @property
    def each_tps(self) -> float:
        """The rate of one answer: a rate of several answers at once is their sum."""
        if self.n_streams and not self.is_prefill:
            return self.tps / self.n_streams
        return self.tps

    @property
    def model_label(self) -> str:
        """The model and its quantization."""
        name = self.model or ""
        for word, letter in SIZES_OF_BLOCKS.items():
            name = name.replace(word, letter)
        if self.quantization and self.quantization.lower() not in name.lower():
            return f"{name} {self.quantization}".strip()
        return name

    @property
    def position(self) -> float | None:
        """The mean position of generated tokens; of a prefill its length, if it began at 0."""
        if self.is_prefill:
            return self.n_prompt if self.depth == 0 else None
        if self.depth is None:
            return None
        return self.depth + (self.n_gen or 0) / 2

    @property
    def least_position(self) -> float | None:
        """The position, or the least that it can be by the processed tokens."""
        if self.position is None and not self.is_prefill and self.n_prompt:
            return self.n_prompt + (self.n_gen or 0) / 2
        return self.position

    @property
    def is_rate(self) -> bool:
        """Whether it can be compared: a single token or step and a cached prompt have no rate."""
        has_steps = self.is_prefill or (self.n_gen != 1 and self.n_steps != 1)
        return not self.was_cached and has_steps

    @property
    def weakness(self) -> str:
        """Why it says little, as words of its row; "" if it does not."""
        if self.was_cached:
            return "the prompt was cached: no rate"
        if self.is_prefill:
            is_small = self.n_prompt is not None and self.n_prompt < SMALL_PIECE
            return "a small piece, mostly latency" if is_small else ""
        if self.n_gen == 1:
            return "a single token: no decode rate"
        if self.n_steps == 1:
            return "a single step: no decode rate"
        if self.counts == MIXED_WINDOW:
            return "with prefill in it"
        if self.counts == WHOLE:
            return "whole answer"
        if self.n_gen is not None and self.n_gen < FEWEST_TOKENS:
            return "few tokens"
        return ""

    @property
    def label(self) -> str:
        """The figure in words: the program, the model, what was timed, and where.

        A path is shortened to the name of its file.
        """
        parts = [self.source, short_name(self.model_label), short_name(self.device or "")]
        parts.append(self.timed)
        if self.n_streams is not None and self.n_streams > 1:
            parts.append(f"{self.n_streams} at once")
        if self.is_speculative:
            parts.append("speculative decoding")
        heading = quoted(str(self.heading.value)) if self.heading else ""
        parts += [self.about, heading, self.weakness]
        if self.line is not None:
            parts.append(f"line {self.line}")
        return printable(", ".join(part for part in parts if part))

    @property
    def timed(self) -> str:
        """What was timed, in words."""
        if self.is_prefill:
            return self._timed_prefill()
        tokens = "tokens"
        if self.n_gen is not None:
            tokens = "1 token" if self.n_gen == 1 else f"{plural(self.n_gen, 'token')}"
        if self.depth is not None:
            return f"{tokens} after {self.depth:,}"
        if self.n_prompt:
            return f"{tokens} after at least {self.n_prompt:,}"
        return f"{tokens} after an unknown context"

    def _timed_prefill(self) -> str:
        size = (
            "prefill"
            if self.n_prompt is None
            else f"prefill of {plural(self.n_prompt, 'token')}"
        )
        if self.depth is None:
            return f"{size} after an unknown context"
        if self.depth:
            return f"{size} after {self.depth:,}"
        return size


def quoted(words: str) -> str:
    """What an author calls a figure, in quotes, shortened."""
    if len(words) > LONGEST_NAME:
        return f'"{words[:LONGEST_NAME]}..."'
    return f'"{words}"'


def is_possible(tps: float) -> bool:
    """Whether a number can be a rate."""
    return math.isfinite(tps) and 0 < tps < MOST_TPS
