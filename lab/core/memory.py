"""Estimate the memory of a context (weights, KV cache, compute buffer), and what each device gets.

Sizes follow llama.cpp's allocation: layers with a sliding window keep only the window and one
ubatch (llama-kv-cache-iswa.cpp, with swa_full off). Placement follows llama_model::load_tensors
(src/llama-model.cpp) and llama_context (src/llama-context.cpp): with n layers offloaded, the last n
layers (the output counts) go to the devices, in proportion to their shares. The embedding table
stays on the CPU; with tied embeddings the output has a copy. `system_info` is what llama.cpp says
about the CPU: some of its layouts take more memory (lab/core/layouts.py).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core import layouts
from lab.core.asked_settings import AskedSettings, flash_of_architecture
from lab.core.attention import AttentionLayers, attention_by_layer, attention_layers
from lab.core.matrices import BLOCKS, EMBEDDING
from lab.core.record import Device, Model, Settings

CPU = "CPU"
# llama.cpp rounds a context's positions up to a multiple of this (llama-context.cpp)
PADDING = 256
F32_BYTES = 4
STATE_BYTES = F32_BYTES  # of a number of a recurrent state
FUSED = ("phi3",)
"""Architectures with one matrix for queries, keys and values, and one for gate and up."""

EXPERTS = r"blk\.{}\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Names of a layer's experts: llama.cpp's LLM_FFN_EXPS_REGEX."""

_INPUT = re.compile(r"(token_embd|position_embd|token_types|per_layer_token_embd|masked_embd)")
_LAYER = re.compile(r"(?:\w+\.)?blk\.(\d+)\.")
_EXPERTS = re.compile(r"_(ch)?exps\b")
_ASKED = AskedSettings()
_DEFAULTS = Settings(
    n_ctx=PADDING,
    n_batch=_ASKED.batch,
    n_ubatch=_ASKED.ubatch,
    n_threads=1,
    n_threads_batch=1,
    n_gpu_layers=0,
    flash_attn=_ASKED.flash_attn,
    type_k=_ASKED.cache_type_k,
    type_v=_ASKED.cache_type_v,
    prompt=_ASKED.prompt,
)


@dataclass(frozen=True)
class Memory:
    """Estimated memory of one context.

    A part that the model's header does not determine is None.
    """

    weights_bytes: int
    kv_cache_bytes: int | None
    compute_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + (self.kv_cache_bytes or 0) + (self.compute_bytes or 0)

    def beside(self, second: Memory) -> Memory:
        """The memory of two models that are loaded at the same time."""
        return Memory(
            self.weights_bytes + second.weights_bytes,
            _sum(self.kv_cache_bytes, second.kv_cache_bytes),
            _sum(self.compute_bytes, second.compute_bytes),
        )


def _sum(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return None
    return a + b


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file; `sizes`: the inner dimension first."""

    name: str
    n_bytes: int
    type: str = ""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class DevicePlace:
    """What a device holds: layers, their caches, their experts (by number), and its memory.

    The output has the number after the last layer. A layer's cache and experts can lie elsewhere.
    """

    device: str
    layers: tuple[int, ...]
    memory: Memory
    caches: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()


def kv_bytes_per_position(
    model: Model, type_k: str | None = "f16", type_v: str | None = "f16"
) -> float | None:
    """Bytes of one token in the KV cache, over all layers; those with a window count in full."""
    layers = attention_layers(model)
    if layers is None or not has_types(type_k, type_v):
        return None
    n_bytes = 0.0
    for heads in layers:
        if heads.has_cache:
            n_bytes += heads.n_layer * bytes_per_position(heads, type_k, type_v)
    return n_bytes


def has_types(type_k: str | None, type_v: str | None) -> bool:
    """Whether the sizes of both types of a cache are known."""
    return {(type_k or "").upper(), (type_v or "").upper()} <= BLOCKS.keys()


def bytes_per_position(
    heads: AttentionLayers, type_k: str | None, type_v: str | None
) -> float:
    """Bytes of one token in the cache of a layer, or in the cache that it reads."""
    n_bytes = heads.n_head_kv * heads.head_dim * _bytes_per_number(type_k)
    if not heads.values_in_keys:
        n_bytes += heads.n_head_kv * heads.head_dim_v * _bytes_per_number(type_v)
    return n_bytes


def _bytes_per_number(kind: str | None) -> float:
    n_numbers, n_bytes = BLOCKS[(kind or "").upper()]
    return n_bytes / n_numbers


def of_context(model: Model, settings: Settings, system_info: str | None = None) -> Memory:
    """The memory of a context of `settings.n_ctx` positions."""
    weights_bytes = model.n_bytes or 0
    if settings.n_gpu_layers == 0:
        weights_bytes += _layout_bytes(model, layouts.features(settings, system_info))
    cache_bytes = None
    by_layer = _kv_bytes_by_layer(model, settings)
    if by_layer is not None:
        cache_bytes = round(sum(by_layer))
    return Memory(weights_bytes, cache_bytes, compute_bytes(model, settings))


def _layout_bytes(model: Model, cpu: layouts.CpuFeatures) -> int:
    """Bytes that the weights take on the CPU beyond those in the file."""
    matrices = [matrix for matrix in model.matrices or () if matrix.type in BLOCKS]
    n_bytes = layouts.added_bytes(matrices, cpu)
    if model.tied_embeddings:
        for matrix in matrices:
            if matrix.part == EMBEDDING:
                n_bytes += layouts.copy_bytes(matrix, cpu)
    return n_bytes


def of_length(model: Model, n_ctx: int, system_info: str | None = None) -> Memory:
    """The memory of a context with the lab's default settings (which are llama-bench's)."""
    settings = dataclasses.replace(_defaults(model), n_ctx=n_ctx)
    return of_context(model, settings, system_info)


def _defaults(model: Model) -> Settings:
    resolved = flash_of_architecture(model.arch)
    return dataclasses.replace(_DEFAULTS, flash_attn_resolved=resolved)


def longest(
    model: Model,
    available: int,
    settings: Settings | None = None,
    system_info: str | None = None,
) -> int | None:
    """The longest context that fits into `available` bytes; None if unknown.

    `settings` are the defaults unless given.

    A multiple of 256, at most 2^31.
    """
    fixed = settings or _defaults(model)

    def context(n_ctx: int) -> Memory:
        return of_context(model, dataclasses.replace(fixed, n_ctx=n_ctx), system_info)

    if context(PADDING).kv_cache_bytes is None:
        return None
    lengths = range(PADDING, 2**31, PADDING)
    n_fitting = bisect.bisect_right(
        lengths, available, key=lambda n_ctx: context(n_ctx).total_bytes
    )
    return n_fitting * PADDING


def padded(n: int) -> int:
    """The positions that llama.cpp allocates for n."""
    return math.ceil(n / PADDING) * PADDING


def n_rows(settings: Settings) -> int:
    """Tokens of the largest step: llama.cpp limits the ubatch to the batch, both to the context."""
    return min(settings.n_ubatch, settings.n_batch, padded(settings.n_ctx))


def n_cells(window: int, settings: Settings) -> int:
    """Positions that a layer's cache holds, for all sequences (`kv_unified`) or for each.

    `window` 0: the layer attends to all positions.
    """
    n_ctx = padded(settings.n_ctx)
    n_windows = settings.n_seq_max
    if not settings.kv_unified:
        n_ctx = padded(settings.n_ctx // settings.n_seq_max)
        n_windows = 1
    if not window:
        return n_ctx
    return padded(min(n_ctx, n_windows * window + n_rows(settings)))


def _kv_bytes_by_layer(model: Model, settings: Settings) -> tuple[float, ...] | None:
    """The KV cache of each layer, and its recurrent states."""
    layers = attention_by_layer(model)
    type_k = settings.type_k
    type_v = settings.type_v
    if layers is None or not has_types(type_k, type_v):
        return None
    n_caches = 1 if settings.kv_unified else settings.n_seq_max
    by_layer = []
    for heads, n_state in zip(layers, _states(model, layers), strict=True):
        n_bytes = STATE_BYTES * settings.n_seq_max * n_state
        if heads is not None and heads.has_cache:
            cell_bytes = bytes_per_position(heads, type_k, type_v)
            n_bytes += n_caches * cell_bytes * n_cells(heads.window, settings)
        by_layer.append(n_bytes)
    return tuple(by_layer)


def _states(model: Model, layers: Sequence[AttentionLayers | None]) -> Sequence[float]:
    """F32 values of a sequence's state in each layer; by default only those without heads."""
    if model.states is not None and len(model.states) == len(layers):
        return model.states
    n_recurrent = layers.count(None)
    states = []
    for heads in layers:
        states.append(0.0 if heads is not None else (model.n_state or 0) / n_recurrent)
    return states


@dataclass(frozen=True)
class _LiveRows:
    """How many rows of each width a token has at once at a peak of the compute buffer."""

    embd: int = 0  # of the hidden state
    hidden: int = 0  # of the feed-forward, or of all experts that process a token
    expert_results: int = 0  # of all experts that process a token
    queries: int = 0  # of the widest layer
    keys: int = 0  # of the widest layer; values count as keys
    vocab: int = 0


# Fitted to the compute buffers that llama.cpp reserves. tests/bench/memory_estimates.py measures
# the error of those on the CPU; no bench measures those of devices.
_CPU_FEED_FORWARD = _LiveRows(hidden=3, embd=4)
_CPU_FEED_FORWARD_FUSED = _LiveRows(hidden=3, embd=3)
_CPU_ATTENTION = _LiveRows(queries=2, keys=2, embd=3)
_CPU_INPUTS = _LiveRows(embd=2)
# The cache is on the CPU, and the layers are on devices
_CPU_CACHES = _LiveRows(queries=1, embd=1)
_CPU_CACHES_FUSED = _LiveRows(queries=1, keys=3, embd=1)
_DEVICE_FEED_FORWARD = _LiveRows(hidden=3, embd=2)
_DEVICE_ATTENTION = _LiveRows(queries=2, embd=2)
_SUM_OF_EXPERTS = _LiveRows(hidden=2, expert_results=2, embd=1)
_OUTPUT = _LiveRows(vocab=1, embd=2)
_OUTPUT_GAP = _LiveRows(embd=2)  # beside the mask
_FUSED_MATRIX = _LiveRows(queries=1, keys=2)  # not fitted: the result of the fused matrix


def compute_bytes(
    model: Model, settings: Settings, device: str = CPU, layer_devices: Sequence[str] = ()
) -> int | None:
    """Bytes of a device's compute buffer: the peak of the largest step, in F32.

    `layer_devices` has the device of each layer, the output last; by default all are on the CPU.
    llama.cpp shares one buffer between all layers. The peak is in the output matrix, a
    feed-forward, or attention; the mask of the cache lives until the last layer. Every device has
    the step's inputs; the copies that a pipeline of devices keeps are not counted. None if the
    header lacks a field.
    """
    layer_devices = layer_devices or (CPU,) * ((model.n_layer or 0) + 1)
    widths = _widths(model, settings, device, layer_devices)
    if widths is None:
        return None
    has_layers = device in layer_devices[:-1]
    has_output = device == layer_devices[-1]
    width_bytes = F32_BYTES * n_rows(settings)  # of a column of all rows
    if device == CPU:
        return round(width_bytes * _cpu_width(widths, settings, has_layers, has_output))
    n_bytes = width_bytes * _device_width(widths, has_layers, has_output)
    if settings.kv_offload is False and has_layers:
        caches_bytes = _kv_bytes_by_layer(model, settings) or (0,)
        copied_bytes = max(caches_bytes)  # one layer's cache at a time
        n_bytes = max(n_bytes, width_bytes * widths.device_attention + copied_bytes)
    return round(n_bytes)


@dataclass(frozen=True)
class _Widths:
    """Numbers (F32) of one token's row in the tensors of a step on one device."""

    n_embd: int
    n_vocab: int
    hidden: int  # of the feed-forward, or of all experts that process a token
    expert_results: int  # of all experts that process a token; 0 without experts
    queries: int  # of the widest layer
    keys: int
    scores: int  # of all heads in the widest of the device's layers; 0 with flash attention
    mask: float  # F16 with flash attention; layers with a window have their own
    is_flash: bool
    is_fused: bool

    def of(self, rows: _LiveRows) -> int:
        """Their numbers together."""
        return (
            rows.embd * self.n_embd
            + rows.hidden * self.hidden
            + rows.expert_results * self.expert_results
            + rows.queries * self.queries
            + rows.keys * self.keys
            + rows.vocab * self.n_vocab
        )

    @property
    def inputs(self) -> float:
        """The mask; without flash attention also the layer's new keys and values."""
        return self.mask if self.is_flash else self.mask + 2 * self.keys

    @property
    def output(self) -> float:
        """The output matrix."""
        width: float = self.of(_OUTPUT)
        if self.is_fused and self.is_flash and self.mask < self.of(_FUSED_MATRIX):
            # A small mask leaves a gap that nothing fits into
            width += self.mask + self.of(_OUTPUT_GAP)
        return width

    def feed_forward(self, rows: _LiveRows) -> int:
        """The feed-forward of a layer with these rows, or the sum of its experts' results."""
        if not self.expert_results:
            return self.of(rows)
        return max(self.of(rows), self.of(_SUM_OF_EXPERTS))

    @property
    def device_attention(self) -> float:
        """Attention of a layer on a device."""
        return self.inputs + self.scores + self.of(_DEVICE_ATTENTION)


def _widths(
    model: Model, settings: Settings, device: str, layer_devices: Sequence[str]
) -> _Widths | None:
    """The widths of the tensors of a model on a device; None if the header lacks a field."""
    layers = attention_layers(model)
    n_used = 0
    hidden = model.n_ff
    if model.n_expert:
        n_used = model.n_expert_used or 0
        hidden = n_used * (model.n_ff_expert or model.n_ff or 0)
    if not layers or not model.n_vocab or not model.n_embd or not hidden:
        return None
    windows = {heads.window for heads in layers}
    mask: float = sum(n_cells(window, settings) for window in windows)
    scores = 0
    if settings.uses_flash:
        mask *= 0.5
    else:
        scores = _widest_scores(model, settings, device, layer_devices)
    return _Widths(
        n_embd=model.n_embd,
        n_vocab=model.n_vocab,
        hidden=hidden,
        expert_results=n_used * model.n_embd,
        queries=max(heads.head_dim * heads.n_head for heads in layers),
        keys=max(heads.head_dim * heads.n_head_kv for heads in layers),
        scores=scores,
        mask=mask,
        is_flash=settings.uses_flash,
        is_fused=model.arch in FUSED,
    )


def _widest_scores(
    model: Model, settings: Settings, device: str, layer_devices: Sequence[str]
) -> int:
    """Attention scores of all heads in the widest of a device's layers."""
    widest = 0
    for heads, layer_device in zip(
        attention_by_layer(model) or (), layer_devices, strict=False
    ):
        if layer_device == device and heads is not None:
            widest = max(widest, heads.n_head * n_cells(heads.window, settings))
    return widest


def _cpu_width(
    widths: _Widths, settings: Settings, has_layers: bool, has_output: bool
) -> float:
    """The largest of the CPU's peaks."""
    peaks = [widths.inputs + widths.of(_CPU_INPUTS)]
    if settings.kv_offload is False:
        caches = _CPU_CACHES_FUSED if widths.is_fused else _CPU_CACHES
        peaks.append(widths.inputs + widths.of(caches))
    if has_layers or keeps_tensors_on_cpu(settings):
        rows = _CPU_FEED_FORWARD_FUSED if widths.is_fused else _CPU_FEED_FORWARD
        peaks.append(widths.mask + widths.feed_forward(rows))
        peaks.append(widths.mask + widths.scores + widths.of(_CPU_ATTENTION))
    if has_output:
        peaks.append(widths.output)
    return max(peaks)


def _device_width(widths: _Widths, has_layers: bool, has_output: bool) -> float:
    """The largest of a device's peaks; 0 without layers and output."""
    peaks = [0.0]
    if has_layers:
        peaks.append(widths.inputs + widths.feed_forward(_DEVICE_FEED_FORWARD))
        peaks.append(widths.device_attention)
    if has_output:
        peaks.append(widths.output)
    return max(peaks)


def keeps_tensors_on_cpu(settings: Settings) -> bool:
    """Whether tensors of layers on devices are kept on the CPU."""
    overrides = map(override_of, settings.override_tensor or ())
    return bool(settings.n_cpu_moe) or any(device == CPU for _, device in overrides)


def layers(n_layer: int, n_gpu_layers: int, shares: Sequence[float]) -> tuple[int | None, ...]:
    """The device of each layer, the output last, as an index into `shares`; None for the CPU."""
    n_all = n_layer + 1
    n_offloaded = n_all if n_gpu_layers < 0 else min(n_gpu_layers, n_all)
    if not shares or not n_offloaded:
        return (None,) * n_all
    sums = [_single(shares[0])]
    for share in shares[1:]:
        sums.append(_single(sums[-1] + _single(share)))
    ends = [_single(end / sums[-1]) for end in sums]  # each device takes layers up to its end
    indices: list[int | None] = [None] * (n_all - n_offloaded)
    for i in range(n_offloaded):
        index = bisect.bisect_right(ends, _single(i / n_offloaded))
        indices.append(min(index, len(ends) - 1))
    return tuple(indices)


def has_all_layers(n_gpu_layers: int, model: Model) -> bool:
    """Whether all layers and the output are on devices."""
    if n_gpu_layers < 0:
        return True
    return model.n_layer is not None and n_gpu_layers > model.n_layer


def computes_on_cpu(settings: Settings, model: Model) -> bool:
    """Whether a step needs the CPU's kernels: layers, caches or tensors stay there."""
    if not has_all_layers(settings.n_gpu_layers, model):
        return True
    return settings.kv_offload is False or keeps_tensors_on_cpu(settings)


def _single(value: float) -> float:
    """A value as a C float, in which llama.cpp computes."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def places(
    model: Model,
    settings: Settings,
    tensors: Sequence[Tensor],
    names: Sequence[str],
    shares: Sequence[float],
    system_info: str | None = None,
) -> tuple[DevicePlace, ...] | None:
    """What each device (in llama.cpp's order) and the CPU hold.

    None if the layers are unknown, or if a split mode divides single tensors.
    """
    if model.n_layer is None or settings.split_mode in ("row", "tensor"):
        return None
    indices = layers(model.n_layer, settings.n_gpu_layers, shares)
    layer_devices = []
    for index in indices:
        layer_devices.append(CPU if index is None else names[index])
    cpu = layouts.features(settings, system_info, names)
    weights, experts = _place_tensors(
        tensors or _equal_layers(model), layer_devices, _overrides(settings), cpu
    )
    cache_devices = layer_devices[:-1]
    if settings.kv_offload is False:
        cache_devices = [CPU] * model.n_layer
    by_layer = _kv_bytes_by_layer(model, settings)
    placed = []
    for device in (*names, CPU):
        caches = _layers_on(device, cache_devices)
        cache_bytes = None
        if by_layer is not None:
            cache_bytes = round(sum(by_layer[layer] for layer in caches))
        buffer_bytes = compute_bytes(model, settings, device, layer_devices)
        memory = Memory(weights.get(device, 0), cache_bytes, buffer_bytes)
        device_experts = tuple(sorted(experts.get(device, ())))
        placed.append(
            DevicePlace(
                device, _layers_on(device, layer_devices), memory, caches, device_experts
            )
        )
    return tuple(placed)


def _layers_on(device: str, by_layer: Sequence[str]) -> tuple[int, ...]:
    return tuple(layer for layer, place in enumerate(by_layer) if place == device)


def _equal_layers(model: Model) -> list[Tensor]:
    """A model's tensors if only its header is known: layers of equal size."""
    embedding_bytes = model.embedding_bytes or 0
    output_bytes = model.output_bytes or 0
    n_layer = model.n_layer or 0
    all_layers = max(0, sum(model.tensor_bytes.values()) - embedding_bytes - output_bytes)
    tensors = [Tensor(f"blk.{i}.", all_layers // n_layer) for i in range(n_layer)]
    tensors.append(Tensor("token_embd.weight", embedding_bytes))
    if output_bytes:
        tensors.append(Tensor("output.weight", output_bytes))
    return tensors


Overrides = list[tuple[re.Pattern[str], str]]


def _overrides(settings: Settings) -> Overrides:
    """Patterns of tensors' names, each with the device that holds them; the first match counts."""
    overrides = [(re.compile(EXPERTS.format(n)), CPU) for n in range(settings.n_cpu_moe or 0)]
    for text in settings.override_tensor or ():
        pattern, device = override_of(text)
        overrides.append((re.compile(pattern), device))
    return overrides


def experts_on_cpu(settings: Settings, n_layer: int) -> list[bool]:
    """Of each layer whether settings keep its experts on the CPU, by the names of their tensors."""
    overrides = _overrides(settings)
    on_cpu = []
    for number in range(n_layer):
        name = f"blk.{number}.ffn_up_exps.weight"
        devices = [device for pattern, device in overrides if pattern.search(name)]
        on_cpu.append(devices[:1] == [CPU])
    return on_cpu


def override_of(text: str) -> tuple[str, str]:
    """The pattern and the device of PATTERN=DEVICE."""
    pattern, _, device = text.rpartition("=")
    return pattern, device


def _place_tensors(
    tensors: Sequence[Tensor],
    layer_devices: Sequence[str],
    overrides: Overrides,
    cpu: layouts.CpuFeatures,
) -> tuple[dict[str, int], dict[str, set[int]]]:
    """By device: the bytes of its weights, and the layers whose experts it holds."""
    weights: dict[str, int] = {}
    experts: dict[str, set[int]] = {}
    is_tied = all(tensor.name != "output.weight" for tensor in tensors)
    for tensor in tensors:
        devices = [_home(tensor.name, layer_devices)]
        is_output = is_tied and tensor.name == "token_embd.weight"
        if is_output and layer_devices[-1] != CPU:
            devices.append(layer_devices[-1])  # a copy of the table, as the output matrix
        for pattern, device in overrides:
            if pattern.search(tensor.name):
                devices = [device]
                break
        if CPU in devices:
            has_copy = is_output and len(devices) == 1
            more_bytes = _tensor_layout_bytes(tensor, cpu, has_copy)
            weights[CPU] = weights.get(CPU, 0) + more_bytes
        layer = _LAYER.match(tensor.name)
        for device in devices:
            weights[device] = weights.get(device, 0) + tensor.n_bytes
            if layer and _EXPERTS.search(tensor.name):
                experts.setdefault(device, set()).add(int(layer[1]))
    return weights, experts


def _tensor_layout_bytes(tensor: Tensor, cpu: layouts.CpuFeatures, is_output: bool) -> int:
    """Bytes that a tensor takes on the CPU beyond those in the file."""
    matrix = layouts.matrix_of(tensor.name, tensor.type, tensor.sizes)
    if matrix is None:
        return 0
    if is_output:
        return layouts.copy_bytes(matrix, cpu)
    return layouts.added_bytes([matrix], cpu)


def _home(tensor: str, layer_devices: Sequence[str]) -> str:
    """The device of a tensor without overrides."""
    layer = _LAYER.match(tensor)
    if layer:
        last = len(layer_devices) - 2  # the output comes after it
        return layer_devices[min(int(layer[1]), last)]
    if tensor.startswith("rope_"):
        return layer_devices[0]
    if _INPUT.match(tensor):
        return CPU
    return layer_devices[-1]


def device_of(buffer: str, devices: Sequence[Device]) -> str:
    """The device that holds a buffer of this name.

    CPU_REPACK, AMX and a GPU driver's CUDA_Host belong to the CPU; RPC0[HOST:PORT] is the first
    device of that server.
    """
    if buffer.startswith((CPU, "AMX")) or buffer.endswith("_Host"):
        return CPU
    remote = re.fullmatch(r"RPC(\d+)\[(.+)\]", buffer)
    if remote:
        number = int(remote[1])
        on_server = [device.name for device in devices if device.description == remote[2]]
        if number < len(on_server):
            return on_server[number]
    for device in devices:
        if buffer in (device.name, f"{device.name}_Mapped"):
            return device.name
    return buffer


def shares(
    free: Mapping[str, int], names: Sequence[str], tensor_split: Sequence[float] | None = None
) -> tuple[float, ...]:
    """The shares of the devices: as asked, or their free memory.

    A device that does not report it counts with the CPU's, as in llama.cpp.
    """
    sizes = tensor_split
    if not sizes:
        of_cpu = free.get(CPU, 1)
        sizes = [float(free.get(name, of_cpu)) for name in names]
    return tuple(sizes) if any(sizes) else (1.0,) * len(names)
