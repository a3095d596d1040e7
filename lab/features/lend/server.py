"""`lab rpc-server`: ggml's RPC server in a child process (child.py), so that it ends when the lab ends."""

from __future__ import annotations

import collections
import errno
import ipaddress
import json
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from lab.cli.help import Command
from lab.core import shell
from lab.core.asked_settings import MAX_THREADS, check_number
from lab.core.lines import from_json
from lab.core.record import Device
from lab.errors import LabError
from lab.process import rpc
from lab.process.spawning import cause_of_death, environment, start, wait_for_end

WARNING = (
    "Warning: {endpoint} is open to the network. llama.cpp calls its RPC server fragile and insecure, and says: never "
    "run it on an open network. It asks for no password and encrypts nothing; whoever reaches this port can read and "
    "change this process. Use it only in a network where every machine is yours, and stop it afterwards."
)


@click.command("rpc-server", cls=Command)
@click.option("--host", default="127.0.0.1", show_default=True, help="IPv4 address to listen on; 0.0.0.0: all.")
@click.option("--port", default=50052, show_default=True, type=click.IntRange(0, 65535), help="Port; 0: any free port.")
@click.option("--device", metavar="NAME,...", help="Devices to lend.  [default: all GPUs; the CPU if there is none]")
@click.option("--threads", "-t", type=int, help="Threads of a CPU device.  [default: fast physical cores]")
@click.option("--cache", is_flag=True, help="Keep large tensors on disk, so that they are sent only once.")
@click.option(
    "--open-network", is_flag=True, help="Allow a --host that other machines can reach. There is no password."
)
def rpc_server(host: str, port: int, device: str | None, threads: int | None, cache: bool, open_network: bool) -> None:
    """Lend this machine's devices to another machine.

    \b
      lab rpc-server
      lab rpc-server --host 192.168.1.20 --open-network --cache

    Runs until Ctrl-C. It is llama.cpp's own RPC server, which serves one client at a time. Never run it on an open
    network.
    """
    from lab.runner import machine

    if threads is not None:
        check_number("threads", threads, MAX_THREADS)
    n_threads = threads or machine.default_threads()
    names = [name.strip() for name in device.split(",")] if device else []
    folder = cache_folder() if cache else None
    try:
        with RpcServer(host, port, names, n_threads, folder, open_network) as server:
            host, _, listening = server.endpoint.rpartition(":")
            if not host.startswith("127."):
                click.echo(WARNING.format(endpoint=server.endpoint), err=True)
            for lent in server.devices:
                memory = f", {lent.memory_bytes / 1e9:.1f} GB" if lent.memory_bytes else ""
                n_cores = f", {n_threads} {'thread' if n_threads == 1 else 'threads'}" if lent.type == "cpu" else ""
                click.echo(f"lends    {lent.name}: {lent.description} ({lent.type}{memory}{n_cores})")
            if folder:
                click.echo(f"cache    {folder}")
            click.echo(f"speaks   llama.cpp RPC {server.version} at {server.endpoint}")
            for address in machine.own_addresses() if host == "0.0.0.0" else [host]:
                click.echo(f"use it   {shell.lab('measure', '--rpc', f'{address}:{listening}')}")
            click.echo("Press Ctrl-C to stop it.", err=True)
            while True:
                if (event := server.next_event()) and "said" in event:
                    click.echo(event["said"], err=True)
    except KeyboardInterrupt:  # how a server is meant to end, so no failure
        click.echo("Stopped.", err=True)


class RpcServer:
    """A running server. Use it in a `with` block: leaving it ends the server."""

    def __init__(
        self,
        host: str,
        port: int,
        devices: Sequence[str] = (),
        n_threads: int = 1,
        cache_folder: Path | None = None,
        is_open: bool = False,
    ) -> None:
        self.endpoint = f"{host}:{_free_port(host, port, is_open)}"
        asked = {
            "endpoint": self.endpoint,
            "devices": list(devices),
            "n_threads": n_threads,
            "cache": None if cache_folder is None else str(cache_folder),
        }
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._last: collections.deque[str] = collections.deque(maxlen=3)  # what llama.cpp printed
        self.devices: tuple[Device, ...] = ()
        code = "from lab.features.lend import child; child.serve()"
        self._process = start(code, json.dumps(asked), stderr=subprocess.STDOUT, env=environment())
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.version = ""  # of the protocol
        try:
            deadline = time.monotonic() + rpc.START_S
            while not self.version:
                if time.monotonic() > deadline:
                    what = f"The RPC server at {self.endpoint} did not start within {rpc.START_S} s."
                    raise LabError(what, "Try again.")
                event = self.next_event() or {}
                if "error" in event:
                    raise LabError(event["error"], event["hint"])
                if "devices" in event:
                    self.devices = tuple(from_json(Device, json.dumps(device)) for device in event["devices"])
                with suppress(rpc.Unavailable):
                    if self.devices:
                        answer = rpc.probe(self.endpoint.replace("0.0.0.0", "127.0.0.1"), None)
                        self.version = rpc.dotted(answer.version)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def close(self) -> None:
        """Kill the server."""
        self._process.kill()
        wait_for_end(self._process, self._listener)

    def __enter__(self) -> RpcServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listen(self) -> None:
        with suppress(ValueError, OSError):  # the parent has closed it
            for line in self._process.stdout or ():
                self._lines.put(line)
        self._lines.put(None)

    def next_event(self) -> dict[str, Any] | None:
        """The next event, or None if there is none now; `said`: a client came or left, or llama.cpp printed a line.

        LabError if the server has ended.
        """
        try:
            line = self._lines.get(timeout=0.1)
        except queue.Empty:
            return None
        if line is None:
            raise LabError(
                cause_of_death(f"The RPC server at {self.endpoint}", self._process.wait(), list(self._last)),
                "Its clients lost their data on it. Start it again.",
            )
        with suppress(ValueError, TypeError):
            return dict(json.loads(line))
        if text := line.decode(errors="replace").strip():
            self._last.append(text)
        return {"said": f"llama.cpp: {text}"} if text else None


def cache_folder() -> Path:
    """The folder where llama.cpp's rpc-server caches tensors (fs_get_cache_directory of rpc-server.cpp), created if
    missing."""
    import platformdirs

    given = os.environ.get("LLAMA_CACHE")
    folder = Path(given) if given else platformdirs.user_cache_path("llama.cpp", appauthor=False, opinion=False)
    try:
        (folder / "rpc").mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise LabError(
            f"The cache folder {folder / 'rpc'} cannot be created: {problem.strerror}.",
            "Omit --cache, or set LLAMA_CACHE to another folder.",
        ) from None
    return folder / "rpc"


def _free_port(host: str, port: int, is_open: bool) -> int:
    """`port`, or a free port for 0. LabError if a server may not or cannot listen there."""
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        raise LabError(
            f"--host {host} is not a numeric IPv4 address. llama.cpp's RPC needs one.",
            "Use 127.0.0.1 for clients on this machine only, or this machine's address in your network.",
        ) from None
    if not address.is_loopback and not is_open:
        raise LabError(
            f"Other machines can reach --host {host}, and anyone who can reach this server can read and change this "
            "machine's memory.",
            "If you trust every machine in that network, add --open-network.",
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        if os.name != "nt":  # as in llama.cpp; on Windows this would succeed for a port in use
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as problem:
            hint = {
                errno.EADDRINUSE: "Another program uses this port, perhaps another lab rpc-server: choose another "
                "--port, or 0 for any free port.",
                errno.EADDRNOTAVAIL: "This machine does not have this address. 0.0.0.0 listens on all its addresses.",
            }.get(problem.errno or 0, "Choose a --port above 1023, or 0 for any free port.")
            raise LabError(f"Cannot listen at {host}:{port}: {problem.strerror}.", hint) from None
        return int(trial.getsockname()[1])
