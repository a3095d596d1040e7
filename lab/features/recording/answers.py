"""What an answer says about its request: token counts, times, and when its first token came.

Streams and whole answers of the interfaces chat, completions, responses and messages, and of
llama-server itself. Only counts and times are taken, no text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from lab.core.lists import first_known
from lab.core.request import ServerTimings
from lab.remote.compression import READABLE, Pieces, decompressed
from lab.remote.deltas import content_of, is_filled
from lab.remote.formats import as_count, as_dict, as_list, error_in, error_words
from lab.remote.framing import sent_events
from lab.remote.streams import merged_usage, named_counts, timings_of, usage_in

FULL = ("context size", "context length", "context window", "exceed_context_size")
"""Words of servers that refuse a prompt that does not fit."""

NO_CONTENT = ("message_start", "message_delta", "message_stop", "ping")
"""Events of the Messages API without anything generated."""


@dataclass
class Answer:
    """What is known about an answer. None: the server did not say."""

    n_prompt: int | None = None
    n_cached: int | None = None
    n_gen: int | None = None
    timings: ServerTimings | None = None
    first_ns: int | None = None  # when the first generated content came; None: no stream
    model: str | None = None
    error: str | None = None  # in the lab's words
    is_context_full: bool = False
    is_readable: bool = True  # whether its compression is known
    usage: dict[str, object] = field(default_factory=dict)


def read_answer(pieces: Pieces, encoding: str, content_type: str) -> Answer:
    """Read an answer that came in these pieces: a stream of events, or a JSON object. An empty
    Answer of anything else."""
    answer = Answer(is_readable=encoding in READABLE)
    plain = [(ns, data) for ns, data in decompressed(pieces, encoding) if data]
    text = b"".join(data for _, data in plain)
    if "event-stream" not in content_type:
        with suppress(ValueError, RecursionError):
            add_fields(answer, as_dict(json.loads(text)))
            return answer
    for ns, fields in events(plain):
        add_fields(answer, fields)
        if answer.first_ns is None and has_content(fields):
            answer.first_ns = ns
    return answer


def events(pieces: Pieces) -> Iterator[tuple[int, dict[str, object]]]:
    """The JSON objects of a stream, and when each was complete."""
    for event in sent_events(pieces):
        with suppress(ValueError, RecursionError):
            fields = json.loads(event.data)
            if isinstance(fields, dict):
                is_error = event.name == "error" and "error" not in fields
                yield event.ns, {"error": fields} if is_error else fields


def add_fields(answer: Answer, fields: dict[str, object]) -> None:
    """Add what a JSON object of an answer says."""
    inner = as_dict(fields.get("response")) or as_dict(fields.get("message")) or fields
    usage = usage_in(fields)
    if fields.get("done") is True:  # the last line of Ollama's own interface
        usage = {
            "prompt_tokens": fields.get("prompt_eval_count"),
            "completion_tokens": fields.get("eval_count"),
        }
    if usage:
        answer.usage = merged_usage(answer.usage, usage)
        add_usage(answer)
    timings = as_dict(fields.get("timings"))
    if timings:
        answer.timings = timings_of(timings)
        add_timings(answer)
    model = inner.get("model")
    if isinstance(model, str):
        answer.model = model
    error = error_in(fields) or error_in(inner)
    if error is None and fields.get("type") in ("error", "response.failed"):
        error = error_words(fields.get("message"))
    if error is not None:
        answer.error = answer.error or error
        message = json.dumps(fields).lower()
        answer.is_context_full = any(phrase in message for phrase in FULL)


def add_usage(answer: Answer) -> None:
    """Counts by the names of the interfaces. Anthropic's input_tokens are those not cached; other
    counts of a prompt include them, though a gateway may name Anthropic's counts beside."""
    usage = answer.usage
    counts = {name: as_count(value) for name, value in named_counts(usage).items()}
    n_prompt = counts["prompt_tokens"]
    reused = as_count(usage.get("cache_read_input_tokens"))
    if n_prompt is not None and reused is not None and usage.get("prompt_tokens") is None:
        created = as_count(usage.get("cache_creation_input_tokens")) or 0
        n_prompt += reused + created
    answer.n_prompt = n_prompt or answer.n_prompt
    answer.n_cached = first_known([counts["cached_tokens"], answer.n_cached])
    answer.n_gen = first_known([counts["completion_tokens"], answer.n_gen])


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


def has_content(fields: dict[str, object]) -> bool:
    """Whether an event of a stream carries something generated."""
    choices = as_list(fields.get("choices"))
    if choices:
        return content_of(as_dict(choices[0])).kind is not None
    if fields.get("type") in NO_CONTENT:
        return False
    of_ollama = [fields.get("message"), fields.get("thinking")]
    if isinstance(fields.get("response"), str):
        of_ollama.append(fields["response"])
    return is_filled([fields.get("delta"), *of_ollama]) or bool(fields.get("content"))
