"""A script: the list of all operations of a run, created before the clock starts.

One loop (engine/loop.py) executes every script and stamps every operation. So a measured run, a
sweep, a batch of sequences, or a prompt that is prefilled beside running answers differ only in
their script:

    a run        prefill, prefill, decode x (n_gen - 1)
    a sweep      prefill, decode x (n_gen - 1), forget, prefill, decode x (n_gen - 1), forget, ...
    a batch      prefill of every sequence, then decode x (n_gen - 1) with one token of each
    speculation  prefill, then an open-ended one: draft x n, verify, forget, ... as long as it takes

A token that is not given is the one last chosen for its sequence. The steps of an open-ended
operation depend on the chosen tokens and are created during the run.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lab.core.record import COPY, DECODE, FORGET, LOAD, PREFILL, SAVE
from lab.core.sampling import Sampling

OPEN_ENDED = "open-ended"  # its steps are created during the run

CACHE_OPERATIONS = (FORGET, COPY, SAVE, LOAD)
"""Operations without computation: they change or move a sequence's part of the cache."""


@dataclass(frozen=True)
class Part:
    """One sequence's tokens in a step; the last `n_outputs` get logits, from which a token each is
    chosen."""

    sequence: int
    tokens: tuple[int, ...] | None
    n_outputs: int = 0

    @property
    def n_tokens(self) -> int:
        return 1 if self.tokens is None else len(self.tokens)


@dataclass(frozen=True)
class Operation:
    """One step (`parts`, repeated `times` times), or a change of the cache of `sequence`."""

    kind: str
    parts: tuple[Part, ...] = ()
    times: int = 1
    sequence: int = 0
    first: int = 0  # forget: everything from this position on
    target: int = 0  # copy: to this empty sequence
    path: str | None = None  # the file of save and load
    by: str = ""  # open-ended: the module whose class Speculation does it
    n_draft: int = 0  # open-ended: drafted before each verification, at most
    of_draft: bool = False  # on the draft model; open-ended: drafted by it, not looked up
    waits: bool = True  # or the step is only submitted, and finishes with a later one
    sampling: Sampling | None = (
        None  # of the answers that begin here; None: as in the settings
    )

    @property
    def n_tokens(self) -> int:
        """Tokens of the step, each time."""
        return sum(part.n_tokens for part in self.parts)

    @property
    def n_outputs(self) -> int:
        """Tokens that are chosen, each time."""
        return sum(part.n_outputs for part in self.parts)


Script = Sequence[Operation]


class Shape(NamedTuple):
    """The columns of Steps that are known before an operation runs."""

    kind: str
    n_tokens: int
    n_past: int
    n_seq: int
    n_outputs: int


def run(prompt: Sequence[int], n_gen: int, n_ubatch: int) -> list[Operation]:
    """The script of a measured run: prefill the prompt, then generate."""
    return [*prefill(0, prompt, n_ubatch), *decode([0], n_gen - 1)]


def sweep(prompt: Sequence[int], n_gen: int, n_ubatch: int, every: int) -> list[Operation]:
    """The script of a sweep: after each `every` prompt tokens, generate and forget n_gen tokens."""
    operations: list[Operation] = []
    for first in range(0, len(prompt), every):
        if first:
            operations.append(Operation(FORGET, first=first))
        operations += prefill(0, prompt[first : first + every], n_ubatch)
        operations += decode([0], n_gen - 1)
    return operations


def prefill(
    sequence: int, tokens: Sequence[int], n_ubatch: int, is_last: bool = True
) -> list[Operation]:
    """Steps of up to n_ubatch tokens.

    If the prompt ends here (`is_last`), the last token gets logits.
    """
    operations = []
    for first in range(0, len(tokens), n_ubatch):
        step_tokens = tuple(tokens[first : first + n_ubatch])
        ends_prompt = is_last and first + n_ubatch >= len(tokens)
        operations.append(Operation(PREFILL, (Part(sequence, step_tokens, int(ends_prompt)),)))
    return operations


def decode(sequences: Sequence[int], n: int) -> list[Operation]:
    """n steps with one token of each sequence; empty for n = 0."""
    if not n:
        return []
    parts = tuple(Part(sequence, None, 1) for sequence in sequences)
    return [Operation(DECODE, parts, times=n)]


def wait_once(script: Script) -> list[Operation]:
    """The same script without waiting for steps without logits.

    So devices in a pipeline work at the same time. The last step before a change of the cache, and
    the last of all, are waited for.
    """
    operations = []
    for operation, following in itertools.zip_longest(script, script[1:]):
        is_followed = following is not None and following.kind not in (
            *CACHE_OPERATIONS,
            OPEN_ENDED,
        )
        can_wait_later = operation.parts and not operation.n_outputs and is_followed
        operations.append(dataclasses.replace(operation, waits=not can_wait_later))
    return operations


def n_prefilled(script: Script) -> int:
    """Prompt tokens in all steps, also those of the draft model."""
    n = 0
    for operation in script:
        for part in operation.parts:
            if part.tokens is not None:
                n += len(part.tokens)
    return n


def n_chosen(script: Script) -> int:
    """Tokens that the model (not the draft model) chooses in all steps."""
    n = 0
    for operation in script:
        if operation.kind == OPEN_ENDED:
            n += operation.times
        elif not operation.of_draft:
            n += operation.times * operation.n_outputs
    return n


def shapes(script: Script) -> Iterator[Shape]:
    """The shape of each operation, except those of an open-ended one.

    n_past is the maximum over the step's sequences.
    """
    of_model = collections.Counter[int]()  # positions by sequence
    of_draft = collections.Counter[int]()
    saved: dict[str | None, int] = {}  # positions by file
    for operation in script:
        positions = of_draft if operation.of_draft else of_model
        if operation.kind in CACHE_OPERATIONS:
            yield Shape(operation.kind, 0, _move_cache(operation, positions, saved), 1, 0)
        elif operation.kind != OPEN_ENDED:
            yield from _step_shapes(operation, positions)


def _move_cache(
    operation: Operation, positions: collections.Counter[int], saved: dict[str | None, int]
) -> int:
    """Carry out a cache operation on the positions. Returns those that it concerns."""
    n_past = positions[operation.sequence]
    if operation.kind == FORGET:
        positions[operation.sequence] = min(n_past, operation.first)
    elif operation.kind == COPY:
        positions[operation.target] = n_past
    elif operation.kind == SAVE:
        saved[operation.path] = n_past
    else:
        n_past = saved[operation.path]
        positions[operation.sequence] = n_past
    return n_past


def _step_shapes(operation: Operation, positions: collections.Counter[int]) -> Iterator[Shape]:
    n_tokens = operation.n_tokens
    n_outputs = operation.n_outputs
    n_seq = len(operation.parts)
    for _ in range(operation.times):
        n_past = max(positions[part.sequence] for part in operation.parts)
        for part in operation.parts:
            positions[part.sequence] += part.n_tokens
        yield Shape(operation.kind, n_tokens, n_past, n_seq, n_outputs)
