"""The lab on a real offload path without a GPU: llama.cpp's Vulkan on Mesa's lavapipe, built and run from nothing.

    python -m tests.bench.vulkan FOLDER [STEP]...

Needs Debian 12 or a later one (or Ubuntu), root where a package is missing, and the network: packages and headers come
from the system's package index, llama.cpp from the source distribution of the installed llama-cpp-python. What is there
is not made again; the build takes some minutes on 2 cores, all runs about 15 more. lavapipe computes on the CPU, at
some 2 tokens a second: the code path is that of a GPU, the figures are nobody's. A line is printed for each STEP (all
of them without one); where it went otherwise than it should, with all that the lab printed, and the exit status is 1.
Results files, plots and vulkan.json (the steps) go to FOLDER.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import psutil

from tests.bench import llama_bench
from tests.bench.steps import Step, walk

PACKAGES = ("cmake", "g++", "glslc", "libvulkan-dev", "spirv-headers", "mesa-vulkan-drivers")
NEWER = "trixie"
"""The Debian whose Vulkan headers are new enough, where the system's own are not."""

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"

NEEDED = "LayerSettingEXT"
"""What of the headers ggml-vulkan uses that those of Debian 12 do not have."""

DEVICE = {"GGML_VK_VISIBLE_DEVICES": "0"}
"""ggml passes over Vulkan devices of type CPU unless they are named."""

SIZES = ("--prompt-len", "10,50", "--gen", "8", "--repeat", "1")
LIMIT_S = 900


def libraries() -> Path:
    """The folder of llama.cpp's libraries with Vulkan, built where they are missing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mini-lab"
    home = cache / f"vulkan-{version(llama_bench.PACKAGE)}"
    built = home / "build" / "bin"
    if not (built / "libllama.so").exists():
        home.mkdir(parents=True, exist_ok=True)
        install(PACKAGES)
        _build(home, _headers(home))
    return built


def install(packages: Sequence[str]) -> None:
    """Debian's packages, where one is missing."""
    asked = subprocess.run(["dpkg", "-s", *packages], capture_output=True, check=False)
    if asked.returncode:
        subprocess.run(["apt-get", "update"], check=True)
        subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", *packages], check=True)


def _headers(home: Path) -> Path:
    """A folder with Vulkan headers that are new enough: the system's, else those of a newer Debian's package."""
    system, unpacked = Path("/usr/include"), home / "headers" / "usr" / "include"
    for folder in (system, unpacked):
        if any(NEEDED in file.read_text() for file in (folder / "vulkan").glob("vulkan_structs.hpp")):
            return folder
    apt = home / "apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True, exist_ok=True)
    (apt / "sources.list").write_text(f"deb [signed-by={KEYS}] {_mirror()} {NEWER} main\n")
    options = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "root",
    }
    get = ["apt-get", *(f"-o{name}={value}" for name, value in options.items())]
    subprocess.run([*get, "update"], check=True)
    subprocess.run([*get, "download", "libvulkan-dev"], cwd=home, check=True)
    (package,) = home.glob("libvulkan-dev_*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(home / "headers")], check=True)
    shutil.rmtree(apt)
    return unpacked


def _mirror() -> str:
    """Where this system gets its packages from."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    return next(uri for uri, _, codename in (line.partition(" ") for line in lines) if "-" not in codename)


def _build(home: Path, headers: Path) -> None:
    """The options of the installed build, and Vulkan."""
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "LLAMA_CURL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "GGML_RPC": "ON",
        "GGML_RPC_RDMA": "OFF",
        "GGML_VULKAN": "ON",
        "Vulkan_INCLUDE_DIR": str(headers),
    }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-S", str(llama_bench.source()), "-B", str(home / "build"), *defined], check=True)
    jobs = str(os.cpu_count() or 1)
    subprocess.run(["cmake", "--build", str(home / "build"), "--target", "llama", "-j", jobs], check=True)


def lab(*words: str, **environment: str) -> tuple[int, str]:
    """The exit status of a command of the lab on the device, and all that it printed."""
    command = [sys.executable, "-m", "lab", *words]
    done = subprocess.run(
        command,
        env={**os.environ, **DEVICE, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout


def killed(lib: Path, out: Path) -> tuple[int, str]:
    """What a measurement does whose engine is killed in its first step."""
    sizes = ("--prompt-len", "8", "--gen", "2", "--repeat", "1", "--no-plot")
    command = [sys.executable, "-m", "lab", "measure", *sizes, "--lib", str(lib), "--out", str(out)]
    process = subprocess.Popen(
        command, env={**os.environ, **DEVICE}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (engine := _busy(process.pid)) and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.2)
        if engine:
            engine.kill()
        text = process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()
    return process.returncode, text


def _busy(pid: int) -> psutil.Process | None:
    """The engine's process, once it has computed for seconds (loading a small model takes less)."""
    children = psutil.Process(pid).children(recursive=True)
    return next((child for child in children if sum(child.cpu_times()[:2]) > 8), None)


def steps(lib: Path, out: Path) -> dict[str, Step]:
    """By name: what is run, the exit status that it should have, and words that it should print."""
    on = ("--lib", str(lib), "--out", str(out))
    small = {"GGML_VK_FORCE_MAX_BUFFER_SIZE": str(20_000_000)}
    two = ("--blocks", "1", "--prompt-len", "32", "--gen", "4", "--no-plot")
    return {
        "machine": (lambda: lab("machine", "--lib", str(lib)), 0, "(software"),
        "main job": (lambda: lab("measure", *SIZES, *on), 0, "(software"),
        "partial offload": (lambda: lab("measure", *SIZES, "-ngl", "5", *on), 0, "(software"),
        "CPU against device": (lambda: lab("ab", "-ngl 0", "-ngl 99", *two, *on), 0, "-ngl 99"),
        "build against build": (
            lambda: lab("ab", "", f"--lib {lib}", "-ngl", "0", *two, "--out", str(out)),
            0,
            "build/bin",
        ),
        "ceilings": (lambda: lab("ceilings", "-u", "32", "--types", "Q4_1", *on), 0, "Q4_1"),
        "explain": (lambda: lab("explain", str(out), "--ceilings", str(out)), 0, "of ceiling"),
        "memory refused": (lambda: lab("measure", *SIZES, *on, **small), 1, "failed to allocate Vulkan0 buffer"),
        "engine killed": (lambda: killed(lib, out), 1, "SIGKILL"),
    }


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    walk(steps(libraries(), out), sys.argv[2:], out / "vulkan.json")


if __name__ == "__main__":
    main()
