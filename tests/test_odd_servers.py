"""Servers and proxies that do wrong: what is said of each, and that nothing secret or dangerous
gets through."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import lab
from lab.core import request_times as times
from lab.core.record import FAILED
from lab.core.request import CHAT, NO, NO_STREAM, TIMEOUT, TOO_LARGE, Asked, Request
from lab.core.request_times import figures
from lab.remote import formats, session
from lab.remote.access import access
from lab.remote.client import Client
from lab.remote.formats import SendPlan
from tests.support.command import run_lab
from tests.support.odd_server import (
    CHAT_PATH,
    STREAM,
    Canned,
    as_json,
    event,
    odd_server,
    paced,
    raw_server,
    stream,
)

KEY = "sk-Very/secret+0123456789-abcdef"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to be given time to recover."""
    monkeypatch.setattr(session, "PAUSE_S", 0.0)


def chat(body: Any) -> dict[str, Canned]:
    """A server that answers chats so."""
    return {CHAT_PATH: Canned(body, kind=STREAM)}


def asked_for(asked: dict[str, Any]) -> Iterator[bytes]:
    """As many tokens as were asked for."""
    yield from paced(stream(*["w "] * asked["max_tokens"]))


def answer(answers: dict[str, Canned], n_gen: int = 64, **limits: Any) -> Request:
    """How a request to such a server went."""
    with odd_server(answers) as server, Client(access(server.url)) as client:
        ask = formats.ask_for(
            CHAT,
            "odd",
            "a b c",
            Asked(n_prompt=None, n_gen=n_gen),
            (),
        )
        (reply,) = client.run(SendPlan(asks=(ask,), api=CHAT, **limits))
    return reply.request


# Secrets


def written(secret: str) -> list[str]:
    """Ways in which a server may quote a secret."""
    return [
        secret,
        secret.upper(),
        secret.lower(),
        quote(secret, safe=""),
        json.dumps(secret)[1:-1],
    ]


@pytest.mark.parametrize("place", ["model", "props", "error"])
def test_no_secret_of_a_server_is_printed_or_kept(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    answers = chat(asked_for)
    if place == "props":
        settings = {
            "default_generation_settings": {"n_ctx": 4096},
            "total_slots": 1,
            "build_info": f"b1-{KEY}",
        }
        answers["/props"] = as_json(
            {
                **settings,
                "model_path": f"/models/{KEY}/{KEY}.gguf",
                "model_ftype": KEY.upper(),
            }
        )
    if place == "error":
        answers[CHAT_PATH] = Canned(
            json.dumps({"error": {"message": f"no {KEY.upper()}"}}).encode(), 400
        )
    with odd_server(answers, model=f"m-{KEY}.gguf" if place == "model" else "odd") as server:
        lengths = ("-p", 20, "-n", 14, "-r", 1, "--timeout", 20)
        options = (*lengths, "--api-key-env", "THE_KEY", "--no-plot", "--out")
        status, out, err = run_lab("measure", "--url", server.url, *options, tmp_path)
    assert status == (1 if place == "error" else 0), err
    stored = "".join(
        f"{file.name} {file.read_bytes().decode('latin-1')}" for file in tmp_path.iterdir()
    )
    for text in (*written(KEY), KEY[:8], KEY[-8:]):
        assert text.lower() not in (out + err + stored).lower()


# Buffered answers


def held_back(asked: dict[str, Any]) -> Iterator[bytes]:
    """What a proxy sends that waits for the end."""
    time.sleep(0.2)
    yield b"".join(stream(*["w "] * asked["max_tokens"]))


def test_an_answer_that_was_held_back_has_no_ttft(tmp_path: Path) -> None:
    with odd_server(chat(held_back)) as server:
        options = ("-p", "20,60", "-n", 64, "-r", 3, "--out", tmp_path)
        status, out, err = run_lab("measure", "--url", server.url, *options)
        assert status == 0, err
    assert "6 of 6 answers arrived in one piece" in out
    assert "E2E 0.2" in err
    assert "TPOT\n" not in out
    assert "TTFT of a prompt" not in out
    records = lab.read([tmp_path]).requests
    assert records[0].endpoint.can("streaming") == NO
    for record in records:
        if record.is_good:
            answer_times = figures(record.request)
            assert answer_times.came_at_once
            assert (answer_times.e2e_ns or 0) >= 0.2e9
            assert answer_times.ttft_ns is None
            assert answer_times.first_output_ns is None
            assert answer_times.tpot_bounds_ns is None
            assert answer_times.longest_stall_ns is None
            assert times.chunk_gaps_ns(record.request) == []
            assert times.itl_ns(record.request) is None


# Endless streams


def endless(asked: dict[str, Any]) -> Iterator[bytes]:
    yield from itertools.repeat(event("w "))


def pinging(asked: dict[str, Any]) -> Iterator[bytes]:
    for ping in itertools.cycle((b": ping\n\n", b"event: ping\ndata: {}\n\n", b"data:\n\n")):
        time.sleep(0.01)
        yield ping


def test_a_stream_without_an_end_is_given_up_soon() -> None:
    request = answer(chat(endless), n_gen=8, timeout_s=60)
    assert request.status == FAILED
    assert request.failure == TOO_LARGE
    assert "lines arrived for at most 8 requested tokens" in str(request.error)
    assert len(times.generated(request)) > 500  # what came is kept


def test_pings_before_the_first_token_are_patience_until_the_timeout() -> None:
    assert answer(chat(pinging), timeout_s=1.0, stall_s=0.3).failure == TIMEOUT


def test_an_examination_ends_in_time_and_says_that_it_waits() -> None:
    with odd_server(chat(pinging)) as server:
        status, _, err = run_lab("measure", "--url", server.url, "--timeout", 1)
        assert status == 1
        assert "at most 1 s for each (--timeout)" in err
        assert "complete answer after 1 s" in err
        assert server.n_asked[CHAT_PATH] == 1
    for wrong in ("0", "nan", "1e9"):
        status, _, err = run_lab("measure", "--url", server.url, "--timeout", wrong)
        assert status == 1
        assert "--timeout" in err
        assert "from 0.1 to 86,400" in err


# Causes


HTML = Canned(
    b"<html><head><style>p {}</style></head><body><h1>Welcome</h1> to nginx</body></html>",
    kind="text/html",
)
ELSEWHERE = Canned(b"", 307, headers=(("Location", "http://127.0.0.1:1/api/models"),))
BUSY = Canned(b'{"error": {"message": "slow down"}}', 429, headers=(("Retry-After", "30"),))
LOCKED = Canned(b'{"error": {"message": "no"}}', 401)
CAUSES = {
    "redirected": (
        "/v1/models",
        ELSEWHERE,
        ("307 Temporary Redirect", "not follow"),
    ),
    "not found": (
        "/v1/models",
        Canned(b"nothing here", 404, "text/plain"),
        ("404 Not Found",),
    ),
    "a page": ("/v1/models", HTML, ("text/html", "Check the address")),
    "other JSON": (
        "/v1/models",
        as_json({"hello": 1}),
        ("without `data`",),
    ),
    "TLS wanted": (
        "/v1/models",
        Canned(b"plain HTTP request sent to HTTPS port", 400),
        ("400 Bad Request: it expects https://",),
    ),
    "locked": (CHAT_PATH, LOCKED, ("401 Unauthorized", "--api-key-env NAME")),
    "busy": (CHAT_PATH, BUSY, ("429 Too Many Requests, Retry-After: 30", "Wait")),
    "a page instead": (
        CHAT_PATH,
        HTML,
        (NO_STREAM, "text/html", "a proxy or a login"),
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_with_what_to_do(name: str) -> None:
    path, canned, parts = CAUSES[name]
    with odd_server({path: canned}) as server:
        status, out, err = run_lab("measure", "--url", server.url, "--timeout", 10)
    assert status == 1, err
    assert out == "", err
    assert all(word in err for word in parts), err
    assert "The server lists no models" not in err


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"SSH-2.0-OpenSSH_9.2p1\r\n",
            "does not use HTTP",
        ),
        (b"\x15\x03\x03\x00\x02\x02\x46", "uses TLS"),
        (b"", "closed the connection without an answer"),
    ],
)
def test_what_does_not_speak_http_is_told(data: bytes, message: str) -> None:
    with raw_server(itertools.repeat((data,))) as url:
        status, _, err = run_lab("measure", "--url", url, "--timeout", 10)
    assert status == 1, err
    assert message in err, err
