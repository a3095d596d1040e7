"""What the lab itself costs: between two tokens, in a sweep, at its start, in memory.

python3 -m uv run python -m tests.bench.harness
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from lab.core import phases
from lab.core.record import Run
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.runner.session import execute, new_results_file
from tests.conftest import start_lab

MB = 1_000_000


def spread(values: Sequence[float], unit: str) -> str:
    low = min(values)
    high = max(values)
    return f"median {statistics.median(values):.3g} {unit} (range {low:.3g} to {high:.3g}, n = {len(values)})"


def between_tokens(runs: list[Run]) -> None:
    """The harness's own time between two decode steps, and the time to choose a token."""
    gaps = []
    choices = []
    for run in runs:
        n = phases.n_prefill_steps(run)
        between = zip(run.steps.end_ns, run.steps.start_ns[1:], strict=False)
        gaps += [(start - end) / 1000 for end, start in between][n:]
        steps = run.steps
        choices += [
            (end - ready) / 1000
            for ready, end in zip(steps.ready_ns[n:], steps.end_ns[n:], strict=True)
        ]
    print(f"between two decode steps   {spread(gaps, 'us')}; at most 5 us wanted")
    print(f"choosing the greedy token  {spread(choices, 'us')}; at most 30 us wanted")


def sweep(folder: Path) -> list[Run]:
    """A sweep's wall time, once warm, and how much of it was inside llama.cpp."""
    with Worker() as worker:
        plan = make_plan(worker, "10,200,1000", 100, 3)
        runs: list[Run] = []
        wall = 0.0
        before = time.perf_counter()
        for record in execute(plan, worker, new_results_file(plan, folder), lambda status: None):
            now = time.perf_counter()
            if (
                not record.run.warmup
            ):  # of these, what passed since the run before, sentinels included
                runs.append(record.run)
                wall += now - before
            before = now
    inside = sum(sum(run.steps.ready_ns) - sum(run.steps.start_ns) for run in runs) / 1e9
    print(
        f"inside llama.cpp           {100 * inside / wall:.2f} % of a warm sweep of {wall:.1f} s; at least 97 % wanted"
    )
    return runs


def start_up(folder: Path) -> None:
    """From the command to the loading of the model: all that is not loading, warming up or measuring."""
    waits = []
    peaks = []
    for _ in range(5):
        begun = time.perf_counter()
        process = start_lab(
            "measure", "-p", "10", "-n", "20", "-r", "20", "--no-plot", "-o", folder
        )
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(("checking the model", "loading the model")), line
        waits.append(time.perf_counter() - begun)
        parent = psutil.Process(process.pid)
        peak = 0
        while process.poll() is None:
            try:
                peak = max(peak, parent.memory_info().rss)
            except psutil.Error:
                break
            time.sleep(0.02)
        process.communicate()
        peaks.append(peak / MB)
    print(f"command to loading         {spread(waits, 's')}; at most 2 s wanted")
    print(f"parent's memory            {spread(peaks, 'MB')}; under 150 MB wanted")


def help_time() -> None:
    command = [sys.executable, "-m", "lab", "--help"]
    times = []
    for _ in range(15):
        begun = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begun)
    print(f"lab --help                 {spread(times, 's')}; at most 0.25 s wanted")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        between_tokens(sweep(folder))
        start_up(folder)
    help_time()


if __name__ == "__main__":
    main()
