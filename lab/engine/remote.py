"""Devices behind RPC servers, where ggml's functions promise less than on other devices (ggml-rpc.cpp).

A graph that was submitted is waited for only until it is sent, an operation is called supported whatever it is, and a
graph without a number is sent whole each time. llama.cpp numbers its graphs: a step like the one before is one short
message. So it is here.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from lab.engine.ggml import P, device_of

N_READINGS = 20


def is_remote(lib: Any, device: Any) -> bool:
    """Whether an RPC server has the device."""
    return bool(lib.ggml_backend_reg_name(P(lib.ggml_backend_dev_backend_reg(device))).startswith(b"RPC"))


def supports(lib: Any, device: Any, operation: Any) -> bool:
    """Whether a device can compute an operation. A remote one is not asked: what the CPU here can is taken for its."""
    asked = device_of(lib, None) if is_remote(lib, device) else device
    return bool(lib.ggml_backend_dev_supports_op(asked, operation))


def number(lib: Any, backend: Any, graph: Any, most_nodes: int) -> None:
    """Give a graph whose tensors are all in the backend's memory a number of its own, as llama.cpp's scheduler does."""
    cpu = P(lib.ggml_backend_dev_init(device_of(lib, None), None))  # a scheduler wants one, as the last
    scheduler = P(lib.ggml_backend_sched_new((P * 2)(backend, cpu), None, 2, 2 * most_nodes, False, False))
    lib.ggml_backend_sched_split_graph(scheduler, graph)
    lib.ggml_backend_sched_free(scheduler)
    lib.ggml_backend_free(cpu)


def wait(lib: Any, result: Any) -> None:
    """Until everything that was sent is done: a server answers in order, so a value is read."""
    lib.ggml_backend_tensor_get(result, ctypes.create_string_buffer(4), 0, 4)


def reading_ns(lib: Any, result: Any) -> int:
    """The shortest time that `wait` takes with nothing to wait for."""
    times = []
    for _ in range(N_READINGS):
        start = time.perf_counter_ns()
        wait(lib, result)
        times.append(time.perf_counter_ns() - start)
    return min(times)
