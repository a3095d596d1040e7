"""How long do show and compare take for 2,000 runs and 1,000,000 steps, and how much memory?

python3 -m uv run python -m tests.bench.scale
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.core import script as scripts
from lab.core.lines import to_json
from lab.core.record import Record, Steps
from tests.support.records import MACHINE, make_record, make_run

N_FILES = 20
N_RUNS = 100
N_PREFILL_STEPS = 10
N_STEPS = 500
N_REPEAT = 5
LENGTHS = (512, 1024, 2048, 4096)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for number in range(N_FILES):
            records = [made_up_record(number, index) for index in range(N_RUNS)]
            lines = "".join(f"{to_json(record)}\n" for record in records)
            (Path(folder) / f"{number:02}.jsonl").write_text(lines)
        n_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        n_runs = N_FILES * N_RUNS
        print(f"{n_runs:,} runs, {n_runs * N_STEPS:,} steps, {n_bytes / 1e6:.0f} MB of JSON")
        time_command("show", folder)
        time_command("compare", folder)


def time_command(*arguments: str) -> None:
    """Print how long a command takes, and the largest memory of all commands so far."""
    command = [sys.executable, "-m", "lab", *arguments]
    times = []
    for _ in range(N_REPEAT):
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        times.append(time.monotonic() - started)
    peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e6
    median = f"median {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})"
    print(f"lab {arguments[0]}: {median}, peak {peak_mb:.0f} MB; at most 3 s and 1 GB wanted")


def made_up_record(number: int, index: int) -> Record:
    """A run of 10 prefill and 490 decode steps, on one of 5 machines, at one of 4 lengths."""
    generator = random.Random(1000 * number + index)
    n_prompt = LENGTHS[index % len(LENGTHS)]
    n_gen = N_STEPS - N_PREFILL_STEPS + 1
    steps = made_up_steps(generator, n_prompt, n_gen)
    token_ids = tuple(generator.choices(range(49152), k=n_gen))
    run = make_run(n_prompt, n_gen, index // len(LENGTHS))
    run = dataclasses.replace(run, steps=steps, token_ids=token_ids)
    machine = dataclasses.replace(MACHINE, cpu=f"CPU {number % 5}")
    return make_record(run, machine=machine, session=f"session-{number}")


def made_up_steps(
    generator: random.Random,
    n_prompt: int,
    n_gen: int,
) -> Steps:
    """Steps of 7 to 9 ms, 20 us to choose a token, and 3 us between the steps."""
    n_ubatch = -(-n_prompt // N_PREFILL_STEPS)
    script = scripts.run([0] * n_prompt, n_gen, n_ubatch)
    shapes = list(scripts.shapes(script))
    lasted_ns = [generator.randrange(7_000_000, 9_000_000) for _ in shapes]
    gaps_ns = [0, *(ns + 23_000 for ns in lasted_ns[:-1])]
    start_ns = tuple(itertools.accumulate(gaps_ns))
    ready_ns = tuple(start + ns for start, ns in zip(start_ns, lasted_ns, strict=True))
    end_ns = tuple(ready + 20_000 for ready in ready_ns)
    columns = dict(zip(scripts.Shape._fields, zip(*shapes, strict=True), strict=True))
    return Steps(
        start_ns=start_ns,
        ready_ns=ready_ns,
        end_ns=end_ns,
        **columns,
    )


if __name__ == "__main__":
    main()
