"""A request over a connection of its own, and the bytes of its answer with their stamps.

A stamp is taken when select() returns (Arrivals), before any Python code runs for the bytes.
Parsing HTTP would delay the stamps of other requests, so the bytes of a chunked answer wait with
their stamps for its end, or until no byte came for a while, or too many wait. (The HTTP library
itself stamps nothing before its own parsing, so only its parser, h11, is used here.)
"""

from __future__ import annotations

import asyncio
import selectors
import ssl
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache

import h11

from lab.core import request as kinds
from lab.remote.access import Access, name_or_none
from lab.remote.answer import (
    AnswerBody,
    AnswerHead,
    AnswerMemory,
    Failure,
    MemoryInFlight,
    head_of,
    json_reply,
)
from lab.remote.formats import Ask, JsonReply

CONNECT_S = 10.0
GRACE_S = 3.0  # additional time for reading the bytes that arrived before the timeout
LOOK_S = 0.5
MOST_HELD = 1 << 21
"""After this time without new bytes, or beyond these bytes, those that wait are parsed before the
answer's end."""

MOST_HEAD_BYTES = 100_000  # of an answer's headers
PIECE_BYTES = 300  # of memory that each arrival takes besides its bytes
DONE_S = 0.1  # after [DONE] the answer is over, though the server may not end it
DATE = "%Y-%m-%dT%H:%M:%S.%fZ"
_END = b"\r\n0\r\n\r\n"  # of a chunked answer
_DONE_LETTERS = b"[DONE]"
_TAIL_BYTES = 64
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
    access: Access | None = field(default=None, repr=False)
    memory: MemoryInFlight = field(default_factory=MemoryInFlight)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def has_key(self) -> bool:
        return any(name == "Authorization" for name, _ in self.headers)

    def target_shown(self, location: str) -> str:
        """Where an answer redirects, without its query; "" if it may not be shown."""
        target = location.partition("?")[0]
        if self.access is None or "@" in target:
            return ""
        return name_or_none(target, self.access) or ""

    async def wait_for_turn(self) -> None:
        """Wait for this task's turn: one each time that the loop has polled its sockets."""
        async with self.lock:
            await asyncio.sleep(0)


@dataclass
class Received:
    """The bytes that have arrived on a connection; those that are not parsed wait in `unparsed`
    with their stamps."""

    first_ns: int | None = None
    last_ns: int | None = None
    begin: bytes = b""
    end: bytes = b""
    is_chunked: bool = False
    unparsed: deque[tuple[int, bytes]] = field(default_factory=deque)
    n_unparsed_bytes: int = 0
    connection_problem: Exception | None = None  # that ended the connection

    def add(self, ns: int, data: bytes) -> None:
        if self.first_ns is None:
            self.first_ns = ns
            self.begin = data[:200]
            self.is_chunked = b"transfer-encoding: chunked" in data.lower()
        self.last_ns = ns
        self.end = (self.end + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        self.unparsed.append((ns, data))
        self.n_unparsed_bytes += len(data)

    def add_end(self, problem: Exception | None) -> None:
        """The connection has ended, which the parser reads as no bytes."""
        self.connection_problem = problem
        self.unparsed.append((self.last_ns or 0, b""))

    def take(self) -> tuple[int, bytes]:
        """The next bytes to parse, and their stamp."""
        ns, data = self.unparsed.popleft()
        self.n_unparsed_bytes -= len(data)
        return ns, data

    def is_to_be_parsed_now(self) -> bool:
        """Whether parsing need not wait: it delays no stamp of an answer that comes as a whole or
        may have ended, and too many bytes may wait."""
        if not self.is_chunked or self.n_unparsed_bytes > MOST_HELD:
            return True
        return self.end.endswith(_END) or _DONE_LETTERS in self.end

    def is_quiet(self, now: int) -> bool:
        """Whether no byte came for a while."""
        return self.last_ns is not None and now - self.last_ns > LOOK_S * 1e9

    def why_not_http(self) -> str:
        """Why what arrived is no answer of HTTP."""
        if not self.begin:
            return "the server closed the connection without an answer"
        if self.begin.startswith(_TLS_ALERT):
            return "the server uses TLS, but the address begins with http://"
        if not self.begin.startswith(b"HTTP/"):
            return "the program there does not use HTTP"
        return "the answer is not complete, or no valid HTTP"


class Exchange(asyncio.Protocol):
    """A request over a connection of its own, and the part of its answer that has arrived.

    Several servers hang up after each answer without announcing it, so no connection is used twice;
    it is open before the request is sent. A complete answer sets `frees_turn` before its JSON is
    parsed: the next request need not wait.
    """

    transport: asyncio.Transport | None = None

    def __init__(self, route: Route, ask: Ask) -> None:
        self.route = route
        self.ask = ask
        self.started_at = datetime.now(UTC).strftime(DATE)
        self.sent_ns: int | None = None  # when the request was written
        self.received = Received()
        self.memory = AnswerMemory(route.memory)
        self.head = AnswerHead()
        self.body = AnswerBody(self.head, ask, self.memory)
        self.problem: Failure | None = None
        self.frees_turn = asyncio.Event()
        self._http = h11.Connection(h11.CLIENT, MOST_HEAD_BYTES)
        self._has_hung_up = False
        self._wakes_sender = asyncio.Event()

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
        if self._has_hung_up:
            return
        if self.sent_ns is None:
            self._end(Failure(kinds.TOO_EARLY, "bytes arrived before the request was sent"))
            return
        self.received.add(self.route.arrivals.ns, data)
        try:
            self.memory.add(len(data) + PIECE_BYTES)
        except Failure as problem:
            self._end(problem)
            return
        if self.received.is_to_be_parsed_now():
            self._wakes_sender.set()

    def connection_lost(self, problem: Exception | None) -> None:
        self.received.add_end(problem)
        self._wakes_sender.set()

    def hang_up(self) -> None:
        """Close the connection."""
        self._has_hung_up = True
        if self.transport is not None:
            self.transport.abort()

    def _end(self, problem: Failure | None = None) -> None:
        """No more bytes are read."""
        if self._has_hung_up:
            return
        self.problem = problem
        self.hang_up()
        self._wakes_sender.set()
        if problem is None and self.body.is_stream:
            self.frees_turn.set()

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
        while not self._has_hung_up:
            now = time.perf_counter_ns()
            left_s = self.route.timeout_s - (now - self.sent_ns) / 1e9
            is_woken = self._wakes_sender.is_set() or self.received.is_quiet(now)
            if is_woken or left_s <= 0 or now - parsed_ns > self.route.stall_s * 1e9:
                self._wakes_sender.clear()
                parsed_ns = now
                await self._parse(max(left_s, GRACE_S))
            if not self._has_hung_up:
                self._check_time(now, left_s)
            if not self._has_hung_up:
                await self._sleep(left_s)

    def _as_http(self) -> bytes | None:
        """The bytes of the request; None if a header cannot be sent."""
        body = self.ask.body.encode()
        headers = [*self.route.headers, ("Content-Length", str(len(body)))]
        method = "POST" if body else "GET"
        target = self.ask.path or self.route.path
        try:
            head = self._http.send(h11.Request(method=method, target=target, headers=headers))
            data = self._http.send(h11.Data(data=body))
            end = self._http.send(h11.EndOfMessage())
        except h11.LocalProtocolError:  # its message may hold a header
            return None
        return (head or b"") + (data or b"") + (end or b"")

    async def _sleep(self, left_s: float) -> None:
        """Wait until something is to be done, or it is time to look."""
        look_s = DONE_S if self.body.has_done() else LOOK_S
        with suppress(TimeoutError):
            async with asyncio.timeout(min(look_s, left_s)):
                await self._wakes_sender.wait()

    def _check_time(self, now: int, left_s: float) -> None:
        """End the exchange if its time is over, or no byte came for too long."""
        route = self.route
        body = self.body
        if left_s <= 0:
            what = "no complete answer" if self.received.begin else "no answer"
            self._end(
                Failure(kinds.TIMEOUT, f"{what} after {route.timeout_s:g} s (--timeout)")
            )
            return
        if not body.pieces:
            return
        latest_ns, _ = body.pieces[-1]
        if body.has_done() and now - latest_ns > DONE_S * 1e9:
            self._end()
        elif now - latest_ns > route.stall_s * 1e9 and body.has_content():
            self._end(Failure(kinds.STALLED, f"no byte arrived for {route.stall_s:g} s"))

    # The answer

    async def _parse(self, most_s: float) -> None:
        """Parse what has arrived, for at most this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.received.unparsed and not self._has_hung_up:
                    ns, data = self.received.take()
                    self._parse_piece(ns, data)
                    await self.route.wait_for_turn()

    def _parse_piece(self, ns: int, data: bytes) -> None:
        """Parse bytes that arrived at `ns`; no bytes are the end of the connection."""
        connection_problem = self.received.connection_problem
        if not data and connection_problem:
            self._end(Failure(kinds.LOST, str(connection_problem)))
            return
        try:
            self._read(ns, data)
        except h11.RemoteProtocolError:
            self._end(Failure(kinds.LOST, self.received.why_not_http()))
        except Failure as problem:
            self._end(problem)

    def _read(self, ns: int, data: bytes) -> None:
        """Read bytes that arrived at `ns`. Raises Failure for more than an answer may have."""
        self._http.receive_data(data)
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                return
            if isinstance(event, h11.Data):
                self.body.add(ns, bytes(event.data))
            elif isinstance(event, h11.Response):
                self.head = head_of(event)
                self.body = AnswerBody(self.head, self.ask, self.memory)
            elif not isinstance(event, h11.InformationalResponse):  # the end of the answer
                self._end()
                return

    def json_reply(self) -> JsonReply:
        """The JSON object of an answer that is not a stream."""
        target = self.route.target_shown(self.head.location)
        return json_reply(self.head, self.body, self.route.has_key, target)
