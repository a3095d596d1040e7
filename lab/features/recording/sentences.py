"""The causes of broken caches and what would mend them, in sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core.lists import join_and, plural
from lab.features.recording import breaks
from lab.features.recording.differences import KEYS, LINES, WORDS
from lab.features.recording.figures import FROM_TIME, Mend
from lab.features.recording.lines import TEMPLATE, Cause, RecordedCall
from lab.features.recording.prompts import CONTENT, MESSAGE, TOOL
from lab.show.wording import digits, seconds

if TYPE_CHECKING:
    import pandas as pd

MOST_CALLS = 8  # that a sentence names
MENDS = {
    breaks.CHANGED: "Keep {place} as it was, and put what changes behind the last message",
    breaks.INSERTED: "Append what is inserted before {place} behind the last message",
    breaks.REORDERED: "Keep the order in which {place} was first sent",
    breaks.SHORTENED: "Leave {place} whole",
    breaks.REMOVED: "Keep {place}",
    breaks.OTHER_CONVERSATION: "Give each conversation a slot of its own "
    "(llama-server --parallel)",
    breaks.CONTEXT_FULL: "Use a longer context (llama-server --ctx-size)",
    breaks.EVICTED: "Have the server keep its cache between calls (llama-server --cache-ram)",
    breaks.OTHER_SLOT: "Lower the similarity from which a slot is used again "
    "(llama-server --slot-prompt-similarity), or send id_slot",
    breaks.UNSEEN_SLOT: "Record again with --log (llama-server --log-file), which names the slot "
    "of each call",
    breaks.NO_CHECKPOINT: "Have the server keep more states of this model "
    "(llama-server --ctx-checkpoints, or --swa-full for a sliding window)",
    breaks.CONTEXT_SHIFT: "Use a longer context (llama-server --ctx-size), or shorten the "
    "conversation before it is full",
    breaks.CACHE_FULL: "Give the server's cache of prompts more memory "
    "(llama-server --cache-ram)",
    breaks.RESTARTED: "Keep the server running between calls",
    breaks.NOT_ASKED: "Leave cache_prompt on",
}
BUSY_MEND = (
    "Give each of the calls at the same time a slot of its own (llama-server --parallel)"
)
TEMPLATE_MEND = "Use a chat template that writes earlier messages again as they were"
LOST = {
    breaks.OTHER_CONVERSATION: "conversation {conversation} used the slot",
    breaks.CONTEXT_FULL: "the context was full",
    breaks.EVICTED: "the same prompt, but the server had lost its cache",
    breaks.OTHER_SLOT: "{slot} took the call, but slot {held_by} holds the conversation",
    breaks.UNSEEN_SLOT: "another slot took the call, or the server had lost its cache: "
    "the next call came before the slots could be looked at",
    breaks.NO_CHECKPOINT: "the model's cache cannot be cut, and no saved state was early enough",
    breaks.CONTEXT_SHIFT: "the context was full, and the server had dropped its beginning",
    breaks.CACHE_FULL: "the server had dropped the conversation: its cache memory was full",
    breaks.RESTARTED: "the server was started anew",
    breaks.NOT_ASKED: "the request switched the cache off (cache_prompt)",
}
HAPPENED = {
    breaks.CHANGED: "{place} changed",
    breaks.INSERTED: "something was inserted before {place}",
    breaks.REORDERED: "{place} came in another order",
    breaks.SHORTENED: "{place} was shortened",
    breaks.REMOVED: "{place} was removed",
    breaks.CONTEXT_FULL: "the context was full, and {place} was cut",
}


ADDED = "added"
PARTS = {KEYS: "the keys", LINES: "the lines", WORDS: "the words"}


def place_of(cause: Cause) -> str:
    """Where a prompt differs: message 1 (system), tool 3."""
    if cause.part is None or cause.index is None:
        return "the prompt"
    place = f"{cause.part} {cause.index + 1}"
    if cause.part != MESSAGE:
        return place
    if cause.text_field and cause.text_field != CONTENT:
        return f"{place} ({cause.role}, {cause.text_field})"
    return f"{place} ({cause.role})"


def lost(cause: Cause) -> str:
    """What happened to a prompt that was not changed."""
    slot = "another slot" if cause.slot is None else f"slot {cause.slot}"
    fields = {**dataclasses.asdict(cause), "slot": slot}
    reason = LOST.get(cause.kind, cause.kind).format(**fields)
    if cause.kind == breaks.OTHER_SLOT and cause.similarity is not None:
        reason += f" ({cause.similarity:.0%} alike{', but busy' if cause.what else ''})"
    elif cause.what:
        reason += f" ({cause.what})"
    return reason


def label(cause: Cause | None) -> str:
    """The cell of a cause: message 1 (system): 08:0[0:00 -> 3:27]Z."""
    if cause is None:
        return ""
    if cause.part is None:
        return lost(cause)
    place = place_of(cause)
    by = " by the template" if cause.by == TEMPLATE else ""
    if cause.kind == breaks.CHANGED and cause.excerpt and not by:
        return f"{place}: {cause.excerpt}".replace("\n", "\\n")
    what = f", {cause.what}" if cause.what else ""
    kind = ADDED if is_added_tool(cause) else cause.kind
    return f"{place}: {kind}{by}{what}"


def is_added_tool(cause: Cause) -> bool:
    """Whether the place of a cause is a tool that the earlier prompt had not."""
    return cause.part == TOOL and cause.kind == breaks.INSERTED


def answer(calls: Sequence[RecordedCall], table: pd.DataFrame) -> str:
    """How many calls broke the cache, what they read again, and how much was cached."""
    good = [call for call in calls if call.is_good]
    if not good:
        return f"{all_of(len(calls))} failed: nothing is known about the cache."
    counted = table[table.n_cached.notna()]
    if counted.empty:
        return (
            "What the cache served is unknown: the server counted no tokens of "
            f"{plural(len(good), 'call')}. {ask_for_counts(good)}"
        )
    n_prompt = counted.n_prompt.sum()
    about = "about " if (counted.cached_by == FROM_TIME).any() else ""
    served = f"{counted.n_cached.sum():,.0f} of {n_prompt:,.0f} prompt tokens were cached"
    served = f"{about}{served}"
    broken = table[table.is_broken]
    if broken.empty:
        if len(good) == 1:
            but_failed = " that did not fail" if len(calls) > 1 else ""
            return f"The only call{but_failed} broke no cache: {served}."
        return f"None of {len(good)} calls broke the cache: {served}."
    n_again = broken.n_again.sum()
    n_computed = counted.n_computed.sum()
    return (
        f"{len(broken)} of {plural(len(good), 'call')} broke the cache: {n_again:,.0f} of "
        f"{n_computed:,.0f} computed tokens were read before ({served})."
    )


def all_of(n_calls: int) -> str:
    return "The only call" if n_calls == 1 else f"All {n_calls} calls"


def ask_for_counts(calls: Sequence[RecordedCall]) -> str:
    """The field of a request that makes a server count its tokens."""
    if any(call.endpoint.api in ("completions", "completion") for call in calls):
        return (
            'Have the client send "stream_options": {"include_usage": true}, '
            "or ask for answers that are not streamed."
        )
    return "The interface has counts in its usage field; this server leaves it out."


def cause_sentences(calls: Sequence[RecordedCall], mend: Mend) -> list[str]:
    """What a cause cost, where it is, and what mending it saves."""
    by_number = {call.call: call for call in calls}
    affected = [by_number[number] for number in mend.calls]
    cause = affected[0].cause
    assert cause is not None
    if mend.n_again is None:
        n_tokens = "an unknown number of tokens"
    else:
        n_tokens = plural(mend.n_again, "token")
    cost = f"{which_calls(mend.calls)} read {n_tokens} again"
    if mend.again_s is not None:
        cost += f": {seconds(mend.again_s)} of {seconds(mend.session_s)}"
    return [f"{cost}. {where(affected)}", f"{remedy(cause)}{saving(mend)}."]


def saving(mend: Mend) -> str:
    """What a mend saves, with its range."""
    if mend.saved_s is None or mend.mended_s is None:
        return ""
    spread = "range unknown: too few calls"
    if mend.low_s is not None and mend.high_s is not None:
        spread = f"{digits(mend.low_s)} to {digits(mend.high_s)} s"
    return (
        f": saves {digits(mend.saved_s)} s ({spread}); the session would have taken "
        f"{seconds(mend.mended_s)}"
    )


def which_calls(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"Call {numbers[0]}"
    shown = [str(number) for number in numbers[:MOST_CALLS]]
    n_more = len(numbers) - len(shown)
    if n_more:
        return f"Calls {', '.join(shown)} and {n_more} more"
    return f"Calls {join_and(shown)}"


def where(affected: Sequence[RecordedCall]) -> str:
    """The first place that differs in calls with the same cause."""
    causes = [call.cause for call in affected if call.cause is not None]
    cause = causes[0]
    if cause.part is None:
        reason = lost(cause)
        return f"{reason[0].upper()}{reason[1:]}."
    event = HAPPENED[cause.kind].format(place=place_of(cause))
    if is_added_tool(cause):
        event = f"{place_of(cause)} was {ADDED}"
    if cause.kind == breaks.REORDERED and cause.what in PARTS:
        event = f"{PARTS[cause.what]} of {place_of(cause)} came in another order"
    if cause.by == TEMPLATE:
        return f"The template did this: {event}."
    characters = {item.character for item in causes}
    each = "Each time " if len(causes) > 1 else ""
    what = f": {cause.what}" if cause.what and cause.what not in PARTS else ""
    is_within = cause.kind in (
        breaks.CHANGED,
        breaks.REORDERED,
        breaks.SHORTENED,
    )
    if len(characters) > 1 or cause.character is None or not is_within:
        sentence = f"{each}{event}{what}."
    else:
        sentence = f"{each}{event}, first at character {cause.character + 1:,}{what}."
    return f"{sentence[0].upper()}{sentence[1:]}"


def remedy(cause: Cause) -> str:
    if cause.by == TEMPLATE:
        return TEMPLATE_MEND
    if cause.kind == breaks.OTHER_SLOT and cause.what:
        return BUSY_MEND
    if is_added_tool(cause):
        return f"Send {place_of(cause)} from the first call on"
    return MENDS[cause.kind].format(place=place_of(cause))
