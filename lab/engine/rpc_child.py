"""Run ggml's RPC server, which lends this machine's devices to llama.cpp on another machine.

It runs in a separate process, which process/rpc_server.py starts and watches.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from lab.core.record import Device
from lab.engine import devices, native
from lab.engine.bindings import llama_cpp
from lab.errors import LabError
from lab.process.served import end_with_parent

ACCEPTED, CLOSED = "Accepted client connection", "Client connection closed"
"""What ggml_backend_rpc_start_server prints."""

NO_ENDPOINT = "none"
"""An invalid address, with which that function prints its version and returns."""


def serve() -> None:
    """Serve until stdin closes. The argument of the process is a JSON object: endpoint, devices, n_threads, cache.

    Writes JSON lines to stdout: the lent devices (or an error), then each client that connects or leaves.
    """
    asked = json.loads(sys.argv[1])
    end_with_parent()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    llama_cpp().llama_log_set(_warning_callback, ctypes.c_void_p(0))
    try:
        lent = choose(devices.known(), asked["devices"])
        start = _start_function()
    except LabError as problem:
        _report(events, error=problem.what, hint=problem.hint)
        return
    _report(events, devices=[dataclasses.asdict(device) for device in lent])
    printed = os.fdopen(reading, encoding="utf-8", errors="replace")
    threading.Thread(target=_report_clients, args=(printed, events), daemon=True).start()
    _run(start, asked["endpoint"], asked["cache"], asked["n_threads"], lent)
    sys.exit(1)  # the server returns only if it cannot listen, and has printed why


def print_version() -> None:
    """Have llama.cpp print its protocol version, or print an error as a JSON object."""
    try:
        _run(_start_function(), NO_ENDPOINT, None, 1, [device for device in devices.known() if device.type == "cpu"])
    except LabError as problem:
        _report(sys.stdout, error=problem.what, hint=problem.hint)


def choose(known: Sequence[Device], names: Sequence[str]) -> list[Device]:
    """The devices with these names. Without names all GPUs, or else the CPU, as in llama.cpp's rpc-server."""
    by_name = {device.name: device for device in known}
    for name in names:
        if name not in by_name:
            listed = ", ".join(f"{device.name} ({device.description})" for device in known)
            raise LabError(f"This build of llama.cpp has no device {name}.", f"It has: {listed}.")
    if names:
        return [by_name[name] for name in names]
    gpus = [device for device in known if device.type in ("gpu", "igpu")]
    return gpus or [device for device in known if device.type == "cpu"]


def _start_function() -> Any:
    text, size, handles = ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
    return devices.rpc_function("ggml_backend_rpc_start_server", None, text, text, size, size, handles)


def _run(start: Any, endpoint: str, cache: str | None, n_threads: int, lent: Sequence[Device]) -> None:
    handles = (ctypes.c_void_p * len(lent))(*[devices.device_of(device.name).value for device in lent])
    start(endpoint.encode(), None if cache is None else os.fsencode(cache), n_threads, len(lent), handles)


def _report(events: IO[str], **event: Any) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


def _report_clients(lines: IO[str], events: IO[str]) -> None:
    client = ""
    for line in lines:
        if line.startswith(ACCEPTED):
            client = next(iter(native.enable_keepalive()), "a client")
            _report(events, said=f"{client} connected")
        elif line.startswith(CLOSED):
            _report(events, said=f"{client} left")


def _print_warning(level: int, text: bytes, _: Any) -> None:
    if level in (native.WARNING, native.ERROR):
        os.write(2, text)


_warning_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_print_warning)
