"""Which OpenMP runtime llama.cpp's code for the CPU runs its threads with."""

from __future__ import annotations

import ctypes
import re
import sys
from functools import cache
from pathlib import Path

from lab.core.files import exists
from lab.engine.bindings import llama_cpp
from lab.process.setup import LIBGOMP, LIBOMP, NO_OPENMP, VCOMP

FILES = {
    LIBGOMP: r"libgomp[-.]",
    LIBOMP: r"lib(?:i?omp5?(?:md)?|omp140[\w.]*)[-.]",
    VCOMP: r"vcomp\d+\.",
}
"""The names of the runtimes' files; a wheel adds a checksum (libgomp-a34b3233.so.1.0.0)."""

ON_WINDOWS = ("vcomp140.dll", "libomp140.x86_64.dll", "libomp140.aarch64.dll", "libomp.dll")
WINDOWS_TOO = ("libiomp5md.dll", "libgomp-1.dll")


@cache
def runtime() -> str | None:
    """The runtime, once the libraries are loaded; NO_OPENMP for a build without.

    None: it is not known, because the process has loaded none that is known here, or two.
    """
    build = llama_cpp().llama_print_system_info().decode()
    if "OPENMP = 1" not in build:
        return NO_OPENMP
    found = {name for name in map(runtime_of, loaded_files()) if name}
    return found.pop() if len(found) == 1 else None


def runtime_of(path: str) -> str | None:
    """The runtime that a library's file is of."""
    name = re.split(r"[/\\\\]", path)[-1].lower()
    for runtime_name, pattern in FILES.items():
        if re.match(pattern, name):
            return runtime_name
    return None


def loaded_files() -> list[str]:
    """The libraries that this process has loaded: on Windows those that may be a runtime."""
    if sys.platform == "win32":
        handle_of = ctypes.windll.kernel32.GetModuleHandleW
        return [name for name in (*ON_WINDOWS, *WINDOWS_TOO) if handle_of(name)]
    if sys.platform == "darwin":
        system = ctypes.CDLL(None)
        system._dyld_get_image_name.restype = ctypes.c_char_p
        images = range(system._dyld_image_count())
        return [system._dyld_get_image_name(index).decode() for index in images]
    maps = Path("/proc/self/maps")
    if not exists(maps):
        return []
    return [line.split()[-1] for line in maps.read_text().splitlines() if "/" in line]
