"""The native libraries inside llama-cpp-python: how they start, what they log, and whether the bindings fit them.

Only the lab's child process (process/worker.py) loads them.

The bindings hold copies of llama.cpp's structures. Libraries of another version may have them otherwise, and nothing
complains: the values only land in the wrong fields. So what the libraries give as defaults is read field by field, and
two builds can be compared (`libraries`).
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import platform
import socket
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.engine import devices
from lab.engine.bindings import ggml, llama_cpp, loaded
from lab.errors import LabError
from lab.process.wire import Build, Libraries

DEBUG, WARNING, ERROR = 1, 3, 4  # of ggml's log levels
_log: collections.deque[tuple[int, str]] = collections.deque(maxlen=1000)

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


IDLE_S, BETWEEN_S, N_UNANSWERED = 10, 5, 4
"""A peer is asked after so many seconds of silence, again after so many, and given up after so many without an answer.
"""


def start(rpc: Sequence[str] = ()) -> Build:
    """Load the libraries, keep their log in memory, connect to these RPC servers, and return what they are.

    The servers must have been probed (process/rpc.py): llama.cpp ends this process where one does not answer.
    LabError for libraries that cannot be loaded, or lack a function.
    """
    try:
        lib, base = llama_cpp(), ggml()
    except (AttributeError, OSError, RuntimeError) as problem:  # a function, a file, or one that this needs is missing
        hint = "Install what it needs, or add the folder of that to LD_LIBRARY_PATH."
        if isinstance(problem, AttributeError):
            hint = f"llama-cpp-python {version('llama-cpp-python')} is made for the version in its source distribution."
        raise LabError(f"The libraries of llama.cpp cannot be used: {problem}.", hint) from None
    lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
    lib.llama_backend_init()
    commit = base.ggml_commit().decode()
    for endpoint in rpc:
        devices.connect(endpoint)
    if rpc:
        watch_peers()
    return Build(
        llama_cpp_python=version("llama-cpp-python"),
        llama_cpp_commit=None if commit in ("", "unknown") else commit,
        system_info=lib.llama_print_system_info().decode().strip(),
        devices=devices.known(),
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
    warnings = [text for level, text in _log if level in (WARNING, ERROR) and text]
    return "; ".join(dict.fromkeys(warnings[-3:])) or "it gave no reason"


def _keep_log(level: int, text: bytes, _: Any) -> None:
    if level != DEBUG or b"assigned to device" in text:
        _log.append((level, text.decode(errors="replace").strip()[:300]))


_log_callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(_keep_log)


def libraries() -> Libraries:
    """The loaded libraries: version, files, and the layout of their structures as far as it can be seen."""
    types = {f"tensor type {number}": name or "none" for number, name in enumerate(devices.type_names())}
    return Libraries(ggml().ggml_version().decode(), _paths(), {**_sizes(), **_defaults(), **types})


def _defaults() -> dict[str, str]:
    """The default value of every field that holds a number."""
    values = {}
    for name in STRUCTURES:
        params = getattr(llama_cpp(), f"{name}_default_params")()
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
    """Where libllama, libggml and libggml-base were loaded from; empty where the system does not tell (Windows)."""
    if os.name == "nt":
        return ()
    tell = ctypes.CDLL(None).dladdr
    paths = []
    libraries: tuple[tuple[Any, str], ...] = (
        (llama_cpp()._lib, "llama_model_default_params"),
        (loaded("ggml"), "ggml_backend_dev_count"),
        (loaded("ggml-base"), "ggml_version"),
    )
    for library, name in libraries:
        symbol = _Symbol()
        if tell(ctypes.cast(getattr(library, name), ctypes.c_void_p), ctypes.byref(symbol)) and symbol.path:
            paths.append(os.fsdecode(symbol.path))
    return tuple(paths)


def watch_peers() -> list[str]:
    """Have the system notice when a connected machine vanishes; returns the peers' addresses, HOST:PORT.

    llama.cpp waits for ever for an answer of a machine that lost its power or its cable. With keepalive (tcp(7)) the
    wait ends with an error after half a minute. Empty where sockets are no files (Windows).
    """
    peers = []
    for connection in _connections():
        with connection, contextlib.suppress(OSError):
            host, port = connection.getpeername()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            idle = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))  # the second on macOS
            for option, value in (
                (idle, IDLE_S),
                (getattr(socket, "TCP_KEEPINTVL", None), BETWEEN_S),
                (getattr(socket, "TCP_KEEPCNT", None), N_UNANSWERED),
            ):
                if option is not None:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
            peers.append(f"{host}:{port}")
    return peers


def _connections() -> Iterator[socket.socket]:
    """A second handle for each TCP socket over IPv4."""
    try:
        numbers = [int(path.name) for path in Path("/dev/fd").iterdir()]
    except OSError:
        return
    for number in numbers:
        with contextlib.suppress(OSError):
            handle = os.dup(number)
            try:
                connection = socket.socket(fileno=handle)
            except OSError:  # no socket
                os.close(handle)
                continue
            if connection.family == socket.AF_INET and connection.type == socket.SOCK_STREAM:
                yield connection
            else:
                connection.close()
