"""The connections that native code of this process has open."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

IDLE_S, BETWEEN_S, N_UNANSWERED = 10, 5, 4
"""A peer is asked after so many seconds of silence, again after so many, and given up after so many without an answer.
"""


def watch_peers() -> list[str]:
    """Have the system notice when a connected machine vanishes; returns the peers' addresses, HOST:PORT.

    llama.cpp waits for ever for an answer of a machine that lost its power or its cable. With keepalive (tcp(7)) the
    wait ends with an error after half a minute. Empty where sockets are no files (Windows).
    """
    peers = []
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            host, port = connection.getpeername()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # the second on macOS
            for option, value in (
                (idle, IDLE_S),
                (getattr(socket, "TCP_KEEPINTVL", None), BETWEEN_S),
                (getattr(socket, "TCP_KEEPCNT", None), N_UNANSWERED),
            ):
                if option is not None:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
            peers.append(f"{host}:{port}")
    return peers


def _connections() -> Iterator[socket.socket]:
    """A second handle for each TCP socket over IPv4."""
    try:
        numbers = [int(path.name) for path in Path("/dev/fd").iterdir()]
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            handle = os.dup(number)
            try:
                connection = socket.socket(fileno=handle)
            except OSError:  # no socket
                os.close(handle)
                continue
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                yield connection
            else:
                connection.close()
