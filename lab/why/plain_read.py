"""How fast memory is read without any kernel: it tells how much of a slow rate is the kernel's doing."""

from __future__ import annotations

import concurrent.futures
import time

from lab.core.record import Rate
from lab.why.probe_plan import MANY, pass_bytes

READ = "read"

BIG = 256 * 2**20
"""Bytes of which memory is read plainly, at least."""


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
