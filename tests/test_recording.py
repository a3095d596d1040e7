"""lab record: planted differences, what passes through the proxy, and the bill."""

import asyncio
import contextlib
import dataclasses
import gzip
import json
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lab.app import kinds
from lab.core import results
from lab.core.lines import parse_line, to_json
from lab.features.recording import breaks, figures, sentences
from lab.features.recording.answers import read_answer
from lab.features.recording.causes import ServerState, find_cause
from lab.features.recording.conversations import Conversations, Prompt, RecordedConversation
from lab.features.recording.differences import difference
from lab.features.recording.lines import Cause
from lab.features.recording.parsed_calls import body_of
from lab.features.recording.prompts import Blocks, blocks_of
from lab.features.recording.proxy import HUNG_UP, ProxiedCall, Proxy
from lab.features.recording.recorder import CallRecorder, RecordingSetup
from lab.remote.access import access
from tests.support.command import run_lab
from tests.support.null_server import Behaviour, NullSettings, null_server
from tests.support.recordings import (
    CLOCK,
    ROLES,
    TEXTS,
    Messages,
    messages,
    recorded,
    session_with_a_clock,
    with_next,
)
from tests.support.records import MACHINE

TOOLS = [
    {"type": "function", "function": {"name": "read_file", "parameters": {}}},
    {"type": "function", "function": {"name": "list_folder", "parameters": {}}},
    {"type": "function", "function": {"name": "write_file", "parameters": {}}},
]


def chat(of_messages: Messages, tools: list[Any] = TOOLS) -> Blocks:
    return blocks_of({"messages": of_messages, "tools": tools})


def changed(before: Messages, index: int) -> None:
    text = before[index]["content"]
    before[index]["content"] = f"{text[:9]}#{text[10:]}"


def shortened(before: Messages, index: int) -> None:
    before[index]["content"] = f"{TEXTS[index][:9]}#cut"


def removed(before: Messages, index: int) -> None:
    del before[index]


def inserted(before: Messages, index: int) -> None:
    before.insert(index, {"role": ROLES[index], "content": "# Remember to be brief."})


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize(
    ("plant", "kind", "character"),
    [
        (changed, breaks.CHANGED, 9),
        (shortened, breaks.SHORTENED, 9),
        (removed, breaks.REMOVED, 0),
        (inserted, breaks.INSERTED, 0),
    ],
)
def test_a_planted_difference_is_named(
    plant: Callable[[Messages, int], None], kind: str, character: int, index: int
) -> None:
    now = with_next(messages())
    plant(now, index)
    result = difference(chat(messages()), chat(now))
    assert result is not None
    assert result.kind == kind
    assert result.block.index == index
    assert result.character == character


def test_a_removed_answer_that_the_next_one_repeats_is_not_reordered() -> None:
    answer = {"role": "assistant", "content": "It fails, as it should. Go on."}
    last = {"role": "user", "content": TEXTS[5]}
    newest = {"role": "user", "content": "What now?"}
    before = [*messages()[:4], answer, last]
    result = difference(chat(before), chat([*messages()[:4], last, answer, newest]))
    assert result is not None
    assert (result.kind, result.block.index) == (breaks.REMOVED, 4)


def test_a_removed_message_has_no_character_though_the_next_begins_alike() -> None:
    before = messages()
    before[2] = {"role": "assistant", "content": "Only the hammer has a test."}
    del before[3]
    now = with_next(before)
    del now[2]
    result = difference(chat(before), chat(now))
    assert result is not None
    assert (result.kind, result.block.index, result.character) == (breaks.REMOVED, 2, 0)


def test_lines_of_the_last_message_in_another_order_are_reordered() -> None:
    before = [*messages(), {"role": "user", "content": "anvil, then bellows\nchisel\ndrill"}]
    now = with_next(before)
    now[6] = {"role": "user", "content": "chisel\nanvil, then bellows\ndrill"}
    result = difference(chat(before), chat(now))
    assert result is not None
    assert (result.kind, result.block.index, result.character) == (
        breaks.REORDERED,
        6,
        0,
    )


def test_a_prompt_that_only_grows_differs_nowhere() -> None:
    assert difference(chat(messages()), chat(with_next(messages()))) is None
    assert difference(chat(messages()), chat(messages())) is None


def test_tools_in_another_order_are_named_by_the_first_that_moved() -> None:
    result = difference(
        chat(messages()), chat(with_next(messages()), [TOOLS[0], TOOLS[2], TOOLS[1]])
    )
    assert result is not None
    assert result.kind == breaks.REORDERED
    assert (result.block.kind, result.block.index) == ("tool", 1)
    assert result.character == json.dumps(TOOLS[1]).index("list_folder")


@pytest.mark.parametrize(
    ("before", "now", "what"),
    [
        ("It is 08:00:00Z.", "It is 08:03:27Z.", "a time of day"),
        ("Today: 2026-11-24", "Today: 2026-11-25", "a date"),
        ("Run 7f3a99b0c1d2 begins", "Run 7f3a11c8c1d2 begins", "an identifier"),
        ("Left: 12,000 tokens", "Left: 9,200 tokens", "a number"),
        ("a blue door", "a green door", ""),
    ],
)
def test_what_changes_by_itself_has_a_name(before: str, now: str, what: str) -> None:
    earlier = blocks_of({"messages": [{"role": "system", "content": before}]})
    later = blocks_of({"messages": [{"role": "system", "content": now}]})
    result = difference(earlier, later)
    assert result is not None
    assert result.what == what


def test_the_excerpt_shows_the_change_in_its_place() -> None:
    earlier = blocks_of({"prompt": "It is 08:00:00Z now."})
    later = blocks_of({"prompt": "It is 08:03:27Z now."})
    result = difference(earlier, later)
    assert result is not None
    assert result.excerpt == "It is 08:0[0:00 -> 3:27]Z now."


def test_a_mark_for_a_cache_that_moves_on_is_no_difference() -> None:
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "1", "content": "blunt"}
    marked = {**result, "cache_control": {"type": "ephemeral"}}
    earlier = blocks_of({"messages": [{"role": "user", "content": [marked]}]})
    assert earlier == blocks_of({"messages": [{"role": "user", "content": [result]}]})


STREAMS: dict[str, Messages] = {
    "responses": [
        {"type": "response.created", "response": {"model": "m"}},
        {"type": "response.output_text.delta", "delta": "anvil"},
        {
            "type": "response.completed",
            "response": {
                "model": "m",
                "usage": {
                    "input_tokens": 30,
                    "output_tokens": 4,
                    "input_tokens_details": {"cached_tokens": 20},
                },
            },
        },
    ],
    "messages": [
        {
            "type": "message_start",
            "message": {
                "model": "m",
                "usage": {
                    "input_tokens": 10,
                    "cache_read_input_tokens": 20,
                    "output_tokens": 0,
                },
            },
        },
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "anvil"}},
        {"type": "message_delta", "delta": {}, "usage": {"output_tokens": 4}},
    ],
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_of_another_interface_is_counted(name: str) -> None:
    lines = [f"data: {json.dumps(event)}\n\n".encode() for event in STREAMS[name]]
    pieces = list(enumerate(lines))
    answer = read_answer(pieces, "", "text/event-stream")
    assert (answer.n_prompt, answer.n_cached, answer.n_gen) == (30, 20, 4)
    assert answer.model == "m"
    assert answer.first_ns == 1


def test_conversations_are_told_apart_though_they_share_a_system_prompt() -> None:
    conversations = Conversations()
    first = messages()[:2]
    second = [messages()[0], {"role": "user", "content": "Write a poem about rain."}]
    edited = with_next(messages())
    edited[0] = {"role": "system", "content": f"{TEXTS[0]} It is 12:30."}
    numbers = []
    for call, prompt in enumerate([first, second, messages(), edited], 1):
        conversation = conversations.of(chat(prompt))
        conversation.add(Prompt(call, chat(prompt)))
        numbers.append((conversation.number, conversation.n_turns))
    assert numbers == [(1, 1), (2, 1), (1, 2), (1, 3)]


def conversation_of(n_prompt: int = 100, n_gen: int = 10) -> RecordedConversation:
    conversation = RecordedConversation(1)
    tokens = tuple(range(n_prompt))
    blocks = chat(messages())
    conversation.add(Prompt(1, blocks, n_prompt, n_gen, rendered="", tokens=tokens))
    return conversation


OTHER = Prompt(2, chat([{"role": "user", "content": "Something else."}]))


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (ServerState(), breaks.EVICTED),
        (ServerState(latest_other=OTHER, other_number=2), breaks.OTHER_CONVERSATION),
        (ServerState(n_ctx=110), breaks.CONTEXT_FULL),
    ],
)
def test_a_cache_that_the_server_lost_is_told_from_a_changed_prompt(
    state: ServerState, kind: str
) -> None:
    prompt = Prompt(3, chat(with_next(messages())), 130, 10, "", tuple(range(130)))
    finding = find_cause(prompt, 0, conversation_of(), state, lambda text: None)
    assert finding.cause is not None
    assert (finding.cause.kind, finding.cause.by) == (kind, "server")
    assert finding.n_new == 130 - 100 - 10


def test_a_whole_cache_has_no_cause() -> None:
    prompt = Prompt(3, chat(with_next(messages())), 130, 10, "", tuple(range(130)))
    finding = find_cause(
        prompt, 99, conversation_of(), ServerState(n_ctx=110), lambda text: None
    )
    assert finding.cause is None


def test_what_the_template_leaves_out_is_not_the_clients_doing() -> None:
    with_thinking = messages()
    with_thinking[2]["reasoning_content"] = "First I think about the folder, long and hard."
    now = with_next(with_thinking)
    rendered = "\n".join(TEXTS)
    before = rendered.replace(TEXTS[2], f"{with_thinking[2]['reasoning_content']} {TEXTS[2]}")
    conversation = RecordedConversation(1)
    tokens = tuple(map(ord, before))
    conversation.add(Prompt(1, chat(with_thinking), len(before), 5, before, tokens))
    prompt = Prompt(2, chat(now), len(rendered), 5, rendered, tuple(map(ord, rendered)))
    n_cached = before.index("First I think")
    finding = find_cause(prompt, n_cached, conversation, ServerState(), len)
    assert finding.cause is not None
    assert (finding.cause.by, finding.cause.kind) == ("template", breaks.REMOVED)
    assert (finding.cause.index, finding.cause.text_field) == (2, "reasoning")


def test_a_mend_saves_what_was_read_again() -> None:
    (mend,) = figures.mends(session_with_a_clock())
    assert mend.calls == (3, 5)
    assert mend.n_again == 1200 + 1400
    assert mend.saved_s == pytest.approx(0.002 * 2600)
    assert mend.saved_s is not None
    assert mend.low_s is not None
    assert mend.high_s is not None
    assert mend.mended_s is not None
    assert mend.low_s <= mend.saved_s <= mend.high_s
    assert mend.session_s - mend.mended_s == pytest.approx(mend.saved_s)


def test_cached_tokens_that_nobody_counted_come_from_the_time_and_are_marked() -> None:
    table = figures.bill(session_with_a_clock(says_cached=False))
    assert list(table.cached_by.unique()) == ["time"]
    assert list(table.n_cached) == pytest.approx([0, 1100, 0, 1300, 0, 1500], abs=2)


def test_an_answer_of_one_token_has_no_decode_time() -> None:
    call = recorded(1, 1000, 0, 2.0, n_gen=1, decode_ns=1000)
    table = figures.bill([call, recorded(2, 1100, 1000, 0.2)])
    assert math.isnan(table.decode_s[0])
    assert table.decode_s[1] == pytest.approx(1)


def test_the_bill_in_sentences() -> None:
    calls = session_with_a_clock()
    (chapter,) = kinds.sections(calls)
    (part,) = chapter.parts
    assert part.answer == (
        "2 of 6 calls broke the cache: 2,600 of 4,200 computed tokens were read before "
        "(3,900 of 8,100 prompt tokens were cached)."
    )
    cost, saving = part.sentences
    assert cost.startswith("Calls 3 and 5 read 2,600 tokens again: 5.20 s of 14.4 s.")
    assert cost.endswith("changed, first at character 1,204: a time of day.")
    assert saving.startswith("Keep message 1 (system) as it was")
    mends: list[Any] = part.document()["mends"]
    assert mends[0]["calls"] == (3, 5)


def test_lines_are_read_back_and_wrong_ones_refused() -> None:
    call = recorded(
        1, 10, 0, 1.0, cause=CLOCK, body={"messages": [{"content": "a\nb" * 9000}]}
    )
    line = to_json(call)
    assert parse_line(f"{line}\n".encode()) == call
    wrong = line.replace('"kind":"changed"', '"kind":"bewitched"')
    with pytest.raises(ValueError, match="does not know"):
        parse_line(f"{wrong}\n".encode())


def test_every_cause_has_a_sentence() -> None:
    for kind in breaks.IN_PROMPT:
        call = recorded(2, 10, 0, 1.0, cause=dataclasses.replace(CLOCK, kind=kind))
        assert "message 1 (system)" in sentences.where([call]).lower()
    for kind in breaks.IN_SERVER:
        cause = Cause(kind=kind, by="server", conversation=2)
        assert sentences.where([recorded(2, 10, 0, 1.0, cause=cause)]).endswith(".")
        assert sentences.label(cause)


class Upstream:
    """A server that keeps the bytes of each request, and answers with prepared bytes."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.reply = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
        self.n_body_bytes = 0
        self.hung_up = threading.Event()
        self.closes = False
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head + await self.body(head, reader))
            writer.write(self.reply)
            await writer.drain()
            if not self.closes:
                await reader.read()
        self.hung_up.set()
        writer.close()

    async def body(self, head: bytes, reader: asyncio.StreamReader) -> bytes:
        fields = head.lower()
        if b"transfer-encoding: chunked" in fields:
            return await reader.readuntil(b"0\r\n\r\n")
        if b"content-length: " not in fields:
            return b""
        length = int(fields.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return await reader.readexactly(length)


@dataclasses.dataclass
class Wire:
    """A proxy before an Upstream, and what it kept."""

    upstream: Upstream
    port: int
    calls: list[ProxiedCall]

    def send(self, data: bytes, port: int | None = None) -> bytes:
        """The bytes that come back on a connection for `data`."""
        with socket.create_connection(("127.0.0.1", port or self.port), timeout=20) as line:
            line.sendall(data)
            line.settimeout(0.3 if port else 1.0)
            received = b""
            with contextlib.suppress(TimeoutError, ConnectionError):
                while piece := line.recv(1 << 20):
                    received += piece
                    if is_whole(received):
                        break
            return received


def is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    if length:
        return len(body) >= int(length)
    return body.endswith(b"0\r\n\r\n")


@pytest.fixture
def wire() -> Iterator[Wire]:
    upstream = Upstream()
    calls: list[ProxiedCall] = []
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    ports: list[int] = []
    stopped = asyncio.Event()

    async def run() -> None:
        server = await asyncio.start_server(upstream.answer, "127.0.0.1", 0, limit=1 << 27)
        upstream.port = server.sockets[0].getsockname()[1]
        root = f"http://127.0.0.1:{upstream.port}"
        async with Proxy(root, "127.0.0.1", 0, calls.append) as proxy:
            ports.append(proxy.port)
            ready.set()
            await stopped.wait()
        server.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    assert ready.wait(10)
    yield Wire(upstream, ports[0], calls)
    loop.call_soon_threadsafe(stopped.set)
    thread.join(10)


def lines_of(head: bytes) -> list[bytes]:
    """The lines of a head, without what belongs to a connection."""
    dropped = (b"host:", b"connection:", b"transfer-encoding:")
    lines = head.partition(b"\r\n\r\n")[0].split(b"\r\n")
    return [line for line in lines if not line.lower().startswith(dropped)]


BODY = json.dumps({"messages": messages()}).encode()
REQUEST = (
    b"POST /v1/chat/completions?x=%2F&y=a+b HTTP/1.1\r\nHost: here\r\nX-Odd-CASE: \xc3\xa9\r\n"
    b"Authorization: Bearer secret\r\nAccept-Encoding: gzip, br\r\n"
    b"content-type: application/json\r\nContent-Length: "
    + f"{len(BODY)}\r\n\r\n".encode()
    + BODY
)


def test_a_request_arrives_unchanged(wire: Wire) -> None:
    wire.send(REQUEST)
    (arrived,) = wire.upstream.requests
    assert lines_of(arrived) == lines_of(REQUEST)
    assert arrived.partition(b"\r\n\r\n")[2] == BODY


ANSWERS = {
    "json": b"HTTP/1.1 200 OK\r\nserver: odd/1\r\nX-A: 1\r\nX-A: 2\r\nContent-Length: 2\r\n\r\n{}",
    "error": b"HTTP/1.1 418 I'm a teapot\r\nContent-Length: 5\r\nRetry-After: 3\r\n\r\nshort",
    "gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%b"
    % (len(gzip.compress(b"{}", mtime=0)), gzip.compress(b"{}", mtime=0)),
    "chunked": b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n8\r\ndata: 1\n\r\n1\r\n\n\r\n0\r\n\r\n",
    "redirect": b"HTTP/1.1 302 Found\r\nLocation: http://example.invalid/\r\n"
    b"Content-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_comes_back_unchanged(wire: Wire, name: str) -> None:
    wire.upstream.reply = ANSWERS[name]
    direct = wire.send(REQUEST, wire.upstream.port)
    through = wire.send(REQUEST)
    assert lines_of(through) == lines_of(direct)
    assert body_without_chunks(through) == body_without_chunks(direct)


def body_without_chunks(answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return body
    joined = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        n_bytes = int(size, 16)
        joined += body[:n_bytes]
        body = body[n_bytes + 2 :]
    return joined


def test_a_websocket_is_refused_with_a_reason(wire: Wire) -> None:
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    answer = wire.send(b"GET /v1/realtime HTTP/1.1\r\nHost: here\r\n" + upgrade)
    assert answer.startswith(b"HTTP/1.1 501 ")
    assert b"lab record passes no WebSocket on: /v1/realtime" in answer
    assert not wire.upstream.requests


def test_a_chunked_body_passes_whole(wire: Wire) -> None:
    head = b"POST /v1/files HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire.send(head + b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")
    (arrived,) = wire.upstream.requests
    assert body_without_chunks(arrived) == b"abcdefg"


def test_a_client_that_waits_for_100_continue_gets_it(wire: Wire) -> None:
    """The server is not asked for it: some never send it."""
    head = REQUEST.partition(b"\r\n\r\n")[0] + b"\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", wire.port), timeout=10) as line:
        line.sendall(head)
        assert line.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        line.sendall(BODY)
        assert line.recv(1000).startswith(b"HTTP/1.1 200 OK")
    (arrived,) = wire.upstream.requests
    assert b"expect" not in arrived.lower()
    assert arrived.endswith(BODY)


@pytest.mark.parametrize(
    ("path", "passed_on"),
    [
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/v1/messages/count_tokens?beta=true", "/v1/messages/count_tokens?beta=true"),
        ("/v1/models", "/v1/models"),
        ("/v1/v1x", "/v1/v1x"),
        ("/v1beta/v1/models", "/v1beta/v1/models"),
    ],
)
def test_a_doubled_version_is_passed_on_once(wire: Wire, path: str, passed_on: str) -> None:
    wire.send(f"GET {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
    (arrived,) = wire.upstream.requests
    assert arrived.startswith(f"GET {passed_on} HTTP/1.1".encode())


def test_a_large_body_passes_whole(wire: Wire) -> None:
    data = b"x" * 52_000_000
    head = b"POST /v1/files HTTP/1.1\r\nHost: here\r\nContent-Length: 52000000\r\n\r\n"
    wire.send(head + data)
    (arrived,) = wire.upstream.requests
    assert arrived.endswith(data)
    assert not wire.calls  # a file is no prompt


def test_a_server_that_dies_in_the_middle_is_seen_by_the_client(wire: Wire) -> None:
    reply = ANSWERS["chunked"]
    wire.upstream.reply = reply[: reply.index(b"1\r\n\n")]
    wire.upstream.closes = True
    received = wire.send(REQUEST)
    assert b"data: 1\n" in received
    assert not received.endswith(b"0\r\n\r\n")
    assert wire.calls[0].failure == "connection lost"


def test_a_server_that_dies_before_it_answers_is_seen_by_the_client(wire: Wire) -> None:
    wire.upstream.reply = b""
    wire.upstream.closes = True
    assert wire.send(REQUEST) == wire.send(REQUEST, wire.upstream.port) == b""
    assert wire.calls[0].failure == "connection lost"


async def sent_without_a_server(calls: list[ProxiedCall]) -> tuple[int, str]:
    """What a client gets for a request that no server listens for."""
    from aiohttp import ClientSession

    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        root = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        async with Proxy(root, "127.0.0.1", 0, calls.append) as proxy:
            address = f"http://127.0.0.1:{proxy.port}/v1/chat/completions"
            async with ClientSession() as client, client.post(address, data=BODY) as answer:
                return answer.status, await answer.text()


def test_a_server_that_cannot_be_reached_is_named() -> None:
    calls: list[ProxiedCall] = []
    status, text = asyncio.run(sent_without_a_server(calls))
    assert status == 502
    assert "does not answer" in text
    assert calls[0].failure == "connection refused"


def test_a_client_that_hangs_up_hangs_up_on_the_server_too(wire: Wire) -> None:
    wire.upstream.reply = b""
    with socket.create_connection(("127.0.0.1", wire.port)) as line:
        line.sendall(REQUEST)
        while not wire.upstream.requests:
            threading.Event().wait(0.01)
    assert wire.upstream.hung_up.wait(5)
    for _ in range(200):
        if wire.calls:
            break
        threading.Event().wait(0.01)
    assert wire.calls[0].failure == HUNG_UP


TOOL_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "read_file", "arguments": '{"path": "chisel.py"}'},
}
COMPLETION = {
    "id": "chat-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "message": {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
        }
    ],
}
CHUNK = {
    "id": "chat-1",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "delta": {"content": "é"}, "finish_reason": None}],
}


def reply_with(kind: str, body: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def seen_by_openai(port: int) -> list[Any]:
    """What the client of the `openai` package gets: sync and async, with tools."""
    from openai import AsyncOpenAI, OpenAI

    address = f"http://127.0.0.1:{port}/v1"
    asked: Any = {"model": "m", "messages": messages()[:2], "tools": TOOLS}
    with OpenAI(base_url=address, api_key="k", max_retries=0) as client:
        answers = [client.chat.completions.create(**asked).to_dict()]

    async def ask() -> Any:
        async with AsyncOpenAI(base_url=address, api_key="k", max_retries=0) as client:
            return (await client.chat.completions.create(**asked)).to_dict()

    return [*answers, asyncio.run(ask())]


def streamed_to_openai(port: int) -> list[Any]:
    """The chunks that the `openai` package gets: sync and async."""
    from openai import AsyncOpenAI, OpenAI

    address = f"http://127.0.0.1:{port}/v1"
    asked: Any = {"model": "m", "messages": messages()[:2], "stream": True}
    with OpenAI(base_url=address, api_key="k", max_retries=0) as client:
        chunks = [chunk.to_dict() for chunk in client.chat.completions.create(**asked)]

    async def ask() -> list[Any]:
        async with AsyncOpenAI(base_url=address, api_key="k", max_retries=0) as client:
            stream = await client.chat.completions.create(**asked)
            return [chunk.to_dict() async for chunk in stream]

    return [*chunks, *asyncio.run(ask())]


@pytest.mark.skipif(not find_spec("openai"), reason="the openai package is not installed")
def test_the_openai_package_sees_no_difference(wire: Wire) -> None:
    wire.upstream.closes = True
    wire.upstream.reply = reply_with("application/json", json.dumps(COMPLETION).encode())
    answers = seen_by_openai(wire.port)
    assert answers == seen_by_openai(wire.upstream.port)
    assert answers[0]["choices"][0]["message"]["tool_calls"] == [TOOL_CALL]
    stream = f"data: {json.dumps(CHUNK)}\n\n" * 3 + "data: [DONE]\n\n"
    wire.upstream.reply = reply_with("text/event-stream", stream.encode())
    chunks = streamed_to_openai(wire.port)
    assert chunks == streamed_to_openai(wire.upstream.port) == [CHUNK] * 6


MESSAGE: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "Three."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 12, "output_tokens": 3},
}
MESSAGE_EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("message_start", {"message": {**MESSAGE, "content": [], "stop_reason": None}}),
    ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
    ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "Three."}}),
    ("content_block_stop", {"index": 0}),
    ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}),
    ("message_stop", {}),
]


def seen_by_anthropic(base: str) -> list[Any]:
    """What the client of the `anthropic` package gets: a message."""
    from anthropic import Anthropic

    with Anthropic(base_url=base, api_key="k", max_retries=0) as client:
        message = client.messages.create(
            model="m",
            max_tokens=9,
            system="Be brief.",
            messages=[{"role": "user", "content": "How many?"}],
        )
        return [message.to_dict()]


def streamed_to_anthropic(base: str) -> list[Any]:
    """The events that the `anthropic` package gets."""
    from anthropic import Anthropic

    with Anthropic(base_url=base, api_key="k", max_retries=0) as client:
        stream = client.messages.create(
            model="m",
            max_tokens=9,
            messages=[{"role": "user", "content": "How many?"}],
            stream=True,
        )
        return [event.to_dict() for event in stream]


@pytest.mark.parametrize("version", ["", "/v1"])
@pytest.mark.skipif(
    not find_spec("anthropic"), reason="the anthropic package is not installed"
)
def test_the_anthropic_package_sees_no_difference(wire: Wire, version: str) -> None:
    """Also with the address for OpenAI's clients, to which it adds another /v1."""
    direct = f"http://127.0.0.1:{wire.upstream.port}"
    through = f"http://127.0.0.1:{wire.port}{version}"
    wire.upstream.closes = True
    wire.upstream.reply = reply_with("application/json", json.dumps(MESSAGE).encode())
    answers = seen_by_anthropic(through)
    assert answers == seen_by_anthropic(direct)
    assert answers[0]["content"][0]["text"] == "Three."
    lines = []
    for name, fields in MESSAGE_EVENTS:
        lines.append(f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n")
    wire.upstream.reply = reply_with("text/event-stream", "".join(lines).encode())
    events = streamed_to_anthropic(through)
    assert events == streamed_to_anthropic(direct)
    assert len(events) == len(MESSAGE_EVENTS)
    assert [call.path for call in wire.calls] == ["/v1/messages"] * 2


AGENT = """
import json, os, sys, urllib.request
url = sys.argv[1]
assert url == os.environ["OPENAI_BASE_URL"] == os.environ["OPENAI_API_BASE"]
assert url == sys.argv[2] + "/v1"
assert os.environ["ANTHROPIC_BASE_URL"] == sys.argv[2]
texts = ["It is 08:00:00Z. " + "word " * 90, "first"]
for turn in range(4):
    if turn == 2:
        texts[0] = texts[0].replace("00:00", "03:27")
    messages = [{"role": "user" if index else "system", "content": text}
                for index, text in enumerate(texts)]
    body = {"model": "null", "stream": True, "max_tokens": 4, "messages": messages,
            "stream_options": {"include_usage": True}}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-secret-key"}
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request).read()
    texts.append(f"confidential words of turn {turn}")
sys.exit(3)
"""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `lab record` printed and wrote for a small agent, without and with its texts."""
    folder = tmp_path_factory.mktemp("recordings")
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    how = Behaviour(first_ms=1.0, gap_ms=0.5, has_cache=True)
    outcomes: dict[str, Any] = {}
    with null_server(NullSettings(models={"null": how})) as server:
        for name, options in (("plain", []), ("with text", ["--keep-text"])):
            out = folder / name
            command = ["record", "--url", server.url, "--port", "0", "--out", str(out)]
            program = ["--", sys.executable, str(agent), "{url}", "{base}"]
            outcome = run_lab(*command, "--no-plot", *options, *program)
            (path,) = out.glob("*-record.jsonl")
            outcomes[name] = (outcome, path)
    yield outcomes


def test_the_agent_is_recorded_until_it_ends(recordings: dict[str, Any]) -> None:
    outcome, path = recordings["plain"]
    assert outcome[0] == 3  # the agent's
    assert "1 of 4 calls broke the cache" in outcome[1]
    assert "08:0[0:00 -> 3:27]Z" in outcome[1]  # on the terminal only
    calls: tuple[Any, ...] = results.read([path]).findings
    assert [call.turn for call in calls] == [1, 2, 3, 4]
    assert calls[2].cause.what == "a time of day"
    assert calls[2].cause.character == len("It is 08:0")


def test_neither_keys_nor_texts_are_stored(recordings: dict[str, Any]) -> None:
    written = recordings["plain"][1].read_text()
    for secret in ("sk-secret-key", "confidential", "word word", "08:0", "agent.py"):
        assert secret not in written


def test_with_keep_text_the_bodies_can_be_replayed(recordings: dict[str, Any]) -> None:
    written = recordings["with text"][1].read_text()
    bodies = [json.loads(line)["body"] for line in written.splitlines()]
    assert bodies[3]["messages"][-1]["content"] == "confidential words of turn 2"
    assert "sk-secret-key" not in written


def test_the_bill_is_shown_again_later(recordings: dict[str, Any]) -> None:
    shown = run_lab("show", recordings["plain"][1])[1]
    assert "1 of 4 calls broke the cache" in shown
    assert "08:0[" not in shown


def test_a_report_has_a_section_on_the_recording(
    recordings: dict[str, Any], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    run_lab("report", str(recordings["plain"][1]), "--file", str(page))
    text = page.read_text()
    assert "Conversations and caches" in text
    assert "message 1 (system)" in text


STRANGE = {
    "NaN": b'{"messages": %s, "temperature": NaN}',
    "an infinity": b'{"messages": %s, "logit_bias": {"5": -Infinity}}',
    "a float beyond all": b'{"messages": %s, "presence_penalty": 1e999}',
    "a NaN in a tool": b'{"messages": %s, "tools": [{"function": {"default": NaN}}]}',
    "a NaN in a part": b'{"messages": [{"role": "user", "content": [{"x": NaN}]}], "m": %s}',
    "deep parts": b'{"m": %%s, "messages": [{"role": "user", "content": [%s]}]}'
    % (b"[" * 960 + b"1" + b"]" * 960),
    "half a letter": b'{"messages": %s, "model": "\\ud83d"}',
    "a huge integer": b'{"messages": %%s, "seed": %s}' % (b"9" * 400),
}
GOOD = b'{"messages": %s, "temperature": 0.7, "top_p": 1e-3, "stream": false}'


@pytest.mark.parametrize("keeps_text", [False, True])
@pytest.mark.parametrize("body", STRANGE.values(), ids=STRANGE)
def test_a_strange_body_ends_no_recording(
    tmp_path: Path, body: bytes, keeps_text: bool
) -> None:
    path = tmp_path / "recording.jsonl"
    setup = RecordingSetup(
        path=path,
        machine=MACHINE,
        access=access("http://127.0.0.1:9"),
        keeps_text=keeps_text,
        show=lambda call: None,
    )
    messages = json.dumps([{"role": "user", "content": TEXTS[0]}]).encode()
    with CallRecorder(setup) as recorder:
        for request in (body, GOOD, GOOD):
            call = ProxiedCall("/v1/chat/completions", True, "2026-01-01T00:00:00Z", 0)
            call.request += request % messages
            call.status = 200
            recorder.keep(call)
    read = results.read([path])
    assert not read.skipped
    assert len(read.findings) == len(recorder.calls) >= 2
    if recorder.problem is None:
        assert len(recorder.calls) == 3
    else:
        assert "could not be recorded" in recorder.problem.what
    if keeps_text:
        findings: tuple[Any, ...] = read.findings
        assert findings[-1].body["temperature"] == 0.7


def test_numbers_that_json_lacks_are_stored_as_null(tmp_path: Path) -> None:
    call = ProxiedCall("/v1/chat/completions", True, "", 0)
    call.request += b'{"a": NaN, "b": [Infinity, -1e999], "c": 0.5, "d": 3, "e": null}'
    assert body_of(call) == {"a": None, "b": [None, None], "c": 0.5, "d": 3, "e": None}
