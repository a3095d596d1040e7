"""A null server of many behaviours: a server without a model, whose every event is sent at a known
time.

    with null_server(NullSettings()) as server:
        Client(access(server.url))

It answers like an OpenAI-compatible server. Each of its models behaves in its own way. A word is a
token; a chat has TEMPLATE_TOKENS more. So what a client reports can be held against what was sent:
events are scheduled by one clock, from the moment at which the request was whole, and `sent()` says
when each was due and really sent. Models may also misbehave:

429, 500, 400 (statuses), html (a page), error (an error inside a 200), late error (after some
events), wrong JSON, half a line, cut off (no end), lost (the connection closes in the middle),
endless line, stall (nothing after the first event), never (no answer), whole (not streamed, though
asked), echo (a 400 that quotes the headers), dies (the server's process ends).
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import IO, Any

from lab.core.lines import from_json, to_json
from lab.process.spawning import end_with_parent, start, wait_for_end

TEMPLATE_TOKENS = 5
"""Tokens that the template of a chat adds to a prompt."""

WORD = " word"
ACCEPT = "accept"
FIRST = "first"
NEVER = "never"
ASKED = "asked"
ALWAYS = "always"
RUNNING = "running"

OPENAI = {
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
}
OPENAI |= {"temperature", "seed"}
"""Options that a strict model takes."""

_CHILD = "from tests.support.null_server import serve; serve()"
_STATUSES = {
    "429": "Too Many Requests",
    "500": "Internal Server Error",
    "400": "Bad Request",
    "401": "Unauthorized",
}
_INSTEAD = {
    "whole": {
        "choices": [
            {
                "message": {"content": WORD},
                "finish_reason": "length",
            }
        ]
    },
}
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_ENDS = {
    "late error": b'data: {"error": {"message": "out of memory"}}\n\n',
    "wrong JSON": b'data: {"choices": [\n\ndata: [DONE]\n\n',
    "half a line": b'data: {"choices": [{"del',
    "cut off": b": nothing more\n\n",
}


@dataclass(frozen=True)
class NullServer:
    """A running null server."""

    url: str
    pid: int

    def sent(self) -> dict[str, Any]:
        """`n_requests` for tokens; of each of the `streams` its seed, and of its events `due_ns`
        and `sent_ns`."""
        with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/null/sent") as answer:
            return dict(json.load(answer))


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How a model of the null server answers."""

    first_ms: float = 20.0  # from the whole request to the first event with content
    gap_ms: float = 5.0  # between events with content
    bundle: int = 1  # tokens in an event
    n_held: int = 0  # tokens that the first event has more than others
    role: str = FIRST
    """When the empty chunk with the role comes: accept, first (with the first content), never."""
    n_reasoning: int = 0  # events with reasoning before the others
    usage: str = ASKED
    """When counts of tokens are streamed: asked, always, never, running (in each chunk)."""
    gives_cached: bool = True  # whether the counts say how many tokens were cached
    has_cache: bool = False  # whether prompts are remembered, but where cache_prompt is false
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


Chunk = tuple[float, bytes, int]
"""When to send (ms after the request), bytes, and their number of tokens."""


def prompt_of(body: dict[str, Any]) -> str:
    if "messages" in body:
        return " ".join(str(message.get("content")) for message in body["messages"])
    return str(body.get("prompt", ""))


class _Stream:
    """The events of a streamed answer."""

    def __init__(
        self,
        body: dict[str, Any],
        how: Behaviour,
        n_cached: int,
    ) -> None:
        self.how = how
        self.n_cached = n_cached
        self.is_chat = "messages" in body
        self.n_prompt = len(prompt_of(body).split())
        if self.is_chat:
            self.n_prompt += TEMPLATE_TOKENS
        self.n_all = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        self.reason = "length"
        goes_on = how.obeys_ignore_eos and body.get("ignore_eos")
        if how.stops_after is not None and how.stops_after < self.n_all and not goes_on:
            self.n_all = how.stops_after
            self.reason = "stop"
        options = body.get("stream_options") or {}
        is_asked = bool(options.get("include_usage"))
        self.has_usage = how.usage == ALWAYS or (how.usage in (ASKED, RUNNING) and is_asked)
        is_running = bool(options.get("continuous_usage_stats"))
        self.has_running_usage = how.usage == RUNNING and is_running
        self.has_running_timings = how.timings and bool(body.get("timings_per_token"))

    def chunks(self) -> Iterator[Chunk]:
        how = self.how
        if self.is_chat and how.role != NEVER:
            at_ms = 0.0 if how.role == ACCEPT else how.first_ms
            yield at_ms, self._event({"role": "assistant", "content": ""}, None, 0), 0
        at_ms = how.first_ms
        n = 0
        for index in range(self.n_all):
            if n == self.n_all:
                break
            n_more = self._n_tokens(index, n)
            n += n_more
            at_ms = how.first_ms + index * how.gap_ms
            is_reasoning = index < how.n_reasoning and self.is_chat
            name = "reasoning_content" if is_reasoning else "content"
            yield at_ms, self._event({name: WORD * n_more}, None, n), n_more
        yield at_ms, self._event({}, self.reason, n), 0
        if self.has_usage:
            yield at_ms, self._counts(n), 0
        yield at_ms, b"data: [DONE]\n\n", 0

    def _n_tokens(
        self,
        index: int,
        n: int,
    ) -> int:
        """Tokens of the event with this index, after n tokens."""
        n_more = self.how.bundle
        if index == 0:
            n_more += self.how.n_held
        return min(n_more, self.n_all - n)

    def _event(
        self,
        content: dict[str, Any],
        finish: str | None,
        n: int,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if self.is_chat:
            choice["delta"] = content
        else:
            choice["text"] = "".join(map(str, content.values()))
        more: dict[str, Any] = {}
        if self.has_running_usage:
            more["usage"] = self._usage(n)
        if self.has_running_timings:
            more["timings"] = self._timings(n)
        return _sse({"choices": [choice], **more})

    def _counts(self, n: int) -> bytes:
        """The event with the counts of the whole answer."""
        usage = self._usage(n)
        if self.how.gives_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": self.n_cached}
        more = {"timings": self._timings(n)} if self.how.timings else {}
        return _sse(
            {
                "choices": [],
                "usage": usage,
                **more,
            }
        )

    def _usage(self, n: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": n,
            "total_tokens": self.n_prompt + n,
        }

    def _timings(self, n: int) -> dict[str, Any]:
        return {
            "cache_n": self.n_cached,
            "prompt_n": self.n_prompt - self.n_cached,
            "predicted_n": n,
            "prompt_ms": 1.0,
            "predicted_ms": 1.0,
        }


def _sse(fields: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


@contextmanager
def null_server(settings: NullSettings) -> Iterator[NullServer]:
    """A null server on this machine until the end of the block."""
    process = start(_CHILD, stderr=None)
    stdin: IO[bytes] = process.stdin  # type: ignore[assignment]
    stdout: IO[bytes] = process.stdout  # type: ignore[assignment]
    try:
        stdin.write(to_json(settings).encode() + b"\n")
        stdin.flush()
        pid, port = stdout.readline().decode().split()
        yield NullServer(f"http://127.0.0.1:{port}/v1", int(pid))
    finally:
        process.kill()
        wait_for_end(process)


def serve() -> None:
    """The child's end: read the settings, print the process id and the port, answer until stdin
    closes."""
    running = _Running(from_json(NullSettings, sys.stdin.readline()))
    end_with_parent()
    loop = asyncio.SelectorEventLoop(
        selectors.SelectSelector()
    )  # its timeouts are exact to about 50 us
    loop.run_until_complete(running.serve())


async def until(due_ns: int) -> None:
    while time.perf_counter_ns() < due_ns:
        await asyncio.sleep(max(0, due_ns - time.perf_counter_ns()) / 1e9)


def in_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class _Running:
    """The server: its settings, prompts that it has seen, and when it sent what."""

    def __init__(self, settings: NullSettings) -> None:
        self.settings = settings
        self.prompts: list[list[str]] = []
        self.streams: list[dict[str, Any]] = []
        self.n_of_model: collections.Counter[str] = collections.Counter()

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        print(os.getpid(), server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            is_open = True
            while is_open:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.rstrip().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines)
                }
                text = await reader.readexactly(int(headers.get("content-length", 0)))
                is_open = await self._answer(
                    writer, first.split(" ")[1], headers, json.loads(text or "{}")
                )
        writer.close()

    async def _answer(
        self,
        writer: asyncio.StreamWriter,
        path: str,
        headers: dict[str, str],
        body: dict[str, Any],
    ) -> bool:
        """One request. False where the connection has to be closed."""
        now = time.perf_counter_ns()
        key = self.settings.api_key
        authorization = headers.get("authorization")
        if key is not None and authorization != f"Bearer {key}":
            return _error(writer, 401, f"wrong key: {authorization}")
        if path in ("/v1/chat/completions", "/v1/completions"):
            return await self._generate(writer, body, headers, now)
        answer = self._document(path, body)
        if answer is None:
            return _error(writer, 404, "nothing here")
        return _json(writer, 200, answer)

    def _document(
        self,
        path: str,
        body: dict[str, Any],
    ) -> dict[str, Any] | None:
        """The answer at a path where nothing is generated; None if there is none."""
        settings = self.settings
        if path == "/v1/models":
            return {"data": [{"id": name} for name in settings.models]}
        if path == "/null/sent":
            return {"streams": self.streams, "n_requests": self.n_of_model.total()}
        if path == "/props" and settings.n_slots is not None:
            return {
                "total_slots": settings.n_slots,
                "default_generation_settings": {"n_ctx": settings.n_ctx},
                "build_info": "null",
                "model_path": "/models/null.gguf",
            }
        if path == "/apply-template" and settings.has_tokenize:
            return {"prompt": "<t> " * TEMPLATE_TOKENS + prompt_of(body)}
        if path == "/tokenize" and settings.has_tokenize:
            return {"tokens": str(body.get("content", "")).split()}
        return None

    async def _generate(
        self,
        writer: asyncio.StreamWriter,
        body: dict[str, Any],
        headers: dict[str, str],
        now: int,
    ) -> bool:
        model = str(body.get("model"))
        how = self.settings.models[model]
        self.n_of_model[model] += 1
        if self.n_of_model[model] % how.fails_every:
            how = dataclasses.replace(how, fails=None)
        unknown = ", ".join(sorted(body.keys() - OPENAI))
        if how.fails == "dies":
            os._exit(1)
        if how.strict and unknown:
            return _error(writer, 400, f"Unrecognized request arguments supplied: {unknown}")
        if how.fails in (*_STATUSES, *_INSTEAD, "echo", "html", "error"):
            return _fail(writer, how.fails, headers)
        if how.fails == "never":
            await asyncio.sleep(3600)
        return await self._stream(writer, body, how, now)

    async def _stream(
        self, writer: asyncio.StreamWriter, body: dict[str, Any], how: Behaviour, now: int
    ) -> bool:
        """A streamed answer, which may go wrong after its second chunk."""
        log: dict[str, Any] = {
            "seed": body.get("seed"),
            "due_ns": [],
            "sent_ns": [],
        }
        self.streams.append(log)
        writer.write(_STREAM_HEAD)
        chunks = list(_Stream(body, how, self._cached(body, how)).chunks())
        await _send(writer, chunks[:2], now, log)
        if how.fails:
            await until(now + round(chunks[2][0] * 1e6))
            return await _misbehave(writer, how.fails)
        await _send(writer, chunks[2:], now, log)
        writer.write(b"0\r\n\r\n")
        return True

    def _cached(
        self,
        body: dict[str, Any],
        how: Behaviour,
    ) -> int:
        """Tokens at the beginning of the prompt that an earlier one had too."""
        if not how.has_cache or body.get("cache_prompt") is False:
            return 0
        prompt_words = prompt_of(body).split()
        same = [
            takewhile(lambda pair: pair[0] == pair[1], zip(prompt_words, old, strict=False))
            for old in self.prompts
        ]
        self.prompts.append(prompt_words)
        return max((len(list(pairs)) for pairs in same), default=0)


async def _send(
    writer: asyncio.StreamWriter, chunks: Sequence[Chunk], now: int, log: dict[str, Any]
) -> None:
    """Send each chunk at its time, and log when those with tokens were due and sent."""
    for at_ms, text, n_tokens in chunks:
        due_ns = now + round(at_ms * 1e6)
        await until(due_ns)
        data = in_chunk(text)
        if n_tokens:
            log["due_ns"].append(due_ns)
            log["sent_ns"].append(time.perf_counter_ns())
        writer.write(data)


async def _misbehave(writer: asyncio.StreamWriter, fails: str) -> bool:
    """In the middle of a stream."""
    if fails in _ENDS:
        writer.write(in_chunk(_ENDS[fails]) + b"0\r\n\r\n")
        return True
    if fails == "stall":
        await asyncio.sleep(3600)
    if fails == "endless line":
        for _ in range(12):
            writer.write(in_chunk(b"x" * 1_000_000))
            await writer.drain()
    return False


def _fail(
    writer: asyncio.StreamWriter,
    fails: str,
    headers: dict[str, str],
) -> bool:
    """An answer that is no stream."""
    if fails in _INSTEAD:
        return _json(writer, 200, _INSTEAD[fails])
    if fails == "html":
        return _write(writer, 200, "text/html", b"<html>a page</html>")
    if fails == "error":
        return _error(writer, 200, "the model is not loaded")
    if fails == "echo":
        return _error(writer, 400, f"cannot read {json.dumps(headers)}")
    return _error(writer, int(fails), f"as asked: {fails}")


def _error(
    writer: asyncio.StreamWriter,
    status: int,
    message: str,
) -> bool:
    return _json(writer, status, {"error": {"message": message}})


def _json(
    writer: asyncio.StreamWriter,
    status: int,
    answer: dict[str, Any],
) -> bool:
    return _write(writer, status, "application/json", json.dumps(answer).encode())


def _write(
    writer: asyncio.StreamWriter,
    status: int,
    kind: str,
    body: bytes,
) -> bool:
    """An answer that is not streamed."""
    reason = _STATUSES.get(str(status), "OK")
    head = (
        f"HTTP/1.1 {status} {reason}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    return True
