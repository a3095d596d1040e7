"""Place a model: devices, splits and overrides as llama.cpp's parameters, and the actual placement from its log."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lab.core.memory import CPU as CPU_NAME
from lab.core.memory import EXPERTS
from lab.core.record import Buffer, Settings
from lab.engine import native
from lab.engine.bindings import P, ggml, llama_cpp
from lab.engine.devices import device_of, extra_buffer_types, handles, name_of
from lab.errors import LabError

SPLIT_MODES = {"none": 0, "layer": 1, "tensor": 3}
"""enum llama_split_mode of llama.h. 2 (row) is deprecated there, and no device known to the lab loads it."""

_BUFFER = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB")
_LAYER = re.compile(r"layer\s+\d+ assigned to device ([^\s,]+)")


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", P))


def apply(params: Any, asked: Settings) -> tuple[Any, ...]:
    """Copy the settings into a llama_model_params. Returns the objects that must live as long as the model.

    LabError for an unknown device or buffer.
    """
    params.n_gpu_layers = asked.n_gpu_layers
    if asked.split_mode is not None:
        params.split_mode = SPLIT_MODES[asked.split_mode]
    if asked.main_gpu is not None:
        params.main_gpu = asked.main_gpu
    if asked.mmap is not None:
        params.load_mode = int(asked.mmap)  # LLAMA_LOAD_MODE_NONE and _MMAP
    if asked.repack is not None:
        params.use_extra_bufts = asked.repack
    alive: list[Any] = []
    if asked.devices is not None or asked.n_gpu_layers == 0:
        # With 0 layers and no list, a GPU build keeps the weights in memory that its GPU can read, and prefills there.
        names = asked.devices if asked.n_gpu_layers and asked.devices else ()
        pointers = (P * (len(names) + 1))(*(device_of(name) for name in names), None)
        params.devices = ctypes.addressof(pointers)
        alive.append(pointers)
    if asked.tensor_split is not None:
        shares = (ctypes.c_float * llama_cpp().llama_max_devices())(*asked.tensor_split)
        params.tensor_split = shares
        alive.append(shares)
    if overrides := _overrides(asked.n_cpu_moe or 0, asked.override_tensor or ()):
        array = (_Override * (len(overrides) + 1))(*overrides, _Override(None, None))
        params.tensor_buft_overrides = ctypes.addressof(array)
        alive.append(array)
    return tuple(alive)


def placed() -> tuple[tuple[str, ...], tuple[Buffer, ...]]:
    """The device of every layer (the output last), and the buffers, from llama.cpp's log since it was cleared."""
    owners = dict[str, str]()  # the name of each buffer type and its device
    for device in handles():
        kinds = ggml().ggml_backend_dev_buffer_type, ggml().ggml_backend_dev_host_buffer_type
        own = [P(kind(device)) for kind in kinds]
        for buffer_type in (*filter(None, own), *extra_buffer_types(device)):
            name = ggml().ggml_backend_buft_name(buffer_type).decode()
            is_host = ggml().ggml_backend_buft_is_host(buffer_type)
            owners[name] = CPU_NAME if is_host else name_of(device)  # even if a GPU's driver allocates it (CUDA_Host)
    return read_log(native.log_lines(), owners)


def read_log(
    lines: Iterable[str], owners: Mapping[str, str] | None = None
) -> tuple[tuple[str, ...], tuple[Buffer, ...]]:
    """`placed` from the lines of a log. `owners` maps the name of each buffer type to its device.

    The log names a buffer by its type; for a mapped file it adds _Mapped.
    """
    layers, buffers = [], []
    for line in lines:
        if match := _LAYER.search(line):
            layers.append(match[1])
        if match := _BUFFER.search(line):
            owner = (owners or {}).get(match[1].removesuffix("_Mapped"))
            buffers.append(Buffer(match[2], match[1], round(float(match[3]) * 2**20), owner))
    return tuple(layers), tuple(buffers)


def _overrides(n_cpu_moe: int, asked: Sequence[str]) -> list[_Override]:
    """The overrides of the settings; experts of the first `n_cpu_moe` layers stay in the CPU's memory."""
    memories = {}
    for device in handles():
        memory = ggml().ggml_backend_dev_buffer_type(device)
        memories[name_of(device)] = memories[ggml().ggml_backend_buft_name(memory).decode()] = memory
    on_cpu = ggml().ggml_backend_dev_buffer_type(device_of(None))
    overrides = [_Override(EXPERTS.format(layer).encode(), on_cpu) for layer in range(n_cpu_moe)]
    for text in asked:
        pattern, _, name = text.rpartition("=")
        if name not in memories:
            raise LabError(f"--override-tensor {text}: no buffer {name}.", f"Use one of: {', '.join(memories)}.")
        overrides.append(_Override(pattern.encode(), memories[name]))
    return overrides
