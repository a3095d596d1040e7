"""Recorded requests: the calls of a model in a file, each with its answer where it is known.

A file has one JSON value a line, or an array of them. A value is the body of a request as a client
sent it, a line of a recording that has it under "body", or a message of a conversation: each answer
of the model in it is then a call. An answer is known from a later request, which repeats it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.core import files
from lab.core.lists import join_and, plural
from lab.errors import LabError, printable

Body = dict[str, Any]
Message = dict[str, Any]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", "tool", "function", ASSISTANT)
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of an answer, by server
PROMPT_FIELDS = (
    "messages",
    "prompt",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "reasoning_effort",
)
"""The fields of a body that the prompt depends on."""

MOST_CALLS = 200
MOST_BYTES = 128 << 20
MOST_LATER = 4  # later requests in which an answer is looked for
HINT = (
    'Each line is the JSON body of a request: {"messages": [...], "tools": [...]}, '
    'or a message: {"role": "user", "content": "..."}'
)


class Call(NamedTuple):
    """A call of the model: what its prompt depends on, and the answer; None if it is not known."""

    body: Body
    answer: Message | None

    @property
    def messages(self) -> list[Message]:
        return list(self.body.get("messages", ()))


class Recording(NamedTuple):
    """The calls of a file; and what cannot be replayed, with how often."""

    name: str
    calls: list[Call]
    left_out: dict[str, int]

    @property
    def n_turns(self) -> int:
        return len(self.calls)

    @property
    def notes(self) -> list[str]:
        """Sentences on what is left out, or not known."""
        notes = []
        if self.left_out:
            kinds = join_and([f"{plural(n, kind)}" for kind, n in self.left_out.items()])
            notes.append(f"Left out of the replay of {self.name}: {kinds}.")
        n_unknown = sum(call.answer is None for call in self.calls[:-1])
        if n_unknown:
            notes.append(
                f"{plural(n_unknown, 'answer')} of {self.name} are in no later request: "
                "2 tokens stand for each."
            )
        return notes


def read_recording(path: Path) -> Recording:
    """The calls of a file. LabError for files that are no recording."""
    left_out: Counter[str] = Counter()
    bodies: list[Body] = []
    messages: list[Message] = []
    for number, value in enumerate(values_of(path), 1):
        try:
            body = body_of(value)
            if body is None:
                left_out["line without a prompt"] += 1
            elif "role" in body:
                messages.append(with_text_only(body, left_out))
            else:
                bodies.append(with_texts_only(body, left_out))
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            raise LabError(
                f"{path.name}, line {number}, is no request and no message.", HINT
            ) from None
    if messages and bodies:
        raise LabError(f"{path.name} has requests and messages.", "Give a file for each.")
    if len(bodies) == 1 and "messages" in bodies[0]:
        calls = calls_in(bodies[0]["messages"], bodies[0])
    elif messages:
        calls = calls_in(messages, {})
    else:
        calls = answered_calls(bodies)
    check_number(path, calls, left_out)
    return Recording(printable(path.name), calls, dict(left_out))


def check_number(path: Path, calls: Sequence[Call], left_out: Counter[str]) -> None:
    """LabError for no calls, or too many."""
    if not calls and left_out:
        raise LabError(
            f"{path.name} has no prompt to replay.",
            "Record again with the texts: lab record --keep-text",
        )
    if not 1 <= len(calls) <= MOST_CALLS:
        raise LabError(
            f"{path.name} has {len(calls):,} calls of a model; 1 to {MOST_CALLS} are possible.",
            HINT,
        )


def values_of(path: Path) -> list[object]:
    """The JSON values of a file: of an array, or one a line. LabError if it has others."""
    content = read(path)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if isinstance(document, list):
        return document
    if isinstance(document, dict):
        return [document]
    values = []
    for number, line in enumerate(filter(bytes.strip, content.splitlines()), 1):
        try:
            values.append(json.loads(line))
        except (ValueError, RecursionError):
            raise LabError(f"{path.name}, line {number}, is not JSON.", HINT) from None
    return values


def read(path: Path) -> bytes:
    """The content of a file. LabError if it cannot be read, or is too large."""
    return files.read(path, "The file", "Check its name.", MOST_BYTES)


def body_of(value: Any) -> Body | None:
    """The body or the message in a value of a file; None for a line of a recording that has none.

    Any of several errors if it is neither.
    """
    if "body" in value or "kind" in value:
        value = value.get("body")
        if isinstance(value, str):
            value = json.loads(value)
        if value is None or not {"messages", "prompt"} & value.keys():
            return None
    if "role" in value:
        return dict(value)
    if not value.get("messages") and not isinstance(value["prompt"], str):
        raise ValueError("no prompt")
    return {name: value[name] for name in PROMPT_FIELDS if value.get(name) is not None}


def with_texts_only(body: Body, left_out: Counter[str]) -> Body:
    """The body with the texts of its messages only."""
    if "messages" not in body:
        return body
    messages = [with_text_only(message, left_out) for message in body["messages"]]
    return {**body, "messages": messages}


def with_text_only(message: Message, left_out: Counter[str]) -> Message:
    """A message with its texts only, without images and the like. ValueError if it is none."""
    content = message.get("content")
    if message["role"] not in ROLES or not isinstance(content, (str, list, type(None))):
        raise ValueError("no message")
    if not isinstance(content, list):
        return message
    texts = []
    for part in content:
        if part.get("type") == "text":
            texts.append({"type": "text", "text": str(part["text"])})
        else:
            left_out[f"{printable(str(part.get('type'))[:40])} part"] += 1
    return {**message, "content": texts}


def calls_in(messages: Sequence[Message], body: Body) -> list[Call]:
    """The calls of a conversation: one for each answer, and one for what is not answered yet."""
    calls = []
    for position, message in enumerate(messages):
        if message["role"] == ASSISTANT and position:
            before = list(messages[:position])
            calls.append(Call({**body, "messages": before}, message))
    if messages and messages[-1]["role"] != ASSISTANT:
        calls.append(Call({**body, "messages": list(messages)}, None))
    return calls


def answered_calls(bodies: Sequence[Body]) -> list[Call]:
    """The calls of these requests, with the answers that later requests repeat."""
    calls = []
    for position, body in enumerate(bodies):
        later = bodies[position + 1 : position + 1 + MOST_LATER]
        calls.append(Call(body, answer_in(body, later)))
    return calls


def answer_in(body: Body, later: Iterable[Body]) -> Message | None:
    """The answer to a request: in a later one it follows the last message, or is in its place."""
    messages = body.get("messages")
    if not messages:
        return None
    for later_body in later:
        followers = later_body.get("messages", [])
        for position in range(len(followers) - 1, 0, -1):
            is_answer = followers[position]["role"] == ASSISTANT
            if is_answer and followers[position - 1] == messages[-1]:
                return dict(followers[position])
        if len(followers) > len(messages):
            message = followers[len(messages)]
            if message["role"] == ASSISTANT:
                return dict(message)
    return None


def appends_only(before: Call, call: Call) -> bool:
    """Whether a call repeats all of the call before it, and adds messages. Values are compared as
    they are sent: templates write the keys of a tool's schema in their order."""
    if as_sent(options_of(before.body)) != as_sent(options_of(call.body)):
        return False
    if "messages" not in call.body:
        return str(call.body["prompt"]).startswith(str(before.body.get("prompt", "\0")))
    expected = before.messages
    if before.answer is not None:
        expected = [*expected, before.answer]
    repeated = call.messages[: len(expected)]
    return list(map(as_sent, repeated)) == list(map(as_sent, expected))


def options_of(body: Body) -> Body:
    """The fields of a body besides its texts."""
    return {name: value for name, value in body.items() if name not in ("messages", "prompt")}


def as_sent(fields: Message) -> dict[str, str]:
    """The values of these fields as JSON, with their keys in the order in which they were sent."""
    return {name: json.dumps(value, ensure_ascii=False) for name, value in fields.items()}
