"""The process of `lab rpc-server`: llama.cpp's RPC server, which lends this machine's devices."""

from __future__ import annotations

import ctypes
import json
import os
import sys

from lab.engine import devices, rpc
from lab.engine.bindings import P
from lab.errors import LabError
from lab.process.spawning import end_with_parent

SIGNATURE = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, P
)
"""ggml_backend_rpc_start_server: endpoint, folder of a cache, threads, number of devices, devices.
"""


def serve() -> None:
    """Lend devices until stdin closes.

    The process's argument is JSON: endpoint, device (a list of names) and threads. It writes one
    JSON line to stdout: the lent devices, or an error. llama.cpp's own output goes to stderr.
    """
    asked = json.loads(sys.argv[1])
    end_with_parent()
    reply = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        devices.start()
        start_server = SIGNATURE(rpc.address_of("ggml_backend_rpc_start_server"))
        names = asked["device"] or _default_devices()
        handles = [devices.device_of(name) for name in names]
    except LabError as problem:
        print(
            json.dumps({"error": problem.what, "hint": problem.hint}), file=reply, flush=True
        )
        return
    print(json.dumps({"device": names}), file=reply, flush=True)
    array = (P * len(handles))(*handles)
    endpoint = asked["endpoint"].encode()
    start_server(endpoint, None, asked["threads"], len(handles), ctypes.addressof(array))
    sys.exit(1)  # it returns only if it cannot listen


def _default_devices() -> list[str]:
    """All GPUs, or else the CPU, as in llama.cpp's rpc-server."""
    gpus = []
    cpus = []
    for device in devices.describe_all():
        if device.type in ("gpu", "igpu"):
            gpus.append(device.name)
        elif device.type == "cpu":
            cpus.append(device.name)
    return gpus or cpus
