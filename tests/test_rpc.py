"""llama.cpp's RPC: servers on loopback that lend devices, dead ones, and ones that die in a run."""

import contextlib
import json
import re
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core.asked_settings import AskedSettings
from lab.core.record import CRASHED, OK, Device
from lab.core.results import read
from lab.errors import LabError
from lab.features.rpc_server import RpcServer
from lab.process import rpc
from lab.process.setup import ProcessSetup
from lab.process.worker import Worker
from lab.runner import machine, placement
from lab.runner.progress import Status
from tests.support import rpc_library
from tests.support.command import run_lab, start_lab
from tests.support.records import MODEL

REMOTE = Device("RPC0", "192.0.2.1:50052", "gpu", 10**9)
LOCAL = Device("CUDA0", "A GPU", "gpu", 10**9)
FAST: dict[str, Any] = {"prompt": "random", "threads": 1}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A build of llama.cpp with RPC."""
    return str(rpc_library.build(tmp_path_factory.mktemp("rpc")))


@contextlib.contextmanager
def program(answer: bytes | None) -> Iterator[str]:
    """Some other program that answers each client with these bytes, or (None) not at all."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connections = []
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connections.append(connection)
                    if answer is not None:
                        connection.sendall(answer)
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)


# What --rpc accepts


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "127.0.0.1:", ":50052", "127.0.0.1:0", "h:x"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(LabError, match="is not a server address"):
        placement.rpc_servers(AskedSettings(rpc=address))


def test_a_server_that_is_named_twice_is_refused() -> None:
    with pytest.raises(LabError, match=r"names the server 127\.0\.0\.1:50052 twice"):
        placement.rpc_servers(AskedSettings(rpc="127.0.0.1:50052,localhost:50052"))


def test_devices_of_servers_come_first_and_are_waited_for_at_the_end() -> None:
    devices = (Device("CPU", "A CPU", "cpu"), LOCAL, REMOTE)
    assert machine.by_default(devices) == (REMOTE, LOCAL)
    assert placement.settings(AskedSettings(), -1, (REMOTE,), MODEL)["prefill_wait"] == "end"
    assert placement.settings(AskedSettings(), -1, (LOCAL,), MODEL)["prefill_wait"] is None


# What is asked before llama.cpp connects


def test_a_dead_server_is_refused_with_its_address(tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    status, _, err = run_lab("measure", "--rpc", endpoint, "-o", tmp_path)
    assert status == 1
    assert f"The RPC server at {endpoint} cannot be used: nothing listens there." in err


def test_a_busy_server_is_called_busy() -> None:
    with (
        program(None) as endpoint,
        pytest.raises(LabError, match="does not answer") as problem,
    ):
        rpc.check(endpoint, timeout_s=0.3)
    assert "one client at a time" in problem.value.hint


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH_9.2\r\n", b"", b"no"])
def test_another_program_is_no_rpc_server(answer: bytes) -> None:
    with program(answer) as endpoint, pytest.raises(LabError, match="is no RPC server"):
        rpc.check(endpoint)


def test_a_build_without_rpc_says_how_to_get_one() -> None:
    greeting = struct.pack("<Q", 28) + bytes(28)
    with program(greeting) as endpoint, Worker() as worker:
        worker.use(ProcessSetup(rpc=(endpoint,)))
        with pytest.raises(LabError, match="has no RPC") as problem:
            _ = worker.build
    assert "-DGGML_RPC=ON" in problem.value.hint
    assert "--lib FOLDER" in problem.value.hint
    status, _, err = run_lab("rpc-server", "--port", free_port())
    assert status == 1
    assert "has no RPC" in err
    assert "--lib FOLDER" in err


# The command


def test_its_help_warns() -> None:
    status, out, _ = run_lab("rpc-server", "--help")
    assert status == 0
    assert "executes what a client sends" in re.sub(r"\s+", " ", out)


@pytest.mark.parametrize("host", ["localhost", "::1", "192.0.2.1"])
def test_it_listens_only_on_an_address_of_this_machine(host: str) -> None:
    with pytest.raises(LabError, match=re.escape(host)):
        RpcServer(host, free_port())


def test_ctrl_c_ends_a_server_cleanly(libraries: str) -> None:
    port = free_port()
    with start_lab(
        "rpc-server", "--port", port, "--threads", 1, "--lib", libraries
    ) as process:
        assert process.stdout
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert lines == ["lends    CPU\n", f"use it   lab measure --rpc 127.0.0.1:{port}\n"]
    assert process.returncode == 0
    assert "Stopped." in err
    with pytest.raises(rpc.ServerUnavailable):
        rpc.check(f"127.0.0.1:{port}")


def test_an_unknown_device_and_a_port_in_use_are_refused(libraries: str) -> None:
    with pytest.raises(LabError, match="no device CUDA7"):
        RpcServer("127.0.0.1", free_port(), ["CUDA7"], lib=libraries)
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(LabError, match="cannot listen"),
    ):
        RpcServer("127.0.0.1", listening.getsockname()[1], lib=libraries)


# Measuring over servers


@pytest.fixture
def servers(libraries: str) -> Iterator[list[RpcServer]]:
    """Two servers that lend the CPU."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(RpcServer("127.0.0.1", free_port(), lib=libraries))
            for _ in range(2)
        ]


def test_a_model_lies_on_two_servers(
    servers: list[RpcServer], libraries: str, mini: Path, tmp_path: Path
) -> None:
    addresses = ",".join(server.endpoint for server in servers)
    asked = ["--rpc", addresses, "--lib", libraries, "--tensor-split", "1,1", "--model", mini]
    plan = run_lab("measure", "-p", "8", "-n", "4", *asked, "--dry-run", "--json")
    rows = json.loads(plan[1])["places"]
    assert [(row["device"], row["layers"]) for row in rows] == [
        ("RPC0", [0, 1]),
        ("RPC1", [2, 3]),
        ("CPU", []),
    ]

    records = lab.measure(
        "8",
        4,
        2,
        str(mini),
        rpc=addresses,
        lib=libraries,
        tensor_split="1,1",
        out=tmp_path,
        **FAST,
    )
    assert {record.run.status for record in records} == {OK}
    for record in records:
        assert record.settings.rpc == tuple(server.endpoint for server in servers)
        placement = record.run.placement
        assert placement is not None
        assert placement.layers == ("RPC0", "RPC0", "RPC1", "RPC1")
        assert placement.caches == ("RPC0", "RPC0", "RPC1")
    assert list(lab.read([tmp_path]).records) == records


def test_tensors_stay_on_this_machine_if_asked(
    servers: list[RpcServer], libraries: str, mini: Path, tmp_path: Path
) -> None:
    buffers = {}
    for override in (None, "ffn_.*=CPU"):
        records = lab.measure(
            *("8", 4, 1, str(mini)),
            rpc=servers[0].endpoint,
            lib=libraries,
            override_tensor=override,
            out=tmp_path / str(override),
            **FAST,
        )
        placement = records[-1].run.placement
        assert records[-1].run.status == OK
        assert placement is not None
        buffers[override] = sum(
            buffer.n_bytes
            for buffer in placement.buffers
            if buffer.part == "model" and buffer.name.startswith("RPC")
        )
    assert 0 < buffers["ffn_.*=CPU"] < buffers[None]


class Dying:
    """A server that ends in the middle of a run; if it `returns`, another takes its place."""

    def __init__(
        self,
        libraries: str,
        repeat: int,
        returns: bool,
    ) -> None:
        self.libraries = libraries
        self.repeat = repeat
        self.returns = returns
        self.port = free_port()
        self.is_over = False
        self.server = RpcServer("127.0.0.1", self.port, lib=libraries)
        self.endpoint = self.server.endpoint

    def watch(self, status: Status) -> None:
        if self.is_over or (status.repeat, status.doing) != (self.repeat, "decode"):
            return
        self.is_over = True
        self.server.close()
        if self.returns:
            self.server = RpcServer("127.0.0.1", self.port, lib=self.libraries)


def test_a_server_that_dies_and_returns_costs_one_run(
    libraries: str, embedded: Path, tmp_path: Path
) -> None:
    dying = Dying(libraries, repeat=0, returns=True)
    with dying.server, pytest.warns(UserWarning, match="1 run failed|1 runs failed"):
        records = lab.measure(
            *("16", 120, 2, str(embedded)),
            rpc=dying.endpoint,
            lib=libraries,
            out=tmp_path,
            watch=dying.watch,
            **FAST,
        )
    dying.server.close()
    timed = [record.run for record in records if not record.run.warmup]
    assert [run.status for run in timed] == [CRASHED, OK]


def test_a_server_that_stays_away_ends_the_session_and_keeps_its_runs(
    libraries: str, embedded: Path, tmp_path: Path
) -> None:
    dying = Dying(libraries, repeat=1, returns=False)
    with dying.server, pytest.raises(LabError, match=dying.endpoint):
        lab.measure(
            *("16", 120, 2, str(embedded)),
            rpc=dying.endpoint,
            lib=libraries,
            out=tmp_path,
            watch=dying.watch,
            **FAST,
        )
    (path,) = tmp_path.glob("*.jsonl")
    timed = [record.run for record in read([path]).records if not record.run.warmup]
    assert [run.status for run in timed] == [OK, CRASHED]
    assert f"The RPC server at {dying.endpoint} is gone: nothing listens there" in str(
        timed[-1].error
    )
