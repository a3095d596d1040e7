"""lab start against planted truths: the age of the engine's process, and disks of planted speed.

python3 -m uv run python -m tests.bench.start [REPEAT]

Disks need root on Linux with FUSE; without them only the stages are checked.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from lab.core.script import Script
from lab.errors import LabError
from lab.features.start import figures, measuring
from lab.features.start.lines import COLD, LOAD, StartLine
from lab.features.start.measuring import Engines
from lab.models import catalog
from lab.process.wire import Outcome, Progress
from lab.process.worker import Worker
from lab.runner.session import new_results_file
from lab.show.wording import percent
from tests.bench.slow_disk import slow_disk

RATES = (30e6, 60e6)  # bytes per second
MOST_GAP = 0.03
MOST_ERROR = 0.10
N_PROMPT = 16


class AgedWorker(Worker):
    """An engine that notes, by the clock of the day, how long ago it was asked for, and how old its
    process is, when a run has ended."""

    walls_s: ClassVar[list[float]] = []
    ages_s: ClassVar[list[float]] = []

    def __init__(self) -> None:
        self.asked_at = time.time()
        super().__init__()

    def run(self, script: Script, watch: Callable[[Progress], None]) -> Outcome:
        outcome = super().run(script, watch)
        now = time.time()
        self.walls_s.append(now - self.asked_at)
        self.ages_s.append(age_s(self.pid))
        return outcome


def age_s(pid: int) -> float:
    """The age of a process, to 10 ms. (psutil's depends on the time of boot in whole seconds.)"""
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return now - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def starts(path: Path, repeat: int, folder: Path, engines: Engines) -> list[StartLine]:
    plan = measuring.make_start_plan(str(path), N_PROMPT, repeat, lambda *_: None, {})
    results = new_results_file(plan, folder)
    return list(measuring.execute(plan, [True, False], results, engines=engines))


def check_stages(path: Path, repeat: int, folder: Path) -> bool:
    """Whether the stages add up to the wall time of a fresh engine up to the first token."""
    AgedWorker.walls_s.clear()
    AgedWorker.ages_s.clear()
    lines = starts(path, repeat, folder, Engines(new_worker=AgedWorker))
    of_prefill = slice(1, None, 3)  # of warm-up, first prefill and second prefill
    gaps = []
    age_gaps = []
    walls_s = AgedWorker.walls_s[of_prefill]
    ages_s = AgedWorker.ages_s[of_prefill]
    for line, wall_s, age_s in zip(lines, walls_s, ages_s, strict=True):
        gaps.append(line.first_token_s / wall_s - 1)
        age_gaps.append(line.first_token_s / age_s - 1)
    worst = max(map(abs, gaps))
    print(f"{len(lines)} starts: stages against the wall time: worst {percent(worst)} off")
    print(
        f"  against the age of the engine's process: median {percent(statistics.median(age_gaps))} "
        f"off ({percent(min(age_gaps))} to {percent(max(age_gaps))})"
    )
    return worst <= MOST_GAP


def check_disk(source: Path, rate: float, repeat: int, folder: Path) -> bool:
    """Whether a planted speed, and the wait that it causes, are found."""
    mount = folder / f"disk-{rate:.0f}"
    mount.mkdir()
    with slow_disk(source, mount, rate) as path:
        lines = starts(path, repeat, folder, Engines())
    n_cold = len([line for line in lines if line.cache == COLD and line.is_confirmed])
    table = figures.starts_table(lines)
    n_bytes = source.stat().st_size
    truth_s = n_bytes / rate
    print(
        f"disk of {rate / 1e6:.0f} MB/s: the file takes {truth_s:.2f} s; {n_cold} cold starts"
    )
    results = []
    for is_mapped in (True, False):
        wait = figures.disk_wait(table, n_bytes, is_mapped)
        assert wait is not None, "the pages did not leave the cache"
        speed_error = 1e9 * wait.disk_gbps / rate - 1
        wait_error = wait.seconds / truth_s - 1
        warm = table[(table.is_mapped == is_mapped) & (table.cache != COLD)]
        load_s = float(warm[LOAD].median())
        least_s = truth_s - load_s  # what can overlap does
        print(
            f"  mmap {is_mapped!s:5}: speed found {percent(speed_error)} off; wait "
            f"{wait.seconds:.2f} s ({wait.low_s:.2f} to {wait.high_s:.2f}), "
            f"{percent(wait_error)} off; at least {least_s:.2f} s of it cannot overlap"
        )
        is_within = (1 - MOST_ERROR) * least_s <= wait.seconds <= (1 + MOST_ERROR) * truth_s
        results += [abs(speed_error) <= MOST_ERROR, is_within]
        if not is_mapped:
            results.append(abs(wait_error) <= MOST_ERROR)
    return all(results)


def main() -> None:
    repeat = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "smollm2-135m.gguf"  # nobody else has it mapped
        shutil.copyfile(catalog.embedded_path(), source)
        results = [check_stages(source, repeat, folder)]
        for rate in RATES:
            try:
                results.append(check_disk(source, rate, repeat, folder))
            except (OSError, LabError) as problem:
                print(f"disk of {rate / 1e6:.0f} MB/s: not tried: {problem}")
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
