"""The prompt of a request as blocks: tools, then messages, in the order in which templates write
them.

A block is a text that a template copies: the content of a message, its reasoning, its tool calls, a
tool. Blocks are compared by their texts, so a message that is sent again unchanged is the same
block wherever it stands.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lab.remote.chat_bodies import messages_of
from lab.remote.formats import as_list

OPTION = "option"
TOOL = "tool"
MESSAGE = "message"
PROMPT = "prompt"
"""Kinds of blocks. An option is a field of the request that changes the template's text."""

CONTENT = "content"
REASONING = "reasoning"
TOOL_CALLS = "tool calls"
"""Fields of messages."""

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
CACHE_MARK = "cache_control"
OPTION_FIELDS = ("chat_template_kwargs", "reasoning_effort")
LEAST_BASE64 = 256
DATA_URL = re.compile(r"data:[\w.+/;=-]{0,100}base64,[A-Za-z0-9+/_=-]*")
BASE64 = re.compile(rf"[A-Za-z0-9+/_-]{{{LEAST_BASE64},}}={{0,2}}\s*")
"""Files as letters: in an address, and alone."""

PATHS = ("/chat/completions", "/completions", "/completion", "/responses", "/messages")
PATHS_OF_OLLAMA = ("/api/chat", "/api/generate")
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
    return method == "POST" and path.partition("?")[0].rstrip("/").endswith(
        (*PATHS, *PATHS_OF_OLLAMA)
    )


def blocks_of(body: dict[str, object]) -> Blocks:
    """The blocks of the prompt of a request: a chat, a completion, or a response."""
    blocks: list[Block] = []
    for name in OPTION_FIELDS:
        if name in body:
            blocks.append(Block(OPTION, len(blocks), f"{name}: {as_text(body[name])}"))
    for index, tool in enumerate(as_list(body.get("tools"))):
        blocks.append(Block(TOOL, index, as_text(without_mark_of_tool(tool))))
    for index, message in messages_of(body):
        blocks += blocks_of_message(index, message)
    prompt = body.get("prompt")
    if prompt is not None:
        blocks.append(Block(PROMPT, 0, as_text(prompt)))
    return tuple(blocks)


def blocks_of_message(index: int, message: dict[str, object]) -> Iterator[Block]:
    """The blocks of a message: its reasoning and its tool calls stand apart from its content."""
    role = str(message.get("role") or "")[:40]
    for name in REASONING_FIELDS:
        if message.get(name):
            yield Block(MESSAGE, index, as_text(message[name]), role, REASONING)
    content = message.get("content")
    calls = message.get("tool_calls")
    text = "" if content is None else as_text(content)
    if text or not calls:
        yield Block(MESSAGE, index, text, role)
    if calls:
        yield Block(MESSAGE, index, as_text(calls), role, TOOL_CALLS)


def as_text(value: object) -> str:
    """A text, the joined texts of a list of parts, or JSON of anything else; of an image or another
    file only a mark."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(text_of_part, value))
    return json.dumps(value, ensure_ascii=False)


def text_of_part(part: object) -> str:
    """The text of a part of a message, or JSON of a part without a text."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return json.dumps(with_marks(without_cache_mark(part)), ensure_ascii=False)


def with_marks(value: object) -> object:
    """A value of JSON with a mark for each file that it holds as letters: a model reads no letter
    of a file."""
    if isinstance(value, str):
        if "base64," in value:
            return DATA_URL.sub(mark_of_match, value)
        return mark_of(value) if BASE64.fullmatch(value) else value
    if isinstance(value, dict):
        return {name: with_marks(item) for name, item in value.items()}
    if isinstance(value, list):
        return list(map(with_marks, value))
    return value


def mark_of_match(match: re.Match[str]) -> str:
    return mark_of(match[0])


def mark_of(data: str) -> str:
    """A short text by which two files differ."""
    digest = hashlib.blake2b(data.encode(errors="replace"), digest_size=4).hexdigest()
    return f"[file {digest}]"


def without_cache_mark(part: object) -> object:
    """A part without the mark for a cache, which clients move on at each call and no template
    writes."""
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in part.items() if name != CACHE_MARK}


def without_mark_of_tool(tool: object) -> object:
    tool = without_cache_mark(tool)
    if isinstance(tool, dict) and "function" in tool:
        tool["function"] = without_cache_mark(tool["function"])
    return tool


def length(blocks: Blocks) -> int:
    """Characters of all blocks."""
    return sum(len(block.text) for block in blocks)
