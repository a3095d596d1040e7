"""One connection to a server: bytes get a stamp the moment they are there, and are read later.

The stamp is taken when select() returns (Arrivals): the bytes had arrived, and nothing of Python has been run for them.
Parsing HTTP costs as much as some arrivals lie apart, and would make those of other requests late. So while a chunked
answer lasts, its bytes only wait here, each with its stamp; when the end came, or no byte for a while, or too many
wait, httpcore2 reads them one by one. All connections of a plan share one Turn: between two pieces of such work, of
whichever request, the loop looks for arrivals.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque
from typing import Any

import httpcore2

HELD_S = 0.5
"""How long nothing must arrive before held bytes are read although no end was seen."""

MOST_HELD = 1 << 20
"""Bytes that are held before they are read although no end was seen."""

MOST_WAITING = 1 << 22
"""Bytes that wait before the server has to pause."""

_END = b"0\r\n\r\n"  # of chunked encoding; where it is not seen, HELD_S has passed


class Stalled(Exception):
    """No byte for too long after the first one."""


class Arrivals(selectors.SelectSelector):
    """select(), and when it last returned. It keeps times to some 50 us (epoll: 1 ms), for up to 1,000 sockets."""

    ns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        self.ns = time.perf_counter_ns()
        return ready


class Turn:
    """Lets one piece of work be done for each look of the loop at its sockets."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self) -> None:
        """Until it is this task's turn to work."""
        async with self._lock:
            await asyncio.sleep(0)


class Connection(asyncio.Protocol, httpcore2.AsyncNetworkStream):
    """A socket as httpcore2 reads and writes it."""

    def __init__(self, arrivals: Arrivals, turn: Turn) -> None:
        self._arrivals = arrivals
        self._turn = turn
        self.sent_ns: int | None = None  # when the request was written
        self.first_ns: int | None = None  # when the first byte of the answer arrived
        self.last_ns: int | None = None  # when the last one did
        self.read_ns = 0  # when the bytes arrived that `read` gave last
        self.stall_s: float | None = None
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._n_waiting = 0
        self._tail = b""
        self._is_held = False
        self._is_paused = False
        self._problem: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._outgoing: list[bytes] = []

    def begin(self, stall_s: float) -> None:
        """Forget the last request."""
        self.sent_ns = self.first_ns = self.last_ns = None
        self.stall_s = stall_s
        self._tail, self._is_held = b"", True
        self._waiting.clear()
        self._n_waiting = 0

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.is_open = transport, True

    def data_received(self, data: bytes) -> None:
        now = self._arrivals.ns
        self.last_ns = now
        self._waiting.append((now, data))
        self._n_waiting += len(data)
        if self.first_ns is None:
            self.first_ns = now
            head = data.partition(b"\r\n\r\n")
            self._is_held = bool(head[1]) and b"transfer-encoding: chunked" in head[0].lower()
        self._tail = self._tail[-5:] + data[-5:]
        if not self._is_held or self._tail.endswith(_END) or self._n_waiting > MOST_HELD:
            self._release()
        if self._n_waiting > MOST_WAITING and not self._is_paused and self._transport:
            self._is_paused = True
            self._transport.pause_reading()

    def connection_lost(self, problem: Exception | None) -> None:
        self.is_open, self._problem = False, problem
        self._release()

    def _release(self) -> None:
        self._is_held = False
        if self._reader and not self._reader.done():
            self._reader.set_result(None)

    # httpcore2's side

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._outgoing.append(buffer)  # head and body leave together

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        self._send()
        while self.is_open and (self._is_held or not self._waiting):
            await self._wait()
        await self._turn.wait()
        if not self._waiting:
            if self._problem:
                raise httpcore2.ReadError(str(self._problem))
            return b""
        self.read_ns, data = self._waiting.popleft()
        self._n_waiting -= len(data)
        if self._is_paused and self._n_waiting < MOST_WAITING // 2 and self._transport:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def _send(self) -> None:
        if not self._outgoing or not self._transport:
            return
        request = b"".join(self._outgoing)
        self._outgoing.clear()
        if self.sent_ns is None:
            self.sent_ns = time.perf_counter_ns()
        self._transport.write(request)

    async def _wait(self) -> None:
        """Until bytes may be read, or for HELD_S. Raises Stalled."""
        self._reader = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(HELD_S):
                await self._reader
        except TimeoutError:
            quiet_s = 0.0 if self.last_ns is None else (time.perf_counter_ns() - self.last_ns) / 1e9
            if self.stall_s is not None and quiet_s > self.stall_s:
                raise Stalled from None
            if quiet_s > HELD_S and self._waiting:
                self._is_held = False
        finally:
            self._reader = None

    async def aclose(self) -> None:
        self.is_open = False
        if self._transport:
            self._transport.abort()

    def get_extra_info(self, info: str) -> Any:
        return not self.is_open if info == "is_readable" else None


async def connect(url: httpcore2.URL, timeout_s: float, arrivals: Arrivals, turn: Turn) -> Connection:
    """A new connection to the host of `url`. Raises OSError (certificates included) or TimeoutError."""
    import httpx2

    port = url.port or (443 if url.scheme == b"https" else 80)
    host = url.host.decode("ascii")
    tls = {"ssl": httpx2.create_ssl_context(), "server_hostname": host} if url.scheme == b"https" else {}
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        _, connection = await loop.create_connection(lambda: Connection(arrivals, turn), host, port, **tls)  # type: ignore[call-overload]
    assert isinstance(connection, Connection)
    return connection
