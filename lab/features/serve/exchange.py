"""One request over one connection: send it, read and parse its answer, and classify its failures."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from lab.core import request as kinds
from lab.core.record import FAILED, OK
from lab.core.request import Events, Request
from lab.features.serve.access import Access, all_headers, hidden, read_json
from lab.features.serve.connection import (
    Arrivals,
    Connection,
    Endless,
    Incoming,
    Stalled,
    TimedOut,
    Turn,
    connect,
    utc_now,
)
from lab.features.serve.formats import Piece, Stream, StreamReader
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

MOST_ERROR_BYTES = 64_000
"""Maximum bytes read of an error answer."""

MOST_HEAD_BYTES = 100_000
MOST_EVENTS, SPARE_EVENTS = 8, 100
"""An answer may have MOST_EVENTS events for each requested token, and SPARE_EVENTS more."""


@dataclass
class Target:
    """Where the requests of a plan go."""

    access: Access
    host: str
    port: int
    path: str
    headers: list[tuple[str, str]] = field(repr=False)
    arrivals: Arrivals
    turn: Turn
    certificates: ssl.SSLContext | None
    n_kept: int = 0  # bytes in memory of the answers in flight
    hangs_up: bool = False  # whether the server closed a connection after an answer without announcing it


def target(access: Access, api: str, arrivals: Arrivals) -> Target:
    """The target for an interface, with the headers of all requests."""
    import httpx2

    url = urlsplit(access.interface(api))
    is_encrypted = url.scheme == "https"
    fixed = {
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": "mini-lab",
    }
    given = {name.title(): value for name, value in all_headers(access)}
    return Target(
        access=access,
        host=url.hostname or "",
        port=url.port or (443 if is_encrypted else 80),
        path=url.path,
        headers=[("Host", url.netloc), *(fixed | given).items()],
        arrivals=arrivals,
        turn=Turn(),
        certificates=httpx2.create_ssl_context() if is_encrypted else None,  # slow: reads the system's certificates
    )


@dataclass
class Channel:
    """Sends requests one after the other over a connection, and reopens it if necessary."""

    connection: Connection | None = None

    @property
    def is_ready(self) -> bool:
        return self.connection is not None and self.connection.is_ready

    async def open(self, to: Target) -> Connection:
        """The connection, newly opened if the last one cannot be used. Raises OSError or TimeoutError."""
        was_used = self.connection is not None and self.connection.was_used
        if self.connection is None or not self.is_ready or (to.hangs_up and was_used):
            self.close()
            self.connection = await connect(to.host, to.port, CONNECT_S, to.arrivals, to.certificates)
        return self.connection

    def close(self) -> None:
        if self.connection:
            self.connection.abort()
        self.connection = None


class _Failure(Exception):
    """The class of a failure, and a description."""

    def __init__(self, failure: str, error: str) -> None:
        super().__init__(failure)
        self.failure, self.error = failure, error


@dataclass
class _Exchange:
    """A request, and the part of its answer that has arrived."""

    ask: Ask
    plan: SendPlan
    to: Target
    was_connected: bool
    began_at: str = field(default_factory=utc_now)
    answer: Incoming | None = None
    stream: Stream | None = None
    problem: _Failure | None = None
    pieces: list[tuple[int, bytearray]] = field(default_factory=list)
    n_bytes: int = 0
    n_kept: int = 0  # as in Target, of this answer
    n_line: int = 0  # bytes since the last end of a line
    n_lines: int = 0
    http_status: int | None = None
    is_stream: bool = False

    async def send(self, connection: Connection, over: asyncio.Event, due_ns: int | None) -> None:
        """Send the request at its planned time, and read its answer. Raises _Failure for every failure."""
        n_gen = self.ask.asked.n_gen
        answer = self.answer = Incoming(
            connection, self.plan, MOST_EVENTS * n_gen + SPARE_EVENTS, self.to.turn, over, due_ns
        )
        http = h11.Connection(h11.CLIENT, MOST_HEAD_BYTES)
        try:
            async with asyncio.timeout(self.plan.timeout_s + GRACE_S):
                await answer.send(self._as_http(http))
                await self._read(http, answer)
        except Stalled:
            raise _Failure(kinds.STALLED, f"only pings arrived for {self.plan.stall_s:g} s") from None
        except Endless as problem:
            error = f"{problem} for at most {n_gen:,} requested tokens: the server ignores that limit"
            raise _Failure(kinds.TOO_LARGE, error) from None
        except (TimedOut, TimeoutError):
            raise _Failure(
                kinds.TIMEOUT, f"the answer was not complete after {self.plan.timeout_s:g} s (--timeout)"
            ) from None
        except h11.LocalProtocolError:  # its message may hold a header
            raise _Failure(kinds.BAD_REQUEST, "the request cannot be written as HTTP") from None
        except (h11.RemoteProtocolError, OSError) as problem:
            raise _Failure(kinds.LOST, str(problem) or "the server closed the connection") from None
        finally:
            answer.end(is_reusable=http.our_state is h11.DONE and http.their_state is h11.DONE)

    def _as_http(self, http: h11.Connection) -> bytes:
        """The request with headers and body, to be sent in one write."""
        body = self.ask.body.encode()
        headers = [*self.to.headers, ("Content-Length", str(len(body)))]
        head = h11.Request(method="POST", target=self.to.path, headers=headers)
        return b"".join(http.send(part) or b"" for part in (head, h11.Data(data=body), h11.EndOfMessage()))

    async def _read(self, http: h11.Connection, answer: Incoming) -> None:
        """Read the answer. Raises _Failure if it is not a stream."""
        headers, ns = dict[str, str](), 0
        while not isinstance(event := http.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                ns, data = await answer.read()
                if not data and http.their_state is h11.SEND_RESPONSE:
                    raise ConnectionError("the server closed the connection without an answer")
                http.receive_data(data)
            elif isinstance(event, h11.Response):
                self.http_status = event.status_code
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
                self.is_stream = self.http_status == 200 and _may_be_stream(headers)
            elif isinstance(event, h11.Data):
                self._add(ns, bytes(event.data))
                if not self.is_stream and self.n_bytes > MOST_ERROR_BYTES:
                    break
            elif not isinstance(event, h11.InformationalResponse):
                break
        status = self.http_status or 0
        if self.is_stream:
            return
        answered = read_json(b"".join(data for _, data in self.pieces), status, headers, self.to.access)
        if status == 200 and (answered.parsed is None or answered.error is None):
            raise _Failure(kinds.NO_STREAM, f"the answer is {answered.error or 'JSON'} instead of a stream")
        failures = {200: kinds.ERROR_INSIDE, 429: kinds.RATE_LIMITED}
        failure = failures.get(status, kinds.SERVER_ERROR if status >= 500 else kinds.BAD_REQUEST)
        raise _Failure(failure, answered.error or "")

    def _add(self, ns: int, data: bytes) -> None:
        """Keep bytes of the body. Raises _Failure for too many."""
        if self.pieces and self.pieces[-1][0] == ns:  # one arrival, in several chunks
            self.pieces[-1][1].extend(data)
        else:
            self.pieces.append((ns, bytearray(data)))
            self.n_kept += PIECE_BYTES
            self.to.n_kept += PIECE_BYTES
        self.n_bytes += len(data)
        self.n_kept += len(data)
        self.to.n_kept += len(data)
        self.n_lines += data.count(b"\n") + data.count(b"\r")
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        self.n_line = self.n_line + len(data) if end < 0 else len(data) - end - 1
        if self.n_line > MOST_LINE_BYTES:
            raise _Failure(kinds.LONG_LINE, f"{self.n_line:,} bytes arrived without a line end")
        if self.to.n_kept > MOST_ANSWER_BYTES:
            raise _Failure(kinds.TOO_LARGE, f"more than {MOST_ANSWER_BYTES:,} bytes arrived")
        if self.n_lines > LINES_PER_TOKEN * self.ask.asked.n_gen + SPARE_LINES:
            raise _Failure(kinds.TOO_LARGE, f"more than {self.n_lines:,} lines arrived")

    def is_lost_unread(self, failure: _Failure) -> bool:
        """Whether the connection ended at once and without an answer."""
        assert self.answer
        age_s = (time.perf_counter_ns() - (self.answer.sent_ns or 0)) / 1e9
        return failure.failure == kinds.LOST and self.answer.first_ns is None and age_s <= HUNG_UP_S

    async def parse(self) -> None:
        """Parse the stream into events. An error in the stream takes precedence over a lost connection."""
        if not self.is_stream:
            return
        sent_ns = (self.answer.sent_ns if self.answer else None) or 0
        stream = self.stream = await _parsed(self.pieces, sent_ns, self.to.turn)
        is_lost = self.problem is not None and self.problem.failure == kinds.LOST
        if stream.failure is None:
            self.problem = None if is_lost else self.problem  # the answer was complete
        elif self.problem is None or (is_lost and stream.failure == kinds.ERROR_INSIDE):
            self.problem = _Failure(stream.failure, stream.error or "")

    def request(self, start_ns: int, scheduled_ns: int | None) -> Request:
        """The request with its results, in a plan that began at `start_ns`."""
        answer, problem, stream = self.answer, self.problem, self.stream
        sent_ns = answer.sent_ns if answer else None

        def since_sent(ns: int | None) -> int | None:
            return None if sent_ns is None or ns is None else ns - sent_ns

        return Request(
            asked=self.ask.asked,
            started_at=answer.started_at if answer else self.began_at,
            scheduled_ns=scheduled_ns,
            sent_ns=None if sent_ns is None else sent_ns - start_ns,
            was_connected=self.was_connected,
            headers_ns=since_sent(answer.first_ns) if answer else None,
            ended_ns=since_sent(answer.last_ns) if answer else None,
            failed_ns=since_sent(time.perf_counter_ns()) if problem else None,
            status=FAILED if problem else OK,
            failure=problem.failure if problem else None,
            error=hidden(problem.error[:3000], self.to.access)[:300] if problem else None,
            http_status=self.http_status,
            finish_reason=hidden(stream.finish_reason, self.to.access) if stream and stream.finish_reason else None,
            events=stream.events if stream else Events(),
            tokens_by=stream.tokens_by if stream else None,
            usage=stream.usage if stream else None,
            timings=stream.timings if stream else None,
        )


async def exchange(
    channel: Channel, to: Target, ask: Ask, plan: SendPlan, start_ns: int, over: asyncio.Event, scheduled_ns: int | None
) -> tuple[Request, str]:
    """Send a request at its planned time, and read its answer. Returns it with its text; failures are in the request.

    A server that closes the connection after each answer (llama-server does, without announcing it) may miss a request
    sent at that moment. That request is repeated over a new connection, and later ones use new connections too.
    """
    own = _Exchange(ask, plan, to, channel.is_ready)
    due_ns = None if scheduled_ns is None else start_ns + scheduled_ns
    try:
        connection = await _open(channel, to)
        was_used = connection.was_used
        try:
            await own.send(connection, over, due_ns)
        except _Failure as failure:
            if not was_used or not own.is_lost_unread(failure):
                raise
            to.hangs_up, own.was_connected = True, False
            channel.close()
            await own.send(await _open(channel, to), over, due_ns)
    except _Failure as failure:
        own.problem = failure
    await own.parse()
    to.n_kept -= own.n_kept
    if own.answer and own.problem:
        own.answer.end(is_reusable=False)
    return own.request(start_ns, scheduled_ns), own.stream.text if own.stream else ""


async def _open(channel: Channel, to: Target) -> Connection:
    try:
        return await channel.open(to)
    except TimeoutError:
        raise _Failure(kinds.TIMEOUT, f"no connection within {CONNECT_S:g} s") from None
    except OSError as problem:
        raise _Failure(kinds.REFUSED, f"no connection: {problem.strerror or problem}") from None


def _may_be_stream(headers: dict[str, str]) -> bool:
    """Whether a body with these headers may be a stream of events, even if its type says otherwise."""
    kind = headers.get("content-type", "").lower()
    return headers.get("content-encoding", "identity") == "identity" and "json" not in kind and "html" not in kind


async def _parsed(pieces: Sequence[Piece], sent_ns: int, turn: Turn) -> Stream:
    """Parse the events, one in each turn."""
    reader = StreamReader(sent_ns)
    for _ in reader.read(pieces):
        await turn.wait()
    return reader.stream()


async def rehearse() -> None:
    """Parse an answer without a network, so that all modules are loaded before the first real one."""
    http = h11.Connection(h11.CLIENT)
    http.send(h11.Request(method="POST", target="/", headers=[("Host", "localhost")]))
    http.receive_data(b"HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\ndata: [DONE]\n\n")
    head, body = http.next_event(), http.next_event()
    assert isinstance(head, h11.Response) and isinstance(body, h11.Data)
    await _parsed([(0, bytearray(body.data))], 0, Turn())
