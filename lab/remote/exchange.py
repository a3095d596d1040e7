"""A request over a connection of its own, and the bytes of its answer with their stamps.

A stamp is taken when select() returns (Arrivals), before any Python code runs for the bytes.
Parsing HTTP would delay the stamps of other requests, so the bytes of a chunked answer wait with
their stamps for its end, or until no byte came for a while, or too many wait. (The HTTP library
itself stamps nothing before its own parsing, so only its parser, h11, is used here.)
"""

from __future__ import annotations

import asyncio
import json
import re
import selectors
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache

import h11

from lab.core import request as kinds
from lab.remote.compression import PLAIN, READABLE, decompressor
from lab.remote.formats import (
    OTHER_ERROR,
    Ask,
    JsonReply,
    error_in,
    error_words,
    status_words,
)
from lab.remote.streams import StreamReader

CONNECT_S = 10.0
GRACE_S = 3.0  # additional time for reading the bytes that arrived before the timeout
LOOK_S = 0.5
MOST_HELD = 1 << 21
"""After this time without new bytes, or beyond these bytes, those that wait are parsed before the
answer's end."""

MOST_HEAD_BYTES = 100_000
MOST_LINE_BYTES = 1_000_000
MOST_JSON_BYTES = 3_000_000
MOST_ANSWER_BYTES = 64_000_000
"""Maximum bytes of an answer's headers, of a line of a stream (its JSON takes up to 30 times the
memory), of an answer that is not a stream (60 times), and of all answers in flight, with
PIECE_BYTES for each arrival."""

PIECE_BYTES = 300
LINES_PER_TOKEN = 20
SPARE_LINES = 2_000
"""Maximum ends of lines in a stream for each requested token, and the spare ones: for pings during
a long prefill."""

DONE_S = 0.1  # after [DONE] the answer is over, though the server may not end it
DATE = "%Y-%m-%dT%H:%M:%S.%fZ"
_END = b"\r\n0\r\n\r\n"  # of a chunked answer
_DONE = re.compile(rb'(?:^|[\r\n])data: ?"?\[DONE\]"?\s*$')
_DONE_LETTERS = b"[DONE]"
_TAIL_BYTES = 64
_STREAM_BEGINS = (b"data:", b"event:", b":")
_TLS_ALERT = b"\x15\x03"
_NO_TLS = ("WRONG_VERSION_NUMBER", "UNEXPECTED_EOF", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")


class Arrivals(selectors.SelectSelector):
    """select(), with the time of its last return. Its timeouts are exact to about 50 us (epoll: 1
    ms)."""

    ns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        self.ns = time.perf_counter_ns()
        return ready


@cache
def certificates() -> ssl.SSLContext:
    """The system's certificates; reading them is slow."""
    import httpx2

    return httpx2.create_ssl_context()


class Failure(Exception):
    """The class of a failure, and a description in the lab's words."""

    def __init__(self, failure: str, error: str) -> None:
        super().__init__(failure)
        self.failure = failure
        self.error = error


@dataclass
class Route:
    """What the requests of a plan share: where they go, whose turn it is to parse, and the memory
    that they use."""

    host: str
    port: int
    path: str
    certificates: ssl.SSLContext | None
    headers: list[tuple[str, str]] = field(repr=False)
    arrivals: Arrivals
    timeout_s: float
    stall_s: float
    n_kept: int = 0  # bytes in memory of the answers in flight
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def wait_for_turn(self) -> None:
        """Wait for this task's turn: one each time that the loop has polled its sockets."""
        async with self.lock:
            await asyncio.sleep(0)


class Exchange(asyncio.Protocol):
    """A request over a connection of its own, and the part of its answer that has arrived.

    Several servers hang up after each answer without announcing it, so no connection is used twice;
    it is open before the request is sent. A complete answer sets `over` before its JSON is parsed:
    the next request need not wait.
    """

    transport: asyncio.Transport | None = None

    def __init__(self, route: Route, ask: Ask) -> None:
        self.route = route
        self.ask = ask
        self.http = h11.Connection(h11.CLIENT, MOST_HEAD_BYTES)
        self.started_at = datetime.now(UTC).strftime(DATE)
        self.sent_ns: int | None = None  # when the request was written
        self.first_ns: int | None = None  # when the first byte of the answer arrived
        self.last_ns: int | None = None  # when the last byte arrived
        self.http_status: int | None = None
        self.content_type = ""
        self.retry_after = ""
        self.is_stream = False
        self._may_be_stream = False  # whatever its type says
        self._encoding = ""
        self._decompress: Callable[[bytes], bytes] | None = None
        self.pieces: list[tuple[int, bytearray]] = []  # the body
        self.problem: Failure | None = None
        self.over = asyncio.Event()
        self._n_kept = 0  # bytes of this answer that are kept
        self._n_since_line_end = 0
        self._n_line_ends = 0
        self._end_of_connection: Exception | None = None
        self._waiting: deque[tuple[int, bytes]] = deque()  # what has arrived and is not parsed
        self._n_waiting = 0  # its bytes
        self._is_chunked = False
        self._is_over = False
        self._begin = b""  # of what arrived
        self._tail = b""
        self._body_tail = b""
        self._checked: tuple[int, bool] = (0, False)  # number of pieces, with content
        self._news = asyncio.Event()

    # The connection

    async def connect(self) -> None:
        """Open the connection. A failure is in `problem`."""
        route = self.route
        server_hostname = route.host if route.certificates else None
        connect = asyncio.get_running_loop().create_connection
        try:
            async with asyncio.timeout(CONNECT_S):
                await connect(
                    lambda: self,
                    route.host,
                    route.port,
                    ssl=route.certificates,
                    server_hostname=server_hostname,
                )
        except TimeoutError:
            self._end(Failure(kinds.TIMEOUT, f"no connection within {CONNECT_S:g} s"))
        except ConnectionRefusedError:
            self._end(Failure(kinds.REFUSED, "Connection refused"))
        except OSError as problem:  # also for certificates
            self._end(Failure(kinds.REFUSED, self._why_refused(problem)))

    def _why_refused(self, problem: OSError) -> str:
        """Why no connection was made; the reason of an end within the handshake of TLS is empty."""
        reason = problem.strerror or str(problem)
        if not self.route.certificates:
            return reason or "the connection was closed"
        is_closed = isinstance(problem, ConnectionError) or not reason
        if is_closed or any(sign in reason.upper() for sign in _NO_TLS):
            return "the server does not use TLS, but the address begins with https://"
        return reason

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._is_over:
            self._add(self.route.arrivals.ns, data)

    def connection_lost(self, problem: Exception | None) -> None:
        self._waiting.append((self.last_ns or 0, b""))
        self._end_of_connection = problem
        self._news.set()

    def hang_up(self) -> None:
        """Close the connection."""
        self._is_over = True
        if self.transport is not None:
            self.transport.abort()

    def release(self) -> None:
        """The bytes of this answer are no longer kept."""
        self.route.n_kept -= self._n_kept
        self._n_kept = 0

    def _end(self, problem: Failure | None = None) -> None:
        """No more bytes are read."""
        if self._is_over:
            return
        self.problem = problem
        self.hang_up()
        self._news.set()
        if problem is None and self.is_stream:
            self.over.set()

    # The request

    async def send(self) -> None:
        """Send the request, and wait until its answer has ended. A failure is in `problem`."""
        written = self._as_http()
        if written is None:
            self._end(Failure(kinds.BAD_REQUEST, "the request cannot be written as HTTP"))
            return
        self.started_at = datetime.now(UTC).strftime(DATE)
        self.sent_ns = time.perf_counter_ns()
        assert self.transport is not None, "connect() comes first"
        self.transport.write(written)
        parsed_ns = self.sent_ns
        while not self._is_over:
            now = time.perf_counter_ns()
            left_s = self.route.timeout_s - (now - self.sent_ns) / 1e9
            is_time_to_parse = now - parsed_ns > self.route.stall_s * 1e9 or left_s <= 0
            if self._news.is_set() or self._is_quiet(now) or is_time_to_parse:
                self._news.clear()
                parsed_ns = now
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(left_s, GRACE_S)):
                        await self._parse()
            if not self._is_over:
                self._check_time(now, left_s)
            if not self._is_over:
                look_s = DONE_S if self._has_done() else LOOK_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(look_s, left_s)):
                        await self._news.wait()

    def _as_http(self) -> bytes | None:
        """The bytes of the request; None if a header cannot be sent."""
        body = self.ask.body.encode()
        headers = [*self.route.headers, ("Content-Length", str(len(body)))]
        method = "POST" if body else "GET"
        target = self.ask.path or self.route.path
        try:
            head = self.http.send(h11.Request(method=method, target=target, headers=headers))
            data = self.http.send(h11.Data(data=body))
            end = self.http.send(h11.EndOfMessage())
        except h11.LocalProtocolError:  # its message may hold a header
            return None
        return (head or b"") + (data or b"") + (end or b"")

    def _is_quiet(self, now: int) -> bool:
        return self.last_ns is not None and now - self.last_ns > LOOK_S * 1e9

    def _check_time(self, now: int, left_s: float) -> None:
        """End the exchange if its time is over, or no byte came for too long."""
        route = self.route
        if left_s <= 0:
            what = "no complete answer" if self._begin else "no answer"
            self._end(
                Failure(kinds.TIMEOUT, f"{what} after {route.timeout_s:g} s (--timeout)")
            )
        elif not self.pieces:
            return
        elif self._has_done() and now - self.pieces[-1][0] > DONE_S * 1e9:
            self._end()
        elif now - self.pieces[-1][0] > route.stall_s * 1e9 and self._has_begun():
            self._end(Failure(kinds.STALLED, f"no byte arrived for {route.stall_s:g} s"))

    def _has_done(self) -> bool:
        """Whether the last line so far is [DONE]."""
        return self.is_stream and _DONE.search(self._body_tail) is not None

    def _has_begun(self) -> bool:
        """Whether the answer has any content: before it the server may read a long prompt."""
        if not self.is_stream:
            return True
        n_pieces = len(self.pieces)
        if self._checked[0] != n_pieces:
            reader = StreamReader(self.pieces, self.sent_ns or 0)
            for _ in reader.read():
                pass
            has_content = bool({*kinds.GENERATED} & {*reader.answer().events.kind})
            self._checked = (n_pieces, has_content)
        return self._checked[1]

    # The answer

    def _add(self, ns: int, data: bytes) -> None:
        """Keep bytes that arrived at `ns`."""
        if self.sent_ns is None:
            self._end(Failure(kinds.TOO_EARLY, "bytes arrived before the request was sent"))
            return
        if self.first_ns is None:
            self.first_ns = ns
            self._is_chunked = b"transfer-encoding: chunked" in data.lower()
        self.last_ns = ns
        self._waiting.append((ns, data))
        self._n_waiting += len(data)
        n_bytes = len(data) + PIECE_BYTES
        self._n_kept += n_bytes
        self.route.n_kept += n_bytes
        self._tail = self._tail[-len(_END) :] + data[-len(_END) :]
        if self.route.n_kept > MOST_ANSWER_BYTES:
            self._end(
                Failure(kinds.TOO_LARGE, f"more than {MOST_ANSWER_BYTES:,} bytes arrived")
            )
        elif not self._is_chunked or self._n_waiting > MOST_HELD or self._may_have_ended(data):
            self._news.set()

    def _may_have_ended(self, data: bytes) -> bool:
        """Whether a chunked answer, or its stream, may have ended with these bytes."""
        return self._tail.endswith(_END) or _DONE_LETTERS in data[-_TAIL_BYTES:]

    async def _parse(self) -> None:
        """Parse what has arrived; no bytes are the end of the connection."""
        while self._waiting and not self._is_over:
            ns, data = self._waiting.popleft()
            self._n_waiting -= len(data)
            try:
                if not data and self._end_of_connection:
                    raise Failure(kinds.LOST, str(self._end_of_connection))
                self._read(ns, data)
            except h11.RemoteProtocolError:
                self._end(Failure(kinds.LOST, self._wrong_protocol()))
            except Failure as problem:
                self._end(problem)
            await self.route.wait_for_turn()

    def _wrong_protocol(self) -> str:
        """Why what arrived is no answer of HTTP."""
        if not self._begin:
            return "the server closed the connection without an answer"
        if self._begin.startswith(_TLS_ALERT):
            return "the server uses TLS, but the address begins with http://"
        if not self._begin.startswith(b"HTTP/"):
            return "the program there does not use HTTP"
        return "the answer is not complete, or no valid HTTP"

    def _read(self, ns: int, data: bytes) -> None:
        """Read bytes that arrived at `ns`. Raises Failure for more than an answer may have."""
        self._begin = self._begin or data[:200]
        self.http.receive_data(data)
        while True:
            event = self.http.next_event()
            if event is h11.NEED_DATA:
                return
            if isinstance(event, h11.Data):
                self._keep(ns, bytes(event.data))
            elif isinstance(event, h11.Response):
                self._keep_head(event)
            elif not isinstance(event, h11.InformationalResponse):  # the end of the answer
                self._end()
                return

    def _keep_head(self, response: h11.Response) -> None:
        self.http_status = response.status_code
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in response.headers
        }
        self.content_type = headers.get("content-type", "").lower()
        retry_after = headers.get("retry-after", "")
        self.retry_after = seconds_until(retry_after)
        self._encoding = headers.get("content-encoding", "").strip().lower()
        is_lines = "ndjson" in self.content_type or "jsonl" in self.content_type
        is_document = "json" in self.content_type or "html" in self.content_type
        is_question = self.ask.path is not None
        self._may_be_stream = self.http_status == 200 and not is_question
        # any other type may be a stream: some servers call it text
        self.is_stream = self._may_be_stream and (is_lines or not is_document)

    def _keep(self, ns: int, data: bytes) -> None:
        """Keep a part of the body. Raises Failure for more than an answer may have."""
        if self._encoding not in PLAIN:
            data = self._decompressed(data)
        if not data:
            return
        if not self.pieces and data.lstrip().startswith(_STREAM_BEGINS):
            self.is_stream = self._may_be_stream
        self._body_tail = (self._body_tail + data)[-_TAIL_BYTES:]
        if self.pieces and self.pieces[-1][0] == ns:  # one arrival, in several chunks
            self.pieces[-1][1].extend(data)
        else:
            self.pieces.append((ns, bytearray(data)))
        if not self.is_stream:
            if self._n_kept > MOST_JSON_BYTES:
                raise Failure(kinds.TOO_LARGE, f"more than {MOST_JSON_BYTES:,} bytes arrived")
            return
        self._n_line_ends += data.count(b"\n") + data.count(b"\r")
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        if end < 0:
            self._n_since_line_end += len(data)
        else:
            self._n_since_line_end = len(data) - end - 1
        n_gen = self.ask.asked.n_gen
        most_lines = LINES_PER_TOKEN * n_gen + SPARE_LINES
        if self._n_since_line_end > MOST_LINE_BYTES:
            raise Failure(
                kinds.LONG_LINE, f"{self._n_since_line_end:,} bytes arrived without a line end"
            )
        if self._n_line_ends > most_lines:
            raise Failure(
                kinds.TOO_LARGE,
                f"more than {most_lines:,} lines arrived for at most {n_gen:,} requested tokens: "
                "the server ignores that limit",
            )

    def _decompressed(self, data: bytes) -> bytes:
        """What bytes of a compressed body add to it; Failure if they cannot be read. A server may
        compress though nobody asks it to."""
        if self._encoding not in READABLE:
            raise Failure(
                kinds.NO_STREAM, "the answer is compressed in a way nobody asked for"
            )
        if self._decompress is None:
            self._decompress = decompressor(self._encoding, data)
        try:
            plain = self._decompress(data)
        except ValueError:
            what = f"the answer is no valid {self._encoding}, or too large"
            raise Failure(kinds.NO_STREAM, what) from None
        self._n_kept += len(plain)
        self.route.n_kept += len(plain)
        if self.route.n_kept > MOST_ANSWER_BYTES:
            raise Failure(kinds.TOO_LARGE, f"more than {MOST_ANSWER_BYTES:,} bytes arrived")
        return plain

    # An answer that is not a stream

    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)

    def json_reply(self) -> JsonReply:
        """The JSON object of the answer, or why there is none. An array is the `data` of one:
        some servers list their models so."""
        status = self.http_status or 0
        try:
            parsed = json.loads(self.body())
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, list):
            parsed = {"data": parsed}
        if isinstance(parsed, dict):
            error = error_in(parsed)
        else:
            parsed = None
            error = self._what_else()
        if status in (401, 403):
            has_key = any(name == "Authorization" for name, _ in self.route.headers)
            error = "the server rejects this key" if has_key else "the server requires a key"
        if status != 200:
            what = status_words(status)
            if self.retry_after:
                what = f"{what}, Retry-After: {self.retry_after}"
            error = ": ".join(filter(None, [what, error]))
        return JsonReply(status, parsed, error)

    def _what_else(self) -> str:
        """What the answer is that is not a JSON object."""
        text = self.body()[:2000].decode(errors="replace")
        if not text.strip():
            return "the answer is empty"
        if "html" in self.content_type:
            return "the answer is a page (text/html)"
        sentence = error_words(text)
        if sentence == OTHER_ERROR:
            return "the answer is no JSON object"
        return sentence

    def refusal(self) -> Failure:
        """Why an answer to a request for a stream is none."""
        reply = self.json_reply()
        status = self.http_status or 0
        if status == 200 and (reply.parsed is None or reply.error is None):
            return Failure(kinds.NO_STREAM, reply.error or "the answer is JSON, not a stream")
        failure = kinds.BAD_REQUEST
        if status == 200:
            failure = kinds.ERROR_INSIDE
        elif status == 429:
            failure = kinds.RATE_LIMITED
        elif status >= 500:
            failure = kinds.SERVER_ERROR
        return Failure(failure, reply.error or status_words(status))


def seconds_until(retry_after: str) -> str:
    """The seconds of a header Retry-After, which may be a date; "" if it is neither."""
    if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", retry_after):
        return retry_after
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return ""
    if date.tzinfo is None:
        return ""
    left_s = (date - datetime.now(UTC)).total_seconds()
    return f"{min(max(0.0, left_s), 999_999):.0f}"
