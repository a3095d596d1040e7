"""The native libraries inside llama-cpp-python: the functions of llama.cpp and ggml, and what these log.

Only the lab's child process (process/worker.py) loads them.
"""

from __future__ import annotations

import collections
import ctypes
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.core.record import Device
from lab.errors import LabError
from lab.process.wire import Build

_DEBUG, _WARNING, _ERROR = 1, 3, 4  # of ggml's log levels
_log: collections.deque[tuple[int, str]] = collections.deque(maxlen=1000)


def llama() -> Any:
    """llama-cpp-python's low-level bindings: the C API, function by function."""
    from llama_cpp import llama_cpp

    return llama_cpp


def ggml(name: str) -> Any:
    """The functions of a ggml library that llama.cpp itself has loaded: ggml, ggml-base, ggml-cpu.

    Loading the file again by its name could give a second copy, with devices and a log of its own. Where
    the system looks symbols up through a library's dependencies (all but Windows), libllama's handle
    reaches them all.
    """
    library = llama()._lib
    if os.name != "nt":
        return ctypes.CDLL(library._name, handle=library._handle)
    return ctypes.CDLL(str(Path(library._name).with_name(f"{name}.dll")))


def start(rpc: Sequence[str] = ()) -> Build:
    """Load the libraries, keep their log in memory, and return what they are, with the devices of RPC servers."""
    try:
        lib, base = llama(), ggml("ggml-base")
        base.ggml_commit.restype = ctypes.c_char_p
    except (AttributeError, OSError, RuntimeError) as problem:  # a function, a file, or one that this needs is missing
        raise LabError(
            f"The libraries of llama.cpp cannot be used: {problem}.",
            f"They must be of the version that llama-cpp-python {version('llama-cpp-python')} was made for.",
        ) from None
    lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
    lib.llama_backend_init()
    commit = base.ggml_commit().decode()
    import llama_cpp

    return Build(
        llama_cpp_python=llama_cpp.__version__,
        llama_cpp_commit=None if commit in ("", "unknown") else commit,
        system_info=lib.llama_print_system_info().decode().strip(),
        devices=_devices(),
    )


def forget_log() -> None:
    """Empty the log, so that `complaint` and `log_says` are about what is logged from now on."""
    _log.clear()


def log_says(phrase: str) -> bool:
    """Whether llama.cpp logged `phrase` since the log was last emptied."""
    return any(phrase in text for _, text in _log)


def log_lines() -> list[str]:
    """What llama.cpp logged since the log was last forgotten (its newest lines)."""
    return [text for _, text in _log]


def complaint() -> str:
    """llama.cpp's last warnings and errors since then, in its own words."""
    warnings = [text for level, text in _log if level in (_WARNING, _ERROR) and text]
    return "; ".join(dict.fromkeys(warnings[-3:])) or "it gave no reason"


def _keep_log(level: int, text: bytes, _: Any) -> None:
    if level != _DEBUG or b"assigned to device" in text:
        _log.append((level, text.decode(errors="replace").strip()[:300]))


_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_keep_log)


def _devices() -> tuple[Device, ...]:
    base, registry = ggml("ggml-base"), ggml("ggml")
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.restype = ctypes.c_void_p
    base.ggml_backend_dev_name.restype = ctypes.c_char_p
    base.ggml_backend_dev_description.restype = ctypes.c_char_p
    devices = []
    for index in range(registry.ggml_backend_dev_count()):
        device = ctypes.c_void_p(registry.ggml_backend_dev_get(ctypes.c_size_t(index)))
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        base.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = base.ggml_backend_dev_type(device)
        devices.append(
            Device(
                name=base.ggml_backend_dev_name(device).decode(),
                description=base.ggml_backend_dev_description(device).decode().strip(),
                type=dict(enumerate(("cpu", "gpu", "igpu", "accel"))).get(kind, f"type {kind}"),
                memory_bytes=total.value or None,
            )
        )
    return tuple(devices)
