"""RPC servers: our own as a command, and what the lab asks of any before llama.cpp connects. All on loopback."""

import contextlib
import dataclasses
import os
import re
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import lab
from lab.core import script as scripts
from lab.core.results import read as read_results
from lab.engine import devices
from lab.errors import LabError
from lab.features.lend.server import RpcServer
from lab.process import rpc
from lab.process.wire import Backend
from lab.process.worker import Worker, WorkerDied
from lab.runner.progress import Status
from tests.conftest import SETTINGS, run_lab, start_lab

OURS = (7, 0, 0)


@pytest.fixture(scope="module")
def server() -> Iterator[RpcServer]:
    with RpcServer("127.0.0.1", 0, n_threads=1) as started:
        process = psutil.Process(started.pid)
        yield started
    assert not process.is_running()


@contextlib.contextmanager
def stand_in(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this with each connection, one after the other; yields its endpoint."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection, contextlib.suppress(OSError):
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


def greeting(*version: int, caps: bytes = bytes(25)) -> Callable[[socket.socket], None]:
    """Answers a greeting with this version, as protocol 4 and later does, and hangs up."""

    def answer(connection: socket.socket) -> None:
        command, size = struct.unpack("<BQ", connection.recv(9, socket.MSG_WAITALL))
        connection.recv(size, socket.MSG_WAITALL)
        assert command == rpc.HELLO
        data = bytes(version) + caps
        connection.sendall(struct.pack("<Q", len(data)) + data)

    return answer


# What is named with --rpc


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1", "127.0.0.1:", ":50052", "127.0.0.1:0", "127.0.0.1:65536", "a:b", "h:1,", "h:²", "[::1]:50052"],
)
def test_what_cannot_be_a_server_is_refused(text: str) -> None:
    with pytest.raises(LabError, match="--rpc"):
        rpc.parse(text)


# What they answer


def test_a_server_says_what_it_has(server: RpcServer) -> None:
    answer = rpc.probe(server.endpoint, rpc.own_version())
    (free, total), *others = answer.memories
    assert not others
    assert (answer.endpoint, total) == (server.endpoint, server.devices[0].memory_bytes)
    assert 0 < free <= total
    assert 0 < answer.round_trip_s < rpc.TIMEOUT_S


def test_a_port_without_a_server_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(LabError, match=f"at {endpoint} cannot be used: nothing listens there") as problem:
        rpc.probe(endpoint, OURS)
    assert "lab rpc-server" in problem.value.hint


@pytest.mark.parametrize("version", [(8, 0, 0), (7, 1, 0), (7, 0, 1), (6, 0, 0)])
def test_another_version_is_named_with_ours(version: tuple[int, int, int]) -> None:
    with stand_in(greeting(*version)) as endpoint, pytest.raises(LabError) as problem:
        rpc.probe(endpoint, OURS)
    assert f"uses protocol {rpc.dotted(version)}; llama.cpp on this machine uses 7.0.0" in problem.value.what


@pytest.mark.parametrize("text", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"no"])
def test_another_program_is_no_rpc_server(text: bytes) -> None:
    with stand_in(lambda connection: connection.sendall(text)) as endpoint, pytest.raises(LabError) as problem:
        rpc.probe(endpoint, OURS)
    assert "is not an RPC server" in problem.value.what


def test_a_busy_server_is_called_busy_and_serves_on_afterwards(server: RpcServer) -> None:
    host, _, port = server.endpoint.rpartition(":")
    with socket.create_connection((host, int(port))) as first:
        first.sendall(struct.pack("<BQ", rpc.HELLO, 24) + bytes(24))
        first.recv(36, socket.MSG_WAITALL)  # from here on it is this client's
        with pytest.raises(rpc.Unavailable, match="busy"):
            rpc.probe(server.endpoint, rpc.own_version(), timeout_s=0.3)
    assert rpc.probe(server.endpoint, rpc.own_version()).memories


# Our own, as a command


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.20", "8.8.8.8"])
def test_an_address_that_others_reach_needs_to_be_asked_for(host: str) -> None:
    status, out, err = run_lab("rpc-server", "--host", host, "--port", 0)
    assert (status, out) == (1, "")
    assert "--open-network" in err


def test_a_port_in_use_is_refused(server: RpcServer) -> None:
    with pytest.raises(LabError, match="Cannot listen") as problem:
        RpcServer("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
    assert "--port" in problem.value.hint


def test_a_server_that_dies_is_reported_with_its_last_words() -> None:
    sentences: list[str] = []
    with RpcServer("127.0.0.1", 0) as dying:
        host, _, port = dying.endpoint.rpartition(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1")
            with pytest.raises(LabError, match=f"at {dying.endpoint} ended: SIGABRT .* last output: Expected HELLO"):
                while True:
                    sentences.append((dying.next_event() or {}).get("said", ""))
                    if "HELLO" in sentences[-1]:
                        psutil.Process(dying.pid).send_signal(signal.SIGABRT)
    assert "llama.cpp: Expected HELLO command, update client" in sentences


def _introduced(process: subprocess.Popen[str]) -> str:
    """The endpoint that `lab rpc-server` names."""
    assert process.stdout
    for line in process.stdout:
        if match := re.match(r"use it   lab measure --rpc (\S+)", line):
            return match[1]
    raise AssertionError(process.communicate()[1])


def _child_of(process: subprocess.Popen[str]) -> psutil.Process:
    (child,) = psutil.Process(process.pid).children(recursive=True)
    return child


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_server_cleanly(number: int) -> None:
    with start_lab("rpc-server", "--port", 0, "--threads", 1) as process:
        assert _introduced(process)
        child = _child_of(process)
        process.send_signal(number)
        _, err = process.communicate()
        assert process.returncode == 0
        assert "Stopped." in err
        assert not child.is_running()


# Which memory is counted once


# Measuring over them

OVER_RPC = dataclasses.replace(SETTINGS, n_gpu_layers=31, n_threads=1, n_threads_batch=1, n_ctx=256)


@pytest.fixture
def worker(server: RpcServer) -> Iterator[Worker]:
    with Worker() as started:
        started.use(Backend(rpc=(server.endpoint,)))
        yield started


def test_a_vanished_peer_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        with client, listening.accept()[0] as accepted:
            peers = devices.enable_keepalive()
            assert {"{}:{}".format(*one.getpeername()) for one in (client, accepted)} <= set(peers)
            for one in (client, accepted):
                assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == devices.N_UNANSWERED


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_a_server_that_hangs_does_not_hang_the_lab(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.process.rpc.SILENCE_S", 0.5)
    with RpcServer("127.0.0.1", 0, n_threads=1) as hanging, Worker() as worker:
        worker.use(Backend(rpc=(hanging.endpoint,)))
        worker.load(embedded, OVER_RPC)
        worker.new_context(OVER_RPC)
        psutil.Process(hanging.pid).suspend()
        with pytest.raises(WorkerDied, match="an RPC server or its machine hangs"):
            worker.run(scripts.run(list(range(100, 120)), 5, 8), lambda progress: None)


def test_a_server_that_cannot_be_used_is_an_error_of_every_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"127.0.0.1:{closed.getsockname()[1]}"
    for command in ("machine", "measure"):
        status, _, err = run_lab(command, "--rpc", endpoint)
        assert status == 1
        assert f"Error: The RPC server at {endpoint} cannot be used: nothing listens there" in err


class Dying:
    """A server that ends in the middle of a run; with `returns` another one takes its place."""

    def __init__(self, repeat: int, returns: bool) -> None:
        self.server, self.repeat, self.returns = RpcServer("127.0.0.1", 0, n_threads=1), repeat, returns
        self.endpoint, self.is_over = self.server.endpoint, False

    def watch(self, status: Status) -> None:
        if (status.repeat, status.doing) == (self.repeat, "decode") and not self.is_over:
            self.is_over = True
            self.server.close()
            if self.returns:
                self.server = RpcServer("127.0.0.1", int(self.endpoint.rpartition(":")[2]), n_threads=1)


def test_a_server_that_dies_costs_a_run_and_not_the_session(tmp_path: Path) -> None:
    dying = Dying(repeat=0, returns=True)
    with pytest.warns(UserWarning, match="1 runs failed"):
        records = lab.measure([16], 120, 2, rpc=dying.endpoint, out=tmp_path, watch=dying.watch)
    dying.server.close()
    measured = [record.run for record in records if not record.run.warmup]
    assert [run.status for run in measured] == ["crashed", "ok"]
    assert "Remote RPC server crashed" in str(measured[0].error)


def test_a_server_that_stays_away_ends_the_session_and_keeps_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.process.rpc.PATIENCE_S", 0)
    dying = Dying(repeat=1, returns=False)
    with pytest.raises(rpc.Unavailable, match=dying.endpoint):
        lab.measure([16], 120, 2, rpc=dying.endpoint, out=tmp_path, watch=dying.watch)
    measured = [record.run for record in read_results([next(tmp_path.glob("*.jsonl"))]).records]
    assert [run.status for run in measured if not run.warmup] == ["ok", "crashed"]
    assert f"The RPC server {dying.endpoint} is gone: nothing listens there" in str(measured[-1].error)
