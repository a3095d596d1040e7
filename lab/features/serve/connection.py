"""A connection to a server: bytes are stamped when they arrive, and parsed later.

The stamp is taken when select() returns (Arrivals), before any Python code runs for the bytes. Parsing HTTP takes as
long as the gap between some arrivals, and would delay the stamps of other requests. So the bytes of a chunked answer
wait here with their stamps until the answer has ended, no byte came for a while, or too many wait. All connections of a
plan share one Turn, which lets the loop check for arrivals between two pieces of parsing work.
"""

from __future__ import annotations

import asyncio
import re
import selectors
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import UTC, datetime

from lab.features.serve.send_plan import PIECE_BYTES, SendPlan

HELD_S = 0.5
"""After this time without new bytes, held bytes are parsed before the end of the answer."""

MOST_HELD, MOST_HELD_BY_ALL = 1 << 21, 1 << 24
"""Held memory of one answer, and of all in flight, beyond which parsing begins before the end. Beyond twice that the
client pauses the server."""

READ_AFTER_S = 0.005
"""Delay before an ended answer is parsed, so that the server (on the same cores) can accept the next request first."""

FRESH_S = 2.0
"""An idle connection is reused within this time. Servers hang up after 5 s (uvicorn, cpp-httplib)."""

_PINGS = re.compile(rb"(?:[0-9a-fA-F]++\r\n|:[^\r\n]*+|event: ?ping[\r\n]+data:[^\r\n]*+|data: ?(?=[\r\n])|[\r\n])*+")
"""Bytes that only keep a connection open: comments, pings, events without data, and the frames of chunks."""

_END = b"\r\n0\r\n\r\n"  # the end of a chunked answer; if a chunk's content ends so, reading continues


class Stalled(Exception):
    """The server sent only pings for too long."""


class Endless(Exception):
    """The server sent more events than the request can need."""


class TimedOut(Exception):
    """The answer was not complete in time. All bytes that arrived have been read."""


class Arrivals(selectors.SelectSelector):
    """select(), with the time of its last return. Its timeouts are exact to about 50 us (epoll: 1 ms)."""

    ns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        self.ns = time.perf_counter_ns()
        return ready


class Turn:
    """Allows one piece of work each time that the loop has polled its sockets."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for this task's turn."""
        async with self._lock:
            await asyncio.sleep(0)


class Connection(asyncio.Protocol):
    """A socket, and the answer that is arriving."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._transport: asyncio.Transport | None = None
        self._answer: Incoming | None = None
        self._free_ns = 0  # when it became free
        self.is_open = False
        self.was_used = False

    @property
    def is_ready(self) -> bool:
        """Whether a request can be sent: it is open and free, and was used within FRESH_S."""
        is_fresh = time.perf_counter_ns() - self._free_ns < FRESH_S * 1e9
        return self.is_open and self._answer is None and is_fresh

    def begin(self, answer: Incoming) -> None:
        """Assign all further bytes to `answer`."""
        self.was_used, self._answer = True, answer

    def free(self, answer: Incoming) -> None:
        """Release the connection, if `answer` still uses it."""
        if self._answer is answer:
            self._answer, self._free_ns = None, time.perf_counter_ns()

    def abort(self, answer: Incoming | None = None) -> None:
        """Hang up; with `answer` only if that one still uses the connection."""
        if answer is None or self._answer is answer:
            self.is_open = False
            if self._transport:
                self._transport.abort()

    def write(self, data: bytes) -> None:
        if self._transport:
            self._transport.write(data)

    def pause(self, is_paused: bool) -> None:
        """Pause or resume reading, so that the server has to wait."""
        if self._transport and not self._transport.is_closing():
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open, self._free_ns = transport, True, time.perf_counter_ns()

    def data_received(self, data: bytes) -> None:
        if self._answer:
            self._answer.add(self._arrivals.ns, data)

    def connection_lost(self, problem: Exception | None) -> None:
        self.is_open = False
        if self._answer:
            self._answer.lose(problem)


@dataclass(eq=False)
class Incoming:
    """One request and its answer on a connection.

    A complete chunked answer frees its connection and sets `over` before it is parsed, so that the next request need
    not wait.
    """

    connection: Connection
    plan: SendPlan
    most_events: int  # of the answer
    turn: Turn
    over: asyncio.Event
    due_ns: int | None = None  # the planned time of sending
    started_at: str = ""
    sent_ns: int | None = None  # when the request was written
    first_ns: int | None = None  # when the first byte of the answer arrived
    last_ns: int | None = None  # when the last byte arrived
    _moved_ns: int | None = None  # when something other than a ping last arrived
    _n_events: int = 0
    _waiting: deque[tuple[int, bytes]] = field(default_factory=deque)
    _n_waiting: int = 0
    _tail: bytes = b""
    _is_open: bool = True
    _is_held: bool = True
    _is_whole: bool = False  # complete, and not yet read
    _is_good: bool = False  # whether the connection can be used again after a chunked answer
    _is_paused: bool = False
    _problem: Exception | None = None
    _reader: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        self.started_at = utc_now()
        self.connection.begin(self)

    @property
    def _most_held(self) -> int:
        return min(MOST_HELD, MOST_HELD_BY_ALL // self.plan.n_at_once)

    # the connection's side

    def add(self, ns: int, data: bytes) -> None:
        self.last_ns = ns
        self._waiting.append((ns, data))
        self._n_waiting += len(data) + PIECE_BYTES
        if self.first_ns is None:
            self.first_ns = ns
            head, end, _ = data.partition(b"\r\n\r\n")
            head = head.lower()
            self._is_held = bool(end) and b"transfer-encoding: chunked" in head
            self._is_good = self._is_held and b" 200" in head[:12] and b"\nconnection: close" not in head
        is_ping = _PINGS.fullmatch(data) is not None
        self._n_events += 0 if is_ping else data.count(b"data:")
        if not is_ping or not self._n_events:  # during prefill a server may send pings for any time
            self._moved_ns = ns
        self._tail = self._tail[-len(_END) :] + data[-len(_END) :]
        is_whole = self._tail.endswith(_END)
        if is_whole and self._is_good:
            self._is_open, self._is_whole = False, True
            self.connection.free(self)
            self.over.set()
        if not self._is_held or is_whole or self._n_waiting > self._most_held:
            self._release()
        if self._n_events > self.most_events and self._is_open:
            self.lose(Endless(f"more than {self.most_events:,} events arrived"))
            self.connection.abort(self)
        if self._n_waiting > 2 * self._most_held and not self._is_paused:
            self._is_paused = True
            self.connection.pause(True)

    def lose(self, problem: Exception | None) -> None:
        """The connection has ended."""
        self._is_open, self._problem = False, self._problem or problem
        self._release()

    def _release(self) -> None:
        self._is_held = False
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    # the side of the one that sends and reads

    async def send(self, request: bytes) -> None:
        """Write the request at its planned time."""
        while self.due_ns is not None and (left_ns := self.due_ns - time.perf_counter_ns()) > 0:
            await asyncio.sleep(left_ns / 1e9)
        self.sent_ns = time.perf_counter_ns()
        self.connection.write(request)
        self.started_at = utc_now()

    async def read(self) -> tuple[int, bytes]:
        """The next bytes with their stamp; empty at the end of the connection."""
        while self._is_open and (self._is_held or not self._waiting):
            await self._wait()
        if self._is_whole:
            self._is_whole = False
            await asyncio.sleep(READ_AFTER_S)
        await self.turn.wait()
        if not self._waiting:
            if isinstance(self._problem, Endless):
                raise self._problem
            if self._problem:
                raise ConnectionError(str(self._problem))
            return 0, b""
        ns, data = self._waiting.popleft()
        self._n_waiting -= len(data) + PIECE_BYTES
        if self._is_paused and self._n_waiting < self._most_held:
            self._is_paused = False
            self.connection.pause(False)
        return ns, data

    async def _wait(self) -> None:
        """Wait up to HELD_S for bytes to read. Raises Stalled or TimedOut after all arrived bytes have been read."""
        now = time.perf_counter_ns()
        left_s = self.plan.timeout_s - (now - (self.sent_ns or 0)) / 1e9
        is_stalled = self._moved_ns is not None and (now - self._moved_ns) / 1e9 > self.plan.stall_s
        if left_s <= 0 or is_stalled:
            if not self._waiting:
                raise TimedOut if left_s <= 0 else Stalled
            self._is_held = False
            return
        self._reader = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(min(HELD_S, left_s)):
                await self._reader
        except TimeoutError:
            quiet_s = 0.0 if self.last_ns is None else (time.perf_counter_ns() - self.last_ns) / 1e9
            if quiet_s > HELD_S and self._waiting:
                self._is_held = False
        finally:
            self._reader = None

    def end(self, is_reusable: bool) -> None:
        """Stop reading: free the connection, or hang up."""
        if is_reusable:
            self.connection.free(self)
        else:
            self._is_open = False
            self.connection.abort(self)


async def connect(
    host: str, port: int, timeout_s: float, arrivals: Arrivals, certificates: ssl.SSLContext | None
) -> Connection:
    """A new connection. Raises OSError (also for certificates) or TimeoutError."""
    tls = {"ssl": certificates, "server_hostname": host} if certificates else {}
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        _, connection = await loop.create_connection(lambda: Connection(arrivals), host, port, **tls)  # type: ignore[call-overload]
    assert isinstance(connection, Connection)
    return connection


def utc_now() -> str:
    """Such as 2026-01-31T12:00:00.123456Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
