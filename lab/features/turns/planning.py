"""The plan of `lab turns`, and the script of a run: cut the cache at the first token that differs,
prefill the rest, decode the answer.

Answers are given tokens, so every case reads the same text. Their last token is computed by the
next turn's prefill. Besides a cache, `none` is measured at two turns, and a law in n and n^2 gives
the others. A conversation with breaks is also measured without them: the perfect cache.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lab.core import random_lengths, script
from lab.core.record import DECODE, FORGET, LOAD, SAVE, Settings
from lab.core.script import Operation, Part
from lab.errors import LabError
from lab.features.turns.conversation import (
    DISK,
    EVENTS,
    KEEPS,
    MEMORY,
    NAME,
    NONE,
    SLOT,
    Conversation,
    Transcript,
    breaks_of_text,
    parse_breaks,
)
from lab.features.turns.prompts import (
    added_tokens,
    for_template,
    left_out_by_template,
    recorded_conversation,
)
from lab.features.turns.recorded_calls import Body, Recording, read_recording
from lab.features.turns.rendered import RenderedPrompt
from lab.models import catalog
from lab.process.worker import MAX_TOKENS, Worker
from lab.runner.cases import Case, Plan, Text
from lab.runner.plan import make_plan, with_cases
from lab.runner.refusals import need_every_position

MOST_TURNS = 200
CHILD = "lab.features.turns.child"
RENDER_S = 60.0  # limit for rendering one request: a template may never end


def plan(
    worker: Worker,
    system: int,
    turn: str,
    turns: int,
    breaks: str,
    keep: str | Sequence[str],
    repeat: int | None = None,
    model: str = catalog.DEFAULT,
    *,
    replay: str | None = None,
    folder: Path = Path(),
    **settings: Any,
) -> Plan:
    """Every place of the cache, with the breaks and without them. LabError for impossible values.

    States are saved in `folder`.
    """
    keeps = places(keep)
    notes: list[str] = []
    if replay:
        check_replay(breaks)
        recording = read_recording(Path(replay))
        small = make_plan(worker, [16], 2, 1, model, **settings)
        worker.load(small.file.path, small.settings)
        worker.new_context(small.settings)
        first, notes = rendered_in(worker, recording)
    else:
        first = conversation(system, turn, turns, breaks, settings.get("seed") or 0)
    n_last = first.answers[-1]
    n_tokens = [sum(turn) for turn in zip(first.prompts, first.answers, strict=True)]
    longest = max(n_tokens) - n_last
    plain = make_plan(worker, [longest], n_last, repeat, model, **settings)
    most = plain.model.n_ctx_train
    if most is not None and longest + n_last > most:
        raise LabError(
            f"The longest turn has {longest + n_last:,} tokens; "
            f"{plain.model.name} was trained for {most:,}.",
            "Give fewer turns, or shorter ones.",
        )
    warnings = [*plain.warnings, *notes]
    try:
        need_every_position(plain.model)
    except LabError as problem:
        first = dataclasses.replace(first, whole=True)
        warnings.append(f"{problem.what} Its cache serves a prompt as a whole or not at all.")
    cases = [case(setup, longest, n_last) for setup in setups(first, keeps)]
    planned = with_cases(plain, cases, partial(write, folder=folder))
    return dataclasses.replace(planned, warnings=tuple(warnings))


def check_replay(breaks: str) -> None:
    """LabError for breaks beside those that the recorded requests have."""
    if breaks:
        raise LabError(
            "--break and --replay do not go together: the recorded requests have their own breaks.",
            "Leave one of them out.",
        )


def rendered_in(worker: Worker, recording: Recording) -> tuple[Conversation, list[str]]:
    """The conversation of a recording by the loaded model's own template; and what it leaves
    out, in sentences.
    """

    def render(body: Body) -> RenderedPrompt:
        if "messages" in body:
            body = for_template(body)
        with worker.ended_after(RENDER_S):
            return worker.call(RenderedPrompt, f"{CHILD}.render", body=json.dumps(body))

    notes = left_out_by_template(recording.calls, render)
    conversation_of_calls, _ = recorded_conversation(
        recording, render, partial(added_tokens, render=render), has_answers=True
    )
    return conversation_of_calls, [*recording.notes, *notes]


def places(keep: str | Sequence[str]) -> list[str]:
    """Where the cache is, of `--keep`. LabError for unknown or repeated places."""
    parts = keep.split(",") if isinstance(keep, str) else keep
    keeps = [part.strip() for part in parts]
    if not keeps or set(keeps) - set(KEEPS) or len(set(keeps)) < len(keeps):
        raise LabError(
            f"--keep {','.join(keeps)} is not possible.",
            f"Give some of {','.join(KEEPS)}, each once.",
        )
    return keeps


def conversation(system: int, turn: str, turns: int, breaks: str, seed: int) -> Conversation:
    """The conversation of these options, with a cache in memory. LabError for impossible values."""
    check_number("system", system, 0, MAX_TOKENS)
    check_number("turns", turns, 1, MOST_TURNS)
    message, plus, answer = turn.partition("+")
    if not plus:
        raise LabError(
            f"--turn {turn!r} has one length.",
            "Give the tokens of a message and an answer: --turn 300+150",
        )
    of_message = random_lengths.parse("--turn", message)
    of_answer = random_lengths.parse("--turn", answer)
    if min(of_answer.values) < 2:
        raise LabError(
            f"--turn {turn}: an answer of 1 token has no decode.",
            "Give answers of 2 or more tokens.",
        )
    parse_breaks(breaks, turns, EVENTS)
    is_drawn = len(of_message.values) > 1 or len(of_answer.values) > 1
    return Conversation(
        system=system,
        messages=random_lengths.draw(of_message, turns, f"{seed} turns prompts"),
        answers=random_lengths.draw(of_answer, turns, f"{seed} turns answers"),
        breaks=breaks,
        keep=MEMORY,
        asked=turn if is_drawn else "",
    )


def check_number(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise LabError(
            f"--{name} {value:,} is not possible.",
            f"Give a whole number from {least} to {most:,}.",
        )


def setups(first: Conversation, keeps: Sequence[str]) -> list[Conversation]:
    """The conversations to measure: each place of the cache, with the breaks and without them."""
    n_turns = first.n_turns
    conversations: list[Conversation] = []
    for keep in keeps:
        breaks = first.breaks
        only: tuple[int, ...] = ()
        if keep in (SLOT, NONE):
            breaks = breaks_of_text(breaks)
        if keep == NONE and len(keeps) > 1 and n_turns > 3:
            only = (n_turns // 2 + 1, n_turns)
        broken = dataclasses.replace(first, breaks=breaks, keep=keep, only=only)
        conversations.append(broken)
        if keep != NONE and breaks:
            conversations.append(dataclasses.replace(broken, breaks=""))
    return conversations


def case(conversation: Conversation, longest: int, n_last: int) -> Case:
    """`longest` is the last prompt, n_last its answer."""
    return Case(
        longest,
        n_last,
        experiment=NAME,
        setup=conversation,
        sequences=(longest + n_last,) * conversation.n_slots,
    )


def write(
    case: Case, text: Text, settings: Settings, *, folder: Path = Path()
) -> list[Operation]:
    """The script of a conversation, or of two that take turns, each in a slot of its own."""
    conversation = case.setup
    assert isinstance(conversation, Conversation)
    is_on_disk = conversation.keep == DISK
    path = str(folder / "state")
    slots = range(conversation.n_slots)
    transcripts = [Transcript(conversation, partial(text, slot)) for slot in slots]
    n_past = dict.fromkeys(slots, 0)
    operations: list[Operation] = []
    for number in range(1, conversation.n_turns + 1):
        for slot, transcript in enumerate(transcripts):
            turn = transcript.next_turn()
            transcript.answered(turn.answer)
            if number not in conversation.numbers:
                continue
            if n_past[slot] and is_on_disk:
                operations += [Operation(FORGET), Operation(LOAD, path=path)]
            if turn.n_cached < n_past[slot]:
                operations.append(Operation(FORGET, sequence=slot, first=turn.n_cached))
            operations += script.prefill(slot, turn.prompt[turn.n_cached :], settings.n_ubatch)
            for token in turn.answer[:-1]:
                operations.append(Operation(DECODE, (Part(slot, (token,), 1),)))
            if is_on_disk:
                operations.append(Operation(SAVE, path=path))
            n_past[slot] = len(turn.prompt) + len(turn.answer) - 1
    return operations
