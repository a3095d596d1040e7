"""Stop after every operation of a step: which tensors it has, and how long it takes.

llama.cpp passes a callback on to ggml's scheduler (ggml-backend.cpp, ggml_backend_sched_compute_splits). The scheduler
asks before each operation whether somebody wants its result; if so, it computes up to it, waits for it, and calls
again. Two stamps around each operation are its time and the cost of a stop. Operations that compute nothing (views)
show this cost, but on one thread: that the CPU's threads start and end at each stop is timed apart, on a product so
small that there is nothing to compute. The same steps run alternately on a second context without a callback.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import math
import re
import statistics
import time
from collections.abc import Sequence
from typing import Any

from lab.core.payloads import Looks
from lab.engine import kernels, llama
from lab.engine.bindings import TensorStruct, ggml, llama_cpp
from lab.engine.llama import Context, Logits
from lab.errors import LabError
from lab.features.trace.nodes import Node, Operand, StepTrace, Trace
from lab.process.wire import MUL_MAT, Probe

OBJECT_BYTES = 32  # sizeof(struct ggml_object), which ggml_tensor_overhead includes
Rounds = list[list[list[int]]]  # of each round the stamps of each step
OWN_BUILD = "Trace with the build that the lab installs (without --lib)."


def trace(context: Context, tokens: Sequence[int], n_gen: int, n_rounds: int) -> Trace:
    """Trace prefill of `tokens` and `n_gen` decode steps after it, in `n_rounds` rounds after one that warms up."""
    _check_layout()
    lib = llama_cpp()
    stamps = list[int]()
    problems = list[LabError]()
    nodes: list[list[Node]] = [[]]  # of each step of the first round with stops, then an empty list

    def on_node(address: int, asks: bool, _: Any) -> bool:
        stamps.append(time.perf_counter_ns())
        if asks and len(nodes) <= n_gen + 1 and not problems:
            try:
                nodes[-1].append(_node(address))
            except LabError as problem:  # an exception cannot pass through llama.cpp
                problems.append(problem)
        return True

    callback = lib.ggml_backend_sched_eval_callback(on_node)  # must outlive the context
    stopping = llama.new_context(context.loaded, context.settings, callback)

    def steps(own: Context) -> list[list[int]]:
        """Prefill an empty cache and decode; of each step the stamps: start, stops, end, and when a token is chosen."""
        made = []
        logits = Logits(own, False)
        lib.llama_memory_clear(lib.llama_get_memory(own.pointer), False)
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        for _ in range(n_gen + 1):
            batch = lib.llama_batch_get_one(ids, len(ids))
            stamps.clear()
            start_ns = time.perf_counter_ns()
            llama.decode(own, batch)
            ready_ns = time.perf_counter_ns()
            token = int(logits.row(-1).argmax())
            made.append([start_ns, *stamps, ready_ns, time.perf_counter_ns()])
            ids = (ctypes.c_int32 * 1)(token)
            if problems:
                raise problems[0]
            if nodes[-1]:
                nodes.append([])
        return made

    rounds: tuple[Rounds, Rounds] = [], []  # without and with stops
    gc.collect()
    gc.disable()
    try:
        steps(context)
        steps(stopping)
        for number in range(n_rounds):
            for is_traced in (number % 2 == 0, number % 2 == 1):
                rounds[is_traced].append(steps(stopping if is_traced else context))
    finally:
        gc.enable()
        llama.free_context(stopping)

    of_prefill = slice(0, 1)
    of_decode = slice(1, n_gen + 1)
    settings = context.settings
    return Trace(
        _medians(nodes[of_prefill], rounds, of_prefill, len(tokens), 0, settings.n_threads_batch),
        _medians(nodes[of_decode], rounds, of_decode, 1, len(tokens), settings.n_threads),
    )


def _medians(
    nodes: Sequence[Sequence[Node]],
    rounds: Sequence[Rounds],
    which: slice,
    n_tokens: int,
    n_past: int,
    n_threads: int,
) -> StepTrace:
    """Medians over steps of one shape, from the stamps of rounds without and with stops."""
    import numpy as np

    own = nodes[0]
    (plain, traced) = ([one for made in some for one in made[which]] for some in rounds)
    if not own or any(len(one) != 2 * len(own) + 3 for one in traced):
        what = "llama.cpp did not compute the same operations in every step, so they cannot be told apart."
        raise LabError(what, "Trace a shorter prompt (-p 100), or another model.")
    between = np.diff(
        np.array(traced), axis=1
    )  # a gap, an operation, a gap, ..., the end, choosing a token
    ns = np.median(between, axis=0).tolist()
    timed = tuple(
        dataclasses.replace(node, gap_ns=ns[2 * i], ns=ns[2 * i + 1]) for i, node in enumerate(own)
    )
    outside_ns = float(np.median(between[:, 0] + between[:, -2]))
    step_ns, choosing_ns = np.median(np.diff(np.array(plain), axis=1), axis=0).tolist()
    threads_ns = _threads_ns(n_threads)
    return StepTrace(
        n_tokens, n_past, timed, len(traced), outside_ns, step_ns, choosing_ns, threads_ns
    )


def _threads_ns(n_threads: int) -> int:
    """Nanoseconds in which the CPU's threads start and end around an operation that stands alone.

    That is what one tiny product takes beyond the second of two in a graph, with all threads less the same with one.
    """

    def alone_ns(n: int) -> float:
        tiny = Probe(MUL_MAT, "F32", 64, 32, None, 1, 2 * 64 * 32 * 4, n, None, 0.05, repack=False)
        two, one = (
            kernels.run(dataclasses.replace(tiny, n_bytes=tiny.n_bytes // part)).times_ns
            for part in (1, 2)
        )
        return 2 * statistics.median(one) - statistics.median(two)

    more_ns = alone_ns(n_threads) - alone_ns(1) if n_threads > 1 else 0
    kernels.release()
    return max(0, round(more_ns))


KINDS = "kq_soft_max", "Kcur", "Vcur"
"""The tensors that `look` reads, as llama.cpp names them before a hyphen and the layer."""


def look(context: Context, tokens: Sequence[int], replaced: int, replacement: int) -> Looks:
    """The attention weights of a prompt, in prefill and in decode, and how K and V of later tokens depend on one.

    The context must be without flash attention, which never writes the weights. LabError for a model whose tensors
    have other names.
    """
    import numpy as np

    _check_layout()
    lib = llama_cpp()
    n = len(tokens)
    found = dict[tuple[str, int], Any]()

    def on_node(address: int, asks: bool, _: Any) -> bool:
        name = ggml().ggml_get_name(address).decode(errors="replace")
        match = re.fullmatch(rf"({'|'.join(KINDS)})-(\d+)", name)
        if (
            match and not asks
        ):  # its numbers, the outer dimension first; the tensor may be a view with gaps
            tensor = TensorStruct.from_address(address)
            n_bytes = ggml().ggml_nbytes(address)
            raw = ctypes.create_string_buffer(n_bytes)
            ggml().ggml_backend_tensor_get(address, raw, 0, n_bytes)
            values = np.lib.stride_tricks.as_strided(
                np.frombuffer(raw.raw, dtype=np.float32),
                tuple(tensor.ne)[::-1],
                tuple(tensor.nb)[::-1],
            )
            found[match[1], int(match[2])] = (
                values.copy()
            )  # of several operations with this name the last one
        return match is not None or not asks

    callback = lib.ggml_backend_sched_eval_callback(on_node)
    looking = llama.new_context(context.loaded, context.settings, callback)

    def after(*parts: Sequence[int]) -> dict[tuple[str, int], Any]:
        """What the last of these steps computes, from an empty cache."""
        lib.llama_memory_clear(lib.llama_get_memory(looking.pointer), False)
        for part in parts:
            found.clear()
            ids = (ctypes.c_int32 * len(part))(*part)  # the batch has only its address
            llama.decode(looking, lib.llama_batch_get_one(ids, len(part)))
        return dict(found)

    try:
        prefill = after(tokens)
        decode = after(tokens[:-1], tokens[-1:])
        changed = after([*tokens[:replaced], replacement, *tokens[replaced + 1 :]])
    finally:
        llama.free_context(looking)
    layers = sorted({layer for _, layer in prefill})
    if not layers or any((kind, layer) not in prefill for kind in KINDS for layer in layers):
        hint = "Use a model of another architecture, such as smollm2-135m."
        raise LabError(
            "llama.cpp does not show the attention weights, K and V of every layer of this model.",
            hint,
        )
    prefills = list[Any]()
    rows = list[Any]()
    changes = list[Any]()
    for layer in layers:
        triangle, (row,) = (
            seen["kq_soft_max", layer][0].mean(axis=0)[:, :n].tolist() for seen in (prefill, decode)
        )
        keys, values = (
            [seen[kind, layer].reshape(n, -1)[replaced + 1 :] for seen in (prefill, changed)]
            for kind in KINDS[1:]
        )
        prefills.append(tuple(map(tuple, triangle)))
        rows.append(tuple(row))
        changes.append(
            tuple(float(np.linalg.norm(a - b) / np.linalg.norm(a)) for a, b in (keys, values))
        )
    return Looks(tuple(prefills), tuple(rows), tuple(changes))


def _check_layout() -> None:
    """LabError if a tensor of this ggml does not have the size of `TensorStruct`."""
    n_bytes = ggml().ggml_tensor_overhead() - OBJECT_BYTES
    known = ctypes.sizeof(TensorStruct)
    if n_bytes != known:
        raise LabError(
            f"A tensor of this llama.cpp has {n_bytes} bytes; the lab knows those of {known}.",
            OWN_BUILD,
        )


def _node(address: int) -> Node:
    """An operation of the graph. LabError if its name or size is not what ggml says."""
    lib = ggml()
    tensor = TensorStruct.from_address(address)
    if tensor.name != lib.ggml_get_name(address) or math.prod(tensor.ne) != lib.ggml_nelements(
        address
    ):
        raise LabError(
            "The tensors of this llama.cpp have another layout than those that the lab can read.",
            OWN_BUILD,
        )

    def operand(one: Any) -> Operand:
        ne = tuple(one.ne)
        n_bytes = lib.ggml_row_size(one.type, ne[0]) * math.prod(ne[1:])
        return Operand(
            one.name.decode(errors="replace"),
            lib.ggml_type_name(one.type).decode().upper(),
            ne,
            n_bytes,
        )

    buffer = tensor.buffer or (
        TensorStruct.from_address(tensor.view_src).buffer if tensor.view_src else None
    )
    kind = (
        lib.ggml_backend_buft_name(lib.ggml_backend_buffer_get_type(buffer)).decode()
        if buffer
        else ""
    )
    sources = tuple(operand(TensorStruct.from_address(one)) for one in filter(None, tensor.src))
    return Node(lib.ggml_op_name(tensor.op).decode(), operand(tensor), sources, kind)
