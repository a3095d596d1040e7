"""The process of ggml's RPC server. `lab/features/lend/command.py` starts and watches it."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

from lab.core.record import Device
from lab.engine import devices
from lab.engine.bindings import llama_cpp
from lab.errors import LabError
from lab.process.spawning import end_with_parent


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

    def report(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    def report_clients() -> None:
        client = ""
        for line in os.fdopen(reading, encoding="utf-8", errors="replace"):
            if line.startswith("Accepted client connection"):  # what ggml_backend_rpc_start_server prints
                client = next(iter(devices.enable_keepalive()), "a client")
                report(said=f"{client} connected")
            elif line.startswith("Client connection closed"):
                report(said=f"{client} left")

    try:
        lent = choose(devices.known(), asked["devices"])
        devices.rpc_function("ggml_backend_rpc_start_server", None)
        report(devices=[dataclasses.asdict(device) for device in lent])
        threading.Thread(target=report_clients, daemon=True).start()
        devices.start_rpc_server(asked["endpoint"], asked["cache"], asked["n_threads"], lent)
    except LabError as problem:
        report(error=problem.what, hint=problem.hint)
        return
    sys.exit(1)


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


def _print_warning(level: int, text: bytes, _: Any) -> None:
    if level in (devices.WARNING, devices.ERROR):
        os.write(2, text)


_warning_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_print_warning)
