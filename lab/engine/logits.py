"""Greedy sampling from llama.cpp's logits, without copying them.

A row of logits is an array of n_vocab floats in llama.cpp's own memory.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from lab.engine.bindings import llama_cpp, loaded
from lab.engine.llama import Context
from lab.errors import LabError

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
