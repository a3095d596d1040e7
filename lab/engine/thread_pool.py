"""CPU threads of a context's own: ggml's thread pool, with its polling and priority.

Without a pool llama.cpp computes on OpenMP's threads, or in builds without OpenMP on threads that ggml starts for every
graph (ggml-cpu.c, `ggml_graph_compute`). With a pool, builds with OpenMP still use OpenMP's threads: they give them the
pool's priority and ignore its polling. runner/plan.py rejects what a build ignores.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from lab.core.asked_settings import MAX_THREADS
from lab.core.record import Settings
from lab.engine.bindings import INT, B, P, ggml, llama_cpp
from lab.engine.devices import device_of


class Params(ctypes.Structure):
    """struct ggml_threadpool_params of ggml.h."""

    _fields_ = (
        ("cpumask", B * MAX_THREADS),
        ("n_threads", INT),
        ("prio", INT),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", B),
        ("paused", B),
    )


@dataclass(frozen=True)
class Pools:
    """The pools of a context; empty if it uses llama.cpp's threads. Free them after the context."""

    pointers: tuple[Any, ...] = ()

    def free(self) -> None:
        for pointer in self.pointers:
            _function(b"ggml_threadpool_free", None, P)(pointer)


def attach(context: Any, asked: Settings) -> Pools:
    """Give a llama_context pools of threads if the settings ask for polling or a priority.

    One pool serves decode and prefill, or two if they have different numbers of threads. Then decode's begins paused,
    because two polling pools would take each other's cores; ggml pauses a pool when another one takes over.
    """
    if asked.poll is None and asked.priority is None:
        return Pools()
    counts = dict.fromkeys((asked.n_threads_batch, asked.n_threads))
    made = {n: _new(n, asked, is_paused=n != asked.n_threads_batch) for n in counts}
    attach = llama_cpp()._lib.llama_attach_threadpool
    attach.restype, attach.argtypes = None, [P, P, P]
    attach(context, made[asked.n_threads], made[asked.n_threads_batch])
    return Pools(tuple(made.values()))


def _new(n_threads: int, asked: Settings, is_paused: bool) -> Any:
    params = Params()
    ggml().ggml_threadpool_params_init(ctypes.byref(params), n_threads)
    if asked.poll is not None:
        params.poll = asked.poll
    if asked.priority is not None:
        params.prio = asked.priority
    params.paused = is_paused
    return P(_function(b"ggml_threadpool_new", P, P)(ctypes.byref(params)))


def _function(name: bytes, result: Any, argument: Any) -> Any:
    """A function of the CPU's library, which some builds load only when they run."""
    registry = P(ggml().ggml_backend_dev_backend_reg(device_of(None)))
    return ctypes.CFUNCTYPE(result, argument)(ggml().ggml_backend_reg_get_proc_address(registry, name))
