"""The lab's exports in llama.cpp's own compare script, and llama-bench's output in lab compare.

    python3 -m uv run --with gitpython --with tabulate python -m tests.bench.exchange

Runs the real llama-bench and the lab on the same tests, then llama.cpp's scripts/compare-llama-bench.py on
both outputs in every format that it reads, and `lab import` and `lab compare` on llama-bench's.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lab.features.exchange import llama_bench_format
from lab.models import catalog
from tests.bench import llama_bench

N_PROMPT, N_GEN, N_REPEAT = 128, 32, 5
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
        measure = ["-p", str(N_PROMPT), "-n", str(N_GEN + 1), "-r", str(N_REPEAT), "--prompt", "random"]
        lab("measure", "-m", model.name, *measure, "-o", folder / "lab", "--no-plot")
        exports = {kind: folder / f"lab.{kind}" for kind in ("json", "jsonl", "csv", "md")}
        for kind, path in exports.items():
            lab("export", folder / "lab", "--as", kind, "-o", path)
        print(exports["md"].read_text())
        commit = rows[0]["build_commit"]
        for kind in ("json", "jsonl", "csv"):  # the script compares two commits: call the lab's the second
            text = exports[kind].read_text()
            assert commit in text
            exports[kind].write_text(text.replace(commit, SECOND))
        (folder / "both.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows) + exports["jsonl"].read_text()
        )
        columns = llama_bench_format.COLUMNS
        with (folder / "bench.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore", quoting=csv.QUOTE_ALL)
            writer.writeheader()
            writer.writerows({k: int(v) if isinstance(v, bool) else v for k, v in row.items()} for row in rows)
        inputs = {
            "json": ["-i", "bench.json", "-i", "lab.json"],
            "jsonl": ["-i", "both.jsonl"],
            "csv": ["-i", "bench.csv", "-i", "lab.csv"],
        }
        for kind, arguments in inputs.items():
            command = [sys.executable, str(script), "--tool", "llama-bench", *arguments, "-b", commit, "-c", SECOND]
            answer = subprocess.run(command, check=False, capture_output=True, text=True)
            print(f"compare-llama-bench.py on {kind}: exit {answer.returncode}\n{answer.stdout}{answer.stderr[-800:]}")
        lab("import", "bench.json", "-o", folder / "imported")
        print(lab("compare", folder / "imported", folder / "lab", "--no-plot"))


if __name__ == "__main__":
    main()
