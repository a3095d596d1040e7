"""The weight matrices of a model, counted by shape and type, and the part that each belongs to."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lab.core.bounds import Amount, Extent, Parts, Text

if TYPE_CHECKING:
    from lab.core.record import Model

BLOCKS = {
    # weights per block, bytes per block: the block structures of ggml-common.h
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "IQ1_S": (256, 50),
    "IQ1_M": (256, 56),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ2_S": (256, 82),
    "IQ3_XXS": (256, 98),
    "IQ3_S": (256, 110),
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}

ATTENTION = "attention"
FEED_FORWARD = "ffn"
EXPERTS = "experts"
OUTPUT = "output"
EMBEDDING = "embedding"
INPUT = "input"
UNMULTIPLIED = "unmultiplied"
OTHER = "other"
"""The parts of a model.

ATTENTION: all that mixes tokens, also recurrent layers and convolutions. INPUT: matrices outside
the layers that multiply every token. UNMULTIPLIED: tables, which a step reads by rows, and matrices
that llama.cpp does not use. OTHER: what the lab cannot count.
"""

_OF_MODEL = {
    "token_embd.weight": EMBEDDING,
    "output.weight": OUTPUT,
    "per_layer_model_proj.weight": INPUT,
    "altup_proj.weight": INPUT,
    "altup_unembd_proj.weight": INPUT,
    "position_embd.weight": UNMULTIPLIED,
    "token_types.weight": UNMULTIPLIED,
    "per_layer_token_embd.weight": UNMULTIPLIED,
}
_OF_LAYERS = {
    ATTENTION: re.compile(
        r"attn_(q|k|v|qkv|gate|output|q_a|q_b|kv_a_mqa|kv_b|k_b|v_b)"
        r"|ssm_(in|conv1d|conv1d_[qkv]|x|dt|alpha|beta|ba|out|f_a|f_b|g_a|g_b)"
        r"|shortconv\.(conv|in_proj|out_proj)"
        r"|laurel_[lr]|altup_(router|predict_coef|correct_coef)"
    ),
    FEED_FORWARD: re.compile(
        r"ffn_(gate|up|down)(_shexp)?|ffn_gate_inp(_shexp)?|ffn_latent_(up|down)|inp_gate|proj"
    ),
    EXPERTS: re.compile(r"ffn_(gate|up|down|gate_up)_exps"),
}
_SLICED = re.compile(r"(attn_[kv]_b|altup_(unembd_)?proj|ssm_conv1d_[qkv])\.weight")
"""Matrices whose third dimension does not count experts: every token uses all slices."""

_KEYS_AND_VALUES = re.compile(r"blk\.(\d+)\.attn_(k|v)\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.weight")


@dataclass(frozen=True)
class Matrix:
    """`n` weight matrices of one shape and type. A matrix of `n_expert` experts counts once.

    `n_last` of them are in the last layer; None: the same number as in each layer.
    """

    part: Text
    type: Text
    rows: Extent
    columns: Extent
    n: Amount
    n_expert: Parts = 1
    n_last: Amount | None = None

    @property
    def n_weights(self) -> float:
        return self.n * self.n_expert * self.rows * self.columns

    @property
    def n_bytes(self) -> float:
        block_weights, block_bytes = BLOCKS[self.type]
        return self.n_weights / block_weights * block_bytes


Tensors = Iterable[tuple[str, str, Sequence[int]]]
"""Names, types and dimensions, the inner one first."""


@dataclass
class _Tally:
    """Matrices of one form: their number, those in the last layer, and their names in a layer."""

    n: int = 0
    n_last: int = 0
    names: set[str] = field(default_factory=set)


def group(
    tensors: Tensors, n_layer: int | None = None, n_layer_kv: int | None = None
) -> tuple[Matrix, ...]:
    """The matrices of a table of tensors, without vectors.

    Layers from `n_layer` on are not run, and keys and values of layers from `n_layer_kv` on are
    not computed.
    """
    tallies: dict[tuple[str, str, int, int, int], _Tally] = {}
    layers_with = collections.Counter[str]()
    for name, kind, dimensions in tensors:
        columns = dimensions[0]
        rows = dimensions[1] if len(dimensions) > 1 else 1
        n_expert = dimensions[2] if len(dimensions) > 2 else 1
        is_matrix = name.endswith(".weight") and "norm" not in name and rows * n_expert > 1
        if not is_matrix:
            continue
        n_slices = 1
        if _SLICED.search(name):
            n_slices = n_expert
            n_expert = 1
        part = _part(name, n_expert)
        if _reads_another_cache(name, n_layer_kv):
            part = UNMULTIPLIED
        tally = tallies.setdefault((part, kind, rows, columns, n_expert), _Tally())
        tally.n += n_slices
        in_layer = _LAYER.fullmatch(name)
        if in_layer:
            layers_with[in_layer[2]] += 1
            tally.names.add(in_layer[2])
            if n_layer is not None and int(in_layer[1]) == n_layer - 1:
                tally.n_last += n_slices
    matrices = []
    for (part, kind, rows, columns, n_expert), tally in tallies.items():
        n_last = None
        if n_layer is not None and any(layers_with[name] != n_layer for name in tally.names):
            n_last = tally.n_last
        matrices.append(Matrix(part, kind, rows, columns, tally.n, n_expert, n_last))
    return tuple(matrices)


def _reads_another_cache(name: str, n_layer_kv: int | None) -> bool:
    """Whether a tensor makes keys or values of a layer that reads the cache of another one."""
    match = _KEYS_AND_VALUES.fullmatch(name)
    if match is None or n_layer_kv is None:
        return False
    return int(match[1]) >= n_layer_kv


def _part(name: str, n_expert: int) -> str:
    """The part that a matrix belongs to, by its name."""
    if name in _OF_MODEL:
        return _OF_MODEL[name] if n_expert == 1 else OTHER
    layer = _LAYER.fullmatch(name)
    if layer:
        for part, pattern in _OF_LAYERS.items():
            if pattern.fullmatch(layer[2]) and (n_expert == 1 or part == EXPERTS):
                return part
    return OTHER


def matrices_of(model: Model) -> tuple[Matrix, ...] | None:
    """The weight matrices of a model.

    None if it has parts, types or sizes that the lab cannot count.
    """
    table = model.matrices
    if table is None or model.uncounted:
        return None
    parts = {matrix.part for matrix in table}
    if OTHER in parts or EMBEDDING not in parts:
        return None
    if EXPERTS in parts and not model.n_expert_used:
        return None
    for matrix in table:
        if matrix.type not in BLOCKS:
            return None
        if min(matrix.n, matrix.rows, matrix.columns, matrix.n_expert) <= 0:
            return None
    return table


def output_matrix(table: Sequence[Matrix]) -> Matrix:
    """The output matrix, or with tied embeddings the embedding table."""
    by_part = {matrix.part: matrix for matrix in table}
    return by_part.get(OUTPUT) or by_part[EMBEDDING]


def n_experts_read(matrix: Matrix, n_used: int, n_tokens: int) -> float:
    """How many of the n experts are read by n_tokens that use `n_used` each, at random.

    n (1 - (1 - n_used / n)^n_tokens)
    """
    n = matrix.n_expert
    unused_share = 1 - min(1.0, n_used / n)
    return n * (1 - unused_share**n_tokens)
