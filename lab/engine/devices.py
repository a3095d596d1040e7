"""Load llama.cpp's libraries, keep their log, and describe their devices, including those of RPC servers.

The Python bindings contain copies of llama.cpp's structures. If a library of another version has different fields, no
call fails, but values arrive in the wrong fields. `libraries` therefore reads the sizes and the defaults of every
field, so that two builds can be compared.

On a device of an RPC server, ggml's functions behave differently (ggml-rpc.cpp). Synchronizing waits only until a graph
is sent, every operation counts as supported, and a graph without a number is sent in full each time. llama.cpp numbers
its graphs, so that repeating a step takes one short message; the lab does the same.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import json
import os
import platform
import socket
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.core.record import Device
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
        connect(endpoint)
    if rpc:
        enable_keepalive()
    return Build(
        llama_cpp_python=version("llama-cpp-python"),
        llama_cpp_commit=None if commit in ("", "unknown") else commit,
        system_info=lib.llama_print_system_info().decode().strip(),
        devices=known(),
    )


def clear_log() -> None:
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
    layout = dict[str, str]()
    for name in STRUCTURES:
        function = getattr(llama_cpp(), f"{name}_default_params")
        if platform.machine().lower() in ("x86_64", "amd64"):
            # There a C function returns a structure by writing to memory that the caller provides. The bytes that are
            # equal after two calls on differently filled memory belong to the structure. Rounded up to 8.
            address = ctypes.cast(function, ctypes.c_void_p).value
            assert address is not None
            filled = [ctypes.create_string_buffer(bytes([byte]) * ROOM, ROOM) for byte in (0x00, 0xFF)]
            for buffer in filled:
                ctypes.CFUNCTYPE(None, ctypes.c_char_p)(address)(ctypes.cast(buffer, ctypes.c_char_p))
            last = max(
                i for i, (one, other) in enumerate(zip(*(buffer.raw for buffer in filled), strict=True)) if one == other
            )
            layout[f"the size of {name}_params"] = str(-(-(last + 1) // 8) * 8)
        params = function()
        for field, kind, *_ in params._fields_:
            if isinstance(value := getattr(params, field), (bool, int, float)) and kind is not ctypes.c_void_p:
                layout[f"the default of {name}_params.{field}"] = str(value)
    layout |= {f"tensor type {number}": name or "none" for number, name in enumerate(type_names())}
    paths = []
    if os.name != "nt":  # Windows has no dladdr
        files = (llama_cpp()._lib, "llama_model_default_params"), (loaded("ggml"), "ggml_backend_dev_count")
        for library, name in (*files, (loaded("ggml-base"), "ggml_version")):
            symbol, function = _Symbol(), ctypes.cast(getattr(library, name), ctypes.c_void_p)
            if ctypes.CDLL(None).dladdr(function, ctypes.byref(symbol)) and symbol.path:
                paths.append(os.fsdecode(symbol.path))
    return Libraries(ggml().ggml_version().decode(), tuple(paths), layout)


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


CPU = 0
"""The device type of the CPU (ggml-backend.h). BLAS (on macOS) has another type and is listed before the CPU."""


def type_names() -> list[str]:
    """ggml's names of tensor types by number; "" for an unused number."""
    return [(ggml().ggml_type_name(number) or b"").decode() for number in range(llama_cpp().GGML_TYPE_COUNT)]


def handles() -> list[Any]:
    """ggml's handles of all devices, in ggml's order."""
    return [P(ggml().ggml_backend_dev_get(index)) for index in range(ggml().ggml_backend_dev_count())]


def name_of(device: Any) -> str:
    """llama.cpp's name of a device."""
    return str(ggml().ggml_backend_dev_name(device).decode().strip())


def known() -> tuple[Device, ...]:
    """All devices, in ggml's order. The description of an RPC server's device contains the server's address."""
    listed = []
    for device in handles():
        kind = ggml().ggml_backend_dev_type(device)
        listed.append(
            Device(
                name=name_of(device),
                description=_remote.get(device.value) or ggml().ggml_backend_dev_description(device).decode().strip(),
                type=dict(enumerate(("cpu", "gpu", "igpu", "accel"))).get(kind, f"type {kind}"),
                memory_bytes=_memory(device)[1] or None,
            )
        )
    return tuple(listed)


def free_memory() -> dict[str, int]:
    """Free bytes of each device that reports them, by name."""
    memories = {name_of(device): _memory(device) for device in handles()}
    return {name: free for name, (free, total) in memories.items() if total}


def _memory(device: Any) -> tuple[int, int]:
    """Free and total bytes of a device."""
    free, total = ctypes.c_size_t(0), ctypes.c_size_t(0)
    ggml().ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def rpc_function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml-rpc.h. LabError if the libraries were built without RPC."""
    backend = ggml().ggml_backend_reg_by_name(b"RPC")
    address = ggml().ggml_backend_reg_get_proc_address(backend, name.encode()) if backend else None
    if not address:
        raise LabError(
            "This build of llama.cpp does not support RPC.",
            'Install it with CMAKE_ARGS="-DGGML_RPC=ON" (INSTALL.md), or with the commands of the README.',
        )
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def start_rpc_server(endpoint: str, cache: str | None, n_threads: int, lent: Sequence[Device]) -> None:
    """Serve until the process ends; returns only if llama.cpp cannot listen at the endpoint, and has printed why."""
    text, size, pointers = ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
    serve = rpc_function("ggml_backend_rpc_start_server", None, text, text, size, size, pointers)
    chosen = (ctypes.c_void_p * len(lent))(*[device_of(device.name).value for device in lent])
    serve(endpoint.encode(), None if cache is None else os.fsencode(cache), n_threads, len(lent), chosen)


def print_rpc_version() -> None:
    """Have llama.cpp print its protocol version (it does for an invalid address too), or print an error as JSON."""
    try:
        start_rpc_server("none", None, 1, [device for device in known() if device.type == "cpu"])
    except LabError as problem:
        print(json.dumps({"error": problem.what, "hint": problem.hint}), flush=True)


_remote: dict[int | None, str] = {}
"""Descriptions of devices behind RPC servers, by ggml's handle."""


def connect(endpoint: str) -> None:
    """Register an RPC server's devices in ggml, as add_rpc_devices of common/arg.cpp does.

    One backend, never used and never freed, keeps the connection open: llama.cpp closes unused ones after each request,
    and another client could take the server.
    """
    before = len(handles())
    server = rpc_function("ggml_backend_rpc_add_server", ctypes.c_void_p, ctypes.c_char_p)(endpoint.encode())
    if not server:
        raise LabError(f"The RPC server at {endpoint} offers no device.", "Restart it: lab rpc-server")
    ggml().ggml_backend_register(server)
    new = handles()[before:]
    for i, device in enumerate(new, 1):
        of_several = f" (device {i} of {len(new)})" if len(new) > 1 else ""
        _remote[device.value] = f"RPC server {endpoint}{of_several}"
    ggml().ggml_backend_dev_init(new[0], None)


def device_of(name: str | None) -> Any:
    """ggml's handle of the device with this name (None: the CPU). LabError if there is none."""
    for device in handles():
        is_cpu = ggml().ggml_backend_dev_type(device) == CPU
        if is_cpu if name is None else name_of(device) == name:
            return device
    raise LabError(
        f"This build of llama.cpp has no device {name or 'CPU'}.",
        f"It has: {', '.join(map(name_of, handles()))}. See: lab machine",
    )


def extra_buffer_types(device: Any) -> list[Any]:
    """A device's additional buffer types, in llama.cpp's order. A CPU has repacked layouts, such as AMX and
    CPU_REPACK."""
    registry = P(ggml().ggml_backend_dev_backend_reg(device))
    address = ggml().ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    extra = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(address)(device) if address else None
    return [P(pointer) for pointer in itertools.takewhile(bool, extra)] if extra else []
