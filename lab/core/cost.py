"""What a step costs in FLOPs and bytes, and what a context needs: arithmetic on the model's shape.

Every weight that takes part is multiplied once with every token of the step, which is 2 FLOPs; and
it is read once per *step*, however many tokens the step has. So a prefill step of 512 tokens does
512 times the arithmetic of a decode step on the same bytes. Attention looks back at every earlier
token: each step reads the KV cache, which grows with the context.

Sources: kipply, "Transformer inference arithmetic" (2022); Pope et al., "Efficiently scaling
transformer inference" (2022), section 2; Austin et al., "How to scale your model" (2025), chapters
on transformers and inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.core.attention import AttentionLayers, attention_layers
from lab.core.layers import DELTA_FLOPS
from lab.core.matrices import (
    ATTENTION,
    EMBEDDING,
    EXPERTS,
    INPUT,
    OUTPUT,
    UNMULTIPLIED,
    Matrix,
    matrices_of,
    n_experts_read,
    output_matrix,
)
from lab.core.memory import STATE_BYTES, bytes_per_position, has_types, kv_bytes_per_position
from lab.core.record import Model

Span = tuple[int, int]  # n_tokens and n_past of a sequence in a step

NEVER_SKIPS = (
    "bailingmoe3",
    "cohere2moe",
    "deepseek4",
    "gemma3n",
    "gemma4",
    "glm5-next",
    "gpt-oss",
    "hy_v3",
    "hy_v4",
    "kimi-k3",
    "nemotron_h",
    "nemotron_h_moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "step35",
)
"""Architectures that run the last layer's feed-forward for every token.

tests/bench/last_layer.py reads them from llama.cpp's source.
"""


@dataclass(frozen=True)
class StepCost:
    """FLOPs and bytes of a step, by where they go."""

    layer_flops: float
    head_flops: float
    attention_flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float

    @property
    def flops(self) -> float:
        return self.layer_flops + self.head_flops + self.attention_flops

    @property
    def n_bytes(self) -> float:
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs per byte moved."""
        return self.flops / self.n_bytes


@dataclass(frozen=True)
class Product:
    """What a step does with weight matrices of one kind: `n` matrices times `n_tokens` tokens.

    `n_used`: of the matrices of experts, those that each token goes through. `is_last`: the
    matrices belong to the last layer, which computes only tokens with logits.
    """

    matrix: Matrix
    n: float
    n_tokens: int
    n_used: int | None
    is_head: bool
    is_last: bool = False

    @property
    def n_read(self) -> float:
        """The number of single matrices read: of experts those that any token uses, expected."""
        if self.n_used is None:
            return self.n
        return self.n * n_experts_read(self.matrix, self.n_used, self.n_tokens)

    @property
    def n_bytes(self) -> float:
        single_bytes = self.matrix.n_bytes / self.matrix.n / self.matrix.n_expert
        return self.n_read * single_bytes

    @property
    def flops(self) -> float:
        n_weights = self.matrix.rows * self.matrix.columns
        return 2 * self.n * (self.n_used or 1) * n_weights * self.n_tokens


@dataclass(frozen=True)
class Attended:
    """What a step does in layers of equal attention.

    `n_pairs`: pairs of a token and a position that it sees, in each layer. `n_positions`: the
    positions that the step reads, in each layer.
    """

    heads: AttentionLayers
    n_pairs: float
    n_positions: int


def products(model: Model, n_tokens: int, n_outputs: int) -> list[Product] | None:
    """The products of a step of n_tokens; n_outputs of them get logits.

    None where the model cannot be counted.
    """
    matrices = matrices_of(model)
    if matrices is None or not model.n_layer:
        return None
    if not n_tokens:
        return []
    work = []
    if n_outputs:
        head = output_matrix(matrices)
        work.append(Product(head, head.n, n_outputs, None, True))
    for matrix in matrices:
        if matrix.part not in (EMBEDDING, OUTPUT, UNMULTIPLIED):
            work += _layer_products(model, matrix, n_tokens, n_outputs)
    return work


def _layer_products(
    model: Model, matrix: Matrix, n_tokens: int, n_outputs: int
) -> list[Product]:
    """All layers multiply all tokens, but the last layer's feed-forward only those with logits."""
    n_used = model.n_expert_used if matrix.part == EXPERTS else None
    if matrix.part in (ATTENTION, INPUT) or model.arch in NEVER_SKIPS:
        return [Product(matrix, matrix.n, n_tokens, n_used, False)]
    n_last = matrix.n_last
    if n_last is None:
        n_last = matrix.n / (model.n_layer or 1)
    work = []
    if n_last < matrix.n:
        work.append(Product(matrix, matrix.n - n_last, n_tokens, n_used, False))
    if n_outputs and n_last:
        work.append(Product(matrix, n_last, n_outputs, n_used, False, is_last=True))
    return work


def attended(
    model: Model, n_tokens: int, n_past: int, beside: Sequence[Span] = ()
) -> list[Attended] | None:
    """The attention of a step, layers of a kind together; None where the heads are not known.

    The i-th token after n_past sees n_past + i positions, but never more than the layer's window,
    or than its chunk has up to it. `beside` are further sequences in the same cache: attention
    computes their positions too, and masks them.
    """
    layers = attention_layers(model)
    if layers is None:
        return None
    return [_attended_by(heads, n_tokens, n_past, beside) for heads in layers]


def _attended_by(
    heads: AttentionLayers, n_tokens: int, n_past: int, beside: Sequence[Span]
) -> Attended:
    n_masked = sum(_positions_read(heads, n, past) for n, past in beside)
    if heads.is_chunked:
        n_seen = _seen_in_chunks(heads.window, n_tokens, n_past)
    else:
        n_seen = _seen_in_window(heads.window, n_tokens, n_past)
    n_pairs = n_seen + n_tokens * n_masked
    return Attended(heads, n_pairs, _positions_read(heads, n_tokens, n_past))


def _seen_in_window(window: int, n_tokens: int, n_past: int) -> float:
    """Pairs of a token and a position that it sees, at most `window` of each token; 0: all."""
    window = window or n_past + n_tokens
    n_growing = min(n_tokens, max(0, window - n_past))  # tokens that still see everything
    growing_pairs = n_growing * n_past + n_growing * (n_growing + 1) / 2
    return growing_pairs + (n_tokens - n_growing) * window


def _seen_in_chunks(chunk: int, n_tokens: int, n_past: int) -> float:
    """Pairs of a token and a position of its chunk up to it."""
    return _pairs_from_start(chunk, n_past + n_tokens) - _pairs_from_start(chunk, n_past)


def _pairs_from_start(chunk: int, n: int) -> float:
    n_chunks, n_rest = divmod(n, chunk)
    return n_chunks * chunk * (chunk + 1) / 2 + n_rest * (n_rest + 1) / 2


def _positions_read(heads: AttentionLayers, n_tokens: int, n_past: int) -> int:
    """The positions of a sequence that a step reads in a layer."""
    end = n_past + n_tokens
    if not heads.window:
        return end
    if heads.is_chunked:
        return end - n_past // heads.window * heads.window
    return min(end, heads.window + n_tokens - 1)


def weight_bytes_per_step(model: Model) -> int | None:
    """Weights that a step of one token reads; None where that cannot be counted."""
    work = products(model, 1, 1)
    return None if work is None else round(_weight_bytes(model, work))


def step(
    model: Model,
    n_tokens: int,
    n_past: int,
    n_outputs: int,
    type_k: str | None = "f16",
    type_v: str | None = "f16",
    beside: Sequence[Span] = (),
    is_unified: bool = False,
) -> StepCost | None:
    """The cost of one step: `n_tokens` tokens after `n_past`; `n_outputs` of all get logits.

    `beside` are further sequences in the step: they share the reading of the weights, and each
    reads its own cache. With `is_unified` all share one cache: attention computes every token with
    every position, before it masks those of the further sequences.

    FLOPs of attention: for every pair of a token and a position that it sees, 2 per element of the
    key and of the value, in every layer and head. A recurrent layer reads and writes its state
    once, and updates it with every token. A layer that shares a cache reads it once more. None
    where the header does not tell enough.
    """
    spans = [(n_tokens, n_past), *beside]
    n_all = sum(n for n, _ in spans)
    work = products(model, n_all, n_outputs)
    layers = _attended_by_spans(model, spans, is_unified)
    per_position = kv_bytes_per_position(model, type_k, type_v)
    if work is None or layers is None or per_position is None:
        return None

    state_bytes = STATE_BYTES * (model.n_state or 0) * len(spans)
    attention_flops = float(state_flops(model) * n_all)
    kv_read_bytes = float(state_bytes)
    for part in layers:
        heads = part.heads
        width = heads.head_dim + heads.head_dim_v
        attention_flops += 2 * heads.n_layer * heads.n_head * width * part.n_pairs
        read_bytes = bytes_per_position(heads, type_k, type_v)
        kv_read_bytes += read_bytes * heads.n_layer * part.n_positions
    return StepCost(
        layer_flops=sum(product.flops for product in work if not product.is_head),
        head_flops=sum(product.flops for product in work if product.is_head),
        attention_flops=attention_flops,
        weight_bytes=_weight_bytes(model, work),
        kv_read_bytes=kv_read_bytes,
        kv_written_bytes=n_all * per_position + state_bytes,
    )


def state_flops(model: Model) -> int:
    """FLOPs of a token on the states of all recurrent layers."""
    if model.state_flops is not None:
        return model.state_flops
    return DELTA_FLOPS * (model.n_state or 0)


def _attended_by_spans(
    model: Model, spans: Sequence[Span], is_unified: bool
) -> list[Attended] | None:
    """The attention of all sequences of a step; None where the heads are not known."""
    layers: list[Attended] = []
    for index, (n_tokens, n_past) in enumerate(spans):
        beside = [*spans[:index], *spans[index + 1 :]] if is_unified else []
        parts = attended(model, n_tokens, n_past, beside)
        if parts is None:
            return None
        layers += parts
    return layers


def move(
    model: Model, n_positions: int, type_k: str | None = "f16", type_v: str | None = "f16"
) -> StepCost | None:
    """The cost of a copy, save or load of n_positions: the cache is read and written once.

    A layer with a window holds at most its window. None where the header does not tell enough.
    """
    layers = attention_layers(model)
    if layers is None or not has_types(type_k, type_v):
        return None
    n_bytes = float(STATE_BYTES * (model.n_state or 0))
    for heads in layers:
        if heads.has_cache:
            n_held = min(n_positions, heads.window or n_positions)
            n_bytes += bytes_per_position(heads, type_k, type_v) * heads.n_layer * n_held
    return StepCost(0.0, 0.0, 0.0, 0.0, n_bytes, n_bytes)


def _weight_bytes(model: Model, work: Sequence[Product]) -> float:
    """Bytes of the products' weights, and of the vectors (norms, biases), which all steps read."""
    in_matrices = sum(matrix.n_bytes for matrix in matrices_of(model) or ())
    vectors = max(0.0, sum(model.tensor_bytes.values()) - in_matrices)
    return vectors + sum(product.n_bytes for product in work)
