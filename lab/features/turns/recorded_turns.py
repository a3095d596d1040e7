"""Recorded requests, ready to be sent to a server: rendered and counted by it where it can."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.features.turns.conversation import MEMORY, Conversation, common_length
from lab.features.turns.prompts import (
    LEAST_ANSWER,
    answer_text,
    left_out_by_template,
    recorded_conversation,
)
from lab.features.turns.recorded_calls import Body, Call, Recording
from lab.features.turns.rendered import RenderedPrompt
from lab.remote.client import Client
from lab.remote.formats import fresh_nonce
from lab.remote.rendering import apply_template, tokenize
from lab.remote.servers import Server

TOKENS_PER_WORD = 1.3  # of a server that cannot render
NOT_RENDERED = (
    "The server has no /apply-template and /tokenize: the lengths of prompts are its own counts, "
    "and where they differ is not known."
)


class NotRendered(Exception):
    """The server cannot render."""


@dataclass(frozen=True)
class RecordedTurns:
    """The conversation of a recording, with the bodies to send, and their prompts, if known."""

    conversation: Conversation
    bodies: list[Body]
    prompts: list[RenderedPrompt]
    notes: list[str]

    def n_prompt(self, number: int) -> int | None:
        """The tokens of a turn's prompt, from 1; None if unknown."""
        return len(self.prompts[number - 1].tokens) if self.prompts else None

    def differs_at(self, number: int) -> int | None:
        """The letters of a prompt before the first that differs from the turn before."""
        if number < 2 or not self.prompts:
            return None
        before = self.prompts[number - 2].text
        return common_length(self.prompts[number - 1].text, before)

    def cold_body(self, number: int) -> Body:
        """The body of a turn with other first letters, so that no cache has its prompt."""
        return with_nonce(self.bodies[number - 1], fresh_nonce())


def prepared(recording: Recording, server: Server) -> RecordedTurns:
    """Recorded requests for a server. Their first letters are new, so that it has none in a cache.

    LabError if the server refuses one.
    """
    nonce = fresh_nonce()
    calls = []
    for call in recording.calls:
        calls.append(Call(with_nonce(call.body, nonce), call.answer))
    bodies = [call.body for call in calls]
    recording = recording._replace(calls=calls)
    try:
        return rendered(recording, bodies, server)
    except NotRendered:
        notes = [*recording.notes, NOT_RENDERED]
        return RecordedTurns(estimated(recording), bodies, [], notes)


def rendered(recording: Recording, bodies: list[Body], server: Server) -> RecordedTurns:
    """The same with prompts that the server renders. NotRendered if it cannot."""

    def render(body: Body) -> RenderedPrompt:
        return rendered_by(server.client, {"model": server.model, **body})

    def answer(call: Call, prompt: RenderedPrompt) -> Sequence[int]:
        return tokenize(server.client, answer_text(call)) or ()

    conversation, prompts = recorded_conversation(recording, render, answer, has_answers=False)
    notes = [*recording.notes, *left_out_by_template(recording.calls, render)]
    return RecordedTurns(conversation, bodies, prompts, notes)


def rendered_by(client: Client, body: Body) -> RenderedPrompt:
    text = apply_template(client, body)
    tokens = None if text is None else tokenize(client, text)
    if text is None or tokens is None:
        raise NotRendered
    return RenderedPrompt(text, tokens)


def estimated(recording: Recording) -> Conversation:
    """The conversation of a recording by its words."""
    messages = []
    answers = []
    n_held = 0
    for call in recording.calls:
        texts = [str(call.body.get("prompt", ""))]
        texts += [answer_text(Call(call.body, message)) for message in call.messages]
        n_prompt = sum(map(n_tokens_of, texts))
        n_answer = max(LEAST_ANSWER, n_tokens_of(answer_text(call)))
        messages.append(max(1, n_prompt - n_held))
        answers.append(n_answer)
        n_held = n_prompt + n_answer
    return Conversation(0, tuple(messages), tuple(answers), "", MEMORY, replay=recording.name)


def n_tokens_of(text: str) -> int:
    """The approximate number of tokens, from the words of a text."""
    return round(TOKENS_PER_WORD * len(text.split()))


def with_nonce(body: Body, nonce: str) -> Body:
    """The body with these letters before the first text of its prompt. Templates begin with the
    tools or with the messages, so that both have them."""
    if "messages" not in body:
        return {**body, "prompt": f"{nonce} {body['prompt']}"}
    messages = list(body["messages"])
    for position, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and content:
            first, *later_parts = content
            first = {**first, "text": f"{nonce} {first['text']}"}
            messages[position] = {**message, "content": [first, *later_parts]}
            break
        if isinstance(content, str):
            messages[position] = {**message, "content": f"{nonce} {content}"}
            break
    if not body.get("tools"):
        return {**body, "messages": messages}
    first, *others = body["tools"]
    return {**body, "messages": messages, "tools": [tool_with_nonce(first, nonce), *others]}


def tool_with_nonce(tool: object, nonce: str) -> object:
    """A tool with these letters before its description; as it is if it is no function."""
    if not isinstance(tool, dict):
        return tool
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": tool_with_nonce(tool["function"], nonce)}
    first = {
        "name": tool.get("name"),
        "description": f"{nonce} {tool.get('description') or ''}",
    }
    return {**first, **{name: tool[name] for name in tool if name not in first}}
