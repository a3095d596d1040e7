"""A null server of many behaviours: a server without a model, whose every event is sent at a known time.

    with null_server(NullSettings()) as server:
        Client(access(server.url))

It answers like an OpenAI-compatible server. Each of its models behaves in its own way. A word is a token; a chat has
TEMPLATE_TOKENS more. So what a client reports can be held against what was sent.

Events are scheduled by one clock, from the moment at which the request was whole. When each was really sent is kept:
GET /null/sent gives a list of `streams` in the order in which they came (`seed` and `model` of the request,
`received_ns`, tokens of the prompt, and for each event with content `due_ns`, `sent_ns`, `n_tokens`). Models may also
misbehave:

429, 500, 400, 401 (statuses), html (a page), error (an error inside a 200), late error (after some events), wrong JSON,
half a line, cut off (no end), lost (the connection closes in the middle), endless line, stall (nothing after the
first event), never (no answer), whole (not streamed, though asked), echo (a 400 that quotes the headers), dies (the
server's process ends).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import os
import selectors
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import IO, Any

from lab.core.lines import from_json, to_json
from lab.errors import LabError
from lab.process.spawning import end_with_parent, start, wait_for_end

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"

TEMPLATE_TOKENS = 5
"""Tokens that the template of a chat adds to a prompt."""

WORD = " word"
ACCEPT, FIRST, NEVER = "accept", "first", "never"
ASKED, ALWAYS, RUNNING = "asked", "always", "running"


@dataclass(frozen=True)
class NullServer:
    """A running null server."""

    url: str
    pid: int

    def sent(self) -> dict[str, Any]:
        """What it was asked, and sent."""
        with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/null/sent") as answer:
            return dict(json.load(answer))


@dataclass(frozen=True)
class Chunk:
    """Bytes to send, when (ms after the request), and their number of tokens."""

    at_ms: float
    data: bytes
    n_tokens: int


@dataclass(frozen=True)
class Question:
    """A request, and when its last byte arrived."""

    method: str
    path: str
    headers: dict[str, str]
    text: bytes
    received_ns: int


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How a model of the null server answers."""

    first_ms: float = 20.0  # from the whole request to the first event with content
    gap_ms: float = 5.0  # between events with content
    bundle: int = 1  # tokens in an event
    n_held: int = 0  # tokens that the first event has more than others
    role: str = FIRST  # when the empty chunk with the role comes: accept, first (with the first content), never
    n_reasoning: int = 0  # events with reasoning before the others
    usage: str = ASKED  # when counts of tokens are streamed: asked, always, never, running (in each chunk, where asked)
    gives_cached: bool = True  # whether the counts say how many tokens were cached
    has_cache: bool = False  # whether prompts are remembered, and not only where cache_prompt is false
    timings: bool = False  # llama-server's
    stops_after: int | None = None  # tokens after which it stops by itself
    obeys_ignore_eos: bool = True
    fails: str | None = None  # see above
    fails_every: int = 1  # which of its requests fail: 20 for every twentieth
    strict: bool = False  # refuses options that are not OpenAI's


@dataclass(frozen=True, kw_only=True)
class NullSettings:
    """A null server: its models by name, and what else it has."""

    models: dict[str, Behaviour] = field(default_factory=lambda: {"null": Behaviour()})
    has_tokenize: bool = True
    n_slots: int | None = 16  # None: no /props
    n_ctx: int = 100_000
    api_key: str | None = field(default=None, repr=False)


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
        return " ".join(str(message.get("content")) for message in body["messages"])
    return str(body.get("prompt", ""))


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

    def event(content: dict[str, Any], finish: str | None, n: int) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if is_chat:
            choice["delta"] = content
        else:
            choice["text"] = "".join(map(str, content.values()))
        chunk: dict[str, Any] = {"object": kind, "model": body.get("model"), "choices": [choice]}
        if has_running_usage:
            chunk["usage"] = usage(n_prompt, n, None)
        if how.timings and body.get("timings_per_token"):
            chunk["timings"] = timings(n_prompt, n, n_cached)
        return written(chunk)

    if is_chat and how.role != NEVER:
        at_ms = 0.0 if how.role == ACCEPT else how.first_ms
        yield Chunk(at_ms, event({"role": "assistant", "content": ""}, None, 0), 0)
    n, at_ms, n_events = 0, how.first_ms, 0
    while n < n_all:
        n_more = min(how.bundle + (how.n_held if n == 0 else 0), n_all - n)
        n += n_more
        name = "reasoning_content" if n_events < how.n_reasoning and is_chat else "content"
        yield Chunk(at_ms, event({name: WORD * n_more}, None, n), n_more)
        n_events += 1
        at_ms += how.gap_ms
    at_ms -= how.gap_ms if n_events else 0.0
    yield Chunk(at_ms, event({}, reason, n), 0)
    if wants_usage:
        last: dict[str, Any] = {"object": kind, "choices": []}
        last["usage"] = usage(n_prompt, n_all, n_cached if how.gives_cached else None)
        if how.timings:
            last["timings"] = timings(n_prompt, n_all, n_cached)
        yield Chunk(at_ms, written(last), 0)
    yield Chunk(at_ms, b"data: [DONE]\n\n", 0)


def written(chunk: dict[str, Any]) -> bytes:
    """An event as bytes."""
    return f"data: {json.dumps(chunk)}\n\n".encode()


def usage(n_prompt: int, n: int, n_cached: int | None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": n_prompt, "completion_tokens": n, "total_tokens": n_prompt + n}
    if n_cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": n_cached}
    return counts


def timings(n_prompt: int, n: int, n_cached: int) -> dict[str, Any]:
    counts = {"cache_n": n_cached, "prompt_n": n_prompt - n_cached, "predicted_n": n}
    return {**counts, "prompt_ms": 1.0, "predicted_ms": 1.0}


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
        answer["timings"] = timings(n_words(body), n_all, n_cached)
    return answer


_CHILD = "from tests.null_server import serve; serve()"
_STATUSES = {"429": "Too Many Requests", "500": "Internal Server Error", "400": "Bad Request", "401": "Unauthorized"}
ENDLESS_BYTES = 12_000_000


@contextmanager
def null_server(settings: NullSettings) -> Iterator[NullServer]:
    """A null server on this machine until the end of the block."""
    process = start(_CHILD, stderr=None)
    stdin: IO[bytes] = process.stdin  # type: ignore[assignment]
    stdout: IO[bytes] = process.stdout  # type: ignore[assignment]
    try:
        stdin.write(to_json(settings).encode() + b"\n")
        stdin.flush()
        pid, _, port = stdout.readline().decode().strip().partition(" ")
        if not port:
            raise LabError("The null server did not start.", "Try again. A firewall may block 127.0.0.1.")
        yield NullServer(f"http://127.0.0.1:{port}/v1", int(pid))
    finally:
        process.kill()
        wait_for_end(process)


def serve() -> None:
    """The child's end: read the settings, print the process id and the port, answer until stdin closes."""
    answer = _State(from_json(NullSettings, sys.stdin.readline())).answer
    end_with_parent()
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())  # its timeouts are exact to about 50 us
    loop.run_until_complete(_serve(answer))


async def _serve(answer: Callable[[asyncio.StreamWriter, Question], Awaitable[bool]]) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await answer(writer, await _question(reader)):
                pass
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(os.getpid(), server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _question(reader: asyncio.StreamReader) -> Question:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    text = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = first.split(" ")
    return Question(method, path, headers, text, time.perf_counter_ns())


async def send(writer: asyncio.StreamWriter, chunks: Sequence[Chunk], received_ns: int, log: dict[str, Any]) -> None:
    """Send each chunk at its time, and log when those with tokens were due and sent."""
    for chunk in chunks:
        due_ns = received_ns + round(chunk.at_ms * 1e6)
        await until(due_ns)
        data = b"%x\r\n%b\r\n" % (len(chunk.data), chunk.data)
        if chunk.n_tokens:
            log["due_ns"].append(due_ns)
            log["n_tokens"].append(chunk.n_tokens)
            log["sent_ns"].append(time.perf_counter_ns())
        writer.write(data)


async def until(due_ns: int) -> None:
    while (left_ns := due_ns - time.perf_counter_ns()) > 0:
        await asyncio.sleep(left_ns / 1e9)


class _State:
    """What the server knows: its settings, prompts that it has seen, and when it sent what."""

    def __init__(self, settings: NullSettings) -> None:
        self.settings = settings
        self.prompts: list[list[str]] = []
        self.streams: list[dict[str, Any]] = []
        self.n_requests = 0
        self.n_of_model: collections.Counter[str] = collections.Counter()

    async def answer(self, writer: asyncio.StreamWriter, asked: Question) -> bool:
        """One request. False where the connection has to be closed."""
        method, path, headers, text, now = asked.method, asked.path, asked.headers, asked.text, asked.received_ns
        key = self.settings.api_key
        if key is not None and headers.get("authorization") != f"Bearer {key}":
            return _json(writer, 401, {"error": {"message": f"wrong key: {headers.get('authorization')}"}})
        if method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            self.n_requests += 1
            return await self._generate(writer, json.loads(text), headers, now)
        return self._small(writer, path, json.loads(text) if text else {})

    def _small(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> bool:
        """Questions that generate nothing."""
        settings = self.settings
        if path == "/v1/models":
            return _json(writer, 200, {"data": [{"id": name} for name in settings.models]})
        if path == "/props" and settings.n_slots is not None:
            n_ctx = {"n_ctx": settings.n_ctx}
            props = {"total_slots": settings.n_slots, "default_generation_settings": n_ctx, "build_info": "null"}
            return _json(writer, 200, props | {"model_path": "/models/null.gguf"})
        if path == "/apply-template" and settings.has_tokenize:
            marks = "<t> " * TEMPLATE_TOKENS
            return _json(writer, 200, {"prompt": marks + prompt_of(body)})
        if path == "/tokenize" and settings.has_tokenize:
            return _json(writer, 200, {"tokens": list(range(len(str(body.get("content", "")).split())))})
        if path == "/null/sent":
            return _json(writer, 200, {"streams": self.streams, "n_requests": self.n_requests})
        return _json(writer, 404, {"error": {"message": "there is nothing here"}})

    async def _generate(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], headers: dict[str, str], now: int
    ) -> bool:
        how = self.settings.models.get(str(body.get("model")))
        if how is None:
            return _json(writer, 404, {"error": {"message": "there is no such model"}})
        self.n_of_model[str(body["model"])] += 1
        if self.n_of_model[str(body["model"])] % how.fails_every:
            how = dataclasses.replace(how, fails=None)
        if how.fails == "dies":
            os._exit(1)
        if how.strict and body.keys() - OPENAI:
            unknown = ", ".join(sorted(body.keys() - OPENAI))
            return _json(writer, 400, {"error": {"message": f"Unrecognized request arguments supplied: {unknown}"}})
        n_cached = self._cached(body, how)
        if how.fails == "echo":
            return _json(writer, 400, {"error": {"message": f"cannot read {json.dumps(headers)}"}})
        if how.fails in _STATUSES:
            return _json(writer, int(how.fails), {"error": {"message": f"as asked: {how.fails}"}})
        if not body.get("stream") or how.fails == "whole":
            return _json(writer, 200, whole(body, how, n_cached))
        if how.fails == "html":
            return _answer(writer, 200, "text/html", b"<html>a page</html>")
        if how.fails == "error":
            return _json(writer, 200, {"error": {"message": "the model is not loaded"}})
        if how.fails == "never":
            await asyncio.sleep(3600)
        log: dict[str, Any] = {"received_ns": now, "model": body.get("model"), "seed": body.get("seed")}
        log |= {"n_prompt": n_words(body), "n_cached": n_cached, "due_ns": [], "sent_ns": [], "n_tokens": []}
        self.streams.append(log)
        writer.write(STREAM)
        all_chunks = list(chunks(body, how, n_cached))
        await send(writer, all_chunks[:2], now, log)
        if how.fails:
            await until(now + round(all_chunks[2].at_ms * 1e6))
            if (over := await _misbehave(writer, how.fails)) is not None:
                return over
        await send(writer, all_chunks[2:], now, log)
        writer.write(STREAM_END)
        return True

    def _cached(self, body: dict[str, Any], how: Behaviour) -> int:
        """Tokens at the beginning of the prompt that an earlier one had too."""
        if not how.has_cache or body.get("cache_prompt") is False:
            return 0
        words = prompt_of(body).split()
        same = [takewhile(lambda pair: pair[0] == pair[1], zip(words, old, strict=False)) for old in self.prompts]
        self.prompts.append(words)
        return max((len(list(pairs)) for pairs in same), default=0)


async def _misbehave(writer: asyncio.StreamWriter, fails: str) -> bool | None:
    """In the middle of a stream. None where the stream goes on."""
    ends = {
        "late error": b'data: {"error": {"message": "out of memory"}}\n\n',
        "wrong JSON": b'data: {"choices": [\n\ndata: [DONE]\n\n',
        "half a line": b'data: {"choices": [{"del',
        "cut off": b": nothing more\n\n",
    }
    if fails in ends:
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(ends[fails]), ends[fails]))
        return True
    if fails == "lost":
        return False
    if fails == "stall":
        await asyncio.sleep(3600)
    if fails == "endless line":
        part = b"x" * 1_000_000
        for _ in range(ENDLESS_BYTES // len(part)):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
            await writer.drain()
        return False
    return None


def _json(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> bool:
    return _answer(writer, status, "application/json", json.dumps(answer).encode())


def _answer(writer: asyncio.StreamWriter, status: int, kind: str, body: bytes) -> bool:
    """An answer that is not streamed."""
    reason = _STATUSES.get(str(status), "OK")
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return True
