"""The levers: what a run of an experiment changed, besides prefilling a prompt and generating tokens.

`kv_unified` is the default of that setting for runs of the experiment; None if they have one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from lab.core.lists import plural

LOOKUP = "lookup"


@dataclass(frozen=True)
class Batch:
    """`lab batch`: n_seq sequences were decoded together, after prompts of n_prompt tokens each."""

    kv_unified: ClassVar[str | None] = "off"
    n_seq: int
    is_shared: bool  # the prompts differ only in their last tokens, and were prefilled once

    @property
    def words(self) -> str:
        return plural(self.n_seq, "sequence") + (", shared prompt" if self.is_shared else "")


@dataclass(frozen=True)
class Stall:
    """`lab stall`: a prompt of n_prompt tokens was prefilled in chunks while other sequences decoded."""

    kv_unified: ClassVar[str | None] = "on"
    n_streams: int
    chunk: int | None  # None: all at once, while the streams waited
    n_context: int  # tokens of each stream's own prompt
    n_before: int  # steps of the streams alone, before the prompt came

    @property
    def words(self) -> str:
        return f"{in_chunks(self.chunk)} beside {plural(self.n_streams, 'stream')}"


@dataclass(frozen=True)
class Speculation:
    """`lab speculate`: tokens were drafted and verified together; or, without a text, only single steps were timed.

    With a `text` the prompt was cut from it, and n_gen tokens were generated. Without one, the run has steps of 1 to
    n_draft + 1 positions and steps of the draft model, each forgotten: the curve from which speed-ups are predicted.
    """

    kv_unified: ClassVar[str | None] = None
    draft: str | None  # LOOKUP (earlier words of the text), a model's label; None: no drafts
    n_draft: int  # drafted before each verification, at most; 0: plain decoding
    text: str | None

    @property
    def words(self) -> str:
        if self.text is None:
            return f"steps of 1 to {self.n_draft + 1} positions"
        return f"{self.text}, " + (f"{self.n_draft} drafted by {self.draft}" if self.n_draft else "no drafts")


@dataclass(frozen=True)
class Turns:
    """`lab turns`: a conversation; each turn's prompt held all earlier turns, and the cache served its beginning."""

    kv_unified: ClassVar[str | None] = None
    system: int  # tokens of the system prompt
    messages: tuple[int, ...]  # tokens of each turn's message
    answers: tuple[int, ...]  # tokens of each turn's answer
    breaks: str  # what broke the cache, as in --break
    keep: str  # where the cache was between turns: memory, disk, none
    whole: bool = False  # the model's cache cannot keep a part: it serves all or nothing
    asked: str = ""  # --turn, if its lengths were drawn
    only: tuple[int, ...] = ()  # the turns that were measured, from 1; empty: all
    replay: str = ""  # the file whose messages gave the lengths

    @property
    def words(self) -> str:
        how = {"memory": "cache in memory", "disk": "cache on disk", "none": "no cache"}.get(self.keep, self.keep)
        return f"{plural(len(self.messages), 'turn')}, {how}" + (f", {self.breaks}" if self.breaks else "")


def in_chunks(chunk: int | None) -> str:
    """`in chunks of 256`, or (None) `all at once`."""
    return "all at once" if chunk is None else f"in chunks of {chunk:,}"


Lever = Batch | Stall | Speculation | Turns

LEVERS: dict[str, type[Lever]] = {kind.__name__.lower(): kind for kind in get_args(Lever)}
"""By the field of a run."""


def name_of(n_prompt: int, lever: Lever | None) -> str:
    """What a run does, for tables, progress lines and errors."""
    return f"{n_prompt:,} prompt tokens" + (f", {lever.words}" if lever else "")
