"""Does each compiler get the options that it needs for AMX, and is the code that comes out right?

    python -m tests.bench.build_flags [CMAKE]...

First a small CMake project is configured and built with our CMake file (gcc_amx_fix/) by every compiler of COMPILERS
that is installed, under each CMAKE (`cmake` without any). Then llama.cpp's own ggml-cpu/amx/mmq.cpp, from the source of
the installed llama-cpp-python, is compiled by each g++ for a CPU with AMX, without and with the options (about a minute
each on a quiet core). The bytes of the tile configuration that are lost before `ldtilecfg` are listed. The exit status
is 1 where an option is missing or not wanted, where a build fails, or where bytes are lost with the options. Debian's
packages: g++-11 g++-12 (or g++-13 g++-14) clang-14 clang-16 g++-aarch64-linux-gnu g++-mingw-w64-x86-64.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import tile_stores
from tests.bench import llama_bench

COMPILERS = {
    "g++": ("gcc", ()),
    "g++-11": ("gcc-11", ()),
    "g++-12": ("gcc-12", ()),
    "g++-13": ("gcc-13", ()),
    "g++-14": ("gcc-14", ()),
    "clang++-14": ("clang-14", ()),
    "clang++-16": ("clang-16", ()),
    "aarch64-linux-gnu-g++": ("aarch64-linux-gnu-gcc", ("Linux", "aarch64")),
    "x86_64-w64-mingw32-g++": ("x86_64-w64-mingw32-gcc", ("Windows", "AMD64")),
}
"""Each C++ compiler: its C compiler, and what a cross compiler builds for."""


def small_project(cmake: str, compiler: str) -> bool:
    """Whether the small project is built, with the options exactly where they are needed."""
    c_compiler, target = COMPILERS[compiler]
    needed = "clang" not in compiler and "aarch64" not in compiler and tile_stores.gcc_major(compiler) < 15
    arguments = [f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_C_COMPILER={c_compiler}"]
    if target:
        arguments += [f"-DCMAKE_SYSTEM_NAME={target[0]}", f"-DCMAKE_SYSTEM_PROCESSOR={target[1]}"]
    with tempfile.TemporaryDirectory() as folder:
        words = tile_stores.configured(Path(folder), *arguments, cmake=cmake)["a.cpp"].split()
        given = [option for option in tile_stores.our_options() if option in words]
        built = subprocess.run([cmake, "--build", f"{folder}/build"], check=False, capture_output=True, text=True)
    right = given == (tile_stores.our_options() if needed else []) and built.returncode == 0
    print(f"{compiler:24} {' '.join(given) or 'no options':24} {'built' if not built.returncode else built.stderr}")
    return right


def mmq(compiler: str) -> bool:
    """Whether llama.cpp's mmq.cpp stores the whole tile configuration when this g++ compiles it with the options."""
    ggml = llama_bench.source() / "ggml"
    source = ggml / "src" / "ggml-cpu" / "amx" / "mmq.cpp"
    include = [f"-I{ggml / part}" for part in ("include", "src", "src/ggml-cpu")]
    lost = {}
    for name, options in (("without", []), ("with", tile_stores.our_options())):
        with tempfile.TemporaryDirectory() as folder:
            built = tile_stores.compile_object([compiler], source, ["-D_GNU_SOURCE", *include, *options], Path(folder))
            lost[name] = tile_stores.lost(built)
        print(
            f"{compiler:24} mmq.cpp {name} the options loses bytes {[sorted(bytes_) for bytes_ in lost[name]]}",
            flush=True,
        )
    return bool(lost["with"]) and not any(lost["with"])


def main() -> int:
    installed = [compiler for compiler in COMPILERS if shutil.which(compiler)]
    print("not installed:", " ".join(sorted(COMPILERS.keys() - set(installed))) or "none")
    right = []
    for cmake in sys.argv[1:] or ["cmake"]:
        print(subprocess.run([cmake, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0])
        right += [small_project(cmake, compiler) for compiler in installed]
    gccs = {
        Path(shutil.which(compiler) or "").resolve(): compiler for compiler in installed if compiler.startswith("g++")
    }
    right += [mmq(compiler) for compiler in gccs.values()]
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
