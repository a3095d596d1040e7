"""Why the cache did not serve what it could have: the cause of one call.

A server's cache holds the prompts that it has read. A prompt that goes on from an earlier one needs
only its new end. Otherwise either the client sent something else, or the template wrote the same
messages differently, or the server had lost its cache. Rendered and tokenized prompts tell these
apart exactly; without them, tokens are estimated by characters.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from lab.features.recording import breaks
from lab.features.recording.conversations import Prompt, RecordedConversation
from lab.features.recording.differences import (
    Difference,
    common_prefix,
    difference,
    is_branch,
    shared_characters,
)
from lab.features.recording.lines import CLIENT, SERVER, TEMPLATE, Cause
from lab.features.recording.prompts import Block, Blocks, length
from lab.features.recording.server_log import Served
from lab.remote.chat_bodies import ASSISTANT

EXACT_SLACK = 16
SLACK = 160
SLACK_SHARE = 0.1
"""Tokens that a whole cache may lack: servers compute the last ones again, and keep blocks of up to
128. Without exact tokens also a share of the prompt."""

MOST_LEFT_OUT = 3  # an answer that is sent back in fewer than its tokens / 3 is not whole
END = 1  # token that ends an answer, and is not in its text
REWRITTEN = 0.125  # share of an answer's tokens that may differ when its text is tokenized
STRANGER = "by a request that did not come through lab record"
PROBE = 200  # characters by which a block is found in a rendered prompt

Count = Callable[[str], int | None]


@dataclass(frozen=True)
class Finding:
    """What was found out about a call."""

    cause: Cause | None = None
    follows: int | None = None
    n_new: int | None = None
    is_exact: bool = False


@dataclass(frozen=True)
class ServerState:
    """What is known about the server when a call is examined."""

    n_ctx: int | None = None
    n_slots: int | None = None
    latest_other: Prompt | None = None  # the latest prompt of another conversation
    other_number: int | None = None
    was_refused: bool = False  # the call of this conversation before: it did not fit
    held: Mapping[int, int] = field(default_factory=dict)  # the latest task of each slot
    busy: Collection[int] = ()  # slots that served something else when the call came
    changed: str = ""  # what is different since the server was started anew


def find_cause(
    prompt: Prompt,
    n_cached: int | None,
    conversation: RecordedConversation,
    state: ServerState,
    count: Count,
) -> Finding:
    """What broke the cache of a call, if something did; `count` counts the tokens of a text."""
    best = conversation.best_for(prompt.blocks)
    is_exact = bool(best.tokens and prompt.tokens)
    differs = difference(best.blocks, prompt.blocks)
    finding = Finding(None, best.call, new_tokens(best, prompt, differs, count), is_exact)
    if was_served_whole(prompt, n_cached, finding.n_new):
        return finding
    n_shared = shared_tokens(best, prompt)
    slack = slack_of(prompt, is_exact)
    cause = None
    if n_cached is not None and n_shared is not None and n_cached + slack < n_shared:
        cause = lost_in_server(best, prompt, n_cached, conversation, state)
        if cause.kind in (*breaks.OF_ENGINE, breaks.NOT_ASKED):
            return dataclasses.replace(finding, cause=cause)
        latest = difference(conversation.latest.blocks, prompt.blocks)
        n_latest = shared_tokens(conversation.latest, prompt)
        if latest and n_latest is not None and abs(n_cached - n_latest) <= slack:
            cause = client_cause(latest, state)
            n_new = new_tokens(conversation.latest, prompt, latest, count)
            finding = dataclasses.replace(finding, n_new=n_new)
    elif differs:
        if not (is_exact and goes_on(best, prompt)) and not is_branch(
            best.blocks, prompt.blocks
        ):
            cause = client_cause(differs, state)
    elif is_exact and n_shared is not None and n_shared + slack < len(best.tokens):
        cause = template_cause(best, prompt)
    return dataclasses.replace(finding, cause=cause)


def was_served_whole(prompt: Prompt, n_cached: int | None, n_new: int | None) -> bool:
    """Whether nothing was read again: then nothing broke, whatever differs."""
    if prompt.n_prompt is None or n_cached is None:
        return False
    n_computed = prompt.n_prompt - n_cached
    return n_computed <= 1 or (n_new is not None and n_computed <= n_new)


def goes_on(best: Prompt, prompt: Prompt) -> bool:
    """Whether a rendered prompt begins with an earlier one: then the template left out what
    differs."""
    return (prompt.rendered or "").startswith(best.rendered or "")


def slack_of(prompt: Prompt, is_exact: bool) -> float:
    if is_exact:
        return EXACT_SLACK
    return max(SLACK, SLACK_SHARE * (prompt.n_prompt or 0))


def shared_tokens(best: Prompt, prompt: Prompt) -> int | None:
    """Tokens that two prompts share at their beginnings; None if nothing is known."""
    if best.tokens and prompt.tokens:
        n_shared = 0
        for before, token in zip(best.tokens, prompt.tokens, strict=False):
            if before != token:
                break
            n_shared += 1
        return n_shared
    if best.n_prompt is None or prompt.n_prompt is None:
        return None
    shared = shared_characters(best.blocks, prompt.blocks)
    return min(prompt.n_prompt, int(best.n_prompt * share_of_length(shared, best.blocks)))


def client_cause(differs: Difference, state: ServerState) -> Cause:
    """A difference that the client made, perhaps because the context was full."""
    is_cut = differs.kind in (
        breaks.REMOVED,
        breaks.SHORTENED,
        breaks.CHANGED,
    )
    kind = breaks.CONTEXT_FULL if state.was_refused and is_cut else differs.kind
    cause = cause_at(differs.block, differs.character, kind, CLIENT)
    return dataclasses.replace(cause, what=differs.what, excerpt=differs.excerpt)


def cause_at(block: Block, character: int, kind: str, by: str) -> Cause:
    return Cause(
        kind=kind,
        by=by,
        part=block.kind,
        index=block.index,
        role=block.role,
        text_field=block.field,
        character=character,
    )


def lost_in_server(
    best: Prompt,
    prompt: Prompt,
    n_cached: int,
    conversation: RecordedConversation,
    state: ServerState,
) -> Cause:
    """Why a server did not use what it had read."""
    if not prompt.asks_for_cache:
        return Cause(kind=breaks.NOT_ASKED, by=CLIENT)
    by_engine = engine_cause(best, prompt, n_cached, state)
    if by_engine is not None and by_engine.kind != breaks.CACHE_FULL:
        return by_engine
    n_held = (best.n_prompt or 0) + (best.n_gen or 0)
    if state.was_refused or (state.n_ctx is not None and n_held + 1 >= state.n_ctx):
        return Cause(kind=breaks.CONTEXT_FULL, by=SERVER)
    if by_engine is not None:
        return by_engine
    if is_slot_unseen(best, prompt, state):
        return Cause(kind=breaks.UNSEEN_SLOT, by=SERVER)
    intruder = state.latest_other
    if intruder is not None and intruder.call > conversation.latest.call:
        return Cause(
            kind=breaks.OTHER_CONVERSATION, by=SERVER, conversation=state.other_number
        )
    return Cause(kind=breaks.EVICTED, by=SERVER, what=stranger(best, prompt))


def stranger(best: Prompt, prompt: Prompt) -> str:
    """Who else used the server since the earlier prompt, if its log shows somebody."""
    if best.served is None or prompt.served is None or not best.served.n_begun:
        return ""
    n_begun = prompt.served.n_begun - best.served.n_begun
    return STRANGER if n_begun > prompt.call - best.call else ""


def engine_cause(
    best: Prompt, prompt: Prompt, n_cached: int, state: ServerState
) -> Cause | None:
    """What a llama-server's slots or log show that it did with the earlier prompt."""
    before = best.served
    now = prompt.served
    if before is None or now is None:
        return None
    if now.start != before.start:
        return Cause(kind=breaks.RESTARTED, by=SERVER, what=state.changed)
    n_held = (best.n_prompt or 0) + (best.n_gen or 0)
    if before.is_shifted or (state.n_ctx is not None and n_held > state.n_ctx):
        return Cause(kind=breaks.CONTEXT_SHIFT, by=SERVER)
    n_shared = shared_tokens(best, prompt) or 0
    if now.slot != before.slot and still_holds(before, state):
        return Cause(
            kind=breaks.OTHER_SLOT,
            by=SERVER,
            slot=now.slot,
            held_by=before.slot,
            similarity=n_shared / max(1, prompt.n_prompt or 0),
            what="busy" if before.slot in state.busy else "",
        )
    n_similar = (now.similarity or 0.0) * (prompt.n_prompt or 0)
    if now.is_forced or n_similar > n_cached + SLACK:
        return Cause(kind=breaks.NO_CHECKPOINT, by=SERVER, slot=now.slot)
    if now.n_dropped > before.n_dropped:
        return Cause(kind=breaks.CACHE_FULL, by=SERVER)
    return None


def still_holds(before: Served, state: ServerState) -> bool:
    """Whether a slot still holds an earlier prompt, as far as was seen."""
    if before.slot is None or before.task is None:
        return False
    return state.held.get(before.slot) == before.task


def is_slot_unseen(best: Prompt, prompt: Prompt, state: ServerState) -> bool:
    """Whether another slot may have taken a call, while the earlier prompt was still in its own:
    calls that follow each other at once are in the slots before they were looked at."""
    before = best.served
    now = prompt.served
    if before is None or now is None or (state.n_slots or 1) < 2:
        return False
    if before.slot is None or now.slot is None:
        return True
    if before.slot == now.slot:
        return False
    if before.task is None or now.task is None:
        return True
    return state.held.get(before.slot, before.task) > now.task


def template_cause(best: Prompt, prompt: Prompt) -> Cause | None:
    """The block that the template now writes differently."""
    before = best.rendered or ""
    rendered = prompt.rendered or ""
    position = common_prefix(before, rendered)
    for index, block in enumerate(prompt.blocks):
        end = end_of_block(rendered, prompt.blocks, index)
        is_left_out = block.text.strip()[:PROBE] not in rendered
        if end > position or (is_left_out and block.text.strip()[:PROBE] in before):
            start = end - len(block.text.strip())
            character = 0 if is_left_out else max(0, position - start)
            kind = breaks.REMOVED if is_left_out else breaks.CHANGED
            return cause_at(block, character, kind, TEMPLATE)
    return Cause(kind=breaks.CHANGED, by=TEMPLATE)


def end_of_block(rendered: str, blocks: Blocks, index: int) -> int:
    """The position after a block in a rendered prompt; of a block that the template writes
    otherwise, the position after the one before."""
    position = 0
    for block in blocks[: index + 1]:
        text = block.text.strip()
        found_at = rendered.find(text[:PROBE], position) if text else -1
        if found_at >= 0:
            position = found_at + len(text)
    return position


def new_tokens(
    best: Prompt, prompt: Prompt, differs: Difference | None, count: Count
) -> int | None:
    """Tokens of a prompt that no cache could have had: what follows the last block that the earlier
    prompt has too, and the answer to it."""
    if prompt.n_prompt is None:
        return None
    n_aligned = differs.n_aligned if differs else min(len(best.blocks), len(prompt.blocks))
    n_answered = n_aligned
    tail = prompt.blocks[n_aligned:]
    if tail and tail[0].index > 0:
        n_answered += len(list(itertools.takewhile(is_of_answer, tail)))
    n_before = tokens_before(best, prompt, n_aligned, count)
    if n_answered > n_aligned:
        n_written = tokens_written(prompt, n_answered, count)
        if n_written is not None and is_other_answer(n_written - n_before, best.n_gen):
            return max(1, prompt.n_prompt - n_before)
        n_answer = tokens_before(best, prompt, n_answered, count) - n_before
        n_before += tokens_of_answer(n_answer, best.n_gen)
    return max(1, prompt.n_prompt - n_before)


def tokens_written(prompt: Prompt, n_blocks: int, count: Count) -> int | None:
    """Tokens of a rendered prompt up to the end of a block that the template writes as it is; None
    if it does not, or the prompt is not known as tokens."""
    rendered = prompt.rendered
    if (
        rendered is None
        or not prompt.tokens
        or not is_in(rendered, prompt.blocks[n_blocks - 1])
    ):
        return None
    return count(rendered[: end_of_block(rendered, prompt.blocks, n_blocks - 1)])


def is_other_answer(n_sent: int, n_gen: int | None) -> bool:
    """Whether an answer that a client sends has another number of tokens than what the server
    generated: it was replaced, or its reasoning left out."""
    return n_gen is not None and abs(n_sent - n_gen) > max(END, n_gen * REWRITTEN)


def tokens_of_answer(n_sent: int, n_gen: int | None) -> int:
    """Tokens of an answer that a client sends back: all that were generated, unless much fewer are
    in the prompt (without its reasoning)."""
    if n_gen is None or n_sent * MOST_LEFT_OUT < n_gen:
        return n_sent
    return n_gen


def is_of_answer(block: Block) -> bool:
    return block.role == ASSISTANT


def tokens_before(best: Prompt, prompt: Prompt, n_blocks: int, count: Count) -> int:
    """Tokens of the first blocks of a prompt; without its tokens by the earlier prompt's share of
    tokens in its characters."""
    if prompt.rendered is not None and prompt.tokens:
        end = end_of_block(prompt.rendered, prompt.blocks, n_blocks - 1)
        end += same_after(best, prompt.rendered[end:])
        later = prompt.blocks[n_blocks:]
        if n_blocks and later and not is_in(prompt.rendered, prompt.blocks[n_blocks - 1]):
            end = max(end, begin_of_block(prompt.rendered, later[0], end))
        n_tokens = count(prompt.rendered[:end])
        if n_tokens is not None:
            return n_tokens
    n_prompt = prompt.n_prompt or 0
    known = best if best.n_prompt is not None else prompt
    n_characters = length(prompt.blocks[:n_blocks])
    n_tokens = int((known.n_prompt or 0) * share_of_length(n_characters, known.blocks))
    return min(n_prompt, n_tokens)


def same_after(best: Prompt, rest: str) -> int:
    """Characters that a template writes alike behind the last block of the earlier prompt."""
    before = best.rendered or ""
    end = end_of_block(before, best.blocks, len(best.blocks) - 1)
    return common_prefix(before[end:], rest)


def share_of_length(n_characters: int, blocks: Blocks) -> float:
    return n_characters / max(1, length(blocks))


def is_in(rendered: str, block: Block) -> bool:
    """Whether a template writes a block as it is."""
    text = block.text.strip()[:PROBE]
    return bool(text) and text in rendered


def begin_of_block(rendered: str, block: Block, position: int) -> int:
    """Where a block begins after a position; the position if it is not found."""
    text = block.text.strip()[:PROBE]
    found_at = rendered.find(text, position) if text else -1
    return max(position, found_at)
