"""Copies between this machine's memory and a device's, timed: what moving a step's values between devices takes.

The functions are those that llama.cpp's scheduler uses (ggml_backend_tensor_set and _get).
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from lab.core.record import Rate
from lab.engine import remote
from lab.engine.ggml import InitParams, P, device_of, fill, library, random_rows, type_number
from lab.errors import LabError
from lab.process.wire import UPLOAD, Probe


def run(probe: Probe) -> Rate:
    """Copy for about `probe.seconds`, after one copy that does not count. LabError without memory there.

    A remote device takes bytes without an answer: an upload ends when a value has been read back, and the shortest
    time that this takes by itself is taken off. So an upload and a download together take one round trip.
    """
    lib = library()
    device = device_of(lib, probe.device)
    backend = P(lib.ggml_backend_dev_init(device, None))
    context = P(lib.ggml_init(InitParams(4 * lib.ggml_tensor_overhead(), None, True)))
    tensor = P(lib.ggml_new_tensor_2d(context, type_number("F32"), probe.columns, 1))
    memory = P(lib.ggml_backend_dev_buffer_type(device))
    buffer = P(lib.ggml_backend_alloc_ctx_tensors_from_buft(context, memory))
    try:
        if not buffer:
            raise LabError("There is no memory for the probe.", "Close other programs.")
        times = _time(lib, probe, remote.is_remote(lib, device), tensor)
    finally:
        if buffer:
            lib.ggml_backend_buffer_free(buffer)
        lib.ggml_free(context)
        lib.ggml_backend_free(backend)
    name = lib.ggml_backend_buft_name(memory).decode()
    return Rate(probe.op, "F32", name, 1, probe.columns, 1, probe.n_threads, 4 * probe.columns, 0, times)


def _time(lib: Any, probe: Probe, is_remote: bool, tensor: Any) -> tuple[int, ...]:
    """Nanoseconds of each copy, without the first."""
    n_bytes = 4 * probe.columns
    data = random_rows(lib, "F32", 1, probe.columns)
    target = ctypes.create_string_buffer(n_bytes)
    fill(lib, tensor, data)
    is_upload = probe.op == UPLOAD
    reading_ns = remote.reading_ns(lib, tensor) if is_remote and is_upload else 0
    times: list[int] = []
    deadline = 0.0
    while len(times) < 2 or time.monotonic() < deadline:
        start = time.perf_counter_ns()
        if is_upload:
            lib.ggml_backend_tensor_set(tensor, data, 0, n_bytes)
            if is_remote:
                remote.wait(lib, tensor)
        else:
            lib.ggml_backend_tensor_get(tensor, target, 0, n_bytes)
        times.append(max(1, time.perf_counter_ns() - start - reading_ns))
        if len(times) == 1:
            deadline = time.monotonic() + probe.seconds
    return tuple(times[1:])
