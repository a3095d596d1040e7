"""The causes of broken caches and what would mend them, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core.lists import join_and, plural
from lab.features.recording import breaks
from lab.features.recording.figures import Mend
from lab.features.recording.lines import SERVER, TEMPLATE, Cause, RecordedCall
from lab.features.recording.prompts import CONTENT, MESSAGE
from lab.show.wording import digits, seconds

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
}
TEMPLATE_MEND = "Use a chat template that writes earlier messages again as they were"
LOST = {
    breaks.OTHER_CONVERSATION: "conversation {conversation} used the slot",
    breaks.CONTEXT_FULL: "the context was full",
    breaks.EVICTED: "the same prompt, but the server had lost its cache",
}
HAPPENED = {
    breaks.CHANGED: "{place} changed",
    breaks.INSERTED: "something was inserted before {place}",
    breaks.REORDERED: "{place} came in another order",
    breaks.SHORTENED: "{place} was shortened",
    breaks.REMOVED: "{place} was removed",
    breaks.CONTEXT_FULL: "the context was full, and {place} was cut",
}


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


def label(cause: Cause | None) -> str:
    """The cell of a cause: message 1 (system): 08:0[0:00 -> 3:27]Z."""
    if cause is None:
        return ""
    if cause.part is None:
        reason = LOST.get(cause.kind, cause.kind)
        return reason.format(conversation=cause.conversation)
    place = place_of(cause)
    by = " by the template" if cause.by == TEMPLATE else ""
    if cause.kind == breaks.CHANGED and cause.excerpt and not by:
        return f"{place}: {cause.excerpt}"
    what = f", {cause.what}" if cause.what else ""
    return f"{place}: {cause.kind}{by}{what}"


def answer(calls: Sequence[RecordedCall], n_computed: float, n_again: float) -> str:
    """How many calls broke the cache, and what they read again."""
    n_broken = len([call for call in calls if call.cause is not None])
    if not n_broken:
        return f"None of {plural(len(calls), 'call')} broke the cache."
    return (
        f"{n_broken} of {plural(len(calls), 'call')} broke the cache: {n_again:,.0f} of "
        f"{n_computed:,.0f} computed tokens were read before."
    )


def cause_sentences(calls: Sequence[RecordedCall], mend: Mend) -> list[str]:
    """What a cause cost, where it is, and what mending it saves."""
    by_number = {call.call: call for call in calls}
    affected = [by_number[number] for number in mend.calls]
    cost = (
        f"{which_calls(mend.calls)} read {mend.n_again:,} tokens again: "
        f"{seconds(mend.again_s)} of {seconds(mend.session_s)}. {where(affected)}"
    )
    cause = affected[0].cause
    assert cause is not None
    saving = (
        f"{remedy(cause)}: saves {digits(mend.saved_s)} s "
        f"({digits(mend.low_s)} to {digits(mend.high_s)} s); the session would have taken "
        f"{seconds(mend.mended_s)}."
    )
    return [cost, saving]


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
    if cause.by == SERVER:
        reason = LOST[cause.kind].format(conversation=cause.conversation)
        return f"{reason[0].upper()}{reason[1:]}."
    event = HAPPENED[cause.kind].format(place=place_of(cause))
    if cause.by == TEMPLATE:
        return f"The template did this: {event}."
    characters = {item.character for item in causes}
    each = "Each time " if len(causes) > 1 else ""
    what = f": {cause.what}" if cause.what else ""
    is_within = cause.kind in (breaks.CHANGED, breaks.REORDERED, breaks.SHORTENED)
    if len(characters) > 1 or cause.character is None or not is_within:
        sentence = f"{each}{event}{what}."
    else:
        sentence = f"{each}{event}, first at character {cause.character + 1:,}{what}."
    return f"{sentence[0].upper()}{sentence[1:]}"


def remedy(cause: Cause) -> str:
    if cause.by == TEMPLATE:
        return TEMPLATE_MEND
    return MENDS[cause.kind].format(place=place_of(cause))
