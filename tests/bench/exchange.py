"""The lab's exports in llama.cpp's own compare script, and llama-bench's output in lab compare.

    python3 -m uv run --with gitpython --with tabulate python -m tests.bench.exchange

Runs the real llama-bench and the lab on the same tests, then llama.cpp's scripts/compare-llama-bench.py on
both outputs in every format that it reads, and `lab import` and `lab compare` on llama-bench's.
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

N_PROMPT = 128
N_GEN = 32
N_REPEAT = 5
SECOND = "1ab1ab1"


def lab(*arguments: str | Path) -> str:
    command = [sys.executable, "-m", "lab", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    program = llama_bench.program()
    (script,) = program.parents[2].glob("*/vendor/llama.cpp/scripts/compare-llama-bench.py")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / catalog.embedded_path().name
        model.symlink_to(catalog.embedded_path())
        os.chdir(folder)  # llama-bench keeps the path as it was given; the lab the file's name
        options = ["-p", str(N_PROMPT), "-n", "0", "-r", str(N_REPEAT), "-ngl", "0"]
        rows = llama_bench.run(Path(model.name), *options)
        deep = ["-p", "0", "-n", str(N_GEN), "-d", str(N_PROMPT), "-r", str(N_REPEAT), "-ngl", "0"]
        rows += llama_bench.run(Path(model.name), *deep)
        (folder / "bench.json").write_text(json.dumps(rows))
        measure = [
            "-p",
            str(N_PROMPT),
            "-n",
            str(N_GEN + 1),
            "-r",
            str(N_REPEAT),
            "--prompt",
            "random",
        ]
        lab("measure", "-m", model.name, *measure, "-o", folder / "lab", "--no-plot")
        exports = {kind: folder / f"lab.{kind}" for kind in ("json",)}
        for kind, path in exports.items():
            lab("export", folder / "lab", "--as", kind, "-o", path)
        print(exports["md"].read_text())
        commit = rows[0]["build_commit"]
        text = exports["json"].read_text()
        assert commit in text
        exports["json"].write_text(text.replace(commit, SECOND))  # the script compares two commits
        command = [
            sys.executable,
            str(script),
            "--tool",
            "llama-bench",
            "-i",
            "bench.json",
            "-i",
            "lab.json",
        ]
        answer = subprocess.run(
            [*command, "-b", commit, "-c", SECOND], check=False, capture_output=True, text=True
        )
        print(
            f"compare-llama-bench.py: exit {answer.returncode}\n{answer.stdout}{answer.stderr[-800:]}"
        )
        lab("import", "bench.json", "-o", folder / "imported")
        print(lab("compare", folder / "imported", folder / "lab", "--no-plot"))


if __name__ == "__main__":
    main()
