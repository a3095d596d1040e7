"""Real servers with the embedded model: what they stream, cache and count is what the lab takes
them to do.

llama-server is the one inside the xllamacpp wheel, or one that a benchmark built; llama_cpp.server
is that of the llama-cpp-python on which the lab runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.core import request as kinds, request_times as times, results
from lab.core.record import FAILED, OK
from lab.core.request import (
    CHAT,
    COMPLETIONS,
    DONE,
    OTHER,
    ROLE,
    TEXT,
    USAGE,
    Endpoint,
    Request,
)
from lab.core.request_times import figures
from lab.errors import LabError
from lab.features.lessons import lesson
from lab.models import catalog
from lab.remote import formats, own_server
from lab.remote.access import access, all_headers
from lab.remote.client import Client
from lab.remote.examination import connect
from lab.remote.formats import Ask
from lab.remote.servers import Server
from tests.support.command import run_lab
from tests.support.servers import (
    RealServer,
    a_llama_server,
    llama_cpp_server,
)

WORDS = (
    "The keeper of the lighthouse counted ships and wrote their names "
    "into a long grey book every evening. "
) * 20
ONE_THREAD_OF_PYTHON = ("--n_threads", "1", "--n_threads_batch", "1", "--n_ctx", "1024")
LLAMA = "llama-server"
PYTHON = "llama_cpp.server"


@pytest.fixture(scope="module")
def llama(embedded: Path) -> Iterator[RealServer]:
    with a_llama_server(embedded) as server:
        yield server


@pytest.fixture(scope="module")
def python(embedded: Path) -> Iterator[RealServer]:
    """A llama_cpp.server, which has one slot, and ends an answer where its model ends it."""
    with llama_cpp_server(embedded, *ONE_THREAD_OF_PYTHON) as server:
        yield server


Reached = dict[tuple[str, str], Server]


@pytest.fixture(scope="module")
def reached(llama: RealServer, python: RealServer) -> Iterator[Reached]:
    """llama-server through both interfaces, and the other one as far as it differs, each examined
    once."""
    with ExitStack() as stack:
        urls = {LLAMA: llama.url, PYTHON: python.url}
        yield {
            (name, api): stack.enter_context(connect(urls[name], api=api)) for name, api in ALL
        }


ALL = [
    (LLAMA, CHAT),
    (LLAMA, COMPLETIONS),
    (PYTHON, COMPLETIONS),
]


def send(server: Server, ask: Ask) -> Request:
    return server.counted(server.send(ask))


def ask_of(
    server: Server,
    n_prompt: int,
    n_gen: int,
) -> Ask:
    return server.ask(n_prompt, n_gen, WORDS, seed=1)


def as_it_is(ask: Ask, **fields: object) -> Ask:
    """The same request, whose prompt does not change from one sending to the next; a field of None
    is left out."""
    changed = json.loads(ask.body) | fields
    options = {name: value for name, value in changed.items() if value is not None}
    return dataclasses.replace(
        ask,
        nonce=None,
        body=json.dumps(options),
    )


# What they can do


def names_with(endpoint: Endpoint, answer: str) -> set[str]:
    """The capabilities of a server with this answer."""
    return {
        capability.name for capability in endpoint.capabilities if capability.answer == answer
    }


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
def test_what_llama_server_can_do(reached: Reached, api: str) -> None:
    endpoint = reached[LLAMA, api].endpoint
    assert endpoint.server == LLAMA
    assert endpoint.api == api
    assert endpoint.settings is not None
    assert endpoint.settings.n_slots == 2
    assert endpoint.settings.n_ctx == 1024
    assert endpoint.settings.model_file == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert names_with(endpoint, "no") == {"token ids"}
    assert set(endpoint.accepted) == {
        formats.INCLUDE_USAGE,
        formats.IGNORE_EOS,
        formats.TIMINGS,
        formats.NO_CACHE,
        formats.SEED,
    }


def test_what_llama_cpp_server_can_do(reached: Reached) -> None:
    endpoint = reached[PYTHON, COMPLETIONS].endpoint
    assert endpoint.server == PYTHON
    assert endpoint.settings is None
    assert names_with(endpoint, "yes") == {"streaming", "tokenize"}
    assert formats.INCLUDE_USAGE not in endpoint.accepted
    assert formats.IGNORE_EOS not in endpoint.accepted


# What they stream


@pytest.mark.parametrize("which", ALL)
def test_a_prompt_has_exactly_n_of_the_servers_tokens(
    reached: Reached, which: tuple[str, str]
) -> None:
    server = reached[which]
    n = 97
    sized = server.ask(n, 2, WORDS)
    ask = as_it_is(sized, stream=None, stream_options=None)
    path = "chat/completions" if which[1] == CHAT else "completions"
    answer = server.client.ask(f"{server.client.access.url}/{path}", json.loads(ask.body))
    assert (answer.parsed or {})["usage"]["prompt_tokens"] == sized.asked.n_prompt_counted == n
    usage = send(server, ask_of(server, n, 2)).usage  # with another nonce
    assert usage is not None
    assert usage.prompt_tokens == (n if which[0] == LLAMA else None)


@pytest.mark.parametrize("which", ALL)
def test_each_token_is_an_event_and_nothing_comes_before_prefill(
    reached: Reached, which: tuple[str, str]
) -> None:
    server = reached[which]
    request = send(server, ask_of(server, 64, 10))
    assert request.status == OK, request.error
    kinds = request.events.kind
    assert kinds.count(TEXT) == 10 == times.n_generated(request)
    assert kinds[: 2 if which[1] == CHAT else 1] == (
        (ROLE, TEXT) if which[1] == CHAT else (TEXT,)
    )
    assert set(kinds[kinds.count(ROLE) + 10 :]) <= {OTHER, USAGE, DONE}
    assert kinds[-1] == DONE
    assert request.headers_ns is not None
    assert request.headers_ns <= request.events.arrive_ns[0]
    assert request.finish_reason == "length"
    if which[0] == PYTHON:
        assert request.tokens_by is None
        assert request.timings is None
        assert USAGE not in kinds
        assert request.usage is not None
        assert request.usage.counted_by == "tokenize"
        assert figures(request).tpot_ns is not None
        assert times.itl_ns(request) is None
    else:
        assert request.tokens_by == "timings"
        assert times.itl_ns(request) == times.chunk_gaps_ns(request)
        timings = request.timings
        e2e_ns = figures(request).e2e_ns  # its own times lie within ours
        assert timings is not None
        assert timings.prompt_ms
        assert timings.gen_ms
        assert e2e_ns
        assert timings.n_prompt == 64
        assert timings.n_gen == 10
        assert timings.n_cached == 0
        assert (
            request.events.arrive_ns[0] >= timings.prompt_ms * 1e6
        )  # a role comes after prefill, too
        assert (timings.prompt_ms + timings.gen_ms) * 1e6 <= e2e_ns


# Caches


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
def test_llama_server_caches_unless_it_is_asked_not_to(reached: Reached, api: str) -> None:
    server = reached[LLAMA, api]
    ask = ask_of(server, 64, 4)
    for _ in range(2):
        cold = figures(send(server, as_it_is(ask)))
        assert cold.n_cached == 0
        assert cold.is_warm is False
    send(server, as_it_is(ask, cache_prompt=None))
    warm = figures(send(server, as_it_is(ask, cache_prompt=None)))
    assert warm.n_cached == 63  # its last token is always computed
    assert warm.is_warm
    timings = warm.request.timings
    assert timings is not None
    assert timings.n_prompt == 1


def test_llama_cpp_server_caches_and_does_not_say_so(
    reached: Reached, python: RealServer
) -> None:
    server = reached[PYTHON, COMPLETIONS]
    ask = as_it_is(ask_of(server, 64, 4))

    def cached() -> list[str]:
        return re.findall(r"(\d+) prefix-match hit", python.log.read_text())

    n_hits = len(cached())
    request = [send(server, ask) for _ in range(2)][1]
    assert (
        cached()[n_hits:][-1] == "63"
    )  # before it, its nonce may begin as an earlier one did
    assert figures(request).n_cached is None
    assert figures(request).is_warm is None


def test_a_short_context_refuses_or_truncates(shallow: Path) -> None:
    small = ("--threads", "1", "--ctx-size", "256", "--parallel", "1")  # llama.cpp's smallest
    with (
        a_llama_server(shallow, small) as started,
        connect(started.url, api=COMPLETIONS) as server,
    ):
        assert server.endpoint.settings
        assert server.endpoint.settings.n_ctx == 256
        refused = send(server, ask_of(server, 300, 4))
        truncated = send(server, ask_of(server, 60, 400))
    assert refused.failure == kinds.BAD_REQUEST
    assert refused.http_status == 400
    assert "request (300 tokens) exceeds the available context size (256 tokens)" in (
        refused.error or ""
    )
    assert truncated.status == OK
    assert truncated.finish_reason == "length"
    assert figures(truncated).n_generated == 256 - 60
    assert figures(truncated).is_short


def test_a_server_that_dies_loses_the_connection(shallow: Path) -> None:
    n_gen = 5000  # takes much longer than to see that it generates
    wide = ("--threads", "1", "--ctx-size", "8192", "--parallel", "1")
    with (
        a_llama_server(shallow, wide) as started,
        connect(started.url, api=COMPLETIONS) as server,
    ):

        def n_decoded() -> int:
            with urllib.request.urlopen(started.url.replace("/v1", "/slots")) as answer:
                (slot,) = json.load(answer)
            return int(slot["next_token"][0]["n_decoded"]) if slot["is_processing"] else 0

        def kill() -> None:
            while n_decoded() < 5:
                time.sleep(0.01)
            os.kill(started.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill, daemon=True)
        ask = ask_of(server, 48, n_gen)
        killer.start()
        reply = server.send(ask)
        killer.join(30)
        assert reply.request.status == FAILED
        assert reply.request.failure in (kinds.LOST, kinds.HALF_LINE, kinds.CUT_OFF)
        assert 0 < reply.request.events.kind.count(TEXT) < n_gen
        assert server.send(ask).request.failure == kinds.REFUSED


# The commands, end to end


def test_the_main_job_through_a_server(python: RealServer, tmp_path: Path) -> None:
    options = (
        "--api",
        COMPLETIONS,
        "-p",
        "48",
        "-n",
        "6",
        "--repeat",
        "2",
        "--out",
        tmp_path,
        "--json",
        "--no-plot",
    )
    status, out, err = run_lab("measure", "--url", python.url, *options)
    assert status == 0, err
    assert "Traceback" not in err
    assert json.loads(out)
    (path,) = tmp_path.glob("*.jsonl")
    lines = results.read([path]).requests
    timed = [record.request for record in lines if record.is_good]
    assert [request.status for request in timed] == [OK, OK]
    assert [times.n_generated(request) for request in timed] == [6, 6]
    assert {figures(request).is_warm for request in timed} == {None}


def test_a_conversation_from_a_file_is_replayed_through_a_server(
    llama: RealServer, tmp_path: Path
) -> None:
    """Its messages are sent, with the real answers between them; what the cache served is the
    server's own count."""
    texts = [
        WORDS[:300],
        "How many ships came?",
        "Seven.",
        "And in the spring, with the long nights?",
        "",
        "Thanks.",
    ]
    roles = ("system", "user", "assistant", "user", "tool", "user")
    file = tmp_path / "session.jsonl"
    url = ("--url", llama.url, "--api", CHAT)
    messages = [
        {"role": role, "content": content} for role, content in zip(roles, texts, strict=True)
    ]
    messages[4:5] = [
        {"role": "assistant", "content": "No ship."},
        {"role": "tool", "content": "log: 0 ships"},
    ]
    file.write_text("\n".join(map(json.dumps, messages)))
    status, out, err = run_lab("turns", *url, "--replay", file, "--out", tmp_path, "--no-plot")
    assert status == 0, err
    assert re.search("3 turns take|No conclusions: . of 5 requests were disturbed", out), err
    (path,) = tmp_path.glob("*-llama-server.jsonl")
    sent = [record.request for record in results.read([path]).requests]
    places = [request.asked.place for request in sent]
    assert [(place["number"], place["is_cold"]) for place in places] == [
        *[
            (1, False),
            (2, False),
            (3, False),
        ],  # the conversation
        *[(2, True), (3, True)],  # without a cache
    ]
    rows = json.loads(run_lab("show", path, "--json")[1])["rows"]
    assert [row["n_cached"] for row in rows] == [
        request.usage.cached_tokens for request in sent[:3] if request.usage
    ]
    assert [row["n_again"] for row in rows[1:]] == [0, 0]
    assert all(row["is_known"] for row in rows)
    assert rows[1]["n_cached"] < rows[2]["n_cached"] < rows[2]["n_prompt"]


# A server as most people start it: without --alias, with a template that knows tools


TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""


def tool(*keys: str) -> dict[str, object]:
    """A tool whose schema has its keys in this order."""
    path = {"type": "string"}
    values = {"type": "object", "properties": {"path": path}, "required": ["path"]}
    parameters = {key: values[key] for key in keys}
    description = "Reads a page of the long grey book."
    function = {"name": "read_page", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def test_a_server_without_an_alias_is_measured(shallow: Path, tmp_path: Path) -> None:
    """Its model's id is a path, which may identify a person."""
    with a_llama_server(shallow, alias=None) as started:
        short = ("-p", 40, "-n", 3, "-r", 1, "--no-plot", "--out", tmp_path)
        status, out, err = run_lab("measure", "--url", started.url, *short)
    assert status == 0, err
    assert f"model    {shallow.name}" in out
    assert str(shallow.parent) not in out + err


@pytest.mark.parametrize("n_slots", [1, 2])
def test_turns_that_must_be_cold_are_cold_also_in_a_second_session(
    shallow: Path, tmp_path: Path, n_slots: int
) -> None:
    """The template writes the tools first, and the client sends the keys of the last schema in
    another order."""
    template = tmp_path / "tools.jinja"
    template.write_text(TEMPLATE)
    messages = [
        {"role": "user", "content": "How many ships came?"},
        {"role": "assistant", "content": "Seven."},
        {"role": "user", "content": "And in spring?"},
        {"role": "assistant", "content": "None."},
        {"role": "user", "content": "Why?"},
    ]
    usual = tool("type", "properties", "required")
    reordered = tool("required", "properties", "type")
    bodies = [
        {"messages": messages[:n], "tools": [first]}
        for n, first in ((1, usual), (3, usual), (5, reordered))
    ]
    file = tmp_path / "session.jsonl"
    file.write_text("\n".join(map(json.dumps, bodies)))
    slots = ("--threads", "1", "--ctx-size", f"{1024 * n_slots}", "--parallel", f"{n_slots}")
    options = (*slots, "--jinja", "--chat-template-file", str(template))
    with a_llama_server(shallow, options, alias=None) as started:
        url = ("--url", started.url)
        for session in ("first", "second"):
            folder = tmp_path / session
            more = ("--replay", file, "--no-plot", "--out", folder)
            status, _, err = run_lab("turns", *url, *more)
            assert status == 0, err
            (path,) = folder.glob("*.jsonl")
            requests = [record.request for record in results.read([path]).requests]
            assert len(requests) == 5
            cached = [figures(request).n_cached for request in requests]
            n_prompt = figures(requests[0]).n_prompt or 0
            assert cached[0] == cached[3] == cached[4] == 0
            assert (cached[1] or 0) >= n_prompt - 1
            assert requests[0].asked.case["breaks"] == "client@3"


# The server of notebook 6


def test_a_notebooks_server_ends_with_its_process() -> None:
    code = "import os; from lab.features.lessons import lesson as own; "
    code += "print(own.serve(1).url, flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    deadline = time.monotonic() + 30
    with pytest.raises(
        OSError, match=r"refused|reset|closed connection"
    ):  # as it dies, and after
        while time.monotonic() < deadline:
            urllib.request.urlopen(f"{killed.stdout.strip()}/models", timeout=5).close()
            time.sleep(0.05)


def test_a_server_that_cannot_start_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_server, "_CHILD", "import no_such_package")
    with pytest.raises(
        LabError, match=r"No module named 'no_such_package'\nInstall .*mini-lab\[server\]"
    ):
        lesson.serve()


def test_the_own_server_answers_only_with_its_key_and_to_no_page() -> None:
    import httpx2

    server = own_server.start_own(catalog.embedded_path(), catalog.DEFAULT, 1)
    try:
        with Client(access(server.url)) as client:
            assert client.ask(f"{server.url}/models").status == 401
        address = access(server.url, server.key_env, ["Origin: http://elsewhere.example"])
        answer = httpx2.get(f"{server.url}/models", headers=dict(all_headers(address)))
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
    finally:
        server.end()
