"""Another build of llama.cpp in place of the installed one: whether it fits, and how records name it.

llama-cpp-python takes its libraries from the folder in an environment variable. Its bindings are made for one version
of llama.cpp: with libraries of another one values would land in wrong fields, and nothing would complain. So before
anything is measured the installed libraries and the others are loaded, each in a process of its own, and compared.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from pathlib import Path

from lab.errors import LabError
from lab.process.spawning import LIB_VARIABLE
from lab.process.wire import Backend, Build, Libraries
from lab.process.worker import Worker, WorkerDied
from lab.runner import cpu_features

_LIBRARY = re.compile(r"(?:lib)?(llama|ggml(?:-[\w-]+)?)\.(?:so|dylib|dll|\d)[\w.]*")
_LIBLLAMA = ("libllama.so", "libllama.dylib", "llama.dll", "libllama.dll")
_BUILD = "Build the llama.cpp that is in the source distribution of the installed llama-cpp-python (see the README)."


BUILD_HERE = "python3 -m uv sync --reinstall-package llama-cpp-python --no-cache-dir"
"""The command that builds the installed llama.cpp anew."""


def of_worker(worker: Worker) -> Build:
    """The build that a worker runs on.

    LabError where it was compiled for instructions that this CPU lacks (an environment, a container image or a cache of
    another machine), also where it ends for that before it can say so.
    """
    hint = _BUILD if worker.backend.lib else f"Build it here: {BUILD_HERE}"
    try:
        build = worker.build
    except WorkerDied as death:
        if not death.is_crash:
            raise
        words = "llama.cpp ends while it is started, as a build for another CPU does."
        raise LabError(f"{death.what} {words}", hint) from None
    if lacking := sorted(cpu_features.missing(build.system_info) or ()):
        words = f"This build of llama.cpp needs {', '.join(lacking)}, which this CPU does not have."
        raise LabError(words, hint)
    return build


def folder_of(asked: str | None) -> str | None:
    """The folder of the libraries that were asked for, or that LLAMA_CPP_LIB_PATH names; None: the installed ones.

    LabError where it is missing, holds no libllama, or libraries that do not fit the bindings.
    """
    lib = asked or os.environ.get(LIB_VARIABLE)
    if not lib:
        return None
    path = _path(lib)
    if not path.is_dir():
        raise LabError(f"--lib {lib}: there is no such folder.", "Name the one where libllama lies, such as build/bin.")
    if not _has_libllama(path):
        below = [name for name in ("bin", "lib", "build/bin", "llama_cpp/lib") if _has_libllama(path / name)]
        hint = f"It is below: --lib {Path(lib) / below[0]}" if below else _BUILD
        raise LabError(f"--lib {lib}: there is no libllama in this folder.", hint)
    _check(path, _sum(_files(path)))
    return str(path)


def name_of(asked: str | None) -> str | None:
    """As records have it: the last two parts of the folder's path, and 8 hex digits of a sum over its libraries."""
    lib = asked or os.environ.get(LIB_VARIABLE)
    if not lib:
        return None
    path = _path(lib)
    return f"{short(str(path))} {_sum(_files(path))[:8]}"


def short(lib: str) -> str:
    """The last two parts of a folder's path: what is before them may be private."""
    return "/".join(_path(lib).parts[1:][-2:])


@functools.cache
def _check(path: Path, _: str) -> None:
    """LabError where the libraries with this sum do not fit the bindings."""
    with Worker() as worker:
        own = worker.libraries()
        worker.use(Backend(str(path)))
        try:
            theirs = worker.libraries()
        except WorkerDied as problem:
            raise LabError(f"--lib {path}: {problem.what}", f"These libraries do not run here. {_BUILD}") from None
        except LabError as problem:
            raise LabError(f"--lib {path}: {problem.what}", problem.hint) from None
    compare(own, theirs, path)


def compare(own: Libraries, theirs: Libraries, path: Path) -> None:
    """LabError that says in what the libraries in a folder differ from those that the bindings were made for."""
    elsewhere = [file for file in map(Path, theirs.paths) if file.parent.resolve() != path]
    if elsewhere and (path / elsewhere[0].name).exists():
        raise LabError(
            f"--lib {path}: its libllama does not work with the {elsewhere[0].name} there, but with {elsewhere[0]}.",
            "Unset LD_LIBRARY_PATH; where the folder was moved or copied, name the one that was built in.",
        )
    if own.version.split(".")[:2] != theirs.version.split(".")[:2]:
        raise LabError(
            f"--lib {path}: these libraries are of ggml {theirs.version}; the installed llama-cpp-python is made for "
            f"ggml {own.version}.",
            _BUILD,
        )
    for what in dict.fromkeys((*own.layout, *theirs.layout)):
        here, there = own.layout.get(what, "unknown"), theirs.layout.get(what, "unknown")
        if here != there:
            raise LabError(
                f"--lib {path}: these libraries do not fit the installed llama-cpp-python: {what} is {there}, where "
                f"the installed ones have {here}.",
                _BUILD,
            )


def _path(lib: str) -> Path:
    return Path(lib).expanduser().resolve()


def _has_libllama(path: Path) -> bool:
    return any((path / name).exists() for name in _LIBLLAMA)


def _files(path: Path) -> tuple[tuple[Path, int, int], ...]:
    """llama.cpp's libraries in a folder, each with its size and when it was changed."""
    files = [file for file in sorted(path.iterdir()) if _LIBRARY.fullmatch(file.name) and file.is_file()]
    return tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@functools.cache
def _sum(files: tuple[tuple[Path, int, int], ...]) -> str:
    """SHA-256 over the libraries. A file that has several names, as versions have, counts once."""
    sums = set()
    for file, _, _ in files:
        library = _LIBRARY.fullmatch(file.name)
        assert library
        with file.open("rb") as data:
            sums.add(f"{library[1]} {hashlib.file_digest(data, 'sha256').hexdigest()}")
    return hashlib.sha256("\n".join(sorted(sums)).encode()).hexdigest()
