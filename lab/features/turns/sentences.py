"""What the turns of conversations show, in sentences."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from operator import attrgetter

from lab.app.experiment_tables import first_difference, prediction_errors
from lab.core import stats
from lab.core.lists import grouped, join_and, plural
from lab.core.record import Record
from lab.features.turns.conversation import (
    CLIENT,
    DISK,
    MEMORY,
    NONE,
    SECOND,
    SLOT,
    TEMPLATE,
    Conversation,
    breaks_of_text,
    conversation_of,
)
from lab.features.turns.figures import TurnRow
from lab.show.wording import digits, percent, seconds

SERVER = "server"  # where the cache is, beside the places of --keep
PLACES = {
    MEMORY: "",
    SLOT: " with a second conversation in its own slot",
    DISK: " with the cache on disk",
    NONE: " without a cache",
    SERVER: " through the server",
}
REMEDIES = {  # of what breaks a cache
    "system": "A system prompt that does not change",
    "tools": "Tools listed in the same order",
    "truncate": "An old message that is not shortened",
    SECOND: "A slot of its own for the second conversation",
    "shift": "A context that does not fill up",
    "thinking": "Thinking that stays in earlier answers",
    CLIENT: "A client that leaves earlier messages as they were",
    TEMPLATE: "A template that renders earlier messages as before",
}
# Tokens that were read again without a planned break, from which they count
LEAST_UNPLANNED = 16
# Of the TTFT of a request; a larger error of the formula is said
MOST_FORMULA_ERROR = 0.3
LEAST_UNPLANNED_SHARE = 0.1  # of the prompt, where the server does not report cached tokens


def conclude(rows: Sequence[TurnRow], records: Sequence[Record]) -> list[str]:
    """What rows of one setup show, and whether the cache changed an answer."""
    return [*sentences(rows), *same_answers(records)]


def sentences(rows: Sequence[TurnRow], n_slots: int | None = None) -> list[str]:
    """The answer of each conversation, what broke its cache, and how good the predictions are.

    n_slots: of the server, where it says so.
    """
    every_sentence: list[str] = []
    for turns in grouped(rows, lambda row: (row.conversation, row.keep)).values():
        keep = turns[0].keep
        every_sentence.append(conversation_time(turns))
        every_sentence += planned_breaks(turns, n_slots)
        every_sentence += unplanned_breaks(turns)
        if keep == SLOT and turns[0].slot_bytes:
            megabytes = turns[0].slot_bytes / 1e6
            every_sentence.append(
                f"The second conversation's own slot costs {megabytes:,.1f} MB of memory."
            )
        if keep != NONE and all(turn.without_s is not None for turn in turns):
            without_s = total(turns, "without_s")
            every_sentence.append(f"Without a cache they take {seconds(without_s)}.")
        every_sentence += doubt_of_formula(turns[0])
        every_sentence += states(turns)
        if are_estimated(turns):
            every_sentence.append(
                "~: the server does not report cached tokens; they are estimated from the TTFT."
            )
        pairs = [(turn.expected_ttft_s, turn.ttft_s) for turn in turns]
        every_sentence += prediction_errors(pairs, f"TTFT{PLACES[keep]}")
    return every_sentence


def finding(rows: Sequence[TurnRow]) -> str:
    """How long the conversation takes; of several, how long each."""
    conversations = list(grouped(rows, lambda row: (row.conversation, row.keep)).values())
    if len(conversations) == 1:
        return time_of_parts(conversations[0])
    times = []
    for turns in conversations:
        place = PLACES[turns[0].keep] or " with the cache in memory"
        times.append(f"{seconds(turns[-1].sum_s)}{place}")
    return f"{plural(len(conversations[0]), 'turn')} take {join_and(times)}"


def conversation_time(turns: Sequence[TurnRow]) -> str:
    return f"{time_of_parts(turns)}."


def time_of_parts(turns: Sequence[TurnRow]) -> str:
    """How long the conversation takes, and how much of it for tokens that were read before."""
    keep = turns[0].keep
    conversation = (
        f"{plural(len(turns), 'turn')} take {seconds(turns[-1].sum_s)}{PLACES[keep]}"
    )
    ttft = seconds(total(turns, "ttft_s"))
    waiting = "waiting for the first token" if keep == SERVER else "prefill"
    again_s = total(turns, "again_s")
    if not again_s:
        return f"{conversation}; {ttft} of it is {waiting}, no token was read twice"
    again = seconds(again_s)
    return f"{conversation}; {ttft} of it is {waiting}, {again} of that for tokens read before"


def planned_breaks(turns: Sequence[TurnRow], n_slots: int | None) -> list[str]:
    """Where each planned break changed the prompt, what was read again, and what would save it."""
    unit = "letter" if turns[0].keep == SERVER else "token"
    broken = [turn for turn in turns if turn.differs_at is not None]
    lines: list[str] = []
    for events, turns_of_events in grouped(broken, lambda turn: turn.breaks or None).items():
        places = join_and([f"{(turn.differs_at or 0) + 1:,}" for turn in turns_of_events])
        turn_numbers = numbers(turns_of_events)
        again = tokens_again(turns_of_events)
        lines.append(
            f"{turn_numbers} ({events}): the prompt differs from {unit} {places} on, "
            f"and {again} after it were read again."
        )
        if events == SECOND and n_slots is not None and n_slots > 1:
            lines.append(
                f"The server has {n_slots} slots, and yet the second conversation took this "
                "one's cache."
            )
        elif turns_of_events[0].perfect_s is not None:
            saved_s = total(turns_of_events, "turn_s") - total(turns_of_events, "perfect_s")
            if saved_s > 0:
                remedy = REMEDIES.get(events, f"Without {events} it")
                lines.append(f"{remedy} would save {seconds(saved_s)}.")
    return lines


def unplanned_breaks(turns: Sequence[TurnRow]) -> list[str]:
    """What a server read again although nothing planned had changed."""
    read_again = []
    for turn in turns:
        least: float = LEAST_UNPLANNED
        if not turn.is_known:
            least = max(least, LEAST_UNPLANNED_SHARE * turn.n_prompt)
        if not turn.breaks and turn.n_again is not None and turn.n_again >= least:
            read_again.append(turn)
    if not read_again:
        return []
    return [
        f"{numbers(read_again)}: {tokens_again(read_again)} of earlier turns were read again, "
        "though no break was planned: the chat template may change earlier turns, or the cache "
        "was lost."
    ]


def numbers(turns: Sequence[TurnRow]) -> str:
    """The turns by their numbers."""
    if len(turns) == 1:
        return f"Turn {turns[0].turn}"
    return f"Turns {join_and([str(turn.turn) for turn in turns])}"


def tokens_again(turns: Sequence[TurnRow]) -> str:
    """The tokens of these turns that were read again."""
    tokens = plural(int(total(turns, "n_again")), "token")
    return f"about {tokens}" if are_estimated(turns) else tokens


def total(turns: Sequence[TurnRow], column: str) -> float:
    """The sum of a column over turns."""
    amount: float = sum(map(attrgetter(column), turns))
    return amount


def doubt_of_formula(turn: TurnRow) -> list[str]:
    """A warning if the formula for the TTFT does not fit the requests that it comes from."""
    if turn.formula_error is None or turn.formula_error <= MOST_FORMULA_ERROR:
        return []
    return [
        "The formula for the TTFT is off by up to "
        f"{percent(turn.formula_error)} for its own requests: the times without a cache and with "
        "a perfect one are rough."
    ]


def are_estimated(turns: Sequence[TurnRow]) -> bool:
    """Whether the cached tokens of a turn are an estimate."""
    return not all(turn.is_known for turn in turns)


def states(turns: Sequence[TurnRow]) -> list[str]:
    """What saving and loading the cache took, and when loading is faster than prefill."""
    last = turns[-1]
    # Of each state that was loaded: the turn that saved it, and the seconds of loading
    loaded: list[tuple[TurnRow, float]] = []
    for before, turn in itertools.pairwise(turns):
        if turn.load_s:
            loaded.append((before, turn.load_s))
    lines: list[str] = []
    if last.state_bytes and last.save_s:
        lines.append(f"Saving {moved(last.state_bytes, last.save_s)}.")
    if loaded:
        before, load_s = loaded[-1]
        if before.state_bytes:
            lines.append(f"Loading {moved(before.state_bytes, load_s)}.")
    if len(loaded) > 1:
        lines.append(loading_against_prefill(turns[0], loaded))
    return lines


def moved(n_bytes: int, took_s: float) -> str:
    rate = digits(n_bytes / 1e9 / took_s)
    return f"{n_bytes / 1e6:,.1f} MB took {seconds(took_s)} ({rate} GB/s)"


def loading_against_prefill(first: TurnRow, loaded: Sequence[tuple[TurnRow, float]]) -> str:
    """From how many tokens on loading, which has a fixed time too, is faster than prefill."""
    n_held = [float(before.n_prompt) for before, _ in loaded]
    load_s = [seconds_of_load for _, seconds_of_load in loaded]
    fixed_s, per_token_s = stats.fit([[1.0] * len(n_held), n_held], load_s)
    gain_s = first.ttft_s / first.n_computed - per_token_s
    if gain_s <= 0 or math.isinf(fixed_s / gain_s):
        return "Loading is faster than prefill at no length."
    least = max(1, round(fixed_s / gain_s))
    return f"Loading is faster than prefill from about {plural(least, 'token')} on."


def same_answers(records: Sequence[Record]) -> list[str]:
    """Whether cached turns chose the tokens of uncached ones: the first difference."""
    chosen: dict[tuple[int, int, Conversation], dict[str, tuple[int, ...]]] = {}
    for record in records:
        conversation = conversation_of(record.run)
        if conversation is None:
            continue
        start = 0
        breaks = breaks_of_text(conversation.breaks)
        text = dataclasses.replace(conversation, breaks=breaks, keep=NONE, only=())
        for turn in conversation.numbers:
            n_answer = conversation.answers[turn - 1]
            answers = chosen.setdefault((turn, record.run.repeat, text), {})
            answers[conversation.keep] = record.run.token_ids[start : start + n_answer]
            start += n_answer * conversation.n_slots
    n_compared = 0
    differences = []  # turn and token
    for (turn, _, _), answers in chosen.items():
        uncached = answers.pop(NONE, None)
        if turn == 1 or not uncached:
            continue
        for answer in answers.values():
            n_compared += 1
            difference = first_difference(answer, uncached)
            if difference is not None:
                differences.append((turn, difference + 1))
    compared = plural(n_compared, "answer")
    if not n_compared:
        return []
    if not differences:
        return [f"In {compared} the cached turns chose the tokens of the uncached ones."]
    turn, token = min(differences)
    return [
        f"In {len(differences)} of {compared} with a cache (all repeats) another token was chosen "
        f"than without, first token {token} of turn {turn}: kernels for steps of other sizes round "
        "differently."
    ]
