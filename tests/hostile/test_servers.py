"""Servers that want memory or time: every exchange ends by its deadline and within its limits."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator

import psutil
import pytest

from lab.core.lines import parse_line, to_json
from lab.core.record import FAILED, OK
from lab.core.request import CHAT, Asked, RequestRecord, ServerSettings
from lab.remote import exchange, formats
from lab.remote.access import access, name_or_none
from lab.remote.client import Client
from lab.remote.formats import SendPlan
from lab.remote.streams import StreamReader
from tests.support.odd_server import raw_server
from tests.support.requests import make_request, make_request_record

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


KEY = "sk-Very/secret+0123456789-abcdef"
DATA = KEY.encode()
ECHOES = {
    "base64": base64.b64encode(DATA),
    "base64 of a header": base64.b64encode(b"Authorization: Bearer " + DATA),
    "base64 at another offset": base64.b64encode(b"x " + DATA + b" y"),
    "base64 for addresses": base64.urlsafe_b64encode(DATA),
    "hex": DATA.hex().encode(),
    "large hex": DATA.hex().upper().encode(),
    "hex with colons": DATA.hex(":").encode(),
    "backwards": DATA[::-1],
    "spaced": " ".join(KEY).encode(),
    "with dashes": "-".join(KEY).encode(),
    "numbers": " ".join(map(str, DATA)).encode(),
    "HTML": "".join(f"&#{number};" for number in DATA).encode(),
    "a part": DATA[5:17],
    "small": DATA.lower(),
}


@pytest.mark.parametrize("echo", ECHOES)
def test_a_name_with_a_secret_in_any_code_is_none(
    echo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    server = access("http://127.0.0.1:9/v1", "THE_KEY")
    text = ECHOES[echo].decode()
    assert name_or_none(text, server) is None
    assert name_or_none(f"model-7b {text[:60]}", server) is None
    for name in ("llama-3.2-1b-instruct", "b4567-0123abcd", "Q4_K - Medium", "0.11.2"):
        assert name_or_none(name, server) == name


def test_a_finish_reason_is_a_word_that_servers_have() -> None:
    reasons = {"stop": "stop", "sk_very_secret": "other", "tool_calls": "tool_calls"}
    for reason, expected in reasons.items():
        chunk = json.dumps({"choices": [{"delta": {"content": "a"}, "finish_reason": reason}]})
        reader = StreamReader([(1, f"data: {chunk}\n\n".encode())], 0)
        list(reader.read())
        assert reader.answer().finish_reason == expected


@pytest.mark.parametrize(
    ("usage", "is_possible"),
    [
        ({"prompt_tokens": 9_000_000, "completion_tokens": 1}, True),
        ({"prompt_tokens": 20_000_000, "completion_tokens": 1}, False),
        ({"prompt_tokens": 2**63, "completion_tokens": 1}, False),
        ({"prompt_tokens": 9, "completion_tokens": 1, "total_time": 2e8}, True),
    ],
)
def test_what_is_kept_of_a_server_can_be_read_again(
    usage: dict[str, float], is_possible: bool
) -> None:
    chunk = json.dumps({"choices": [{"finish_reason": "stop"}], "usage": usage})
    reader = StreamReader([(1, f"data: {chunk}\n\n".encode())], 0)
    list(reader.read())
    answer = reader.answer()
    assert (answer.failure is None) == is_possible
    request = make_request(usage=answer.usage)
    line = to_json(make_request_record(request)).encode() + b"\n"
    record = parse_line(line)
    assert isinstance(record, RequestRecord)
    assert record.request.usage == answer.usage


def test_a_server_with_a_context_of_ten_million_tokens_is_read_again() -> None:
    settings = ServerSettings(n_ctx=10_485_760)
    record = make_request_record(make_request())
    endpoint = dataclasses.replace(record.endpoint, settings=settings)
    record = dataclasses.replace(record, endpoint=endpoint)
    assert parse_line(to_json(record).encode() + b"\n") == record


def test_a_stream_takes_neither_the_time_nor_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "GRACE_S", 0.5)
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
        timeout_s=1,
        stall_s=0.5,
    )
    deep = (STREAM, b"data: " + DEEP + b"\n\n", DONE)
    process = psutil.Process()
    used_before = process.memory_info().rss
    with (
        raw_server(itertools.chain((make() for make in STREAMS.values()), (deep,))) as url,
        Client(access(url)) as client,
    ):
        for name in STREAMS:
            (reply,) = client.run(plan)
            assert reply.request.status == FAILED, name
            assert process.memory_info().rss - used_before < 256 * MB, name
        (reply,) = client.run(dataclasses.replace(plan, timeout_s=30))
        assert reply.request.status == OK
        assert reply.text == ""  # the client is alive


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_ends_by_its_deadline(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "GRACE_S", 0.5)
    with raw_server([ANSWERS[name](), ()]) as url:
        with Client(access(url, timeout_s=0.3)) as client:
            reply = client.ask(url)
        assert reply.parsed is None
        assert reply.error
