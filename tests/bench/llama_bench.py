"""llama-bench and llama-batched-bench of the very llama.cpp that the lab runs on, as the other side of benchmarks.

Built once each (5 to 10 minutes on 2 cores) from the source distribution of the installed llama-cpp-python and
kept in the user's cache folder. It runs on the shared libraries inside the installed llama-cpp-python, so
both sides execute the same machine code.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "llama-cpp-python"


def program(name: str = "llama-bench") -> Path:
    """The built program of that name."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = cache / "mini-lab" / f"llama-bench-{version(PACKAGE)}"
    built = home / "build" / "bin" / name
    if not built.exists():
        home.mkdir(parents=True, exist_ok=True)
        _build(home, name)
        for library in (home / "build" / "bin").glob("lib*"):
            if library.name.startswith(("libggml", "libllama.")):
                library.unlink()  # the installed ones shall run, not these
    return built


def run(model: Path, *options: str) -> list[dict[str, Any]]:
    """llama-bench's JSON rows for `options`, such as `-p 512 -n 0 -r 1`."""
    rows: list[dict[str, Any]] = json.loads(_answer(program(), "-m", str(model), "-o", "json", *options))
    return rows


def run_batched(model: Path, *options: str) -> list[dict[str, Any]]:
    """llama-batched-bench's JSON rows for `options`, such as `-npp 256 -ntg 32 -npl 1,4`."""
    text = _answer(program("llama-batched-bench"), "-m", str(model), "--output-format", "jsonl", *options)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def _answer(program: Path, *options: str) -> str:
    """Its stdout, where it runs on the libraries of the installed llama-cpp-python."""
    spec = find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    libraries = str(Path(spec.origin).parent / "lib")
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries, "DYLD_LIBRARY_PATH": libraries}
    command = [str(program), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def _build(folder: Path, name: str) -> None:
    requirement = f"{PACKAGE}=={version(PACKAGE)}"
    uv = os.environ.get("UV", "uv")
    if not list(folder.glob("*.tar.gz")):
        _fetch(folder, uv, requirement)
    (source,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    cmake = ["cmake"] if shutil.which("cmake") else [uv, "tool", "run", "cmake"]
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "LLAMA_CURL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
    }
    defined = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run([*cmake, "-S", str(source), "-B", str(folder / "build"), *defined], check=True)
    jobs = str(os.cpu_count() or 1)
    subprocess.run([*cmake, "--build", str(folder / "build"), "--target", name, "-j", jobs], check=True)


def _fetch(folder: Path, uv: str, requirement: str) -> None:
    """The source distribution, unpacked."""
    pip = [uv, "tool", "run", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder)]
    subprocess.run([*pip, requirement], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


if __name__ == "__main__":
    print(program())
