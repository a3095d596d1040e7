"""What a step costs in FLOPs and bytes, and what a context needs: arithmetic on the model's shape only.

Two rules carry it. Every weight that takes part is multiplied once with every token of the step, which is 2
FLOPs; and it is read once per *step*, however many tokens that has. So a prefill step of 512 tokens does 512
times the arithmetic of a decode step on the same bytes: that is why the two phases have different limits.
Attention looks back at every earlier token, so each position keeps one key and one value vector per layer and
key-value head: that KV cache grows with the context, and is read at every step.

Sources: kipply, "Transformer inference arithmetic" (2022); Pope et al., "Efficiently scaling transformer
inference" (2022), section 2; Austin et al., "How to scale your model" (2025), chapters on transformers and
inference.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.core.record import Model, Settings

BLOCKS = {
    # weights a block, bytes a block: the block structures of ggml-common.h
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
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
    "IQ4_NL": (32, 18),
    "IQ4_XS": (256, 136),
    "MXFP4": (32, 17),
}


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
class Memory:
    """Estimated memory for one context. A part that the model's header does not tell is None."""

    weights_bytes: int
    kv_cache_bytes: int | None
    compute_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + (self.kv_cache_bytes or 0) + (self.compute_bytes or 0)


def kv_bytes_per_position(model: Model, type_k: str = "f16", type_v: str = "f16") -> float | None:
    """Bytes that one token leaves in the KV cache: n_layer x n_head_kv x head_dim x (K + V element)."""
    if model.n_layer is None or model.n_head_kv is None or model.head_dim is None:
        return None
    if not {type_k.upper(), type_v.upper()} <= BLOCKS.keys():
        return None
    blocks = (BLOCKS[type_k.upper()], BLOCKS[type_v.upper()])
    return model.n_layer * model.n_head_kv * model.head_dim * sum(size / n for n, size in blocks)


def weight_bytes_per_step(model: Model) -> int | None:
    """Weights that a step of one token reads: all, but of an embedding table that is not the head only a row."""
    if model.tied_embeddings is None or (model.embedding_bytes is None and not model.tied_embeddings):
        return None
    return sum(model.tensor_bytes.values()) - (0 if model.tied_embeddings else model.embedding_bytes or 0)


def memory(model: Model, settings: Settings) -> Memory:
    """Estimate for a context of `settings.n_ctx` positions.

    The compute buffer is taken as the largest of the activations that llama.cpp reserves for a full
    ubatch: the logits, in F32, and without flash attention the scores of every head.
    """
    per_position = kv_bytes_per_position(model, settings.type_k, settings.type_v)
    compute = None
    if model.n_vocab is not None and model.n_embd is not None and model.n_head is not None:
        rows = min(settings.n_ubatch, settings.n_ctx)
        scores = model.n_head * settings.n_ctx if settings.flash_attn == "off" else 0
        compute = 4 * rows * (max(model.n_vocab, scores) + 2 * model.n_embd)
    return Memory(
        weights_bytes=model.n_bytes or 0,
        kv_cache_bytes=None if per_position is None else round(per_position * settings.n_ctx),
        compute_bytes=compute,
    )


def n_weights(model: Model) -> int | None:
    """All weights of a model, from the bytes of its tensor types. None where a type is not known here."""
    if not model.tensor_bytes or not model.tensor_bytes.keys() <= BLOCKS.keys():
        return None
    return sum(n_bytes // BLOCKS[kind][1] * BLOCKS[kind][0] for kind, n_bytes in model.tensor_bytes.items())


def step(
    model: Model, n_tokens: int, n_past: int, n_outputs: int, type_k: str = "f16", type_v: str = "f16"
) -> StepCost | None:
    """The cost of one step: `n_tokens` tokens after `n_past`, of which `n_outputs` get logits.

    FLOPs: 2 per weight and token. The output matrix works only for tokens that get logits, and llama.cpp
    runs the last layer's feed-forward for these alone; textbooks do not count that saving (`textbook_flops`).
    Attention: 4 x n_layer x n_head x head_dim for every pair of a token and a position that it sees.
    Bytes: the weights that take part, once; the KV cache up to the last token, read once; the new part,
    written. None where the header does not tell enough, and for mixtures of experts, which read different
    weights for every token.
    """
    shape = (model.n_layer, model.n_embd, model.n_head, model.n_head_kv, model.head_dim, model.n_vocab)
    weights, per_position = n_weights(model), kv_bytes_per_position(model, type_k, type_v)
    if weights is None or per_position is None or not all(shape) or model.embedding_bytes is None or model.n_expert:
        return None
    n_layer, n_embd, n_head, n_head_kv, head_dim, n_vocab = (part or 0 for part in shape)
    head = n_vocab * n_embd
    in_layers = weights - head * (1 if model.tied_embeddings else 2)
    in_last_ffn = in_layers / n_layer - 2 * n_embd * head_dim * (n_head + n_head_kv)
    pairs = n_tokens * n_past + n_tokens * (n_tokens + 1) / 2
    reading = sum(model.tensor_bytes.values()) - (0 if model.tied_embeddings else model.embedding_bytes)
    if not n_outputs:
        output_bytes = model.embedding_bytes if model.tied_embeddings else model.output_bytes or 0
        reading -= output_bytes
        reading = round(reading * (1 - in_last_ffn / in_layers))
    return StepCost(
        layer_flops=2 * (in_layers * n_tokens - in_last_ffn * (n_tokens - n_outputs)),
        head_flops=2 * head * n_outputs,
        attention_flops=4 * n_layer * n_head * head_dim * pairs,
        weight_bytes=reading,
        kv_read_bytes=per_position * (n_past + n_tokens),
        kv_written_bytes=per_position * n_tokens,
    )


def textbook_flops(model: Model, n_tokens: int) -> float | None:
    """FLOPs of a prefill of `n_tokens` as textbooks count: all layers for all tokens, the head for the last."""
    cost = step(model, n_tokens, 0, 1)
    every_row = step(model, n_tokens, 0, n_tokens)
    return None if cost is None or every_row is None else cost.flops - cost.layer_flops + every_row.layer_flops
