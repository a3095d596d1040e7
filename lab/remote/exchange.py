"""The client's process: send the requests of plans, stamp the bytes of their answers, and classify failures.

No other work delays a stamp in this process. It is taken when select() returns (Arrivals), before any Python code runs
for the bytes. Parsing HTTP would delay the stamps of other requests, so the bytes of a chunked answer wait with their
stamps for its end, or until no byte came for a while, or too many wait. All requests of a plan share one asyncio loop
and one Sending, which gives turns: the loop checks for arrivals between two pieces of parsing. The process reads plans
from its stdin, and writes each request to a file when it has ended; nothing crosses the pipe while requests run.
(The HTTP library itself stamps nothing before its own parsing, so only its parser, h11, is used here.)
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import random
import selectors
import ssl
import time
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import h11

from lab.core import request as kinds
from lab.core.lines import converted, to_json
from lab.core.record import FAILED, OK
from lab.core.request import Events, Request
from lab.process import spawning
from lab.remote.access import SEPARATOR, Access, all_headers, hidden, read_json
from lab.remote.formats import Ask, SendPlan, fresh_nonce, read_stream

CONNECT_S = 10.0
GRACE_S = 3.0  # additional time for reading the bytes that arrived before the timeout
PREPARE_S = 0.1  # a request's connection is opened this long before its time
PAUSE_S = (
    0.25  # a user's pause after a failure, so that a server that rejects at once is not flooded
)
READ_AFTER_S = 0.005  # an ended answer is parsed later: the server (on the same cores) accepts the next request first
LOOK_S = 0.5
MOST_HELD = 1 << 21
"""After this time without new bytes, or beyond these bytes, those that wait are parsed before the answer's end."""

MOST_HEAD_BYTES = 100_000
MOST_LINE_BYTES = 1_000_000
MOST_JSON_BYTES = 3_000_000
MOST_ANSWER_BYTES = 64_000_000
"""Maximum bytes of an answer's headers, of a line of a stream (its JSON takes up to 30 times the memory), of an answer
that is not a stream (60 times), and of all answers in flight, with PIECE_BYTES for each arrival."""

PIECE_BYTES = 300
LINES_PER_TOKEN = 20
SPARE_LINES = 2_000
"""Maximum ends of lines in a stream for each requested token, and the spare ones: for pings during a long prefill."""

DATE = "%Y-%m-%dT%H:%M:%S.%fZ"
_END = b"\r\n0\r\n\r\n"  # of a chunked answer


class Arrivals(selectors.SelectSelector):
    """select(), with the time of its last return. Its timeouts are exact to about 50 us (epoll: 1 ms)."""

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
    """The class of a failure, and a description."""

    def __init__(self, failure: str, error: str) -> None:
        super().__init__(failure)
        self.failure = failure
        self.error = error


def serve() -> None:
    """Run plans from stdin until it closes. The answer to each is the time of its start."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        access = converted(request["access"], Access)
        plan = converted(request["plan"], SendPlan)
        arrivals = Arrivals()
        with (
            Path(request["path"]).open("wb") as file,
            asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(arrivals)) as runner,
        ):
            gc.collect()
            gc.freeze()  # shortens garbage collections from milliseconds to microseconds
            return {"start_ns": runner.run(Sending(access, plan, file, arrivals).run())}

    spawning.serve(lambda: answer)


class Sending:
    """A running plan: where its requests go, and what they share."""

    def __init__(self, access: Access, plan: SendPlan, file: IO[bytes], arrivals: Arrivals) -> None:
        self.access = access
        self.plan = plan
        self.file = file
        self.arrivals = arrivals
        url = urlsplit(
            f"{access.url}/{'chat/completions' if plan.api == kinds.CHAT else 'completions'}"
        )
        has_tls = url.scheme == "https"
        fixed = {
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
            "User-Agent": "mini-lab",
        }
        given = {name.title(): value for name, value in all_headers(access)}
        self.headers = [("Host", url.netloc), *(fixed | given).items()]
        self.path = url.path
        self.host = url.hostname or ""
        self.port = url.port or (443 if has_tls else 80)
        self.certificates = certificates() if has_tls else None
        self.start_ns = 0
        self.n_kept = 0  # bytes in memory of the answers in flight
        self.numbers = iter(range(plan.n_all))  # of requests not yet sent
        self.n_wanted = (
            0  # requests in flight, or still to send, that are due before the plan's `stop_s`
        )
        self.n_lost = 0  # requests in a row
        self.idle = asyncio.Event()
        self.gone = asyncio.Event()  # while n_wanted is 0; after the plan's `most_lost`
        self._lock = asyncio.Lock()

    async def run(self) -> int:
        """Send all requests, and write each to `file` when it has ended. Returns the time of the start."""
        prepare_s = 0 if self.plan.times_ns is None else PREPARE_S
        self.start_ns = time.perf_counter_ns() + round(prepare_s * 1e9)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.plan.n_at_once, self.plan.n_all)):
                group.create_task(self._user(group))
        return self.start_ns

    async def turn(self) -> None:
        """Wait for this task's turn: one each time that the loop has polled its sockets."""
        async with self._lock:
            await asyncio.sleep(0)

    def _count(self, n_wanted: int) -> None:
        self.n_wanted += n_wanted
        (self.idle.clear if self.n_wanted else self.idle.set)()

    async def _user(self, group: asyncio.TaskGroup) -> None:
        """Send one request after the other: in a closed loop when the last answer has arrived, else at its time.

        The answer is parsed meanwhile, so a pause after a failure may come one request late. Late requests, which are
        due after the plan's stop, are sent as long as others are in flight.
        """
        plan = self.plan
        sent = list[asyncio.Task[Request]]()
        if plan.spread_s:
            await asyncio.sleep(random.uniform(0, plan.spread_s))
        for number in self.numbers:
            scheduled_ns = None if plan.times_ns is None else plan.times_ns[number]
            due_ns = (
                time.perf_counter_ns() - self.start_ns if scheduled_ns is None else scheduled_ns
            )
            is_wanted = plan.stop_s is None or due_ns <= plan.stop_s * 1e9
            self._count(is_wanted)
            left_s = (self.start_ns + due_ns - time.perf_counter_ns()) / 1e9 - PREPARE_S
            needless = self.gone if is_wanted else self.idle
            if left_s > 0:
                with suppress(TimeoutError):
                    await asyncio.wait_for(needless.wait(), left_s)
            if needless.is_set():
                self._count(-is_wanted)
                return
            ask = plan.ask(number)
            if ask.nonce is not None:
                ask = dataclasses.replace(ask, body=ask.body.replace(ask.nonce, fresh_nonce(), 1))
            own = Exchange(self, ask)
            await own.connect()
            sent.append(group.create_task(self._send(number, own, is_wanted, scheduled_ns)))
            await own.over.wait()
            ended = [task for task in sent if task.done()]
            sent = [task for task in sent if not task.done()]
            if scheduled_ns is None and any(task.result().status != OK for task in ended):
                await asyncio.sleep(PAUSE_S)

    async def _send(
        self, number: int, own: Exchange, is_wanted: bool, scheduled_ns: int | None
    ) -> Request:
        """Send a request at its planned time, and write it to the file when its answer has ended."""
        if not own.is_over:
            await own.send(None if scheduled_ns is None else self.start_ns + scheduled_ns)
        problem = own.problem
        sent_ns = own.sent_ns
        read = dict[str, Any](events=Events())
        if own.is_stream:
            await asyncio.sleep(READ_AFTER_S)
            for part in read_stream(own.pieces, sent_ns or 0):
                await self.turn()
                read = part or read
        elif problem is None:
            read |= own.refused()
        self.n_kept -= own.n_kept
        text, kind, error = (read.pop(name, None) for name in ("text", "failure", "error"))
        is_lost = problem is not None and problem.failure == kinds.LOST
        if kind and (problem is None or (is_lost and kind == kinds.ERROR_INSIDE)):
            problem = Failure(kind, error or "")
        elif own.is_stream and not kind and is_lost:
            problem = None  # the answer was complete
        if problem:
            error = hidden(problem.error[:3000], self.access)[:300]
        if read.get("finish_reason"):
            read["finish_reason"] = hidden(read["finish_reason"], self.access)

        def since_sent(ns: int | None) -> int | None:
            return None if sent_ns is None or ns is None else ns - sent_ns

        request = Request(
            asked=own.ask.asked,
            started_at=own.started_at,
            sent_ns=None if sent_ns is None else sent_ns - self.start_ns,
            headers_ns=since_sent(own.first_ns),
            ended_ns=since_sent(own.last_ns),
            failed_ns=since_sent(time.perf_counter_ns()) if problem else None,
            status=FAILED if problem else OK,
            failure=problem.failure if problem else None,
            error=error,
            http_status=own.http_status,
            **read,
        )
        self.n_lost = self.n_lost + 1 if request.failure in (kinds.REFUSED, kinds.LOST) else 0
        if self.plan.most_lost is not None and self.n_lost >= self.plan.most_lost:
            self.gone.set()
        self._count(-is_wanted)
        self.file.write(
            SEPARATOR.join((str(number), to_json(request), json.dumps(text or ""))).encode() + b"\n"
        )
        self.file.flush()
        own.over.set()
        return request


class Exchange(asyncio.Protocol):
    """A request over a connection of its own, and the part of its answer that has arrived.

    Several servers hang up after each answer without announcing it, so no connection is used twice; it is open before
    the request is sent. A complete answer sets `over` before its JSON is parsed: the next request need not wait.
    """

    transport: asyncio.Transport

    def __init__(self, to: Sending, ask: Ask) -> None:
        self.to = to
        self.ask = ask
        self.http = h11.Connection(h11.CLIENT, MOST_HEAD_BYTES)
        self.started_at = datetime.now(UTC).strftime(DATE)
        self.sent_ns: int | None = None  # when the request was written
        self.first_ns: int | None = None  # when the first byte of the answer arrived
        self.last_ns: int | None = None  # when the last byte arrived
        self.http_status: int | None = None
        self.headers: dict[str, str] = {}
        self.is_stream = False
        self.pieces: list[tuple[int, bytearray]] = []  # the body
        self.n_kept = 0  # as in Sending, of this answer
        self.n_line = self.n_lines = 0  # bytes since the last end of a line, and ends of lines
        self.problem: Failure | None = None
        self.lost: Exception | None = None  # why the connection ended
        self.waiting: deque[tuple[int, bytes]] = deque()  # what has arrived and is not parsed
        self.n_waiting = 0  # its bytes
        self.is_chunked = self.is_over = False
        self.begin = self.tail = b""  # of what arrived
        self.news = asyncio.Event()
        self.over = asyncio.Event()

    async def connect(self) -> None:
        name = self.to.host if self.to.certificates else None
        connect = asyncio.get_running_loop().create_connection
        try:
            async with asyncio.timeout(CONNECT_S):
                await connect(
                    lambda: self,
                    self.to.host,
                    self.to.port,
                    ssl=self.to.certificates,
                    server_hostname=name,
                )
        except TimeoutError:
            self.end(Failure(kinds.TIMEOUT, f"no connection within {CONNECT_S:g} s"))
        except ConnectionRefusedError:
            self.end(Failure(kinds.REFUSED, "Connection refused"))
        except OSError as problem:  # also for certificates
            self.end(Failure(kinds.REFUSED, problem.strerror or str(problem)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.is_over:
            self.add(self.to.arrivals.ns, data)

    def connection_lost(self, problem: Exception | None) -> None:
        self.waiting.append((self.last_ns or 0, b""))
        self.lost = problem
        self.news.set()

    def end(self, problem: Failure | None = None) -> None:
        """No more bytes are read: hang up."""
        if self.is_over:
            return
        self.problem = problem
        self.is_over = True
        if hasattr(self, "transport"):
            self.transport.abort()
        self.news.set()
        if problem is None and self.is_stream:
            self.over.set()

    def add(self, ns: int, data: bytes) -> None:
        """Keep bytes that arrived at `ns`."""
        if self.first_ns is None:
            self.first_ns = ns
            self.is_chunked = b"transfer-encoding: chunked" in data.lower()
        self.last_ns = ns
        self.waiting.append((ns, data))
        n = len(data) + PIECE_BYTES
        self.n_waiting = self.n_waiting + len(data)
        self.n_kept += n
        self.to.n_kept += n
        self.tail = self.tail[-len(_END) :] + data[-len(_END) :]
        if self.to.n_kept > MOST_ANSWER_BYTES:
            self.end(Failure(kinds.TOO_LARGE, f"more than {MOST_ANSWER_BYTES:,} bytes arrived"))
        elif not self.is_chunked or self.tail.endswith(_END) or self.n_waiting > MOST_HELD:
            self.news.set()

    async def _parse(self) -> None:
        """Parse what has arrived; no bytes are the end of the connection."""
        while self.waiting and not self.is_over:
            ns, data = self.waiting.popleft()
            self.n_waiting -= len(data)
            try:
                if not data and self.lost:
                    raise Failure(kinds.LOST, str(self.lost))
                self._read(ns, data)
            except h11.RemoteProtocolError as problem:
                words = str(problem)
                if not self.begin:
                    words = "the server closed the connection without an answer"
                elif self.begin.startswith(b"\x15\x03"):  # an alert
                    words = "the server uses TLS, but the address begins with http://"
                elif not self.begin.startswith(b"HTTP/"):
                    line = self.begin.decode("latin-1").splitlines()[0].strip()
                    words = f'the program there does not use HTTP: its answer begins with "{line}"'
                self.end(Failure(kinds.LOST, words))
            except Failure as problem:
                self.end(problem)
            await self.to.turn()

    def _read(self, ns: int, data: bytes) -> None:
        """Read bytes that arrived at `ns`. Raises Failure for more than an answer may have."""
        self.begin = self.begin or data[:200]
        self.http.receive_data(data)
        while (event := self.http.next_event()) is not h11.NEED_DATA:
            if isinstance(event, h11.Data):
                self._keep(ns, bytes(event.data))
            elif isinstance(event, h11.Response):
                self.http_status = event.status_code
                self.headers = {
                    name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers
                }
                kind, coding = (
                    self.headers.get(f"content-{name}", "").lower() for name in ("type", "encoding")
                )
                is_other = (
                    "json" in kind or "html" in kind or coding not in ("", "identity")
                )  # some call streams text
                self.is_stream = self.http_status == 200 and not is_other and self.ask.path is None
            elif not isinstance(event, h11.InformationalResponse):  # the end of the answer
                return self.end()

    def _keep(self, ns: int, data: bytes) -> None:
        if self.pieces and self.pieces[-1][0] == ns:  # one arrival, in several chunks
            self.pieces[-1][1].extend(data)
        else:
            self.pieces.append((ns, bytearray(data)))
        self.n_lines += data.count(b"\n") + data.count(b"\r")
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        self.n_line = self.n_line + len(data) if end < 0 else len(data) - end - 1
        n_gen = self.ask.asked.n_gen
        if not self.is_stream:
            if self.n_kept > MOST_JSON_BYTES:
                raise Failure(kinds.TOO_LARGE, f"more than {MOST_JSON_BYTES:,} bytes arrived")
        elif self.n_line > MOST_LINE_BYTES:
            raise Failure(kinds.LONG_LINE, f"{self.n_line:,} bytes arrived without a line end")
        elif self.n_lines > (most := LINES_PER_TOKEN * n_gen + SPARE_LINES):
            words = f"more than {most:,} lines arrived for at most {n_gen:,} requested tokens"
            raise Failure(kinds.TOO_LARGE, f"{words}: the server ignores that limit")

    async def send(self, due_ns: int | None) -> None:
        """Send the request at its planned time, and wait until its answer has ended."""
        to = self.to
        plan = self.to.plan
        body = self.ask.body.encode()
        try:
            headers = [*to.headers, ("Content-Length", str(len(body)))]
            head = h11.Request(
                method="POST" if body else "GET", target=self.ask.path or to.path, headers=headers
            )
            parts = [
                self.http.send(part) or b""
                for part in (head, h11.Data(data=body), h11.EndOfMessage())
            ]
        except h11.LocalProtocolError:  # its message may hold a header
            return self.end(Failure(kinds.BAD_REQUEST, "the request cannot be written as HTTP"))
        while due_ns is not None and (left_ns := due_ns - time.perf_counter_ns()) > 0:
            await asyncio.sleep(left_ns / 1e9)
        sent_ns = parsed_ns = self.sent_ns = time.perf_counter_ns()
        self.transport.write(b"".join(parts))
        self.started_at = datetime.now(UTC).strftime(DATE)
        while True:
            now = time.perf_counter_ns()
            left_s = plan.timeout_s - (now - sent_ns) / 1e9
            is_quiet = self.last_ns is not None and now - self.last_ns > LOOK_S * 1e9
            if (
                self.news.is_set()
                or is_quiet
                or left_s <= 0
                or now - parsed_ns > plan.stall_s * 1e9
            ):
                self.news.clear()
                parsed_ns = now
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(left_s, GRACE_S)):
                        await self._parse()
            if self.is_over:
                return
            if left_s <= 0:
                error = f"no {'complete ' * bool(self.begin)}answer after {plan.timeout_s:g} s (--timeout)"
                return self.end(Failure(kinds.TIMEOUT, error))
            if self.pieces and now - self.pieces[-1][0] > plan.stall_s * 1e9:
                return self.end(Failure(kinds.STALLED, f"no byte arrived for {plan.stall_s:g} s"))
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    await self.news.wait()

    def refused(self) -> dict[str, Any]:
        """Of an answer that is not a stream: its class of failure and error, or of a question its text and error."""
        status = self.http_status or 0
        data = b"".join(data for _, data in self.pieces)
        answered = read_json(data, status, self.headers, self.to.access)
        if self.ask.path:
            return {"text": data.decode(errors="replace"), "error": answered.error}
        if status == 200 and (answered.parsed is None or answered.error is None):
            return {
                "failure": kinds.NO_STREAM,
                "error": f"the answer is not a stream: {answered.error or 'JSON'}",
            }
        known = {200: kinds.ERROR_INSIDE, 429: kinds.RATE_LIMITED}
        failure = known.get(status, kinds.SERVER_ERROR if status >= 500 else kinds.BAD_REQUEST)
        return {"failure": failure, "error": answered.error}
