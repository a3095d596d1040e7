"""Run a script: lay out all batches in memory, then run the timed loop over them.

A step of one token reads it from the slot where sampling wrote it. In a step of several tokens the
prompt's are already in the batch; each sampled token is copied into it as soon as it is chosen, as
a part of the sampling time.
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
from typing import TYPE_CHECKING, NamedTuple, Protocol

from lab.core import record, script as scripts
from lab.core.script import CACHE_OPERATIONS, OPEN_ENDED, Operation, Part, Script
from lab.engine import devices, llama, sampling
from lab.engine.bindings import llama_cpp
from lab.engine.llama import LlamaContext, Logits
from lab.engine.loop import Action, as_steps, walk
from lab.errors import LabError
from lab.process.wire import FIRST_TOKEN, Outcome

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from lab.engine.llama import Ids, Rows


def run(
    context: LlamaContext,
    draft: LlamaContext | None,
    script: Script,
    progress: memoryview[int],
) -> Outcome:
    """Run a script from an empty KV cache.

    `progress` is shared with the parent: N_PREFILLED, then the tokens.
    """
    lib = llama_cpp()
    rolls_back = any(operation.kind in (*CACHE_OPERATIONS, OPEN_ENDED) for operation in script)
    for used_context in (context, draft):
        if used_context is None:
            continue
        if rolls_back:
            llama.check_rollback(used_context)
        lib.llama_memory_clear(lib.llama_get_memory(used_context.pointer), False)
    devices.clear_log()
    answers = sampling.Answers(context)
    preparation = _Preparation(context, draft, script, progress, answers)
    counts: dict[str, tuple[int, ...]] = {}
    try:
        actions = preparation.actions()
        if answers.built_ns:
            counts["built_ns"] = answers.built_ns
        gc.collect()
        gc.disable()
        stamps = walk(actions, time.perf_counter_ns, progress)
    finally:
        gc.enable()
        answers.free()
    shapes = [*scripts.shapes(script), *preparation.speculated_shapes]
    preparation.check_logits()
    token_ids = tuple(map(int, preparation.tokens))
    if preparation.state_bytes:
        counts["state_bytes"] = tuple(preparation.state_bytes)
    if preparation.accepted:
        counts["accepted"] = preparation.accepted
    return Outcome(
        steps=as_steps(shapes, stamps),
        token_ids=token_ids,
        end_of_generation_at=_end_of_generation(context, token_ids),
        counts=counts,
    )


def _end_of_generation(context: LlamaContext, token_ids: Sequence[int]) -> int | None:
    """The index of the first token that ends a generation."""
    for index, token in enumerate(token_ids):
        if llama_cpp().llama_vocab_is_eog(context.loaded.vocab, token):
            return index
    return None


class OpenEndedActions(Protocol):
    """A feature's class for an open-ended operation."""

    shapes: list[scripts.Shape]
    accepted: list[int]

    def actions(
        self, prompt: Sequence[int], operation: Operation, n_prefilled: int
    ) -> Iterable[Action]: ...


class _Prepared(NamedTuple):
    """An operation before the functions that choose its tokens are made."""

    execute: Callable[[], object]
    then: Callable[[], object] | None
    of_draft: bool
    rows: Rows
    n_prefilled: int
    chains: list[sampling.Chain | None]  # of the rows; None: greedy


class _Preparation:
    """The actions of one run, and the results that they leave."""

    def __init__(
        self,
        context: LlamaContext,
        draft: LlamaContext | None,
        script: Script,
        progress: memoryview[int],
        answers: sampling.Answers,
    ) -> None:
        import numpy as np

        n_chosen = scripts.n_chosen(script)
        self.tokens = np.frombuffer(progress, dtype=np.int64)[
            FIRST_TOKEN : FIRST_TOKEN + n_chosen
        ]
        self.tokens.fill(-1)
        self.state_bytes: list[int] = []  # of each save
        self._lib = llama_cpp()
        self._pointer = context.pointer
        self._memory = self._lib.llama_get_memory(context.pointer)
        self._script = script
        self._answers = answers
        self._slots = [self.tokens[i : i + 1].reshape(()) for i in range(n_chosen)]
        # Where a token is copied to
        self._targets: list[list[Ids]] = [[] for _ in self._slots]
        self._latest: dict[int, int] = {}  # by sequence: the index of its last chosen token
        self._n_chosen = 0
        # For tokens that the draft model chooses
        self._draft_slot = np.zeros((), dtype=np.int64)
        self._last_row = 0  # in the last step with logits
        # With more rows than sequences, llama.cpp allocates a larger buffer during the run.
        is_fixed = n_chosen > 0 and max(map(_n_rows, script)) <= context.settings.n_seq_max
        self._contexts = {False: context}  # by whether it is the draft model's
        self._logits = {False: Logits(context, is_fixed)}
        if draft:
            self._contexts[True] = draft
            self._logits[True] = Logits(draft, False)
        self._speculation: OpenEndedActions | None = (
            None  # a feature's class, for an open-ended operation
        )
        if script and script[-1].by:
            feature = import_module(script[-1].by)
            self._speculation = feature.Speculator(context, draft, self._logits, self.tokens)

    @property
    def speculated_shapes(self) -> list[scripts.Shape]:
        return list(self._speculation.shapes) if self._speculation else []

    @property
    def accepted(self) -> tuple[int, ...] | None:
        """Accepted draft tokens of each verification; None without any."""
        if not self._speculation:
            return None
        return tuple(self._speculation.accepted) or None

    def actions(self) -> Iterable[Action]:
        """What the loop executes.

        The actions of an open-ended operation, the last one, are created during the run.
        """
        prepared: list[_Prepared] = []
        n_prefilled = 0
        for operation in self._script:
            n_prefilled += scripts.n_prefilled([operation])
            chains = self._answers.follow(operation)
            if operation.kind in CACHE_OPERATIONS:
                execute, then = self._cache_operation(operation)
                step = _Prepared(execute, then, operation.of_draft, [], n_prefilled, chains)
                prepared.append(step)
            elif operation.kind != OPEN_ENDED:
                for _ in range(operation.times):
                    execute, rows = self._step(operation)
                    step = _Prepared(
                        execute, None, operation.of_draft, rows, n_prefilled, chains
                    )
                    prepared.append(step)
        # A token's copies are known only when all later steps are prepared, so these come last.
        actions = [self._action(step) for step in prepared]
        if not self._speculation:
            return actions
        prompt: list[int] = []
        for operation in self._script:
            if not operation.of_draft:
                for part in operation.parts:
                    prompt += part.tokens or ()
        speculated = self._speculation.actions(prompt, self._script[-1], n_prefilled)
        return itertools.chain(actions, speculated)

    def _action(self, step: _Prepared) -> Action:
        then = step.then
        if any(step.chains):
            logits = self._logits[step.of_draft]
            then = functools.partial(sampling.choose, logits, step.rows, step.chains)
        elif step.rows:
            then = self._logits[step.of_draft].chooser(step.rows)
        return step.execute, then, step.n_prefilled

    def _step(self, operation: Operation) -> tuple[Callable[[], object], Rows]:
        """A call of `llama_decode`, and the rows that tokens are chosen from."""
        # First: it reads the tokens chosen before this step
        batch = self._batch(operation.parts)
        rows: Rows = []
        first = 0
        for part in operation.parts:
            end = first + part.n_tokens
            for row in range(end - part.n_outputs, end):
                if operation.of_draft:
                    rows.append((row, self._draft_slot, []))
                else:
                    rows.append((row, *self._new_slot(part.sequence)))
            first = end
        if rows and not operation.of_draft:
            self._last_row = rows[-1][0]
        decode = llama.decode if operation.waits else llama.submit
        return functools.partial(decode, self._contexts[operation.of_draft], batch), rows

    def _new_slot(self, sequence: int) -> tuple[npt.NDArray[np.int64], list[Ids]]:
        """The slot of the next chosen token, which is a sequence's, and where it is copied to."""
        index = self._n_chosen
        self._latest[sequence] = index
        self._n_chosen += 1
        return self._slots[index], self._targets[index]

    def _batch(self, parts: Sequence[Part]) -> object:
        """A llama_batch of the parts; llama.cpp counts the positions."""
        import numpy as np

        n_tokens = sum(part.n_tokens for part in parts)
        wants_logits = np.zeros(n_tokens, dtype=np.int8)
        sequences = np.zeros(n_tokens, dtype=np.int32)
        reads_slot = n_tokens == 1 and parts[0].tokens is None
        if reads_slot:
            ids = self.tokens[self._latest[parts[0].sequence] :]
        else:
            ids = np.zeros(n_tokens, dtype=np.int32)
        first = 0
        for part in parts:
            end = first + part.n_tokens
            wants_logits[end - part.n_outputs : end] = 1
            sequences[first:end] = part.sequence
            if part.tokens is not None:
                ids[first:end] = part.tokens
            elif not reads_slot:
                self._targets[self._latest[part.sequence]].append(ids[first:end].reshape(()))
            first = end
        batch = self._lib.llama_batch(n_tokens=n_tokens, token=_pointer(ids, ctypes.c_int32))
        batch.logits = _pointer(wants_logits, ctypes.c_int8)
        batch.alive = [ids, wants_logits]
        if sequences.any():  # otherwise all are sequence 0, llama.cpp's default
            counts = np.ones(n_tokens, dtype=np.int32)
            addresses = sequences.ctypes.data + 4 * np.arange(n_tokens, dtype=np.uint64)
            batch.n_seq_id = _pointer(counts, ctypes.c_int32)
            batch.seq_id = _pointer(addresses, ctypes.POINTER(ctypes.c_int32))
            batch.alive += [sequences, counts, addresses]
        return batch

    def _cache_operation(
        self, operation: Operation
    ) -> tuple[Callable[[], object], Callable[[], object] | None]:
        """What a forget, copy, save or load executes, and what follows."""
        sequence = operation.sequence
        path = Path(operation.path or "")
        if operation.kind == record.FORGET:
            context = self._contexts[operation.of_draft]
            return functools.partial(llama.forget, context, sequence, operation.first), None
        if operation.kind == record.COPY:
            copy = self._lib.llama_memory_seq_cp
            return functools.partial(
                copy, self._memory, sequence, operation.target, -1, -1
            ), None
        if operation.kind == record.SAVE:
            save = functools.partial(self._save, sequence, path)
            return save, functools.partial(_drop_from_cache, path)
        return functools.partial(self._load, sequence, path), None

    def _save(self, sequence: int, path: Path) -> None:
        """Write a sequence's state to a file, and wait until the disk has it."""
        save = self._lib.llama_state_seq_save_file
        n_bytes = save(self._pointer, os.fsencode(path), sequence, None, 0)
        if not n_bytes:
            what = f"llama.cpp could not save a state to {path}: {devices.last_warnings()}"
            raise LabError(what, "Free some space.")
        with path.open("r+b") as file:
            os.fsync(file.fileno())
        self.state_bytes.append(n_bytes)

    def _load(self, sequence: int, path: Path) -> None:
        """Restore a sequence's state from a file."""
        no_tokens = (ctypes.c_int32 * 1)()
        n_tokens = ctypes.c_size_t(0)  # llama.cpp needs a buffer to restore
        arguments = (os.fsencode(path), sequence, no_tokens, 1, ctypes.byref(n_tokens))
        if not self._lib.llama_state_seq_load_file(self._pointer, *arguments):
            what = f"llama.cpp could not restore a state: {devices.last_warnings()}"
            raise LabError(what, "Try shorter prompts.")

    def check_logits(self) -> None:
        """LabError if the logits' address changed in the run, or the last logits are not finite."""
        import numpy as np

        if self._logits[False].has_moved():
            hint = "The lab can only measure models that generate one token after the other."
            raise LabError("llama.cpp moved its logits during the run.", hint)
        row = 0 if self.speculated_shapes else self._last_row
        if self._slots and not np.isfinite(self._logits[False].row(row)).all():
            what = (
                "The model's last logits are not finite numbers, so its weights are damaged."
            )
            raise LabError(what, "Get the file again.")


def _n_rows(operation: Operation) -> int:
    """The largest number of rows with logits in a step of an operation."""
    if operation.n_draft:
        return operation.n_draft + 1
    return operation.n_outputs


def _drop_from_cache(path: Path) -> None:
    """Let the next load read the file from the disk, if the system supports this."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _pointer(
    array: npt.NDArray[np.generic],
    kind: type[ctypes.c_int8 | ctypes.c_int32 | ctypes._Pointer[ctypes.c_int32]],
) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
