"""What a context needs, from the model's shape: arithmetic only.

Attention looks back at every earlier token, so each position keeps one key and one value vector per
layer and key-value head. That KV cache is what grows with the context; the weights do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.record import Model, Settings

CACHE_TYPE_BYTES = {
    # bytes per element: block bytes / block length, as ggml-common.h defines the blocks
    "f32": 4.0,
    "f16": 2.0,
    "bf16": 2.0,
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}


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
    per_element = CACHE_TYPE_BYTES[type_k] + CACHE_TYPE_BYTES[type_v]
    return model.n_layer * model.n_head_kv * model.head_dim * per_element


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
