"""One request over one connection: send it, stamp and parse its answer, and classify its failures.

The stamp is taken when select() returns (Arrivals), before any Python code runs for the bytes. Parsing HTTP takes as
long as the gap between some arrivals, and would delay the stamps of other requests. So the bytes of a chunked answer
wait with their stamps until the answer has ended, no byte came for a while, or too many wait. All requests of a plan
share one Target, which gives turns: the loop checks for arrivals between two pieces of parsing. (The HTTP library
itself stamps nothing before its own parsing, so only its parser, h11, is used here.)
"""

from __future__ import annotations

import asyncio
import re
import selectors
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import urlsplit

import h11

from lab.core import request as kinds
from lab.core.record import FAILED, OK
from lab.core.request import Events, Request
from lab.features.serve.access import Access, all_headers, hidden, read_json
from lab.features.serve.formats import Stream, read_stream
from lab.features.serve.send_plan import (
    LINES_PER_TOKEN,
    MOST_ANSWER_BYTES,
    MOST_LINE_BYTES,
    PIECE_BYTES,
    SPARE_LINES,
    Ask,
    SendPlan,
)

CONNECT_S = 10.0
GRACE_S = 3.0
"""Additional time for reading the bytes that arrived before the timeout."""

HUNG_UP_S = 1.0
"""A request fails within this time if the server closed the connection just before."""

FRESH_S = 2.0
"""An idle connection is reused within this time. Servers hang up after 5 s (uvicorn, cpp-httplib)."""

HELD_S, MOST_HELD = 0.5, 1 << 21
"""After this time without new bytes, or beyond these bytes of memory, held bytes are parsed before the answer's end."""

READ_AFTER_S = 0.005
"""Delay before an ended answer is parsed, so that the server (on the same cores) can accept the next request first."""

MOST_ERROR_BYTES, MOST_HEAD_BYTES = 64_000, 100_000
"""Maximum bytes read of an error answer, and of an answer's headers."""

MOST_EVENTS, SPARE_EVENTS = 8, 100
"""An answer may have MOST_EVENTS events for each requested token, and SPARE_EVENTS more."""

_PINGS = re.compile(rb"(?:[0-9a-fA-F]++\r\n|:[^\r\n]*+|event: ?ping[\r\n]+data:[^\r\n]*+|data: ?(?=[\r\n])|[\r\n])*+")
"""Bytes that only keep a connection open: comments, pings, events without data, and the frames of chunks."""

_END = b"\r\n0\r\n\r\n"  # the end of a chunked answer; if a chunk's content ends so, reading continues


def utc_now() -> str:
    """Such as 2026-01-31T12:00:00.123456Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Arrivals(selectors.SelectSelector):
    """select(), with the time of its last return. Its timeouts are exact to about 50 us (epoll: 1 ms)."""

    ns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        self.ns = time.perf_counter_ns()
        return ready


class Failure(Exception):
    """The class of a failure, and a description."""

    def __init__(self, failure: str, error: str) -> None:
        super().__init__(failure)
        self.failure, self.error = failure, error


class Target:
    """Where the requests of a plan go, and what they share."""

    def __init__(self, access: Access, api: str, arrivals: Arrivals) -> None:
        import httpx2

        url = urlsplit(access.interface(api))
        tls = url.scheme == "https"
        fixed = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        given = {name.title(): value for name, value in all_headers(access)}
        self.headers = [("Host", url.netloc), *(fixed | {"User-Agent": "mini-lab"} | given).items()]
        self.access, self.arrivals, self.path, self.host = access, arrivals, url.path, url.hostname or ""
        self.port = url.port or (443 if tls else 80)
        self.certificates = httpx2.create_ssl_context() if tls else None  # slow: reads the system's certificates
        self.n_kept = 0  # bytes in memory of the answers in flight
        self.hangs_up = False  # whether the server closed a connection after an answer without announcing it
        self._lock = asyncio.Lock()

    async def turn(self) -> None:
        """Wait for this task's turn: one each time that the loop has polled its sockets."""
        async with self._lock:
            await asyncio.sleep(0)


class Connection(asyncio.Protocol):
    """A socket; its bytes go to `answer`, with the stamp of their arrival."""

    transport: asyncio.Transport

    def __init__(self, arrivals: Arrivals) -> None:
        self.answer: Exchange | None = None
        self.arrivals, self.is_open, self.was_used, self.free_ns = arrivals, False, False, 0

    def release(self, answer: Exchange, is_reusable: bool) -> None:
        """Free the connection if `answer` still uses it, or hang up."""
        if self.answer is answer:
            self.answer, self.free_ns = None, time.perf_counter_ns()
            if not is_reusable:
                self.hang_up()

    def hang_up(self) -> None:
        self.is_open = False
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.is_open, self.free_ns = transport, True, time.perf_counter_ns()

    def data_received(self, data: bytes) -> None:
        if self.answer:
            self.answer.add(self.arrivals.ns, data)

    def connection_lost(self, problem: Exception | None) -> None:
        self.is_open = False
        if self.answer:
            self.answer.lose(Failure(kinds.LOST, str(problem)) if problem else None)


@dataclass
class Channel:
    """Sends requests one after the other over a connection, and reopens it if necessary."""

    connection: Connection | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request can be sent: the connection is open and free, and was used within FRESH_S."""
        own = self.connection
        is_free = own is not None and own.is_open and own.answer is None
        return is_free and own is not None and time.perf_counter_ns() - own.free_ns < FRESH_S * 1e9

    async def open(self, to: Target) -> Connection:
        """The connection, newly opened if the last one cannot be used. Raises Failure."""
        if self.connection and self.is_ready and not (to.hangs_up and self.connection.was_used):
            return self.connection
        self.close()
        name = to.host if to.certificates else None
        open_socket = asyncio.get_running_loop().create_connection
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await open_socket(
                    lambda: Connection(to.arrivals), to.host, to.port, ssl=to.certificates, server_hostname=name
                )
        except TimeoutError:
            raise Failure(kinds.TIMEOUT, f"no connection within {CONNECT_S:g} s") from None
        except OSError as problem:  # also for certificates
            raise Failure(kinds.REFUSED, f"no connection: {problem.strerror or problem}") from None
        self.connection = connection
        return connection

    def close(self) -> None:
        if self.connection:
            self.connection.hang_up()
        self.connection = None


@dataclass(eq=False)
class Exchange:
    """A request, and the part of its answer that has arrived.

    A complete chunked answer frees its connection and sets `over` before it is parsed, so that the next request need
    not wait.
    """

    ask: Ask
    plan: SendPlan
    to: Target
    over: asyncio.Event
    connection: Connection = field(init=False)
    started_at: str = field(default_factory=utc_now)
    sent_ns: int | None = None  # when the request was written
    first_ns: int | None = None  # when the first byte of the answer arrived
    last_ns: int | None = None  # when the last byte arrived
    moved_ns: int | None = None  # when something other than a ping last arrived
    http_status: int | None = None
    is_stream: bool = False
    waiting: deque[tuple[int, bytes]] = field(default_factory=deque)  # what has arrived and is not parsed
    pieces: list[tuple[int, bytearray]] = field(default_factory=list)  # the body
    n_kept: int = 0  # as in Target, of this answer
    n_line: int = 0  # bytes since the last end of a line
    n_lines: int = 0
    n_events: int = 0
    tail: bytes = b""
    is_open: bool = True
    is_held: bool = True
    is_whole: bool = False  # complete, and not yet read
    is_good: bool = False  # whether the connection can be used again after a chunked answer
    lost: Failure | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, ns: int, data: bytes) -> None:
        """Keep bytes that arrived at `ns`."""
        self.last_ns = ns
        self.waiting.append((ns, data))
        self.n_kept += len(data) + PIECE_BYTES
        self.to.n_kept += len(data) + PIECE_BYTES
        if self.first_ns is None:
            self.first_ns = ns
            head, end, _ = data.partition(b"\r\n\r\n")
            head = head.lower()
            self.is_held = bool(end) and b"transfer-encoding: chunked" in head
            self.is_good = self.is_held and b" 200" in head[:12] and b"\nconnection: close" not in head
        is_ping = _PINGS.fullmatch(data) is not None
        self.n_events += 0 if is_ping else data.count(b"data:")
        if not is_ping or not self.n_events:  # during prefill a server may send pings for any time
            self.moved_ns = ns
        self.tail = self.tail[-len(_END) :] + data[-len(_END) :]
        is_whole = self.tail.endswith(_END)
        if is_whole and self.is_good:
            self.is_open, self.is_whole = False, True
            self.connection.release(self, True)
            self.over.set()
        n_gen, excess = self.ask.asked.n_gen, ""
        if self.n_events > (n := MOST_EVENTS * n_gen + SPARE_EVENTS):
            excess = f"{n:,} events arrived for at most {n_gen:,} requested tokens: the server ignores that limit"
        elif self.to.n_kept > MOST_ANSWER_BYTES:
            excess = f"{MOST_ANSWER_BYTES:,} bytes arrived"
        if excess and self.is_open:
            self.lose(Failure(kinds.TOO_LARGE, f"more than {excess}"))
            self.connection.release(self, False)
        if not self.is_held or is_whole or self.n_kept > MOST_HELD:
            self.is_held = False
            self.news.set()

    def lose(self, problem: Failure | None) -> None:
        """No more bytes will arrive."""
        self.is_open, self.is_held, self.lost = False, False, self.lost or problem
        self.news.set()

    async def next_bytes(self) -> tuple[int, bytes]:
        """The next bytes with their stamp; empty at the end of the connection. Raises Failure after the last."""
        while self.is_open and (self.is_held or not self.waiting):
            now = time.perf_counter_ns()
            left_s = self.plan.timeout_s - (now - (self.sent_ns or 0)) / 1e9
            is_stalled = self.moved_ns is not None and (now - self.moved_ns) / 1e9 > self.plan.stall_s
            quiet_s = 0.0 if self.last_ns is None else (now - self.last_ns) / 1e9
            if self.waiting and (left_s <= 0 or is_stalled or quiet_s > HELD_S):
                self.is_held = False
            elif left_s <= 0:
                raise TimeoutError
            elif is_stalled:
                raise Failure(kinds.STALLED, f"only pings arrived for {self.plan.stall_s:g} s")
            else:
                self.news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(HELD_S, left_s)):
                        await self.news.wait()
        if self.is_whole:
            self.is_whole = False
            await asyncio.sleep(READ_AFTER_S)
        await self.to.turn()
        if self.lost and not self.waiting:
            raise self.lost
        return self.waiting.popleft() if self.waiting else (0, b"")

    async def send(self, due_ns: int | None) -> None:
        """Send the request at its planned time, and read its answer. Raises Failure for every failure."""
        self.connection.answer, self.connection.was_used = self, True
        http = h11.Connection(h11.CLIENT, MOST_HEAD_BYTES)
        body = self.ask.body.encode()
        headers = [*self.to.headers, ("Content-Length", str(len(body)))]
        try:
            head = h11.Request(method="POST", target=self.to.path, headers=headers)
            parts = [http.send(part) or b"" for part in (head, h11.Data(data=body), h11.EndOfMessage())]
            async with asyncio.timeout(self.plan.timeout_s + GRACE_S):
                while due_ns is not None and (left_ns := due_ns - time.perf_counter_ns()) > 0:
                    await asyncio.sleep(left_ns / 1e9)
                self.sent_ns = time.perf_counter_ns()
                self.connection.transport.write(b"".join(parts))
                self.started_at = utc_now()
                await self._read(http)
        except TimeoutError:
            error = f"the answer was not complete after {self.plan.timeout_s:g} s (--timeout)"
            raise Failure(kinds.TIMEOUT, error) from None
        except h11.LocalProtocolError:  # its message may hold a header
            raise Failure(kinds.BAD_REQUEST, "the request cannot be written as HTTP") from None
        except (h11.RemoteProtocolError, OSError) as problem:
            raise Failure(kinds.LOST, str(problem) or "the server closed the connection") from None
        finally:
            self.is_open = False
            self.connection.release(self, http.our_state is h11.DONE and http.their_state is h11.DONE)

    async def _read(self, http: h11.Connection) -> None:
        """Read the answer. Raises Failure if it is not a stream."""
        headers, ns, n_bytes = dict[str, str](), 0, 0
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                ns, data = await self.next_bytes()
                if not data and http.their_state is h11.SEND_RESPONSE:
                    raise Failure(kinds.LOST, "the server closed the connection without an answer")
                http.receive_data(data)
            elif isinstance(event, h11.Response):
                self.http_status = event.status_code
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                kind, coding = headers.get("content-type", "").lower(), headers.get("content-encoding", "identity")
                is_other = coding != "identity" or "json" in kind or "html" in kind  # some servers call streams text
                self.is_stream = self.http_status == 200 and not is_other
            elif isinstance(event, h11.Data):
                self._keep(ns, bytes(event.data))
                n_bytes += len(event.data)
                if not self.is_stream and n_bytes > MOST_ERROR_BYTES:
                    break
            elif not isinstance(event, h11.InformationalResponse):
                break
        if self.is_stream:
            return
        status = self.http_status or 0
        answered = read_json(b"".join(data for _, data in self.pieces), status, headers, self.to.access)
        if status == 200 and (answered.parsed is None or answered.error is None):
            raise Failure(kinds.NO_STREAM, f"the answer is {answered.error or 'JSON'} instead of a stream")
        failures = {200: kinds.ERROR_INSIDE, 429: kinds.RATE_LIMITED}
        failure = failures.get(status, kinds.SERVER_ERROR if status >= 500 else kinds.BAD_REQUEST)
        raise Failure(failure, answered.error or "")

    def _keep(self, ns: int, data: bytes) -> None:
        """Keep bytes of the body. Raises Failure for a line that is too long, and for too many lines."""
        if self.pieces and self.pieces[-1][0] == ns:  # one arrival, in several chunks
            self.pieces[-1][1].extend(data)
        else:
            self.pieces.append((ns, bytearray(data)))
        self.n_lines += data.count(b"\n") + data.count(b"\r")
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        self.n_line = self.n_line + len(data) if end < 0 else len(data) - end - 1
        if self.n_line > MOST_LINE_BYTES:
            raise Failure(kinds.LONG_LINE, f"{self.n_line:,} bytes arrived without a line end")
        if self.n_lines > LINES_PER_TOKEN * self.ask.asked.n_gen + SPARE_LINES:
            raise Failure(kinds.TOO_LARGE, f"more than {self.n_lines:,} lines arrived")


async def exchange(
    channel: Channel, to: Target, ask: Ask, plan: SendPlan, start_ns: int, over: asyncio.Event, scheduled_ns: int | None
) -> tuple[Request, str]:
    """Send a request at its planned time, and read its answer. Returns it with its text; failures are in the request.

    A server that closes the connection after each answer (llama-server does, without announcing it) may miss a request
    sent at that moment. That request is repeated over a new connection, and later ones use new connections too.
    """
    due_ns = None if scheduled_ns is None else start_ns + scheduled_ns
    for _ in range(2):
        own, was_connected, was_used, problem = Exchange(ask, plan, to, over), channel.is_ready, False, None
        try:
            own.connection = await channel.open(to)
            was_used = own.connection.was_used
            await own.send(due_ns)
        except Failure as failure:
            problem = failure
            age_s = (time.perf_counter_ns() - (own.sent_ns or 0)) / 1e9
            if was_used and failure.failure == kinds.LOST and own.first_ns is None and age_s <= HUNG_UP_S:
                to.hangs_up = True
                channel.close()
                continue
        break
    stream: Stream | None = None
    if own.is_stream:
        for part in read_stream(own.pieces, own.sent_ns or 0):
            await to.turn()
            stream = part
    to.n_kept -= own.n_kept
    if stream:
        is_lost = problem is not None and problem.failure == kinds.LOST
        if stream.failure is None:
            problem = None if is_lost else problem  # the answer was complete
        elif problem is None or (is_lost and stream.failure == kinds.ERROR_INSIDE):
            problem = Failure(stream.failure, stream.error or "")
    sent_ns = own.sent_ns

    def since_sent(ns: int | None) -> int | None:
        return None if sent_ns is None or ns is None else ns - sent_ns

    request = Request(
        asked=ask.asked,
        started_at=own.started_at,
        scheduled_ns=scheduled_ns,
        sent_ns=None if sent_ns is None else sent_ns - start_ns,
        was_connected=was_connected,
        headers_ns=since_sent(own.first_ns),
        ended_ns=since_sent(own.last_ns),
        failed_ns=since_sent(time.perf_counter_ns()) if problem else None,
        status=FAILED if problem else OK,
        failure=problem.failure if problem else None,
        error=hidden(problem.error[:3000], to.access)[:300] if problem else None,
        http_status=own.http_status,
        finish_reason=hidden(stream.finish_reason, to.access) if stream and stream.finish_reason else None,
        events=stream.events if stream else Events(),
        tokens_by=stream.tokens_by if stream else None,
        usage=stream.usage if stream else None,
        timings=stream.timings if stream else None,
    )
    return request, stream.text if stream else ""
