"""llama.cpp's RPC library, which uses devices of other machines or lends those of this one.

A build has it if it was made with -DGGML_RPC=ON. Some builds link the library ggml-rpc; in others
it lies beside the libraries and is loaded when it is needed.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from lab.core.files import exists
from lab.engine.bindings import P, ggml, llama_cpp
from lab.errors import LabError

FILE_NAMES = ("libggml-rpc.so", "libggml-rpc.dylib", "ggml-rpc.dll", "libggml-rpc.dll")
HOW_TO_BUILD = (
    "Build the llama.cpp in the source distribution of the installed llama-cpp-python with "
    "-DGGML_RPC=ON, and name the folder of its libraries: --lib FOLDER"
)


def add_server(endpoint: str) -> None:
    """Let llama.cpp use the devices of the server at HOST:PORT. LabError if it offers none.

    llama.cpp aborts this process if it cannot reach the server: ask it before (process/rpc.py).
    """
    function = ctypes.CFUNCTYPE(P, ctypes.c_char_p)(address_of("ggml_backend_rpc_add_server"))
    registry = function(endpoint.encode())
    if not registry:
        raise LabError(f"The RPC server at {endpoint} offers no devices.", "Restart it.")
    ggml().ggml_backend_register(P(registry))


def address_of(function: str) -> int:
    """The address of a function of the RPC library. LabError if this build has no RPC."""
    registry = ggml().ggml_backend_reg_by_name(b"RPC") or _load()
    if not registry:
        raise LabError("This build of llama.cpp has no RPC.", HOW_TO_BUILD)
    return int(ggml().ggml_backend_reg_get_proc_address(P(registry), function.encode()))


def _load() -> int | None:
    """Load the RPC library that lies beside llama.cpp's; None if there is none."""
    folder = Path(llama_cpp()._lib._name).parent
    for name in FILE_NAMES:
        if exists(folder / name):
            handle: int | None = ggml().ggml_backend_load(os.fsencode(folder / name))
            return handle
    return None
