"""Stop after every operation of a step: which tensors it has, and how long it takes.

llama.cpp passes a callback on to ggml's scheduler (ggml-backend.cpp,
ggml_backend_sched_compute_splits). The scheduler asks before each operation whether somebody wants
its result; if so, it computes up to it, waits for it, and calls again. Two stamps around each
operation are its time and the cost of a stop. Operations that compute nothing (views) show this
cost, but on one thread: the CPU's threads start and end at each stop, which is timed separately, on
a product so small that there is nothing to compute. The same steps run alternately on a second
context without a callback.
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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lab.engine import kernels, llama
from lab.engine.bindings import TensorStruct, ggml, llama_cpp
from lab.engine.llama import LlamaContext, Logits
from lab.errors import LabError
from lab.features.trace.lines import Looks
from lab.features.trace.nodes import Node, Operand, StepTrace, Trace
from lab.process.wire import MUL_MAT, Probe

OBJECT_BYTES = 32  # sizeof(struct ggml_object), which ggml_tensor_overhead includes
OWN_BUILD = "Trace with the build that the lab installs (without --lib)."

Stamps = list[int]  # of a step, in nanoseconds: start, stops, end, and when a token is chosen
Round = list[Stamps]  # prefill and the decode steps after it


@dataclass
class Recorder:
    """What the callback writes down: a stamp at each call, the operations of the first round."""

    n_steps: int
    stamps: Stamps = field(default_factory=list)
    steps: list[list[Node]] = field(default_factory=lambda: [[]])
    problem: LabError | None = None

    def on_node(self, address: int, asks: bool, _: object) -> bool:
        self.stamps.append(time.perf_counter_ns())
        if asks and len(self.steps) <= self.n_steps and self.problem is None:
            try:
                self.steps[-1].append(_node(address))
            except LabError as problem:  # an exception cannot pass through llama.cpp
                self.problem = problem
        return True

    def end_step(self) -> None:
        if self.problem is not None:
            raise self.problem
        if self.steps[-1]:
            self.steps.append([])


def trace(context: LlamaContext, tokens: Sequence[int], n_gen: int, n_rounds: int) -> Trace:
    """Trace prefill of `tokens` and `n_gen` decode steps, in rounds after one that warms up.

    Rounds with and without stops alternate.
    """
    _check_layout()
    recorder = Recorder(n_steps=n_gen + 1)
    callback = llama_cpp().ggml_backend_sched_eval_callback(recorder.on_node)
    stopping = llama.new_context(context.loaded, context.settings, callback)
    plain: list[Round] = []
    traced: list[Round] = []
    gc.collect()
    gc.disable()
    try:
        _round(context, recorder, tokens, n_gen)
        _round(stopping, recorder, tokens, n_gen)
        for number in range(n_rounds):
            if number % 2 == 0:
                traced.append(_round(stopping, recorder, tokens, n_gen))
                plain.append(_round(context, recorder, tokens, n_gen))
            else:
                plain.append(_round(context, recorder, tokens, n_gen))
                traced.append(_round(stopping, recorder, tokens, n_gen))
    finally:
        gc.enable()
        llama.free_context(stopping)
    settings = context.settings
    prefill = _medians(
        recorder.steps[0], _steps(plain, 0, 1), _steps(traced, 0, 1), settings.n_threads_batch
    )
    decode = _medians(
        recorder.steps[1], _steps(plain, 1, None), _steps(traced, 1, None), settings.n_threads
    )
    return Trace(
        dataclasses.replace(prefill, n_tokens=len(tokens)),
        dataclasses.replace(decode, n_past=len(tokens)),
    )


def _round(
    context: LlamaContext, recorder: Recorder, tokens: Sequence[int], n_gen: int
) -> Round:
    """Prefill an empty cache and decode."""
    lib = llama_cpp()
    logits = Logits(context, False)
    lib.llama_memory_clear(lib.llama_get_memory(context.pointer), False)
    ids = (ctypes.c_int32 * len(tokens))(*tokens)
    steps: Round = []
    for _ in range(n_gen + 1):
        batch = lib.llama_batch_get_one(ids, len(ids))
        recorder.stamps.clear()
        start_ns = time.perf_counter_ns()
        llama.decode(context, batch)
        ready_ns = time.perf_counter_ns()
        token = int(logits.row(-1).argmax())
        steps.append([start_ns, *recorder.stamps, ready_ns, time.perf_counter_ns()])
        ids = (ctypes.c_int32 * 1)(token)
        recorder.end_step()
    return steps


def _steps(rounds: Sequence[Round], first: int, end: int | None) -> list[Stamps]:
    steps: list[Stamps] = []
    for steps_of_round in rounds:
        steps += steps_of_round[first:end]
    return steps


def _medians(
    nodes: Sequence[Node], plain: Sequence[Stamps], traced: Sequence[Stamps], n_threads: int
) -> StepTrace:
    """Medians over steps of one shape, from their stamps without and with stops."""
    import numpy as np

    n_stamps = 2 * len(nodes) + 3
    if not nodes or any(len(stamps) != n_stamps for stamps in traced):
        raise LabError(
            "llama.cpp did not compute the same operations in every step, so they cannot be told "
            "apart.",
            "Trace a shorter prompt (-p 100), or another model.",
        )
    # a gap, an operation, a gap, ..., the end, choosing a token
    between = np.diff(np.array(traced), axis=1)
    medians_ns = np.median(between, axis=0).tolist()
    timed = []
    for i, node in enumerate(nodes):
        timed.append(
            dataclasses.replace(node, gap_ns=medians_ns[2 * i], ns=medians_ns[2 * i + 1])
        )
    untraced_ns, choosing_ns = np.median(np.diff(np.array(plain), axis=1), axis=0).tolist()
    return StepTrace(
        n_tokens=1,
        n_past=0,
        nodes=tuple(timed),
        n_steps=len(traced),
        outside_ns=float(np.median(between[:, 0] + between[:, -2])),
        untraced_ns=untraced_ns,
        choosing_ns=choosing_ns,
        threads_ns=threads_ns(n_threads),
    )


def threads_ns(n_threads: int) -> int:
    """Nanoseconds in which the CPU's threads start and end around an operation that stands alone.

    The time of one tiny product in a graph, less the time of a second one in the same graph: with
    all threads, less the same with one.
    """
    more_ns = 0.0
    if n_threads > 1:
        more_ns = _alone_ns(n_threads) - _alone_ns(1)
    kernels.release()
    return max(0, round(more_ns))


def _alone_ns(n_threads: int) -> float:
    """The time of a graph without its product: twice that of one product, less that of two."""
    n_bytes = 2 * 64 * 32 * 4
    two = Probe(MUL_MAT, "F32", 64, 32, None, 1, n_bytes, n_threads, None, 0.05, repack=False)
    single = dataclasses.replace(two, n_bytes=n_bytes // 2)
    two_ns = statistics.median(kernels.run(two).times_ns)
    one_ns = statistics.median(kernels.run(single).times_ns)
    return 2 * one_ns - two_ns


WEIGHTS = "kq_soft_max"
KEYS = "Kcur"
VALUES = "Vcur"
READ_TENSORS = (WEIGHTS, KEYS, VALUES)
"""The tensors that `look` reads, as llama.cpp names them before a hyphen and the layer."""

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.float32]
    Tensors = dict[tuple[str, int], Numbers]  # of a tensor, by its name and layer


class Reader:
    """Reads the tensors of READ_TENSORS after each step of a context of its own."""

    def __init__(self, context: LlamaContext) -> None:
        self.tensors: Tensors = {}
        self._callback = llama_cpp().ggml_backend_sched_eval_callback(self.on_node)
        self.context = llama.new_context(context.loaded, context.settings, self._callback)

    def on_node(self, address: int, asks: bool, _: object) -> bool:
        name = ggml().ggml_get_name(address).decode(errors="replace")
        match = re.fullmatch(rf"({'|'.join(READ_TENSORS)})-(\d+)", name)
        if match and not asks:  # of several operations with this name the last one
            self.tensors[match[1], int(match[2])] = _numbers(address)
        return match is not None or not asks

    def after(self, *prompts: Sequence[int]) -> Tensors:
        """What the last of these steps computes, from an empty cache."""
        lib = llama_cpp()
        lib.llama_memory_clear(lib.llama_get_memory(self.context.pointer), False)
        for prompt in prompts:
            self.tensors.clear()
            ids = (ctypes.c_int32 * len(prompt))(*prompt)  # the batch has only its address
            llama.decode(self.context, lib.llama_batch_get_one(ids, len(prompt)))
        return dict(self.tensors)


def _numbers(address: int) -> Numbers:
    """A copy of a tensor's numbers, the outer dimension first; it may be a view with gaps."""
    import numpy as np

    tensor = TensorStruct.from_address(address)
    n_bytes = ggml().ggml_nbytes(address)
    raw = ctypes.create_string_buffer(n_bytes)
    ggml().ggml_backend_tensor_get(address, raw, 0, n_bytes)
    flat = np.frombuffer(raw.raw, dtype=np.float32)
    shape = tuple(tensor.ne)[::-1]
    strides = tuple(tensor.nb)[::-1]
    return np.lib.stride_tricks.as_strided(flat, shape, strides).copy()


def look(
    context: LlamaContext, tokens: Sequence[int], replaced: int, replacement: int
) -> Looks:
    """The attention weights of a prompt in prefill and decode, and how K and V depend on one token.

    The context must be without flash attention, which never writes the weights. LabError for a
    model whose tensors have other names.
    """
    _check_layout()
    changed_tokens = [*tokens[:replaced], replacement, *tokens[replaced + 1 :]]
    reader = Reader(context)
    try:
        prefill = reader.after(tokens)
        decode = reader.after(tokens[:-1], tokens[-1:])
        changed = reader.after(changed_tokens)
    finally:
        llama.free_context(reader.context)
    triangles = []
    rows = []
    changes = []
    for layer in _layers(prefill):
        n = len(tokens)
        triangle = prefill[WEIGHTS, layer][0].mean(axis=0)[:, :n].tolist()
        (row,) = decode[WEIGHTS, layer][0].mean(axis=0)[:, :n].tolist()
        triangles.append(tuple(map(tuple, triangle)))
        rows.append(tuple(row))
        later = slice(replaced + 1, None)
        keys = _change(prefill[KEYS, layer], changed[KEYS, layer], n, later)
        values = _change(prefill[VALUES, layer], changed[VALUES, layer], n, later)
        changes.append((keys, values))
    return Looks(tuple(triangles), tuple(rows), tuple(changes))


def _layers(tensors: Tensors) -> list[int]:
    layers = sorted({layer for _, layer in tensors})
    n_expected = len(READ_TENSORS) * len(layers)
    if not layers or len(tensors) != n_expected:
        raise LabError(
            "llama.cpp does not show the attention weights, K and V of every layer of this model.",
            "Use a model of another architecture, such as smollm2-135m.",
        )
    return layers


def _change(before: Numbers, after: Numbers, n_tokens: int, which: slice) -> float:
    """The length of the difference between K (or V) of some tokens, over the length before."""
    import numpy as np

    first = before.reshape(n_tokens, -1)[which]
    second = after.reshape(n_tokens, -1)[which]
    return float(np.linalg.norm(first - second) / np.linalg.norm(first))


def _check_layout() -> None:
    """LabError if a tensor of this ggml does not have the size of `TensorStruct`."""
    n_bytes = ggml().ggml_tensor_overhead() - OBJECT_BYTES
    expected = ctypes.sizeof(TensorStruct)
    if n_bytes != expected:
        raise LabError(
            f"A tensor of this llama.cpp has {n_bytes} bytes; the lab knows those of {expected}.",
            OWN_BUILD,
        )


def _node(address: int) -> Node:
    """An operation of the graph. LabError if its name or size is not what ggml says."""
    lib = ggml()
    tensor = TensorStruct.from_address(address)
    has_name = tensor.name == lib.ggml_get_name(address)
    if not has_name or math.prod(tensor.ne) != lib.ggml_nelements(address):
        raise LabError(
            "The tensors of this llama.cpp have another layout than those that the lab can read.",
            OWN_BUILD,
        )
    sources = []
    for source in tensor.src:
        if source:
            sources.append(_operand(TensorStruct.from_address(source)))
    op = lib.ggml_op_name(tensor.op).decode()
    return Node(op, _operand(tensor), tuple(sources), _buffer_name(tensor))


def _operand(tensor: TensorStruct) -> Operand:
    lib = ggml()
    sizes = tuple(tensor.ne)
    n_bytes = lib.ggml_row_size(tensor.type, sizes[0]) * math.prod(sizes[1:])
    type_name = lib.ggml_type_name(tensor.type).decode().upper()
    return Operand(tensor.name.decode(errors="replace"), type_name, sizes, n_bytes)


def _buffer_name(tensor: TensorStruct) -> str:
    """The kind of buffer that a tensor, or the tensor that it views, lies in; "" if unknown."""
    lib = ggml()
    buffer = tensor.buffer
    if not buffer and tensor.view_src:
        buffer = TensorStruct.from_address(tensor.view_src).buffer
    if not buffer:
        return ""
    return str(lib.ggml_backend_buft_name(lib.ggml_backend_buffer_get_type(buffer)).decode())
