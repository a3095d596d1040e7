"""Check llama.cpp's RPC servers before llama.cpp itself connects to them.

llama.cpp's client aborts its process if a server is unreachable or has another protocol version, and waits forever for
a busy one. So the lab asks first, in the same protocol (llama.cpp's ggml-rpc.cpp). A request is one byte for the
command, eight bytes for the size of the data, and the data; an answer is the size and the data.
"""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from lab.errors import LabError
from lab.process.spawning import cause_of_death, environment, start

DEFAULT_PORT = 50052
MAX_SERVERS = 16
"""GGML_RPC_MAX_SERVERS of ggml-rpc.h."""

MAX_DEVICES = 16
"""llama_max_devices() of llama.cpp."""

TIMEOUT_S = 5.0
"""Time limit for all that is asked of one server, however slowly it answers."""

AGAIN_S = 0.5
"""Pause before an unavailable server is asked again."""

START_S = 60
"""Time limit for a server's start, and for the first answer of llama.cpp with servers."""

PATIENCE_S = 20
"""How long a restarted worker waits for RPC servers: they may be restarting, or still computing for the dead child."""

SILENCE_S = 1800
"""Time limit for a run over RPC without a new token: a step of a large model on slow machines takes minutes."""

HANGS = f"No token for {SILENCE_S / 60:g} minutes: an RPC server or its machine hangs. "

N_ROUND_TRIPS = 5

HELLO, DEVICE_COUNT, GET_DEVICE_MEMORY = 14, 15, 11
"""Commands (enum rpc_cmd of ggml-rpc.cpp)."""

_CAPABILITIES = bytes(24)  # RPC_CONN_CAPS_SIZE: no transport but TCP
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


def parse(text: str) -> tuple[str, ...]:
    """The endpoints of `HOST:PORT,HOST:PORT`, with host names resolved to IPv4. LabError for an invalid address."""
    endpoints: list[str] = []
    for part in text.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or not 1 <= int(port[:6]) <= 65535:
            raise LabError(
                f"--rpc: {part.strip()!r} is not a server address.",
                f"Write HOST:PORT, for example 192.168.1.20:{DEFAULT_PORT}. Separate several servers with commas.",
            )
        try:
            found = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise LabError(
                f"--rpc: no IPv4 address found for {host!r}.",
                "llama.cpp's RPC supports IPv4 only: write a numeric address, for example 192.168.1.20.",
            ) from None
        endpoint = f"{found[0][4][0]}:{int(port)}"
        if endpoint in endpoints:
            raise LabError(f"--rpc {text} names the server {endpoint} twice.", "Name each server once.")
        endpoints.append(endpoint)
    if len(endpoints) > MAX_SERVERS:
        raise LabError(f"--rpc names {len(endpoints)} servers.", f"llama.cpp accepts at most {MAX_SERVERS}.")
    return tuple(endpoints)


def probe(endpoint: str, own_version: Version | None, timeout_s: float = TIMEOUT_S) -> Answer:
    """Ask a server for its devices, and disconnect. LabError if llama.cpp (protocol `own_version`) cannot use it."""
    deadline = time.monotonic() + timeout_s
    host, _, port = endpoint.rpartition(":")
    try:
        connected = socket.create_connection((host, int(port)), timeout_s)
    except OSError as problem:
        reason = f"it cannot be reached ({problem.strerror or problem})"
        hint = (
            "Check that the machine is on, the address is right, and its firewall opens the port. A server with other "
            "clients waiting does not answer either."
        )
        if isinstance(problem, ConnectionRefusedError):
            reason = "nothing listens there (the connection was refused)"
            hint = (
                "Start a server there (lab rpc-server --host ADDRESS, with an address that this machine can reach), or "
                "correct the address."
            )
        elif isinstance(problem, TimeoutError):
            reason = f"its machine did not answer within {timeout_s:g} s"
        raise Unavailable(endpoint, reason, hint) from None
    with connected as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            answer = _ask(connection, deadline, HELLO, _CAPABILITIES)
        except TimeoutError:
            # Reset the connection: otherwise a busy server would write to it later, and SIGPIPE could end the server.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack(_LINGER, 1, 0))
            raise Unavailable(
                endpoint,
                f"it is busy (it accepted the connection but did not answer within {timeout_s:g} s)",
                "It serves one client at a time: wait for the other client, or start a second server on another port. "
                "If there is no other client, check whether another program uses this port or the server hangs.",
            ) from None
        except OSError:
            answer = b""
        if not 3 <= len(answer) <= 4 + len(_CAPABILITIES):
            raise LabError(
                f"The program at {endpoint} is not an RPC server of llama.cpp, or has a very different version.",
                "Check which program uses this port there, and which port lab rpc-server printed when it started.",
            )
        version = answer[0], answer[1], answer[2]
        if own_version and version != own_version:  # llama.cpp accepts another patch version; its operations differ
            raise LabError(
                f"The RPC server at {endpoint} uses protocol {dotted(version)}; llama.cpp on this machine uses "
                f"{dotted(own_version)}.",
                "Install the same version of the lab, and so of llama-cpp-python, on both machines.",
            )
        try:
            times, n_devices = [], 0
            for _ in range(N_ROUND_TRIPS):
                start = time.perf_counter()
                (n_devices,) = struct.unpack("<I", _ask(connection, deadline, DEVICE_COUNT))
                times.append(time.perf_counter() - start)
            if not 1 <= n_devices <= MAX_DEVICES:
                raise LabError(
                    f"The RPC server at {endpoint} offers {n_devices:,} devices; llama.cpp takes 1 to {MAX_DEVICES}.",
                    "Restart it, and name its devices: lab rpc-server --device NAME",
                )
            numbers = [struct.pack("<I", device) for device in range(n_devices)]
            answers = [_ask(connection, deadline, GET_DEVICE_MEMORY, number) for number in numbers]
            memories = tuple((free, total) for free, total in (struct.unpack("<QQ", one) for one in answers))
            return Answer(endpoint, version, memories, statistics.median(times))
        except (OSError, struct.error):
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


@cache
def own_version(lib: str | None = None) -> Version:
    """The RPC protocol version of the libraries in folder `lib` (None: the installed ones), from their own output.

    LabError if they were built without RPC.
    """
    with start("from lab.engine import devices; devices.print_rpc_version()", env=environment(lib)) as process:
        printed, stderr = process.communicate()
    lines = printed.decode(errors="replace").splitlines()
    for line in lines:
        if match := re.match(r"Starting RPC server v(\d+)\.(\d+)\.(\d+)$", line):
            return int(match[1]), int(match[2]), int(match[3])
        if line.startswith('{"error"'):
            problem = json.loads(line)
            raise LabError(problem["error"], problem["hint"])
    lines = stderr.decode(errors="replace").strip().splitlines()
    raise LabError(
        f"llama.cpp did not print its RPC protocol version. {cause_of_death('Its process', process.returncode, lines)}",
        "Check which build is installed: lab machine",
    )


def lost(endpoints: Sequence[str], lib: str | None) -> str:
    """A sentence for each server that is no longer available."""
    sentences = []
    for endpoint in endpoints:
        try:
            probe(endpoint, own_version(lib))
        except Unavailable as problem:
            sentences.append(f"The RPC server {endpoint} is gone: {problem.reason}. ")
        except LabError:  # it answers; a restart reports what is wrong with it
            continue
    return "".join(sentences)


def _ask(connection: socket.socket, deadline: float, command: int, data: bytes = b"") -> bytes:
    """One request and its answer. OSError if none comes before the deadline, or one that is too long."""
    connection.settimeout(max(1e-3, deadline - time.monotonic()))
    connection.sendall(struct.pack("<BQ", command, len(data)) + data)
    (size,) = struct.unpack("<Q", _receive(connection, deadline, 8))
    if size > 64:
        raise OSError(f"an answer of {size} bytes")
    return _receive(connection, deadline, size)


def _receive(connection: socket.socket, deadline: float, n: int) -> bytes:
    received = b""
    while len(received) < n:
        if (left_s := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(n - len(received))
        if not part:
            raise ConnectionError("the server closed the connection")
        received += part
    return received
