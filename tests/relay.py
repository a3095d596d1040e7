"""A network to measure with: a relay before llama.cpp's RPC servers that delays, throttles, and counts what passes.

It runs in a process of its own, so that its work does not hold up those who talk through it, and sleeps between
chunks. What it really does is measured (`Relay.calibrate`), since no timer is exact.

A chunk leaves at max(its arrival, the departure of the one before it) + its bytes / bandwidth, and arrives after the
delay: a full-duplex link of that bandwidth with an endless buffer before it. Each direction of each relay is one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import select
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

COMMANDS = (
    *("ALLOC_BUFFER", "GET_ALIGNMENT", "GET_MAX_SIZE", "BUFFER_GET_BASE", "FREE_BUFFER", "BUFFER_CLEAR", "SET_TENSOR"),
    *("SET_TENSOR_HASH", "GET_TENSOR", "COPY_TENSOR", "GRAPH_COMPUTE", "GET_DEVICE_MEMORY", "INIT_TENSOR"),
    *("GET_ALLOC_SIZE", "HELLO", "DEVICE_COUNT", "GRAPH_RECOMPUTE", "MEMSET_TENSOR"),
)
"""enum rpc_cmd of ggml-rpc.cpp."""

UNANSWERED = {
    *("FREE_BUFFER", "BUFFER_CLEAR", "SET_TENSOR", "GRAPH_COMPUTE", "INIT_TENSOR", "GRAPH_RECOMPUTE"),
    "MEMSET_TENSOR",
}
"""Those that the client sends without waiting for an answer."""

CHUNK_BYTES = 1 << 18
MOST_QUEUED_BYTES = 1 << 28
SPIN_S = 50e-6
"""Shorter waits are not worth a sleep."""

PR_SET_TIMERSLACK = 29  # of prctl(2); Linux delays a sleep by up to 50 us otherwise


@dataclass(frozen=True)
class Message:
    """A request that passed: which relay, its command, its bytes with their frame, and those of the answer."""

    relay: int
    command: str
    bytes_out: int
    bytes_back: int

    @property
    def is_answered(self) -> bool:
        return self.command not in UNANSWERED


@dataclass(frozen=True)
class Calibration:
    """What the relay adds to a small question, back and forth, and how many bytes a second it lets through."""

    round_trip_s: float
    bytes_per_s: float


class Relay:
    """Relays before these servers (HOST:PORT). Use it in a `with` block: leaving it ends them."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *targets], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.endpoints: list[str] = self._answer()

    def set(self, delay_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        """From now on: how long a byte takes each way, and how many a second pass; None: as many as can."""
        self._ask(do="set", delay_s=delay_s, bytes_per_s=bytes_per_s)

    def take(self) -> list[Message]:
        """The requests since this was called last, in the order in which they came."""
        return [Message(relay, COMMANDS[command], out, back) for relay, command, out, back in self._ask(do="take")]

    def _ask(self, **request: Any) -> Any:
        stdin: IO[str] = self._process.stdin  # type: ignore[assignment]
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        stdout: IO[str] = self._process.stdout  # type: ignore[assignment]
        return json.loads(stdout.readline())

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()  # type: ignore[union-attr]


def calibrate(delay_s: float, bytes_per_s: float | None, n_bytes: int = 64_000_000) -> Calibration:
    """The median round trip of 64 bytes, and the median rate of n_bytes in 64 answers, through such a relay."""
    with _answering() as target, Relay([target]) as relay, _connection(relay.endpoints[0]) as link:
        relay.set(delay_s, bytes_per_s)
        round_trip_s = statistics.median([_time(link, 64) for _ in range(100)][10:])
        transfer_s = statistics.median(_time(link, n_bytes // 64) for _ in range(64)) - round_trip_s
        return Calibration(round_trip_s, n_bytes / 64 / transfer_s)


def _time(link: socket.socket, n_bytes: int) -> float:
    """Seconds from a question of 64 bytes until all of its answer of n_bytes is there."""
    start = time.perf_counter()
    link.sendall(struct.pack("<BQQ", COMMANDS.index("GET_TENSOR"), 55, n_bytes) + bytes(47))
    missing = 8 + n_bytes
    while missing:
        missing -= len(link.recv(min(missing, 1 << 20)))
    return time.perf_counter() - start


@contextlib.contextmanager
def _answering() -> Iterator[str]:
    """The address of a process that answers the questions of `_time`."""
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(process.stdout.readline())  # type: ignore[union-attr]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]


def _connection(endpoint: str) -> socket.socket:
    host, _, port = endpoint.rpartition(":")
    link = socket.create_connection((host, int(port)), 30)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


# From here on: what runs in the relay's process.


class _Count:
    """Notes every request of one connection, and the answers to those that have one."""

    def __init__(self, number: int, log: list[list[int]]) -> None:
        self._number, self._log = number, log
        self._unanswered: deque[list[int]] = deque()

    def out(self, command: int, n_bytes: int) -> None:
        entry = [self._number, command, n_bytes, 0]
        self._log.append(entry)
        if COMMANDS[command] not in UNANSWERED:
            self._unanswered.append(entry)

    def back(self, _: int, n_bytes: int) -> None:
        self._unanswered.popleft()[3] = n_bytes


class _Flow:
    """One direction of a connection: chunks on their way, each with the moment at which it arrives."""

    def __init__(
        self, source: socket.socket, sink: socket.socket, head_bytes: int, note: Callable[[int, int], None]
    ) -> None:
        self.source, self.sink = source, sink
        self.on_way: deque[tuple[float, memoryview]] = deque()
        self.n_queued = 0
        self.is_blocked = self.is_ended = False
        self._departed = 0.0
        self._head_bytes, self._note = head_bytes, note
        self._head, self._missing = b"", 0  # of the message that passes now

    def receive(self, delay_s: float, bytes_per_s: float | None) -> None:
        """Take the next chunk, and find out when it is to arrive."""
        try:
            chunk = self.source.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        self.is_ended = not chunk
        self._count(chunk)
        self._departed = max(time.monotonic(), self._departed) + (len(chunk) / bytes_per_s if bytes_per_s else 0)
        self.on_way.append((self._departed + delay_s, memoryview(chunk)))
        self.n_queued += len(chunk)

    def deliver(self, now: float) -> None:
        """Hand on what has arrived. An empty chunk is the end of the stream."""
        self.is_blocked = False
        while self.on_way and self.on_way[0][0] <= now:
            due, chunk = self.on_way.popleft()
            try:
                if not chunk:
                    self.sink.shutdown(socket.SHUT_WR)
                n_sent = self.sink.send(chunk) if chunk else 0
            except BlockingIOError:
                n_sent = 0
            except OSError:  # the other side has gone
                n_sent = len(chunk)
            self.n_queued -= n_sent
            if n_sent < len(chunk):
                self.on_way.appendleft((due, chunk[n_sent:]))
                self.is_blocked = True
                return

    def _count(self, chunk: bytes) -> None:
        """A message is a head (a command, where it is a request, and 8 bytes for the size of its data), and data."""
        at = 0
        while at < len(chunk):
            if self._missing:
                step = min(self._missing, len(chunk) - at)
                self._missing -= step
                at += step
                continue
            part = chunk[at : at + self._head_bytes - len(self._head)]
            self._head += part
            at += len(part)
            if len(self._head) == self._head_bytes:
                self._missing = struct.unpack("<Q", self._head[-8:])[0]
                self._note(self._head[0], self._head_bytes + self._missing)
                self._head = b""


class _Relays:
    """All relays of one process, which share their settings."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = targets
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in targets]
        self._flows: dict[socket.socket, _Flow] = {}
        self._delay_s, self._bytes_per_s = 0.0, None
        self._log: list[list[int]] = []

    def serve(self) -> None:
        """Until stdin ends."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _print([f"127.0.0.1:{listener.getsockname()[1]}" for listener in self._listeners])
        while True:
            due = min((flow.on_way[0][0] for flow in self._flows.values() if self._waits(flow)), default=None)
            wait_s = None if due is None else max(0.0, due - time.monotonic() - SPIN_S)
            readers = [flow.source for flow in self._flows.values() if self._takes(flow)]
            blocked = [flow.sink for flow in self._flows.values() if flow.is_blocked]
            ready, _, _ = select.select([sys.stdin, *self._listeners, *readers], blocked, [], wait_s)
            one: Any
            for one in ready:
                if one is sys.stdin:
                    line = sys.stdin.readline()
                    if not line:
                        return
                    _print(self._obey(json.loads(line)))
                elif one in self._flows:
                    self._flows[one].receive(self._delay_s, self._bytes_per_s)
                else:
                    self._accept(self._listeners.index(one))
            now = time.monotonic()
            for flow in self._flows.values():
                flow.deliver(now)
            self._forget_ended()

    @staticmethod
    def _waits(flow: _Flow) -> bool:
        return bool(flow.on_way) and not flow.is_blocked

    @staticmethod
    def _takes(flow: _Flow) -> bool:
        return not flow.is_ended and flow.n_queued < MOST_QUEUED_BYTES

    def _obey(self, request: dict[str, Any]) -> Any:
        if request.pop("do") == "set":
            self._delay_s, self._bytes_per_s = request["delay_s"], request["bytes_per_s"]
            return None
        taken, self._log[:] = list(self._log), []
        return taken

    def _accept(self, number: int) -> None:
        near, _ = self._listeners[number].accept()
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        far, count = _connection(self._targets[number]), _Count(number, self._log)
        self._flows[near] = _Flow(near, far, 9, count.out)
        self._flows[far] = _Flow(far, near, 8, count.back)
        for end in (near, far):
            end.setblocking(False)

    def _forget_ended(self) -> None:
        for source, flow in list(self._flows.items()):
            back = self._flows.get(flow.sink)
            if back and all(one.is_ended and not one.on_way for one in (flow, back)):
                for end in (source, flow.sink):
                    del self._flows[end]
                    end.close()


def _answer_questions() -> None:
    """The server that `calibrate` asks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        _print(f"127.0.0.1:{listener.getsockname()[1]}")
        link, _ = listener.accept()
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while question := link.recv(64, socket.MSG_WAITALL):
            (n_bytes,) = struct.unpack("<Q", question[9:17])
            link.sendall(struct.pack("<Q", n_bytes) + bytes(n_bytes))


def _print(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        _Relays(sys.argv[1:]).serve()
    else:
        _answer_questions()
