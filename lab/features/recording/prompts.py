"""The prompt of a request as blocks: tools, then messages, in the order in which templates write
them.

A block is a text that a template copies: the content of a message, its reasoning, its tool calls, a
tool. Blocks are compared by their texts, so a message that is sent again unchanged is the same
block wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lab.remote.formats import as_dict

OPTION = "option"
TOOL = "tool"
MESSAGE = "message"
PROMPT = "prompt"
"""Kinds of blocks. An option is a field of the request that changes the template's text."""

CONTENT = "content"
REASONING = "reasoning"
TOOL_CALLS = "tool calls"
"""Fields of messages."""

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CACHE_MARK = "cache_control"
OPTION_FIELDS = ("chat_template_kwargs", "reasoning_effort")
PATHS = ("/chat/completions", "/completions", "/completion", "/responses", "/messages")
"""The ends of paths where a prompt is sent."""


@dataclass(frozen=True)
class Block:
    """A part of a prompt."""

    kind: str
    index: int  # among the parts of its kind, from 0
    text: str
    role: str = ""  # of a message
    field: str = CONTENT  # of a message

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What two blocks share that a template writes alike, wherever they stand."""
        return self.kind, self.role, self.field, self.text

    def corresponds_to(self, block: Block) -> bool:
        """Whether both are the same part of a message, or tools, whatever they say."""
        return (self.kind, self.role, self.field) == (block.kind, block.role, block.field)


Blocks = tuple[Block, ...]


def has_prompt(method: str, path: str) -> bool:
    """Whether a request sends a prompt to generate from."""
    return method == "POST" and path.partition("?")[0].rstrip("/").endswith(PATHS)


def blocks_of(body: dict[str, Any]) -> Blocks:
    """The blocks of the prompt of a request: a chat, a completion, or a response."""
    blocks: list[Block] = []
    for name in OPTION_FIELDS:
        if name in body:
            blocks.append(Block(OPTION, len(blocks), f"{name}: {as_text(body[name])}"))
    for index, tool in enumerate(as_list(body.get("tools"))):
        blocks.append(Block(TOOL, index, as_text(tool)))
    messages = [*instructions(body), *as_list(body.get("messages")), *inputs(body)]
    for index, message in enumerate(messages):
        blocks += blocks_of_message(index, as_dict(message))
    prompt = body.get("prompt")
    if prompt is not None:
        blocks.append(Block(PROMPT, 0, as_text(prompt)))
    return tuple(blocks)


def instructions(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The system prompt where an interface has a field for it."""
    for name in ("instructions", "system"):
        if body.get(name):
            return [{"role": SYSTEM, "content": body[name]}]
    return []


def inputs(body: dict[str, Any]) -> list[Any]:
    """The messages of the interface `responses`."""
    items = body.get("input")
    if isinstance(items, str):
        return [{"role": USER, "content": items}]
    return as_list(items)


def blocks_of_message(index: int, message: dict[str, Any]) -> Iterator[Block]:
    """The blocks of a message: its reasoning and its tool calls stand apart from its content."""
    role = str(message.get("role") or message.get("type") or "")[:40]
    for name in REASONING_FIELDS:
        if message.get(name):
            yield Block(MESSAGE, index, as_text(message[name]), role, REASONING)
    content = message.get("content")
    if content is None:
        content = message.get("output", "")
    calls = message.get("tool_calls")
    if message.get("arguments") is not None:  # a call in the interface `responses`
        calls = [message.get("name"), message["arguments"]]
    text = as_text(content)
    if text or not calls:
        yield Block(MESSAGE, index, text, role)
    if calls:
        yield Block(MESSAGE, index, as_text(calls), role, TOOL_CALLS)


def as_text(value: Any) -> str:
    """A text, the joined texts of a list of parts, or JSON of anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(map(is_text_part, value)):
        return "\n".join(part["text"] for part in value)
    if isinstance(value, list):
        value = list(map(without_cache_mark, value))
    return json.dumps(value, ensure_ascii=False)


def without_cache_mark(part: Any) -> Any:
    """A part without the mark for a cache, which clients move on at each call and no template
    writes."""
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name != CACHE_MARK}


def is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def length(blocks: Blocks) -> int:
    """Characters of all blocks."""
    return sum(len(block.text) for block in blocks)
