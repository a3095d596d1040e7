"""A model's parts: its weight matrices, the heads of its layers, and each layer's attention window.

All counts of FLOPs, bytes and memory come from these. Most models have one number of heads for all layers; some have a
list. Which layers have a window is often not in the file but in llama.cpp's code for the architecture; so it is here
too (llama.cpp 0c1e570, src/models, load_arch_hparams).
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lab.core.record import Model

BLOCKS = {
    # weights per block, bytes per block: the block structures of ggml-common.h
    **{
        "F32": (1, 4),
        "F16": (1, 2),
        "BF16": (1, 2),
        "Q1_0": (128, 18),
        "Q2_0": (64, 18),
        "Q4_0": (32, 18),
    },
    **{
        "Q4_1": (32, 20),
        "Q5_0": (32, 22),
        "Q5_1": (32, 24),
        "Q8_0": (32, 34),
        "Q2_K": (256, 84),
        "Q3_K": (256, 110),
    },
    **{
        "Q4_K": (256, 144),
        "Q5_K": (256, 176),
        "Q6_K": (256, 210),
        "IQ1_S": (256, 50),
        "IQ1_M": (256, 56),
    },
    **{
        "IQ2_XXS": (256, 66),
        "IQ2_XS": (256, 74),
        "IQ2_S": (256, 82),
        "IQ3_XXS": (256, 98),
        "IQ3_S": (256, 110),
    },
    **{
        "IQ4_NL": (32, 18),
        "IQ4_XS": (256, 136),
        "TQ1_0": (256, 54),
        "TQ2_0": (256, 66),
        "MXFP4": (32, 17),
    },
    **{"NVFP4": (64, 36)},
}

ATTENTION = "attention"
FEED_FORWARD = "ffn"
EXPERTS = "experts"
OUTPUT = "output"
EMBEDDING = "embedding"
OTHER = "other"
"""The parts of a model. OTHER is everything that the lab cannot count (recurrent layers, shared caches)."""
_IN_LAYERS = {
    ATTENTION: re.compile(r"attn_(q|k|v|qkv|gate|output)|ssm_(conv1d|alpha|beta|out)"),
    FEED_FORWARD: re.compile(r"ffn_(gate|up|down)(_shexp)?|ffn_gate_inp(_shexp)?"),
    EXPERTS: re.compile(r"ffn_(gate|up|down|gate_up)_exps"),
}
_ROWS_ONLY = (
    "position_embd.weight",
    "token_types.weight",
)  # a step reads only one row for each token

PERIODS = {
    # Layers in a period; the last one of a period sees everything, or (DENSE_FIRST) the first one.
    **{
        "afmoe": 4,
        "cohere2": 4,
        "cohere2moe": 4,
        "exaone-moe": 4,
        "exaone4": 4,
        "gemma2": 2,
        "gemma3": 6,
    },
    **{"gpt-oss": 2, "laguna": 4, "mellum": 4, "olmo2": 4, "plamo3": 8, "smallthinker": 4},
}
DENSE_FIRST = ("cohere2moe", "laguna", "smallthinker")
WINDOWS = {
    "gemma2": 4096,
    "exaone-moe": 128,
    "smallthinker": 4096,
}  # the window where the file does not say
UNCOUNTED = {"llama4": "it attends in chunks"}
DELTA_NETS = ("qwen35", "qwen35moe")
"""Only each fourth layer of these architectures attends; the others are gated delta nets, which the lab counts."""

SINGLE = {
    # A key that may be in a header: what it means that the lab does not count.
    "attention.key_length_mla": "its keys and values are compressed (MLA)",
    "attention.shared_kv_layers": "some of its layers share a cache",
    "attention.key_length_swa": "its layers with a window have heads of another width",
    "ssm.state_size": "some of its layers are recurrent",
    "wkv.head_size": "its layers are recurrent",
    "shortconv.l_cache": "some of its layers are convolutions",
    "kda.head_dim": "some of its layers are recurrent",
}


@dataclass(frozen=True)
class Matrix:
    """`n` weight matrices of the same shape and type. A matrix of `n_expert` experts counts once."""

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
        n_weights, n_bytes = BLOCKS[self.type]
        return self.n_weights / n_weights * n_bytes


@dataclass(frozen=True)
class Heads:
    """`n_layer` layers with equal attention. A token attends to `window` positions, including itself; 0: all."""

    n_layer: int
    n_head: int
    n_head_kv: int
    window: int


def read_layers(
    arch: str | None,
    n_layer: int | None,
    number: Callable[[str], int | None],
    numbers: Callable[[str], tuple[int, ...] | None],
) -> dict[str, Any]:
    """What `number` and `numbers` (a key's value, a key's list) tell of the layers, as fields of Model."""

    def alike(key: str) -> tuple[int | None, tuple[int, ...] | None]:
        listed = numbers(key)
        if listed is None:
            return number(key), None
        listed = listed[: n_layer or 0]
        if (
            not listed or not 0 <= min(listed) <= max(listed) <= 10_000
        ):  # far above any model there is
            return None, None
        return (listed[0], None) if len(set(listed)) == 1 else (None, listed)

    n_head, heads = alike(f"{arch}.attention.head_count")
    n_head_kv, heads_kv = alike(f"{arch}.attention.head_count_kv")
    if n_head_kv is None and heads_kv is None:
        n_head_kv = n_head
        heads_kv = heads
    window = number(f"{arch}.attention.sliding_window") or WINDOWS.get(arch or "")
    if arch == "exaone4":
        window = 4096 if n_layer == 64 else None
    pattern = numbers(f"{arch}.attention.sliding_window_pattern")
    windows = None
    problem = None
    if (
        pattern is None and arch in PERIODS
    ):  # llama.cpp reads the window of no other architecture without a list
        period = number(f"{arch}.attention.sliding_window_pattern") or PERIODS[arch]
        full = 0 if arch in DENSE_FIRST else period - 1
        pattern = tuple(int(layer % period != full) for layer in range(n_layer or 0))
    if (
        window and n_layer and pattern is not None and arch != "phi3"
    ):  # llama.cpp ignores the window of phi3's files
        if len(pattern) < n_layer:
            problem = "its list of windows is shorter than its list of layers"
        else:
            windows = tuple(window if windowed else 0 for windowed in pattern[:n_layer])
    if arch in DELTA_NETS and n_layer and n_head and n_head_kv:
        return _delta_net(arch, n_layer, n_head, n_head_kv, number)
    found = (meaning for key, meaning in SINGLE.items() if number(f"{arch}.{key}"))
    problem = problem or UNCOUNTED.get(arch or "") or next(found, None)
    alike_heads = {"n_head": n_head, "n_head_kv": n_head_kv, "heads": heads, "heads_kv": heads_kv}
    return {**alike_heads, "windows": windows, "uncounted": problem}


def _delta_net(
    arch: str, n_layer: int, n_head: int, n_head_kv: int, number: Callable[[str], int | None]
) -> dict[str, Any]:
    """The layers of a hybrid with gated delta nets: those without attention have no heads, and a state of fixed size.

    The state of a layer: a matrix for each head of values, and the last inputs of its convolution (llama.cpp 0c1e570,
    src/models/qwen35.cpp and llama-hparams.cpp, n_embd_r and n_embd_s).
    """
    keys = ("state_size", "group_count", "time_step_rank", "conv_kernel")
    size, n_group, n_value, n_conv = (number(f"{arch}.ssm.{key}") for key in keys)
    period = number(f"{arch}.full_attention_interval") or 4
    problem = (
        "it has layers that predict several tokens"
        if number(f"{arch}.nextn_predict_layers")
        else None
    )
    if not (size and n_group and n_value and n_conv):
        return {
            "n_head": n_head,
            "n_head_kv": n_head_kv,
            "uncounted": problem or SINGLE["ssm.state_size"],
        }
    attends = [(i + 1) % period == 0 for i in range(n_layer)]
    of_layer = size * size * n_value + (n_conv - 1) * size * (2 * n_group + n_value)
    heads, heads_kv = (tuple(n * is_one for is_one in attends) for n in (n_head, n_head_kv))
    n_state = of_layer * attends.count(False)
    alike = {"n_head": None, "n_head_kv": None}
    return {**alike, "heads": heads, "heads_kv": heads_kv, "uncounted": problem, "n_state": n_state}


def group(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[Matrix, ...]:
    """The matrices in a table of tensors (name, type, dimensions with the inner one first), without vectors."""
    counts = collections.Counter[tuple[str, str, int, int, int]]()
    for name, kind, dimensions in tensors:
        columns, rows, n_expert, *_ = [*dimensions, 1, 1]
        if (
            rows * n_expert == 1
            or not name.endswith(".weight")
            or "norm" in name
            or name in _ROWS_ONLY
        ):
            continue
        layer = re.fullmatch(r"blk\.\d+\.(.+)\.weight", name)
        part = {"token_embd.weight": EMBEDDING, "output.weight": OUTPUT}.get(name) or next(
            (part for part, pattern in _IN_LAYERS.items() if layer and pattern.fullmatch(layer[1])),
            OTHER,
        )
        counts[
            OTHER if part != EXPERTS and n_expert > 1 else part, kind, rows, columns, n_expert
        ] += 1
    return tuple(Matrix(*key[:4], n, key[4]) for key, n in counts.items())


def matrices(model: Model) -> tuple[Matrix, ...] | None:
    """The weight matrices of a model; None if it has parts, types or sizes that the lab cannot count."""
    known = model.matrices
    if (
        known is None
        or model.uncounted
        or any(m.part == OTHER or m.type not in BLOCKS for m in known)
    ):
        return None
    if not any(m.part == EMBEDDING for m in known) or any(
        min(m.n, m.rows, m.columns, m.n_expert) <= 0 for m in known
    ):
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
    if (
        not n_layer
        or not model.head_dim
        or model.uncounted
        or any(m.part == OTHER for m in model.matrices or ())
    ):
        return None
    per_layer = (
        model.heads or (model.n_head,) * n_layer,
        model.heads_kv or (model.n_head_kv,) * n_layer,
        model.windows or (0,) * n_layer,
    )
    if any(len(column) != n_layer or None in column for column in per_layer):
        return None
    counts = collections.Counter(zip(*per_layer, strict=True))
    return tuple(
        Heads(n, own, kv, window or 0) for (own, kv, window), n in counts.items() if own and kv
    )


def n_experts_read(matrix: Matrix, n_used: int, n_tokens: int) -> float:
    """How many of the experts n_tokens read that use `n_used` each at random: n (1 - (1 - n_used / n)^n_tokens)."""
    n = matrix.n_expert
    return n * (1 - (1 - min(1.0, n_used / n)) ** n_tokens)
