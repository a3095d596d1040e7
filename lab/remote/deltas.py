"""What a piece of an answer carries: text, reasoning, a call of a tool, or nothing.

Servers name content in many ways: a string, a list of parts, reasoning in a field or a part of its
own, calls of functions, sound. Whatever is in a delta and not empty was generated, except what only
describes it.

Sources: platform.openai.com/docs/api-reference/chat-streaming; docs.mistral.ai (content as parts,
of the type thinking); openrouter.ai/docs (reasoning_details); docs.litellm.ai (thinking_blocks).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from lab.core import request as kinds

TEXT_FIELDS = ("content", "text", "refusal")
REASONING_FIELDS = (
    "reasoning_content",
    "reasoning",
    "reasoning_text",
    "reasoning_details",
    "thinking",
    "thinking_blocks",
    "thoughts",
)
TOOL_FIELDS = ("tool_calls", "function_call", "tool_call")
PART_FIELDS = (*TEXT_FIELDS, *REASONING_FIELDS, "summary", "value")  # with texts, in a part
DESCRIPTIONS = {"role", "index", "id", "type", "object", "format", "signature", "channel"}
"""Fields that describe content, and are none."""


class Content(NamedTuple):
    """The content of a delta. `kind` is None for an empty one."""

    kind: str | None
    text: str  # with reasoning


def content_of(choice: Mapping[str, object]) -> Content:
    """The content of a choice in a streamed chunk, of a chat or a completion."""
    delta = choice.get("delta")
    fields = delta if isinstance(delta, dict) else {"content": delta}
    if not is_filled(fields):  # some servers write the same text into both
        fields = {"text": choice.get("text"), **fields}
    texts = [texts_in(fields.get(name), is_reasoning=False) for name in TEXT_FIELDS]
    # A server may write the same reasoning into two fields
    thoughts = [texts_in(fields.get(name), is_reasoning=True) for name in REASONING_FIELDS]
    text = "".join(part.text for part in texts)
    reasoning = next((part.reasoning for part in thoughts if part.reasoning), "")
    reasoning = "".join(part.reasoning for part in texts) or reasoning
    return Content(_kind_of(fields, text, reasoning), reasoning + text)


def _kind_of(fields: dict[str, object], text: str, reasoning: str) -> str | None:
    """The kind of an event with these fields of a delta."""
    if text:
        return kinds.TEXT
    if any(is_filled(fields.get(name)) for name in TOOL_FIELDS):
        return kinds.TOOL
    if reasoning:
        return kinds.REASONING
    if any(is_filled(value) for name, value in fields.items() if name not in _NAMES):
        return kinds.TEXT
    return None


_NAMES = {*DESCRIPTIONS, "name"}


class Texts(NamedTuple):
    """The texts of a field."""

    text: str
    reasoning: str


def texts_in(value: object, is_reasoning: bool) -> Texts:
    """The texts of a string, or of parts within parts."""
    texts: list[str] = []
    thoughts: list[str] = []
    stack = [(value, is_reasoning)]
    while stack:
        part, is_thought = stack.pop()
        if isinstance(part, str):
            (thoughts if is_thought else texts).append(part)
        elif isinstance(part, list):
            stack += [(inner, is_thought) for inner in reversed(part)]
        elif isinstance(part, dict):
            kind = str(part.get("type"))
            is_thought = is_thought or "think" in kind or "reason" in kind
            for name in reversed(PART_FIELDS):
                stack.append((part.get(name), is_thought or name in REASONING_FIELDS))
    return Texts("".join(texts), "".join(thoughts))


def is_filled(value: object) -> bool:
    """Whether a JSON value has a text that is not empty. A number or a flag describes a text."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            stack += [inner for name, inner in part.items() if name not in DESCRIPTIONS]
        elif isinstance(part, list):
            stack += part
        elif isinstance(part, str) and part:
            return True
    return False
