"""A script: everything that one run does, as a list of operations, written down before the clock starts.

One loop (engine/loop.py) executes every script and stamps every operation, so that a measured run, a sweep, a batch of
sequences or a prompt that is prefilled beside running answers differ in nothing but their script:

    a run        prefill, prefill, decode x (n_gen - 1)
    a sweep      prefill, decode x (n_gen - 1), forget, prefill, decode x (n_gen - 1), forget, ...
    a batch      prefill of every sequence, then decode x (n_gen - 1) with one token of each in every step
    speculation  prefill, then `speculate`, which is as many steps as it takes: draft x n, verify, forget, ...

A token that is not given is the one that was chosen last for its sequence. What `speculate` does depends on the tokens
that are chosen: its steps are known only when they have been made.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lab.core.record import COPY, DECODE, DRAFT, FORGET, LOAD, PREFILL, SAVE

SPECULATE = "speculate"

MOVES = (FORGET, COPY, SAVE, LOAD)
"""Kinds of operations that compute nothing: they change, or move, what the cache holds of a sequence."""


@dataclass(frozen=True)
class Part:
    """What one sequence does in a step: some given tokens, or (None) the one that was chosen last for it.

    The last `n_outputs` of them get logits, and from each a token is chosen.
    """

    sequence: int
    tokens: tuple[int, ...] | None
    n_outputs: int = 0

    @property
    def n_tokens(self) -> int:
        return 1 if self.tokens is None else len(self.tokens)


@dataclass(frozen=True)
class Operation:
    """One step (`parts`, `times` times), or a change of what the cache holds of `sequence`.

    forget: all from position `first` on. copy: to sequence `target`, which is empty. save and load: to or from the
    file `path`, or memory where that is None. speculate: `times` tokens of sequence 0, of which up to `n_draft` are
    guessed at a time. `of_draft`: on the draft model, or (speculate) guessed by it, not looked up in the text. With
    `keeps` the logits of a step are compared after the run, with `margins` it is noted how sure each choice was.
    Without `waits` a step is submitted only: it is ready when a later one is.
    """

    kind: str
    parts: tuple[Part, ...] = ()
    times: int = 1
    sequence: int = 0
    first: int = 0
    target: int = 0
    path: str | None = None
    keeps: bool = False
    n_draft: int = 0
    of_draft: bool = False
    margins: bool = False
    waits: bool = True


Script = Sequence[Operation]


@dataclass(frozen=True)
class Shape:
    """The columns of Steps that are known before an operation is executed."""

    kind: str
    n_tokens: int
    n_past: int
    n_seq: int
    n_outputs: int


def run(prompt: Sequence[int], n_gen: int, n_ubatch: int) -> list[Operation]:
    """The script of a measured run: prefill the prompt, then generate."""
    return [*prefill(0, prompt, n_ubatch), *decode([0], n_gen - 1)]


def sweep(prompt: Sequence[int], n_gen: int, n_ubatch: int, every: int) -> list[Operation]:
    """The script of a sweep: after each `every` tokens of the prompt, and at its end, n_gen tokens come and go."""
    operations: list[Operation] = []
    for first in range(0, len(prompt), every):
        if first:
            operations.append(Operation(FORGET, first=first))
        operations += [*prefill(0, prompt[first : first + every], n_ubatch), *decode([0], n_gen - 1)]
    return operations


def prefill(
    sequence: int, tokens: Sequence[int], n_ubatch: int, is_last: bool = True, margins: bool = False
) -> list[Operation]:
    """Steps of up to n_ubatch tokens; the very last token gets logits where it `is_last` of its prompt."""
    steps = []
    for first in range(0, len(tokens), n_ubatch):
        ends = is_last and first + n_ubatch >= len(tokens)
        part = Part(sequence, tuple(tokens[first : first + n_ubatch]), int(ends))
        steps.append(Operation(PREFILL, (part,), margins=margins))
    return steps


def decode(sequences: Sequence[int], n: int, margins: bool = False) -> list[Operation]:
    """n steps of one token of each sequence; nothing for n = 0."""
    parts = tuple(Part(sequence, None, 1) for sequence in sequences)
    return [Operation(DECODE, parts, times=n, margins=margins)] if n else []


def wait_once(script: Script) -> list[Operation]:
    """The same script, where steps without logits are not waited for if another step follows at once.

    Devices that hold different layers then work at different steps at the same time, as llama-bench lets them.
    """
    changed = []
    for i, operation in enumerate(script):
        has_logits = any(part.n_outputs for part in operation.parts)
        is_followed = i + 1 < len(script) and script[i + 1].kind not in (*MOVES, SPECULATE)
        changed.append(dataclasses.replace(operation, waits=has_logits or not operation.parts or not is_followed))
    return changed


def read_by_draft(tokens: Sequence[int], n_ubatch: int) -> list[Operation]:
    """The draft model reads a prompt; nothing is chosen."""
    parts = [(Part(0, tuple(tokens[i : i + n_ubatch])),) for i in range(0, len(tokens), n_ubatch)]
    return [Operation(DRAFT, part, of_draft=True) for part in parts]


def n_prefilled(script: Script) -> int:
    """Tokens that the script gives, over all its steps."""
    return sum(len(part.tokens) for operation in script for part in operation.parts if part.tokens is not None)


def n_chosen(script: Script) -> int:
    """Tokens that are chosen of the model, over all its steps."""
    return sum(
        operation.times * (1 if operation.kind == SPECULATE else sum(part.n_outputs for part in operation.parts))
        for operation in script
        if operation.kind == SPECULATE or not operation.of_draft
    )


def shapes(script: Script) -> Iterator[Shape]:
    """What each step will be, but for those of `speculate`. `n_past` is that of the sequence that has most."""
    of_model, of_draft = collections.Counter[int](), collections.Counter[int]()  # positions of each sequence
    saved: dict[str | None, int] = {}
    for operation in script:
        positions = of_draft if operation.of_draft else of_model
        if operation.kind in MOVES:
            yield Shape(operation.kind, 0, _move(operation, positions, saved), 1, 0)
        elif operation.kind != SPECULATE:
            for _ in range(operation.times):
                yield _step(operation, positions)


def _move(operation: Operation, positions: dict[int, int], saved: dict[str | None, int]) -> int:
    """Changes the positions as the operation does. Returns those of its sequence before; of a load, after it."""
    n_past = positions[operation.sequence]
    if operation.kind == FORGET:
        positions[operation.sequence] = min(n_past, operation.first)
    elif operation.kind == COPY:
        positions[operation.target] = n_past
    elif operation.kind == SAVE:
        saved[operation.path] = n_past
    else:
        n_past = positions[operation.sequence] = saved[operation.path]
    return n_past


def _step(operation: Operation, positions: dict[int, int]) -> Shape:
    """One step of the operation; its tokens are added to the positions."""
    parts = operation.parts
    n_past = max(positions[part.sequence] for part in parts)
    for part in parts:
        positions[part.sequence] += part.n_tokens
    n_tokens, n_outputs = sum(part.n_tokens for part in parts), sum(part.n_outputs for part in parts)
    return Shape(operation.kind, n_tokens, n_past, len(parts), n_outputs)
