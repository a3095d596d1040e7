"""What the child finds when it stops after every operation (child.py), and when it looks at attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.core.traced import Looks

if TYPE_CHECKING:
    from lab.process.worker import Worker


@dataclass(frozen=True)
class Operand:
    """A tensor: its name and type in ggml, its dimensions (the inner one first), and its bytes."""

    name: str
    type: str
    ne: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True)
class Node:
    """An operation of ggml's graph: what it computes from what, in which buffer type, and its stamps in each step.

    `times_ns` run from just before it is started until it has ended; `gaps_ns` from the end of the one before.
    """

    op: str
    result: Operand
    sources: tuple[Operand, ...]
    buffer: str
    times_ns: tuple[int, ...] = ()
    gaps_ns: tuple[int, ...] = ()


@dataclass(frozen=True)
class StepTrace:
    """The operations of steps of one shape, and nanoseconds of each step.

    `outside_ns`: before the first operation and after the last one. `untraced_ns`: the same steps without stops.
    `choosing_ns`: choosing the next token from the logits. `threads_ns`: the start and end of the CPU's threads, which
    a stop adds to each operation that uses several.
    """

    n_tokens: int
    n_past: int
    nodes: tuple[Node, ...]
    outside_ns: tuple[int, ...]
    untraced_ns: tuple[int, ...]
    choosing_ns: tuple[int, ...]
    threads_ns: int = 0


@dataclass(frozen=True)
class Trace:
    """Prefill of a prompt in one call of llama_decode, and decode steps after it (those of its first position)."""

    prefill: StepTrace
    decode: StepTrace


def trace(worker: Worker, tokens: Sequence[int], n_gen: int, n_rounds: int) -> Trace:
    """The operations of prefill and of `n_gen` decode steps, in `n_rounds` rounds beside untraced steps."""
    asked = {"tokens": list(tokens), "n_gen": n_gen, "n_rounds": n_rounds}
    return worker.call(Trace, "lab.features.trace.child.trace", **asked)


def look(worker: Worker, tokens: Sequence[int], replaced: int, replacement: int) -> Looks:
    """The attention weights of a prompt, and how K and V move if the token at index `replaced` is another one."""
    asked = {"tokens": list(tokens), "replaced": replaced, "replacement": replacement}
    return worker.call(Looks, "lab.features.trace.child.look", **asked)
