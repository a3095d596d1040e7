"""llama-bench, llama-batched-bench and llama-server of the very llama.cpp that the lab runs on, as
the other side.

Built once each (5 to 10 minutes on 2 cores) from the source distribution of the installed
llama-cpp-python and kept in the user's cache folder. It runs on the shared libraries inside the
installed llama-cpp-python, so both sides execute the same machine code.
"""

from __future__ import annotations

import json
import operator
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

PACKAGE = "llama-cpp-python"

Name = TypeVar("Name")
"""What names a rate: a phase, or a phase and a number of sequences."""


def program(name: str = "llama-bench") -> Path:
    """The built program of that name."""
    folder = home("llama-bench")
    built = folder / "build" / "bin" / name
    if not built.exists():
        _build(folder, name)
        for library in (folder / "build" / "bin").glob("lib*"):
            if library.name.startswith(("libggml", "libllama.")):
                library.unlink()  # the installed ones shall run, not these
    return built


def is_built(name: str) -> bool:
    """Whether the program of that name is there already."""
    return (home("llama-bench") / "build" / "bin" / name).exists()


def source() -> Path:
    """llama.cpp's source, as the installed llama-cpp-python has it."""
    folder = home("llama-bench")
    if not list(folder.glob("*.tar.gz")):
        _fetch(folder, os.environ.get("UV", "uv"), f"{PACKAGE}=={version(PACKAGE)}")
    (unpacked,) = folder.glob("llama_cpp_python-*/vendor/llama.cpp")
    return unpacked


def run(model: Path, *options: str) -> list[dict[str, Any]]:
    """llama-bench's JSON rows for `options`, such as `-p 512 -n 0 -r 1`."""
    text = _answer(
        program(),
        "-m",
        str(model),
        "-o",
        "json",
        *options,
    )
    rows: list[dict[str, Any]] = json.loads(text)
    return rows


def run_batched(model: Path, *options: str) -> list[dict[str, Any]]:
    """llama-batched-bench's JSON rows for `options`, such as `-npp 256 -ntg 32 -npl 1,4`."""
    arguments = ["-m", str(model), "--output-format", "jsonl", *options]
    text = _answer(program("llama-batched-bench"), *arguments)
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def in_turns(
    n_rounds: int,
    ours: Callable[[int], Mapping[Name, float]],
    theirs: Callable[[], Mapping[Name, float]],
    in_round: Callable[[Name, float, float], str],
    in_all: Callable[[Name, float, float, int, str], str],
) -> None:
    """Run both sides in each round, in alternating order; print the rounds and all their ratios.

    `ours` takes the number of the round, from 1. `in_round` describes a rate of both sides;
    `in_all` their medians, the number of rounds, and the median and range of the rounds' ratios.
    """
    our_rounds: list[Mapping[Name, float]] = []
    their_rounds: list[Mapping[Name, float]] = []
    for number in range(1, n_rounds + 1):
        if number % 2:
            our_rounds.append(ours(number))
            their_rounds.append(theirs())
        else:
            their_rounds.append(theirs())
            our_rounds.append(ours(number))
        their_rates = their_rounds[-1]
        parts = [
            in_round(name, rate, their_rates[name]) for name, rate in our_rounds[-1].items()
        ]
        print(f"round {number:2}  {'  '.join(parts)}", flush=True)
    for name in our_rounds[0]:
        our_rates = [rates[name] for rates in our_rounds]
        rates_of_other = [rates[name] for rates in their_rounds]
        ratios = list(map(operator.truediv, our_rates, rates_of_other))
        spread = (
            f"{statistics.median(ratios):.3f} (range {min(ratios):.3f} to {max(ratios):.3f})"
        )
        medians = statistics.median(our_rates), statistics.median(rates_of_other)
        print(in_all(name, *medians, len(ratios), spread))


def environment() -> dict[str, str]:
    """The environment in which a program runs on the libraries of llama-cpp-python."""
    folder = str(libraries())
    return {
        **os.environ,
        "LD_LIBRARY_PATH": folder,
        "DYLD_LIBRARY_PATH": folder,
    }


def libraries() -> Path:
    """The folder of llama-cpp-python's libraries."""
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "lib"


def _answer(program: Path, *options: str) -> str:
    """A program's stdout."""
    command = [str(program), *options]
    done = subprocess.run(
        command,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def home(name: str) -> Path:
    """A folder of the user's cache that keeps a source and what is built of it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "mini-lab" / f"{name}-{version(PACKAGE)}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _build(folder: Path, name: str) -> None:
    cmake = ["cmake"]
    if not shutil.which("cmake"):
        cmake = [os.environ.get("UV", "uv"), "tool", "run", "cmake"]
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "BUILD_SHARED_LIBS": "ON",
        "LLAMA_CURL": "OFF",
        "LLAMA_OPENSSL": "OFF",
        "LLAMA_BUILD_TESTS": "OFF",
        "LLAMA_USE_PREBUILT_UI": "OFF",  # or the server's pages would be fetched from the network
    }
    defines = [f"-D{option}={value}" for option, value in options.items()]
    target = str(folder / "build")
    subprocess.run([*cmake, "-S", str(source()), "-B", target, *defines], check=True)
    jobs = str(os.cpu_count() or 1)
    subprocess.run([*cmake, "--build", target, "--target", name, "-j", jobs], check=True)


def _fetch(
    folder: Path,
    uv: str,
    requirement: str,
) -> None:
    """Get the source distribution and unpack it."""
    pip = [uv, "tool", "run", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), requirement], check=True)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")


if __name__ == "__main__":
    print(program(*sys.argv[1:]))
