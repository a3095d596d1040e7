"""The JSON of OpenAI-compatible servers: the body of a request, and what each field of an answer means.

The body has options that the server was seen to take. What is not there, or not of the expected type, is None or empty.
"""

from __future__ import annotations

import json
from typing import Any

from lab.core.request import CHAT, Asked, ServerTimings, Usage
from lab.endpoints.wire import Ask

INCLUDE_USAGE = "stream_options.include_usage"
CONTINUOUS_USAGE = "stream_options.continuous_usage_stats"
IGNORE_EOS = "ignore_eos"
TOKEN_IDS = "return_token_ids"
TIMINGS = "timings_per_token"
NO_CACHE = "cache_prompt"
MAX_COMPLETION = "max_completion_tokens"
OPTIONS = (INCLUDE_USAGE, CONTINUOUS_USAGE, IGNORE_EOS, TOKEN_IDS, TIMINGS, NO_CACHE)
"""Options that are not in every server."""

OPENAI_OPTIONS = (INCLUDE_USAGE, MAX_COMPLETION)
"""Those that OpenAI's own server takes; it refuses a request with any other."""


def body(
    api: str, model: str, prompt: str, asked: Asked, options: tuple[str, ...], is_streamed: bool = True
) -> dict[str, Any]:
    """The JSON object to send."""
    fields: dict[str, Any] = {"model": model}
    fields |= {"messages": [{"role": "user", "content": prompt}]} if api == CHAT else {"prompt": prompt}
    fields["max_completion_tokens" if MAX_COMPLETION in options else "max_tokens"] = asked.n_gen
    fields |= {} if asked.temperature is None else {"temperature": asked.temperature}
    fields |= {} if asked.seed is None else {"seed": asked.seed}
    if IGNORE_EOS in options and asked.ignore_eos is not None:
        fields["ignore_eos"] = asked.ignore_eos
    if NO_CACHE in options:
        fields["cache_prompt"] = False
    if is_streamed:
        fields["stream"] = True
        usage = {"include_usage": INCLUDE_USAGE in options, "continuous_usage_stats": CONTINUOUS_USAGE in options}
        fields |= (
            {"stream_options": {name: True for name, is_on in usage.items() if is_on}} if any(usage.values()) else {}
        )
        fields |= {name: True for name in (TOKEN_IDS, TIMINGS) if name in options}
    return fields


def ask_for(api: str, model: str, prompt: str, asked: Asked, options: tuple[str, ...], nonce: str | None = None) -> Ask:
    """A streamed request of a plan. `nonce`: as in Ask."""
    return Ask(asked=asked, body=json.dumps(body(api, model, prompt, asked, options)), nonce=nonce)


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
