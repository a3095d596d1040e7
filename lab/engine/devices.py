"""Load llama.cpp's libraries, keep their log, and describe their devices.

The Python bindings copy llama.cpp's structures: with a library of another version values arrive in
wrong fields, and no call fails. `libraries` reads the defaults of every field, so that two builds
can be compared.
"""

from __future__ import annotations

import collections
import ctypes
import os
from collections.abc import Sequence
from importlib.metadata import version

from lab.core.record import Device
from lab.engine import openmp, rpc
from lab.engine.bindings import TEXT, P, ggml, llama_cpp, loaded
from lab.errors import LabError
from lab.process.wire import Build, Libraries

DEBUG = 1  # ggml's log levels
WARNING = 3
ERROR = 4
PLACEMENT_LINES = (b"assigned to device", b"buffer type overridden", b": dev = ")
"""What llama.cpp says about the placement, some of it only in debug lines."""

CPU = 0  # ggml's type of the CPU device; BLAS (on macOS) has another type and comes before the CPU
DEVICE_TYPES = ("cpu", "gpu", "igpu", "accel")  # by ggml's number (ggml-backend.h)

STRUCTURES = ("llama_model", "llama_context", "llama_model_quantize")
"""Structures with default values: the names of the functions, without `_default_params`."""

_log: collections.deque[tuple[int, str]] = collections.deque(maxlen=2000)


def start(endpoints: Sequence[str] = ()) -> Build:
    """Load the libraries, keep their log, add the devices of RPC servers, and describe the build.

    LabError if the libraries do not load, lack a function, or were built without RPC and there are
    servers.
    """
    try:
        lib = llama_cpp()
        base = ggml()
    except AttributeError as problem:
        wheel = version("llama-cpp-python")
        hint = f"llama-cpp-python {wheel} needs the version in its source distribution."
        raise _unusable(problem, hint) from None
    except (OSError, RuntimeError) as problem:  # a missing file or dependency
        hint = "Install the missing library, or add its folder to LD_LIBRARY_PATH."
        raise _unusable(problem, hint) from None
    lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
    lib.llama_backend_init()
    for endpoint in endpoints:
        rpc.add_server(endpoint)
    commit = base.ggml_commit().decode()
    return Build(
        llama_cpp_python=version("llama-cpp-python"),
        llama_cpp_commit=None if commit in ("", "unknown") else commit,
        system_info=lib.llama_print_system_info().decode().strip(),
        devices=describe_all(),
        openmp=openmp.runtime(),
    )


def _unusable(problem: Exception, hint: str) -> LabError:
    return LabError(f"The libraries of llama.cpp cannot be used: {problem}.", hint)


def clear_log() -> None:
    _log.clear()


def log_lines() -> list[str]:
    """The newest lines of llama.cpp's log since it was cleared."""
    return [text for _, text in _log]


def last_warnings() -> str:
    """llama.cpp's last three warnings and errors since the log was cleared."""
    warnings = [text for level, text in _log if text and level in (WARNING, ERROR)]
    return "; ".join(dict.fromkeys(warnings[-3:])) or "it gave no reason"


def _keep_log(level: int, text: bytes, _: object) -> None:
    if level != DEBUG or any(phrase in text for phrase in PLACEMENT_LINES):
        _log.append((level, text.decode(errors="replace").strip()[:300]))


_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
    _keep_log
)


def libraries() -> Libraries:
    """The loaded libraries: version, files, and the visible part of their structures' layout."""
    layout: dict[str, str] = {}
    for structure in STRUCTURES:
        layout |= _defaults(structure)
    for number, name in enumerate(type_names()):
        layout[f"tensor type {number}"] = name or "none"
    return Libraries(ggml().ggml_version().decode(), _library_files(), layout)


def _defaults(structure: str) -> dict[str, str]:
    """The default of each field that is a number."""
    params = getattr(llama_cpp(), f"{structure}_default_params")()
    defaults = {}
    for field, kind, *_ in params._fields_:
        value = getattr(params, field)
        if kind is not ctypes.c_void_p and isinstance(value, (bool, int, float)):
            defaults[f"the default of {structure}_params.{field}"] = str(value)
    return defaults


class _Symbol(ctypes.Structure):
    """struct Dl_info of dlfcn.h."""

    _fields_ = (("path", TEXT), ("base", P), ("name", TEXT), ("address", P))


def _library_files() -> tuple[str, ...]:
    """The files of the three loaded libraries; empty on Windows, which has no dladdr."""
    if os.name == "nt":
        return ()
    functions = (
        llama_cpp()._lib.llama_model_default_params,
        loaded("ggml").ggml_backend_dev_count,
        loaded("ggml-base").ggml_version,
    )
    paths = []
    for function in functions:
        symbol = _Symbol()
        address = ctypes.cast(function, ctypes.c_void_p)
        if ctypes.CDLL(None).dladdr(address, ctypes.byref(symbol)) and symbol.path:
            paths.append(os.fsdecode(symbol.path))
    return tuple(paths)


def type_names() -> list[str]:
    """ggml's names of tensor types by number; "" for an unused number."""
    names = map(ggml().ggml_type_name, range(llama_cpp().GGML_TYPE_COUNT))
    return [(name or b"").decode() for name in names]


def handles() -> list[P]:
    """ggml's handles of all devices, in ggml's order."""
    return [P(pointer) for pointer in map(ggml().ggml_backend_dev_get, range(_n_devices()))]


def _n_devices() -> int:
    return int(ggml().ggml_backend_dev_count())


def name_of(device: P) -> str:
    return str(ggml().ggml_backend_dev_name(device).decode().strip())


def describe_all() -> tuple[Device, ...]:
    """All devices of this build, in ggml's order."""
    return tuple(map(_describe, handles()))


def _describe(device: P) -> Device:
    number = ggml().ggml_backend_dev_type(device)
    kind = DEVICE_TYPES[number] if number < len(DEVICE_TYPES) else f"type {number}"
    description = ggml().ggml_backend_dev_description(device).decode().strip()
    _, total_bytes = _memory(device)
    return Device(name_of(device), description, kind, total_bytes or None)


def free_memory() -> dict[str, int]:
    """Free bytes of each device that reports them, by name."""
    free_bytes = {}
    for device in handles():
        free, total = _memory(device)
        if total:
            free_bytes[name_of(device)] = free
    return free_bytes


def _memory(device: P) -> tuple[int, int]:
    """Free and total bytes of a device; 0 if it does not report them."""
    free = ctypes.c_size_t(0)
    total = ctypes.c_size_t(0)
    ggml().ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def device_of(name: str | None) -> P:
    """ggml's handle of the device with this name (None: the CPU). LabError if there is none."""
    for device in handles():
        if name is None and ggml().ggml_backend_dev_type(device) == CPU:
            return device
        if name == name_of(device):
            return device
    names = ", ".join(map(name_of, handles()))
    what = f"This build of llama.cpp has no device {name or 'CPU'}."
    raise LabError(what, f"It has: {names}. See: lab doctor")


def memory_of(name: str | None) -> P:
    """ggml's buffer type for the memory of a device (None: the CPU)."""
    return P(ggml().ggml_backend_dev_buffer_type(device_of(name)))


def extra_buffer_types(device: P) -> list[P]:
    """A device's additional buffer types, in llama.cpp's order.

    A CPU has repacked layouts, such as AMX and CPU_REPACK.
    """
    registry = P(ggml().ggml_backend_dev_backend_reg(device))
    name = b"ggml_backend_dev_get_extra_bufts"
    address = ggml().ggml_backend_reg_get_proc_address(registry, name)
    if not address:
        return []
    pointers = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(address)(device)
    buffer_types: list[P] = []
    while pointers and pointers[len(buffer_types)]:  # the list ends with a null pointer
        buffer_types.append(P(pointers[len(buffer_types)]))
    return buffer_types
