"""Estimate the memory of a context (weights, KV cache, compute buffer), and which device gets which layers.

Sizes follow llama.cpp's allocation: layers with a sliding window keep only the window and one ubatch
(llama-kv-cache-iswa.cpp, with swa_full off). Placement follows llama_model::load_tensors (src/llama-model.cpp) and
llama_context (src/llama-context.cpp): with n layers offloaded, the last n layers (the output counts) go to the devices,
in proportion to their shares. The embedding table stays on the CPU; with tied embeddings the output has a copy.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.core import shape
from lab.core.record import Device, Model, Settings
from lab.core.shape import BLOCKS

CPU = "CPU"
PADDING = 256  # llama.cpp rounds a context's positions up to a multiple of this (llama-context.cpp)
FUSED = (
    "phi3",
)  # architectures with one matrix for queries, keys and values, and one for gate and up
EXPERTS = r"blk\.{}\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # names of a layer's experts: llama.cpp's LLM_FFN_EXPS_REGEX

_INPUT = re.compile(r"(token_embd|position_embd|token_types|per_layer_token_embd|masked_embd)")
_LAYER = re.compile(r"(?:\w+\.)?blk\.(\d+)\.")
_SIZES: dict[str, Any] = {
    "n_ctx": PADDING,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 1,
    "n_threads_batch": 1,
}
_DEFAULTS = Settings(
    **_SIZES, n_gpu_layers=0, flash_attn="auto", type_k="f16", type_v="f16", prompt="random"
)


@dataclass(frozen=True)
class Memory:
    """Estimated memory of one context. A part that the model's header does not determine is None."""

    weights_bytes: int
    kv_cache_bytes: int | None
    compute_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + (self.kv_cache_bytes or 0) + (self.compute_bytes or 0)

    def beside(self, other: Memory) -> Memory:
        caches = (self.kv_cache_bytes, other.kv_cache_bytes)
        buffers = (self.compute_bytes, other.compute_bytes)
        sums = [None if a is None or b is None else a + b for a, b in (caches, buffers)]
        return Memory(self.weights_bytes + other.weights_bytes, *sums)


@dataclass(frozen=True)
class Tensor:
    name: str
    n_bytes: int


@dataclass(frozen=True)
class Place:
    """A device, the numbers of its layers (the output's is the number of layers), and their memory."""

    device: str
    layers: tuple[int, ...]
    memory: Memory


def kv_bytes_per_position(model: Model, type_k: str = "f16", type_v: str = "f16") -> float | None:
    """Bytes of one token in the KV cache, summed over the layers; those with a sliding window count in full."""
    layers = shape.heads(model)
    per_head = bytes_per_head(model, type_k, type_v)
    if layers is None or per_head is None:
        return None
    return per_head * sum(heads.n_layer * heads.n_head_kv for heads in layers)


def bytes_per_head(model: Model, type_k: str, type_v: str) -> float | None:
    if model.head_dim is None or not {type_k.upper(), type_v.upper()} <= BLOCKS.keys():
        return None
    widths = ((model.head_dim, type_k), (model.head_dim_v or model.head_dim, type_v))
    return sum(width * BLOCKS[kind.upper()][1] / BLOCKS[kind.upper()][0] for width, kind in widths)


def of_context(model: Model, settings: Settings) -> Memory:
    """The memory of a context of `settings.n_ctx` positions."""
    by_layer = _kv_bytes_by_layer(model, settings)
    cache = None if by_layer is None else round(sum(by_layer))
    return Memory(model.n_bytes or 0, cache, compute_bytes(model, settings))


def of_length(model: Model, n_ctx: int) -> Memory:
    """The memory of a context with the lab's default settings (which are llama-bench's)."""
    return of_context(model, dataclasses.replace(_DEFAULTS, n_ctx=n_ctx))


def longest(model: Model, available: int) -> int | None:
    """The longest context (a multiple of 256, up to 2^31) that fits into `available` bytes; None if unknown."""
    if of_length(model, PADDING).kv_cache_bytes is None:
        return None
    numbers = range(2**31 // PADDING)
    fitting = bisect.bisect_right(
        numbers, available, key=lambda n: of_length(model, n * PADDING).total_bytes
    )
    return max(0, fitting - 1) * PADDING


def padded(n: int) -> int:
    """The positions that llama.cpp allocates for n."""
    return -(-n // PADDING) * PADDING


def n_rows(settings: Settings) -> int:
    """Tokens of the largest step: llama.cpp limits the ubatch to the batch, and both to the context."""
    return min(settings.n_ubatch, settings.n_batch, padded(settings.n_ctx))


def n_cells(window: int, settings: Settings) -> int:
    """Positions that a layer's cache holds: one cache for all sequences (`kv_unified`), or one for each."""
    n_ctx = padded(settings.n_ctx)
    n_windows = settings.n_seq_max
    if not settings.kv_unified:
        n_ctx = padded(settings.n_ctx // settings.n_seq_max)
        n_windows = 1
    return padded(min(n_ctx, n_windows * window + n_rows(settings))) if window else n_ctx


def _kv_bytes_by_layer(model: Model, settings: Settings) -> tuple[float, ...] | None:
    per_head = bytes_per_head(model, settings.type_k, settings.type_v)
    n_layer = model.n_layer or 0
    if shape.heads(model) is None or per_head is None:
        return None
    n_caches = 1 if settings.kv_unified else settings.n_seq_max
    heads = model.heads_kv or (model.n_head_kv or 0,) * n_layer
    windows = model.windows or (0,) * n_layer
    cells = {window: n_cells(window, settings) for window in set(windows)}
    states = (
        4 * settings.n_seq_max * (model.n_state or 0) / max(1, heads.count(0))
    )  # of a layer without attention
    sizes = (
        n_caches * per_head * n * cells[window] for n, window in zip(heads, windows, strict=True)
    )
    return tuple(size or states for size in sizes)


def compute_bytes(
    model: Model, settings: Settings, device: str = CPU, of_layers: Sequence[str] = ()
) -> int | None:
    """Bytes of a device's compute buffer: the peak of the largest step, in F32. By default the CPU has all layers.

    llama.cpp shares one buffer between all layers. The peak is in the output matrix, a feed-forward, or attention; the
    mask of the cache lives until the last layer. Every device has the step's inputs; the copies that a pipeline of
    devices keeps are not counted. The number of live rows of each width is fitted to the buffers that llama.cpp
    reserves (tests/bench/memory_estimates.py measures the error on the CPU). None if the header lacks a field.
    """
    layers = shape.heads(model)
    n_embd = model.n_embd
    head_dim = model.head_dim
    n_vocab = model.n_vocab
    n_used = (model.n_expert_used or 0) if model.n_expert else 0
    hidden = n_used * (model.n_ff_expert or model.n_ff or 0) if model.n_expert else model.n_ff
    if not layers or not n_vocab or not n_embd or not head_dim or not hidden:
        return None
    n_layer = model.n_layer or 0
    is_fused = model.arch in FUSED
    of_layers = of_layers or (CPU,) * (n_layer + 1)
    is_flash = (settings.flash_attn_resolved or settings.flash_attn) != "off"
    # All widths count F32 elements of a row. The mask is F16 with flash attention; layers with a window have their own.
    mask = sum(n_cells(window, settings) for window in {heads.window for heads in layers}) * (
        0.5 if is_flash else 1
    )
    n_heads = model.heads or (model.n_head or 0,) * n_layer
    windows = model.windows or (0,) * n_layer
    of_all_heads = (
        n_heads[i] * n_cells(windows[i], settings) for i in range(n_layer) if of_layers[i] == device
    )
    scores = 0 if is_flash else max(of_all_heads, default=0)
    queries, keys = (
        head_dim * max(getattr(one, name) for one in layers) for name in ("n_head", "n_head_kv")
    )
    of_experts = (
        2 * (hidden + n_used * n_embd) + n_embd if n_used else 0
    )  # while their results are summed
    attention = scores + 3 * n_embd + 2 * queries + 2 * keys
    in_layers = mask + max(3 * hidden + (3 if is_fused else 4) * n_embd, of_experts, attention)
    # A small mask leaves a gap that nothing else fits into.
    in_hole = mask + 2 * n_embd if is_fused and is_flash and mask < queries + 2 * keys else 0
    inputs = mask + (0 if is_flash else 2 * keys)
    need = 0.0
    if device == CPU:
        need = inputs + 2 * n_embd
        if settings.kv_offload is False:
            need = max(need, inputs + n_embd + queries + (3 * keys if is_fused else 0))
        if settings.n_cpu_moe or CPU in of_layers[:-1]:
            need = max(need, in_layers)
        if of_layers[-1] == CPU:
            need = max(need, n_vocab + 2 * n_embd + in_hole)
    elif device in of_layers:
        if device in of_layers[:-1]:
            attention = scores + 2 * n_embd + 2 * queries
            if settings.kv_offload is False:  # a copy of a layer's keys and values
                attention += max(_kv_bytes_by_layer(model, settings) or (0,)) / 4 / n_rows(settings)
            need = inputs + max(3 * hidden + 2 * n_embd, of_experts, attention)
        if device == of_layers[-1]:
            need = max(need, n_vocab + 2 * n_embd + in_hole)
    return round(4 * n_rows(settings) * need)


def layers(n_layer: int, n_gpu_layers: int, shares: Sequence[float]) -> tuple[int | None, ...]:
    """The device of each layer, the output last, as an index into `shares`; None for the CPU."""

    def single(value: float) -> float:  # a C float, as in llama.cpp
        return float(struct.unpack("f", struct.pack("f", value))[0])

    n_all = n_layer + 1
    n_there = n_all if n_gpu_layers < 0 else min(n_gpu_layers, n_all)
    if not shares or not n_there:
        return (None,) * n_all
    sums = list(itertools.accumulate(map(single, shares), lambda a, b: single(a + b)))
    ends = [single(part / sums[-1]) for part in sums]
    on_devices = (bisect.bisect_right(ends, single(i / n_there)) for i in range(n_there))
    return (
        *(None for _ in range(n_all - n_there)),
        *(min(index, len(ends) - 1) for index in on_devices),
    )


def places(
    model: Model,
    settings: Settings,
    tensors: Sequence[Tensor],
    names: Sequence[str],
    shares: Sequence[float],
) -> tuple[Place, ...] | None:
    """The layers and memory of each device (in llama.cpp's order) and of the CPU; None if the layers are unknown."""
    everywhere = (*names, CPU)
    on_cpu = [re.compile(EXPERTS.format(layer)) for layer in range(settings.n_cpu_moe or 0)]
    if model.n_layer is None:
        return None
    if not tensors:
        table = model.embedding_bytes or 0
        output = model.output_bytes or 0
        n_layer = model.n_layer or 1
        of_layer = max(0, sum(model.tensor_bytes.values()) - table - output) // n_layer
        tensors = [
            Tensor("token_embd.weight", table),
            *([Tensor("output.weight", output)] if output else []),
        ]
        tensors += [Tensor(f"blk.{i}.", of_layer) for i in range(n_layer)]
    numbers = layers(model.n_layer, settings.n_gpu_layers, shares)
    of_layers = [CPU if index is None else names[index] for index in numbers]
    weights = dict.fromkeys(everywhere, 0)
    is_tied = all(tensor.name != "output.weight" for tensor in tensors)
    for tensor in tensors:
        if match := _LAYER.match(tensor.name):
            held = [of_layers[min(int(match[1]), model.n_layer - 1)]]
        elif tensor.name.startswith("rope_"):
            held = [of_layers[0]]
        else:
            held = [CPU if _INPUT.match(tensor.name) else of_layers[-1]]
        if is_tied and tensor.name == "token_embd.weight" and of_layers[-1] != CPU:
            held.append(of_layers[-1])  # a copy of the table, as the output matrix
        if any(pattern.search(tensor.name) for pattern in on_cpu):
            held = [CPU]
        for device in held:
            weights[device] += tensor.n_bytes
    by_layer = _kv_bytes_by_layer(model, settings)
    caches = dict.fromkeys(everywhere, 0.0)
    for device, n_bytes in zip(of_layers, by_layer or (), strict=False):
        caches[CPU if settings.kv_offload is False else device] += n_bytes
    found = []
    for device in everywhere:
        own = tuple(layer for layer, where in enumerate(of_layers) if where == device)
        compute = compute_bytes(model, settings, device, of_layers)
        cache = None if by_layer is None else round(caches[device])
        found.append(Place(device, own, Memory(weights[device], cache, compute)))
    return tuple(found)


def device_of(name: str, devices: Sequence[Device]) -> str:
    """The device that holds a buffer of this name. CPU_REPACK, AMX and a GPU driver's CUDA_Host belong to the CPU."""
    if name.startswith((CPU, "AMX")) or name.endswith("_Host"):
        return CPU
    return next(
        (device.name for device in devices if name in (device.name, f"{device.name}_Mapped")), name
    )


def shares(free: Mapping[str, int], names: Sequence[str]) -> tuple[float, ...]:
    """The shares of the devices: their free memory. One that does not report it counts with the CPU's, as in
    llama.cpp."""
    sizes = tuple(float(free.get(name, free.get(CPU, 1))) for name in names)
    return sizes if any(sizes) else (1.0,) * len(names)
