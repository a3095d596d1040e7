"""A model's parts: its weight matrices, the heads of its layers, and each layer's attention window.

All counts of FLOPs, bytes and memory come from these. Most models have one number of heads for all
layers; some have a list. Which layers have a window is often not in the file but in llama.cpp's
code for the architecture; so it is here too (llama.cpp 0c1e570, src/models, load_arch_hparams).
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

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

PERIODS = {
    # Layers in a period; the last one of a period sees everything, or (DENSE_FIRST) the first one.
    "afmoe": 4,
    "cohere2": 4,
    "cohere2moe": 4,
    "exaone-moe": 4,
    "exaone4": 4,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "laguna": 4,
    "llama4": 4,
    "mellum": 4,
    "olmo2": 4,
    "plamo3": 8,
    "smallthinker": 4,
}
DENSE_FIRST = ("cohere2moe", "laguna", "smallthinker")
WINDOWS = {"gemma2": 4096, "exaone-moe": 128, "llama4": 8192, "smallthinker": 4096}
"""The window of an architecture where the file does not say."""

CHUNKED = ("llama4",)
"""Architectures with windows that do not slide: a token sees the tokens of its chunk."""

LAYERS_WITH_CACHE = {"gemma3n": 20}
"""The first layers, which have a cache; the others read these caches."""

DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
"""Only each fourth layer of these architectures attends; the others are gated delta nets."""

MAMBAS = ("mamba", "mamba2")
"""All layers of these architectures are recurrent."""

PARALLEL_MAMBAS = ("falcon-h1",)
"""All layers of these architectures attend and are recurrent."""

HYBRID_MAMBAS = ("granitehybrid", "jamba", "nemotron_h", "nemotron_h_moe")
"""Layers without heads for keys and values (and without a feed-forward) are recurrent."""

DELTA_FLOPS = 7
"""FLOPs of a gated delta net for each value of its state and each token.

Decay 1, reading for the key 2, update 2, reading for the query 2 (Yang et al., "Gated delta
networks", 2024, equation 10).
"""

SCAN_FLOPS = 5
"""FLOPs of a state-space layer for each value of its state and each token.

Decay 1, adding the input 2, reading the output 2 (Dao and Gu, "Transformers are SSMs", 2024).
"""

RECURRENT = "some of its layers are recurrent"
UNCOUNTED = {
    "deepseek4": "it attends to compressed positions",
    "kimi-k3": "its layers attend to the outputs of earlier layers",
    "minimax-01": "some of its layers use another kind of linear attention",
}
"""Architectures that the lab does not count, with the reason."""

UNCOUNTED_KEYS = {
    # A key that may be in a header, and what it means that the lab does not count.
    "attention.indexer.head_count": (
        "it chooses the positions that it attends to (sparse attention)"
    ),
    "wkv.head_size": "its layers are recurrent",
}
STATE_KEYS = {
    # A key of a layer with a state of fixed size, where the architecture is not known.
    "ssm.state_size": RECURRENT,
    "kda.head_dim": RECURRENT,
    "shortconv.l_cache": "some of its layers are convolutions",
}

MOST_HEADS = 10_000  # far above any model there is


class Keys(Protocol):
    """The values of a header; None for a key that it lacks or that has another type."""

    def number(self, key: str) -> int | None: ...

    def numbers(self, key: str) -> tuple[int, ...] | None: ...


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


@dataclass(frozen=True)
class Heads:
    """`n_layer` layers of equal attention.

    A token attends to `window` positions, including itself; 0: all. With `is_chunked` it attends
    to the positions of its chunk of `window` tokens. Keys are `head_dim` numbers wide in each
    head, values `head_dim_v`. Layers with `has_cache` keep keys, and values unless
    `values_in_keys`; the other layers read the cache of a layer before them.
    """

    n_layer: int
    n_head: int
    n_head_kv: int
    window: int
    head_dim: int
    head_dim_v: int
    is_chunked: bool = False
    has_cache: bool = True
    values_in_keys: bool = False


@dataclass(frozen=True)
class Layers:
    """What a header tells about the layers: fields of `Model`."""

    n_head: int | None = None
    n_head_kv: int | None = None
    heads: tuple[int, ...] | None = None
    heads_kv: tuple[int, ...] | None = None
    windows: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    n_layer_kv: int | None = None
    is_chunked: bool | None = None
    values_in_keys: bool | None = None
    n_state: int | None = None
    states: tuple[int, ...] | None = None
    state_flops: int | None = None
    uncounted: str | None = None


def n_layers_run(header: Keys, arch: str | None) -> int | None:
    """The layers that a step runs: without those that only draft (multi-token prediction)."""
    n_layer = header.number(f"{arch}.block_count")
    if n_layer is None:
        return None
    return max(0, n_layer - (header.number(f"{arch}.nextn_predict_layers") or 0))


def read_layers(header: Keys, arch: str | None, n_layer: int | None) -> Layers:
    """What a header tells about the layers of a model."""
    n_head, heads = _heads_by_layer(header, f"{arch}.attention.head_count", n_layer)
    n_head_kv, heads_kv = _heads_by_layer(header, f"{arch}.attention.head_count_kv", n_layer)
    if n_head_kv is None and heads_kv is None:
        n_head_kv = n_head
        heads_kv = heads
    layers = Layers(n_head, n_head_kv, heads, heads_kv, uncounted=_uncounted(header, arch))
    if not n_layer or not arch:
        return layers
    layers = _with_windows(layers, header, arch, n_layer)
    layers = _with_caches(layers, header, arch, n_layer)
    return _with_states(layers, header, arch, n_layer)


def _with_windows(layers: Layers, header: Keys, arch: str, n_layer: int) -> Layers:
    """The windows of the layers, and where these layers have heads of another width, the widths."""
    window = _window(header, arch, n_layer)
    pattern = _window_pattern(header, arch, n_layer)
    if not window or pattern is None:
        return layers
    if len(pattern) < n_layer:
        reason = "its list of windows is shorter than its list of layers"
        return replace(layers, uncounted=layers.uncounted or reason)
    windows = tuple(window if has_window else 0 for has_window in pattern[:n_layer])
    layers = replace(layers, windows=windows)
    if arch in CHUNKED:
        layers = replace(layers, is_chunked=True)
    width = header.number(f"{arch}.attention.key_length")
    windowed_width = header.number(f"{arch}.attention.key_length_swa")
    if not width or not windowed_width or width == windowed_width:
        return layers
    head_dims = tuple(windowed_width if window else width for window in windows)
    return replace(layers, head_dims=head_dims)


def _with_caches(layers: Layers, header: Keys, arch: str, n_layer: int) -> Layers:
    """Which layers have a cache, and whether keys hold the values (MLA)."""
    n_shared = header.number(f"{arch}.attention.shared_kv_layers") or 0
    n_layer_kv = LAYERS_WITH_CACHE.get(arch, n_layer - n_shared)
    if n_layer_kv < n_layer:
        layers = replace(layers, n_layer_kv=max(0, n_layer_kv))
    has_latents = bool(header.number(f"{arch}.attention.key_length_mla"))
    return replace(layers, values_in_keys=has_latents or None)


def _with_states(layers: Layers, header: Keys, arch: str, n_layer: int) -> Layers:
    """The states of recurrent layers and convolutions."""
    if arch in DELTA_NETS:
        layers = _with_delta_nets(layers, header, arch, n_layer)
    state = _state_of_layer(layers, header, arch)
    if state is None:
        for key, reason in STATE_KEYS.items():
            if header.number(f"{arch}.{key}"):
                return replace(layers, uncounted=layers.uncounted or reason)
        return layers
    has_state = _layers_with_state(layers, header, arch, n_layer)
    if has_state is None:
        return replace(layers, uncounted=layers.uncounted or RECURRENT)
    if not any(has_state):
        return layers
    states = tuple(state.n_values if is_recurrent else 0 for is_recurrent in has_state)
    flops = sum(has_state) * state.flops
    return replace(layers, n_state=sum(states), states=states, state_flops=flops)


@dataclass(frozen=True)
class State:
    """The state of a recurrent layer: its F32 values, and the FLOPs of a token on it."""

    n_values: int
    flops: int


def _state_of_layer(layers: Layers, header: Keys, arch: str) -> State | None:
    """The state of each recurrent layer (n_embd_r and n_embd_s of llama-hparams.cpp).

    None for a model without, and for one that the lab does not count. The products of a
    convolution are those of its weights, and counted with them.
    """
    n_kept = header.number(f"{arch}.shortconv.l_cache")
    n_embd = header.number(f"{arch}.embedding_length")
    if n_kept and n_embd:
        return State((n_kept - 1) * n_embd, 0)
    n_conv = header.number(f"{arch}.ssm.conv_kernel")
    width = header.number(f"{arch}.kda.head_dim")
    if width and n_conv:
        n_head = layers.n_head or max(layers.heads or (0,))
        n_values = width * width * n_head
        return State(3 * (n_conv - 1) * width * n_head + n_values, DELTA_FLOPS * n_values)
    size = header.number(f"{arch}.ssm.state_size")
    if not size or not n_conv:
        return None
    n_group = header.number(f"{arch}.ssm.group_count") or 0
    n_value = header.number(f"{arch}.ssm.time_step_rank") or 0
    if arch in DELTA_NETS:
        inner = size * n_value
        flops = DELTA_FLOPS * size * inner
        is_complete = bool(n_group and n_value)
    else:
        inner = header.number(f"{arch}.ssm.inner_size") or 0
        flops = SCAN_FLOPS * size * inner
        is_complete = bool(inner) and arch in (*MAMBAS, *PARALLEL_MAMBAS, *HYBRID_MAMBAS)
    if not is_complete:
        return None
    return State((n_conv - 1) * (inner + 2 * n_group * size) + size * inner, flops)


def _layers_with_state(
    layers: Layers, header: Keys, arch: str, n_layer: int
) -> list[bool] | None:
    """By layer whether it has a state; None where the header does not tell."""
    if arch in (*MAMBAS, *PARALLEL_MAMBAS):
        return [True] * n_layer
    heads_kv = layers.heads_kv or (layers.n_head_kv,) * n_layer
    _, widths = _heads_by_layer(header, f"{arch}.feed_forward_length", n_layer)
    has_feed_forward = [False] * n_layer
    if widths and arch.startswith("nemotron"):
        has_feed_forward = [width > 0 for width in widths]
    if len(heads_kv) != n_layer or None in heads_kv:
        return None
    pairs = zip(heads_kv, has_feed_forward, strict=True)
    return [n_head_kv == 0 and not is_wide for n_head_kv, is_wide in pairs]


def _with_delta_nets(layers: Layers, header: Keys, arch: str, n_layer: int) -> Layers:
    """The layers of a hybrid with gated delta nets: those without attention have no heads."""
    n_head = layers.n_head
    n_head_kv = layers.n_head_kv
    if not n_head or not n_head_kv:
        return layers
    if not header.number(f"{arch}.ssm.time_step_rank"):
        return layers
    period = header.number(f"{arch}.full_attention_interval") or 4
    has_attention = [layer % period == 0 for layer in range(1, n_layer + 1)]
    heads = tuple(n_head if attends else 0 for attends in has_attention)
    heads_kv = tuple(n_head_kv if attends else 0 for attends in has_attention)
    return replace(layers, n_head=None, n_head_kv=None, heads=heads, heads_kv=heads_kv)


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
    without_window = period - 1  # the last layer of each period, or the first
    if arch in DENSE_FIRST:
        without_window = 0
    return tuple(int(layer % period != without_window) for layer in range(n_layer or 0))


def _uncounted(header: Keys, arch: str | None) -> str | None:
    """The first property of a model that the lab does not count, if any."""
    if arch in UNCOUNTED:
        return UNCOUNTED[arch]
    for key, meaning in UNCOUNTED_KEYS.items():
        if header.number(f"{arch}.{key}") or header.numbers(f"{arch}.{key}"):
            return meaning
    if header.numbers(f"{arch}.expert_used_count"):
        return "its layers use different numbers of experts"
    return None


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


def output_matrix(table: Sequence[Matrix]) -> Matrix:
    """The output matrix, or with tied embeddings the embedding table."""
    by_part = {matrix.part: matrix for matrix in table}
    return by_part.get(OUTPUT) or by_part[EMBEDDING]


def heads(model: Model) -> tuple[Heads, ...] | None:
    """The layers that attend, grouped by equal attention.

    None if the header lacks them, or the lab cannot count the model.
    """
    by_layer = heads_by_layer(model)
    if by_layer is None:
        return None
    counts = collections.Counter(layer for layer in by_layer if layer is not None)
    return tuple(replace(layer, n_layer=n) for layer, n in counts.items())


def heads_by_layer(model: Model) -> tuple[Heads | None, ...] | None:
    """The attention of each layer, None for a layer without.

    None for all if the header lacks them, or the lab cannot count the model.
    """
    n_layer = model.n_layer
    if not n_layer or model.uncounted:
        return None
    if any(matrix.part == OTHER for matrix in model.matrices or ()):
        return None
    heads = model.heads or (model.n_head,) * n_layer
    heads_kv = model.heads_kv or (model.n_head_kv,) * n_layer
    windows = model.windows or (0,) * n_layer
    widths = model.head_dims or (model.head_dim,) * n_layer
    if {len(heads), len(heads_kv), len(windows), len(widths)} != {n_layer}:
        return None
    by_layer: list[Heads | None] = []
    for index in range(n_layer):
        n_head = heads[index]
        n_head_kv = heads_kv[index]
        if n_head is None or n_head_kv is None:
            return None
        if not n_head or not n_head_kv:
            by_layer.append(None)
            continue
        width = widths[index]
        if not width:
            return None
        layer = Heads(
            n_layer=1,
            n_head=n_head,
            n_head_kv=n_head_kv,
            window=windows[index],
            head_dim=width,
            head_dim_v=model.head_dim_v or width,
            is_chunked=bool(model.is_chunked) and windows[index] > 0,
            has_cache=model.n_layer_kv is None or index < model.n_layer_kv,
            values_in_keys=bool(model.values_in_keys),
        )
        by_layer.append(layer)
    return tuple(by_layer)


def n_experts_read(matrix: Matrix, n_used: int, n_tokens: int) -> float:
    """How many of the n experts are read by n_tokens that use `n_used` each, at random.

    n (1 - (1 - n_used / n)^n_tokens)
    """
    n = matrix.n_expert
    unused_share = 1 - min(1.0, n_used / n)
    return n * (1 - unused_share**n_tokens)
