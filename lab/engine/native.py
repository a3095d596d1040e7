"""The native libraries inside llama-cpp-python: the functions of llama.cpp and ggml, and what these log.

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
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.core.record import Device
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


def llama() -> Any:
    """llama-cpp-python's low-level bindings: the C API, function by function. LabError where it is not installed."""
    try:
        from llama_cpp import llama_cpp
    except ModuleNotFoundError as problem:
        if problem.name != "llama_cpp":
            raise
        raise LabError(
            f"The package llama-cpp-python is not installed in this environment ({sys.prefix}).",
            "Use the environment that the lab was installed in (source .venv/bin/activate), or install it there: "
            "python3 -m uv sync",
        ) from None

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
    """Load the libraries, keep their log in memory, connect to these RPC servers, and return what they are.

    The servers must have been probed (process/rpc.py): llama.cpp ends this process where one does not answer.
    LabError for libraries that cannot be loaded, or lack a function.
    """
    try:
        lib, base = llama(), ggml("ggml-base")
        base.ggml_commit.restype = ctypes.c_char_p
    except (AttributeError, OSError, RuntimeError) as problem:  # a function, a file, or one that this needs is missing
        hint = "Install what it needs, or add the folder of that to LD_LIBRARY_PATH."
        if isinstance(problem, AttributeError):
            hint = f"llama-cpp-python {version('llama-cpp-python')} is made for the version in its source distribution."
        raise LabError(f"The libraries of llama.cpp cannot be used: {problem}.", hint) from None
    lib.llama_log_set(_log_callback, ctypes.c_void_p(0))
    lib.llama_backend_init()
    commit = base.ggml_commit().decode()
    for endpoint in rpc:
        _connect(endpoint)
    import llama_cpp

    return Build(
        llama_cpp_python=llama_cpp.__version__,
        llama_cpp_commit=None if commit in ("", "unknown") else commit,
        system_info=lib.llama_print_system_info().decode().strip(),
        devices=devices(),
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


def devices() -> tuple[Device, ...]:
    """The devices of ggml's list, in its order; one of an RPC server has its address in the description."""
    known = []
    for device in _handles():
        free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
        ggml("ggml-base").ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        kind = ggml("ggml-base").ggml_backend_dev_type(device)
        known.append(
            Device(
                name=_text("ggml_backend_dev_name", device),
                description=_remote.get(device.value) or _text("ggml_backend_dev_description", device),
                type=dict(enumerate(("cpu", "gpu", "igpu", "accel"))).get(kind, f"type {kind}"),
                memory_bytes=total.value or None,
            )
        )
    return tuple(known)


def handle(name: str) -> Any:
    """ggml's handle of the device with this name, which is one of `devices`."""
    return next(device for device in _handles() if _text("ggml_backend_dev_name", device) == name)


def rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml-rpc.h. LabError where the libraries were built without it."""
    base, registry = ggml("ggml-base"), ggml("ggml")
    registry.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    base.ggml_backend_reg_get_proc_address.restype = ctypes.c_void_p
    backend = ctypes.c_void_p(registry.ggml_backend_reg_by_name(b"RPC"))
    address = base.ggml_backend_reg_get_proc_address(backend, name.encode()) if backend else None
    if not address:
        raise LabError(
            "This build of llama.cpp has no RPC.",
            'Install it with CMAKE_ARGS="-DGGML_RPC=ON", as INSTALL.md says; the commands of the README do.',
        )
    return ctypes.CFUNCTYPE(result, *arguments)(address)


_remote: dict[int | None, str] = {}
"""Descriptions of devices behind RPC servers, by ggml's handle."""


def _connect(endpoint: str) -> None:
    """Enter an RPC server's devices into ggml's list, as add_rpc_devices of common/arg.cpp does.

    Where nothing holds the connection llama.cpp closes it after each request, and another client could take the server.
    One backend, never used and never freed, holds it.
    """
    base, registry = ggml("ggml-base"), ggml("ggml")
    base.ggml_backend_dev_init.restype = ctypes.c_void_p
    before = len(_handles())
    server = rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)(endpoint.encode())
    if not server:
        raise LabError(f"The RPC server at {endpoint} offers no device.", "Start it again: lab rpc-server")
    registry.ggml_backend_register(ctypes.c_void_p(server))
    new = _handles()[before:]
    for i, device in enumerate(new, 1):
        of_several = f" (device {i} of {len(new)})" if len(new) > 1 else ""
        _remote[device.value] = f"RPC server {endpoint}{of_several}"
    base.ggml_backend_dev_init(new[0], None)
    watch_peers()


def _handles() -> list[ctypes.c_void_p]:
    registry = ggml("ggml")
    registry.ggml_backend_dev_count.restype = ctypes.c_size_t
    registry.ggml_backend_dev_get.restype = ctypes.c_void_p
    count = registry.ggml_backend_dev_count()
    return [ctypes.c_void_p(registry.ggml_backend_dev_get(ctypes.c_size_t(index))) for index in range(count)]


def _text(function: str, device: ctypes.c_void_p) -> str:
    read = getattr(ggml("ggml-base"), function)
    read.restype = ctypes.c_char_p
    return str(read(device).decode().strip())


def libraries() -> Libraries:
    """The loaded libraries: version, files, and the layout of their structures as far as it can be seen."""
    base = ggml("ggml-base")
    base.ggml_version.restype = ctypes.c_char_p
    types = {f"tensor type {number}": name or "none" for number, name in enumerate(type_names())}
    return Libraries(base.ggml_version().decode(), _paths(), {**_sizes(), **_defaults(), **types})


def type_names() -> list[str]:
    """ggml's types of tensors by number, as it names them itself; "" for a number without one."""
    base = ggml("ggml-base")
    base.ggml_type_name.restype, base.ggml_type_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return [(base.ggml_type_name(number) or b"").decode() for number in range(llama().GGML_TYPE_COUNT)]


def _defaults() -> dict[str, str]:
    """The default value of every field that holds a number."""
    values = {}
    for name in STRUCTURES:
        params = getattr(llama(), f"{name}_default_params")()
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
        address = ctypes.cast(getattr(llama(), f"{name}_default_params"), ctypes.c_void_p).value
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
        (llama()._lib, "llama_model_default_params"),
        (ggml("ggml"), "ggml_backend_dev_count"),
        (ggml("ggml-base"), "ggml_version"),
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
