"""Batches, stalls and speculation, predicted from ceilings and plain runs, and then measured.

    python3 -m uv run python -m tests.bench.experiment_predictions FOLDER batch [OPTIONS...]
    python3 -m uv run python -m tests.bench.experiment_predictions FOLDER stall -p 1024 --chunk 64,256
    python3 -m uv run python -m tests.bench.experiment_predictions FOLDER speculate -l 1-8 --prompt code,table,story

For each model, in a folder of its own inside FOLDER: `lab measure` of two lengths and `lab ceilings`, unless they are
there, then the command, whose table has what was predicted beside what was measured. Below it stands the median error.
A quiet machine, a few minutes a model.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MODELS = "smollm2-135m:Q4_0", "smollm2-135m", "smollm2-135m:Q8_0"


def lab(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "lab", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def main() -> None:
    folder, command, *options = sys.argv[1:]
    for model in MODELS:
        own = Path(folder) / model.replace(":", "-")
        own.mkdir(parents=True, exist_ok=True)
        out = ["-m", model, "--out", str(own)]
        if not list(own.glob("ceilings-*.jsonl")):
            lab("measure", "-p", "64,1024", "-n", "32", "-r", "3", "--no-plot", *out)
            lab("ceilings", *out)
        lab(command, *options, "--no-plot", *out)
        print(lab("show", str(own), "--details"), flush=True)


if __name__ == "__main__":
    main()
