"""llama.cpp's RPC library for the installed build, compiled from the sources that uv keeps.

The installed libraries have no RPC. Its library is two files that need only ggml's headers, so it
takes a few seconds; llama.cpp finds it beside the other libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

FLAGS = ("-std=c++17", "-O0", "-shared", "-fPIC")
DEFINES = (
    "-DGGML_BACKEND_DL",
    "-DGGML_BACKEND_SHARED",
    "-DGGML_BACKEND_BUILD",
    "-DGGML_SHARED",
)


def source() -> Path | None:
    """The llama.cpp in the source distribution of the installed llama-cpp-python."""
    cache = Path(os.environ.get("UV_CACHE_DIR") or Path.home() / ".cache/uv")
    package = f"sdists-*/pypi/llama-cpp-python/{version('llama-cpp-python')}"
    for folder in cache.glob(f"{package}/*/src/vendor/llama.cpp"):
        if (folder / "ggml/src/ggml-rpc/ggml-rpc.cpp").exists():
            return folder
    return None


def build(folder: Path) -> Path:
    """The installed libraries and the RPC library, in a new folder: for `--lib`."""
    llama_cpp = source()
    compiler = shutil.which("g++")
    if not sys.platform.startswith("linux") or compiler is None or llama_cpp is None:
        pytest.skip(
            "llama.cpp's RPC needs Linux, g++ and the source distribution in uv's cache"
        )
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    libraries = folder / "build" / "bin"
    shutil.copytree(Path(spec.origin).parent / "lib", libraries)
    ggml = llama_cpp / "ggml"
    rpc = ggml / "src/ggml-rpc"
    sources: list[str | Path] = [rpc / "ggml-rpc.cpp", rpc / "transport.cpp"]
    headers: list[str | Path] = ["-I", ggml / "include", "-I", ggml / "src"]
    linked: list[str | Path] = ["-L", libraries, "-lggml", "-lggml-base", "-Wl,-rpath,$ORIGIN"]
    target = libraries / "libggml-rpc.so"
    command: list[str | Path] = [
        compiler,
        *FLAGS,
        *DEFINES,
        *headers,
        *sources,
        *linked,
        "-o",
        target,
    ]
    subprocess.run(command, check=True)
    return libraries
