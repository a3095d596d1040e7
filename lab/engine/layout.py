"""How llama.cpp's structures lie in memory in the libraries that are loaded, so that two builds can be compared.

The bindings hold copies of llama.cpp's structures. Libraries of another version may have them otherwise, and nothing
complains: the values only land in the wrong fields. So what the libraries give as defaults is read field by field.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

from lab.engine import native
from lab.process.wire import Libraries

STRUCTURES = ("llama_model", "llama_context", "llama_model_quantize")
"""Those of which llama.cpp gives defaults, without `_default_params`."""

ROOM = 4096
"""Bytes that are surely more than one of them has."""


class _Symbol(ctypes.Structure):
    """struct Dl_info of dlfcn.h."""

    _fields_ = (
        ("path", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def describe() -> Libraries:
    """The loaded libraries: version, files, and the layout of their structures as far as it can be seen."""
    base = native.ggml("ggml-base")
    base.ggml_version.restype = ctypes.c_char_p
    return Libraries(base.ggml_version().decode(), _paths(), {**_sizes(), **_defaults(), **_types()})


def _defaults() -> dict[str, str]:
    """The default value of every field that holds a number."""
    values = {}
    for name in STRUCTURES:
        params = getattr(native.llama(), f"{name}_default_params")()
        for field, kind, *_ in params._fields_:
            if isinstance(value := getattr(params, field), (bool, int, float)) and kind is not ctypes.c_void_p:
                values[f"the default of {name}_params.{field}"] = str(value)
    return values


def _sizes() -> dict[str, str]:
    """Bytes of each structure, in units of 8; empty where they cannot be told.

    Called as C calls it on x86-64 the function writes into memory that it is given. What it writes is the same
    whatever was there before.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {}
    sizes = {}
    for name in STRUCTURES:
        address = ctypes.cast(getattr(native.llama(), f"{name}_default_params"), ctypes.c_void_p).value
        assert address is not None
        write = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)
        filled = [ctypes.create_string_buffer(bytes([byte]) * ROOM, ROOM) for byte in (0x00, 0xFF)]
        for buffer in filled:
            write(ctypes.cast(buffer, ctypes.c_char_p))
        written = [i for i, (one, other) in enumerate(zip(filled[0].raw, filled[1].raw, strict=True)) if one == other]
        sizes[f"the size of {name}_params"] = str(-(-(max(written) + 1) // 8) * 8)
    return sizes


def _types() -> dict[str, str]:
    """ggml's types of tensors by number."""
    base = native.ggml("ggml-base")
    base.ggml_type_name.restype, base.ggml_type_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    names = [base.ggml_type_name(number) for number in range(native.llama().GGML_TYPE_COUNT)]
    return {f"tensor type {number}": (name or b"none").decode() for number, name in enumerate(names)}


def _paths() -> tuple[str, ...]:
    """Where libllama, libggml and libggml-base were loaded from; empty where the system does not tell (Windows)."""
    if os.name == "nt":
        return ()
    tell = ctypes.CDLL(None).dladdr
    paths = []
    libraries: tuple[tuple[Any, str], ...] = (
        (native.llama()._lib, "llama_model_default_params"),
        (native.ggml("ggml"), "ggml_backend_dev_count"),
        (native.ggml("ggml-base"), "ggml_version"),
    )
    for library, name in libraries:
        symbol = _Symbol()
        if tell(ctypes.cast(getattr(library, name), ctypes.c_void_p), ctypes.byref(symbol)) and symbol.path:
            paths.append(os.fsdecode(symbol.path))
    return tuple(paths)
