"""What this machine does without ggml: it tells how much of a slow rate is a kernel's doing."""

from __future__ import annotations

import concurrent.futures
import hashlib
import time

from lab.core.record import Rate
from lab.features.limits.probe_plan import MANY, pass_bytes

READ = "read"

BIG = 256 * 2**20
"""The smallest number of bytes that a plain read goes through."""


def read_rate(n_threads: int, n_bytes: int | None = None) -> Rate:
    """How fast memory can be read without any kernel: the maximum of numbers (a random MiB, repeated), a slice each."""
    import numpy as np

    n_bytes = n_bytes or max(BIG, pass_bytes(MANY))
    data = np.resize(np.random.default_rng(1).integers(0, 2**62, 2**17), n_bytes // 8)
    slices = np.array_split(data, n_threads)
    times = []
    with concurrent.futures.ThreadPoolExecutor(n_threads) as pool:
        for _ in range(8):
            start = time.perf_counter_ns()
            list(pool.map(np.max, slices))
            times.append(time.perf_counter_ns() - start)
    return Rate(READ, "I64", "numpy", 1, n_bytes // 8, 1, n_threads, n_bytes, 0, tuple(times[1:]))


def work_s(seconds: float) -> float:
    """Seconds of its core's time that a unit of work takes, while one core is busy for so long.

    The work (SHA-256 of 64 KiB) stays within the core's caches: it shows the clock, not memory or halts.
    """
    data, n = bytes(2**16), 0
    start, start_cpu = time.perf_counter(), time.thread_time()
    while time.perf_counter() - start < seconds:
        hashlib.sha256(data).digest()
        n += 1
    return (time.thread_time() - start_cpu) / n
