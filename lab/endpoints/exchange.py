"""One request over one connection, from its first byte to its last, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field

import httpcore2

from lab.core.record import FAILED, OK
from lab.core.request import (
    BAD_REQUEST,
    ERROR_INSIDE,
    LONG_LINE,
    LOST,
    NO_STREAM,
    RATE_LIMITED,
    REFUSED,
    SERVER_ERROR,
    STALLED,
    TIMEOUT,
    TOO_LARGE,
    Events,
    Request,
)
from lab.endpoints.access import Access, all_headers, hidden, read
from lab.endpoints.connection import (
    Arrivals,
    Connection,
    Endless,
    Incoming,
    Stalled,
    TimedOut,
    Turn,
    certificates,
    connect,
    utc_now,
)
from lab.endpoints.formats import Piece, Stream, parsing
from lab.endpoints.send_plan import MOST_ANSWER_BYTES, MOST_LINE_BYTES, Ask, SendPlan

CONNECT_S = 10.0
GRACE_S = 10.0
"""How long the reading of what had arrived in time may take."""

HUNG_UP_S = 1.0
"""Within how long a request is lost that crossed the end of its connection."""

MOST_ERROR_BYTES = 64_000
"""Bytes that are read of an answer that is an error."""

MOST_EVENTS, SPARE_EVENTS = 8, 100
"""So many times the tokens that were asked for, and so many more, may be the events of an answer."""

Headers = list[tuple[bytes, bytes]]


@dataclass
class Target:
    """Where the requests of a plan go."""

    access: Access
    url: httpcore2.URL
    headers: Headers = field(repr=False)
    arrivals: Arrivals
    turn: Turn
    context: ssl.SSLContext | None = None
    hangs_up: bool = False  # whether the server was seen to end a connection after an answer, without a word


def target(access: Access, api: str, arrivals: Arrivals, path: str | None = None) -> Target:
    """Where the requests for an interface (or for another path) go, and the headers that they all have."""
    url = httpcore2.URL(access.interface(api) if path is None else access.root + path)
    port = b"" if url.port is None else b":%d" % url.port
    fixed = {
        "Accept": "text/event-stream",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": "mini-lab",
    }
    given = {name.title(): value for name, value in all_headers(access)}
    host = b"[%b]" % url.host if b":" in url.host else url.host
    headers = [(name.encode(), value.encode()) for name, value in (fixed | given).items()]
    return Target(access, url, [(b"Host", host + port), *headers], arrivals, Turn(), certificates(url))


@dataclass
class Line:
    """What requests are sent over, one after the other: a connection, which may have to be opened anew."""

    connection: Connection | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a request can be sent at once."""
        return self.connection is not None and self.connection.is_ready

    async def open(self, to: Target) -> None:
        """A new connection, if the last one cannot be used. Raises OSError or TimeoutError."""
        if not self.is_ready or (to.hangs_up and self.connection and self.connection.was_used):
            self.close()
            self.connection = await connect(to.url, CONNECT_S, to.arrivals, to.context)

    def close(self) -> None:
        if self.connection:
            self.connection.abort()
        self.connection = None


class _Failure(Exception):
    """The class of a failure, and what happened."""

    def __init__(self, failure: str, error: str) -> None:
        super().__init__(failure)
        self.failure, self.error = failure, error


@dataclass
class _Got:
    """What has arrived of an answer, and how that went."""

    started_at: str = ""
    was_connected: bool = False
    answer: Incoming | None = None
    stream: Stream | None = None
    problem: _Failure | None = None
    pieces: list[Piece] = field(default_factory=list)
    n_bytes: int = 0
    n_line: int = 0  # bytes since the last end of a line
    http_status: int | None = None
    is_stream: bool = False

    def add(self, ns: int, data: bytes) -> None:
        """Keep bytes of the body. Raises _Failure where they are too many."""
        self.pieces.append((ns, data))
        self.n_bytes += len(data)
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        self.n_line = self.n_line + len(data) if end < 0 else len(data) - end - 1
        if self.n_line > MOST_LINE_BYTES:
            raise _Failure(LONG_LINE, f"{self.n_line:,} bytes came without the end of a line")
        if self.n_bytes > MOST_ANSWER_BYTES:
            raise _Failure(TOO_LARGE, f"more than {MOST_ANSWER_BYTES:,} bytes came")

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


async def exchange(
    line: Line,
    to: Target,
    ask: Ask,
    plan: SendPlan,
    start_ns: int,
    over: asyncio.Event,
    scheduled_ns: int | None = None,
) -> tuple[Request, str]:
    """Send a request, once, at its time, and read its answer. Gives it and its text; never raises for a server.

    A server that hangs up after each answer (llama-server does, unsaid) may never read a request that crosses the end
    of its connection: that one goes out again over a new one, and so do all later ones.
    """
    got = _Got(utc_now(), line.is_ready)
    try:
        await _open(line, to)
        assert line.connection
        due_ns = None if scheduled_ns is None else start_ns + scheduled_ns
        was_used = line.connection.was_used
        most_events = MOST_EVENTS * ask.asked.n_gen + SPARE_EVENTS if plan.path is None else MOST_ANSWER_BYTES
        answer = got.answer = line.connection.begin(plan, most_events, to.turn, over, due_ns)
        try:
            await _send_and_read(answer, to, ask, plan, got)
        except _Failure as failure:
            age_s = (time.perf_counter_ns() - (answer.sent_ns or 0)) / 1e9
            if not was_used or failure.failure != LOST or answer.first_ns is not None or age_s > HUNG_UP_S:
                raise
            to.hangs_up, got.was_connected = True, False
            line.close()
            await _open(line, to)
            got.answer = line.connection.begin(plan, most_events, to.turn, over, due_ns)
            await _send_and_read(got.answer, to, ask, plan, got)
    except _Failure as failure:
        got.problem = failure
    if got.is_stream:
        stream = got.stream = await _parsed(got, (got.answer.sent_ns if got.answer else None) or 0, to.turn)
        problem, done = got.problem, stream.failure is None
        if (problem is None and not done) or (problem and problem.failure == LOST and stream.failure == ERROR_INSIDE):
            got.problem = _Failure(stream.failure or "", stream.error or "")
        elif problem and problem.failure == LOST and done:
            got.problem = None  # all had arrived
    if got.answer and got.problem:
        await got.answer.aclose()
    return _request(ask, start_ns, scheduled_ns, got, to.access), got.stream.text if got.stream else ""


async def _open(line: Line, to: Target) -> None:
    try:
        await line.open(to)
    except TimeoutError:
        raise _Failure(TIMEOUT, f"no connection within {CONNECT_S:g} s") from None
    except OSError as problem:
        raise _Failure(REFUSED, f"no connection: {problem.strerror or problem}") from None


async def _send_and_read(answer: Incoming, to: Target, ask: Ask, plan: SendPlan, got: _Got) -> None:
    """Raises _Failure for all that can go wrong."""
    http = httpcore2.AsyncHTTP11Connection(origin=to.url.origin, stream=answer)
    body = ask.body.encode()
    headers = [*to.headers, (b"Content-Length", b"%d" % len(body))]
    request = httpcore2.Request(b"POST", to.url, headers=headers, content=body)
    try:
        async with asyncio.timeout(plan.timeout_s + GRACE_S):
            response = await http.handle_async_request(request)
            try:
                await _read(response, answer, got, to.access, plan.path is not None)
            finally:
                await response.aclose()
                answer.end()
    except Stalled:
        raise _Failure(STALLED, f"nothing but pings came for {plan.stall_s:g} s") from None
    except Endless as problem:
        error = f"{problem} where at most {ask.asked.n_gen:,} tokens were asked for: the server ignores that limit"
        raise _Failure(TOO_LARGE, error) from None
    except (TimedOut, TimeoutError):
        raise _Failure(TIMEOUT, f"the answer was not whole after {plan.timeout_s:g} s (--timeout)") from None
    except httpcore2.LocalProtocolError:  # its message may hold a header
        raise _Failure(BAD_REQUEST, "the request cannot be written as HTTP") from None
    except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError) as problem:
        raise _Failure(LOST, str(problem) or "the server closed the connection") from None


async def _read(response: httpcore2.Response, answer: Incoming, got: _Got, access: Access, is_whole: bool) -> None:
    got.http_status = status = response.status
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers}
    kind, is_plain = headers.get("content-type", "").lower(), headers.get("content-encoding", "identity") == "identity"
    got.is_stream = status == 200 and is_plain and "json" not in kind and "html" not in kind and not is_whole
    async for data in response.aiter_stream():
        got.add(answer.read_ns, data)
        if not got.is_stream and not is_whole and got.n_bytes > MOST_ERROR_BYTES:
            break
    if got.is_stream or (is_whole and status == 200):
        return
    got_whole = read(got.body, status, headers, access)
    if status == 200 and (got_whole.parsed is None or got_whole.error is None):
        raise _Failure(NO_STREAM, f"the answer is {got_whole.error or 'JSON'} instead of a stream")
    failures = {200: ERROR_INSIDE, 429: RATE_LIMITED}
    failure = failures.get(status, SERVER_ERROR if status >= 500 else BAD_REQUEST)
    raise _Failure(failure, got_whole.error or "")


async def _parsed(got: _Got, sent_ns: int, turn: Turn) -> Stream:
    """The events, one for each turn."""
    steps = parsing(got.pieces, sent_ns)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            stream: Stream = end.value
            return stream
        await turn.wait()


def _request(ask: Ask, start_ns: int, scheduled_ns: int | None, got: _Got, access: Access) -> Request:
    answer, stream, problem = got.answer, got.stream, got.problem
    sent_ns, first_ns, last_ns = (answer.sent_ns, answer.first_ns, answer.last_ns) if answer else (None, None, None)
    return Request(
        asked=ask.asked,
        started_at=answer.started_at if answer else got.started_at,
        scheduled_ns=scheduled_ns,
        sent_ns=None if sent_ns is None else sent_ns - start_ns,
        was_connected=got.was_connected,
        headers_ns=None if sent_ns is None or first_ns is None else first_ns - sent_ns,
        ended_ns=None if sent_ns is None or last_ns is None else last_ns - sent_ns,
        failed_ns=None if problem is None or sent_ns is None else time.perf_counter_ns() - sent_ns,
        status=FAILED if problem else OK,
        failure=problem.failure if problem else None,
        error=hidden(problem.error, access)[:300] if problem else None,
        http_status=got.http_status,
        finish_reason=hidden(stream.finish_reason, access) if stream and stream.finish_reason else None,
        events=stream.events if stream else Events(),
        tokens_by=stream.tokens_by if stream else None,
        usage=stream.usage if stream else None,
        timings=stream.timings if stream else None,
    )


async def rehearse() -> None:
    """One request without a network, so that the first real one finds all modules loaded."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 14\r\n\r\ndata: [DONE]\n\n"
    url = httpcore2.URL("http://localhost/")
    http = httpcore2.AsyncHTTP11Connection(origin=url.origin, stream=httpcore2.AsyncMockStream([answer]))
    response = await http.handle_async_request(httpcore2.Request(b"POST", url, headers=[(b"Host", b"localhost")]))
    got = _Got()
    async for data in response.aiter_stream():
        got.add(0, data)
    await response.aclose()
    await _parsed(got, 0, Turn())
