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
from contextlib import suppress
from pathlib import Path

import psutil

from lab.core import phases
from lab.core.record import Run
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.runner.session import execute, new_results_file
from tests.support.command import start_lab

MB = 1_000_000
WORK = ("-p", 10, "-n", 20, "-r", 20, "--no-plot")  # long enough to see the parent's memory


def spread(values: Sequence[float], unit: str) -> str:
    """The median, range and number of values."""
    median = statistics.median(values)
    span = f"range {min(values):.3g} to {max(values):.3g}, n = {len(values)}"
    return f"median {median:.3g} {unit} ({span})"


def between_tokens(runs: list[Run]) -> None:
    """The harness's own time between two decode steps, and the time to choose a token."""
    gaps_us: list[float] = []
    choices_us: list[float] = []
    for run in runs:
        steps = run.steps.frame()[phases.n_prefill_steps(run) :]
        gaps_us += ((steps.start_ns - steps.end_ns.shift()).dropna() / 1000).to_list()
        choices_us += ((steps.end_ns - steps.ready_ns) / 1000).to_list()
    print(f"between two decode steps   {spread(gaps_us, 'us')}; at most 5 us wanted")
    print(f"choosing the greedy token  {spread(choices_us, 'us')}; at most 30 us wanted")


def sweep(folder: Path) -> list[Run]:
    """A sweep's wall time, once warm, and how much of it was inside llama.cpp."""
    with Worker() as worker:
        plan = make_plan(worker, "10,200,1000", 100, 3)
        runs: list[Run] = []
        wall = 0.0
        before = time.perf_counter()
        for record in execute(
            plan, worker, new_results_file(plan, folder), lambda status: None
        ):
            now = time.perf_counter()
            if not record.run.warmup:
                runs.append(record.run)
                wall += now - before  # since the run before, sentinels included
            before = now
    inside = sum(sum(run.steps.ready_ns) - sum(run.steps.start_ns) for run in runs) / 1e9
    share = f"{100 * inside / wall:.2f} % of a warm sweep of {wall:.1f} s"
    print(f"inside llama.cpp           {share}; at least 97 % wanted")
    return runs


def start_up(folder: Path) -> None:
    """From the command to the loading of the model, and the memory of the parent."""
    waits = []
    peaks = []
    for _ in range(5):
        started = time.perf_counter()
        process = start_lab("measure", *WORK, "-o", folder)
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(("checking the model", "loading the model")), line
        waits.append(time.perf_counter() - started)
        peaks.append(peak_bytes(process) / MB)
    print(f"command to loading         {spread(waits, 's')}; at most 2 s wanted")
    print(f"parent's memory            {spread(peaks, 'MB')}; under 150 MB wanted")


def peak_bytes(process: subprocess.Popen[str]) -> int:
    """The largest memory of a process until its end."""
    parent = psutil.Process(process.pid)
    peak = 0
    while process.poll() is None:
        with suppress(psutil.Error):
            peak = max(peak, parent.memory_info().rss)
        time.sleep(0.02)
    process.communicate()
    return peak


def help_time() -> None:
    command = [sys.executable, "-m", "lab", "--help"]
    times = []
    for _ in range(15):
        started = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    print(f"lab --help                 {spread(times, 's')}; at most 0.25 s wanted")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        between_tokens(sweep(folder))
        start_up(folder)
    help_time()


if __name__ == "__main__":
    main()
