"""What this machine does without ggml: it tells how much of a slow rate is a kernel's, a build's or a disk's doing."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import time
from pathlib import Path

from lab.core.record import Rate
from lab.why.probe_plan import MANY, pass_bytes

READ = "read"

BIG = 256 * 2**20
"""The smallest number of bytes that a plain read goes through."""


def read_rate(n_threads: int, n_bytes: int | None = None) -> Rate:
    """How fast memory can be read without any kernel: the maximum of random numbers, a slice per thread."""
    import numpy as np

    n_bytes = n_bytes or max(BIG, pass_bytes(MANY))
    data = np.random.default_rng(1).integers(0, 2**62, n_bytes // 8)
    slices = np.array_split(data, n_threads)
    times = []
    with concurrent.futures.ThreadPoolExecutor(n_threads) as pool:
        for _ in range(8):
            start = time.perf_counter_ns()
            list(pool.map(np.max, slices))
            times.append(time.perf_counter_ns() - start)
    return Rate(READ, "I64", "numpy", 1, n_bytes // 8, 1, n_threads, n_bytes, 0, tuple(times[1:]))


def flop_ns(seconds: float) -> float:
    """Nanoseconds per FLOP of F32 products by NumPy's BLAS on one core, by the best pass within the given seconds.

    Products of 64 x 64 x 64 are the largest that OpenBLAS leaves to one thread (interface/gemm.c: at most
    65,536 x GEMM_MULTITHREAD_THRESHOLD, which is 4).
    """
    import numpy as np

    chance = np.random.default_rng(1)
    left, right = (chance.random((64, 64, 64), dtype=np.float32) for _ in range(2))
    best, deadline = float("inf"), time.monotonic() + seconds
    while time.monotonic() < deadline:
        start = time.perf_counter_ns()
        np.matmul(left, right)
        best = min(best, time.perf_counter_ns() - start)
    return best / (2 * 64**4)


def work_s(seconds: float) -> tuple[float, float]:
    """What a unit of work takes, by the clock and of its core's time alone, while one core is busy for so long.

    The work (SHA-256 of 64 KiB) stays within the core's caches: it shows clocks and halts, not memory.
    """
    data, n = bytes(2**16), 0
    start, start_cpu = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < seconds:
        hashlib.sha256(data).digest()
        n += 1
    return (time.perf_counter() - start) / n, (time.thread_time() - start_cpu) / n


def burst_s() -> float:
    """A unit of that work by the clock, in a burst of 10 ms after a rest: too short for a quota to halt it."""
    time.sleep(0.15)
    return work_s(0.01)[0]


PIECE = 4 * 2**20
"""Bytes of a file that are read at once."""


def piece_s(path: Path, at: int, from_disk: bool) -> float:
    """Seconds that PIECE bytes of a file take to read: dropped from the page cache before, or kept there (Linux)."""
    with path.open("rb", buffering=0) as file:
        if from_disk:
            os.posix_fadvise(file.fileno(), at, PIECE, os.POSIX_FADV_DONTNEED)
        else:
            os.pread(file.fileno(), PIECE, at)
        start = time.perf_counter()
        os.pread(file.fileno(), PIECE, at)
        return time.perf_counter() - start
