"""What an answer says about its request: token counts, times, and when its first token came.

Streams and whole answers of the interfaces chat, completions, responses and messages, and of
llama-server itself. Only counts and times are taken, no text.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from lab.core.lists import first_known
from lab.core.request import ServerTimings
from lab.remote.formats import as_count, as_dict, error_in
from lab.remote.streams import timings_of

FULL = ("context size", "context length", "context window", "exceed_context_size")
"""Words of servers that refuse a prompt that does not fit."""


@dataclass
class Answer:
    """What is known about an answer. None: the server did not say."""

    n_prompt: int | None = None
    n_cached: int | None = None
    n_gen: int | None = None
    timings: ServerTimings | None = None
    first_byte: int | None = None  # of the answer's first generated content: where it ends
    model: str | None = None
    error: str | None = None
    is_context_full: bool = False
    usage: dict[str, Any] = field(default_factory=dict)


def read_answer(data: bytes, encoding: str, content_type: str) -> Answer:
    """Read an answer: a stream of events, or a JSON object. An empty Answer of anything else."""
    text = decompressed(data, encoding)
    answer = Answer()
    if "event-stream" in content_type:
        for end, fields in events(text):
            add_fields(answer, fields)
            if answer.first_byte is None and has_content(fields):
                answer.first_byte = end if not encoding else len(data)
    else:
        with suppress(ValueError, RecursionError):
            add_fields(answer, as_dict(json.loads(text)))
    return answer


def decompressed(data: bytes, encoding: str) -> bytes:
    """The bytes without their compression; empty for a damaged or another one."""
    if encoding in ("", "identity"):
        return data
    with suppress(OSError, EOFError, zlib.error):
        if encoding == "gzip":
            return gzip.decompress(data)
        if encoding == "deflate":
            return zlib.decompress(data)
    return b""


def events(text: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a stream, each with the position after its line."""
    position = 0
    for line in text.split(b"\n"):
        position += len(line) + 1
        if line.startswith(b"data:"):
            with suppress(ValueError, RecursionError):
                fields = json.loads(line[5:])
                if isinstance(fields, dict):
                    yield position, fields


def add_fields(answer: Answer, fields: dict[str, Any]) -> None:
    """Add what a JSON object of an answer says."""
    inner = as_dict(fields.get("response")) or as_dict(fields.get("message")) or fields
    usage = as_dict(inner.get("usage")) or as_dict(fields.get("usage"))
    if usage:
        answer.usage |= usage
        add_usage(answer)
    timings = as_dict(fields.get("timings"))
    if timings:
        answer.timings = timings_of(timings)
        add_timings(answer)
    model = inner.get("model")
    if isinstance(model, str):
        answer.model = model
    error = error_in(fields)
    if error is not None:
        answer.error = error
        message = json.dumps(fields).lower()
        answer.is_context_full = any(phrase in message for phrase in FULL)


def add_usage(answer: Answer) -> None:
    """Counts by the names of the interfaces. Anthropic's input_tokens are those not cached."""
    usage = answer.usage
    details = as_dict(usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))
    reused = as_count(usage.get("cache_read_input_tokens"))
    answer.n_cached = first_known(
        [
            as_count(details.get("cached_tokens")),
            as_count(usage.get("prompt_cache_hit_tokens")),
            reused,
            answer.n_cached,
        ]
    )
    n_prompt = first_known(
        [as_count(usage.get("prompt_tokens")), as_count(usage.get("input_tokens"))]
    )
    if n_prompt and reused is not None:
        created = as_count(usage.get("cache_creation_input_tokens")) or 0
        n_prompt += reused + created
    answer.n_prompt = n_prompt or answer.n_prompt
    n_gen = [as_count(usage.get("completion_tokens")), as_count(usage.get("output_tokens"))]
    answer.n_gen = first_known([*n_gen, answer.n_gen])


def add_timings(answer: Answer) -> None:
    """Counts by llama-server's timings."""
    timings = answer.timings
    if timings is None:
        return
    if timings.n_cached is not None:
        answer.n_cached = timings.n_cached
        if timings.n_prompt is not None:
            answer.n_prompt = timings.n_cached + timings.n_prompt
    answer.n_gen = first_known([timings.n_gen, answer.n_gen])


def has_content(fields: dict[str, Any]) -> bool:
    """Whether an event of a stream carries something generated."""
    choices = fields.get("choices")
    if isinstance(choices, list) and choices:
        choice = as_dict(choices[0])
        delta = as_dict(choice.get("delta"))
        names = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
        return bool(choice.get("text")) or any(delta.get(name) for name in names)
    return bool(fields.get("delta") or fields.get("content"))
