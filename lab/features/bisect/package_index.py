"""Versions of llama-cpp-python: which the package index has, and their builds in the lab's cache.

pip fetches and builds them, so the user's own index and CMAKE_ARGS count. A build is for one CPU,
one compiler and one set of options: its folder's name has a checksum of them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from lab.core.files import data_file, exists, listed
from lab.errors import LabError, printable
from lab.models.obtain import cache_folder
from lab.runner import builds, machine

PACKAGE = "llama-cpp-python"
OPTIONS = {"LLAVA_BUILD": "OFF"}  # of CMake, as in pyproject.toml
RULES = "mini-lab-llama-build.cmake"
INDEX_S = 90  # for the list of versions
BUILD_S = 3600
UNFINISHED = "building-"  # how the folder of a build begins until it is complete
USUAL_S = 120  # of a build on two cores
USUAL_BYTES = 35_000_000  # of a build's folder
VERSION = re.compile(r"\d+\.\d+\.\d+")
PROGRESS = re.compile(r"\[(\d+)/(\d+)\]")
OF_BUILDS = ("CMAKE_ARGS", "CFLAGS", "CXXFLAGS", "CC", "CXX", "LDFLAGS")
"""Variables that change what a build does."""

ShowBuild = Callable[[int, int], None]
"""Takes the files compiled so far, and all of them."""


def available() -> list[str]:
    """The versions in the package index, the oldest first. LabError if it cannot be asked."""
    command = [*pip(), "index", "versions", PACKAGE]
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=INDEX_S, check=False
        )
        output = completed.stdout
        problem = completed.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        output = ""
        problem = str(error)
    line = re.search(r"Available versions:(.*)", output)
    if line is None:
        lines = problem.strip().splitlines() or ["it gave no list"]
        raise LabError(
            f"The package index cannot be asked for versions of {PACKAGE}: "
            f"{printable(lines[-1])[:200]}",
            "Check the network, or use builds in folders: --good FOLDER --bad FOLDER",
        )
    versions = [version.strip() for version in line[1].split(",")]
    return in_order([version for version in versions if VERSION.fullmatch(version)])


def in_order(versions: Sequence[str]) -> list[str]:
    return sorted(versions, key=lambda version: tuple(map(int, version.split("."))))


@functools.cache
def pip() -> tuple[str, ...]:
    """The command of a pip: this environment's, or that of the Python that it was made from.

    LabError if neither has one.
    """
    if importlib.util.find_spec("pip"):
        return (sys.executable, "-m", "pip")
    base = getattr(sys, "_base_executable", sys.executable)
    candidates: list[tuple[str, ...]] = [(base, "-m", "pip")]
    for name in ("pip3", "pip"):
        path = shutil.which(name)
        if path:
            candidates.append((path,))
    for candidate in candidates:
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                [*candidate, "--version"], capture_output=True, timeout=INDEX_S, check=True
            )
            return candidate
    raise LabError(
        f"Versions of {PACKAGE} are fetched and built with pip, which is not installed.",
        "Install it: python3 -m ensurepip",
    )


@functools.cache
def compiler() -> str | None:
    """The first line of the C++ compiler's version; None: unknown."""
    command = os.environ.get("CXX") or "c++"
    with suppress(OSError, subprocess.SubprocessError):
        completed = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
        return printable(completed.stdout.partition("\n")[0].strip())[:120] or None
    return None


def folder() -> Path:
    return cache_folder() / "builds"


@functools.cache
def checksum() -> str:
    """8 digits that change with the CPU, the compiler and the options of a build."""
    parts = [str(machine.describe().cpu), str(compiler()), str(sorted(OPTIONS.items()))]
    parts += [f"{name}={os.environ.get(name, '')}" for name in OF_BUILDS]
    parts.append(rules().read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]


def rules() -> Path:
    """The CMake file of the lab's own build."""
    in_wheel = data_file(RULES, "llama_build")
    if exists(in_wheel):
        return in_wheel
    return in_wheel.parent / "mini_lab_llama_build" / RULES


def path_of(version: str) -> Path:
    """The folder of a version's build for this machine, whether it is there or not."""
    return folder() / f"{PACKAGE}-{version}-{checksum()}"


def is_built(version: str) -> bool:
    return builds.with_libllama(path_of(version)) is not None


def built() -> list[str]:
    """The versions in the cache that were built for this machine, the oldest first."""
    versions = []
    for path in listed(folder(), f"{PACKAGE}-*-{checksum()}"):
        version = path.name.removeprefix(f"{PACKAGE}-").removesuffix(f"-{checksum()}")
        if VERSION.fullmatch(version) and is_built(version):
            versions.append(version)
    return in_order(versions)


def build(version: str, watch: ShowBuild) -> Path:
    """The folder of a version's build, which is made if it is not in the cache.

    LabError with the end of pip's output if it fails.
    """
    path = path_of(version)
    if is_built(version):
        return path
    try:
        folder().mkdir(parents=True, exist_ok=True)
        remove_abandoned()
        with tempfile.TemporaryDirectory(dir=folder(), prefix=UNFINISHED) as temporary:
            target = Path(temporary) / "package"
            run_pip(version, target, watch)
            if builds.with_libllama(target) is None:
                raise LabError(
                    f"The build of {PACKAGE} {version} has no libllama.",
                    "Leave CMAKE_ARGS as it is by default, or choose another version.",
                )
            target.rename(path)
    except OSError as problem:
        raise LabError(
            f"The cache of builds cannot be written to {folder()}: {problem.strerror}.",
            "Free some space, or set MINI_LAB_CACHE to another folder.",
        ) from None
    return path


def remove_abandoned() -> None:
    """Remove what builds have left that were killed: folders older than a build may become."""
    oldest = time.time() - 2 * BUILD_S
    for path in listed(folder(), f"{UNFINISHED}*"):
        if path.stat().st_mtime < oldest:
            shutil.rmtree(path, ignore_errors=True)


def run_pip(version: str, target: Path, watch: ShowBuild) -> None:
    """Fetch and build a version into a folder. LabError with the end of the output."""
    settings = [f"--config-settings=cmake.define.{name}={OPTIONS[name]}" for name in OPTIONS]
    overriding = f"cmake.define.CMAKE_USER_MAKE_RULES_OVERRIDE_CXX={rules()}"
    settings.append(f"--config-settings={overriding}")
    command = [*pip(), "install", "--verbose", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--target", str(target)]
    command += ["--no-binary", PACKAGE, *settings, f"{PACKAGE}=={version}"]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that Ctrl-C can end the compilers too
    )
    try:
        assert process.stdout
        lines = followed(process.stdout, watch)
        status = process.wait(BUILD_S)
    except BaseException:
        end_group(process)
        raise
    if status:
        shown = " | ".join(lines)
        raise LabError(
            f"{PACKAGE} {version} could not be built: {shown}",
            "Its build needs a C++ compiler and CMake. Try another version.",
        )


def followed(output: IO[bytes], watch: ShowBuild) -> list[str]:
    """Report the progress in pip's output until it ends. Returns its last lines with errors."""
    errors: deque[str] = deque(maxlen=3)
    last_lines: deque[str] = deque(maxlen=3)
    for raw in output:
        line = printable(raw[:1000].decode(errors="replace")).strip()
        progress = PROGRESS.search(line)
        if progress:
            watch(int(progress[1]), int(progress[2]))
        elif line:
            last_lines.append(line[:200])
            if "error" in line.lower():
                errors.append(line[:200])
    return list(errors or last_lines)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End pip and the compilers that it started."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
