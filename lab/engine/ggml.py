"""ggml's functions, with the types of its headers (ggml.h, ggml-alloc.h, ggml-backend.h), and random tensors.

On devices behind RPC servers they promise less than on others (ggml-rpc.cpp): a graph that was submitted is waited for
only until it is sent, an operation is called supported whatever it is, and a graph without a number is sent whole each
time. llama.cpp numbers its graphs: a step like the one before is one short message. So it is here.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from functools import cache
from typing import Any

from lab.core.shape import BLOCKS
from lab.engine import native
from lab.errors import LabError

P, I64, SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
CPU = 0
"""The CPU among the types of devices (ggml-backend.h). BLAS, as on macOS, is another one that comes before it."""

N_READINGS = 20
SLOW_TO_PACK = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")


class InitParams(ctypes.Structure):
    """struct ggml_init_params of ggml.h."""

    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool))


@cache
def _type_numbers() -> dict[str, int]:
    """ggml's types by name, as it names them itself."""
    return {name.upper(): number for number, name in enumerate(native.type_names()) if name}


def type_number(name: str) -> int:
    """ggml's number of a type of weights. LabError where it has none, or where the lab does not know its blocks."""
    if name not in BLOCKS or name not in _type_numbers():
        raise LabError(f"ggml has no type {name} for weights.", f"Known: {', '.join(BLOCKS)}.")
    return _type_numbers()[name]


def check_columns(name: str, columns: int) -> None:
    """LabError where rows of so many weights cannot be packed in a type: ggml would end the process."""
    if columns < 1 or columns % BLOCKS[name][0]:
        raise LabError(f"{name} packs {BLOCKS[name][0]} weights together; a row of {columns} cannot be packed.", "")


def devices(lib: Any) -> list[Any]:
    """All devices of this build, in ggml's order."""
    return [P(lib.ggml_backend_dev_get(index)) for index in range(lib.ggml_backend_dev_count())]


def device_of(lib: Any, name: str | None) -> Any:
    """The device of this name, or the CPU. LabError where there is none."""
    for device in devices(lib):
        is_cpu = lib.ggml_backend_dev_type(device) == CPU
        if is_cpu if name is None else lib.ggml_backend_dev_name(device).decode() == name:
            return device
    raise LabError(f"This build of llama.cpp has no device {name or 'CPU'}.", "See: lab machine")


def extra_buffer_types(lib: Any, device: Any) -> list[Any]:
    """The types of buffers beside a device's usual one, in llama.cpp's order: of a CPU the layouts that weights are
    repacked to, such as AMX and CPU_REPACK."""
    registry = P(lib.ggml_backend_dev_backend_reg(device))
    address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(address)(device) if address else None
    return [P(pointer) for pointer in itertools.takewhile(bool, extra)] if extra else []


def random_rows(lib: Any, name: str, rows: int, columns: int) -> bytes:
    """Random weights in a type: never zeros, which some kernels and memories are faster with.

    A few hundred rows are drawn and repeated. Some types need to know which weights matter: here all do.
    """
    import numpy as np

    number = type_number(name)
    some = min(rows, 32 if name in SLOW_TO_PACK else 512)
    values = (0.05 * np.random.default_rng(1).standard_normal((some, columns))).astype(np.float32)
    target = ctypes.create_string_buffer(lib.ggml_row_size(number, columns) * some)
    pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    importance = (ctypes.c_float * columns)(*[1.0] * columns)
    lib.ggml_quantize_chunk(number, pointer, target, 0, some, columns, importance)
    return (target.raw * (-(-rows // some)))[: lib.ggml_row_size(number, columns) * rows]


def fill(lib: Any, tensor: Any, data: bytes) -> None:
    """Copy `data` into a tensor of exactly so many bytes."""
    lib.ggml_backend_tensor_set(tensor, data, 0, len(data))


def is_remote(lib: Any, device: Any) -> bool:
    """Whether an RPC server has the device."""
    return bool(lib.ggml_backend_reg_name(P(lib.ggml_backend_dev_backend_reg(device))).startswith(b"RPC"))


def supports(lib: Any, device: Any, operation: Any) -> bool:
    """Whether a device can compute an operation. A remote one is not asked: what the CPU here can is taken for its."""
    asked = device_of(lib, None) if is_remote(lib, device) else device
    return bool(lib.ggml_backend_dev_supports_op(asked, operation))


def number_graph(lib: Any, backend: Any, graph: Any, most_nodes: int) -> None:
    """Give a graph whose tensors are all in the backend's memory a number of its own, as llama.cpp's scheduler does."""
    cpu = P(lib.ggml_backend_dev_init(device_of(lib, None), None))  # a scheduler wants one, as the last
    scheduler = P(lib.ggml_backend_sched_new((P * 2)(backend, cpu), None, 2, 2 * most_nodes, False, False))
    lib.ggml_backend_sched_split_graph(scheduler, graph)
    lib.ggml_backend_sched_free(scheduler)
    lib.ggml_backend_free(cpu)


def wait_for(lib: Any, result: Any) -> None:
    """Until everything that was sent is done: a server answers in order, so a value is read."""
    lib.ggml_backend_tensor_get(result, ctypes.create_string_buffer(4), 0, 4)


def reading_ns(lib: Any, result: Any) -> int:
    """The shortest time that `wait_for` takes with nothing to wait for."""
    times = []
    for _ in range(N_READINGS):
        start = time.perf_counter_ns()
        wait_for(lib, result)
        times.append(time.perf_counter_ns() - start)
    return min(times)


def library() -> Any:
    """The functions, of the libraries that llama.cpp itself has loaded."""
    lib = native.ggml("ggml-base")
    f, i, b = ctypes.c_float, ctypes.c_int, ctypes.c_bool
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (P, [InitParams]),
        "ggml_free": (None, [P]),
        "ggml_tensor_overhead": (SIZE, []),
        "ggml_row_size": (SIZE, [i, I64]),
        "ggml_new_tensor_2d": (P, [P, i, I64, I64]),
        "ggml_new_tensor_3d": (P, [P, i, I64, I64, I64]),
        "ggml_permute": (P, [P, P, i, i, i, i]),
        "ggml_mul_mat": (P, [P, P, P]),
        "ggml_mul_mat_id": (P, [P, P, P, P]),
        "ggml_soft_max_ext": (P, [P, P, P, f, f]),
        "ggml_flash_attn_ext": (P, [P, P, P, P, P, f, f, f]),
        "ggml_new_graph_custom": (P, [P, SIZE, b]),
        "ggml_build_forward_expand": (None, [P, P]),
        "ggml_graph_node": (P, [P, i]),
        "ggml_quantize_chunk": (SIZE, [i, ctypes.POINTER(f), P, I64, I64, I64, P]),
        "ggml_backend_alloc_ctx_tensors_from_buft": (P, [P, P]),
        "ggml_backend_tensor_set": (None, [P, ctypes.c_char_p, SIZE, SIZE]),
        "ggml_backend_tensor_get": (None, [P, P, SIZE, SIZE]),
        "ggml_backend_tensor_copy": (None, [P, P]),
        "ggml_backend_buft_alloc_buffer": (P, [P, SIZE]),
        "ggml_backend_buft_is_host": (b, [P]),
        "ggml_backend_buft_name": (ctypes.c_char_p, [P]),
        "ggml_backend_buffer_free": (None, [P]),
        "ggml_backend_dev_backend_reg": (P, [P]),
        "ggml_backend_dev_buffer_type": (P, [P]),
        "ggml_backend_dev_host_buffer_type": (P, [P]),
        "ggml_backend_dev_name": (ctypes.c_char_p, [P]),
        "ggml_backend_dev_init": (P, [P, ctypes.c_char_p]),
        "ggml_backend_dev_supports_op": (b, [P, P]),
        "ggml_backend_dev_type": (i, [P]),
        "ggml_backend_free": (None, [P]),
        "ggml_backend_graph_compute": (i, [P, P]),
        "ggml_backend_synchronize": (None, [P]),
        "ggml_backend_reg_get_proc_address": (P, [P, ctypes.c_char_p]),
        "ggml_backend_reg_name": (ctypes.c_char_p, [P]),
        "ggml_backend_sched_new": (P, [ctypes.POINTER(P), ctypes.POINTER(P), i, SIZE, b, b]),
        "ggml_backend_sched_split_graph": (None, [P, P]),
        "ggml_backend_sched_free": (None, [P]),
    }
    for name, (result, arguments) in signatures.items():
        getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
    registry = native.ggml("ggml")
    lib.ggml_backend_dev_count, lib.ggml_backend_dev_get = (
        registry.ggml_backend_dev_count,
        registry.ggml_backend_dev_get,
    )
    lib.ggml_backend_dev_count.restype, lib.ggml_backend_dev_count.argtypes = SIZE, []
    lib.ggml_backend_dev_get.restype, lib.ggml_backend_dev_get.argtypes = P, [SIZE]
    return lib
