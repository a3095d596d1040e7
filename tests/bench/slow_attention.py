"""A CPU library of llama.cpp whose flash attention is slow on purpose, for `tests.bench.slope`.

    python3 -m uv run python -m tests.bench.slow_attention

Built once (some minutes on two cores) from the source of the installed llama-cpp-python, and kept
in the user's cache folder beside links to the other installed libraries: `lab --lib FOLDER` uses
it. The patch makes every thread wait after its part of flash attention, in proportion to the time
that the part took. Environment variables say where and how much: LAB_SLOW_FROM (positions),
LAB_SLOW_FACTOR, LAB_SLOW_TOKENS (1: steps of decode, more: of prefill), LAB_SLOW_WHOLE (1: the
whole attention from there on, not just the positions beyond). Without them attention runs as it is,
and without AVX512-FP16, whose kernel for heads of 64 is slow by itself.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.bench import llama_bench

CALL = "ggml_compute_forward_flash_attn_ext_f16(params, dst);"
PATCHED_CALL = f"""{{
                const double planted_start = ggml_time_us();
                {CALL}
                planted_wait(dst, planted_start);
                }}"""
PROJECT = """cmake_minimum_required(VERSION 3.18)
project(slow_attention C CXX)
add_subdirectory(ggml)
"""
FUNCTION = "void ggml_compute_forward_flash_attn_ext(\n"
WAIT = """
#include <cstdlib>

static double planted(const char * name, double otherwise) {
    const char * text = getenv(name);
    return text ? atof(text) : otherwise;
}

// Each thread waits in proportion to what its part took.
static void planted_wait(const ggml_tensor * dst, double start) {
    static const double from     = planted("LAB_SLOW_FROM", 0);
    static const double factor   = planted("LAB_SLOW_FACTOR", 1);
    static const double n_tokens = planted("LAB_SLOW_TOKENS", 1);
    static const bool   is_whole = planted("LAB_SLOW_WHOLE", 0) > 0;
    const ggml_tensor * mask = dst->src[3];
    if (factor <= 1 || !mask || (dst->src[0]->ne[1] > 1) != (n_tokens > 1)) {
        return;
    }
    // The last row of the mask says how many positions the last token sees.
    const int64_t n_kv = dst->src[1]->ne[1];
    const size_t last_row = (dst->src[0]->ne[1] - 1) * mask->nb[1];
    const ggml_fp16_t * row = (const ggml_fp16_t *) ((const char *) mask->data + last_row);
    int64_t n_seen = n_kv;
    while (n_seen > 0 && GGML_CPU_FP16_TO_FP32(row[n_seen - 1]) == -INFINITY) {
        n_seen--;
    }
    if (n_seen <= from) {
        return;
    }
    const double share = is_whole ? 1.0 : 1.0 - from / n_seen;
    const double end = ggml_time_us() + (factor - 1) * share * (ggml_time_us() - start);
    while (ggml_time_us() < end) {
        // spins as llama.cpp's threads do at a barrier
    }
}

"""


class Slowness(NamedTuple):
    """What is planted; `n_tokens` of the steps: 1 for decode, more for prefill."""

    n_from: int = 0
    factor: float = 1.0
    n_tokens: int = 1
    is_whole: bool = False

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a child that runs on the patched library."""
        return {
            "LAB_SLOW_FROM": str(self.n_from),
            "LAB_SLOW_FACTOR": str(self.factor),
            "LAB_SLOW_TOKENS": str(self.n_tokens),
            "LAB_SLOW_WHOLE": str(int(self.is_whole)),
        }


def library() -> Path:
    """The folder of the patched libraries, built if it is not there yet."""
    folder = llama_bench.home("slow-attention")
    libraries = folder / "lib"
    if not libraries.exists():
        _build(folder)
    return libraries


def _build(folder: Path) -> None:
    """Patch a copy of ggml's source, compile its CPU library, and link the others beside it.

    CMAKE_CXX_FLAGS: as in llama_build, GCC before 15 compiles the AMX code correctly with them.
    """
    source = folder / "ggml"
    shutil.copytree(llama_bench.source() / "ggml", source, dirs_exist_ok=True)
    _patch(source / "src" / "ggml-cpu" / "ops.cpp")
    (folder / "CMakeLists.txt").write_text(PROJECT)
    flags = ""
    if "avx512_fp16" in Path("/proc/cpuinfo").read_text():
        flags = "-mno-avx512fp16"
    defines = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_SHARED_LIBS=ON",
        "-DGGML_LLAMAFILE=ON",
        f"-DCMAKE_C_FLAGS={flags}",
        f"-DCMAKE_CXX_FLAGS=-fno-dse -fno-tree-dse {flags}",
    ]
    built = folder / "build"
    subprocess.run(["cmake", "-S", folder, "-B", built, *defines], check=True)
    subprocess.run(["cmake", "--build", built, "--target", "ggml-cpu", "-j", "2"], check=True)
    unfinished = folder / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    for installed in llama_bench.libraries().iterdir():
        (unfinished / installed.name).symlink_to(installed)
    for patched in built.rglob("libggml-cpu*"):
        if patched.is_file():
            target = unfinished / patched.name
            target.unlink(missing_ok=True)
            shutil.copy(patched, target)
    unfinished.rename(folder / "lib")


def _patch(path: Path) -> None:
    code = path.read_text()
    assert code.count(CALL) == 1
    assert code.count(FUNCTION) == 1
    code = code.replace(CALL, PATCHED_CALL).replace(FUNCTION, WAIT + FUNCTION)
    path.write_text(code)


if __name__ == "__main__":
    print(library())
