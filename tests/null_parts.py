"""The parts of the null server (null_server.py): its process, HTTP, and events that are sent at known times."""

from __future__ import annotations

import asyncio
import os
import selectors
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from lab.errors import LabError
from lab.process.served import end_with_parent
from lab.process.spawning import start, wait_for_end

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


@dataclass(frozen=True)
class NullServer:
    """A running null server."""

    url: str
    pid: int


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


Respond = Callable[[asyncio.StreamWriter, Question], Awaitable[bool]]
"""Writes the answer to a request. Returns False if the connection must be closed."""


@contextmanager
def null_server(settings: str, child: str) -> Iterator[NullServer]:
    """A null server on this machine until the end of the block. `settings`: one line for its process."""
    process = start(child, stderr=None)
    stdin: IO[bytes] = process.stdin  # type: ignore[assignment]
    stdout: IO[bytes] = process.stdout  # type: ignore[assignment]
    try:
        stdin.write(settings.encode() + b"\n")
        stdin.flush()
        pid, _, port = stdout.readline().decode().strip().partition(" ")
        if not port:
            raise LabError("The null server did not start.", "Try again. A firewall may block 127.0.0.1.")
        yield NullServer(f"http://127.0.0.1:{port}/v1", int(pid))
    finally:
        process.kill()
        wait_for_end(process)


def serve_with(answer: Respond) -> None:
    """Print the process id and the port, and answer until stdin closes."""
    end_with_parent()
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())  # its timeouts are exact to about 50 us
    loop.run_until_complete(_serve(answer))


async def _serve(answer: Respond) -> None:
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


def write_whole(writer: asyncio.StreamWriter, status: int, kind: str, body: bytes, reason: str = "OK") -> bool:
    """An answer that is not streamed."""
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return True
