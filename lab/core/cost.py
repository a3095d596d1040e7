"""What a step costs in FLOPs and bytes, and what a context needs: arithmetic on the model's shape only.

Every weight that takes part is multiplied once with every token of the step, which is 2 FLOPs; and it is read once per
*step*, however many tokens that has. So a prefill step of 512 tokens does 512 times the arithmetic of a decode step on
the same bytes. Attention looks back at every earlier token: each step reads the KV cache, which grows with the context.

Sources: kipply, "Transformer inference arithmetic" (2022); Pope et al., "Efficiently scaling transformer inference"
(2022), section 2; Austin et al., "How to scale your model" (2025), chapters on transformers and inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import shape
from lab.core.memory import bytes_per_head, kv_bytes_per_position
from lab.core.record import Model
from lab.core.shape import ATTENTION, EMBEDDING, EXPERTS, OUTPUT, Matrix

Span = tuple[int, int]  # n_tokens and n_past of a sequence in a step

NEVER_SKIPS = (
    *(
        "bailingmoe3",
        "cohere2moe",
        "deepseek4",
        "gemma3n",
        "gemma4",
        "glm5-next",
        "gpt-oss",
        "hy_v3",
        "hy_v4",
    ),
    *("kimi-k3", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35"),
)
"""Architectures that run the last layer's feed-forward for every token (tests/bench/last_layer.py reads llama.cpp)."""

DELTA_FLOPS = 7
"""Of a gated delta net, for each value of its state and each token: decay 1, the key's reading 2, the update 2, the
query's reading 2 (Yang et al., "Gated delta networks", 2024, equation 10)."""


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
    """What a step does with weight matrices of one kind: `n` matrices times `n_tokens` tokens."""

    matrix: Matrix
    n: float
    n_tokens: int
    n_used: int | None  # of experts: those that each token goes through
    is_head: bool
    is_last: bool = False  # of the last layer alone

    @property
    def n_read(self) -> float:
        """How many single matrices are read: of experts those that any token uses, in expectation."""
        return self.n * (
            1
            if self.n_used is None
            else shape.n_experts_read(self.matrix, self.n_used, self.n_tokens)
        )

    @property
    def n_bytes(self) -> float:
        return self.n_read * self.matrix.n_bytes / self.matrix.n / self.matrix.n_expert

    @property
    def flops(self) -> float:
        return (
            2 * self.n * (self.n_used or 1) * self.matrix.rows * self.matrix.columns * self.n_tokens
        )


@dataclass(frozen=True)
class Attended:
    """What a step does in layers of equal attention: pairs of a token and a position that it sees, in each layer."""

    heads: shape.Heads
    n_pairs: float
    n_positions: int  # that the step reads, in each layer


def products(model: Model, n_tokens: int, n_outputs: int) -> list[Product] | None:
    """The products of a step of n_tokens; n_outputs of them get logits. None where the model cannot be counted."""
    known = shape.matrices(model)
    if known is None or not model.n_layer:
        return None
    head = shape.head(known)
    work = [Product(head, head.n, n_outputs, None, True)] if n_outputs else []
    last = 0.0 if model.arch in NEVER_SKIPS else 1 / model.n_layer
    for matrix in known:
        if matrix.part in (EMBEDDING, OUTPUT):
            continue
        n_used = model.n_expert_used if matrix.part == EXPERTS else None
        in_last = 0.0 if matrix.part == ATTENTION else last
        shares = ((1 - in_last, n_tokens, False), (in_last, n_outputs, True))
        work += [
            Product(matrix, matrix.n * share, n, n_used, False, is_last)
            for share, n, is_last in shares
            if share and n
        ]
    return work


def attended(
    model: Model, n_tokens: int, n_past: int, beside: Sequence[Span] = ()
) -> list[Attended] | None:
    """The attention of a step, layers of a kind together; None where the heads are not known.

    The i-th token after n_past sees n_past + i positions, but never more than the layer's window. `beside` are other
    sequences in the same cache: attention runs over their positions too and masks them.
    """
    layers = shape.heads(model)
    if layers is None:
        return None
    parts = []
    for heads in layers:
        window = heads.window or n_past + n_tokens
        n_growing = min(n_tokens, max(0, window - n_past))  # tokens that still see everything
        pairs = (
            n_growing * n_past + n_growing * (n_growing + 1) / 2 + (n_tokens - n_growing) * window
        )
        masked = sum(min(past + n, (heads.window or past + n) + n - 1) for n, past in beside)
        parts.append(
            Attended(
                heads, pairs + n_tokens * masked, min(n_past + n_tokens, window + n_tokens - 1)
            )
        )
    return parts


def weight_bytes_per_step(model: Model) -> int | None:
    """Weights that a step of one token reads; None where that cannot be counted."""
    work = products(model, 1, 1)
    return None if work is None else round(_weight_bytes(model, work))


def step(
    model: Model,
    n_tokens: int,
    n_past: int,
    n_outputs: int,
    type_k: str = "f16",
    type_v: str = "f16",
    others: Sequence[Span] = (),
    is_unified: bool = False,
) -> StepCost | None:
    """The cost of one step: `n_tokens` tokens after `n_past`; `n_outputs` of all its tokens get logits.

    `others` are further sequences in the step: they share the reading of the weights, and each reads its own cache.
    With `is_unified` all share one cache: attention computes every token with every position, before it masks those of
    other sequences. FLOPs of attention: for every pair of a token and a position that it sees, 2 per element of the key
    and of the value, in every layer and head. A recurrent layer reads and writes its state once, and updates it with
    every token. None where the header does not tell enough.
    """
    spans = [(n_tokens, n_past), *others]
    n_all = sum(n for n, _ in spans)
    beside = [[*spans[:i], *spans[i + 1 :]] if is_unified else [] for i in range(len(spans))]
    work = products(model, n_all, n_outputs)
    parts = [attended(model, *span, rest) for span, rest in zip(spans, beside, strict=True)]
    per_head = bytes_per_head(model, type_k, type_v)
    layers = [part for layers in parts for part in layers or ()]
    if work is None or None in parts or per_head is None:
        return None
    width = (model.head_dim or 0) + (model.head_dim_v or model.head_dim or 0)
    state = model.n_state or 0
    n_sequences = len(spans)
    return StepCost(
        layer_flops=sum(part.flops for part in work if not part.is_head),
        head_flops=sum(part.flops for part in work if part.is_head),
        attention_flops=sum(
            2 * part.heads.n_layer * part.heads.n_head * width * part.n_pairs for part in layers
        )
        + DELTA_FLOPS * state * n_all,
        weight_bytes=_weight_bytes(model, work),
        kv_read_bytes=sum(
            per_head * part.heads.n_layer * part.heads.n_head_kv * part.n_positions
            for part in layers
        )
        + 4 * state * n_sequences,
        kv_written_bytes=n_all * (kv_bytes_per_position(model, type_k, type_v) or 0)
        + 4 * state * n_sequences,
    )


def move(
    model: Model, n_positions: int, type_k: str = "f16", type_v: str = "f16"
) -> StepCost | None:
    """The cost of a copy, save or load of n_positions: the cache (or its windows) read and written once."""
    layers = shape.heads(model)
    per_head = bytes_per_head(model, type_k, type_v)
    if layers is None or per_head is None:
        return None
    n_bytes = 4 * (model.n_state or 0) + per_head * sum(
        heads.n_layer * heads.n_head_kv * min(n_positions, heads.window or n_positions)
        for heads in layers
    )
    return StepCost(0.0, 0.0, 0.0, 0.0, n_bytes, n_bytes)


def _weight_bytes(model: Model, work: list[Product]) -> float:
    """Bytes of the products' weights, and of the vectors (norms, biases), which every step reads."""
    in_matrices = sum(matrix.n_bytes for matrix in shape.matrices(model) or ())
    vectors = max(0.0, sum(model.tensor_bytes.values()) - in_matrices)
    return vectors + sum(product.n_bytes for product in work)
