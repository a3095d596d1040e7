"""Step times of batches, predicted before they are measured, on several models.

    python3 -m uv run python -m tests.bench.batch_prediction FOLDER [MODEL...]

For each model, in a folder of its own inside FOLDER: `lab measure` of two lengths, `lab ceilings`, then `lab batch`,
unless they are there. The prediction knows nothing of the batch but its sizes. Prints every row, and the median error.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from lab.core import results
from lab.features import known
from lab.features.limits import probing
from lab.models import catalog

SMALL = ["smollm2-135m:Q4_0", "smollm2-135m", "smollm2-135m:Q8_0"]
MODELS = [*SMALL, "synthetic:llama-3.2-3b:Q4_0"]


def lab(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "lab", *arguments], check=True, capture_output=True)


def measure(model: str, folder: Path) -> None:
    """What is still missing of one model."""
    out = ["-m", model, "--out", str(folder)]
    small = model.partition(":")[0] == catalog.DEFAULT
    if not list(folder.glob("ceilings-*.jsonl")):
        sizes = ["-p", "64,512", "-n", "32", "-r", "3"] if small else ["-p", "64,256", "-n", "8", "-r", "1"]
        lab("measure", *sizes, "--no-plot", *out)
        lab("ceilings", *out)
    if not any(record.run.batch for record in results.read([folder]).records):
        sizes = ["-p", "256", "-n", "32", "-r", "3"] if small else ["-p", "64", "-n", "8", "-r", "1", "--shared-prompt"]
        lab("batch", *sizes, "--no-plot", *out)


def main() -> None:
    errors: list[float] = []
    print("model | sequences | measured ms | predicted ms | predicted / measured")
    for model in sys.argv[2:] or MODELS:
        folder = Path(sys.argv[1]) / model.replace(":", "-")
        folder.mkdir(parents=True, exist_ok=True)
        measure(model, folder)
        (section,) = known.experiments_of(results.read([folder]).records, probing.kept(folder))
        for row in section.rows:
            ratio = row.expected_s / row.step_s
            errors.append(abs(ratio - 1))
            print(
                f"{model} | {row.n_seq} | {1e3 * row.step_s:.4g} | {1e3 * row.expected_s:.4g} | {ratio:.3f}", flush=True
            )
    print(f"median error {statistics.median(errors):.1%}, largest {max(errors):.1%}, of {len(errors)}; 10 % wanted")


if __name__ == "__main__":
    main()
