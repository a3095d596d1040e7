"""A model's parts: its weight matrices, the heads of its layers, and each layer's attention window.

All counts of FLOPs, bytes and memory come from these.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lab.core.matrix import BLOCKS, Matrix
from lab.core.record import Model

__all__ = ["BLOCKS", "Matrix"]  # for other folders

ATTENTION, FEED_FORWARD, EXPERTS, OUTPUT, EMBEDDING = "attention", "ffn", "experts", "output", "embedding"
OTHER = "other"
"""The parts of a model. OTHER is everything that the lab cannot count (recurrent layers, shared caches)."""

_IN_LAYERS = {
    ATTENTION: re.compile(r"attn_(q|k|v|qkv|output)"),
    FEED_FORWARD: re.compile(r"ffn_(gate|up|down)(_shexp)?|ffn_gate_inp(_shexp)?"),
    EXPERTS: re.compile(r"ffn_(gate|up|down|gate_up)_exps"),
}
_ROWS_ONLY = ("position_embd.weight", "token_types.weight")  # a step reads only one row for each token


@dataclass(frozen=True)
class Heads:
    """`n_layer` layers with equal attention. A token attends to `window` positions, including itself; 0: all."""

    n_layer: int
    n_head: int
    n_head_kv: int
    window: int


def group(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[Matrix, ...]:
    """The matrices in a table of tensors (name, type, dimensions with the inner one first), without vectors."""
    counts: dict[tuple[str, str, int, int, int], int] = {}
    for name, kind, dimensions in tensors:
        columns, rows, n_expert, *_ = [*dimensions, 1, 1]
        if rows * n_expert == 1 or not name.endswith(".weight") or "norm" in name or name in _ROWS_ONLY:
            continue
        part = _part(name.removesuffix(".weight"))
        if part != EXPERTS and n_expert > 1:
            part = OTHER
        key = part, kind, rows, columns, n_expert
        counts[key] = counts.get(key, 0) + 1
    return tuple(Matrix(*key[:4], n, key[4]) for key, n in counts.items())


def _part(name: str) -> str:
    if name in ("token_embd", "output"):
        return EMBEDDING if name == "token_embd" else OUTPUT
    layer = re.fullmatch(r"blk\.\d+\.(.+)", name)
    fitting = [part for part, pattern in _IN_LAYERS.items() if layer and pattern.fullmatch(layer[1])]
    return fitting[0] if fitting else OTHER


def matrices(model: Model) -> tuple[Matrix, ...] | None:
    """The weight matrices of a model; None if it has parts, types or sizes that the lab cannot count."""
    known = model.matrices
    if known is None or model.uncounted or any(m.part == OTHER or m.type not in BLOCKS for m in known):
        return None
    if not any(m.part == EMBEDDING for m in known) or any(min(m.n, m.rows, m.columns, m.n_expert) <= 0 for m in known):
        return None
    if any(m.part == EXPERTS for m in known) and not model.n_expert_used:
        return None
    return known


def head(known: Sequence[Matrix]) -> Matrix:
    """The output matrix, or with tied embeddings the embedding table."""
    by_part = {matrix.part: matrix for matrix in known}
    return by_part.get(OUTPUT) or by_part[EMBEDDING]


def heads(model: Model) -> tuple[Heads, ...] | None:
    """The layers grouped by heads and window; None if the header lacks them, or the lab cannot count the model."""
    n_layer = model.n_layer
    if not n_layer or not model.head_dim or model.uncounted or any(m.part == OTHER for m in model.matrices or ()):
        return None
    per_layer = (
        model.heads or (model.n_head,) * n_layer,
        model.heads_kv or (model.n_head_kv,) * n_layer,
        model.windows or (0,) * n_layer,
    )
    if any(len(column) != n_layer or None in column for column in per_layer):
        return None
    counts: dict[tuple[int, int, int], int] = {}
    for n_head, n_head_kv, window in zip(*per_layer, strict=True):
        key = (n_head or 0, n_head_kv or 0, window or 0)
        counts[key] = counts.get(key, 0) + 1
    return tuple(Heads(n, *key) for key, n in counts.items() if key[0] and key[1])


def n_experts_read(matrix: Matrix, n_used: int, n_tokens: int) -> float:
    """Expected number of a matrix's n experts that a step of n_tokens reads: n (1 - (1 - n_used / n)^n_tokens).

    Every token uses `n_used` experts, as if drawn at random.
    """
    n = matrix.n_expert
    return n * (1 - (1 - min(1.0, n_used / n)) ** n_tokens)
