"""Time one kernel of ggml: how fast llama.cpp's building blocks run on this machine.

A graph of matrix products (or of attention) over distinct random weights runs with the same libraries, device and
buffer type as a model's weights. With one input column it does the matrix work of a decode step, with many columns that
of a prefill step.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lab.core.record import Rate
from lab.engine import devices
from lab.engine.bindings import InitParams, P, ggml
from lab.engine.devices import fill, is_remote, random_rows, type_number
from lab.errors import LabError
from lab.process.wire import ATTENTION, DOWNLOAD, MUL_MAT, MUL_MAT_ID, PLAIN_ATTENTION, UPLOAD, Probe

MAX_NODES = 4096
N_POSITIONS = 512
"""Positions of attention if the probe has none."""

CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
"""Types of llama.cpp's KV cache."""

I32 = 26
"""GGML_TYPE_I32."""


@dataclass(frozen=True)
class _Pass:
    """A graph to time, the name of its weights' buffer type, and the bytes and FLOPs of a pass."""

    graph: Any
    buffer: str
    n_bytes: int
    flops: int


class _Bench:
    """A device with the memory of a probe: `data` has the weights or caches, `graphs` the inputs and results.

    Use it in a `with` block: leaving it frees the memory.
    """

    def __init__(self, probe: Probe) -> None:
        self.lib = lib = ggml()
        self.device = devices.device_of(probe.device)
        self.backend = P(lib.ggml_backend_dev_init(self.device, None))
        n_bytes = 4 * MAX_NODES * lib.ggml_tensor_overhead() + 2**20
        self.data, self.graphs = (P(lib.ggml_init(InitParams(n_bytes, None, True))) for _ in range(2))
        self.memory = P(lib.ggml_backend_dev_buffer_type(self.device))
        self.is_remote = is_remote(self.device)
        self._buffers: list[Any] = []

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for buffer in self._buffers:
            self.lib.ggml_backend_buffer_free(buffer)
        for context in (self.graphs, self.data):
            self.lib.ggml_free(context)
        self.lib.ggml_backend_free(self.backend)

    def tensor(self, context: Any, kind: int, *sizes: int) -> Any:
        """A new tensor of two or three dimensions, not yet allocated."""
        return P(getattr(self.lib, f"ggml_new_tensor_{len(sizes)}d")(context, kind, *sizes))

    def graph_of(self, results: Iterable[Any]) -> Any:
        graph = P(self.lib.ggml_new_graph_custom(self.graphs, MAX_NODES, False))
        for result in results:
            self.lib.ggml_build_forward_expand(graph, result)
        return graph

    def place(self, kind: Any, tensors: Sequence[Any], data: bytes) -> str:
        """Allocate all tensors, those of `data` in a buffer of type `kind`, and fill `tensors`. Returns its name."""
        self.allocate(self.data, kind)
        self.allocate(self.graphs, self.memory)
        for tensor in tensors:
            if tensor is not tensors[0] and self.is_remote:  # send the data once; the server copies it
                self.lib.ggml_backend_tensor_copy(tensors[0], tensor)
            else:
                fill(tensor, data)
        return str(self.lib.ggml_backend_buft_name(kind).decode())

    def allocate(self, context: Any, kind: Any) -> None:
        """Allocate all tensors of a context."""
        buffer = P(self.lib.ggml_backend_alloc_ctx_tensors_from_buft(context, kind))
        if not buffer:
            raise LabError("The device has too little free memory for the probe.", "Close other programs.")
        self._buffers.append(buffer)

    def weights_buffer(self, weight: Any, product: Any, repacks: bool) -> Any:
        """The buffer type that llama.cpp chooses for such weights: the device's first that supports the product.

        None if none does. Like llama.cpp, this tests each type with an empty buffer for the weight; computing with an
        unsupported type would abort the process.
        """
        lib, device = self.lib, self.device
        place = P.from_address(weight.value + 8)  # ggml_tensor.buffer, after the enum type
        for candidate in devices.extra_buffer_types(device) if repacks else ():
            empty = P(lib.ggml_backend_buft_alloc_buffer(candidate, 0))
            place.value = empty.value
            supported = lib.ggml_backend_dev_supports_op(device, product)
            place.value = None
            lib.ggml_backend_buffer_free(empty)
            if supported:
                return candidate
        return self.memory if devices.supports(device, product) else None


def run(probe: Probe) -> Rate:
    """Time passes for about `probe.seconds`, after one warm-up pass. LabError if ggml cannot compute the probe.

    On a device of an RPC server a pass ends when a value of its result arrives; the shortest time of such a read is
    subtracted.
    """
    _check(probe)
    with _Bench(probe) as bench:
        if probe.op in (UPLOAD, DOWNLOAD):
            return _transfer(bench, probe)
        timed = {MUL_MAT: _mul_mats, MUL_MAT_ID: _mul_mat_ids}.get(probe.op, _attentions)(bench, probe)
        _set_threads(bench, probe.n_threads)
        times = _compute(bench, probe, timed.graph)
    sizes = probe.rows, probe.columns, probe.n_tokens, probe.n_threads
    more = probe.n_head_kv, probe.n_positions, probe.n_expert, probe.n_expert_used
    return Rate(probe.op, probe.type, timed.buffer, *sizes, timed.n_bytes, timed.flops, times, *more)


def _check(probe: Probe) -> None:
    """LabError where ggml would abort the process."""
    type_number(probe.type)
    devices.check_columns(probe.type, probe.columns)
    if probe.op not in (MUL_MAT, MUL_MAT_ID, ATTENTION, PLAIN_ATTENTION, UPLOAD, DOWNLOAD):
        raise LabError(f"There is no probe for {probe.op}.", "This is a bug of the lab.")
    if probe.rows < 1 or probe.n_tokens < 1:
        raise LabError(f"{probe.rows} rows and {probe.n_tokens} tokens cannot be probed.", "This is a bug of the lab.")
    is_attention = probe.op in (ATTENTION, PLAIN_ATTENTION)
    if is_attention and (probe.rows % (probe.n_head_kv or probe.rows) or probe.type not in CACHE_TYPES):
        raise LabError(
            f"Attention of {probe.rows} heads over {probe.n_head_kv} in a {probe.type} cache cannot be probed.",
            "Use another cache type: --cache-type-k f16 --cache-type-v f16",
        )
    if probe.op == MUL_MAT_ID and not 1 <= (probe.n_expert_used or 0) <= (probe.n_expert or 0):
        raise LabError(f"{probe.n_expert_used} of {probe.n_expert} experts cannot be probed.", "Use another model.")


def _compute(bench: _Bench, probe: Probe, graph: Any) -> tuple[int, ...]:
    """Nanoseconds of each pass through a graph, except the first."""
    lib, backend, result = bench.lib, bench.backend, P(bench.lib.ggml_graph_node(graph, -1))
    if bench.is_remote:
        devices.number_graph(backend, graph, MAX_NODES)

    def compute() -> None:
        status = lib.ggml_backend_graph_compute(backend, graph)
        lib.ggml_backend_synchronize(backend)
        if bench.is_remote:
            devices.wait_for(result)
        if status:
            raise LabError(f"ggml could not compute {probe.op} of {probe.type}: status {status}.", "Try again.")

    return _time(probe.seconds, compute, devices.reading_ns(result) if bench.is_remote else 0)


def _time(seconds: float, work: Callable[[], None], off_ns: int) -> tuple[int, ...]:
    """Call `work` for about `seconds`: nanoseconds of each call except the first, minus `off_ns`."""
    times: list[int] = []
    deadline = 0.0
    while len(times) < 2 or time.monotonic() < deadline:
        start = time.perf_counter_ns()
        work()
        times.append(max(1, time.perf_counter_ns() - start - off_ns))
        if len(times) == 1:
            deadline = time.monotonic() + seconds
    return tuple(times[1:])


def _transfer(bench: _Bench, probe: Probe) -> Rate:
    """Time copies between this machine's memory and a device's, with the functions of llama.cpp's scheduler.

    A remote device does not acknowledge an upload. So an upload ends when a value has been read back, and the shortest
    time of such a read is subtracted. An upload and a download together take one round trip.
    """
    lib, n_bytes = bench.lib, 4 * probe.columns
    tensor = bench.tensor(bench.data, type_number("F32"), probe.columns, 1)
    data, target = random_rows("F32", 1, probe.columns), ctypes.create_string_buffer(n_bytes)
    bench.allocate(bench.data, bench.memory)
    fill(tensor, data)
    reads_back = probe.op == UPLOAD and bench.is_remote

    def upload() -> None:
        lib.ggml_backend_tensor_set(tensor, data, 0, n_bytes)
        if reads_back:
            devices.wait_for(tensor)

    def download() -> None:
        lib.ggml_backend_tensor_get(tensor, target, 0, n_bytes)

    work = upload if probe.op == UPLOAD else download
    times = _time(probe.seconds, work, devices.reading_ns(tensor) if reads_back else 0)
    name = lib.ggml_backend_buft_name(bench.memory).decode()
    return Rate(probe.op, "F32", name, 1, probe.columns, 1, probe.n_threads, n_bytes, 0, times)


def _place_products(bench: _Bench, probe: Probe, weights: Sequence[Any], products: Sequence[Any]) -> tuple[Any, str]:
    """The graph of the products, allocated and with filled weights, and the name of the weights' buffer type."""
    kind = bench.weights_buffer(weights[0], products[0], probe.repack is not False)
    if kind is None:
        raise LabError(f"This device cannot multiply {probe.type} weights.", "Use another quantization.")
    data = random_rows(probe.type, probe.rows * (probe.n_expert or 1), probe.columns)
    return bench.graph_of(products), bench.place(kind, weights, data)


def _mul_mats(bench: _Bench, probe: Probe) -> _Pass:
    """Multiply many distinct weight matrices with one input."""
    lib, kind = bench.lib, type_number(probe.type)
    matrix_bytes = lib.ggml_row_size(kind, probe.columns) * probe.rows
    n_matrices = max(1, min(MAX_NODES // 2, probe.n_bytes // matrix_bytes))
    weights = [bench.tensor(bench.data, kind, probe.columns, probe.rows) for _ in range(n_matrices)]
    source = bench.tensor(bench.graphs, type_number("F32"), probe.columns, probe.n_tokens)
    products = [P(lib.ggml_mul_mat(bench.graphs, weight, source)) for weight in weights]
    graph, buffer = _place_products(bench, probe, weights, products)
    fill(source, random_rows("F32", probe.n_tokens, probe.columns))
    flops = 2 * n_matrices * probe.rows * probe.columns * probe.n_tokens
    return _Pass(graph, buffer, n_matrices * matrix_bytes, flops)


def _mul_mat_ids(bench: _Bench, probe: Probe) -> _Pass:
    """Multiply experts' weights; each token uses its own random experts.

    A small step reads few experts, so a pass has several steps, which together read all experts.
    """
    import numpy as np

    lib, kind, n, n_used = bench.lib, type_number(probe.type), probe.n_expert or 1, probe.n_expert_used or 1
    expert_bytes = lib.ggml_row_size(kind, probe.columns) * probe.rows
    n_sets = max(1, min(64, probe.n_bytes // (expert_bytes * n)))
    n_steps = max(1, n // (n_used * probe.n_tokens))
    weights = [bench.tensor(bench.data, kind, probe.columns, probe.rows, n) for _ in range(n_sets)]
    source = bench.tensor(bench.graphs, type_number("F32"), probe.columns, 1, probe.n_tokens)
    choices = [bench.tensor(bench.graphs, I32, n_used, probe.n_tokens) for _ in range(n_steps)]
    products = [P(lib.ggml_mul_mat_id(bench.graphs, weight, source, ids)) for weight in weights for ids in choices]
    graph, buffer = _place_products(bench, probe, weights, products)
    fill(source, random_rows("F32", probe.n_tokens, probe.columns))
    generator, n_read = np.random.default_rng(1), 0
    order = generator.permutation(n)
    for step, ids in enumerate(choices):
        drawn = [generator.permutation(n)[:n_used] for _ in range(probe.n_tokens)]
        if probe.n_tokens == 1:
            drawn = [order[step * n_used : (step + 1) * n_used]]
        chosen = np.array(drawn, dtype=np.int32)
        n_read += len(np.unique(chosen))
        fill(ids, chosen.tobytes())
    flops = 2 * n_sets * n_steps * n_used * probe.rows * probe.columns * probe.n_tokens
    return _Pass(graph, buffer, n_sets * n_read * expert_bytes, flops)


def _attentions(bench: _Bench, probe: Probe) -> _Pass:
    """Attention over distinct caches of keys and values in llama.cpp's layout; every token attends to all positions.

    The mask is llama.cpp's: a row for each token, as long as the cache (a multiple of 256), F16 for flash attention.
    Without a mask CUDA does not use its kernels for grouped heads. Plain attention is two products with a softmax
    between them, on transposed values (llama-graph.cpp, build_attn_mha).
    """
    lib, graphs, kind, head_dim, n_head = bench.lib, bench.graphs, type_number(probe.type), probe.columns, probe.rows
    n_kv_heads, is_flash = probe.n_head_kv or n_head, probe.op == ATTENTION
    n_positions = -(-(probe.n_positions or N_POSITIONS) // 256) * 256
    layer_bytes = 2 * n_kv_heads * lib.ggml_row_size(kind, head_dim) * n_positions
    n_layers = max(1, min(256, probe.n_bytes // layer_bytes))
    query = bench.tensor(graphs, type_number("F32"), head_dim, probe.n_tokens, n_head)
    mask = bench.tensor(graphs, type_number("F16" if is_flash else "F32"), n_positions, probe.n_tokens)
    scale, zero = ctypes.c_float(head_dim**-0.5), ctypes.c_float(0)
    of_keys = head_dim, n_kv_heads, n_positions
    of_values = of_keys if is_flash else of_keys[::-1]
    caches, attended = [], []
    for _ in range(n_layers):
        pair = [bench.tensor(bench.data, kind, *size) for size in (of_keys, of_values)]
        keys, values = (P(lib.ggml_permute(graphs, cache, 0, 2, 1, 3)) for cache in pair)
        if is_flash:
            attended.append(P(lib.ggml_flash_attn_ext(graphs, query, keys, values, mask, scale, zero, zero)))
        else:
            weights = P(lib.ggml_soft_max_ext(graphs, P(lib.ggml_mul_mat(graphs, keys, query)), mask, scale, zero))
            attended.append(P(lib.ggml_mul_mat(graphs, values, weights)))
        caches += pair
    if not devices.supports(bench.device, attended[0]):
        raise LabError(
            f"This device has no attention kernel for a {probe.type} cache.",
            "Use another cache type: --cache-type-k f16 --cache-type-v f16",
        )
    graph = bench.graph_of(attended)
    buffer = bench.place(bench.memory, caches, random_rows(probe.type, n_kv_heads * n_positions, head_dim))
    fill(query, random_rows("F32", n_head * probe.n_tokens, head_dim))
    fill(mask, bytes((2 if is_flash else 4) * n_positions * probe.n_tokens))  # zero: not masked
    flops = 4 * n_layers * n_head * head_dim * n_positions * probe.n_tokens
    return _Pass(graph, buffer, n_layers * layer_bytes, flops)


def _set_threads(bench: _Bench, n_threads: int) -> None:
    registry = P(bench.lib.ggml_backend_dev_backend_reg(bench.device))
    address = bench.lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
    if address:
        ctypes.CFUNCTYPE(None, P, ctypes.c_int)(address)(bench.backend, n_threads)
