"""`lab rpc-server`: lend this machine's devices with llama.cpp's RPC server, in a child process."""

from __future__ import annotations

import ipaddress
import json
import socket
import subprocess
import time
from collections.abc import Sequence

import click

from lab.app.help import Command
from lab.core import shell
from lab.core.asked_settings import MAX_THREADS, check_number, parts
from lab.errors import LabError
from lab.process import rpc
from lab.process.setup import ProcessSetup, environment
from lab.process.spawning import cause_of_death, start, wait_for_end
from lab.runner import builds, machine

START_S = 60  # for the server to answer

WARNING = (
    "Warning: other machines can reach {endpoint}. The server asks for no password, encrypts "
    "nothing, and executes what a client sends. Use it only in a network where every machine is "
    "yours, and stop it afterwards."
)


@click.command("rpc-server", cls=Command)
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="IPv4 address to listen on."
)
@click.option(
    "--port",
    default=rpc.DEFAULT_PORT,
    show_default=True,
    type=click.IntRange(1, 65535),
    help="Port to listen on.",
)
@click.option(
    "--device", "-dev", help="Devices to lend, by name (see lab doctor).  [default: all GPUs]"
)
@click.option("--threads", "-t", type=int, help="Threads of the CPU, if it is lent.")
@click.option("--lib", metavar="FOLDER", help="Use the llama.cpp libraries in this folder.")
def command(
    host: str, port: int, device: str | None, threads: int | None, lib: str | None
) -> None:
    """Lend this machine's devices to another machine (llama.cpp's RPC).

    \b
      lab rpc-server
      lab rpc-server --host 192.168.1.20 --lib llama.cpp/build/bin

    The other machine uses them with --rpc HOST:PORT. Without a GPU the server lends the CPU. It
    serves one client at a time, until Ctrl-C.

    Warning: it executes what a client sends, without a password. It listens on this machine only,
    unless --host says otherwise: never open it to an untrusted network.
    """
    if threads is not None:
        check_number("threads", threads, MAX_THREADS)
    folder = builds.folder_of(lib)
    n_threads = threads or machine.default_threads()
    try:
        with RpcServer(host, port, parts(device), n_threads, folder) as server:
            if not ipaddress.IPv4Address(host).is_loopback:
                click.echo(WARNING.format(endpoint=server.endpoint), err=True)
            click.echo(f"lends    {', '.join(server.devices)}")
            click.echo(f"use it   {shell.lab('measure', '--rpc', server.endpoint)}")
            click.echo("Press Ctrl-C to stop it.", err=True)
            server.wait()
    except KeyboardInterrupt:  # how a server is meant to end
        click.echo("Stopped.", err=True)


class RpcServer:
    """A running server. Use it in a `with` block: leaving it ends the server. What it prints is
    not shown if `is_silent`.

    LabError if it cannot start: no free port, no such device, a build without RPC.
    """

    def __init__(
        self,
        host: str,
        port: int,
        device: Sequence[str] = (),
        threads: int = 1,
        lib: str | None = None,
        is_silent: bool = False,
    ) -> None:
        _check_address(host, port)
        self.endpoint = f"{host}:{port}"
        asked = {"endpoint": self.endpoint, "device": list(device), "threads": threads}
        code = "from lab.engine.rpc_server import serve; serve()"
        messages = subprocess.DEVNULL if is_silent else None
        variables = environment(ProcessSetup(lib=lib))
        self._process = start(code, json.dumps(asked), stderr=messages, env=variables)
        try:
            self.devices = self._lent()
            self._wait_for_answer()
        except BaseException:
            self.close()
            raise

    def _lent(self) -> list[str]:
        """The names of the lent devices, which the child writes before it listens."""
        stdout = self._process.stdout
        line = stdout.readline() if stdout else b""
        if not line:
            raise self._death()
        answer = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"], answer["hint"])
        return list(answer["device"])

    def _wait_for_answer(self) -> None:
        """Wait until the server answers a client."""
        host, _, port = self.endpoint.rpartition(":")
        reachable = "127.0.0.1" if host == "0.0.0.0" else host
        deadline = time.monotonic() + START_S
        while True:
            if self._process.poll() is not None:
                raise self._death()
            try:
                return rpc.check(f"{reachable}:{port}")
            except rpc.ServerUnavailable:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.05)

    def wait(self) -> None:
        """Wait for the server's end. LabError, as it only ends by an error."""
        self._process.wait()
        raise self._death()

    def _death(self) -> LabError:
        status = self._process.wait()
        what = cause_of_death(f"The RPC server at {self.endpoint}", status, [])
        return LabError(what, "Read its output above, and start it again.")

    def close(self) -> None:
        """Kill the server."""
        self._process.kill()
        wait_for_end(self._process)

    def __enter__(self) -> RpcServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_address(host: str, port: int) -> None:
    """LabError if a server cannot listen there."""
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        what = f"--host {host} is not a numeric IPv4 address."
        raise LabError(
            what, "Use 127.0.0.1, or this machine's address in your network."
        ) from None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as in llama.cpp
        try:
            trial.bind((host, port))
        except OSError as problem:
            what = f"A server cannot listen at {host}:{port}: {problem.strerror}."
            raise LabError(
                what, "Choose another --port, or the --host of this machine."
            ) from None
