"""One kernel of ggml at a time, timed: what llama.cpp's building blocks reach on this machine.

A graph of matrix products (or of attention) over distinct random weights, as many as the probe asks for, runs on the
same libraries, device and buffer type as a model's weights. With one column it is a decode step without anything
around it, with many a prefill step. The child process runs this; all goes through ctypes.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from lab.core.record import Rate
from lab.engine.ggml import (
    InitParams,
    P,
    check_columns,
    device_of,
    extra_buffer_types,
    fill,
    is_remote,
    library,
    number_graph,
    random_rows,
    reading_ns,
    supports,
    type_number,
    wait_for,
)
from lab.errors import LabError
from lab.process.wire import ATTENTION, DOWNLOAD, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION, UPLOAD, Probe

MAX_NODES = 4096
N_POSITIONS = 512
"""Of attention, where the probe does not say."""

CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
"""Types that llama.cpp has caches in."""


def run(probe: Probe) -> Rate:
    """Time passes for about `probe.seconds`, after one that does not count. LabError where ggml cannot do it.

    On a device behind an RPC server a pass ends when a value of its result has come back; the shortest time that such
    a reading takes by itself is taken off.
    """
    _check(probe)
    if probe.op in (UPLOAD, DOWNLOAD):
        return _transfer(probe)
    lib = library()
    device = device_of(lib, probe.device)
    backend = P(lib.ggml_backend_dev_init(device, None))
    n_bytes = 4 * MAX_NODES * lib.ggml_tensor_overhead() + 2**20
    context, graphs = (P(lib.ggml_init(InitParams(n_bytes, None, True))) for _ in range(2))
    buffers: list[Any] = []
    build = {MUL_MAT: _mul_mats, MUL_MAT_ID: _mul_mat_ids}.get(probe.op, _attentions)
    try:
        graph, buffer, n_bytes, flops = build(lib, probe, device, context, graphs, buffers)
        _set_threads(lib, device, backend, probe.n_threads)
        times = _compute(lib, probe, device, backend, graph)
    finally:
        _free(lib, buffers, [graphs, context], backend)
    sizes = probe.rows, probe.columns, probe.n_tokens, probe.n_threads
    more = probe.n_head_kv, probe.n_positions, probe.n_expert, probe.n_expert_used
    return Rate(probe.op, probe.type, buffer, *sizes, n_bytes, flops, times, *more)


def _check(probe: Probe) -> None:
    """LabError for what ggml would answer by ending the process."""
    type_number(probe.type)
    check_columns(probe.type, probe.columns)
    if probe.op not in (MUL_MAT, MUL_MAT_ID, ATTENTION, PLAIN_ATTENTION, UPLOAD, DOWNLOAD):
        raise LabError(f"There is no probe of {probe.op}.", "This is a bug of the lab.")
    if probe.rows < 1 or probe.n_tokens < 1:
        raise LabError(f"{probe.rows} rows and {probe.n_tokens} tokens cannot be probed.", "This is a bug of the lab.")
    is_attention = probe.op in (ATTENTION, PLAIN_ATTENTION)
    if is_attention and (probe.rows % (probe.n_head_kv or probe.rows) or probe.type not in CACHE_TYPES):
        raise LabError(
            f"Attention of {probe.rows} heads over {probe.n_head_kv} in a {probe.type} cache cannot be probed.",
            "Take another type of cache: --cache-type-k f16 --cache-type-v f16",
        )
    if probe.op == MUL_MAT_ID and not 1 <= (probe.n_expert_used or 0) <= (probe.n_expert or 0):
        raise LabError(f"{probe.n_expert_used} of {probe.n_expert} experts cannot be probed.", "Take another model.")


def _compute(lib: Any, probe: Probe, device: Any, backend: Any, graph: Any) -> tuple[int, ...]:
    """Nanoseconds of each pass through a graph, without the first."""
    is_server, result = is_remote(lib, device), P(lib.ggml_graph_node(graph, -1))
    if is_server:
        number_graph(lib, backend, graph, MAX_NODES)

    def compute() -> None:
        status = lib.ggml_backend_graph_compute(backend, graph)
        lib.ggml_backend_synchronize(backend)
        if is_server:
            wait_for(lib, result)
        if status:
            raise LabError(f"ggml could not compute {probe.op} of {probe.type}: status {status}.", "")

    return _time(probe.seconds, compute, reading_ns(lib, result) if is_server else 0)


def _time(seconds: float, work: Callable[[], None], off_ns: int) -> tuple[int, ...]:
    """Nanoseconds of each call of `work` but the first, less `off_ns`, for about so many seconds."""
    times: list[int] = []
    deadline = 0.0
    while len(times) < 2 or time.monotonic() < deadline:
        start = time.perf_counter_ns()
        work()
        times.append(max(1, time.perf_counter_ns() - start - off_ns))
        if len(times) == 1:
            deadline = time.monotonic() + seconds
    return tuple(times[1:])


def _transfer(probe: Probe) -> Rate:
    """Copies between this machine's memory and a device's: what moving a step's values between devices takes.

    The functions are those that llama.cpp's scheduler uses. A remote device takes bytes without an answer: an upload
    ends when a value has been read back, and the shortest time that this takes by itself is taken off. So an upload and
    a download together take one round trip.
    """
    lib, n_bytes = library(), 4 * probe.columns
    device = device_of(lib, probe.device)
    backend = P(lib.ggml_backend_dev_init(device, None))
    context = P(lib.ggml_init(InitParams(4 * lib.ggml_tensor_overhead(), None, True)))
    tensor = P(lib.ggml_new_tensor_2d(context, type_number("F32"), probe.columns, 1))
    memory = P(lib.ggml_backend_dev_buffer_type(device))
    data, target = random_rows(lib, "F32", 1, probe.columns), ctypes.create_string_buffer(n_bytes)
    reads_back = probe.op == UPLOAD and is_remote(lib, device)
    buffers: list[Any] = []

    def upload() -> None:
        lib.ggml_backend_tensor_set(tensor, data, 0, n_bytes)
        if reads_back:
            wait_for(lib, tensor)

    def download() -> None:
        lib.ggml_backend_tensor_get(tensor, target, 0, n_bytes)

    try:
        _allocate(lib, context, memory, buffers)
        fill(lib, tensor, data)
        work = upload if probe.op == UPLOAD else download
        times = _time(probe.seconds, work, reading_ns(lib, tensor) if reads_back else 0)
    finally:
        _free(lib, buffers, [context], backend)
    name = lib.ggml_backend_buft_name(memory).decode()
    return Rate(probe.op, "F32", name, 1, probe.columns, 1, probe.n_threads, n_bytes, 0, times)


def _mul_mats(lib: Any, probe: Probe, device: Any, context: Any, graphs: Any, buffers: list[Any]) -> Any:
    """Products of many distinct weight matrices with one input."""
    kind = type_number(probe.type)
    row_bytes = lib.ggml_row_size(kind, probe.columns)
    n_matrices = max(1, min(MAX_NODES // 2, probe.n_bytes // (row_bytes * probe.rows)))
    weights = [P(lib.ggml_new_tensor_2d(context, kind, probe.columns, probe.rows)) for _ in range(n_matrices)]
    source = P(lib.ggml_new_tensor_2d(graphs, type_number("F32"), probe.columns, probe.n_tokens))
    products = [P(lib.ggml_mul_mat(graphs, weight, source)) for weight in weights]
    data = random_rows(lib, probe.type, probe.rows, probe.columns)
    graph, buffer = _place(lib, probe, device, context, graphs, buffers, weights, products, data)
    fill(lib, source, random_rows(lib, "F32", probe.n_tokens, probe.columns))
    n_bytes = n_matrices * row_bytes * probe.rows
    return graph, buffer, n_bytes, 2 * n_matrices * probe.rows * probe.columns * probe.n_tokens


def _mul_mat_ids(lib: Any, probe: Probe, device: Any, context: Any, graphs: Any, buffers: list[Any]) -> Any:
    """Products of experts' weights, each token with its own experts, drawn at random.

    Small steps read few experts: several of them follow, so that one pass goes through all experts.
    """
    import numpy as np

    kind, n, n_used = type_number(probe.type), probe.n_expert or 1, probe.n_expert_used or 1
    expert_bytes = lib.ggml_row_size(kind, probe.columns) * probe.rows
    n_sets = max(1, min(64, probe.n_bytes // (expert_bytes * n)))
    n_steps = max(1, n // (n_used * probe.n_tokens))
    weights = [P(lib.ggml_new_tensor_3d(context, kind, probe.columns, probe.rows, n)) for _ in range(n_sets)]
    source = P(lib.ggml_new_tensor_3d(graphs, type_number("F32"), probe.columns, 1, probe.n_tokens))
    i32 = 26  # GGML_TYPE_I32
    choices = [P(lib.ggml_new_tensor_2d(graphs, i32, n_used, probe.n_tokens)) for _ in range(n_steps)]
    products = [P(lib.ggml_mul_mat_id(graphs, weight, source, ids)) for weight in weights for ids in choices]
    data = random_rows(lib, probe.type, probe.rows * n, probe.columns)
    graph, buffer = _place(lib, probe, device, context, graphs, buffers, weights, products, data)
    fill(lib, source, random_rows(lib, "F32", probe.n_tokens, probe.columns))
    generator, n_read = np.random.default_rng(1), 0
    order = generator.permutation(n)
    for step, ids in enumerate(choices):
        drawn = [generator.permutation(n)[:n_used] for _ in range(probe.n_tokens)]
        if probe.n_tokens == 1:
            drawn = [order[step * n_used : (step + 1) * n_used]]
        chosen = np.array(drawn, dtype=np.int32)
        n_read += len(np.unique(chosen))
        fill(lib, ids, chosen.tobytes())
    flops = 2 * n_sets * n_steps * n_used * probe.rows * probe.columns * probe.n_tokens
    return graph, buffer, n_sets * n_read * expert_bytes, flops


def _place(
    lib: Any,
    probe: Probe,
    device: Any,
    context: Any,
    graphs: Any,
    buffers: list[Any],
    weights: list[Any],
    products: list[Any],
    data: bytes,
) -> tuple[Any, str]:
    """The graph of the products, its tensors allocated and the weights filled; and the name of the weights' buffer."""
    graph = P(lib.ggml_new_graph_custom(graphs, MAX_NODES, False))
    for product in products:
        lib.ggml_build_forward_expand(graph, product)
    kind_of_buffer = _weights_buffer(lib, device, weights[0], products[0], probe.repack is not False)
    if kind_of_buffer is None:
        raise LabError(f"This device cannot multiply {probe.type} weights.", "Take another quantization.")
    _allocate(lib, context, kind_of_buffer, buffers)
    _allocate(lib, graphs, P(lib.ggml_backend_dev_buffer_type(device)), buffers)
    _fill_all(lib, device, weights, data)
    return graph, lib.ggml_backend_buft_name(kind_of_buffer).decode()


def _attentions(lib: Any, probe: Probe, device: Any, context: Any, graphs: Any, buffers: list[Any]) -> Any:
    """Attention over distinct caches of keys and values, laid out as llama.cpp has them; every token sees all.

    The mask is what llama.cpp gives: a row for each token, as long as the cache (whose length is a multiple of 256),
    F16 for flash attention. Without one, CUDA's kernels for heads that share keys are not used. Plain attention is two
    products with a softmax between them, on values that lie transposed (llama-graph.cpp, build_attn_mha).
    """
    kind, head_dim, n_head, n_kv_heads = type_number(probe.type), probe.columns, probe.rows, probe.n_head_kv
    n_kv_heads = n_kv_heads or n_head
    n_positions = -(-(probe.n_positions or N_POSITIONS) // 256) * 256
    layer_bytes = 2 * n_kv_heads * lib.ggml_row_size(kind, head_dim) * n_positions
    n_layers = max(1, min(256, probe.n_bytes // layer_bytes))
    f16, f32 = type_number("F16"), type_number("F32")
    query = P(lib.ggml_new_tensor_3d(graphs, f32, head_dim, probe.n_tokens, n_head))
    is_flash = probe.op == ATTENTION
    mask = P(lib.ggml_new_tensor_2d(graphs, f16 if is_flash else f32, n_positions, probe.n_tokens))
    graph = P(lib.ggml_new_graph_custom(graphs, MAX_NODES, False))
    caches = []
    for _ in range(n_layers):
        laid = (head_dim, n_kv_heads, n_positions)
        pair = [P(lib.ggml_new_tensor_3d(context, kind, *size)) for size in (laid, laid if is_flash else laid[::-1])]
        caches += pair
        keys, values = (P(lib.ggml_permute(graphs, cache, 0, 2, 1, 3)) for cache in pair)
        scale, zero = ctypes.c_float(head_dim**-0.5), ctypes.c_float(0)
        if is_flash:
            attended = P(lib.ggml_flash_attn_ext(graphs, query, keys, values, mask, scale, zero, zero))
        else:
            weights = P(lib.ggml_soft_max_ext(graphs, P(lib.ggml_mul_mat(graphs, keys, query)), mask, scale, zero))
            attended = P(lib.ggml_mul_mat(graphs, values, weights))
        if not supports(lib, device, attended):
            raise LabError(f"This device has no attention kernel for a {probe.type} cache.", "")
        lib.ggml_build_forward_expand(graph, attended)
    kind_of_buffer = P(lib.ggml_backend_dev_buffer_type(device))
    _allocate(lib, context, kind_of_buffer, buffers)
    _allocate(lib, graphs, kind_of_buffer, buffers)
    data = random_rows(lib, probe.type, n_kv_heads * n_positions, head_dim)
    _fill_all(lib, device, caches, data)
    fill(lib, query, random_rows(lib, "F32", n_head * probe.n_tokens, head_dim))
    fill(lib, mask, bytes((2 if is_flash else 4) * n_positions * probe.n_tokens))  # zero: is seen
    flops = 4 * n_layers * n_head * head_dim * n_positions * probe.n_tokens
    return graph, lib.ggml_backend_buft_name(kind_of_buffer).decode(), n_layers * layer_bytes, flops


def _weights_buffer(lib: Any, device: Any, weight: Any, product: Any, repacks: bool) -> Any:
    """The buffer type that llama.cpp would give such weights: the first of the device's own that supports the product.

    None where none does. Like llama.cpp, this asks with an empty buffer of each type in the weight's place: an
    unsupported type would end the process later.
    """
    place = P.from_address(weight.value + 8)  # ggml_tensor.buffer, after the enum type
    for candidate in extra_buffer_types(lib, device) if repacks else ():
        empty = P(lib.ggml_backend_buft_alloc_buffer(candidate, 0))
        place.value = empty.value
        supported = lib.ggml_backend_dev_supports_op(device, product)
        place.value = None
        lib.ggml_backend_buffer_free(empty)
        if supported:
            return candidate
    return P(lib.ggml_backend_dev_buffer_type(device)) if supports(lib, device, product) else None


def _fill_all(lib: Any, device: Any, tensors: list[Any], data: bytes) -> None:
    """The same data in all of them; over a network it is sent once, and copied there."""
    for tensor in tensors:
        if tensor is not tensors[0] and is_remote(lib, device):
            lib.ggml_backend_tensor_copy(tensors[0], tensor)
        else:
            fill(lib, tensor, data)


def _allocate(lib: Any, context: Any, kind: Any, buffers: list[Any]) -> None:
    buffer = P(lib.ggml_backend_alloc_ctx_tensors_from_buft(context, kind))
    if not buffer:
        raise LabError("There is no memory for the probe.", "Close other programs.")
    buffers.append(buffer)


def _free(lib: Any, buffers: list[Any], contexts: list[Any], backend: Any) -> None:
    for buffer in buffers:
        lib.ggml_backend_buffer_free(buffer)
    for context in contexts:
        lib.ggml_free(context)
    lib.ggml_backend_free(backend)


def _set_threads(lib: Any, device: Any, backend: Any, n_threads: int) -> None:
    registry = P(lib.ggml_backend_dev_backend_reg(device))
    address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
    if address:
        ctypes.CFUNCTYPE(None, P, ctypes.c_int)(address)(backend, n_threads)
