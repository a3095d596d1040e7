"""Ask llama.cpp's RPC servers for a sign of life before llama.cpp itself connects to them.

llama.cpp aborts its process if it cannot reach a server, and waits forever for a busy one, which
serves one client at a time. So the lab greets each server first, in llama.cpp's protocol
(ggml-rpc.cpp): a request is one byte for the command, eight for the size of its data, and the data;
an answer is the size and the data.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence

from lab.errors import LabError

DEFAULT_PORT = 50052
MAX_SERVERS = 16  # GGML_RPC_MAX_SERVERS of ggml-rpc.h
TIMEOUT_S = 5.0  # for a server's answer, however slowly it comes

HELLO = 14  # RPC_CMD_HELLO
GREETING = struct.pack("<BQ", HELLO, 24) + bytes(24)  # without capabilities: only TCP
ANSWER_BYTES = range(3, 65)  # the version in three bytes, and capabilities
# Struct linger: close with a reset
RESET = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)

SEVERAL = (
    f"Write HOST:PORT, such as 192.168.1.20:{DEFAULT_PORT}. Separate servers with commas."
)


class ServerUnavailable(LabError):
    """An RPC server cannot be used; `reason` says why, without the address."""

    def __init__(self, endpoint: str, reason: str, hint: str) -> None:
        super().__init__(f"The RPC server at {endpoint} cannot be used: {reason}.", hint)
        self.reason = reason


def endpoints(addresses: Sequence[str]) -> tuple[str, ...]:
    """The servers with host names resolved to IPv4. LabError for an address that cannot be one."""
    resolved = [_resolved(address) for address in addresses]
    for endpoint in resolved:
        if resolved.count(endpoint) > 1:
            raise LabError(
                f"--rpc names the server {endpoint} twice.", "Name each server once."
            )
    if len(resolved) > MAX_SERVERS:
        what = f"--rpc names {len(resolved)} servers."
        raise LabError(what, f"llama.cpp accepts at most {MAX_SERVERS}.")
    return tuple(resolved)


def _resolved(address: str) -> str:
    host, _, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit()
    if not host or not is_number or not 1 <= int(port[:6]) <= 65535:
        raise LabError(f"--rpc: {address!r} is not a server address.", SEVERAL)
    try:
        infos = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        what = f"--rpc: no IPv4 address found for {host!r}."
        hint = "llama.cpp's RPC needs IPv4: write a numeric address, such as 192.168.1.20."
        raise LabError(what, hint) from None
    address_of_host = infos[0][4][0]
    return f"{address_of_host}:{int(port)}"


def check(endpoint: str, timeout_s: float = TIMEOUT_S) -> None:
    """Greet a server and hang up. ServerUnavailable if it does not answer like an RPC server."""
    deadline = time.monotonic() + timeout_s
    host, _, port = endpoint.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout_s)
    except ConnectionRefusedError:
        hint = "Start a server there (lab rpc-server), or correct the address."
        raise ServerUnavailable(endpoint, "nothing listens there", hint) from None
    except OSError as problem:
        reason = f"it cannot be reached ({problem.strerror or problem})"
        hint = "Check that the machine is on, and that its firewall opens the port."
        raise ServerUnavailable(endpoint, reason, hint) from None
    with connection:
        try:
            connection.sendall(GREETING)
            (size,) = struct.unpack("<Q", _receive(connection, 8, deadline))
        except TimeoutError:
            # Otherwise a busy server would write to this connection later, which could end it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            reason = f"it does not answer within {timeout_s:g} s"
            hint = "It serves one client at a time: wait for the other client, or restart it."
            raise ServerUnavailable(endpoint, reason, hint) from None
        except OSError:
            size = 0
    if size not in ANSWER_BYTES:
        hint = "Check which program uses this port there."
        raise ServerUnavailable(endpoint, "it is no RPC server of llama.cpp", hint)


def _receive(connection: socket.socket, n_bytes: int, deadline: float) -> bytes:
    """The next bytes. TimeoutError if they do not come before the deadline."""
    received = b""
    while len(received) < n_bytes:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        part = connection.recv(n_bytes - len(received))
        if not part:
            raise ConnectionError("the server closed the connection")
        received += part
    return received


def lost(servers: Sequence[str]) -> str:
    """A sentence about the first server that no longer answers; "" if all do."""
    for endpoint in servers:
        try:
            check(endpoint)
        except ServerUnavailable as problem:
            return f"The RPC server at {endpoint} is gone: {problem.reason}."
    return ""
