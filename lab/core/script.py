"""A script: the list of all operations of a run, created before the clock starts.

One loop (engine/loop.py) executes every script and stamps every operation. So a measured run, a sweep, a batch of
sequences, or a prompt that is prefilled beside running answers differ only in their script:

    a run        prefill, prefill, decode x (n_gen - 1)
    a sweep      prefill, decode x (n_gen - 1), forget, prefill, decode x (n_gen - 1), forget, ...
    a batch      prefill of every sequence, then decode x (n_gen - 1) with one token of each in every step
    speculation  prefill, then `speculate`, which is as many steps as it takes: draft x n, verify, forget, ...

A token that is not given is the one last chosen for its sequence. The steps of `speculate` depend on the chosen tokens
and are created during the run.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lab.core.record import COPY, DECODE, FORGET, LOAD, PREFILL, SAVE

SPECULATE = "speculate"

MOVES = (
    FORGET,
    COPY,
    SAVE,
    LOAD,
)  # operations without computation: they change or move a sequence's part of the cache


@dataclass(frozen=True)
class Part:
    """One sequence's tokens in a step; the last `n_outputs` get logits, from which a token each is chosen."""

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
    by: str = (
        ""  # speculate: the module whose class Speculation does it, which the child loads by name
    )
    n_draft: int = 0
    of_draft: bool = (
        False  # on the draft model, or (speculate) drafted by it instead of looked up in the text
    )
    waits: bool = True  # or the step is only submitted, and finishes with a later one


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
    """The script of a sweep: after each `every` prompt tokens, and at the end, generate and forget n_gen tokens."""
    operations: list[Operation] = []
    for first in range(0, len(prompt), every):
        if first:
            operations.append(Operation(FORGET, first=first))
        operations += [
            *prefill(0, prompt[first : first + every], n_ubatch),
            *decode([0], n_gen - 1),
        ]
    return operations


def prefill(
    sequence: int, tokens: Sequence[int], n_ubatch: int, is_last: bool = True
) -> list[Operation]:
    """Steps of up to n_ubatch tokens; if the prompt ends here (`is_last`), the last token gets logits."""
    pieces = [tuple(tokens[first : first + n_ubatch]) for first in range(0, len(tokens), n_ubatch)]
    n_outputs = [0] * (len(pieces) - 1) + [int(is_last)]
    return [
        Operation(PREFILL, (Part(sequence, *one),)) for one in zip(pieces, n_outputs, strict=False)
    ]


def decode(sequences: Sequence[int], n: int) -> list[Operation]:
    """n steps with one token of each sequence; empty for n = 0."""
    parts = tuple(Part(sequence, None, 1) for sequence in sequences)
    return [Operation(DECODE, parts, times=n)] if n else []


def wait_once(script: Script) -> list[Operation]:
    """The same script without waiting for steps without logits, so that devices in a pipeline work at the same time."""
    followed = [after.kind not in (*MOVES, SPECULATE) for after in script[1:]] + [False]
    outputs = [sum(part.n_outputs for part in operation.parts) for operation in script]
    return [
        dataclasses.replace(
            operation, waits=bool(n_outputs) or not operation.parts or not is_followed
        )
        for operation, n_outputs, is_followed in zip(script, outputs, followed, strict=True)
    ]


def n_prefilled(script: Script) -> int:
    return sum(
        len(part.tokens)
        for operation in script
        for part in operation.parts
        if part.tokens is not None
    )


def n_chosen(script: Script) -> int:
    """Tokens that the model (not the draft model) chooses in all steps."""
    return sum(
        operation.times
        * (1 if operation.kind == SPECULATE else sum(part.n_outputs for part in operation.parts))
        for operation in script
        if operation.kind == SPECULATE or not operation.of_draft
    )


def shapes(script: Script) -> Iterator[Shape]:
    """The shape of each operation, except those of `speculate`; n_past is the maximum over the step's sequences."""
    of_model = collections.Counter[int]()
    of_draft = collections.Counter[int]()  # positions by sequence
    saved: dict[str | None, int] = {}
    for operation in script:
        kind = operation.kind
        parts = operation.parts
        positions = of_draft if operation.of_draft else of_model
        if kind in MOVES:
            n_past = positions[operation.sequence]
            if kind == FORGET:
                positions[operation.sequence] = min(n_past, operation.first)
            elif kind == COPY:
                positions[operation.target] = n_past
            elif kind == SAVE:
                saved[operation.path] = n_past
            else:
                n_past = positions[operation.sequence] = saved[operation.path]
            yield Shape(kind, 0, n_past, 1, 0)
        elif kind != SPECULATE:
            n_tokens = sum(part.n_tokens for part in parts)
            n_outputs = sum(part.n_outputs for part in parts)
            for _ in range(operation.times):
                n_past = max(positions[part.sequence] for part in parts)
                for part in parts:
                    positions[part.sequence] += part.n_tokens
                yield Shape(kind, n_tokens, n_past, len(parts), n_outputs)
