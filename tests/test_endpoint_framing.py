"""HTTP as servers frame it: the events and their stamps are the same in each framing."""

import gzip
import itertools
import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from lab.core.record import OK
from lab.core.request import (
    CHAT,
    LOST,
    NO_STREAM,
    STALLED,
    TOO_EARLY,
    WRONG_JSON,
    Asked,
    Request,
)
from lab.core.request_times import figures
from lab.remote.access import access
from lab.remote.client import Client
from lab.remote.exchange import Arrivals, Exchange, Received, Route
from lab.remote.formats import Ask, SendPlan
from tests.support.odd_server import paced, raw_server

PAUSE_S = 0.015
EVENTS = [
    b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "b"}}]}\n\n',
    b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n',
    b"data: [DONE]\n\n",
]
BOMB = gzip.compress(bytes(64_000_000))
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def scripted(pieces: list[bytes]) -> AbstractContextManager[str]:
    """A server that answers each connection's request with these pieces, with a pause before
    each."""
    return raw_server(paced(pieces, PAUSE_S) for _ in itertools.count())


def answer(pieces: list[bytes]) -> Request:
    """The one request that is answered so."""
    asked = Ask(asked=Asked(n_prompt=None, n_gen=2), body=json.dumps({"stream": True}))
    with scripted(pieces) as url, Client(access(url)) as client:
        (reply,) = client.run(SendPlan(asks=(asked,), api=CHAT, timeout_s=30))
    return reply.request


def compressed(bits: int, name: bytes) -> list[bytes]:
    """The events, each flushed by itself, though nobody asked for a compression."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, bits)
    pieces = [
        deflate.compress(event) + deflate.flush(zlib.Z_SYNC_FLUSH) for event in EVENTS[:-1]
    ]
    pieces.append(deflate.compress(EVENTS[-1]) + deflate.flush())
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Encoding: " + name + b"\r\n\r\n")
    return [head, *map(chunk, pieces), b"0\r\n\r\n"]


half = len(EVENTS[1]) // 2
FRAMINGS = {
    "a chunk for each event": [CHUNKED, *map(chunk, EVENTS), b"0\r\n\r\n"],
    "the head with the first event": [
        CHUNKED + chunk(EVENTS[0]),
        *map(chunk, EVENTS[1:]),
        b"0\r\n\r\n",
    ],
    "an event in two chunks": [
        CHUNKED,
        chunk(EVENTS[0]),
        chunk(EVENTS[1][:half]),
        chunk(EVENTS[1][half:]),
        *map(chunk, EVENTS[2:]),
        b"0\r\n\r\n",
    ],
    "a chunk in two packets": [
        CHUNKED,
        chunk(EVENTS[0]),
        chunk(EVENTS[1])[:half],
        chunk(EVENTS[1])[half:],
        *map(chunk, EVENTS[2:]),
        b"0\r\n\r\n",
    ],
    "the end in two packets": [CHUNKED, *map(chunk, EVENTS), b"0\r\n", b"\r\n"],
    "fields after the end": [CHUNKED, *map(chunk, EVENTS), b"0\r\nX-Time: 1\r\n\r\n"],
    "other letters": [
        CHUNKED.replace(b"Encoding: chunked", b"encoding: Chunked"),
        *map(chunk, EVENTS),
        b"0\r\n\r\n",
    ],
    "a head in pieces": [CHUNKED[:20], CHUNKED[20:], *map(chunk, EVENTS), b"0\r\n\r\n"],
    "hints before the head": [
        b"HTTP/1.1 103 Early Hints\r\n\r\n",
        CHUNKED,
        *map(chunk, EVENTS),
        b"0\r\n\r\n",
    ],
    "a length": [PLAIN + b"Content-Length: %d\r\n\r\n" % len(b"".join(EVENTS)), *EVENTS],
    "JSON by its type": [
        CHUNKED.replace(b"text/event-stream", b"application/json"),
        *map(chunk, EVENTS),
        b"0\r\n\r\n",
    ],
    "gzip": compressed(zlib.MAX_WBITS | 16, b"gzip"),
    "zlib": compressed(zlib.MAX_WBITS, b"deflate"),
    "deflate": compressed(-zlib.MAX_WBITS, b"Deflate"),
    "until it hangs up": [PLAIN.replace(b"1.1", b"1.0") + b"\r\n", *EVENTS],
}


@pytest.mark.parametrize(
    ("encoding", "data"), [(b"gzip", b"no gzip"), (b"zstd", EVENTS[0]), (b"gzip", BOMB)]
)
def test_what_cannot_be_decompressed_says_so(encoding: bytes, data: bytes) -> None:
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Encoding: " + encoding + b"\r\n\r\n")
    request = answer([head, chunk(data), b"0\r\n\r\n"])
    assert request.failure == NO_STREAM
    assert "compressed" in (request.error or "") or "no valid gzip" in (request.error or "")


@pytest.mark.parametrize("last", [b"data: [DONE]\n\n", b"data:[DONE]\n", b'data: "[DONE]"'])
def test_done_ends_an_answer_whose_connection_stays_open(last: bytes) -> None:
    is_read = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield CHUNKED
        yield from map(chunk, [*EVENTS[:-1], last])
        assert is_read.wait(60)

    asked = Ask(asked=Asked(n_prompt=None, n_gen=2), body=json.dumps({"stream": True}))
    with raw_server([pieces()]) as url, Client(access(url)) as client:
        (reply,) = client.run(SendPlan(asks=(asked,), api=CHAT, timeout_s=30))
        is_read.set()
    assert reply.request.status == OK
    assert reply.request.events.kind == ("text", "text", "other", "done")


def test_done_within_a_text_ends_nothing() -> None:
    text = json.dumps({"choices": [{"delta": {"content": "data: [DONE]"}}]})
    events = [f"data: {text}\n\n".encode(), *EVENTS[1:]]
    request = answer([CHUNKED, chunk(events[0]), b"", *map(chunk, events[1:]), b"0\r\n\r\n"])
    assert request.events.kind == ("text", "text", "other", "done")


def silent(before: bytes, pause_s: float) -> Request:
    """The answer of a server that sends this, nothing for a while, and then the rest; a client
    looks for a stall every LOOK_S (0.5 s)."""

    def pieces() -> Iterator[bytes]:
        yield CHUNKED + chunk(before)
        time.sleep(pause_s)
        yield b"".join(map(chunk, EVENTS)) + b"0\r\n\r\n"

    asked = Ask(asked=Asked(n_prompt=None, n_gen=2), body=json.dumps({"stream": True}))
    with raw_server([pieces()]) as url, Client(access(url)) as client:
        plan = SendPlan(asks=(asked,), api=CHAT, timeout_s=30, stall_s=0.2)
        (reply,) = client.run(plan)
    return reply.request


ROLE_EVENT = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'


@pytest.mark.parametrize("before", [ROLE_EVENT, b": ping\n\n", b'data: {"choices": []}\n\n'])
def test_a_long_prefill_is_no_stall(before: bytes) -> None:
    assert silent(before, 1.0).status == OK


def test_silence_after_the_first_token_is_a_stall() -> None:
    assert silent(EVENTS[0], 5.0).failure == STALLED


def test_the_longest_silence_follows_the_time_limit() -> None:
    for timeout_s, longest_s in ((10.0, 60.0), (600.0, 60.0), (3600.0, 360.0)):
        plan = SendPlan(asks=(), api=CHAT, timeout_s=timeout_s)
        assert plan.longest_stall_s == longest_s


@pytest.mark.parametrize("name", FRAMINGS)
def test_events_and_stamps_are_the_same(name: str) -> None:
    request = answer(FRAMINGS[name])
    assert request.status == OK
    assert request.error is None
    assert request.events.kind == ("text", "text", "other", "done")
    assert request.events.n_bytes == tuple(map(len, EVENTS))
    assert (
        request.events.arrive_ns[-1] > request.events.arrive_ns[0]
    )  # though all were read at the end
    assert (figures(request).ttft_ns or 0) >= PAUSE_S * 1e9
    assert request.headers_ns is not None
    assert request.headers_ns <= request.events.arrive_ns[0]
    assert request.ended_ns is not None
    assert request.ended_ns >= request.events.arrive_ns[-1]


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [b"this is no HTTP\r\n\r\n"],
        [CHUNKED],
        [CHUNKED, b"zz\r\n"],
        [CHUNKED, chunk(EVENTS[0])[:-7]],
    ],
    ids=["nothing", "no HTTP", "a head", "no chunk", "half a chunk"],
)
def test_a_connection_that_ends_too_early_is_lost(pieces: list[bytes]) -> None:
    request = answer(pieces)
    assert request.status == "failed"
    assert request.failure == LOST
    assert request.error


def test_an_end_without_the_last_chunk_is_no_loss_after_done() -> None:
    request = answer([CHUNKED, *map(chunk, EVENTS)])
    assert request.status == OK
    assert request.failure is None


def test_a_stream_may_have_another_content_type() -> None:
    head = CHUNKED.replace(b"text/event-stream", b"application/octet-stream")
    assert answer([head, *map(chunk, EVENTS), b"0\r\n\r\n"]).status == OK
    page = answer([head, chunk(b"data: no stream\n\n"), b"0\r\n\r\n"])
    assert page.failure == WRONG_JSON


def test_a_server_that_hangs_up_after_each_answer_gets_each_request_once() -> None:
    """llama-server does, and does not say so: the next request may be on its way already."""
    asked = Ask(asked=Asked(n_prompt=None, n_gen=2), body=json.dumps({"stream": True}))
    with scripted(FRAMINGS["a chunk for each event"]) as url, Client(access(url)) as client:
        replies = list(
            client.run(
                SendPlan(
                    asks=(asked,) * 6,
                    api=CHAT,
                    n_at_once=2,
                    timeout_s=30,
                )
            )
        )
    assert [reply.request.status for reply in replies] == [OK] * 6


def test_an_answer_before_the_request_is_a_failure_with_a_reason() -> None:
    asked = Ask(asked=Asked(n_prompt=None, n_gen=2), body=json.dumps({"stream": True}))
    line = Route(
        "h",
        80,
        "/",
        None,
        [],
        Arrivals(),
        timeout_s=1,
        stall_s=1,
    )
    exchange = Exchange(line, asked)
    exchange.data_received(CHUNKED)
    assert exchange.problem is not None
    assert exchange.problem.failure == TOO_EARLY
    assert exchange.problem.error == "bytes arrived before the request was sent"
    assert exchange.received.first_ns is None


def test_a_done_that_arrives_in_two_pieces_may_be_the_end() -> None:
    received = Received()
    received.add(1, CHUNKED + chunk(b"data: 1\n\n"))
    received.add(2, b"data: [DO")
    assert not received.is_to_be_parsed_now()
    received.add(3, b"NE]\n\n\r\n")
    assert received.is_to_be_parsed_now()
