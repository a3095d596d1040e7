"""Run a script: lay out all batches in memory, then run the timed loop over them.

A step of one token reads it from the slot where sampling wrote it. In a step of several tokens the given ones are
already in the batch; each sampled token is copied into it as soon as it is chosen, as a part of the sampling time.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lab.core import record, script as scripts
from lab.core.script import MOVES, SPECULATE, Operation, Part, Script
from lab.engine import devices, llama
from lab.engine.bindings import llama_cpp
from lab.engine.llama import Context, Logits, Rows
from lab.engine.loop import Move, as_steps, walk
from lab.errors import LabError
from lab.process.wire import FIRST_TOKEN, Outcome


def run(
    context: Context, draft: Context | None, script: Script, progress: memoryview[int]
) -> Outcome:
    """Run a script from an empty KV cache. `progress` is shared with the parent: N_PREFILLED, then the tokens."""
    lib = llama_cpp()
    for one in (context, draft):
        if one is not None and any(operation.kind in (*MOVES, SPECULATE) for operation in script):
            llama.check_rollback(one)
        if one is not None:
            lib.llama_memory_clear(lib.llama_get_memory(one.pointer), False)
    devices.clear_log()
    preparation = _Preparation(context, draft, script, progress)
    moves = preparation.moves()
    gc.collect()
    gc.disable()
    try:
        stamps = walk(moves, time.perf_counter_ns, progress)
    finally:
        gc.enable()
    speculation = preparation.speculation
    steps = as_steps(
        [*scripts.shapes(script), *(speculation.shapes if speculation else ())], stamps
    )
    chosen = tuple(int(token) for token in preparation.tokens)
    ended = (
        i for i, token in enumerate(chosen) if lib.llama_vocab_is_eog(context.loaded.vocab, token)
    )
    preparation.check_logits()
    return Outcome(
        steps,
        chosen,
        next(ended, None),
        tuple(preparation.sizes) or None,
        tuple(speculation.accepted) if speculation and speculation.accepted else None,
    )


class _Preparation:
    """The moves of one run, and the results that they leave."""

    def __init__(
        self, context: Context, draft: Context | None, script: Script, progress: memoryview[int]
    ) -> None:
        import numpy as np

        self._lib = llama_cpp()
        self._pointer = context.pointer
        self._script = script
        self._memory = self._lib.llama_get_memory(context.pointer)
        self._contexts = {False: context, **({True: draft} if draft else {})}
        n_chosen = scripts.n_chosen(script)
        self.tokens = np.frombuffer(progress, dtype=np.int64)[FIRST_TOKEN : FIRST_TOKEN + n_chosen]
        self.tokens.fill(-1)
        self._slots = [self.tokens[i : i + 1].reshape(()) for i in range(n_chosen)]
        self._targets: list[list[Any]] = [
            [] for _ in self._slots
        ]  # batches that a chosen token is copied into
        self._latest: dict[int, int] = {}  # by sequence: the index of its last chosen token
        self._n_chosen = 0
        self._of_draft = np.zeros(
            (), dtype=np.int64
        )  # the slot for tokens that the draft model chooses
        self._last_row = 0  # in the last step with logits
        self.sizes: list[int] = []  # bytes of each saved state
        rows = (
            op.n_draft + 1 if op.n_draft else sum(part.n_outputs for part in op.parts)
            for op in script
        )
        most = max(rows, default=0)
        is_fixed = (
            most <= context.settings.n_seq_max
        )  # with more rows, llama.cpp allocates a larger buffer
        self._logits = {False: Logits(context, bool(is_fixed and n_chosen))}
        if draft:
            self._logits[True] = Logits(draft, False)
        self.speculation: Any = None  # a feature's class, for an operation `speculate`
        if script and (module := script[-1].by):
            made = import_module(module).Speculation
            self.speculation = made(context, draft, self._logits, self.tokens)

    def moves(self) -> Iterable[Move]:
        """What the loop executes. The moves of `speculate`, the last operation, are created during the run."""
        prepared = list[
            tuple[Callable[[], object], Callable[[], object] | None, Operation, Rows, int]
        ]()
        n_prefilled = 0
        for operation in self._script:
            n_prefilled += scripts.n_prefilled([operation])
            if operation.kind in MOVES:
                prepared.append((*self._move(operation), operation, [], n_prefilled))
            elif operation.kind != SPECULATE:
                steps = (self._step(operation) for _ in range(operation.times))
                prepared += [
                    (execute, None, operation, rows, n_prefilled) for execute, rows in steps
                ]
        # A token's copies are known only when all later steps are prepared, so the choosers are made last.
        moves: list[Move] = []
        for execute, after, operation, rows, n in prepared:
            moves.append(
                (execute, self._logits[operation.of_draft].chooser(rows) if rows else after, n)
            )
        if not self.speculation:
            return moves
        parts = [
            part for operation in self._script if not operation.of_draft for part in operation.parts
        ]
        given = [token for part in parts for token in part.tokens or ()]
        return itertools.chain(moves, self.speculation.moves(given, self._script[-1], n_prefilled))

    def _step(self, operation: Operation) -> tuple[Callable[[], object], Rows]:
        """A call of `llama_decode`, and the rows that tokens are chosen from."""
        batch = self._batch(operation.parts)  # first: it reads the tokens chosen before this step
        rows: Rows = []
        first = 0
        for part in operation.parts:
            end = first + part.n_tokens
            for row in range(end - part.n_outputs, end):
                if operation.of_draft:
                    rows.append((row, self._of_draft, []))
                    continue
                self._latest[part.sequence] = chosen = self._n_chosen
                self._n_chosen += 1
                rows.append((row, self._slots[chosen], self._targets[chosen]))
            first = end
        if rows and not operation.of_draft:
            self._last_row = rows[-1][0]
        decode = llama.decode if operation.waits else llama.submit
        return functools.partial(decode, self._contexts[operation.of_draft], batch), rows

    def _batch(self, parts: Sequence[Part]) -> Any:
        """A llama_batch of the parts; llama.cpp counts the positions."""
        import numpy as np

        n_tokens = sum(part.n_tokens for part in parts)
        wants_logits = np.zeros(n_tokens, dtype=np.int8)
        sequences = np.repeat(
            np.array([part.sequence for part in parts], np.int32), [part.n_tokens for part in parts]
        )
        is_single = n_tokens == 1 and parts[0].tokens is None
        ids = (
            self.tokens[self._latest[parts[0].sequence] :]
            if is_single
            else np.zeros(n_tokens, dtype=np.int32)
        )
        first = 0
        for part in parts:
            end = first + part.n_tokens
            wants_logits[end - part.n_outputs : end] = 1
            if part.tokens is not None:
                ids[first:end] = part.tokens
            elif not is_single:
                self._targets[self._latest[part.sequence]].append(ids[first:end].reshape(()))
            first = end
        batch = self._lib.llama_batch(n_tokens=n_tokens, token=_pointer(ids, ctypes.c_int32))
        batch.logits = _pointer(wants_logits, ctypes.c_int8)
        batch.alive = [ids, wants_logits]
        if sequences.any():  # otherwise all are sequence 0, llama.cpp's default
            counts = np.ones(n_tokens, dtype=np.int32)
            addresses = sequences.ctypes.data + 4 * np.arange(n_tokens, dtype=np.uint64)
            batch.n_seq_id = _pointer(counts, ctypes.c_int32)
            batch.seq_id = ctypes.cast(
                addresses.ctypes.data, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))
            )
            batch.alive += [sequences, counts, addresses]
        return batch

    def _move(
        self, operation: Operation
    ) -> tuple[Callable[[], object], Callable[[], object] | None]:
        """What a forget, copy, save or load executes, and what follows."""
        lib = self._lib
        pointer = self._pointer
        sequence = operation.sequence
        if operation.kind == record.FORGET:
            context = self._contexts[operation.of_draft]
            return functools.partial(llama.forget, context, sequence, operation.first), None
        if operation.kind == record.COPY:
            return functools.partial(
                lib.llama_memory_seq_cp, self._memory, sequence, operation.target, -1, -1
            ), None
        path = Path(operation.path or "")

        def save() -> None:
            n_bytes = lib.llama_state_seq_save_file(pointer, os.fsencode(path), sequence, None, 0)
            if not n_bytes:
                what = f"llama.cpp could not save a state to {path}: {devices.last_warnings()}"
                raise LabError(what, "Free some space.")
            with path.open("r+b") as file:
                os.fsync(file.fileno())
            self.sizes.append(n_bytes)

        def drop_from_cache() -> (
            None
        ):  # so that the file is read from the disk (if the system supports this)
            if hasattr(os, "posix_fadvise"):
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

        def load() -> None:
            no_tokens = (ctypes.c_int32 * 1)()
            n_tokens = ctypes.c_size_t(0)  # llama.cpp needs a buffer to restore
            arguments = os.fsencode(path), sequence, no_tokens, 1, ctypes.byref(n_tokens)
            if not lib.llama_state_seq_load_file(pointer, *arguments):
                what = f"llama.cpp could not restore a state: {devices.last_warnings()}"
                raise LabError(what, "Try shorter prompts.")

        return (save, drop_from_cache) if operation.kind == record.SAVE else (load, None)

    def check_logits(self) -> None:
        """LabError if the logits' address changed during the run, or the last logits are not finite."""
        import numpy as np

        if self._logits[False].has_moved():
            hint = "The lab can only measure models that generate one token after the other."
            raise LabError("llama.cpp moved its logits during the run.", hint)
        row = 0 if self.speculation and self.speculation.shapes else self._last_row
        if self._slots and not np.isfinite(self._logits[False].row(row)).all():
            what = "The model's last logits are not finite numbers, so its weights are damaged."
            raise LabError(what, "Get the file again.")


def _pointer(array: Any, kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
