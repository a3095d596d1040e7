"""ggml's devices, those of RPC servers too, and random tensors on them.

Behind RPC servers ggml's functions promise less than on other devices (ggml-rpc.cpp): a graph that was submitted is
waited for only until it is sent, an operation is called supported whatever it is, and a graph without a number is sent
whole each time. llama.cpp numbers its graphs: a step like the one before is one short message. So it is here.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from functools import cache
from typing import Any

from lab.core.record import Device
from lab.core.shape import BLOCKS
from lab.engine.bindings import P, ggml, llama_cpp
from lab.errors import LabError

CPU = 0
"""The CPU among the types of devices (ggml-backend.h). BLAS, as on macOS, is another one that comes before it."""

N_READINGS = 20
SLOW_TO_PACK = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


def type_names() -> list[str]:
    """ggml's types of tensors by number, as it names them itself; "" for a number without one."""
    return [(ggml().ggml_type_name(number) or b"").decode() for number in range(llama_cpp().GGML_TYPE_COUNT)]


@cache
def _type_numbers() -> dict[str, int]:
    """ggml's types by name, as it names them itself."""
    return {name.upper(): number for number, name in enumerate(type_names()) if name}


def type_number(name: str) -> int:
    """ggml's number of a type of weights. LabError where it has none, or where the lab does not know its blocks."""
    if name not in BLOCKS or name not in _type_numbers():
        raise LabError(f"ggml has no type {name} for weights.", f"Known: {', '.join(BLOCKS)}.")
    return _type_numbers()[name]


def check_columns(name: str, columns: int) -> None:
    """LabError where rows of so many weights cannot be packed in a type: ggml would end the process."""
    if columns < 1 or columns % BLOCKS[name][0]:
        raise LabError(f"{name} packs {BLOCKS[name][0]} weights together; a row of {columns} cannot be packed.", "")


def handles() -> list[Any]:
    """ggml's handles of all devices, in its order."""
    return [P(ggml().ggml_backend_dev_get(index)) for index in range(ggml().ggml_backend_dev_count())]


def name_of(device: Any) -> str:
    """llama.cpp's name of a device."""
    return str(ggml().ggml_backend_dev_name(device).decode().strip())


def known() -> tuple[Device, ...]:
    """The devices of ggml's list, in its order; one of an RPC server has its address in the description."""
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
    """Bytes that are free on each device that says so, by name."""
    memories = {name_of(device): _memory(device) for device in handles()}
    return {name: free for name, (free, total) in memories.items() if total}


def _memory(device: Any) -> tuple[int, int]:
    """Bytes that are free on a device, and all that it has."""
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    ggml().ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml-rpc.h. LabError where the libraries were built without it."""
    backend = ggml().ggml_backend_reg_by_name(b"RPC")
    address = ggml().ggml_backend_reg_get_proc_address(backend, name.encode()) if backend else None
    if not address:
        raise LabError(
            "This build of llama.cpp has no RPC.",
            'Install it with CMAKE_ARGS="-DGGML_RPC=ON", as INSTALL.md says; the commands of the README do.',
        )
    return ctypes.CFUNCTYPE(result, *arguments)(address)


_remote: dict[int | None, str] = {}
"""Descriptions of devices behind RPC servers, by ggml's handle."""


def connect(endpoint: str) -> None:
    """Enter an RPC server's devices into ggml's list, as add_rpc_devices of common/arg.cpp does.

    Where nothing holds the connection llama.cpp closes it after each request, and another client could take the server.
    One backend, never used and never freed, holds it.
    """
    before = len(handles())
    server = rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)(endpoint.encode())
    if not server:
        raise LabError(f"The RPC server at {endpoint} offers no device.", "Start it again: lab rpc-server")
    ggml().ggml_backend_register(server)
    new = handles()[before:]
    for i, device in enumerate(new, 1):
        of_several = f" (device {i} of {len(new)})" if len(new) > 1 else ""
        _remote[device.value] = f"RPC server {endpoint}{of_several}"
    ggml().ggml_backend_dev_init(new[0], None)


def device_of(name: str | None) -> Any:
    """ggml's handle of the device of this name, or of the CPU. LabError where there is none."""
    for device in handles():
        is_cpu = ggml().ggml_backend_dev_type(device) == CPU
        if is_cpu if name is None else name_of(device) == name:
            return device
    raise LabError(
        f"This build of llama.cpp has no device {name or 'CPU'}.",
        f"It has: {', '.join(map(name_of, handles()))}. See: lab machine",
    )


def extra_buffer_types(device: Any) -> list[Any]:
    """The types of buffers beside a device's usual one, in llama.cpp's order: of a CPU the layouts that weights are
    repacked to, such as AMX and CPU_REPACK."""
    registry = P(ggml().ggml_backend_dev_backend_reg(device))
    address = ggml().ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(address)(device) if address else None
    return [P(pointer) for pointer in itertools.takewhile(bool, extra)] if extra else []


def random_rows(name: str, rows: int, columns: int) -> bytes:
    """Random weights in a type: never zeros, which some kernels and memories are faster with.

    A few hundred rows are drawn and repeated. Some types need to know which weights matter: here all do.
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
    """Copy `data` into a tensor of exactly so many bytes."""
    ggml().ggml_backend_tensor_set(tensor, data, 0, len(data))


def is_remote(device: Any) -> bool:
    """Whether an RPC server has the device."""
    return bool(ggml().ggml_backend_reg_name(P(ggml().ggml_backend_dev_backend_reg(device))).startswith(b"RPC"))


def supports(device: Any, operation: Any) -> bool:
    """Whether a device can compute an operation. A remote one is not asked: what the CPU here can is taken for its."""
    asked = device_of(None) if is_remote(device) else device
    return bool(ggml().ggml_backend_dev_supports_op(asked, operation))


def number_graph(backend: Any, graph: Any, most_nodes: int) -> None:
    """Give a graph whose tensors are all in the backend's memory a number of its own, as llama.cpp's scheduler does."""
    cpu = P(ggml().ggml_backend_dev_init(device_of(None), None))  # a scheduler wants one, as the last
    scheduler = P(ggml().ggml_backend_sched_new((P * 2)(backend, cpu), None, 2, 2 * most_nodes, False, False))
    ggml().ggml_backend_sched_split_graph(scheduler, graph)
    ggml().ggml_backend_sched_free(scheduler)
    ggml().ggml_backend_free(cpu)


def wait_for(result: Any) -> None:
    """Until everything that was sent is done: a server answers in order, so a value is read."""
    ggml().ggml_backend_tensor_get(result, ctypes.create_string_buffer(4), 0, 4)


def reading_ns(result: Any) -> int:
    """The shortest time that `wait_for` takes with nothing to wait for."""
    times = []
    for _ in range(N_READINGS):
        start = time.perf_counter_ns()
        wait_for(result)
        times.append(time.perf_counter_ns() - start)
    return min(times)
