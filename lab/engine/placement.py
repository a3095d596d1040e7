"""Where llama.cpp puts a model: the settings that ask for it, and what its log says.

llama.cpp has no function that says which layer, expert and cache lies where; its log does.
"""

from __future__ import annotations

import ctypes
import re

from lab.core.asked_settings import Setting, table
from lab.core.memory import EXPERTS, override_of
from lab.core.record import Buffer, Placement, Settings
from lab.engine import devices
from lab.engine.bindings import P, llama_cpp, set_fields

SPLIT_MODES = {
    "none": 0,
    "layer": 1,
    "row": 2,
    "tensor": 3,
}  # enum llama_split_mode of llama.h

BUFFER_LINE = re.compile(
    r"(\S+)\s+(model|KV|RS|compute|output) buffer size\s*=\s*([\d.]+) MiB"
)
LAYER_LINE = re.compile(r"layer\s+\d+ assigned to device ([^\s,]+)")
CACHE_LINE = re.compile(r"layer\s+(\d+): dev = (\S+)")
EXPERT_LINE = re.compile(
    r"tensor blk\.(\d+)\.\S*exps\S* \(.*\) buffer type overridden to (\S+)"
)


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", P))


def model_params(params: object, settings: Settings) -> tuple[object, ...]:
    """Copy the settings into a llama_model_params.

    Returns the objects that must live as long as the model.
    """
    for setting in table().values():
        copy_setting(settings, setting, params, setting.model_param)
    if settings.mmap is not None:
        mode = int(settings.mmap)  # LLAMA_LOAD_MODE_NONE and _MMAP
        set_fields(params, load_mode=mode)
    if settings.split_mode is not None:
        set_fields(params, split_mode=SPLIT_MODES[settings.split_mode])
    arrays: list[object] = []
    if settings.tensor_split is not None:
        shares = (ctypes.c_float * llama_cpp().llama_max_devices())(*settings.tensor_split)
        set_fields(params, tensor_split=shares)
        arrays.append(shares)
    if settings.devices is not None or settings.n_gpu_layers == 0:
        handles = _devices(settings)
        set_fields(params, devices=ctypes.addressof(handles))
        arrays.append(handles)
    if settings.n_cpu_moe or settings.override_tensor:
        overrides = _overrides(settings)
        set_fields(params, tensor_buft_overrides=ctypes.addressof(overrides))
        arrays.append(overrides)
    return tuple(arrays)


def copy_setting(
    settings: Settings, setting: Setting, params: object, name: str | None
) -> None:
    """Copy the value of a setting into this field of llama.cpp's parameters, unless it is None."""
    value = getattr(settings, setting.recorded)
    if name is not None and value is not None:
        set_fields(params, **{name: value})


def _devices(settings: Settings) -> ctypes.Array[P]:
    """The devices for layers, ended by a null pointer.

    With 0 layers and no list, a GPU build would keep the weights in memory that its GPU can read,
    and prefill there.
    """
    handles = []
    if settings.n_gpu_layers:
        handles = list(map(devices.device_of, settings.devices or ()))
    return (P * (len(handles) + 1))(*handles, None)


def _overrides(settings: Settings) -> ctypes.Array[_Override]:
    """The tensors that go to another memory, ended by an empty override; the first match counts."""
    on_cpu = devices.memory_of(None)
    overrides = []
    for layer in range(settings.n_cpu_moe or 0):
        overrides.append(_Override(EXPERTS.format(layer).encode(), on_cpu))
    for text in settings.override_tensor or ():
        pattern, device = override_of(text)
        overrides.append(_Override(pattern.encode(), devices.memory_of(device)))
    return (_Override * (len(overrides) + 1))(*overrides, _Override(None, None))


def read_log() -> Placement:
    """What llama.cpp logged about the placement since its log was cleared."""
    layers: list[str] = []
    buffers: list[Buffer] = []
    caches: dict[int, str] = {}
    experts: dict[int, str] = {}
    for line in devices.log_lines():
        layer = LAYER_LINE.search(line)
        buffer = BUFFER_LINE.search(line)
        cache = CACHE_LINE.search(line)
        expert = EXPERT_LINE.search(line)
        if layer:
            layers.append(layer[1])
        if buffer:
            buffers.append(Buffer(buffer[2], buffer[1], round(float(buffer[3]) * 2**20)))
        if cache:
            caches[int(cache[1])] = cache[2]
        if expert:
            experts[int(expert[1])] = expert[2]
    return Placement(
        layers=tuple(layers),
        buffers=tuple(buffers),
        caches=_by_layer(caches, [""] * (max(caches, default=-1) + 1)),
        experts=_by_layer(experts, layers[:-1]) if experts else (),
    )


def _by_layer(places: dict[int, str], otherwise: list[str]) -> tuple[str, ...]:
    """The place of each layer, as logged or otherwise."""
    return tuple(places.get(layer, place) for layer, place in enumerate(otherwise))
