"""llama.cpp's RPC servers, as they answer over the network before llama.cpp itself connects.

llama.cpp's client ends its own process where a server cannot be reached or speaks another version, and waits for ever
for one that is busy. So the lab asks first, in the same protocol (ggml-rpc.cpp and transport.h of llama.cpp): a
request is one byte for the command, eight for the size of its data, and the data; an answer is the size and the data.
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
"""How long a connection, and each answer, may take."""

AGAIN_S = 0.5
"""How soon a server that was not available is asked again."""

N_ROUND_TRIPS = 20
"""Small requests that are timed."""

HELLO, DEVICE_COUNT, GET_DEVICE_MEMORY = 14, 15, 11
"""Commands (enum rpc_cmd of ggml-rpc.cpp)."""

_CAPABILITIES = bytes(24)  # RPC_CONN_CAPS_SIZE: no transport but TCP
_MAX_ANSWER = 64
_LINGER = "hh" if os.name == "nt" else "ii"  # struct linger

Version = tuple[int, int, int]


@dataclass(frozen=True)
class Answer:
    """What a server answers: its protocol, free and total bytes of each device, and the time of a small request."""

    endpoint: str
    version: Version
    memories: tuple[tuple[int, int], ...]
    round_trip_s: float


class Unavailable(LabError):
    """A server that cannot be reached, or is busy: it may be there later."""

    def __init__(self, endpoint: str, reason: str, hint: str) -> None:
        super().__init__(f"The RPC server at {endpoint} cannot be used: {reason}.", hint)
        self.reason = reason


class _Closed(Exception):
    """The other side ended the connection instead of answering."""


def parse(text: str) -> tuple[str, ...]:
    """The endpoints of `HOST:PORT,HOST:PORT`, with names as IPv4 addresses. LabError for what cannot be one."""
    endpoints: list[str] = []
    for part in text.split(","):
        endpoint = _endpoint(part.strip())
        if endpoint in endpoints:
            raise LabError(f"The RPC server {endpoint} is named twice in --rpc {text}.", "Name each server once.")
        endpoints.append(endpoint)
    if len(endpoints) > MAX_SERVERS:
        raise LabError(f"--rpc names {len(endpoints)} servers.", f"llama.cpp takes at most {MAX_SERVERS}.")
    return tuple(endpoints)


def _endpoint(text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise LabError(
            f"--rpc: {text!r} is not the address of a server.",
            f"Write HOST:PORT, such as 192.168.1.20:{DEFAULT_PORT}; several with commas.",
        )
    try:
        return f"{ipaddress.IPv4Address(host)}:{int(port)}"
    except ValueError:
        pass
    try:
        resolved = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise LabError(
            f"--rpc: no IPv4 address is known for {host!r}.",
            "llama.cpp's RPC speaks IPv4 only: write the numbers, such as 192.168.1.20.",
        ) from None
    return f"{resolved[0][4][0]}:{int(port)}"


def probe(endpoint: str, own_version: Version, timeout_s: float = TIMEOUT_S) -> Answer:
    """Ask a server what it has. LabError where llama.cpp, which speaks `own_version`, could not work with it.

    The connection is closed again before this returns, and a server takes the next one then.
    """
    with contextlib.ExitStack() as stack:
        try:
            connection, version = _greet(stack, endpoint, _CAPABILITIES, timeout_s)
        except _Closed:
            try:  # before protocol 4.0 the greeting had no data (llama.cpp's PR 20590)
                _, version = _greet(stack, endpoint, b"", timeout_s)
            except _Closed:
                raise _not_a_server(endpoint) from None
        if version != own_version:  # where only the last number differs llama.cpp goes on, with other operations
            raise LabError(
                f"The RPC server at {endpoint} speaks protocol {dotted(version)}, llama.cpp here "
                f"{dotted(own_version)}.",
                "Use the same version of the lab, and so of llama-cpp-python, on both machines.",
            )
        try:
            return _question(connection, endpoint, version)
        except (_Closed, TimeoutError, struct.error):
            raise LabError(
                f"The RPC server at {endpoint} stopped answering in the middle.", "Look at what it says, and try again."
            ) from None


def probe_all(endpoints: Sequence[str], own_version: Version, patience_s: float = 0) -> tuple[Answer, ...]:
    """`probe` each, in this order. Those that are not available are asked again for `patience_s` seconds."""
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
    """`7.0.0`."""
    return ".".join(map(str, version))


def _greet(stack: contextlib.ExitStack, endpoint: str, data: bytes, timeout_s: float) -> tuple[socket.socket, Version]:
    """A new connection, closed with `stack`, and the version of the one that answers. _Closed where it ends it."""
    connection = stack.enter_context(_connect(endpoint, timeout_s))
    try:
        answer = _ask(connection, HELLO, data)
    except TimeoutError:
        # Without this a server that is free later would write to a closed connection, of which a signal can end it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack(_LINGER, 1, 0))
        raise Unavailable(
            endpoint,
            f"it is busy (it took the connection and did not answer within {timeout_s:g} s)",
            "It serves one client at a time: wait for the other one to end, or start a second server on another port. "
            "(Where no other client is: does another program have this port, or does the server hang?)",
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
        raise LabError(f"The RPC server at {endpoint} offers no device.", "Start it again: lab rpc-server")
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
            "Start one there (lab rpc-server; its --host must be an address that this machine can reach), or mend "
            "the address.",
        ) from None
    except TimeoutError:
        raise Unavailable(
            endpoint,
            f"its machine did not answer within {timeout_s:g} s",
            "Is that machine on, the address right, and the port open in its firewall? A server for which other "
            "clients wait already does not answer either.",
        ) from None
    except OSError as problem:
        raise Unavailable(
            endpoint,
            f"it cannot be reached ({problem.strerror or problem})",
            "Is the address right, and is this machine in that network?",
        ) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _ask(connection: socket.socket, command: int, data: bytes = b"") -> bytes:
    """One request and its answer. _Closed, TimeoutError, or struct.error for an answer of an impossible size."""
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
        f"What answers at {endpoint} is no RPC server of llama.cpp, or one of a very different version.",
        "Look which program has this port there, and which one lab rpc-server named when it started.",
    )
