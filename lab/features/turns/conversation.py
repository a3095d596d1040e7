"""A conversation: its case in records, what breaks its cache, and the prompts of its turns."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from lab.app.experiment_tables import first_difference
from lab.core.experiments import ExperimentRuns, setup_of
from lab.core.lists import plural
from lab.core.record import OK, Run
from lab.errors import LabError

T = TypeVar("T")  # a token or a word

NAME = "turns"  # of the experiment in records
MEMORY = "memory"
SLOT = "slot"
DISK = "disk"
NONE = "none"
KEEPS = (MEMORY, SLOT, DISK, NONE)  # where a cache can be between turns
LABELS = {
    MEMORY: "cache in memory",
    SLOT: "slot of its own",
    DISK: "cache on disk",
    NONE: "no cache",
}

SECOND = "second"
EVENTS = ("system", "tools", "truncate", SECOND, "shift", "thinking")  # what breaks a cache
CLIENT = "client"
TEMPLATE = "template"
RECORDED = (CLIENT, TEMPLATE)  # who changed what the cache has, in recorded requests
CLOCK_AT = 16  # the token of the system prompt that a changed clock changes


@dataclass(frozen=True)
class Conversation:
    """Each turn's prompt holds all earlier turns, and the cache serves its beginning."""

    system: int  # tokens of the system prompt
    messages: tuple[int, ...]  # tokens of each turn's message
    answers: tuple[int, ...]  # tokens of each turn's answer
    breaks: str  # what broke the cache, as in --break
    keep: str  # where the cache was between turns: memory, slot, disk, none
    whole: bool = False  # the model's cache cannot keep a part: it serves all or nothing
    asked: str = ""  # --turn, if its lengths were drawn
    only: tuple[int, ...] = ()  # the turns that were measured, from 1; empty: all
    replay: str = ""  # the file with the requests that gave the lengths
    same: tuple[int, ...] = ()
    """Of recorded requests: first tokens of each prompt that are those of the turn before and its
    answer; `messages` are then the new tokens, and prompts have no other parts."""
    again: tuple[int, ...] = ()  # tokens after those that the turn before had too

    def __post_init__(self) -> None:
        n_turns = len(self.messages)
        broken = map(int, re.findall(r"@(\d{1,6})", self.breaks))
        has_all_turns = n_turns > 0 and len(self.answers) == n_turns
        can_break = set(broken) <= set(range(2, n_turns + 1))
        can_measure = set(self.only) <= set(range(1, n_turns + 1))
        is_possible = has_all_turns and can_break and can_measure and self._can_replay()
        if not is_possible or self.keep not in KEEPS:
            raise ValueError("the turns of a conversation contradict each other")

    def _can_replay(self) -> bool:
        """Whether recorded prompts share no more tokens than there are."""
        if not self.same and not self.again:
            return True
        if {len(self.same), len(self.again)} != {self.n_turns}:
            return False
        n_held = 0  # tokens of the turn before and its answer
        for turn in range(self.n_turns):
            if min(self.same[turn], self.again[turn], self.messages[turn]) < 0:
                return False
            n_known = self.same[turn] + self.again[turn]
            if n_known > n_held or n_known + self.messages[turn] < 1:
                return False
            n_held = n_known + self.messages[turn] + self.answers[turn]
        return True

    @property
    def prompts(self) -> list[int]:
        """The tokens of each turn's prompt, where nothing planned breaks the cache."""
        lengths: list[int] = []
        n_held = self.system
        for turn in range(self.n_turns):
            if self.same:
                n_held = self.same[turn] + self.again[turn]
            lengths.append(n_held + self.messages[turn])
            n_held = lengths[-1] + self.answers[turn]
        return lengths

    @property
    def n_turns(self) -> int:
        return len(self.messages)

    @property
    def n_slots(self) -> int:
        """Conversations that were measured alternately, each in a sequence of its own."""
        return 2 if self.keep == SLOT else 1

    @property
    def numbers(self) -> Sequence[int]:
        """The turns that were measured, from 1."""
        return self.only or range(1, self.n_turns + 1)

    @property
    def label(self) -> str:
        label = f"{plural(self.n_turns, 'turn')}, {LABELS[self.keep]}"
        if self.breaks:
            return f"{label}, {self.breaks}"
        return label


def conversation_of(run: Run) -> Conversation | None:
    """The conversation of a run; None for runs of other experiments."""
    return setup_of(Conversation, run.case) if run.experiment == NAME else None


def run_figures(run: Run) -> dict[str, float]:
    """`turns_s`, the whole conversation; empty for a failed run."""
    if run.status != OK or run.n_prompt < 1 or run.n_gen < 1 or not run.steps.end_ns:
        return {}
    conversation_s = run.steps.end_ns[-1] / 1e9
    return {"turns_s": conversation_s} if conversation_s > 0 else {}


RUNS = ExperimentRuns(
    check=lambda case: setup_of(Conversation, case),
    label=lambda case: setup_of(Conversation, case).label,
    figures=run_figures,
    figure_names={"turns_s": "whole conversation"},
)


def parse_breaks(
    text: str, n_turns: int, events: Sequence[str] = (*EVENTS, *RECORDED)
) -> list[list[str]]:
    """The breaks of each turn, from `system@6,truncate@9,thinking@2+` (`+`: in every turn from
    there on)."""
    by_turn: list[list[str]] = [[] for _ in range(n_turns)]
    for part in text.split(","):
        event = part.strip()
        if not event:
            continue
        match = re.fullmatch(rf"({'|'.join(events)})@(\d{{1,6}})(\+?)", event)
        if match is None or not 2 <= int(match[2]) <= n_turns:
            raise LabError(
                f"--break {event[:40]!r} is not an event at a turn that can find a cache.",
                f"Write system@6 or thinking@2+. Turns: 2 to {n_turns}. "
                f"Events: {', '.join(EVENTS)}.",
            )
        first = int(match[2])
        last = n_turns if match[3] else first
        for events_of_turn in by_turn[first - 1 : last]:
            events_of_turn.append(match[1])
    return by_turn


def breaks_of_text(breaks: str) -> str:
    """The breaks that change the prompts: all but a second conversation."""
    parts = [part for part in breaks.split(",") if not part.strip().startswith(SECOND)]
    return ",".join(parts)


class TurnPrompt(NamedTuple, Generic[T]):
    """The prompt of a turn, whole and in parts, its first tokens that the cache has, and the
    planned answer."""

    prompt: list[T]
    n_cached: int
    answer: list[T]
    parts: list[list[T]]


class Transcript(Generic[T]):
    """What was said so far, as tokens or words: it makes the prompt of each turn.

    The cache has the turn before: its prompt, and its answer without the last token.
    """

    def __init__(self, conversation: Conversation, text: Callable[[int], list[T]]) -> None:
        self.conversation = conversation
        n_tokens = conversation.system + sum(conversation.messages) + sum(conversation.answers)
        n_spare = 2 * conversation.n_turns  # for clocks that change
        n_tokens += sum(conversation.again)
        tokens = text(n_tokens + n_spare)
        self._tokens = iter(tokens)
        self._spare = iter(tokens[n_tokens:])
        self._breaks = parse_breaks(conversation.breaks, conversation.n_turns)
        self._system = self._take(conversation.system)
        self._parts: list[list[T]] = []  # message, answer, message, ...
        self._cached: list[T] = []
        self._n_usable = 0  # tokens of the cache that no second conversation has taken away
        self._number = 0  # of the turn, from 0
        self._prompt: list[T] = []

    def _take(self, n: int) -> list[T]:
        return list(itertools.islice(self._tokens, n))

    def next_turn(self) -> TurnPrompt[T]:
        """Break the cache where that is planned, and add the message."""
        conversation = self.conversation
        if conversation.same:
            return self._recorded_turn()
        self._n_usable = len(self._cached)
        for event in self._breaks[self._number]:
            self._break(event)
        self._parts.append(self._take(conversation.messages[self._number]))
        answer = self._take(conversation.answers[self._number])
        self._prompt = [*self._system, *itertools.chain(*self._parts)]
        return TurnPrompt(self._prompt, self._n_served(), answer, [self._system, *self._parts])

    def _recorded_turn(self) -> TurnPrompt[T]:
        """The prompt of a recorded request: what it shares with the turn before, then other
        tokens. Without its break it shares what it repeats later too.
        """
        conversation = self.conversation
        number = self._number
        n_same = conversation.same[number]
        n_new = conversation.messages[number]
        if self._breaks[number]:
            n_new += conversation.again[number]
        else:
            n_same += conversation.again[number]
        before = [*self._prompt, *itertools.chain(*self._parts[-1:])]
        message = self._take(n_new)
        if message and before[n_same : n_same + 1] == message[:1]:
            message = [self._other_than(message[0]), *message[1:]]
        self._n_usable = len(self._cached)
        self._prompt = [*before[:n_same], *message]
        answer = self._take(conversation.answers[number])
        return TurnPrompt(self._prompt, self._n_served(), answer, [self._prompt])

    def answered(self, answer: list[T]) -> None:
        """Add an answer: the planned one, or what a server said."""
        self._parts.append(answer)
        self._cached = [*self._prompt, *answer[:-1]]
        self._number += 1

    def _n_served(self) -> int:
        """The first tokens of the prompt that the cache serves."""
        if self.conversation.keep == NONE:
            return 0
        n_same = common_length(self._cached, self._prompt)
        n_served = min(self._n_usable, n_same, len(self._prompt) - 1)
        if self.conversation.whole and n_served < len(self._cached):
            return 0
        return n_served

    def _break(self, event: str) -> None:
        system = self._system
        parts = self._parts
        if event == "system" and system:
            self._change_clock(min(CLOCK_AT, len(system) - 1))
        elif event == "tools":  # the second half of the system prompt lists two, which swap
            half = len(system) // 2
            end_of_first = half + len(system) // 4
            first_tool = system[half:end_of_first]
            second_tool = system[end_of_first:]
            self._system = [*system[:half], *second_tool, *first_tool]
        elif event == "truncate":  # a quarter is left of the message in the middle
            middle = (self._number - 1) // 2
            message = parts[2 * middle]
            parts[2 * middle] = message[: max(1, len(message) // 4)]
        elif event == SECOND:  # it began with the same system prompt
            self._n_usable = min(self._n_usable, common_length(self._cached, system))
        elif event == "shift":  # the older half of the turns is dropped
            n_turns = len(parts) // 2
            self._parts = parts[2 * math.ceil(n_turns / 2) :]
        elif event == "thinking" and parts:  # the first half of the newest answer
            answer = parts[-1]
            parts[-1] = answer[len(answer) // 2 :]

    def _change_clock(self, at: int) -> None:
        """Put a different token in the place of a token of the system prompt."""
        system = self._system
        self._system = [*system[:at], self._other_than(system[at]), *system[at + 1 :]]

    def _other_than(self, token: T) -> T:
        """A spare token that differs from this one, if there is one."""
        for spare in self._spare:
            if spare != token:
                return spare
        return token


def common_length(tokens: Sequence[T], reference: Sequence[T]) -> int:
    """The number of first tokens that are equal."""
    difference = first_difference(tokens, reference)
    if difference is None:
        return min(len(tokens), len(reference))
    return difference
