"""Counted against llama.cpp: python -m tests.bench.architectures [ARCH ...]

For each architecture that the lab can make: a small model with random weights is written, loaded
and run. Its bytes, its cache and the FLOPs of its traced operations are compared with the count.
Wanted: within 2 %.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from lab.errors import LabError
from lab.process.worker import Worker
from tests.support import counted, miniature


def main() -> None:
    architectures = sys.argv[1:] or [*miniature.NAMES, *miniature.CHANGES]
    n_equal = 0
    print("| architecture | figures | largest error | not within 2 % |")
    print("| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for arch in architectures:
            line, is_equal = row(arch, Path(folder))
            n_equal += is_equal
            print(line, flush=True)
    print(f"\n{n_equal} of {len(architectures)} architectures within 2 %")


def row(arch: str, folder: Path) -> tuple[str, bool]:
    """The line of an architecture, and whether all its figures are within 2 %."""
    try:
        with Worker() as worker:
            examined = counted.examine(worker, arch, folder)
    except LabError as problem:
        return f"| {arch} | failed | | {problem} |", False
    comparisons = list(counted.comparisons(examined))
    failures = []
    largest = 0.0
    for comparison in comparisons:
        if comparison.is_equal:
            if comparison.actual and not comparison.slack:
                largest = max(largest, abs(comparison.ratio - 1))
        else:
            failures.append(f"{comparison.name}: {comparison.ratio:.3f}")
    text = ", ".join(failures) or "none"
    return f"| {arch} | {len(comparisons)} | {largest:.1%} | {text} |", not failures


if __name__ == "__main__":
    main()
