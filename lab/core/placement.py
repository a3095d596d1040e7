"""Predict which device gets which layers of a model, and the memory that each device needs.

The rules are those of llama_model::load_tensors (src/llama-model.cpp) and llama_context (src/llama-context.cpp). With n
layers offloaded, the last n layers go to the devices, in proportion to their shares; the output counts as a layer. A
layer's weights and KV cache are on its device. The embedding table stays on the CPU; with tied embeddings the output's
device has a copy of the table.
"""

from __future__ import annotations

import bisect
import itertools
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core import memory
from lab.core.memory import Memory
from lab.core.record import Buffer, Device, Model, Settings

CPU = "CPU"
EXPERTS = r"blk\.{}\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Names of a layer's expert tensors, as a regular expression (llama.cpp's LLM_FFN_EXPS_REGEX)."""

N_COPIES = 4
"""Copies of a device's inputs if devices work as a pipeline (GGML_SCHED_MAX_COPIES)."""

_INPUT = re.compile(r"(token_embd|position_embd|token_types|per_layer_token_embd|masked_embd)")
_LAYER = re.compile(r"(?:\w+\.)?blk\.(\d+)\.")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model file."""

    name: str
    n_bytes: int


@dataclass(frozen=True)
class Place:
    """A device, the numbers of its layers (the output's is the number of layers), and their memory."""

    device: str
    layers: tuple[int, ...]
    memory: Memory


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
    return (*(None for _ in range(n_all - n_there)), *(min(index, len(ends) - 1) for index in on_devices))


def is_pipeline(
    n_layer: int | None,
    n_gpu_layers: int,
    n_devices: int,
    split_mode: str | None,
    kv_offload: bool | None,
    has_overrides: bool,
) -> bool:
    """Whether llama.cpp runs the devices as a pipeline, with several ubatches at the same time."""
    is_whole = n_gpu_layers < 0 or (n_layer is not None and n_gpu_layers > n_layer)
    is_split = n_devices > 1 and is_whole and split_mode in (None, "layer")
    return is_split and kv_offload is not False and not has_overrides


def of(
    model: Model, settings: Settings, tensors: Sequence[Tensor], names: Sequence[str], shares: Sequence[float]
) -> tuple[Place, ...] | None:
    """The layers and memory of each device of `names` (in llama.cpp's order) and of the CPU.

    `tensors` are those of the model's file. None for split mode tensor, and if an override names another buffer than
    those of these devices.
    """
    known = overrides(settings, names)
    if settings.split_mode == "tensor" or known is None or model.n_layer is None:
        return None
    everywhere = (*names, CPU)
    of_layers = [
        CPU if index is None else names[index] for index in layers(model.n_layer, settings.n_gpu_layers, shares)
    ]
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
        for device in held:
            target = next((target for pattern, target in known if pattern.search(tensor.name)), device)
            weights[target] += tensor.n_bytes
    caches: dict[str, float] | None = None
    if (by_layer := memory.kv_bytes_by_layer(model, settings)) is not None:
        caches = dict.fromkeys(everywhere, 0.0)
        for device, n_bytes in zip(of_layers, by_layer, strict=False):
            caches[CPU if settings.kv_offload is False else device] += n_bytes
    places = []
    for device in everywhere:
        own = tuple(layer for layer, where in enumerate(of_layers) if where == device)
        compute = _compute_bytes(model, settings, device, of_layers, bool(known), len(names))
        cache = None if caches is None else round(caches[device])
        places.append(Place(device, own, Memory(weights[device], cache, compute)))
    return tuple(places)


def alike(model: Model) -> tuple[Tensor, ...]:
    """Approximate tensors of a model without its file, with equal layers."""
    table, output, n_layer = model.embedding_bytes or 0, model.output_bytes or 0, model.n_layer or 1
    rest = max(0, sum(model.tensor_bytes.values()) - table - output)
    named = [Tensor("token_embd.weight", table), *([Tensor("output.weight", output)] if output else [])]
    return (*named, *(Tensor(f"blk.{i}.", rest // n_layer) for i in range(n_layer)))


def overrides(settings: Settings, names: Sequence[str]) -> list[tuple[re.Pattern[str], str]] | None:
    """Patterns of tensor names and their device; the first match counts. None if an override names another buffer.

    Raises re.error for an invalid pattern.
    """
    known = [(re.compile(EXPERTS.format(layer)), CPU) for layer in range(settings.n_cpu_moe or 0)]
    for text in settings.override_tensor or ():
        pattern, _, buffer = text.rpartition("=")
        device = device_of_override(buffer, (CPU, *names))
        if device is None:
            return None
        known.append((re.compile(pattern), device))
    return known


def device_of_override(buffer: str, names: Sequence[str]) -> str | None:
    """The device that an override names, by the device's name or its buffer's."""
    return next((name for name in names if buffer == name or buffer.startswith(f"{name}[")), None)


def device_of(buffer: Buffer, devices: Sequence[Device]) -> str:
    """The name of the device that holds a buffer of llama.cpp's log.

    If ggml did not say, the buffer's name tells: RPC0[HOST:PORT] is device 0 of that server; CPU_REPACK, CPU_Mapped,
    AMX and a GPU driver's CUDA_Host belong to the CPU.
    """
    name = buffer.name
    if buffer.device:
        return buffer.device
    if match := re.fullmatch(r"RPC(\d+)\[(.+)\]", name):
        endpoint = re.compile(rf"(?:^|\s){re.escape(match[2])}(?:[\s,]|$)")
        behind = [device.name for device in devices if endpoint.search(device.description)]
        return behind[int(match[1])] if int(match[1]) < len(behind) else name
    if name.startswith((CPU, "AMX")) or name.endswith("_Host"):
        return CPU
    return next((device.name for device in devices if name in (device.name, f"{device.name}_Mapped")), name)


def _compute_bytes(
    model: Model, settings: Settings, device: str, of_layers: Sequence[str], has_overrides: bool, n_devices: int
) -> int | None:
    """Bytes of one device's compute buffer, similar to `memory.compute_bytes`.

    Every device has the step's inputs. In a pipeline it keeps N_COPIES of the values from the device before it. Fitted
    to the buffers that llama.cpp reserves (tests/bench/placement.py measures the error).
    """
    width = memory.widths(model, settings, [layer for layer, where in enumerate(of_layers) if where == device])
    if width is None:
        return None
    kinds = settings.split_mode, settings.kv_offload, has_overrides
    is_pipe = is_pipeline(model.n_layer, settings.n_gpu_layers, n_devices, *kinds)
    inputs: float = (N_COPIES if is_pipe else 1) * (width.mask + (0 if width.is_flash else 2 * width.keys))
    if device == CPU:
        need = inputs + (5 if is_pipe else 2) * width.n_embd
        if settings.kv_offload is False:
            in_one = 3 * width.keys if model.arch in memory.FUSED else 0
            need = max(need, inputs + width.n_embd + width.queries + in_one)
        if has_overrides or CPU in of_layers[:-1]:
            need = max(need, width.in_layers)
        if of_layers[-1] == CPU:
            need = max(need, width.n_vocab + 2 * width.n_embd + width.in_hole)
    elif device in of_layers:
        is_first = next(where for where in of_layers if where != CPU) == device
        n_embd, need = width.n_embd, 0.0
        carried = N_COPIES * n_embd * (1 if is_first else 2) if is_pipe else 0
        if device in of_layers[:-1]:
            feed_forward = 3 * width.hidden + (3 if is_pipe and width.is_flash else 2) * n_embd
            attention: float = width.scores + 2 * n_embd + 2 * width.queries
            if settings.kv_offload is False:  # copies of a layer's keys and values, and the next layer's keys
                n_bytes = max(memory.kv_bytes_by_layer(model, settings) or (0,))
                attention += n_bytes * (1 if is_first else 1.5) / 4 / memory.n_rows(settings)
            need = inputs + carried + max(feed_forward, width.of_experts, attention)
        if device == of_layers[-1]:
            head = width.n_vocab + n_embd + (inputs + carried if is_pipe else n_embd + width.in_hole)
            need = max(need, head)
    else:
        need = 0.0
    return round(4 * memory.n_rows(settings) * need)


def shares(free: Mapping[str, int], names: Sequence[str], asked: Sequence[float] | None) -> tuple[float, ...]:
    """The shares of the devices: `asked`, unless all are 0, or else the free memory of each.

    A device that does not report its memory counts with the CPU's, as in llama.cpp.
    """
    if asked and any(asked):
        return (*asked, *(0.0 for _ in range(len(names) - len(asked))))
    sizes = tuple(float(free.get(name, free.get(CPU, 1))) for name in names)
    return sizes if any(sizes) else (1.0,) * len(names)
