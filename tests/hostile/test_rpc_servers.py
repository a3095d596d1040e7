"""RPC servers that want to hang the lab: each is refused in one sentence, in time."""

import socket
import struct
import time
from collections.abc import Callable

import pytest

from lab.errors import LabError
from lab.process import rpc
from lab.process.rpc import DEVICE_COUNT, GET_DEVICE_MEMORY, HELLO
from lab.process.wire import Backend
from lab.process.worker import Worker, WorkerDied
from tests.test_rpc import stand_in

LIMIT_S = 2.0
ONE, MEMORY = struct.pack("<I", 1), struct.pack("<QQ", 1 << 30, 1 << 30)
HUGE = struct.pack("<Q", 2**63)
NO_SERVER, STOPPED = "is not an RPC server", "stopped answering"

CASES: dict[str, tuple[dict[int, bytes], float, str]] = {
    # Changed answers by command (with their sizes), seconds before each byte, and what the lab says.
    "2^32 - 1 devices": ({DEVICE_COUNT: struct.pack("<QI", 4, 2**32 - 1)}, 0, "offers 4,294,967,295 devices"),
    "no device": ({DEVICE_COUNT: struct.pack("<QI", 4, 0)}, 0, "offers 0 devices"),
    "a byte per 200 ms": ({}, 0.2, "busy"),
    "slow after the greeting": ({DEVICE_COUNT: b"\4" + bytes(7)}, 0, STOPPED),
    "a byte per 30 ms": ({}, 0.03, STOPPED),
    "an endless greeting": ({HELLO: HUGE + bytes(1 << 20)}, 0, NO_SERVER),
    "an endless answer": ({DEVICE_COUNT: HUGE + bytes(1 << 20)}, 0, STOPPED),
    "a short greeting": ({HELLO: struct.pack("<Q", 1) + b"\7"}, 0, NO_SERVER),
    "an answer of another size": ({DEVICE_COUNT: struct.pack("<Q", 2) + b"ab"}, 0, STOPPED),
    "no memory": ({GET_DEVICE_MEMORY: bytes(8)}, 0, STOPPED),
}


def served(changed: dict[int, bytes], pause_s: float = 0) -> Callable[[socket.socket], None]:
    """Answers as a server does, but for the changed answers."""
    version = bytes(rpc.own_version()) + bytes(25)
    usual = {HELLO: version, DEVICE_COUNT: ONE, GET_DEVICE_MEMORY: MEMORY}

    def answer(connection: socket.socket) -> None:
        while head := connection.recv(9, socket.MSG_WAITALL):
            command, size = struct.unpack("<BQ", head)
            connection.recv(size, socket.MSG_WAITALL)
            data = changed.get(command) or struct.pack("<Q", len(usual[command])) + usual[command]
            for part in (data[i : i + 1] for i in range(len(data))) if pause_s else [data]:
                time.sleep(pause_s)
                connection.sendall(part)

    return answer


@pytest.mark.parametrize("name", CASES)
def test_a_server_is_refused_in_time(name: str) -> None:
    changed, pause_s, says = CASES[name]
    with stand_in(served(changed, pause_s)) as endpoint:
        began = time.monotonic()
        with pytest.raises(LabError, match=says):
            rpc.probe(endpoint, rpc.own_version(), LIMIT_S)
        assert time.monotonic() - began < LIMIT_S + 2


def test_a_server_that_answers_the_lab_and_not_llama_cpp_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    n_connections = 0

    def first_only(connection: socket.socket) -> None:
        nonlocal n_connections
        n_connections += 1
        if n_connections == 1:
            served({})(connection)
        else:
            time.sleep(30)

    monkeypatch.setattr(rpc, "START_S", 2.0)
    monkeypatch.setattr(rpc, "lost", lambda *_: "")
    with stand_in(first_only) as endpoint, Worker() as worker:
        worker.use(Backend(rpc=(endpoint,)))
        with pytest.raises(WorkerDied, match="An RPC server stopped answering"):
            assert worker.build
