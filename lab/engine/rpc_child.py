"""ggml's RPC server: it lends devices of this machine to llama.cpp on another one.

It runs in a process of its own, which process/rpc_server.py starts and watches.
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

STARTING, ACCEPTED, CLOSED = "Starting RPC server v", "Accepted client connection", "Client connection closed"
"""What ggml_backend_rpc_start_server prints; the first may stay in a buffer until the second."""

NO_ENDPOINT = "none"
"""What that function cannot read as an address: it prints its version and returns."""


def serve() -> None:
    """Serve until stdin ends. The argument of the process is a JSON object: endpoint, devices, n_threads, cache.

    JSON objects go to stdout, a line each: first the devices that are lent (or what is wrong), then, at the latest with
    the first connection, the version of the protocol; each client that connects, with its address where it is known,
    and each that leaves.
    """
    asked = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    _show_complaints()
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
    sys.exit(1)  # it returns where it cannot listen, and has printed why


def print_version() -> None:
    """Have llama.cpp print which version of the protocol it speaks, or a JSON object with what is wrong."""
    try:
        _run(_start_function(), NO_ENDPOINT, None, 1, [device for device in devices.known() if device.type == "cpu"])
    except LabError as problem:
        _report(sys.stdout, error=problem.what, hint=problem.hint)


def choose(known: Sequence[Device], names: Sequence[str]) -> list[Device]:
    """The devices with these names; without names every GPU, or the CPU where there is none, as llama.cpp's rpc-server
    chooses. LabError for an unknown name."""
    by_name = {device.name: device for device in known}
    for name in names:
        if name not in by_name:
            listed = ", ".join(f"{device.name} ({device.description})" for device in known)
            raise LabError(f"There is no device {name}.", f"This build of llama.cpp has: {listed}.")
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
    for line in lines:
        if line.startswith(STARTING):
            _report(events, version=line.removeprefix(STARTING).strip())
        elif line.startswith(ACCEPTED):
            _report(events, client=next(iter(native.watch_peers()), None))
        elif line.startswith(CLOSED):
            _report(events, closed=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # native code may be in the middle of a long step


def _show_complaints() -> None:
    """llama.cpp's warnings and errors go to stderr; its other messages nowhere."""
    llama_cpp().llama_log_set(_complain, ctypes.c_void_p(0))


def _print_complaint(level: int, text: bytes, _: Any) -> None:
    if level in (native.WARNING, native.ERROR):
        os.write(2, text)


_complain = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_print_complaint)
