"""Load llama.cpp's libraries, keep their log, and describe their devices.

The Python bindings copy llama.cpp's structures: with a library of another version values arrive in wrong fields, and no
call fails. `libraries` reads the defaults of every field, so that two builds can be compared.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import os
from importlib.metadata import version
from typing import Any

from lab.core.record import Device
from lab.engine.bindings import TEXT, P, ggml, llama_cpp, loaded
from lab.errors import LabError
from lab.process.wire import Build, Libraries

DEBUG = 1
WARNING = 3
ERROR = 4  # of ggml's log levels
_log: collections.deque[tuple[int, str]] = collections.deque(maxlen=1000)

STRUCTURES = ("llama_model", "llama_context", "llama_model_quantize")
"""Structures with default values: the names of the functions, without `_default_params`."""


class _Symbol(ctypes.Structure):
    """struct Dl_info of dlfcn.h."""

    _fields_ = (("path", TEXT), ("base", P), ("name", TEXT), ("address", P))


def start() -> Build:
    """Load the libraries, keep their log, and describe the build. LabError if they do not load or lack a function."""
    try:
        lib = llama_cpp()
        base = ggml()
    except (
        AttributeError,
        OSError,
        RuntimeError,
    ) as problem:  # a missing function, file or dependency
        hint = "Install the missing library, or add its folder to LD_LIBRARY_PATH."
        if isinstance(problem, AttributeError):
            hint = f"llama-cpp-python {version('llama-cpp-python')} needs the version in its source distribution."
        raise LabError(f"The libraries of llama.cpp cannot be used: {problem}.", hint) from None
    lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
    lib.llama_backend_init()
    commit = base.ggml_commit().decode()
    return Build(
        llama_cpp_python=version("llama-cpp-python"),
        llama_cpp_commit=None if commit in ("", "unknown") else commit,
        system_info=lib.llama_print_system_info().decode().strip(),
        devices=known(),
    )


def clear_log() -> None:
    _log.clear()


def log_lines() -> list[str]:
    """The newest lines of llama.cpp's log since it was cleared."""
    return [text for _, text in _log]


def last_warnings() -> str:
    """llama.cpp's last three warnings and errors since the log was cleared."""
    warnings = [text for level, text in _log if level in (WARNING, ERROR) and text]
    return "; ".join(dict.fromkeys(warnings[-3:])) or "it gave no reason"


def _keep_log(level: int, text: bytes, _: Any) -> None:
    if level != DEBUG or b"assigned to device" in text:
        _log.append((level, text.decode(errors="replace").strip()[:300]))


_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_keep_log)


def libraries() -> Libraries:
    """The loaded libraries: version, files, and the visible part of their structures' layout."""
    layout = dict[str, str]()
    for name in STRUCTURES:
        params = getattr(llama_cpp(), f"{name}_default_params")()
        for field, kind, *_ in params._fields_:
            if (
                isinstance(value := getattr(params, field), (bool, int, float))
                and kind is not ctypes.c_void_p
            ):
                layout[f"the default of {name}_params.{field}"] = str(value)
    layout |= {f"tensor type {number}": name or "none" for number, name in enumerate(type_names())}
    paths = []
    if os.name != "nt":  # Windows has no dladdr
        files = (
            (llama_cpp()._lib, "llama_model_default_params"),
            (loaded("ggml"), "ggml_backend_dev_count"),
        )
        for library, name in (*files, (loaded("ggml-base"), "ggml_version")):
            symbol = _Symbol()
            function = ctypes.cast(getattr(library, name), ctypes.c_void_p)
            if ctypes.CDLL(None).dladdr(function, ctypes.byref(symbol)) and symbol.path:
                paths.append(os.fsdecode(symbol.path))
    return Libraries(ggml().ggml_version().decode(), tuple(paths), layout)


CPU = 0  # the device type of the CPU (ggml-backend.h); BLAS (on macOS) has another type and is listed before the CPU


def type_names() -> list[str]:
    """ggml's names of tensor types by number; "" for an unused number."""
    return [
        (ggml().ggml_type_name(number) or b"").decode()
        for number in range(llama_cpp().GGML_TYPE_COUNT)
    ]


def handles() -> list[Any]:
    """ggml's handles of all devices, in ggml's order."""
    return [
        P(ggml().ggml_backend_dev_get(index)) for index in range(ggml().ggml_backend_dev_count())
    ]


def name_of(device: Any) -> str:
    return str(ggml().ggml_backend_dev_name(device).decode().strip())


def known() -> tuple[Device, ...]:
    listed = []
    types = dict(enumerate(("cpu", "gpu", "igpu", "accel")))
    for device in handles():
        kind = ggml().ggml_backend_dev_type(device)
        words = ggml().ggml_backend_dev_description(device).decode().strip()
        listed.append(
            Device(
                name_of(device), words, types.get(kind, f"type {kind}"), _memory(device)[1] or None
            )
        )
    return tuple(listed)


def free_memory() -> dict[str, int]:
    """Free bytes of each device that reports them, by name."""
    memories = {name_of(device): _memory(device) for device in handles()}
    return {name: free for name, (free, total) in memories.items() if total}


def _memory(device: Any) -> tuple[int, int]:
    free = ctypes.c_size_t(0)
    total = ctypes.c_size_t(0)
    ggml().ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def device_of(name: str | None) -> Any:
    """ggml's handle of the device with this name (None: the CPU). LabError if there is none."""
    for device in handles():
        is_cpu = ggml().ggml_backend_dev_type(device) == CPU
        if is_cpu if name is None else name_of(device) == name:
            return device
    known = ", ".join(map(name_of, handles()))
    raise LabError(
        f"This build of llama.cpp has no device {name or 'CPU'}.",
        f"It has: {known}. See: lab machine",
    )


def extra_buffer_types(device: Any) -> list[Any]:
    """A device's additional buffer types, in llama.cpp's order. A CPU has repacked layouts, such as AMX and
    CPU_REPACK."""
    registry = P(ggml().ggml_backend_dev_backend_reg(device))
    address = ggml().ggml_backend_reg_get_proc_address(
        registry, b"ggml_backend_dev_get_extra_bufts"
    )
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(address)(device) if address else None
    return [P(pointer) for pointer in itertools.takewhile(bool, extra)] if extra else []
