"""A model's parts: its weight matrices, the heads of its layers, and each layer's attention window.

All counts of FLOPs, bytes and memory come from these. Most models have one number of heads for all
layers; some have a list. Which layers have a window is often not in the file but in llama.cpp's
code for the architecture; so it is here too (llama.cpp 0c1e570, src/models, load_arch_hparams).
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

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
OTHER = "other"
"""The parts of a model. OTHER: what the lab cannot count (recurrent layers, shared caches)."""

_OF_MODEL = {"token_embd.weight": EMBEDDING, "output.weight": OUTPUT}
_OF_LAYERS = {
    ATTENTION: re.compile(r"attn_(q|k|v|qkv|gate|output)|ssm_(conv1d|alpha|beta|out)"),
    FEED_FORWARD: re.compile(r"ffn_(gate|up|down)(_shexp)?|ffn_gate_inp(_shexp)?"),
    EXPERTS: re.compile(r"ffn_(gate|up|down|gate_up)_exps"),
}
# A step reads only a row of these for each token.
_ROWS_ONLY = ("position_embd.weight", "token_types.weight")

PERIODS = {
    # Layers in a period; the last one of a period sees everything, or (DENSE_FIRST) the first one.
    "afmoe": 4,
    "cohere2": 4,
    "cohere2moe": 4,
    "exaone-moe": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gpt-oss": 2,
    "laguna": 4,
    "mellum": 4,
    "olmo2": 4,
    "plamo3": 8,
    "smallthinker": 4,
}
DENSE_FIRST = ("cohere2moe", "laguna", "smallthinker")
WINDOWS = {"gemma2": 4096, "exaone-moe": 128, "smallthinker": 4096}
"""The window of an architecture where the file does not say."""

UNCOUNTED = {"llama4": "it attends in chunks"}

DELTA_NETS = ("qwen35", "qwen35moe")
"""Only each fourth layer of these architectures attends; the others are gated delta nets."""

SINGLE = {
    # A key that may be in a header, and what it means that the lab does not count.
    "attention.key_length_mla": "its keys and values are compressed (MLA)",
    "attention.shared_kv_layers": "some of its layers share a cache",
    "attention.key_length_swa": "its layers with a window have heads of another width",
    "ssm.state_size": "some of its layers are recurrent",
    "wkv.head_size": "its layers are recurrent",
    "shortconv.l_cache": "some of its layers are convolutions",
    "kda.head_dim": "some of its layers are recurrent",
}

MOST_HEADS = 10_000  # far above any model there is


class Keys(Protocol):
    """The values of a header; None for a key that it lacks or that has another type."""

    def number(self, key: str) -> int | None: ...

    def numbers(self, key: str) -> tuple[int, ...] | None: ...


@dataclass(frozen=True)
class Matrix:
    """`n` weight matrices of one shape and type. A matrix of `n_expert` experts counts once."""

    part: str
    type: str
    rows: int
    columns: int
    n: float
    n_expert: int = 1

    @property
    def n_weights(self) -> float:
        return self.n * self.n_expert * self.rows * self.columns

    @property
    def n_bytes(self) -> float:
        block_weights, block_bytes = BLOCKS[self.type]
        return self.n_weights / block_weights * block_bytes


@dataclass(frozen=True)
class Heads:
    """`n_layer` layers of equal attention.

    A token attends to `window` positions, including itself; 0: all.
    """

    n_layer: int
    n_head: int
    n_head_kv: int
    window: int


@dataclass(frozen=True)
class Layers:
    """What a header tells about the layers: fields of `Model`."""

    n_head: int | None = None
    n_head_kv: int | None = None
    heads: tuple[int, ...] | None = None
    heads_kv: tuple[int, ...] | None = None
    windows: tuple[int, ...] | None = None
    n_state: int | None = None
    uncounted: str | None = None


def read_layers(header: Keys, arch: str | None, n_layer: int | None) -> Layers:
    """What a header tells about the layers of a model."""
    n_head, heads = _heads_by_layer(header, f"{arch}.attention.head_count", n_layer)
    n_head_kv, heads_kv = _heads_by_layer(header, f"{arch}.attention.head_count_kv", n_layer)
    if n_head_kv is None and heads_kv is None:
        n_head_kv = n_head
        heads_kv = heads
    if arch in DELTA_NETS and n_layer and n_head and n_head_kv:
        return _delta_net(header, arch, n_layer, n_head, n_head_kv)

    windows = None
    uncounted = _uncounted(header, arch)
    window = _window(header, arch, n_layer)
    pattern = _window_pattern(header, arch, n_layer)
    if window and n_layer and pattern is not None:
        if len(pattern) < n_layer:
            uncounted = "its list of windows is shorter than its list of layers"
        else:
            windows = tuple(window if has_window else 0 for has_window in pattern[:n_layer])
    return Layers(n_head, n_head_kv, heads, heads_kv, windows, uncounted=uncounted)


def _heads_by_layer(
    header: Keys, key: str, n_layer: int | None
) -> tuple[int | None, tuple[int, ...] | None]:
    """The number of heads of all layers, or if they differ the list."""
    listed = header.numbers(key)
    if listed is None:
        return header.number(key), None
    listed = listed[: n_layer or 0]
    if not listed or min(listed) < 0 or max(listed) > MOST_HEADS:
        return None, None
    if len(set(listed)) == 1:
        return listed[0], None
    return None, listed


def _window(header: Keys, arch: str | None, n_layer: int | None) -> int | None:
    """The window of the layers that have one; None if no layer has one."""
    if arch == "phi3":  # llama.cpp ignores the window of its files
        return None
    if arch == "exaone4":
        return 4096 if n_layer == 64 else None
    return header.number(f"{arch}.attention.sliding_window") or WINDOWS.get(arch or "")


def _window_pattern(
    header: Keys, arch: str | None, n_layer: int | None
) -> tuple[int, ...] | None:
    """For each layer whether it has a window: from the file's list, or the architecture's period.

    None: llama.cpp reads the window of no other architecture.
    """
    key = f"{arch}.attention.sliding_window_pattern"
    pattern = header.numbers(key)
    if pattern is not None or arch not in PERIODS:
        return pattern
    period = header.number(key) or PERIODS[arch]
    dense = 0 if arch in DENSE_FIRST else period - 1
    return tuple(int(layer % period != dense) for layer in range(n_layer or 0))


def _uncounted(header: Keys, arch: str | None) -> str | None:
    """The first property of a model that the lab does not count, if any."""
    if arch in UNCOUNTED:
        return UNCOUNTED[arch]
    for key, meaning in SINGLE.items():
        if header.number(f"{arch}.{key}"):
            return meaning
    return None


def _delta_net(header: Keys, arch: str, n_layer: int, n_head: int, n_head_kv: int) -> Layers:
    """The layers of a hybrid with gated delta nets.

    Those without attention have no heads, and a state of fixed size: a matrix for each head of
    values, and the last inputs of its convolution (llama.cpp 0c1e570, src/models/qwen35.cpp and
    llama-hparams.cpp, n_embd_r and n_embd_s).
    """
    uncounted = None
    if header.number(f"{arch}.nextn_predict_layers"):
        uncounted = "it has layers that predict several tokens"
    size = header.number(f"{arch}.ssm.state_size")
    n_group = header.number(f"{arch}.ssm.group_count")
    n_value = header.number(f"{arch}.ssm.time_step_rank")
    n_conv = header.number(f"{arch}.ssm.conv_kernel")
    if not (size and n_group and n_value and n_conv):
        return Layers(n_head, n_head_kv, uncounted=uncounted or SINGLE["ssm.state_size"])

    period = header.number(f"{arch}.full_attention_interval") or 4
    layers = range(1, n_layer + 1)
    heads = tuple(n_head if layer % period == 0 else 0 for layer in layers)
    heads_kv = tuple(n_head_kv if n else 0 for n in heads)
    matrix_state = size * size * n_value
    convolution_state = (n_conv - 1) * size * (2 * n_group + n_value)
    n_state = heads.count(0) * (matrix_state + convolution_state)
    return Layers(heads=heads, heads_kv=heads_kv, n_state=n_state, uncounted=uncounted)


def group(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[Matrix, ...]:
    """The matrices of a table of tensors, without vectors.

    A tensor is its name, its type and its dimensions, the inner one first.
    """
    counts: collections.Counter[tuple[str, str, int, int, int]] = collections.Counter()
    for name, kind, dimensions in tensors:
        columns, rows, n_expert, *_ = [*dimensions, 1, 1]
        is_matrix = name.endswith(".weight") and "norm" not in name and rows * n_expert > 1
        if is_matrix and name not in _ROWS_ONLY:
            counts[_part(name, n_expert), kind, rows, columns, n_expert] += 1
    matrices = []
    for (part, kind, rows, columns, n_expert), n in counts.items():
        matrices.append(Matrix(part, kind, rows, columns, n, n_expert))
    return tuple(matrices)


def _part(name: str, n_expert: int) -> str:
    """The part that a matrix belongs to, by its name."""
    if name in _OF_MODEL:
        return _OF_MODEL[name] if n_expert == 1 else OTHER
    layer = re.fullmatch(r"blk\.\d+\.(.+)\.weight", name)
    if layer:
        for part, pattern in _OF_LAYERS.items():
            if pattern.fullmatch(layer[1]) and (n_expert == 1 or part == EXPERTS):
                return part
    return OTHER


def matrices(model: Model) -> tuple[Matrix, ...] | None:
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


def head(table: Sequence[Matrix]) -> Matrix:
    """The output matrix, or with tied embeddings the embedding table."""
    by_part = {matrix.part: matrix for matrix in table}
    return by_part.get(OUTPUT) or by_part[EMBEDDING]


def heads(model: Model) -> tuple[Heads, ...] | None:
    """The layers that attend, grouped by heads and window.

    None if the header lacks them, or the lab cannot count the model.
    """
    n_layer = model.n_layer
    if not n_layer or not model.head_dim or model.uncounted:
        return None
    if any(matrix.part == OTHER for matrix in model.matrices or ()):
        return None
    heads_by_layer = model.heads or (model.n_head,) * n_layer
    heads_kv_by_layer = model.heads_kv or (model.n_head_kv,) * n_layer
    windows = model.windows or (0,) * n_layer
    for column in (heads_by_layer, heads_kv_by_layer, windows):
        if len(column) != n_layer or None in column:
            return None
    counts = collections.Counter(zip(heads_by_layer, heads_kv_by_layer, windows, strict=True))
    groups = []
    for (n_head, n_head_kv, window), n in counts.items():
        if n_head and n_head_kv:
            groups.append(Heads(n, n_head, n_head_kv, window))
    return tuple(groups)


def n_experts_read(matrix: Matrix, n_used: int, n_tokens: int) -> float:
    """How many of the n experts are read by n_tokens that use `n_used` each, at random.

    n (1 - (1 - n_used / n)^n_tokens)
    """
    n = matrix.n_expert
    unused_share = 1 - min(1.0, n_used / n)
    return n * (1 - unused_share**n_tokens)
