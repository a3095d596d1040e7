"""Check llama.cpp's RPC servers before llama.cpp itself connects to them.

llama.cpp's client aborts its process if a server is unreachable or has another protocol version, and waits forever for
a busy one. So the lab asks first, in the same protocol (llama.cpp's ggml-rpc.cpp and transport.h). A request is one
byte for the command, eight bytes for the size of the data, and the data; an answer is the size and the data.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from lab.errors import LabError

DEFAULT_PORT = 50052
MAX_SERVERS = 16
"""GGML_RPC_MAX_SERVERS of ggml-rpc.h."""

TIMEOUT_S = 5.0
"""Time limit for the connection, and for each answer."""

AGAIN_S = 0.5
"""Pause before an unavailable server is asked again."""

N_ROUND_TRIPS = 20

HELLO, DEVICE_COUNT, GET_DEVICE_MEMORY = 14, 15, 11
"""Commands (enum rpc_cmd of ggml-rpc.cpp)."""

_CAPABILITIES = bytes(24)  # RPC_CONN_CAPS_SIZE: no transport but TCP
_MAX_ANSWER = 64
_LINGER = "hh" if os.name == "nt" else "ii"  # struct linger

Version = tuple[int, int, int]


@dataclass(frozen=True)
class Answer:
    """A server's protocol version, free and total bytes of each device, and the median time of a small request."""

    endpoint: str
    version: Version
    memories: tuple[tuple[int, int], ...]
    round_trip_s: float


class Unavailable(LabError):
    """The server is unreachable or busy; it may be available later."""

    def __init__(self, endpoint: str, reason: str, hint: str) -> None:
        super().__init__(f"The RPC server at {endpoint} cannot be used: {reason}.", hint)
        self.reason = reason


class _Closed(Exception):
    """The server closed the connection without an answer."""


def parse(text: str) -> tuple[str, ...]:
    """The endpoints of `HOST:PORT,HOST:PORT`, with host names resolved to IPv4. LabError for an invalid address."""
    endpoints: list[str] = []
    for part in text.split(","):
        endpoint = _endpoint(part.strip())
        if endpoint in endpoints:
            raise LabError(f"--rpc {text} names the server {endpoint} twice.", "Name each server once.")
        endpoints.append(endpoint)
    if len(endpoints) > MAX_SERVERS:
        raise LabError(f"--rpc names {len(endpoints)} servers.", f"llama.cpp accepts at most {MAX_SERVERS}.")
    return tuple(endpoints)


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise LabError(
            f"--rpc: {text!r} is not a server address.",
            f"Write HOST:PORT, for example 192.168.1.20:{DEFAULT_PORT}. Separate several servers with commas.",
        )
    try:
        return f"{ipaddress.IPv4Address(host)}:{int(port)}"
    except ValueError:
        pass
    try:
        resolved = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise LabError(
            f"--rpc: no IPv4 address found for {host!r}.",
            "llama.cpp's RPC supports IPv4 only: write a numeric address, for example 192.168.1.20.",
        ) from None
    return f"{resolved[0][4][0]}:{int(port)}"


def probe(endpoint: str, own_version: Version, timeout_s: float = TIMEOUT_S) -> Answer:
    """Ask a server for its devices, and disconnect. LabError if llama.cpp (protocol `own_version`) cannot use it."""
    with contextlib.ExitStack() as stack:
        try:
            connection, version = _greet(stack, endpoint, _CAPABILITIES, timeout_s)
        except _Closed:
            try:  # before protocol 4.0 the greeting had no data (llama.cpp's PR 20590)
                _, version = _greet(stack, endpoint, b"", timeout_s)
            except _Closed:
                raise _not_a_server(endpoint) from None
        if version != own_version:  # llama.cpp accepts another patch version, although its operations differ
            raise LabError(
                f"The RPC server at {endpoint} uses protocol {dotted(version)}; llama.cpp on this machine uses "
                f"{dotted(own_version)}.",
                "Install the same version of the lab, and so of llama-cpp-python, on both machines.",
            )
        try:
            return _question(connection, endpoint, version)
        except (_Closed, TimeoutError, struct.error):
            raise LabError(
                f"The RPC server at {endpoint} stopped answering during the check.", "Read its output, and try again."
            ) from None


def probe_all(endpoints: Sequence[str], own_version: Version, patience_s: float = 0) -> tuple[Answer, ...]:
    """`probe` each server in order. Repeats for up to `patience_s` seconds while a server is unavailable."""
    deadline, answers = time.monotonic() + patience_s, list[Answer]()
    while len(answers) < len(endpoints):
        try:
            answers.append(probe(endpoints[len(answers)], own_version))
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(AGAIN_S)
    return tuple(answers)


def dotted(version: Version) -> str:
    """Such as `7.0.0`."""
    return ".".join(map(str, version))


def _greet(stack: contextlib.ExitStack, endpoint: str, data: bytes, timeout_s: float) -> tuple[socket.socket, Version]:
    """A new connection (closed with `stack`), and the server's protocol version. Raises _Closed."""
    connection = stack.enter_context(_connect(endpoint, timeout_s))
    try:
        answer = _ask(connection, HELLO, data)
    except TimeoutError:
        # Reset the connection: otherwise a busy server would write to it later, and SIGPIPE could end the server.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack(_LINGER, 1, 0))
        raise Unavailable(
            endpoint,
            f"it is busy (it accepted the connection but did not answer within {timeout_s:g} s)",
            "It serves one client at a time: wait for the other client, or start a second server on another port. "
            "If there is no other client, check whether another program uses this port or the server hangs.",
        ) from None
    except struct.error:
        raise _not_a_server(endpoint) from None
    if not 3 <= len(answer) <= 4 + len(_CAPABILITIES):
        raise _not_a_server(endpoint)
    return connection, (answer[0], answer[1], answer[2])


def _question(connection: socket.socket, endpoint: str, version: Version) -> Answer:
    times, n_devices = [], 0
    for _ in range(N_ROUND_TRIPS):
        start = time.perf_counter()
        (n_devices,) = struct.unpack("<I", _ask(connection, DEVICE_COUNT))
        times.append(time.perf_counter() - start)
    if not n_devices:
        raise LabError(f"The RPC server at {endpoint} offers no device.", "Restart it: lab rpc-server")
    memories = [
        struct.unpack("<QQ", _ask(connection, GET_DEVICE_MEMORY, struct.pack("<I", device)))
        for device in range(n_devices)
    ]
    return Answer(endpoint, version, tuple((free, total) for free, total in memories), statistics.median(times))


def _connect(endpoint: str, timeout_s: float) -> socket.socket:
    host, _, port = endpoint.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout_s)
    except ConnectionRefusedError:
        raise Unavailable(
            endpoint,
            "nothing listens there (the connection was refused)",
            "Start a server there (lab rpc-server --host ADDRESS, with an address that this machine can reach), or "
            "correct the address.",
        ) from None
    except TimeoutError:
        raise Unavailable(
            endpoint,
            f"its machine did not answer within {timeout_s:g} s",
            "Check that the machine is on, the address is right, and its firewall opens the port. A server with other "
            "clients waiting does not answer either.",
        ) from None
    except OSError as problem:
        raise Unavailable(
            endpoint,
            f"it cannot be reached ({problem.strerror or problem})",
            "Check the address, and that this machine is in that network.",
        ) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _ask(connection: socket.socket, command: int, data: bytes = b"") -> bytes:
    """One request and its answer. Raises _Closed, TimeoutError, or struct.error for an impossible size."""
    try:
        connection.sendall(struct.pack("<BQ", command, len(data)) + data)
        (size,) = struct.unpack("<Q", _receive(connection, 8))
        if size > _MAX_ANSWER:
            raise struct.error(f"an answer of {size} bytes")
        return _receive(connection, size)
    except TimeoutError:
        raise
    except OSError as problem:
        raise _Closed from problem


def _receive(connection: socket.socket, n: int) -> bytes:
    received = b""
    while len(received) < n:
        part = connection.recv(n - len(received))
        if not part:
            raise _Closed
        received += part
    return received


def _not_a_server(endpoint: str) -> LabError:
    return LabError(
        f"The program at {endpoint} is not an RPC server of llama.cpp, or has a very different version.",
        "Check which program uses this port there, and which port lab rpc-server printed when it started.",
    )
