"""ggml's devices, including those of RPC servers, and random tensors on them.

On a device of an RPC server, ggml's functions behave differently (ggml-rpc.cpp). Synchronizing waits only until a graph
is sent, every operation counts as supported, and a graph without a number is sent in full each time. llama.cpp numbers
its graphs, so that repeating a step takes one short message; the lab does the same.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from lab.core.record import Device
from lab.core.shape import BLOCKS
from lab.engine.bindings import P, ggml, llama_cpp
from lab.errors import LabError

CPU = 0
"""The device type of the CPU (ggml-backend.h). BLAS (on macOS) has another type and is listed before the CPU."""

N_READINGS = 20
SLOW_TO_PACK = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def type_names() -> list[str]:
    """ggml's names of tensor types by number; "" for an unused number."""
    return [(ggml().ggml_type_name(number) or b"").decode() for number in range(llama_cpp().GGML_TYPE_COUNT)]


@cache
def _type_numbers() -> dict[str, int]:
    return {name.upper(): number for number, name in enumerate(type_names()) if name}


def type_number(name: str) -> int:
    """ggml's number of a weight type. LabError if ggml lacks the type or the lab does not know its block size."""
    if name not in BLOCKS or name not in _type_numbers():
        raise LabError(f"Weights of type {name} are not supported.", f"Supported: {', '.join(BLOCKS)}.")
    return _type_numbers()[name]


def handles() -> list[Any]:
    """ggml's handles of all devices, in ggml's order."""
    return [P(ggml().ggml_backend_dev_get(index)) for index in range(ggml().ggml_backend_dev_count())]


def name_of(device: Any) -> str:
    """llama.cpp's name of a device."""
    return str(ggml().ggml_backend_dev_name(device).decode().strip())


def known() -> tuple[Device, ...]:
    """All devices, in ggml's order. The description of an RPC server's device contains the server's address."""
    listed = []
    for device in handles():
        kind = ggml().ggml_backend_dev_type(device)
        listed.append(
            Device(
                name=name_of(device),
                description=_remote.get(device.value) or ggml().ggml_backend_dev_description(device).decode().strip(),
                type=dict(enumerate(("cpu", "gpu", "igpu", "accel"))).get(kind, f"type {kind}"),
                memory_bytes=_memory(device)[1] or None,
            )
        )
    return tuple(listed)


def free_memory() -> dict[str, int]:
    """Free bytes of each device that reports them, by name."""
    memories = {name_of(device): _memory(device) for device in handles()}
    return {name: free for name, (free, total) in memories.items() if total}


def _memory(device: Any) -> tuple[int, int]:
    """Free and total bytes of a device."""
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    ggml().ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml-rpc.h. LabError if the libraries were built without RPC."""
    backend = ggml().ggml_backend_reg_by_name(b"RPC")
    address = ggml().ggml_backend_reg_get_proc_address(backend, name.encode()) if backend else None
    if not address:
        raise LabError(
            "This build of llama.cpp does not support RPC.",
            'Install it with CMAKE_ARGS="-DGGML_RPC=ON" (INSTALL.md), or with the commands of the README.',
        )
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def start_rpc_server(endpoint: str, cache: str | None, n_threads: int, lent: Sequence[Device]) -> None:
    """Serve until the process ends; returns only if llama.cpp cannot listen at the endpoint, and has printed why."""
    text, size, pointers = ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
    serve = rpc_function("ggml_backend_rpc_start_server", None, text, text, size, size, pointers)
    chosen = (ctypes.c_void_p * len(lent))(*[device_of(device.name).value for device in lent])
    serve(endpoint.encode(), None if cache is None else os.fsencode(cache), n_threads, len(lent), chosen)


def print_rpc_version() -> None:
    """Have llama.cpp print its protocol version (it does for an invalid address too), or print an error as JSON."""
    try:
        start_rpc_server("none", None, 1, [device for device in known() if device.type == "cpu"])
    except LabError as problem:
        print(json.dumps({"error": problem.what, "hint": problem.hint}), flush=True)


_remote: dict[int | None, str] = {}
"""Descriptions of devices behind RPC servers, by ggml's handle."""


def connect(endpoint: str) -> None:
    """Register an RPC server's devices in ggml, as add_rpc_devices of common/arg.cpp does.

    One backend, never used and never freed, keeps the connection open: llama.cpp closes unused ones after each request,
    and another client could take the server.
    """
    before = len(handles())
    server = rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)(endpoint.encode())
    if not server:
        raise LabError(f"The RPC server at {endpoint} offers no device.", "Restart it: lab rpc-server")
    ggml().ggml_backend_register(server)
    new = handles()[before:]
    for i, device in enumerate(new, 1):
        of_several = f" (device {i} of {len(new)})" if len(new) > 1 else ""
        _remote[device.value] = f"RPC server {endpoint}{of_several}"
    ggml().ggml_backend_dev_init(new[0], None)


def device_of(name: str | None) -> Any:
    """ggml's handle of the device with this name (None: the CPU). LabError if there is none."""
    for device in handles():
        is_cpu = ggml().ggml_backend_dev_type(device) == CPU
        if is_cpu if name is None else name_of(device) == name:
            return device
    raise LabError(
        f"This build of llama.cpp has no device {name or 'CPU'}.",
        f"It has: {', '.join(map(name_of, handles()))}. See: lab machine",
    )


def extra_buffer_types(device: Any) -> list[Any]:
    """A device's additional buffer types, in llama.cpp's order. A CPU has repacked layouts, such as AMX and
    CPU_REPACK."""
    registry = P(ggml().ggml_backend_dev_backend_reg(device))
    address = ggml().ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(address)(device) if address else None
    return [P(pointer) for pointer in itertools.takewhile(bool, extra)] if extra else []


def random_rows(name: str, rows: int, columns: int) -> bytes:
    """Random weights of a type. Never zeros, because some kernels and memories handle zeros faster.

    Repeats a few hundred random rows. Types that need an importance matrix get equal importances.
    """
    import numpy as np

    number = type_number(name)
    some = min(rows, 32 if name in SLOW_TO_PACK else 512)
    values = (0.05 * np.random.default_rng(1).standard_normal((some, columns))).astype(np.float32)
    target = ctypes.create_string_buffer(ggml().ggml_row_size(number, columns) * some)
    pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    importance = (ctypes.c_float * columns)(*[1.0] * columns)
    ggml().ggml_quantize_chunk(number, pointer, target, 0, some, columns, importance)
    return (target.raw * (-(-rows // some)))[: ggml().ggml_row_size(number, columns) * rows]


def fill(tensor: Any, data: bytes) -> None:
    """Copy `data` into a tensor of the same size."""
    ggml().ggml_backend_tensor_set(tensor, data, 0, len(data))


def is_remote(device: Any) -> bool:
    """Whether the device belongs to an RPC server."""
    return bool(ggml().ggml_backend_reg_name(P(ggml().ggml_backend_dev_backend_reg(device))).startswith(b"RPC"))


def supports(device: Any, operation: Any) -> bool:
    """Whether a device can compute an operation. For a remote device this asks the local CPU instead."""
    asked = device_of(None) if is_remote(device) else device
    return bool(ggml().ggml_backend_dev_supports_op(asked, operation))


def number_graph(backend: Any, graph: Any, most_nodes: int) -> None:
    """Number a graph, as llama.cpp's scheduler does. All its tensors must be in the backend's memory."""
    cpu = P(ggml().ggml_backend_dev_init(device_of(None), None))  # a scheduler needs the CPU as its last backend
    scheduler = P(ggml().ggml_backend_sched_new((P * 2)(backend, cpu), None, 2, 2 * most_nodes, False, False))
    ggml().ggml_backend_sched_split_graph(scheduler, graph)
    ggml().ggml_backend_sched_free(scheduler)
    ggml().ggml_backend_free(cpu)


def wait_for(result: Any) -> None:
    """Wait for all work sent so far, by reading a value: a server answers in order."""
    ggml().ggml_backend_tensor_get(result, ctypes.create_string_buffer(4), 0, 4)


def reading_ns(result: Any) -> int:
    """The shortest time of `wait_for` when no work is pending."""
    times = []
    for _ in range(N_READINGS):
        start = time.perf_counter_ns()
        wait_for(result)
        times.append(time.perf_counter_ns() - start)
    return min(times)
