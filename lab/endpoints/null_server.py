"""A server without a model in a process of its own, whose every event is sent at a known time.

    with null_server(NullSettings()) as server:
        Client(access(server.url))

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
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lab.core.lines import from_json, to_json
from lab.endpoints import null_behaviour
from lab.endpoints.null_behaviour import OPENAI, Behaviour, Chunk, NullSettings
from lab.errors import LabError

_CHILD = "import sys; sys.path.append(sys.argv[1]); from lab.endpoints.null_server import serve; serve()"
_STATUSES = {"429": "Too Many Requests", "500": "Internal Server Error", "400": "Bad Request", "401": "Unauthorized"}
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS_BYTES = 12_000_000


@dataclass(frozen=True)
class NullServer:
    """A null server that runs."""

    url: str
    pid: int


@contextmanager
def null_server(settings: NullSettings) -> Iterator[NullServer]:
    """A null server on a port of this machine, which ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _CHILD, str(Path(__file__).parents[2])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    stdin: IO[bytes] = process.stdin  # type: ignore[assignment]
    stdout: IO[bytes] = process.stdout  # type: ignore[assignment]
    try:
        stdin.write(to_json(settings).encode() + b"\n")
        stdin.flush()
        pid, _, port = stdout.readline().decode().strip().partition(" ")
        if not port:
            raise LabError("The null server did not start.", "Run it again; a firewall may forbid 127.0.0.1.")
        yield NullServer(f"http://127.0.0.1:{port}/v1", int(pid))
    finally:
        process.kill()
        process.wait()
        stdin.close()
        stdout.close()


def serve() -> None:
    """The child's end: read the settings, print the port, answer until stdin ends."""
    settings = from_json(NullSettings, sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())  # its times are exact to some 50 us
    loop.run_until_complete(_serve(settings))


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


async def _serve(settings: NullSettings) -> None:
    state = _State(settings)
    server = await asyncio.start_server(state.connected, "127.0.0.1", 0)
    print(os.getpid(), server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class _State:
    """What the server knows: its settings, prompts that it has seen, and when it sent what."""

    def __init__(self, settings: NullSettings) -> None:
        self.settings = settings
        self.prompts: list[list[str]] = []
        self.streams: list[dict[str, Any]] = []
        self.n_requests = 0
        self.n_of_model: collections.Counter[str] = collections.Counter()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while await self._answer(reader, writer):
                pass
        writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request. False where the connection has to be closed."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        text = await reader.readexactly(int(headers.get("content-length", 0)))
        now = time.perf_counter_ns()
        method, path, _ = first.split(" ")
        key = self.settings.api_key
        if key is not None and headers.get("authorization") != f"Bearer {key}":
            return _json(writer, 401, {"error": {"message": f"wrong key: {headers.get('authorization')}"}})
        if method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            if path == "/v1/chat/completions" and not self.settings.has_chat:
                return _json(writer, 404, {"error": {"message": "no chat here"}})
            self.n_requests += 1
            return await self._generate(writer, json.loads(text), headers, now)
        question = json.loads(text) if text else {}
        delays_ms = {"/apply-template": self.settings.template_ms}
        delays_ms |= {"/tokenize": self.settings.tokenize_ms if "content" in question else 0.0}
        if path in delays_ms:
            await asyncio.sleep(delays_ms[path] / 1e3)
        return self._small(writer, path, question)

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
            marks = "<t> " * null_behaviour.TEMPLATE_TOKENS
            return _json(writer, 200, {"prompt": marks + null_behaviour.prompt_of(body)})
        if path == "/tokenize" and settings.has_tokenize:
            return _json(writer, 200, {"tokens": list(range(len(str(body.get("content", "")).split())))})
        if path == "/null/sent":
            return _json(writer, 200, {"streams": self.streams, "n_requests": self.n_requests})
        if path == "/health":
            return _json(writer, 200, {"status": "ok"})
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
            return _json(writer, 200, null_behaviour.whole(body, how, n_cached))
        if how.fails == "html":
            return _answer(writer, 200, "text/html", b"<html>a page</html>")
        if how.fails == "error":
            return _json(writer, 200, {"error": {"message": "the model is not loaded"}})
        if how.fails == "never":
            await asyncio.sleep(3600)
        log = _log(body, now, n_cached)
        self.streams.append(log)
        await asyncio.sleep(how.slot_ms / 1e3)
        writer.write(_STREAM)
        return await _stream(writer, list(null_behaviour.chunks(body, how, n_cached)), how, now, log)

    def _cached(self, body: dict[str, Any], how: Behaviour) -> int:
        """Tokens at the beginning of the prompt that an earlier one had too."""
        if not how.has_cache or body.get("cache_prompt") is False:
            return 0
        words = null_behaviour.prompt_of(body).split()
        common = max((_n_common(words, old) for old in self.prompts), default=0)
        self.prompts.append(words)
        return common


def _log(body: dict[str, Any], now: int, n_cached: int) -> dict[str, Any]:
    """What is kept of a stream; when its events were sent is added later."""
    prompt = {"n_prompt": null_behaviour.n_words(body), "n_cached": n_cached}
    asked = {"model": body.get("model"), "seed": body.get("seed"), "is_chat": "messages" in body}
    return {"received_ns": now, **asked, **prompt, "due_ns": [], "sent_ns": [], "n_tokens": []}


def _n_common(one: list[str], other: list[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


async def _stream(
    writer: asyncio.StreamWriter, chunks: list[Chunk], how: Behaviour, now: int, log: dict[str, Any]
) -> bool:
    """Send each chunk at its time. False where the connection has to be closed."""
    for number, chunk in enumerate(chunks):
        due_ns = now + round(chunk.at_ms * 1e6)
        while (left_ns := due_ns - time.perf_counter_ns()) > 0:
            await asyncio.sleep(left_ns / 1e9)
        if number == 2 and how.fails and (over := await _misbehave(writer, how.fails)) is not None:
            return over
        data = b"%x\r\n%b\r\n" % (len(chunk.data), chunk.data)
        if chunk.n_tokens:
            log["due_ns"].append(due_ns)
            log["n_tokens"].append(chunk.n_tokens)
            log["sent_ns"].append(time.perf_counter_ns())
        writer.write(data)
    writer.write(b"0\r\n\r\n")
    return True


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
    reason = _STATUSES.get(str(status), "OK")
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return True
