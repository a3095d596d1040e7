"""The lab's export in llama.cpp's own compare script, and llama-bench's output in lab compare.

    python3 -m uv run --with gitpython --with tabulate python -m tests.bench.exchange

Runs the real llama-bench and the lab on the same tests, then llama.cpp's compare-llama-bench.py on
both outputs, and `lab import` and `lab compare` on llama-bench's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.models import catalog
from tests.bench import llama_bench

N_PROMPT = "128"
N_GEN = 32
N_REPEAT = "5"
SECOND_COMMIT = "1ab1ab1"  # the script compares two commits


def lab(*arguments: str | Path) -> str:
    """What a command of the lab prints."""
    command = [sys.executable, "-m", "lab", *map(str, arguments)]
    return subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def measure_with_llama_bench(model: Path) -> str:
    """Write bench.json with a test of prefill and one of decode; returns the build's commit."""
    shared = ["-r", N_REPEAT, "-ngl", "0"]
    rows = llama_bench.run(model, "-p", N_PROMPT, "-n", "0", *shared)
    rows += llama_bench.run(model, "-p", "0", "-n", str(N_GEN), "-d", N_PROMPT, *shared)
    Path("bench.json").write_text(json.dumps(rows))
    return str(rows[0]["build_commit"])


def measure_with_the_lab(model: Path, commit: str) -> None:
    """Write lab.json with the same tests, as if they were of another commit."""
    lengths = ["-p", N_PROMPT, "-n", str(N_GEN + 1), "-r", N_REPEAT]
    lab("measure", "-m", model, *lengths, "--prompt", "random", "-o", "lab", "--no-plot")
    exported = lab("export", "lab", "--as", "json")
    assert commit in exported
    Path("lab.json").write_text(exported.replace(commit, SECOND_COMMIT))


def compare_with_llama_cpp(commit: str) -> None:
    """Print what llama.cpp's script says of both files."""
    root = llama_bench.program().parents[2]
    (script,) = root.glob("*/vendor/llama.cpp/scripts/compare-llama-bench.py")
    files = ["-i", "bench.json", "-i", "lab.json"]
    commits = ["-b", commit, "-c", SECOND_COMMIT]
    command = [sys.executable, str(script), "--tool", "llama-bench", *files, *commits]
    ended = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
    )
    print(f"compare-llama-bench.py: exit {ended.returncode}")
    print(f"{ended.stdout}{ended.stderr[-800:]}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # llama-bench keeps the path as it was given; the lab the file's name
        model = Path(catalog.embedded_path().name)
        model.symlink_to(catalog.embedded_path())
        commit = measure_with_llama_bench(model)
        measure_with_the_lab(model, commit)
        compare_with_llama_cpp(commit)
        lab("import", "bench.json", "-o", "imported")
        print(lab("compare", "imported", "lab"))


if __name__ == "__main__":
    main()
