"""Load llama.cpp's libraries, keep their log, and describe the layout of their structures.

The Python bindings contain copies of llama.cpp's structures. If a library of another version has different fields, no
call fails, but values arrive in the wrong fields. `libraries` therefore reads the sizes and the defaults of every
field, so that two builds can be compared.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import platform
import socket
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.engine import devices
from lab.engine.bindings import TEXT, P, ggml, llama_cpp, loaded
from lab.errors import LabError
from lab.process.wire import Build, Libraries

DEBUG, WARNING, ERROR = 1, 3, 4  # of ggml's log levels
_log: collections.deque[tuple[int, str]] = collections.deque(maxlen=1000)

STRUCTURES = ("llama_model", "llama_context", "llama_model_quantize")
"""Structures with default values: the names of the functions, without `_default_params`."""

ROOM = 4096
"""More bytes than any of these structures has."""


class _Symbol(ctypes.Structure):
    """struct Dl_info of dlfcn.h."""

    _fields_ = (("path", TEXT), ("base", P), ("name", TEXT), ("address", P))


IDLE_S, BETWEEN_S, N_UNANSWERED = 10, 5, 4
"""TCP keepalive: seconds before the first probe, seconds between probes, unanswered probes before an error."""


def start(rpc: Sequence[str] = ()) -> Build:
    """Load the libraries, keep their log in memory, connect to these RPC servers, and describe the build.

    Probe the servers first (process/rpc.py): llama.cpp aborts this process if one does not answer. LabError for
    libraries that cannot be loaded or lack a function.
    """
    try:
        lib, base = llama_cpp(), ggml()
    except (AttributeError, OSError, RuntimeError) as problem:  # a missing function, file or dependency
        hint = "Install the missing library, or add its folder to LD_LIBRARY_PATH."
        if isinstance(problem, AttributeError):
            hint = f"llama-cpp-python {version('llama-cpp-python')} needs the version in its source distribution."
        raise LabError(f"The libraries of llama.cpp cannot be used: {problem}.", hint) from None
    lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
    lib.llama_backend_init()
    commit = base.ggml_commit().decode()
    for endpoint in rpc:
        devices.connect(endpoint)
    if rpc:
        enable_keepalive()
    return Build(
        llama_cpp_python=version("llama-cpp-python"),
        llama_cpp_commit=None if commit in ("", "unknown") else commit,
        system_info=lib.llama_print_system_info().decode().strip(),
        devices=devices.known(),
    )


def clear_log() -> None:
    """Clear the log."""
    _log.clear()


def log_says(phrase: str) -> bool:
    """Whether llama.cpp logged `phrase` since the log was cleared."""
    return any(phrase in text for _, text in _log)


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
    types = {f"tensor type {number}": name or "none" for number, name in enumerate(devices.type_names())}
    return Libraries(ggml().ggml_version().decode(), _paths(), {**_sizes(), **_defaults(), **types})


def _defaults() -> dict[str, str]:
    """The default of every numeric field."""
    values = {}
    for name in STRUCTURES:
        params = getattr(llama_cpp(), f"{name}_default_params")()
        for field, kind, *_ in params._fields_:
            if isinstance(value := getattr(params, field), (bool, int, float)) and kind is not ctypes.c_void_p:
                values[f"the default of {name}_params.{field}"] = str(value)
    return values


def _sizes() -> dict[str, str]:
    """Bytes of each structure, rounded up to 8; empty except on x86-64.

    There a C function returns a structure by writing to memory that the caller provides. The bytes that are equal
    after two calls on differently filled memory belong to the structure.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {}
    sizes = {}
    for name in STRUCTURES:
        address = ctypes.cast(getattr(llama_cpp(), f"{name}_default_params"), ctypes.c_void_p).value
        assert address is not None
        write = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)
        filled = [ctypes.create_string_buffer(bytes([byte]) * ROOM, ROOM) for byte in (0x00, 0xFF)]
        for buffer in filled:
            write(ctypes.cast(buffer, ctypes.c_char_p))
        written = [i for i, (one, other) in enumerate(zip(filled[0].raw, filled[1].raw, strict=True)) if one == other]
        sizes[f"the size of {name}_params"] = str(-(-(max(written) + 1) // 8) * 8)
    return sizes


def _paths() -> tuple[str, ...]:
    """The files of libllama, libggml and libggml-base; empty on Windows, which has no dladdr."""
    if os.name == "nt":
        return ()
    dladdr = ctypes.CDLL(None).dladdr
    paths = []
    libraries: tuple[tuple[Any, str], ...] = (
        (llama_cpp()._lib, "llama_model_default_params"),
        (loaded("ggml"), "ggml_backend_dev_count"),
        (loaded("ggml-base"), "ggml_version"),
    )
    for library, name in libraries:
        symbol = _Symbol()
        if dladdr(ctypes.cast(getattr(library, name), ctypes.c_void_p), ctypes.byref(symbol)) and symbol.path:
            paths.append(os.fsdecode(symbol.path))
    return tuple(paths)


def enable_keepalive() -> list[str]:
    """Enable TCP keepalive (tcp(7)) on all connections over IPv4; returns the peers' addresses, HOST:PORT.

    Without it llama.cpp waits forever for a machine that lost its power or network; with it the wait ends with an error
    after half a minute. Empty on Windows, where sockets are not files.
    """
    wanted = {"TCP_KEEPIDLE": IDLE_S, "TCP_KEEPALIVE": IDLE_S, "TCP_KEEPINTVL": BETWEEN_S, "TCP_KEEPCNT": N_UNANSWERED}
    peers = []
    for path in Path("/dev/fd").glob("*"):
        with contextlib.suppress(OSError):  # not a socket, or not connected
            connection = socket.socket(fileno=int(path.name))
            try:
                if connection.family == socket.AF_INET:
                    peers.append("{}:{}".format(*connection.getpeername()))
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    for name, value in wanted.items():
                        if hasattr(socket, name):  # macOS has TCP_KEEPALIVE, Linux TCP_KEEPIDLE
                            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            finally:
                connection.detach()
    return peers
