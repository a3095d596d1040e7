"""The network cost of a step with layers on llama.cpp's RPC servers: bytes, round trips, and thus seconds.

The scheduler (ggml_backend_sched_compute_splits of ggml-backend.cpp) walks the devices in the order of the layers. The
client sends each server the step's inputs, the hidden state, and the graph to compute, without waiting for answers.
Then it asks for the resulting hidden state, or after the last layers for the logits, and waits for this answer. So a
step waits for one answer of each server in turn: its time is that of computing, plus a round trip for each server, plus
the bytes over the bandwidth. The hidden state passes through the client from one server to the next.

The client sends a whole graph if its shape is new (another number of tokens, or another 256 positions), else a short
message to compute the last one again. So every prefill step sends it, and one decode step of 256.

The sizes are those of the messages in ggml-rpc.cpp, protocol 7.0. Not included: requests when a model is loaded or a
shape is first seen in a process (the lab warms up before it measures), the headers of TCP packets (6 % of Ethernet's
bandwidth), and TCP's slow start after a pause.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.core import memory, shape
from lab.core.link import Link
from lab.core.placement import CPU
from lab.core.record import DECODE, PREFILL, Model, Settings

HEAD_BYTES, SIZE_BYTES = 9, 8
"""Request: one byte for the command, eight for the size of its data. Answer: the size."""

TENSOR_BYTES = 296
"""struct rpc_tensor, the description of a tensor."""

SET_BYTES = HEAD_BYTES + TENSOR_BYTES + 9
"""SET_TENSOR without its data."""

GET_BYTES = HEAD_BYTES + TENSOR_BYTES + 16
RECOMPUTE_BYTES = HEAD_BYTES + 4
GRAPH_BYTES = HEAD_BYTES + 12
"""GRAPH_COMPUTE without its nodes (8 bytes each) and tensors."""

KNOWN_LAYERS = {
    # Tensors and nodes of a layer with flash attention, in the graphs that llama.cpp 0c1e570 sent.
    "llama": (42, 31),
    "phi3": (37, 29),
    "qwen2": (48, 34),
    "qwen3": (48, 35),
    "qwen3moe": (65, 51),
    "gemma3": (55, 40),
    "gpt-oss": (73, 52),
    "smollm3": (41.5, 30.5),  # every fourth layer has no positions
}
OTHER_LAYER = KNOWN_LAYERS["llama"]
"""Used for an architecture that was not counted; it matters in one decode step of 256."""

WITHOUT_FLASH, ROTATED = (5, 5), (6, 6)
"""More tensors and nodes of a layer without flash attention; with rotated keys or values."""

LAST_LAYER, OUTPUT, ADDITION = (3, 2), (5, 3), (1, 1)
"""More tensors and nodes of the last layer; the output; the sum at the end of a layer with parts from the CPU."""


@dataclass(frozen=True)
class Traffic:
    """The bytes between the client and its servers, and the number of answers that it waits for in turn."""

    bytes_out: int = 0
    bytes_back: int = 0
    n_round_trips: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traffic(*(a + b for a, b in pairs))

    @property
    def n_bytes(self) -> int:
        return self.bytes_out + self.bytes_back


@dataclass(frozen=True)
class StepShape:
    """The properties of a step that decide its traffic."""

    n_tokens: int
    n_past: int
    n_outputs: int = 1


@dataclass(frozen=True)
class _Segment:
    """Consecutive layers on one device, by number; the output has the number of layers."""

    device: str
    layers: range


def seconds(traffic: Traffic, link: Link) -> float:
    """The time that the traffic adds; an upper bound for a prefill of several steps, in which others compute."""
    transfer_s = traffic.n_bytes / link.bytes_per_s if link.bytes_per_s else 0.0
    return traffic.n_round_trips * link.round_trip_s + transfer_s


def is_remote(device: str) -> bool:
    """Whether a device, by llama.cpp's name, is behind an RPC server."""
    return re.fullmatch(r"RPC\d+", device) is not None


def of_request(
    model: Model, settings: Settings, layers: Sequence[str], n_prompt: int, n_gen: int
) -> dict[str, Traffic] | None:
    """The traffic of a prompt (PREFILL) and of all decode steps (DECODE) of a request; None if unknown."""
    ubatch = min(settings.n_ubatch, settings.n_batch)
    prefill = [
        StepShape(min(ubatch, n_prompt - first), first, int(first + ubatch >= n_prompt))
        for first in range(0, n_prompt, ubatch)
    ]
    decode = [StepShape(1, n_prompt + i) for i in range(n_gen - 1)]
    steps = of_steps(model, settings, layers, [*prefill, *decode])
    if steps is None:
        return None
    kinds = {PREFILL: steps[: len(prefill)], DECODE: steps[len(prefill) :]}
    return {kind: sum(part, Traffic()) for kind, part in kinds.items()}


def of_steps(
    model: Model, settings: Settings, layers: Sequence[str], steps: Iterable[StepShape]
) -> list[Traffic] | None:
    """The traffic of steps of one sequence, one after the other, the first with a new graph.

    `layers` are the devices of the layers by name, the output last. None if llama.cpp would split a layer
    (--split-mode tensor, --no-kv-offload, --n-cpu-moe, --override-tensor), or the model's layers are unknown.
    """
    is_cut = settings.split_mode == "tensor" or settings.kv_offload is False
    if is_cut or settings.n_cpu_moe or settings.override_tensor:
        return None
    if shape.heads(model) is None or not (model.n_embd and model.n_vocab) or len(layers) != (model.n_layer or 0) + 1:
        return None
    traffic: list[Traffic] = []
    before: tuple[object, ...] = ()
    for step in steps:
        graph = (step.n_tokens, step.n_outputs, tuple(_n_positions(model, settings, step).values()))
        traffic.append(_of_step(model, settings, _segments(layers), step, graph != before))
        before = graph
    return traffic


def _of_step(model: Model, settings: Settings, segments: Sequence[_Segment], step: StepShape, is_new: bool) -> Traffic:
    traffic, source, n_layer = Traffic(), None, model.n_layer or 0
    for segment in segments:
        rows = step.n_tokens if segment.layers.start < n_layer else step.n_outputs
        hidden = 4 * rows * (model.n_embd or 0)
        if source is not None and is_remote(source):
            traffic += _answer(hidden)
        if is_remote(segment.device):
            inputs = [hidden] * (2 if source == CPU else 1)  # layers on the CPU leave their last sum to the server
            inputs += _inputs(model, settings, segment.layers, step)
            graph = RECOMPUTE_BYTES
            if is_new:
                graph = _graph_bytes(model, settings, segment.layers, len(inputs), source == CPU)
            if n_layer - 1 in segment.layers:
                inputs.append(4 * step.n_outputs)  # which tokens get logits
            traffic += Traffic(graph + sum(SET_BYTES + n for n in inputs if n))
        source = segment.device
    if source is not None and is_remote(source):
        traffic += _answer(4 * step.n_outputs * (model.n_vocab or 0))
    return traffic


def _answer(n_bytes: int) -> Traffic:
    """The request and answer for a tensor; none for an empty one."""
    return Traffic(GET_BYTES, SIZE_BYTES + n_bytes, 1) if n_bytes else Traffic()


def _inputs(model: Model, settings: Settings, layers: range, step: StepShape) -> list[int]:
    """Bytes of further inputs of these layers: positions, and for each kind of cache the cells to write and a mask."""
    windows = _windows(model)
    wanted = {windows[layer] for layer in layers if layer < len(windows)}
    if not wanted:
        return []
    is_flash = _is_flash(settings)
    cells = 8 * step.n_tokens
    inputs = [4 * step.n_tokens]
    for window, n_positions in _n_positions(model, settings, step).items():
        if window in wanted:
            inputs += [cells, cells if is_flash else cells * _width_of_values(model)]
            inputs += [n_positions * step.n_tokens * (2 if is_flash else 4)]
            inputs += [4 * n * n for n in _rotations(model, settings)]
    return inputs


def _graph_bytes(model: Model, settings: Settings, layers: range, n_inputs: int, has_addition: bool) -> int:
    """GRAPH_COMPUTE of these layers."""
    n_layer = model.n_layer or 0
    n_here = sum(layer < n_layer for layer in layers)
    parts = [(KNOWN_LAYERS.get(model.arch or "", OTHER_LAYER), n_here)]
    parts.append((WITHOUT_FLASH, 0 if _is_flash(settings) else n_here))
    parts.append((ROTATED, n_here * len(_rotations(model, settings))))
    parts += [(LAST_LAYER, n_layer - 1 in layers), (OUTPUT, n_layer in layers), (ADDITION, has_addition)]
    n_tensors = n_inputs + sum(n * tensors for (tensors, _), n in parts)
    return GRAPH_BYTES + round(TENSOR_BYTES * n_tensors + 8 * sum(n * nodes for (_, nodes), n in parts))


def _segments(layers: Sequence[str]) -> list[_Segment]:
    groups = itertools.groupby(range(len(layers)), key=lambda layer: layers[layer])
    listed = [(device, list(numbers)) for device, numbers in groups]
    return [_Segment(device, range(numbers[0], numbers[-1] + 1)) for device, numbers in listed]


def _windows(model: Model) -> tuple[int, ...]:
    return model.windows or (0,) * (model.n_layer or 0)


def _n_positions(model: Model, settings: Settings, step: StepShape) -> dict[int, int]:
    """The positions in the step's mask for each kind of cache (by its window; 0: all positions)."""
    used = memory.padded(step.n_past + step.n_tokens)
    return {window: min(memory.n_cells(window, settings), used) for window in sorted(set(_windows(model)))}


def _is_flash(settings: Settings) -> bool:
    return (settings.flash_attn_resolved or settings.flash_attn) != "off"


def _width_of_values(model: Model) -> int:
    n_heads = model.heads_kv or (model.n_head_kv or 0,)
    return max(n_heads) * (model.head_dim_v or model.head_dim or 0)


def _rotations(model: Model, settings: Settings) -> list[int]:
    """Rows of the matrices that rotate quantized keys and values (llama_kv_cache's build_input_k_rot)."""
    rotations, keys = [], model.head_dim or 0
    if "q" in settings.type_k and keys % 64 == 0:
        rotations.append(next(n for n in (1024, 512, 256, 128, 64) if keys % n == 0))
    if "q" in settings.type_v and (model.head_dim_v or keys) % 64 == 0:
        rotations.append(64)
    return rotations
