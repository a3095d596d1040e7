"""The prompts of recorded requests, rendered by a server or by the model's own template, and what
each shares with the one before it.

    conversation, prompts = recorded_conversation(recording, render, answer, has_answers=True)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from lab.core.lists import join_and, plural
from lab.features.turns.conversation import (
    CLIENT,
    MEMORY,
    TEMPLATE,
    Conversation,
    common_length,
)
from lab.features.turns.recorded_calls import (
    REASONING,
    Body,
    Call,
    Message,
    Recording,
    appends_only,
)
from lab.features.turns.rendered import RenderedPrompt

N_GRAM = 8
"""Tokens in a row that a prompt and the one before it have both count as read before."""

LEAST_ANSWER = 2  # tokens, so that there is a decode step


Render = Callable[[Body], RenderedPrompt]
"""Renders a request; with `add_generation_prompt` false without the beginning of an answer."""


AnswerTokens = Callable[[Call, RenderedPrompt], Sequence[int]]


class Turn(NamedTuple):
    """The lengths of a call, in tokens."""

    n_same: int  # first tokens that are those of the call before and its answer
    n_again: int  # later ones that the call before had too
    n_new: int
    n_answer: int


def recorded_conversation(
    recording: Recording, render: Render, answer: AnswerTokens, has_answers: bool
) -> tuple[Conversation, list[RenderedPrompt]]:
    """The conversation of a recording, and its prompts.

    `answer` gives the tokens of a recorded answer. `has_answers`: they are decoded, so that the
    next prompt can share them.
    """
    turns: list[Turn] = []
    prompts: list[RenderedPrompt] = []
    breaks: list[str] = []
    held: Sequence[int] = ()  # the tokens of the call before, and of its answer
    for number, call in enumerate(recording.calls, 1):
        prompt = render(call.body)
        tokens_of_answer = answer(call, prompt)
        turn = turn_of(prompt.tokens, held, max(LEAST_ANSWER, len(tokens_of_answer)))
        if turn.n_again:
            breaks.append(f"{changed_by(recording.calls[number - 2], call)}@{number}")
        turns.append(turn)
        prompts.append(prompt)
        held = prompt.tokens
        if has_answers:
            held = [*held, *tokens_of_answer]
    conversation = Conversation(
        system=0,
        messages=tuple(turn.n_new for turn in turns),
        answers=tuple(turn.n_answer for turn in turns),
        breaks=",".join(breaks),
        keep=MEMORY,
        replay=recording.name,
        same=tuple(turn.n_same for turn in turns),
        again=tuple(turn.n_again for turn in turns),
    )
    return conversation, prompts


def turn_of(tokens: Sequence[int], held: Sequence[int], n_answer: int) -> Turn:
    """The lengths of a prompt after the tokens that the cache holds."""
    n_same = common_length(tokens, held)
    n_again = n_repeated(tokens[n_same:], held[n_same:])
    return Turn(n_same, n_again, len(tokens) - n_same - n_again, n_answer)


def n_repeated(tokens: Sequence[int], held: Sequence[int]) -> int:
    """How many of these tokens lie in rows of N_GRAM that the held ones have too.

    A row that is held once counts once.
    """
    rows = Counter(tuple(held[i : i + N_GRAM]) for i in range(len(held) - N_GRAM + 1))
    n_found = 0
    end = 0  # of the last row that was found
    for i in range(len(tokens) - N_GRAM + 1):
        row = tuple(tokens[i : i + N_GRAM])
        if rows[row] > 0:
            rows[row] -= 1
            n_found += i + N_GRAM - max(i, end)
            end = i + N_GRAM
    return min(n_found, len(held))


def changed_by(before: Call, call: Call) -> str:
    """Who changed what had been read: the client, or the template of the model."""
    return TEMPLATE if appends_only(before, call) else CLIENT


def added_tokens(call: Call, prompt: RenderedPrompt, render: Render) -> Sequence[int]:
    """The tokens of the recorded answer: what it adds to the prompt of its call."""
    if call.answer is None or "messages" not in call.body:
        return ()
    messages = [*call.messages, call.answer]
    answered = render({**call.body, "messages": messages, "add_generation_prompt": False})
    return answered.tokens[common_length(answered.tokens, prompt.tokens) :]


def answer_text(call: Call) -> str:
    """The text of the recorded answer: reasoning, content, and calls of tools as JSON."""
    answer = call.answer
    if answer is None:
        return ""
    texts = [reasoning_of(answer), content_text(answer)]
    if answer.get("tool_calls"):
        texts.append(json.dumps(answer["tool_calls"], ensure_ascii=False))
    return "\n".join(filter(None, texts))


def left_out_by_template(calls: Iterable[Call], render: Render) -> list[str]:
    """What the template leaves out of the prompts, in sentences.

    A kind of content is left out if the prompt is the same without it.
    """
    n_without: Counter[str] = Counter()
    for call in calls:
        if "messages" not in call.body:
            continue
        text = render(call.body).text
        for kind, without in WITHOUT.items():
            body = without(call.body)
            if body != call.body and render(body).text == text:
                n_without[kind] += 1
        if has_lost_reasoning(call.messages, text):
            n_without["reasoning of earlier answers"] += 1
    if not n_without:
        return []
    kinds = join_and([f"{kind} ({plural(n, 'call')})" for kind, n in n_without.items()])
    return [f"The chat template leaves out: {kinds}."]


def has_lost_reasoning(messages: Iterable[Message], text: str) -> bool:
    """Whether the prompt lacks the reasoning of an answer."""
    for message in messages:
        reasoning = reasoning_of(message).strip()
        if reasoning and reasoning not in text:
            return True
    return False


def reasoning_of(message: Message) -> str:
    for name in REASONING:
        if isinstance(message.get(name), str):
            return str(message[name])
    return ""


def without_tools(body: Body) -> Body:
    return {name: value for name, value in body.items() if name != "tools"}


def without_tool_calls(body: Body) -> Body:
    messages = []
    for message in body["messages"]:
        if message.get("tool_calls"):
            message = {**message, "content": message.get("content") or ""}
            del message["tool_calls"]
        messages.append(message)
    return {**body, "messages": messages}


def without_results(body: Body) -> Body:
    messages = []
    for message in body["messages"]:
        if message["role"] in ("tool", "function"):
            message = {**message, "content": ""}
        messages.append(message)
    return {**body, "messages": messages}


WITHOUT: dict[str, Callable[[Body], Body]] = {
    "tools": without_tools,
    "tool calls": without_tool_calls,
    "tool results": without_results,
}


def for_template(body: Body) -> Body:
    """A body as chat templates expect it: texts as strings, arguments of tools as objects."""
    messages = [message_for_template(message) for message in body["messages"]]
    return {**body, "messages": messages}


def message_for_template(message: Message) -> Message:
    prepared = {**message, "content": content_text(message)}
    if prepared["role"] == "developer":
        prepared["role"] = "system"
    reasoning = reasoning_of(message)
    if reasoning:
        prepared["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        prepared["tool_calls"] = [
            with_object_arguments(call) for call in message["tool_calls"]
        ]
    return prepared


def content_text(message: Message) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return str(content)


def with_object_arguments(call: Any) -> object:
    """A tool call with its arguments as an object; as it is if they are none."""
    try:
        function = dict(call["function"])
        function["arguments"] = json.loads(function["arguments"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return call
    return {**call, "function": function}
