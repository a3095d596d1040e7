"""A folder of 2,000 runs and 1,000,000 steps: how long do show and compare take, and how much memory?

python3 -m uv run python -m tests.bench.scale
"""

from __future__ import annotations

import dataclasses
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.core.lines import to_json
from lab.core.record import DECODE, PREFILL, Record, Steps
from tests.conftest import MACHINE, make_record, make_run

N_FILES = 20
N_RUNS = 100
N_STEPS = 500
N_TURNS = 5


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(N_FILES):
            lines = [to_json(record(number, i)) + "\n" for i in range(N_RUNS)]
            (Path(folder) / f"{number:02}.jsonl").write_text("".join(lines))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        print(
            f"{N_FILES * N_RUNS:,} runs, {N_FILES * N_RUNS * N_STEPS:,} steps, {size / 1e6:.0f} MB of JSON"
        )
        for command in (["show", folder], ["compare", folder, "--no-plot"]):
            times = list[float]()
            for _ in range(N_TURNS):
                started = time.monotonic()
                subprocess.run(
                    [sys.executable, "-m", "lab", *command], check=True, stdout=subprocess.DEVNULL
                )
                times.append(time.monotonic() - started)
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            print(
                f"lab {command[0]}: median {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f}), "
                f"peak {peak / 1e6:.0f} MB; at most 3 s and 1 GB wanted"
            )


def record(number: int, i: int) -> Record:
    """A run of 10 prefill and 490 decode steps, on one of 5 machines, at one of 4 lengths."""
    chance = random.Random(1000 * number + i)
    n_prompt = (512, 1024, 2048, 4096)[i % 4]
    now = 0
    stamps = []
    for _ in range(N_STEPS):
        start = now
        now = now + chance.randrange(7_000_000, 9_000_000)
        stamps.append((start, now, now + 20_000))
        now += 23_000
    n_prefill = 10
    n_gen = N_STEPS - n_prefill + 1
    sizes = [n_prompt // n_prefill] * (n_prefill - 1)
    sizes.append(n_prompt - sum(sizes))
    start_ns, ready_ns, end_ns = zip(*stamps, strict=True)
    steps = Steps(
        (PREFILL,) * n_prefill + (DECODE,) * (n_gen - 1),
        (*sizes, *[1] * (n_gen - 1)),
        (*[sum(sizes[:k]) for k in range(n_prefill)], *range(n_prompt, n_prompt + n_gen - 1)),
        start_ns,
        ready_ns,
        end_ns,
        (1,) * N_STEPS,
        (0,) * (n_prefill - 1) + (1,) * n_gen,
    )
    tokens = tuple(chance.randrange(49152) for _ in range(n_gen))
    run = dataclasses.replace(make_run(n_prompt, n_gen, i // 4), steps=steps, token_ids=tokens)
    machine = dataclasses.replace(MACHINE, cpu=f"CPU {number % 5}")
    return make_record(run, machine=machine, session=f"session-{number}")


if __name__ == "__main__":
    main()
