"""lab start --memory: does the range hold for limits, and for a model, that were left out?

python3 -m uv run python -m tests.bench.start_memory measure MODEL REPEAT FOLDER
python3 -m uv run python -m tests.bench.start_memory judge FOLDER
python3 -m uv run python -m tests.bench.start_memory disk BYTES_PER_SECOND

`measure` decodes at 60, 80, 90, 100 and 120 % of the file, and adds to a folder of results, which
`judge` reads. `disk` plants a slow disk (FUSE, root only) below a copy of the embedded model.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import lab
from lab.core import results
from lab.core.lists import grouped
from lab.core.stats import Range
from lab.features.start import memory_figures
from lab.models import catalog
from lab.roofline import paging
from lab.roofline.paging import MemoryLine
from lab.show.wording import digits, percent
from tests.bench.slow_disk import slow_disk

LIMITS = "60%,80%,90%,100%,120%"
MOST_ERROR = 0.10
LEAST_INSIDE = 0.90
# Engines have one thread: several would wait for each other if something else took a core.


def judge(folder: Path) -> bool:
    """Whether 90 % of the starts lie in their ranges, and no start was left in the page cache."""
    lines = [line for line in results.read([folder]).findings if isinstance(line, MemoryLine)]
    limited = [line for line in lines if line.limit_bytes is not None]
    dropped = [line for line in limited if line.is_confirmed]
    print(
        f"{len(dropped)} of {len(limited)} starts with a limit had their file dropped before"
    )
    print("a limit left out, in its session:")
    of_limits = []
    for of_session in grouped(lines, lambda line: line.session).values():
        for limit in memory_figures.memory_limits(of_session):
            if limit.expected_s is not None:
                of_limits += report(of_session[0], limit.room, limit.expected_s, limit)
    print("a model left out:")
    of_models = []
    for name, of_model in grouped(lines, lambda line: line.model_name).items():
        training = [line for line in lines if line.model_name != name]
        law = paging.learn(training)
        compute_s = paging.compute_span(of_model)
        if law is None or compute_s is None:
            continue
        for limit in memory_figures.memory_limits(of_model):
            if limit.limit_bytes is not None:
                expected_s = law.token_s(of_model[0].file_bytes, limit.room, compute_s)
                of_models += report(of_model[0], limit.room, expected_s, limit)
    return all(
        [
            passes("limits left out", of_limits),
            passes("models left out", of_models),
            all(line.is_confirmed for line in dropped),
        ]
    )


def report(
    line: MemoryLine,
    room: float,
    expected_s: Range,
    limit: memory_figures.MemoryLimit,
) -> list[bool]:
    """Print a limit, and say of each start whether it lies in the range."""
    times_s = limit.starts.token_s
    inside = times_s.between(*expected_s)
    share = (limit.limit_bytes or 0) / line.file_bytes
    reads = limit.starts.read_share
    print(
        f"  {line.model_name} at {percent(share)} (room {percent(room)}): "
        f"{digits(times_s.median())} s ({digits(times_s.min())} to {digits(times_s.max())}), "
        f"range {digits(expected_s[0])} to {digits(expected_s[1])}, reads "
        f"{percent(reads.min())} to {percent(reads.max())}; {inside.sum()} of {len(inside)} inside"
    )
    return [bool(value) for value in inside]


def passes(name: str, inside: Sequence[bool]) -> bool:
    if not inside:
        print(f"{name}: nothing to judge")
        return False
    share = sum(inside) / len(inside)
    print(f"{name}: {sum(inside)} of {len(inside)} starts inside ({percent(share)})")
    return share >= LEAST_INSIDE


def check_disk(rate: float) -> bool:
    """Whether the wait of a token on a disk of a planted speed lies between its two bounds.

    They follow from the planted speed alone: the part of the file without room, and the whole.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source = folder / "smollm2-135m.gguf"
        shutil.copyfile(catalog.embedded_path(), source)
        mount = folder / "disk"
        mount.mkdir()
        with slow_disk(source, mount, rate) as path:
            # The process's own memory is about two thirds of this file
            lines = lab.start(str(path), memory="110%,130%", repeat=2, out=folder, threads=1)
    memory_lines = [line for line in lines if isinstance(line, MemoryLine)]
    free = [line.token_s for line in memory_lines if line.limit_bytes is None]
    compute_s = statistics.median(free)
    checks = []
    for line in memory_lines:
        if line.limit_bytes is None or line.room is None or line.disk_s is None:
            continue
        whole_s = line.file_bytes / rate
        wait_s = line.token_s - compute_s
        least_s = max(0.0, 1 - line.room) * whole_s
        speed_error = line.file_bytes / line.disk_s / rate - 1
        print(
            f"room {percent(line.room)}: waits {digits(wait_s)} s; between {digits(least_s)} s "
            f"(missing part) and {digits(whole_s)} s (whole file) at the planted speed; the "
            f"speed in order is found {percent(speed_error)} off"
        )
        is_within = (1 - MOST_ERROR) * least_s <= wait_s <= (1 + MOST_ERROR) * whole_s
        checks += [is_within, abs(speed_error) <= MOST_ERROR, line.is_confirmed]
    return bool(checks) and all(checks)


def main() -> None:
    task = sys.argv[1]
    if task == "measure":
        model, repeat, folder = sys.argv[2:]
        lab.start(model, memory=LIMITS, repeat=int(repeat), out=folder, threads=1)
        return
    if task == "judge":
        sys.exit(not judge(Path(sys.argv[2])))
    sys.exit(not check_disk(float(sys.argv[2])))


if __name__ == "__main__":
    main()
