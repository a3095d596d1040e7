"""What a null server does: a server without a model, whose every event has a time that is known.

It answers like an OpenAI-compatible server. Each of its models behaves in its own way. A word is a token; a chat has
TEMPLATE_TOKENS more. So what a client reports can be held against what was sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

TEMPLATE_TOKENS = 5
"""Tokens that the template of a chat adds to a prompt."""

WORD = " word"
ACCEPT, FIRST, NEVER, EMPTY = "accept", "first", "never", "empty"
ASKED, ALWAYS, RUNNING = "asked", "always", "running"


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How a model of the null server answers."""

    first_ms: float = 20.0  # from the whole request to the first event with content
    prompt_token_ms: float = 0.0  # what a token of the prompt that is not cached adds to it
    gap_ms: float = 5.0  # between events with content
    bundle: int = 1  # tokens in an event
    n_held: int = 0  # tokens that the first event has more than others
    role: str = FIRST  # when the empty chunk with the role comes: accept, first (with the first content), never;
    # empty: a chunk at accept without content and without role, also of a completion
    n_reasoning: int = 0  # events with reasoning before the others
    reasoning_field: str = "reasoning_content"
    stall_after: int | None = None  # after so many events with content comes a pause
    stall_ms: float = 0.0
    usage: str = ASKED  # when counts of tokens are streamed: asked, always, never, running (in each chunk, where asked)
    gives_cached: bool = True  # whether the counts say how many tokens were cached
    has_cache: bool = False  # whether prompts are remembered, and not only where cache_prompt is false
    token_ids: bool = False
    timings: bool = False  # llama-server's
    prompt_ms: float = 1.0  # what they say
    gen_ms: float = 1.0
    whole_gen_ms: float = 1.0  # of answers that are not streamed
    slot_ms: float = 0.0  # from the whole request to the head of a streamed answer
    stops_after: int | None = None  # tokens after which it stops by itself
    obeys_ignore_eos: bool = True
    pings: bool = False  # a comment before the first event
    has_crlf: bool = False  # whether lines end as on Windows
    fails: str | None = None  # see null_server.py
    fails_every: int = 1  # which of its requests fail: 20 for every twentieth
    strict: bool = False  # refuses options that are not OpenAI's

    @property
    def end(self) -> str:
        """What ends an event."""
        return "\r\n\r\n" if self.has_crlf else "\n\n"


@dataclass(frozen=True, kw_only=True)
class NullSettings:
    """A null server: its models by name, and what else it has."""

    models: dict[str, Behaviour] = field(default_factory=lambda: {"null": Behaviour()})
    has_tokenize: bool = True
    template_ms: float = 0.0  # that /apply-template takes
    tokenize_ms: float = 0.0  # that /tokenize takes for a text
    n_slots: int | None = 16  # None: no /props
    n_ctx: int = 100_000
    api_key: str | None = field(default=None, repr=False)
    has_chat: bool = True


@dataclass(frozen=True)
class Chunk:
    """Bytes to send, when (ms after the whole request), and how many tokens are in them."""

    at_ms: float
    data: bytes
    n_tokens: int


OPENAI = frozenset(
    (
        *("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens"),
        *("temperature", "seed", "n", "stop", "user", "logprobs", "top_p"),
    )
)
"""Options that a strict model takes."""


def n_words(body: dict[str, Any]) -> int:
    """Tokens of the prompt of a request."""
    return len(prompt_of(body).split()) + (TEMPLATE_TOKENS if "messages" in body else 0)


def prompt_of(body: dict[str, Any]) -> str:
    if "messages" in body:
        return " ".join(_text(message.get("content")) for message in body["messages"])
    return str(body.get("prompt", ""))


def _text(content: Any) -> str:
    """The text of a message, which may come in parts."""
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def n_answer(body: dict[str, Any], how: Behaviour) -> tuple[int, str]:
    """Tokens of the answer, and the reason of its end."""
    n_asked = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
    ignores_eos = how.obeys_ignore_eos and body.get("ignore_eos")
    if how.stops_after is not None and not ignores_eos and how.stops_after < n_asked:
        return how.stops_after, "stop"
    return n_asked, "length"


def chunks(body: dict[str, Any], how: Behaviour, n_cached: int) -> Iterator[Chunk]:
    """The events of a streamed answer."""
    is_chat = "messages" in body
    n_all, reason = n_answer(body, how)
    options = body.get("stream_options") or {}
    wants_usage = how.usage == ALWAYS or (how.usage in (ASKED, RUNNING) and bool(options.get("include_usage")))
    has_running_usage = how.usage == RUNNING and bool(options.get("continuous_usage_stats"))
    n_prompt = n_words(body)
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    first_ms = how.first_ms + how.prompt_token_ms * (n_prompt - n_cached)

    def event(content: dict[str, Any], finish: str | None, n: int, ids: int = 0) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if is_chat:
            choice["delta"] = content
        else:
            choice["text"] = "".join(map(str, content.values()))
        if how.token_ids and body.get("return_token_ids"):
            choice["token_ids"] = list(range(ids))
        chunk: dict[str, Any] = {"object": kind, "model": body.get("model"), "choices": [choice]}
        if has_running_usage:
            chunk["usage"] = usage(n_prompt, n, None)
        if how.timings and body.get("timings_per_token"):
            chunk["timings"] = timings(n_prompt, n, n_cached, how.prompt_ms, how.gen_ms)
        return written(chunk, how)

    if how.pings:
        yield Chunk(0.0, f": ping{how.end}".encode(), 0)
    if how.role == EMPTY:
        yield Chunk(0.0, event({"content": ""}, None, 0), 0)
    elif is_chat and how.role != NEVER:
        yield Chunk(0.0 if how.role == ACCEPT else first_ms, event({"role": "assistant", "content": ""}, None, 0), 0)
    n, at_ms, n_events = 0, first_ms, 0
    while n < n_all:
        n_more = min(how.bundle + (how.n_held if n == 0 else 0), n_all - n)
        n += n_more
        name = how.reasoning_field if n_events < how.n_reasoning and is_chat else "content"
        yield Chunk(at_ms, event({name: WORD * n_more}, None, n, n_more), n_more)
        n_events += 1
        at_ms += how.gap_ms + (how.stall_ms if n_events == how.stall_after else 0.0)
    at_ms -= how.gap_ms if n_events else 0.0
    yield Chunk(at_ms, event({}, reason, n), 0)
    if wants_usage:
        last: dict[str, Any] = {"object": kind, "choices": []}
        last["usage"] = usage(n_prompt, n_all, n_cached if how.gives_cached else None)
        if how.timings:
            last["timings"] = timings(n_prompt, n_all, n_cached, how.prompt_ms, how.gen_ms)
        yield Chunk(at_ms, written(last, how), 0)
    yield Chunk(at_ms, f"data: [DONE]{how.end}".encode(), 0)


def written(chunk: dict[str, Any], how: Behaviour) -> bytes:
    """An event as bytes."""
    return f"data: {json.dumps(chunk)}{how.end}".encode()


def usage(n_prompt: int, n: int, n_cached: int | None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
    if n_cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": n_cached}
    return counts


def timings(n_prompt: int, n: int, n_cached: int, prompt_ms: float, gen_ms: float) -> dict[str, Any]:
    return {
        "cache_n": n_cached,
        "prompt_n": n_prompt - n_cached,
        "prompt_ms": prompt_ms,
        "predicted_n": n,
        "predicted_ms": gen_ms,
    }


def whole(body: dict[str, Any], how: Behaviour, n_cached: int) -> dict[str, Any]:
    """The same answer, not streamed."""
    n_all, reason = n_answer(body, how)
    content = WORD * n_all
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    choice |= {"message": {"role": "assistant", "content": content}} if "messages" in body else {"text": content}
    kind = "chat.completion" if "messages" in body else "text_completion"
    counts = usage(n_words(body), n_all, n_cached if how.gives_cached else None)
    answer: dict[str, Any] = {"object": kind, "choices": [choice], "usage": counts}
    if how.timings:
        answer["timings"] = timings(n_words(body), n_all, n_cached, how.prompt_ms, how.whole_gen_ms)
    return answer
