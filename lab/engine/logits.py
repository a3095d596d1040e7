"""The logits of a context's last step, where llama.cpp has them, and choosing from them: always the likeliest token.

A row of logits is an array of n_vocab floats. No byte of it is copied to choose from it.
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
"""Choices of samplers that do not count: the first ones ask the system for memory."""

Rows = list[tuple[int, Any, list[Any]]]
"""Of a step: the rows of its batch that get logits, the slot of each chosen token, and where else that is to go."""


class Logits:
    """The rows of one context. With `is_fixed` the first row is looked up once: llama.cpp has room for all it needs."""

    def __init__(self, context: Context, is_fixed: bool) -> None:
        self._lib, self._pointer, self._n_vocab = llama_cpp(), context.pointer, context.loaded.n_vocab
        ith = loaded("llama").llama_get_logits_ith  # a function object of its own: an address, as a number
        ith.restype, ith.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int32]
        self._ith = functools.partial(ith, context.pointer)
        self._views: dict[int, Any] = {}  # by address
        self._first = self._view(self._address()) if is_fixed else None

    def row(self, i: int) -> Any:
        """Row i of the last step's batch; rows of several sequences may have changed places."""
        address = self._ith(i)
        logits = self._views.get(address)
        if logits is None:
            logits = self._views[address] = self._view(address)
        return logits

    def best(self, i: int) -> tuple[int, float]:
        """The likeliest token of row i, and how far its logit lies above the next one's."""
        logits = self.row(i)
        token = int(logits.argmax())
        highest = logits[token]
        logits[token] = -float("inf")
        margin = float(highest - logits.max())
        logits[token] = highest
        return token, margin

    def chooser(self, rows: Rows) -> Callable[[], object] | None:
        """What chooses the tokens of a step; None where no row has logits."""
        if len(rows) == 1 and not rows[0][2] and self._first is not None:
            return functools.partial(self._first.argmax, None, rows[0][1])
        return functools.partial(self.choose, rows) if rows else None

    def choose(self, rows: Rows) -> None:
        """The likeliest token of each row, straight into its slot, and where else it goes."""
        for i, slot, targets in rows:
            self.row(i).argmax(None, slot)
            for target in targets:
                target[()] = slot

    def has_moved(self) -> bool:
        """Whether the first row is not any more where it was."""
        return self._first is not None and self._first.ctypes.data != self._address()

    def _view(self, address: int | None) -> Any:
        import numpy as np

        if not address:
            raise LabError(
                "llama.cpp gives no logits for this model.", "Only models that generate text can be measured."
            )
        row = (ctypes.c_float * self._n_vocab).from_address(address)
        return np.frombuffer(memoryview(row), dtype=np.float32)

    def _address(self) -> int:
        """Where the first row of the logits lies."""
        return ctypes.cast(self._lib.llama_get_logits(self._pointer), ctypes.c_void_p).value or 0


def sampling_ns(context: Context, samplers: Sequence[tuple[str, float]], n_times: int) -> list[int]:
    """Times in which llama.cpp's own samplers choose `n_times` tokens, as servers do it, from an empty cache.

    The lab takes the likeliest token, in some microseconds. A server copies all logits into a list of candidates and
    sends it through a chain of samplers, even at temperature 0 (llama.cpp common/sampling.cpp). Each choice here
    follows a step, so that the caches are as cold as in an answer. LabError for an unknown sampler.
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
