"""Greedy sampling from llama.cpp's logits, without copying them.

A row of logits is an array of n_vocab floats in llama.cpp's own memory.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from lab.engine import llama
from lab.engine.bindings import llama_cpp, loaded
from lab.engine.llama import Context
from lab.errors import LabError

N_FIRST = 2
"""Warm-up calls of the samplers: the first ones allocate memory."""

Rows = list[tuple[int, Any, list[Any]]]
"""A step's rows with logits: the index in the batch, the slot of the chosen token, and the batches to copy it into."""


class Logits:
    """The rows of one context. With `is_fixed` the first row's address is read once: llama.cpp's buffer stays."""

    def __init__(self, context: Context, is_fixed: bool) -> None:
        self._lib, self._pointer, self._n_vocab = llama_cpp(), context.pointer, context.loaded.n_vocab
        ith = loaded("llama").llama_get_logits_ith  # not the bindings' function: this one returns an address
        ith.restype, ith.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int32]
        self._ith = functools.partial(ith, context.pointer)
        self._views: dict[int, Any] = {}  # by address
        self._first = self._view(self._address()) if is_fixed else None

    def row(self, i: int) -> Any:
        """The logits of row i of the last step's batch. llama.cpp may reorder the rows of several sequences."""
        address = self._ith(i)
        logits = self._views.get(address)
        if logits is None:
            logits = self._views[address] = self._view(address)
        return logits

    def best(self, i: int) -> tuple[int, float]:
        """The token with the highest logit in row i, and the gap to the second highest."""
        logits = self.row(i)
        token = int(logits.argmax())
        highest = logits[token]
        logits[token] = -float("inf")
        margin = float(highest - logits.max())
        logits[token] = highest
        return token, margin

    def chooser(self, rows: Rows) -> Callable[[], object] | None:
        """The function that chooses a step's tokens; None if no row has logits."""
        if len(rows) == 1 and not rows[0][2] and self._first is not None:
            return functools.partial(self._first.argmax, None, rows[0][1])
        return functools.partial(self.choose, rows) if rows else None

    def choose(self, rows: Rows) -> None:
        """Write each row's token into its slot, and copy it into the batches that need it."""
        for i, slot, targets in rows:
            self.row(i).argmax(None, slot)
            for target in targets:
                target[()] = slot

    def has_moved(self) -> bool:
        """Whether the address of the first row has changed."""
        return self._first is not None and self._first.ctypes.data != self._address()

    def _view(self, address: int | None) -> Any:
        import numpy as np

        if not address:
            raise LabError(
                "llama.cpp returns no logits for this model.", "The lab can only measure models that generate text."
            )
        row = (ctypes.c_float * self._n_vocab).from_address(address)
        return np.frombuffer(memoryview(row), dtype=np.float32)

    def _address(self) -> int:
        return ctypes.cast(self._lib.llama_get_logits(self._pointer), ctypes.c_void_p).value or 0


def sampling_ns(context: Context, samplers: Sequence[tuple[str, float]], n_times: int) -> list[int]:
    """Nanoseconds that llama.cpp's samplers take for each of `n_times` tokens, starting from an empty KV cache.

    The lab takes the argmax, in some microseconds. A server copies all logits into a list of candidates and runs a
    chain of samplers, even at temperature 0 (llama.cpp common/sampling.cpp). Each sampling here follows a step, so that
    the CPU caches are as cold as in an answer. LabError for an unknown sampler.
    """
    lib = llama_cpp()
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
