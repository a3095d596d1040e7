"""Run ggml's RPC server in a child process, so that it ends when the lab ends."""

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.core.lines import from_json
from lab.core.record import Device
from lab.errors import LabError
from lab.process import rpc
from lab.process.spawning import cause_of_death, environment, start, wait_for_end


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
        try:
            self.version = rpc.dotted(self._started().version)  # of the protocol
        except BaseException:
            self.close()
            raise

    def _started(self) -> rpc.Answer:
        deadline = time.monotonic() + rpc.START_S
        while time.monotonic() < deadline:
            event = self._next() or {}
            if "error" in event:
                raise LabError(event["error"], event["hint"])
            if "devices" in event:
                self.devices = tuple(from_json(Device, json.dumps(device)) for device in event["devices"])
            if self.devices:
                with suppress(rpc.Unavailable):
                    return rpc.probe(self.endpoint.replace("0.0.0.0", "127.0.0.1"), None)
        raise LabError(f"The RPC server at {self.endpoint} did not start within {rpc.START_S} s.", "Try again.")

    def watch(self, show: Callable[[str], None]) -> None:
        """Call `show` with a sentence for each client that connects or leaves, and each warning of llama.cpp.

        Never returns; raises LabError when the server ends.
        """
        while True:
            if (event := self._next()) and "said" in event:
                show(event["said"])

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

    def _next(self) -> dict[str, Any] | None:
        """The next event, or None if there is none now. LabError if the server has ended."""
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
