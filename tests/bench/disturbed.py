"""A neighbour burns a core for random seconds: what do the lab and llama-bench report?

    python3 -m uv run python -m tests.bench.disturbed [ROUNDS]

Each round measures decode after 10 tokens four times, in this order: lab quiet, llama-bench quiet,
lab disturbed, llama-bench disturbed. Wanted of the lab: its median moves by at most 5 %, or it says
not to trust it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from lab.models import catalog
from tests.bench import llama_bench

N_GEN = 64
N_REPEAT = 8
BURNER = """
import random, sys, time
chance = random.Random(int(sys.argv[1]))
while True:
    time.sleep(chance.uniform(0.2, 2))
    end = time.monotonic() + chance.uniform(0.2, 2)
    while time.monotonic() < end:
        pass
"""


@contextmanager
def burning(seed: int) -> Iterator[None]:
    burner = subprocess.Popen([sys.executable, "-c", BURNER, str(seed)])
    try:
        yield
    finally:
        burner.kill()
        burner.wait()


def lab_tpot() -> tuple[float, list[str]]:
    """The lab's median TPOT in ms, and its warnings."""
    with tempfile.TemporaryDirectory() as folder:
        work = f"measure -p 10 -n {N_GEN} -r {N_REPEAT} --json --no-plot -o".split()
        command = [sys.executable, "-m", "lab", *work, folder]
        done = subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
        )
    answer = json.loads(done.stdout)
    return answer["rows"][0]["tpot_ms"], answer["warnings"]


def llama_bench_tpot() -> float:
    """Milliseconds per token by llama-bench's mean rate."""
    options = [
        "-p",
        "0",
        "-n",
        str(N_GEN),
        "-d",
        "10",
        "-r",
        str(N_REPEAT),
    ]
    (row,) = llama_bench.run(catalog.embedded_path(), *options)
    return 1e3 / float(row["avg_ts"])


def main() -> None:
    n_rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 6
    moved: list[float] = []
    n_silent = 0
    for n in range(n_rounds):
        quiet, warnings_quiet = lab_tpot()
        bench_quiet = llama_bench_tpot()
        with burning(n):
            disturbed, warnings = lab_tpot()
        with burning(n):
            bench_disturbed = llama_bench_tpot()
        change = disturbed / quiet - 1
        bench_change = bench_disturbed / bench_quiet - 1
        moved.append(abs(change))
        if abs(change) > 0.05 and "Unreliable" not in " ".join(warnings):
            n_silent += 1
        in_lab = f"lab {quiet:.2f} -> {disturbed:.2f} ms ({change:+.1%})"
        print(f"round {n + 1}: {in_lab}, llama-bench {bench_change:+.1%}")
        for sentence in warnings_quiet:
            print(f"    quiet: {sentence}", flush=True)
        for sentence in warnings:
            print(f"    disturbed: {sentence}", flush=True)
    print(f"the median moved by {statistics.median(moved):.1%} (most {max(moved):.1%})")
    what = "moved by more than 5 % without a warning not to trust it"
    print(f"{what}: {n_silent} of {n_rounds}; 0 wanted")


if __name__ == "__main__":
    main()
