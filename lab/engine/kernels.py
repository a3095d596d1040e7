"""One kernel of ggml at a time, timed: what llama.cpp's building blocks reach on this machine.

A graph of matrix products (or of attention) over distinct random weights, several times larger than the
caches, runs on the same libraries, device and buffer type as a model's weights. With one column it is a decode
step without anything around it, with many a prefill step. The child process runs this; all goes through ctypes.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from lab.core.record import Rate
from lab.engine import native
from lab.errors import LabError
from lab.process.wire import MUL_MAT, Probe

MAX_NODES = 4096

_P, _I64, _SIZE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t


def run(probe: Probe) -> Rate:
    """Time passes for about `probe.seconds`, after one that does not count. LabError where ggml cannot do it."""
    lib = _library()
    device = _device(lib, probe.on_gpu)
    backend = _P(lib.ggml_backend_dev_init(device, None))
    context = _P(lib.ggml_init(_InitParams(4 * MAX_NODES * lib.ggml_tensor_overhead() + 2**20, None, True)))
    graphs = _P(lib.ggml_init(_InitParams(4 * MAX_NODES * lib.ggml_tensor_overhead() + 2**20, None, True)))
    buffers: list[Any] = []
    try:
        build = _mul_mats if probe.op == MUL_MAT else _attentions
        graph, buffer, n_bytes, flops = build(lib, probe, device, context, graphs, buffers)
        _set_threads(lib, device, backend, probe.n_threads)
        times: list[int] = []
        deadline = 0.0
        while not times or time.monotonic() < deadline:
            start = time.perf_counter_ns()
            status = lib.ggml_backend_graph_compute(backend, graph)
            lib.ggml_backend_synchronize(backend)
            times.append(time.perf_counter_ns() - start)
            if status:
                raise LabError(f"ggml could not compute {probe.op} of {probe.type}: status {status}.", "")
            if len(times) == 1:
                deadline = time.monotonic() + probe.seconds
        return Rate(
            probe.op,
            probe.type,
            buffer,
            probe.rows,
            probe.columns,
            probe.n_tokens,
            probe.n_threads,
            n_bytes,
            flops,
            tuple(times[1:] or times),
            probe.n_head_kv,
        )
    finally:
        for each in buffers:
            lib.ggml_backend_buffer_free(each)
        lib.ggml_free(graphs)
        lib.ggml_free(context)
        lib.ggml_backend_free(backend)


def _mul_mats(lib: Any, probe: Probe, device: Any, context: Any, graphs: Any, buffers: list[Any]) -> Any:
    """Products of many distinct weight matrices with one input."""
    kind = _type(probe.type)
    row_bytes = lib.ggml_row_size(kind, probe.columns)
    n_matrices = max(1, min(MAX_NODES // 2, probe.n_bytes // (row_bytes * probe.rows)))
    weights = [_P(lib.ggml_new_tensor_2d(context, kind, probe.columns, probe.rows)) for _ in range(n_matrices)]
    source = _P(lib.ggml_new_tensor_2d(graphs, _type("F32"), probe.columns, probe.n_tokens))
    graph = _P(lib.ggml_new_graph_custom(graphs, MAX_NODES, False))
    products = [_P(lib.ggml_mul_mat(graphs, weight, source)) for weight in weights]
    for product in products:
        lib.ggml_build_forward_expand(graph, product)
    kind_of_buffer = _weights_buffer(lib, device, weights[0], products[0])
    _allocate(lib, context, kind_of_buffer, buffers)
    _allocate(lib, graphs, _P(lib.ggml_backend_dev_buffer_type(device)), buffers)
    data = _random(lib, kind, probe.rows, probe.columns)
    for weight in weights:
        lib.ggml_backend_tensor_set(weight, data, 0, len(data))
    _fill(lib, source, _type("F32"), probe.n_tokens, probe.columns)
    n_bytes = n_matrices * row_bytes * probe.rows
    flops = 2 * n_matrices * probe.rows * probe.columns * probe.n_tokens
    return graph, lib.ggml_backend_buft_name(kind_of_buffer).decode(), n_bytes, flops


def _attentions(lib: Any, probe: Probe, device: Any, context: Any, graphs: Any, buffers: list[Any]) -> Any:
    """Attention over distinct caches of keys and values, laid out as llama.cpp has them; every token sees all."""
    kind, head_dim, n_head, n_kv_heads = _type(probe.type), probe.columns, probe.rows, probe.n_head_kv or probe.rows
    per_position = 2 * n_kv_heads * lib.ggml_row_size(kind, head_dim)
    n_layers = 8
    n_positions = max(256, probe.n_bytes // (n_layers * per_position) // 256 * 256)
    graph = _P(lib.ggml_new_graph_custom(graphs, MAX_NODES, False))
    query = _P(lib.ggml_new_tensor_3d(graphs, _type("F32"), head_dim, probe.n_tokens, n_head))
    caches = []
    for _ in range(n_layers):
        pair = [_P(lib.ggml_new_tensor_3d(context, kind, head_dim, n_kv_heads, n_positions)) for _ in "kv"]
        caches += pair
        keys, values = (_P(lib.ggml_permute(graphs, each, 0, 2, 1, 3)) for each in pair)
        scale = ctypes.c_float(head_dim**-0.5)
        zero = ctypes.c_float(0)
        attended = _P(lib.ggml_flash_attn_ext(graphs, query, keys, values, None, scale, zero, zero))
        if not lib.ggml_backend_dev_supports_op(device, attended):
            raise LabError(f"This device has no attention kernel for a {probe.type} cache.", "")
        lib.ggml_build_forward_expand(graph, attended)
    kind_of_buffer = _P(lib.ggml_backend_dev_buffer_type(device))
    _allocate(lib, context, kind_of_buffer, buffers)
    _allocate(lib, graphs, kind_of_buffer, buffers)
    data = _random(lib, kind, n_kv_heads * n_positions, head_dim)
    for cache in caches:
        lib.ggml_backend_tensor_set(cache, data, 0, len(data))
    _fill(lib, query, _type("F32"), n_head * probe.n_tokens, head_dim)
    flops = 4 * n_layers * n_head * head_dim * n_positions * probe.n_tokens
    name = lib.ggml_backend_buft_name(kind_of_buffer).decode()
    return graph, name, n_layers * per_position * n_positions, flops


def _weights_buffer(lib: Any, device: Any, weight: Any, product: Any) -> Any:
    """The buffer type that llama.cpp would give such weights: the first of the device's own that supports the product.

    Like llama.cpp, this asks with an empty buffer of each type in the weight's place: an unsupported type would
    end the process later.
    """
    registry = _P(lib.ggml_backend_dev_backend_reg(device))
    address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(device) if address else None
    place = _P.from_address(weight.value + 8)  # ggml_tensor.buffer, after the enum type
    index = 0
    while extra and extra[index]:
        candidate = _P(extra[index])
        empty = _P(lib.ggml_backend_buft_alloc_buffer(candidate, 0))
        place.value = empty.value
        supported = lib.ggml_backend_dev_supports_op(device, product)
        place.value = None
        lib.ggml_backend_buffer_free(empty)
        if supported:
            return candidate
        index += 1
    return _P(lib.ggml_backend_dev_buffer_type(device))


def _allocate(lib: Any, context: Any, kind: Any, buffers: list[Any]) -> None:
    buffer = _P(lib.ggml_backend_alloc_ctx_tensors_from_buft(context, kind))
    if not buffer:
        raise LabError("There is no memory for the probe.", "Close other programs.")
    buffers.append(buffer)


def _random(lib: Any, kind: int, rows: int, columns: int) -> bytes:
    """Random weights in a type: never zeros, which some kernels and memories are faster with."""
    import numpy as np

    some = min(rows, 512)
    values = (0.05 * np.random.default_rng(1).standard_normal((some, columns))).astype(np.float32)
    row_bytes = lib.ggml_row_size(kind, columns)
    if kind == _type("F32"):
        block = values.tobytes()
    else:
        target = ctypes.create_string_buffer(row_bytes * some)
        pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        importance = (ctypes.c_float * columns)(*[1.0] * columns)
        lib.ggml_quantize_chunk(kind, pointer, target, 0, some, columns, importance)
        block = target.raw
    return (block * (-(-rows // some)))[: row_bytes * rows]


def _fill(lib: Any, tensor: Any, kind: int, rows: int, columns: int) -> None:
    data = _random(lib, kind, rows, columns)
    lib.ggml_backend_tensor_set(tensor, data, 0, len(data))


def _device(lib: Any, on_gpu: bool) -> Any:
    for index in range(lib.ggml_backend_dev_count()):
        device = _P(lib.ggml_backend_dev_get(index))
        if (lib.ggml_backend_dev_type(device) in (1, 2)) == on_gpu:  # GPU, integrated GPU
            return device
    raise LabError("This build of llama.cpp has no such device.", "See: lab machine")


def _set_threads(lib: Any, device: Any, backend: Any, n_threads: int) -> None:
    registry = _P(lib.ggml_backend_dev_backend_reg(device))
    address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
    if address:
        ctypes.CFUNCTYPE(None, _P, ctypes.c_int)(address)(backend, n_threads)


def _type(name: str) -> int:
    number = getattr(native.llama(), f"GGML_TYPE_{name.upper()}", None)
    if number is None:
        raise LabError(f"ggml has no type {name}.", "")
    return int(number)


class _InitParams(ctypes.Structure):
    """struct ggml_init_params of ggml.h."""

    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool))


def _library() -> Any:
    """ggml's functions with the types of ggml.h, ggml-alloc.h and ggml-backend.h."""
    lib = native.ggml("ggml-base")
    f, i, b = ctypes.c_float, ctypes.c_int, ctypes.c_bool
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ggml_init": (_P, [_InitParams]),
        "ggml_free": (None, [_P]),
        "ggml_tensor_overhead": (_SIZE, []),
        "ggml_row_size": (_SIZE, [i, _I64]),
        "ggml_new_tensor_2d": (_P, [_P, i, _I64, _I64]),
        "ggml_new_tensor_3d": (_P, [_P, i, _I64, _I64, _I64]),
        "ggml_permute": (_P, [_P, _P, i, i, i, i]),
        "ggml_mul_mat": (_P, [_P, _P, _P]),
        "ggml_flash_attn_ext": (_P, [_P, _P, _P, _P, _P, f, f, f]),
        "ggml_new_graph_custom": (_P, [_P, _SIZE, b]),
        "ggml_build_forward_expand": (None, [_P, _P]),
        "ggml_quantize_chunk": (_SIZE, [i, ctypes.POINTER(f), _P, _I64, _I64, _I64, _P]),
        "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
        "ggml_backend_tensor_set": (None, [_P, ctypes.c_char_p, _SIZE, _SIZE]),
        "ggml_backend_buft_alloc_buffer": (_P, [_P, _SIZE]),
        "ggml_backend_buft_name": (ctypes.c_char_p, [_P]),
        "ggml_backend_buffer_free": (None, [_P]),
        "ggml_backend_dev_backend_reg": (_P, [_P]),
        "ggml_backend_dev_buffer_type": (_P, [_P]),
        "ggml_backend_dev_init": (_P, [_P, ctypes.c_char_p]),
        "ggml_backend_dev_supports_op": (b, [_P, _P]),
        "ggml_backend_dev_type": (i, [_P]),
        "ggml_backend_free": (None, [_P]),
        "ggml_backend_graph_compute": (i, [_P, _P]),
        "ggml_backend_synchronize": (None, [_P]),
        "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
    }
    for name, (result, arguments) in signatures.items():
        getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
    registry = native.ggml("ggml")
    lib.ggml_backend_dev_count, lib.ggml_backend_dev_get = (
        registry.ggml_backend_dev_count,
        registry.ggml_backend_dev_get,
    )
    lib.ggml_backend_dev_count.restype, lib.ggml_backend_dev_count.argtypes = _SIZE, []
    lib.ggml_backend_dev_get.restype, lib.ggml_backend_dev_get.argtypes = _P, [_SIZE]
    return lib
