"""Check that a build of llama.cpp fits the CPU and the Python bindings, and name it for records.

A build with `-march=native`, such as the README's, ends with SIGILL on a CPU without one of its
instruction sets, and a build that omits one of the CPU's runs more slowly. Both are visible in
`llama_print_system_info`, before a model is loaded; Linux lists those of the CPU. Not visible are
sets that llama.cpp does not print (such as GFNI).

--lib or an environment variable names the folder of other libraries. With a version that the
bindings do not fit, values would silently arrive in wrong fields. So the lab loads both builds,
each in its own process, and compares them.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
from pathlib import Path

from lab.core import shell
from lab.core.files import exists, expanded, is_dir, is_file, listed, obstacle
from lab.errors import LabError
from lab.process.setup import LIB_VARIABLE, ProcessSetup
from lab.process.wire import Build, Libraries
from lab.process.worker import Worker, WorkerDied
from lab.runner.system_files import system_text

INSTRUCTION_SETS = {
    "SSE3": "pni",
    "SSSE3": "ssse3",
    "AVX": "avx",
    "AVX_VNNI": "avx_vnni",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "BMI2": "bmi2",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512_vnni",
    "AVX512_BF16": "avx512_bf16",
    "AMX_INT8": "amx_int8",
    "NEON": "asimd",
    "FP16_VA": "asimdhp",
    "MATMUL_INT8": "i8mm",
    "DOTPROD": "asimddp",
    "SVE": "sve",
    "SME": "sme",
    "SME2": "sme2",
}
"""llama.cpp's names of instruction sets, and the names in Linux's /proc/cpuinfo."""

_LIBRARY = re.compile(r"(?:lib)?(llama|ggml(?:-[\w-]+)?)\.(?:so|dylib|dll|\d)[\w.]*")
_LIBLLAMA = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.dll")
_FOLDERS_BELOW = ("bin", "lib", "build/bin", "llama_cpp/lib")
_BUILD = (
    "Build the llama.cpp in the source distribution of the installed llama-cpp-python (see the "
    "README)."
)
BUILD_HERE = "python3 -m uv sync --reinstall-package llama-cpp-python --no-cache-dir"


def mismatch(system_info: str) -> tuple[frozenset[str], frozenset[str]] | None:
    """Instruction sets that a build needs and this CPU lacks, and those that it does not use.

    None if the system does not say what the CPU has.
    """
    features = cpu_features()
    if features is None:
        return None
    cpu = {name for name, feature in INSTRUCTION_SETS.items() if feature in features}
    build = INSTRUCTION_SETS.keys() & set(re.findall(r"(\w+) = 1\b", system_info))
    return frozenset(build - cpu), frozenset(cpu - build)


def cpu_features() -> frozenset[str] | None:
    """The features that all cores of this CPU have, by Linux's names; None: unknown."""
    is_arm = platform.machine().lower() in ("arm64", "aarch64")
    # Under emulation of another architecture /proc/cpuinfo has the host's lines, with its name.
    heading = "Features" if is_arm else "flags"
    cpuinfo = system_text("/proc/cpuinfo")
    lines = re.findall(rf"^{heading}\s*:(.*)$", cpuinfo, re.MULTILINE)
    if not lines:
        return None
    return frozenset.intersection(*(frozenset(line.split()) for line in lines))


def of_worker(worker: Worker) -> Build:
    """A worker's build.

    LabError if it needs instructions that this CPU lacks, or crashes when it starts.
    """
    hint = _BUILD if worker.setup.lib else f"Build it here: {BUILD_HERE}"
    try:
        build = worker.build
    except WorkerDied as death:
        if not death.is_native_crash:
            raise
        what = f"{death.what} llama.cpp crashed at its start, like a build for another CPU."
        raise LabError(what, hint) from None
    differences = mismatch(build.system_info)
    if differences is None:
        return build
    lacking, _ = differences
    if lacking:  # it would end with SIGILL
        names = ", ".join(sorted(lacking))
        what = f"This build of llama.cpp needs {names}, which this CPU does not have."
        raise LabError(what, hint)
    return build


INSTALLED = ""
"""Asked for, it is the installed libraries, whatever LLAMA_CPP_LIB_PATH says."""


def folder_of(option: str | None, package: str | None = None) -> str | None:
    """The folder of the libraries from --lib or LLAMA_CPP_LIB_PATH; None: those of the bindings.

    LabError if they do not fit the bindings: those in the folder `package`, or the installed ones.
    """
    lib = _named(option)
    if not lib:
        return None
    path = expanded(lib).resolve()
    try:
        _check_folder(path, lib)
        _check(path, _sum(_files(path)), package)
    except LabError as problem:
        if option:
            raise LabError(f"--lib {lib}: {problem.what}", problem.hint) from None
        cure = f"Correct {LIB_VARIABLE}, or unset it to use the installed libraries."
        what = f"{LIB_VARIABLE}={lib}: {problem.what}"
        raise LabError(what, f"{problem.hint}\n{cure}") from None
    return str(path)


def problem_of_variable() -> LabError | None:
    """Why the libraries that LLAMA_CPP_LIB_PATH names cannot be used; None if they can."""
    try:
        folder_of(None)
    except LabError as problem:
        return problem
    return None


def _named(option: str | None) -> str | None:
    """The folder that is asked for, by an option or by the variable."""
    return os.environ.get(LIB_VARIABLE) if option is None else option


def _check_folder(path: Path, lib: str) -> None:
    """LabError unless libllama is in the folder; `lib` is how the user wrote its path."""
    reason = obstacle(path)
    if reason or not is_dir(path):
        hint = "Give the folder that contains libllama, such as build/bin."
        raise LabError(f"{reason or 'no such folder'}.", hint)
    if _has_libllama(path):
        return
    hint = _BUILD
    below = with_libllama(path)
    if below:
        hint = f"Use {shell.join('--lib', Path(lib) / below.relative_to(path))}"
    raise LabError("this folder contains no libllama.", hint)


def with_libllama(path: Path) -> Path | None:
    """A folder, or the usual one below it, that contains libllama; None: neither does."""
    for folder in (path, *(path / name for name in _FOLDERS_BELOW)):
        if _has_libllama(folder):
            return folder
    return None


def name_of(option: str | None) -> str | None:
    """The name in records: the last two parts of the folder's path, and 8 digits of a checksum."""
    lib = _named(option)
    if not lib:
        return None
    path = expanded(lib).resolve()
    return f"{short(str(path))} {_sum(_files(path))[:8]}"


def short(lib: str) -> str:
    """The last two parts of a folder's path; the others may be private."""
    return "/".join(expanded(lib).resolve().parts[1:][-2:])


@functools.cache
def _check(path: Path, checksum: str, package: str | None) -> None:
    """LabError if the libraries in a folder do not fit the bindings; asked once for a checksum."""
    with Worker() as worker:
        worker.use(ProcessSetup(package=package))
        installed = worker.libraries()
        worker.use(ProcessSetup(lib=str(path), package=package))
        try:
            libraries = worker.libraries()
        except WorkerDied as death:
            raise LabError(death.what, f"These libraries do not run here. {_BUILD}") from None
    compare(installed, libraries, path)


def compare(installed: Libraries, libraries: Libraries, path: Path) -> None:
    """LabError if the libraries in a folder differ from those that the bindings need."""
    for file in map(Path, libraries.paths):
        if file.parent.resolve() != path and exists(path / file.name):
            what = f"its libllama does not load its own {file.name}, but {file}."
            hint = (
                "Unset LD_LIBRARY_PATH. If the folder was moved or copied, give the folder where "
                "it was built."
            )
            raise LabError(what, hint)
    needed = _interface(installed)
    provided = _interface(libraries)
    for name in {**needed, **provided}:
        here = needed.get(name, "unknown")
        there = provided.get(name, "unknown")
        if here != there:
            what = (
                f"these libraries do not fit the installed llama-cpp-python: {name} is {there}, "
                f"but {here} in the installed libraries."
            )
            raise LabError(what, _BUILD)


def _interface(libraries: Libraries) -> dict[str, str]:
    """What must be equal in two builds."""
    major, minor, *_ = libraries.version.split(".")
    return {"ggml's version": f"{major}.{minor}", **libraries.layout}


def _has_libllama(path: Path) -> bool:
    return any(exists(path / name) for name in _LIBLLAMA)


def _files(path: Path) -> tuple[tuple[Path, int, int], ...]:
    """llama.cpp's libraries in a folder, each with size and modification time."""
    libraries = []
    for file in listed(path):
        if _LIBRARY.fullmatch(file.name) and is_file(file):
            libraries.append((file, file.stat().st_size, file.stat().st_mtime_ns))
    return tuple(libraries)


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
