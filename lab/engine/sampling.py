"""How long llama.cpp's own samplers take to choose a token, as servers do it.

The lab takes the likeliest token, in some microseconds. A server copies all logits into a list of candidates and sends
it through a chain of samplers, even at temperature 0 (llama.cpp common/sampling.cpp). Each choice here follows a step,
so that the caches are as cold as in an answer.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

from lab.engine import llama, native
from lab.engine.llama import Context
from lab.errors import LabError

N_FIRST = 2
"""Choices that do not count: the first ones ask the system for memory."""


def times_ns(context: Context, samplers: Sequence[tuple[str, float]], n_times: int) -> list[int]:
    """Times to choose `n_times` tokens, each after a step, from an empty cache. LabError for an unknown sampler."""
    lib = native.llama()
    make: dict[str, Callable[[float], Any]] = {
        "top_k": lambda k: lib.llama_sampler_init_top_k(int(k)),
        "top_p": lambda p: lib.llama_sampler_init_top_p(p, 0),
        "min_p": lambda p: lib.llama_sampler_init_min_p(p, 0),
        "typ_p": lambda p: lib.llama_sampler_init_typical(p, 0),
        "temperature": lambda t: lib.llama_sampler_init_temp_ext(t, 0.0, 1.0),
    }
    if unknown := [name for name, _ in samplers if name not in make]:
        raise LabError(f"The lab does not know the sampler {unknown[0]}.", "This is a bug of the lab.")
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    try:
        for name, value in samplers:
            lib.llama_sampler_chain_add(chain, make[name](value))
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(1))
        lib.llama_memory_clear(lib.llama_get_memory(context.pointer), False)
        token, spent = (ctypes.c_int32 * 1)(0), []
        for _ in range(N_FIRST + n_times):
            llama.decode(context, lib.llama_batch_get_one(token, 1))
            start_ns = time.perf_counter_ns()
            token[0] = lib.llama_sampler_sample(chain, context.pointer, -1)
            spent.append(time.perf_counter_ns() - start_ns)
    finally:
        lib.llama_sampler_free(chain)
    return spent[N_FIRST:]
