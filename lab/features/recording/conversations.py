"""Which conversation a prompt belongs to, and which earlier prompt it goes on from.

Two prompts belong together if they share most of their messages besides the system prompt: a system
prompt alone is shared by all conversations of an agent.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lab.features.recording.differences import (
    common_prefix,
    common_suffix,
    n_same_blocks,
    shared_characters,
)
from lab.features.recording.prompts import MESSAGE, TOOL, Block, Blocks, length
from lab.features.recording.server_log import Served
from lab.remote.chat_bodies import ASSISTANT, SYSTEM, USER

MOST_PROMPTS = 8  # of a conversation that are remembered
MOST_CHARACTERS = 100_000_000  # of all prompts that are remembered
LEAST_SHARED = 0.5  # of the shorter prompt's messages
LEAST_SHARED_SYSTEM = 0.3
N_FIRST = 2  # blocks of a prompt that may be the first of its conversation


@dataclass(frozen=True)
class Prompt:
    """A prompt that was sent, and what its answer said about it."""

    call: int
    blocks: Blocks
    n_prompt: int | None = None
    n_gen: int | None = None
    rendered: str | None = None  # by the server's template
    tokens: tuple[int, ...] = ()  # of the rendered prompt
    served: Served | None = None  # by a llama-server
    asks_for_cache: bool = True


@dataclass
class RecordedConversation:
    """The latest prompts of a conversation."""

    number: int
    n_turns: int = 0
    prompts: deque[Prompt] = field(default_factory=lambda: deque(maxlen=MOST_PROMPTS))
    was_refused: bool = False  # the latest request, because it did not fit into the context

    @property
    def latest(self) -> Prompt:
        return self.prompts[-1]

    def best_for(self, blocks: Blocks) -> Prompt:
        """The prompt with the longest beginning that `blocks` share; of several the latest."""
        best = self.prompts[0]
        most_shared = -1
        for prompt in self.prompts:
            shared = shared_characters(prompt.blocks, blocks)
            if shared >= most_shared:
                best = prompt
                most_shared = shared
        return best

    def add(self, prompt: Prompt) -> None:
        self.prompts.append(prompt)


class Conversations:
    """All conversations of a session."""

    def __init__(self) -> None:
        self.conversations: list[RecordedConversation] = []

    def of(self, blocks: Blocks) -> RecordedConversation:
        """The conversation that a prompt goes on, the latest of several, or a new one."""
        by_latest = sorted(
            filter(lambda conversation: conversation.prompts, self.conversations),
            key=lambda conversation: conversation.latest.call,
            reverse=True,
        )
        best = None
        most_shared = LEAST_SHARED
        for conversation in by_latest:
            if is_other_beginning(conversation.latest.blocks, blocks):
                continue
            shared = share_of(conversation.latest.blocks, blocks)
            if shared > most_shared or (best is None and shared >= most_shared):
                best = conversation
                most_shared = shared
        if best is None:
            best = RecordedConversation(len(self.conversations) + 1)
            self.conversations.append(best)
        best.n_turns += 1
        return best

    def forget_oldest(self) -> None:
        """Keep what is remembered below MOST_CHARACTERS: the oldest prompts go first."""
        total = 0
        for conversation in self.conversations:
            total += sum(length(prompt.blocks) for prompt in conversation.prompts)
        while total > MOST_CHARACTERS:
            candidates = [item for item in self.conversations if len(item.prompts) > 1]
            if not candidates:
                return
            oldest = min(candidates, key=lambda item: item.prompts[0].call)
            total -= length(oldest.prompts.popleft().blocks)


def share_of(earlier: Blocks, blocks: Blocks) -> float:
    """Which share of the shorter prompt's messages both have; 0 for different system prompts."""
    old_messages = list(filter(is_message, earlier))
    messages = list(filter(is_message, blocks))
    if not old_messages or not messages:
        old_messages = list(earlier)
        messages = list(blocks)
    shorter = min(length(tuple(old_messages)), length(tuple(messages)))
    share = shared_length(old_messages, messages) / max(1, shorter)
    if min(len(old_messages), len(messages)) < N_FIRST and differ_in_system(earlier, blocks):
        return 0.0
    return share


def is_other_beginning(earlier: Blocks, blocks: Blocks) -> bool:
    """Whether a prompt asks something else than the earlier one did, and has no answer yet: it
    begins a conversation, though both may share a system prompt and what else a client sends in
    front of a question."""
    messages = [block for block in blocks if block.kind == MESSAGE]
    if not messages or any(block.role == ASSISTANT for block in messages):
        return False
    if n_same_blocks(earlier, blocks) == len(earlier):
        return False
    questions = [block.text for block in messages if block.role == USER]
    before = [block.text for block in earlier if block.role == USER]
    if not questions or not before:
        return False
    return before[-1] not in questions and questions[-1] not in before


def differ_in_system(earlier: Blocks, blocks: Blocks) -> bool:
    """Whether two prompts have system prompts that share little."""
    old = [block for block in earlier if block.role == SYSTEM]
    new = [block for block in blocks if block.role == SYSTEM]
    if not old or not new:
        return False
    shorter = min(length(tuple(old)), length(tuple(new)))
    return shared_length(old, new) < LEAST_SHARED_SYSTEM * shorter


def is_message(block: Block) -> bool:
    return block.role != SYSTEM and block.kind != TOOL


def shared_length(earlier: Iterable[Block], blocks: Iterable[Block]) -> int:
    """Characters of blocks that both have, and of beginnings and ends of blocks that changed."""
    old = list(earlier)
    n_left = Counter(block.identity for block in old)
    shared = 0
    unmatched: list[Block] = []
    for block in blocks:
        if n_left[block.identity] > 0:
            n_left[block.identity] -= 1
            shared += len(block.text)
        else:
            unmatched.append(block)
    left_over: list[Block] = []
    for block in old:
        if n_left[block.identity] > 0:
            n_left[block.identity] -= 1
            left_over.append(block)
    for before, block in zip(left_over, unmatched, strict=False):
        if block.corresponds_to(before):
            n_prefix = common_prefix(before.text, block.text)
            n_suffix = common_suffix(before.text[n_prefix:], block.text[n_prefix:])
            if 2 * (n_prefix + n_suffix) >= min(len(before.text), len(block.text)):
                shared += n_prefix + n_suffix
    return shared
