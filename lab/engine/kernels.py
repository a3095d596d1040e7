"""Time one kernel of ggml: a graph of matrix products (or of attention) over distinct random
weights.

It runs with the libraries, device and buffer type of a model's weights. With one input column it
does the matrix work of a decode step, with many that of a prefill step. Weights stay for the next
probe: to fill them takes long.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lab.core.matrices import BLOCKS
from lab.core.record import Rate
from lab.engine import devices
from lab.engine.bindings import InitParams, P, ggml
from lab.errors import LabError
from lab.process.wire import (
    ATTENTION,
    DOWNLOAD,
    MUL_MAT,
    MUL_MAT_ID,
    PLAIN_ATTENTION,
    UPLOAD,
    Probe,
)

MAX_NODES = 4096
N_POSITIONS = 512  # of attention if the probe has none
NARROW = 1.02
N_NARROW = 4
"""A kernel is timed no further when N_NARROW of its passes took at most NARROW times as long as the
best."""

OFFSET_OF_BUFFER = 8  # of ggml_tensor.buffer, which follows the enum type
CACHE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
"""Types that llama.cpp's KV cache can have."""

SLOW_TO_PACK = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
I32 = 26  # GGML_TYPE_I32
F16_CACHE = "Use another cache type: --cache-type-k f16 --cache-type-v f16"


class _Bench:
    """A device with weights (or caches) in its memory, and the inputs and results of the present
    probe."""

    def __init__(self, probe: Probe) -> None:
        self.lib = lib = ggml()
        self.device = devices.device_of(probe.device)
        self.backend = P(lib.ggml_backend_dev_init(self.device, None))
        self.memory = P(lib.ggml_backend_dev_buffer_type(self.device))
        self.probe = probe
        self.data = self.context()
        self.graphs = self.context()
        self.tensors: list[P] = []
        self.buffer = ""  # the name of the weights' buffer type, once they are filled
        self._buffers: dict[int | None, P] = {}

    def context(self) -> P:
        n_bytes = 4 * MAX_NODES * self.lib.ggml_tensor_overhead() + 2**20
        return P(self.lib.ggml_init(InitParams(n_bytes, None, True)))

    def free(self, *contexts: P) -> None:
        for context in contexts:
            buffer = self._buffers.pop(context.value, None)
            if buffer:
                self.lib.ggml_backend_buffer_free(buffer)
            self.lib.ggml_free(context)

    def tensor(self, context: P, kind: int, *sizes: int) -> P:
        """A new tensor of two or three dimensions, not yet allocated."""
        return P(getattr(self.lib, f"ggml_new_tensor_{len(sizes)}d")(context, kind, *sizes))

    def weights(self, n: int, *sizes: tuple[int, ...]) -> list[P]:
        """Weights of these sizes, n of each, in turn: [key, value, key, value] of caches. They are
        made by the first probe, and not yet filled."""
        if not self.tensors:
            kind = type_number(self.probe.type)
            self.tensors = [self.tensor(self.data, kind, *size) for size in sizes * n]
        return self.tensors[: n * len(sizes)]

    def allocate_all(self, product: P, rows: int, columns: int) -> None:
        """Allocate everything that is new; fill the weights, which the first probe brings, with
        random rows."""
        if not self.buffer:
            kind = self._weights_buffer(product)
            self.allocate(self.data, kind)
            data = random_rows(self.probe.type, rows, columns)
            for tensor in self.tensors:
                fill(tensor, data)
            self.buffer = str(self.lib.ggml_backend_buft_name(kind).decode())
        else:
            self.check(product)
        self.allocate(self.graphs, self.memory)

    def allocate(self, context: P, kind: P) -> None:
        buffer = P(self.lib.ggml_backend_alloc_ctx_tensors_from_buft(context, kind))
        if not buffer:
            raise LabError(
                "The device has too little free memory for the probe.", "Close other programs."
            )
        self._buffers[context.value] = buffer

    def _weights_buffer(self, product: P) -> P:
        """The first buffer type of the device that supports the product, as llama.cpp chooses; for
        caches its own."""
        lib = self.lib
        device = self.device
        if self.probe.repack is False or self.probe.op not in (MUL_MAT, MUL_MAT_ID):
            self.check(product)
            return self.memory
        place = P.from_address((self.tensors[0].value or 0) + OFFSET_OF_BUFFER)
        for candidate in devices.extra_buffer_types(device):
            empty = P(lib.ggml_backend_buft_alloc_buffer(candidate, 0))
            place.value = empty.value
            supported = lib.ggml_backend_dev_supports_op(device, product)
            place.value = None
            lib.ggml_backend_buffer_free(empty)
            if supported:
                return candidate
        self.check(product)
        return self.memory

    def check(self, product: P) -> None:
        """LabError if the device cannot compute an operation."""
        probe = self.probe
        if self.lib.ggml_backend_dev_supports_op(self.device, product):
            return
        if probe.op in (MUL_MAT, MUL_MAT_ID):
            what = f"This device cannot multiply {probe.type} weights."
            raise LabError(what, "Use another quantization.")
        raise LabError(
            f"This device has no attention kernel for a {probe.type} cache.", F16_CACHE
        )

    def graph_of(self, results: Iterable[P]) -> P:
        graph = P(self.lib.ggml_new_graph_custom(self.graphs, MAX_NODES, False))
        for result in results:
            self.lib.ggml_build_forward_expand(graph, result)
        return graph


@dataclass
class _Last:
    """The bench of the last probe, for the next one with the same weights."""

    bench: _Bench | None = None


_last = _Last()


def release() -> None:
    """Free the weights of the last probe."""
    bench = _last.bench
    if bench is not None:
        bench.free(bench.graphs, bench.data)
        bench.lib.ggml_backend_free(bench.backend)
    _last.bench = None


def run(probe: Probe) -> Rate:
    """Time passes after a warm-up pass, for `probe.seconds` or until their best is sure.

    The weights stay in memory.
    """
    _check(probe)
    bench = _last.bench
    if bench is None or not _can_use(bench, probe):
        release()
        bench = _Bench(probe)
        _last.bench = bench
    try:
        if probe.op in (UPLOAD, DOWNLOAD):
            return _transfer(bench, probe)
        build = GRAPHS[probe.op]
        graph, n_bytes, flops = build(bench, probe)
        times = _compute(bench, probe, graph)
        bench.free(bench.graphs)
        bench.graphs = bench.context()
    except BaseException:
        release()
        raise
    return Rate(
        op=probe.op,
        type=probe.type,
        buffer=bench.buffer,
        rows=probe.rows,
        columns=probe.columns,
        n_tokens=probe.n_tokens,
        n_threads=probe.n_threads,
        n_bytes=n_bytes,
        flops=flops,
        times_ns=times,
        n_head_kv=probe.n_head_kv,
        n_positions=probe.n_positions,
        n_expert=probe.n_expert,
        n_expert_used=probe.n_expert_used,
    )


def _can_use(bench: _Bench, probe: Probe) -> bool:
    """Whether a probe needs the bench's weights, or some of them."""
    if probe.op in (UPLOAD, DOWNLOAD) or probe.n_bytes > bench.probe.n_bytes:
        return False
    same_work = dataclasses.replace(
        probe,
        n_tokens=bench.probe.n_tokens,
        n_bytes=bench.probe.n_bytes,
        n_threads=bench.probe.n_threads,
        seconds=bench.probe.seconds,
    )
    return same_work == bench.probe


def _check(probe: Probe) -> None:
    """LabError where ggml would abort the process."""
    type_number(probe.type)
    block = BLOCKS[probe.type][0]
    if probe.columns < 1 or probe.columns % block:
        what = (
            f"{probe.type} packs blocks of {block} weights; a row of {probe.columns} weights does "
            "not fit."
        )
        raise LabError(what, "Use another quantization.")
    if probe.op in (ATTENTION, PLAIN_ATTENTION):
        has_whole_groups = probe.rows % (probe.n_head_kv or probe.rows) == 0
        if not has_whole_groups or probe.type not in CACHE_TYPES:
            what = (
                f"Attention of {probe.rows} heads over {probe.n_head_kv} in a {probe.type} cache "
                "cannot be probed."
            )
            raise LabError(what, F16_CACHE)
    if probe.op == MUL_MAT_ID and not 1 <= (probe.n_expert_used or 0) <= (probe.n_expert or 0):
        what = f"{probe.n_expert_used} of {probe.n_expert} experts cannot be probed."
        raise LabError(what, "Use another model.")


def _compute(bench: _Bench, probe: Probe, graph: P) -> tuple[int, ...]:
    """Nanoseconds of each pass through a graph, except the first."""
    lib = bench.lib
    backend = bench.backend
    registry = P(lib.ggml_backend_dev_backend_reg(bench.device))
    address = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
    if address:
        ctypes.CFUNCTYPE(None, P, ctypes.c_int)(address)(backend, probe.n_threads)

    def compute() -> None:
        status = lib.ggml_backend_graph_compute(backend, graph)
        lib.ggml_backend_synchronize(backend)
        if status:
            what = f"ggml could not compute {probe.op} of {probe.type}: status {status}."
            raise LabError(what, "Try again.")

    return _time(probe.seconds, compute)


def _time(seconds: float, work: Callable[[], object]) -> tuple[int, ...]:
    """Nanoseconds of each call of `work`, after a first one.

    For `seconds`, or until N_NARROW calls are nearly as fast as the best.
    """
    work()
    times: list[int] = []
    best = sys.maxsize
    n_narrow = 0
    deadline = time.monotonic() + seconds
    while not times or (time.monotonic() < deadline and n_narrow < N_NARROW):
        start = time.perf_counter_ns()
        work()
        ns = max(1, time.perf_counter_ns() - start)
        times.append(ns)
        if ns < best:
            best = ns
            n_narrow = sum(1 for earlier in times if earlier <= NARROW * best)
        elif ns <= NARROW * best:
            n_narrow += 1
    return tuple(times)


def _transfer(bench: _Bench, probe: Probe) -> Rate:
    """Time copies between this machine's memory and a device's, with the functions of llama.cpp's
    scheduler."""
    lib = bench.lib
    n_bytes = 4 * probe.columns
    tensor = bench.tensor(bench.data, type_number("F32"), probe.columns, 1)
    data = random_rows("F32", 1, probe.columns)
    target = ctypes.create_string_buffer(n_bytes)
    bench.allocate(bench.data, bench.memory)
    fill(tensor, data)
    upload = functools.partial(lib.ggml_backend_tensor_set, tensor, data, 0, n_bytes)
    download = functools.partial(lib.ggml_backend_tensor_get, tensor, target, 0, n_bytes)
    copy = upload if probe.op == UPLOAD else download
    times = _time(probe.seconds, copy)
    name = lib.ggml_backend_buft_name(bench.memory).decode()
    return Rate(
        op=probe.op,
        type="F32",
        buffer=name,
        rows=1,
        columns=probe.columns,
        n_tokens=1,
        n_threads=probe.n_threads,
        n_bytes=n_bytes,
        flops=0,
        times_ns=times,
    )


def _mul_mats(bench: _Bench, probe: Probe) -> tuple[P, int, int]:
    """Multiply many distinct weight matrices with one input: the graph, and the bytes and FLOPs of
    a pass."""
    lib = bench.lib
    matrix_bytes = lib.ggml_row_size(type_number(probe.type), probe.columns) * probe.rows
    n_matrices = max(1, min(MAX_NODES // 2, probe.n_bytes // matrix_bytes))
    weights = bench.weights(n_matrices, (probe.columns, probe.rows))
    source = bench.tensor(bench.graphs, type_number("F32"), probe.columns, probe.n_tokens)
    products = [P(lib.ggml_mul_mat(bench.graphs, weight, source)) for weight in weights]
    bench.allocate_all(products[0], probe.rows, probe.columns)
    fill(source, random_rows("F32", probe.n_tokens, probe.columns))
    flops = 2 * n_matrices * probe.rows * probe.columns * probe.n_tokens
    return bench.graph_of(products), n_matrices * matrix_bytes, flops


def _mul_mat_ids(bench: _Bench, probe: Probe) -> tuple[P, int, int]:
    """Multiply experts' weights; each token uses its own random ones, the steps of a pass together
    all of them."""
    import numpy as np

    lib = bench.lib
    n = probe.n_expert or 1
    n_used = probe.n_expert_used or 1
    expert_bytes = lib.ggml_row_size(type_number(probe.type), probe.columns) * probe.rows
    n_sets = max(1, min(64, probe.n_bytes // (expert_bytes * n)))
    n_steps = max(1, n // (n_used * probe.n_tokens))
    weights = bench.weights(n_sets, (probe.columns, probe.rows, n))
    source = bench.tensor(bench.graphs, type_number("F32"), probe.columns, 1, probe.n_tokens)
    choices = [bench.tensor(bench.graphs, I32, n_used, probe.n_tokens) for _ in range(n_steps)]
    products = []
    for weight in weights:
        for ids in choices:
            products.append(P(lib.ggml_mul_mat_id(bench.graphs, weight, source, ids)))
    bench.allocate_all(products[0], probe.rows * n, probe.columns)
    fill(source, random_rows("F32", probe.n_tokens, probe.columns))
    generator = np.random.default_rng(1)
    n_read = 0
    order = generator.permutation(n)
    for step, ids in enumerate(choices):
        drawn = [generator.permutation(n)[:n_used] for _ in range(probe.n_tokens)]
        if probe.n_tokens == 1:  # each step takes the next experts, so that all are used
            drawn = [order[step * n_used : (step + 1) * n_used]]
        chosen = np.array(drawn, dtype=np.int32)
        n_read += len(np.unique(chosen))
        fill(ids, chosen.tobytes())
    flops = 2 * n_sets * n_steps * n_used * probe.rows * probe.columns * probe.n_tokens
    return bench.graph_of(products), n_sets * n_read * expert_bytes, flops


def _attentions(bench: _Bench, probe: Probe) -> tuple[P, int, int]:
    """Attention over distinct caches of keys and values in llama.cpp's layout; every token attends
    to all positions.

    The mask is llama.cpp's: a row for each token, as long as the cache (a multiple of 256), F16 for
    flash attention. Without a mask CUDA does not use its kernels for grouped heads. Plain attention
    is two products with a softmax between them, on transposed values (llama-graph.cpp,
    build_attn_mha).
    """
    lib = bench.lib
    kind = type_number(probe.type)
    head_dim = probe.columns
    n_head = probe.rows
    n_kv_heads = probe.n_head_kv or n_head
    n_positions = math.ceil((probe.n_positions or N_POSITIONS) / 256) * 256
    layer_bytes = 2 * n_kv_heads * lib.ggml_row_size(kind, head_dim) * n_positions
    n_layers = max(1, min(256, probe.n_bytes // layer_bytes))
    query = bench.tensor(bench.graphs, type_number("F32"), head_dim, probe.n_tokens, n_head)
    keys_shape = (head_dim, n_kv_heads, n_positions)
    if probe.op == ATTENTION:
        mask_type = "F16"
        values_shape = keys_shape
        attend = _flash_attention
    else:
        mask_type = "F32"
        values_shape = (n_positions, n_kv_heads, head_dim)
        attend = _plain_attention
    mask = bench.tensor(bench.graphs, type_number(mask_type), n_positions, probe.n_tokens)
    caches = bench.weights(n_layers, keys_shape, values_shape)
    outputs = []
    for layer in range(n_layers):
        keys = caches[2 * layer]  # each layer has keys, then values
        values = caches[2 * layer + 1]
        keys_by_head = P(lib.ggml_permute(bench.graphs, keys, 0, 2, 1, 3))
        values_by_head = P(lib.ggml_permute(bench.graphs, values, 0, 2, 1, 3))
        scale = ctypes.c_float(head_dim**-0.5)
        outputs.append(attend(bench, query, keys_by_head, values_by_head, mask, scale))
    bench.allocate_all(outputs[0], n_kv_heads * n_positions, head_dim)
    fill(query, random_rows("F32", n_head * probe.n_tokens, head_dim))
    mask_bytes = BLOCKS[mask_type][1] * n_positions * probe.n_tokens
    fill(mask, bytes(mask_bytes))  # zero: not masked
    flops = 4 * n_layers * n_head * head_dim * n_positions * probe.n_tokens
    return bench.graph_of(outputs), n_layers * layer_bytes, flops


def _flash_attention(
    bench: _Bench, query: P, keys: P, values: P, mask: P, scale: ctypes.c_float
) -> P:
    zero = ctypes.c_float(0)
    return P(
        bench.lib.ggml_flash_attn_ext(
            bench.graphs, query, keys, values, mask, scale, zero, zero
        )
    )


def _plain_attention(
    bench: _Bench, query: P, keys: P, values: P, mask: P, scale: ctypes.c_float
) -> P:
    lib = bench.lib
    scores = P(lib.ggml_mul_mat(bench.graphs, keys, query))
    weights = P(lib.ggml_soft_max_ext(bench.graphs, scores, mask, scale, ctypes.c_float(0)))
    return P(lib.ggml_mul_mat(bench.graphs, values, weights))


GRAPHS = {
    MUL_MAT: _mul_mats,
    MUL_MAT_ID: _mul_mat_ids,
    ATTENTION: _attentions,
    PLAIN_ATTENTION: _attentions,
}
"""By the operation of a probe: what builds its graph, and says the bytes and FLOPs of a pass."""


def fill(tensor: P, data: bytes) -> None:
    ggml().ggml_backend_tensor_set(tensor, data, 0, len(data))


@functools.cache
def type_number(name: str) -> int:
    """ggml's number of a weight type.

    LabError if ggml lacks the type or the lab does not know its block size.
    """
    type_names = [type_name.upper() for type_name in devices.type_names()]
    if name not in BLOCKS or name not in type_names:
        what = f"Weights of type {name} are not supported."
        raise LabError(what, f"Supported: {', '.join(BLOCKS)}.")
    return type_names.index(name)


def random_rows(name: str, rows: int, columns: int) -> bytes:
    """Random weights of a type, some hundred rows repeated: some kernels and memories handle zeros
    faster."""
    import numpy as np

    number = type_number(name)
    most_rows = 32 if name in SLOW_TO_PACK else 512
    n_distinct = min(rows, most_rows)
    row_bytes = ggml().ggml_row_size(number, columns)
    generator = np.random.default_rng(1)
    values = (0.05 * generator.standard_normal((n_distinct, columns))).astype(np.float32)
    target = ctypes.create_string_buffer(row_bytes * n_distinct)
    pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    importance = (ctypes.c_float * columns)(*[1.0] * columns)
    ggml().ggml_quantize_chunk(number, pointer, target, 0, n_distinct, columns, importance)
    n_copies = math.ceil(rows / n_distinct)
    return (target.raw * n_copies)[: row_bytes * rows]
