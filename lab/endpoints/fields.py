"""The JSON of OpenAI-compatible servers: what each field means, where it is there and of the expected type."""

from __future__ import annotations

import json
from typing import Any

from lab.core.request import ServerTimings, Usage


def error_in(parsed: dict[str, Any]) -> str | None:
    """The message of an error; None where there is none.

    Servers write {"error": {"message": ...}}, {"error": ...}, {"object": "error", "message": ...} or {"detail": ...}.
    """
    error = parsed.get("error")
    if error is None and parsed.get("object") == "error":
        error = parsed
    if error is None and "detail" in parsed and "choices" not in parsed:
        error = parsed["detail"]
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else json.dumps(error)


def usage_of(usage: dict[str, Any] | None, timings: dict[str, Any] | None = None) -> Usage | None:
    """The counts of tokens of an answer, as servers write them."""
    usage, timings = usage or {}, timings or {}
    prompt, completion = as_dict(usage.get("prompt_tokens_details")), as_dict(usage.get("completion_tokens_details"))
    cached = (prompt.get("cached_tokens"), usage.get("prompt_cache_hit_tokens"), timings.get("cache_n"))
    reasoning = (completion.get("reasoning_tokens"), usage.get("reasoning_tokens"))
    counts = Usage(
        prompt_tokens=as_count(usage.get("prompt_tokens")),
        completion_tokens=as_count(usage.get("completion_tokens")),
        cached_tokens=next((n for n in map(as_count, cached) if n is not None), None),
        reasoning_tokens=next((n for n in map(as_count, reasoning) if n is not None), None),
    )
    return None if counts == Usage() else counts


def timings_of(timings: dict[str, Any] | None) -> ServerTimings | None:
    """llama-server's `timings`."""
    if not timings:
        return None
    return ServerTimings(
        n_cached=as_count(timings.get("cache_n")),
        n_prompt=as_count(timings.get("prompt_n")),
        prompt_ms=as_number(timings.get("prompt_ms")),
        n_gen=as_count(timings.get("predicted_n")),
        gen_ms=as_number(timings.get("predicted_ms")),
        n_draft=as_count(timings.get("draft_n")),
        n_draft_accepted=as_count(timings.get("draft_n_accepted")),
    )


def first(value: Any) -> dict[str, Any]:
    return as_dict(value[0]) if isinstance(value, list) and value else {}


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def as_number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e18 else None


def n_items(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def as_text(value: Any) -> str:
    """Content: text, or a list of parts with text."""
    if isinstance(value, list):
        return "".join(as_text(as_dict(part).get("text")) for part in value)
    return value if isinstance(value, str) else ""


def thoughts(value: Any) -> str:
    """The reasoning in content that is a list of parts (Mistral's)."""
    return "".join(as_text(as_dict(part).get("thinking")) for part in value) if isinstance(value, list) else ""


def reasoning_of(message: dict[str, Any]) -> str:
    """The reasoning in a message, or in the delta of a stream."""
    fields = "".join(as_text(message.get(name)) for name in ("reasoning_content", "reasoning", "thinking"))
    return fields + thoughts(message.get("content"))


def n_logprobs(value: Any) -> int | None:
    """Tokens in the log-probabilities of a chunk: of chat {"content": [...]}, of completions {"tokens": [...]}."""
    content = n_items(as_dict(value).get("content"))
    return n_items(as_dict(value).get("tokens")) if content is None else content
