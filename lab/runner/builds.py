"""Check that a build of llama.cpp fits the CPU and the Python bindings, and name it for records.

A build with `-march=native`, such as the README's, ends with SIGILL on a CPU without one of its instruction sets, and a
build that omits one of the CPU's runs more slowly. Both are visible in `llama_print_system_info`, before a model is
loaded; Linux lists those of the CPU. Not visible are sets that llama.cpp does not print (such as GFNI).

--lib or an environment variable names the folder of other libraries. With another version than that of the bindings
values would silently arrive in wrong fields. So the lab loads both builds, each in its own process, and compares them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from pathlib import Path

from lab.core import shell
from lab.errors import LabError
from lab.process.spawning import LIB_VARIABLE
from lab.process.wire import Build, Libraries
from lab.process.worker import Worker, WorkerDied
from lab.runner import machine

_PAIRS = """
SSE3=pni SSSE3=ssse3 AVX=avx AVX_VNNI=avx_vnni AVX2=avx2 F16C=f16c FMA=fma BMI2=bmi2 AVX512=avx512f
AVX512_VBMI=avx512vbmi AVX512_VNNI=avx512_vnni AVX512_BF16=avx512_bf16 AMX_INT8=amx_int8
NEON=asimd FP16_VA=asimdhp MATMUL_INT8=i8mm DOTPROD=asimddp SVE=sve SME=sme SME2=sme2
"""
_ON_LINUX = dict(pair.split("=") for pair in _PAIRS.split())
"""llama.cpp's names of instruction sets, and those of /proc/cpuinfo."""

_LIBRARY = re.compile(r"(?:lib)?(llama|ggml(?:-[\w-]+)?)\.(?:so|dylib|dll|\d)[\w.]*")
_LIBLLAMA = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.dll")
_BUILD = "Build the llama.cpp in the source distribution of the installed llama-cpp-python (see the README)."
BUILD_HERE = "python3 -m uv sync --reinstall-package llama-cpp-python --no-cache-dir"


def mismatch(system_info: str) -> tuple[frozenset[str], frozenset[str]] | None:
    """Instruction sets that a build needs and this CPU lacks, and those that it does not use; None: CPU unknown."""
    arm = platform.machine().lower() in ("arm64", "aarch64")
    # Under emulation of another architecture /proc/cpuinfo has the host's lines, with the other name.
    lines = re.findall(
        rf"^{'Features' if arm else 'flags'}\s*:(.*)$", machine.system_text("/proc/cpuinfo"), re.M
    )
    listed = set.intersection(*(set(line.split()) for line in lines)) if lines else set()
    cpu = frozenset(ours for ours, theirs in _ON_LINUX.items() if theirs in listed)
    build = frozenset(re.findall(r"(\w+) = 1\b", system_info)) & _ON_LINUX.keys()
    return (build - cpu, cpu - build) if listed else None


def of_worker(worker: Worker) -> Build:
    """A worker's build. LabError if it needs instructions that this CPU lacks, or crashes when it starts."""
    hint = _BUILD if worker.lib else f"Build it here: {BUILD_HERE}"
    try:
        build = worker.build
    except WorkerDied as death:
        if not death.is_crash:
            raise
        raise LabError(
            f"{death.what} llama.cpp crashed at its start, like a build for another CPU.", hint
        ) from None
    if (found := mismatch(build.system_info)) and found[0]:  # it would end with SIGILL
        lacking = ", ".join(sorted(found[0]))
        raise LabError(
            f"This build of llama.cpp needs {lacking}, which this CPU does not have.", hint
        )
    return build


def folder_of(asked: str | None) -> str | None:
    """The folder of the libraries from --lib or LLAMA_CPP_LIB_PATH, if they fit; None: the installed ones."""
    lib = asked or os.environ.get(LIB_VARIABLE)
    if not lib:
        return None
    path = _path(lib)
    if not path.is_dir():
        raise LabError(
            f"--lib {lib}: no such folder.",
            "Give the folder that contains libllama, such as build/bin.",
        )
    if not _has_libllama(path):
        below = [
            name
            for name in ("bin", "lib", "build/bin", "llama_cpp/lib")
            if _has_libllama(path / name)
        ]
        hint = f"Use {shell.join('--lib', Path(lib) / below[0])}" if below else _BUILD
        raise LabError(f"--lib {lib}: this folder contains no libllama.", hint)
    _check(path, _sum(_files(path)))
    return str(path)


def name_of(asked: str | None) -> str | None:
    """The name in records: the last two parts of the folder's path, and 8 hex digits of the libraries' checksum."""
    lib = asked or os.environ.get(LIB_VARIABLE)
    if not lib:
        return None
    path = _path(lib)
    return f"{short(str(path))} {_sum(_files(path))[:8]}"


def short(lib: str) -> str:
    """The last two parts of a folder's path; the others may be private."""
    return "/".join(_path(lib).parts[1:][-2:])


@functools.cache
def _check(path: Path, _: str) -> None:
    """LabError if the libraries with this checksum do not fit the bindings."""
    with Worker() as worker:
        own = worker.libraries()
        worker.use(str(path))
        try:
            theirs = worker.libraries()
        except LabError as problem:
            died = (
                f"These libraries do not run here. {_BUILD}"
                if isinstance(problem, WorkerDied)
                else problem.hint
            )
            raise LabError(f"--lib {path}: {problem.what}", died) from None
    compare(own, theirs, path)


def compare(own: Libraries, theirs: Libraries, path: Path) -> None:
    """LabError if the libraries in a folder differ from those that the bindings need."""
    elsewhere = [file for file in map(Path, theirs.paths) if file.parent.resolve() != path]
    if elsewhere and (path / elsewhere[0].name).exists():
        what = f"--lib {path}: its libllama does not load its own {elsewhere[0].name}, but {elsewhere[0]}."
        hint = "Unset LD_LIBRARY_PATH. If the folder was moved or copied, give the folder where it was built."
        raise LabError(what, hint)
    known = [
        {"ggml's version": ".".join(one.version.split(".")[:2]), **one.layout}
        for one in (own, theirs)
    ]
    for what in {**known[0], **known[1]}:
        here, there = (one.get(what, "unknown") for one in known)
        if here != there:
            words = f"{what} is {there}, but {here} in the installed libraries."
            raise LabError(
                f"--lib {path}: these libraries do not fit the installed llama-cpp-python: {words}",
                _BUILD,
            )


def _path(lib: str) -> Path:
    return Path(lib).expanduser().resolve()


def _has_libllama(path: Path) -> bool:
    return any((path / name).exists() for name in _LIBLLAMA)


def _files(path: Path) -> tuple[tuple[Path, int, int], ...]:
    """llama.cpp's libraries in a folder, each with size and modification time."""
    files = [
        file for file in sorted(path.iterdir()) if _LIBRARY.fullmatch(file.name) and file.is_file()
    ]
    return tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@functools.cache
def _sum(files: tuple[tuple[Path, int, int], ...]) -> str:
    """SHA-256 over the libraries. A file with several names (of versions) counts once."""
    sums = set()
    for file, _, _ in files:
        library = _LIBRARY.fullmatch(file.name)
        assert library
        with file.open("rb") as data:
            sums.add(f"{library[1]} {hashlib.file_digest(data, 'sha256').hexdigest()}")
    return hashlib.sha256("\n".join(sorted(sums)).encode()).hexdigest()
