"""What crosses the pipe: the operations that the child stops at (child.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operand:
    """A tensor: its name and type in ggml, its dimensions (the inner one first), and its bytes."""

    name: str
    type: str
    ne: tuple[int, ...]
    n_bytes: int


@dataclass(frozen=True)
class Node:
    """An operation of ggml's graph.

    `ns`: from its start until it has ended; `gap_ns`: before it. Both are medians.
    """

    op: str
    result: Operand
    sources: tuple[Operand, ...]
    buffer: str
    ns: float = 0.0
    gap_ns: float = 0.0


@dataclass(frozen=True)
class StepTrace:
    """The operations of `n_steps` steps of one shape. Times are medians in nanoseconds."""

    n_tokens: int
    n_past: int
    nodes: tuple[Node, ...]
    n_steps: int
    outside_ns: float  # before the first operation and after the last one
    untraced_ns: float  # the same steps without stops
    choosing_ns: float  # choosing the next token from the logits
    threads_ns: int = 0  # starting and ending the CPU's threads at a stop


@dataclass(frozen=True)
class Trace:
    """Prefill of a prompt in one call of llama_decode, and decode steps after it.

    The operations of decode are those of its first step.
    """

    prefill: StepTrace
    decode: StepTrace
