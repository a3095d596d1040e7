"""Servers that want memory or time: every exchange ends by its deadline and within its limits."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator

import psutil
import pytest

from lab.core.record import FAILED, OK
from lab.core.request import CHAT, Asked
from lab.remote import formats
from lab.remote.access import access
from lab.remote.client import Client
from lab.remote.formats import SendPlan
from tests.odd_server import raw_server

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
DEEP = (
    json.dumps({"choices": [{"delta": {"content": "X"}}]})
    .replace('"X"', "[" * 480 + "]" * 480)
    .encode()
)
DONE = b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
MB = 1_000_000


def often(part: bytes, pause_s: float = 0.0) -> Iterator[bytes]:
    """The part again and again; without a pause 64 kB at once."""
    for _ in itertools.count():
        yield part if pause_s else part * (65_536 // len(part))
        time.sleep(pause_s)


STREAMS: dict[str, Callable[[], Iterable[bytes]]] = {
    "comments without words": lambda: (STREAM, EVENT, *[b":\n" * MB] * 30),
    "lines of data without a colon": lambda: (STREAM, *[b"data\n" * MB] * 10),
    "fields that nobody knows": lambda: (STREAM, *[b"x: y\r" * MB] * 10),
    "pings without end": lambda: itertools.chain((STREAM, EVENT), often(b": ping\n\n")),
    "one line without end": lambda: itertools.chain((STREAM, b"data: "), often(b"x")),
    "many small values in one line": lambda: (
        STREAM,
        b'data: {"choices": [' + b"{}," * 4 * MB + b"{}]}\n\n",
    ),
    "bytes one by one": lambda: itertools.chain((STREAM,), often(b":", 0.001)),
    "a head without end": lambda: itertools.chain(
        (b"HTTP/1.1 200 OK\r\n",), often(b"X-A: b\r\n")
    ),
    "103 without end": lambda: often(b"HTTP/1.1 103 Early Hints\r\n\r\n"),
}
ANSWERS: dict[str, Callable[[], Iterable[bytes]]] = {
    "a status line that drips": lambda: often(b"H", 0.05),
    "a header that drips": lambda: itertools.chain(
        (b"HTTP/1.1 200 OK\r\nX-A: ",), often(b"b", 0.05)
    ),
    "100 without end": lambda: often(b"HTTP/1.1 100 Continue\r\n\r\n", 0.01),
    "103 without end": lambda: often(b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.01),
    "a body that drips": lambda: itertools.chain(
        (b"HTTP/1.1 200 OK\r\n\r\n",), often(b" ", 0.05)
    ),
    "empty blocks of gzip": lambda: itertools.chain(
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n",),
        often(gzip.compress(b""), 0.05),
    ),
    "a body without end": lambda: itertools.chain((b"HTTP/1.1 200 OK\r\n\r\n",), often(b" ")),
    "nothing": lambda: often(b"", 0.05),
}


def test_a_stream_takes_neither_the_time_nor_the_memory() -> None:
    asked = formats.ask_for(
        CHAT,
        "m",
        "a b c",
        Asked(n_prompt=None, n_gen=4),
        (),
    )
    plan = SendPlan(
        asks=(asked,),
        api=CHAT,
        timeout_s=2,
        stall_s=1,
    )
    deep = (STREAM, b"data: " + DEEP + b"\n\n", DONE)
    process = psutil.Process()
    used_before = process.memory_info().rss
    with (
        raw_server(itertools.chain((make() for make in STREAMS.values()), (deep,))) as url,
        Client(access(url)) as client,
    ):
        for name in STREAMS:
            began = time.monotonic()
            (reply,) = client.run(plan)
            assert reply.request.status == FAILED, name
            assert time.monotonic() - began < 20, (
                name
            )  # 2 s and 3 s of grace, on a busy machine
            assert process.memory_info().rss - used_before < 256 * MB, name
        (reply,) = client.run(plan)
        assert reply.request.status == OK
        assert reply.text == ""  # the client is alive


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_ends_by_its_deadline(name: str) -> None:
    with raw_server([ANSWERS[name](), ()]) as url:
        began = time.monotonic()
        with Client(access(url, timeout_s=1)) as client:
            reply = client.ask(url)
        assert reply.parsed is None
        assert reply.error
        assert time.monotonic() - began < 8, reply.error
