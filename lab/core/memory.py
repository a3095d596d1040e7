"""Estimate the memory of a context: weights, KV cache, and compute buffer.

The estimates follow llama.cpp's allocation: positions are padded to 256, and layers with a sliding window keep only the
window and one ubatch (llama-kv-cache-iswa.cpp, with swa_full off).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from lab.core import shape
from lab.core.record import Model, Settings
from lab.core.shape import BLOCKS

PADDING = 256
"""llama.cpp rounds a context's positions up to a multiple of this (llama-context.cpp)."""

FUSED = ("phi3",)
"""Architectures with one matrix for queries, keys and values, and one for gate and up."""

_SIZES: dict[str, Any] = {"n_ctx": PADDING, "n_batch": 2048, "n_ubatch": 512, "n_threads": 1, "n_threads_batch": 1}
_DEFAULTS = Settings(**_SIZES, n_gpu_layers=0, flash_attn="auto", type_k="f16", type_v="f16", prompt="random")


@dataclass(frozen=True)
class Memory:
    """Estimated memory of one context. A part that the model's header does not determine is None."""

    weights_bytes: int
    kv_cache_bytes: int | None
    compute_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + (self.kv_cache_bytes or 0) + (self.compute_bytes or 0)

    def beside(self, other: Memory) -> Memory:
        """The memory of two contexts together."""
        caches, buffers = (self.kv_cache_bytes, other.kv_cache_bytes), (self.compute_bytes, other.compute_bytes)
        sums = [None if a is None or b is None else a + b for a, b in (caches, buffers)]
        return Memory(self.weights_bytes + other.weights_bytes, *sums)


def kv_bytes_per_position(model: Model, type_k: str = "f16", type_v: str = "f16") -> float | None:
    """Bytes of one token in the KV cache: the sum over the layers of n_head_kv x (K + V of head_dim elements).

    Layers with a sliding window count in full.
    """
    layers, per_head = shape.heads(model), bytes_per_head(model, type_k, type_v)
    if layers is None or per_head is None:
        return None
    return per_head * sum(heads.n_layer * heads.n_head_kv for heads in layers)


def bytes_per_head(model: Model, type_k: str, type_v: str) -> float | None:
    """Bytes of one key and one value vector."""
    if model.head_dim is None or not {type_k.upper(), type_v.upper()} <= BLOCKS.keys():
        return None
    widths = ((model.head_dim, type_k), (model.head_dim_v or model.head_dim, type_v))
    return sum(width * BLOCKS[kind.upper()][1] / BLOCKS[kind.upper()][0] for width, kind in widths)


def of_context(model: Model, settings: Settings) -> Memory:
    """The memory of a context of `settings.n_ctx` positions."""
    return Memory(model.n_bytes or 0, kv_cache_bytes(model, settings), compute_bytes(model, settings))


def kv_cache_bytes(model: Model, settings: Settings) -> int | None:
    by_layer = kv_bytes_by_layer(model, settings)
    return None if by_layer is None else round(sum(by_layer))


def kv_bytes_by_layer(model: Model, settings: Settings) -> tuple[float, ...] | None:
    """Bytes of the KV cache in each layer; None if the header does not determine them."""
    per_head, n_layer = bytes_per_head(model, settings.type_k, settings.type_v), model.n_layer or 0
    if shape.heads(model) is None or per_head is None:
        return None
    n_caches = 1 if settings.kv_unified else settings.n_seq_max
    heads, windows = model.heads_kv or (model.n_head_kv or 0,) * n_layer, model.windows or (0,) * n_layer
    cells = {window: n_cells(window, settings) for window in set(windows)}
    states = 4 * settings.n_seq_max * (model.n_state or 0) / max(1, heads.count(0))  # of a layer without attention
    sizes = (n_caches * per_head * n * cells[window] for n, window in zip(heads, windows, strict=True))
    return tuple(size or states for size in sizes)


def n_cells(window: int, settings: Settings) -> int:
    """Positions that a layer's cache holds: one cache for all sequences (`kv_unified`), or one for each."""
    n_ctx, n_windows = padded(settings.n_ctx), settings.n_seq_max
    if not settings.kv_unified:
        n_ctx, n_windows = padded(settings.n_ctx // settings.n_seq_max), 1
    return padded(min(n_ctx, n_windows * window + n_rows(settings))) if window else n_ctx


def n_rows(settings: Settings) -> int:
    """Tokens of the largest step: llama.cpp limits the ubatch to the batch, and both to the context."""
    return min(settings.n_ubatch, settings.n_batch, padded(settings.n_ctx))


@dataclass(frozen=True)
class Widths:
    """The F32 elements that a step needs for each of its rows (F16 values count half)."""

    n_vocab: int
    n_embd: int
    mask: float  # of the cache; layers with and without a window have separate masks
    scores: int  # of all heads; 0 with flash attention
    queries: int
    keys: int
    hidden: int  # of a feed-forward, or of the experts that a token uses
    is_flash: bool
    in_layers: float  # the peak within a layer, where the layers follow the embedding on the same device
    of_experts: int  # while the experts' results are summed: twice the hidden rows and results
    in_hole: float  # additional for the output, because a small mask leaves a gap that nothing else fits into


def widths(model: Model, settings: Settings, only: Collection[int] | None = None) -> Widths | None:
    """The widths of a context's steps, with the scores of the layers in `only`; None if the header lacks a field."""
    layers, n_embd, head_dim = shape.heads(model), model.n_embd, model.head_dim
    n_used = (model.n_expert_used or 0) if model.n_expert else 0
    hidden = n_used * (model.n_ff_expert or model.n_ff or 0) if model.n_expert else model.n_ff
    if not layers or not model.n_vocab or not n_embd or not head_dim or not hidden:
        return None
    is_flash = (settings.flash_attn_resolved or settings.flash_attn) != "off"
    mask = sum(n_cells(window, settings) for window in {heads.window for heads in layers}) * (0.5 if is_flash else 1)
    n_layer, is_fused = model.n_layer or 0, model.arch in FUSED
    n_heads, windows = model.heads or (model.n_head or 0,) * n_layer, model.windows or (0,) * n_layer
    each = [n_heads[i] * n_cells(windows[i], settings) for i in range(n_layer) if only is None or i in only]
    scores = 0 if is_flash else max(each, default=0)
    queries, keys = (head_dim * max(getattr(one, name) for one in layers) for name in ("n_head", "n_head_kv"))
    of_experts = 2 * (hidden + n_used * n_embd) + n_embd if n_used else 0
    feed_forward, attention = 3 * hidden + (3 if is_fused else 4) * n_embd, scores + 3 * n_embd + 2 * queries + 2 * keys
    return Widths(
        n_vocab=model.n_vocab,
        n_embd=n_embd,
        mask=mask,
        scores=scores,
        queries=queries,
        keys=keys,
        hidden=hidden,
        is_flash=is_flash,
        in_layers=mask + max(feed_forward, of_experts, attention),
        of_experts=of_experts,
        in_hole=mask + 2 * n_embd if is_fused and is_flash and mask < queries + 2 * keys else 0,
    )


def compute_bytes(model: Model, settings: Settings) -> int | None:
    """Bytes of the compute buffer: the peak of the largest step, in F32.

    llama.cpp shares one buffer between all layers. The peak is in the output matrix (logits of every row), a
    feed-forward (gate, up, their product; for experts also their results), or attention (queries; without flash
    attention also the scores of all heads). The mask of the cache lives until the last layer. The number of live rows
    of each width is fitted to the buffers that llama.cpp reserves for the catalog's models
    (tests/bench/memory_estimates.py measures the error).
    """
    width = widths(model, settings)
    if width is None:
        return None
    return round(4 * n_rows(settings) * max(width.n_vocab + 2 * width.n_embd + width.in_hole, width.in_layers))


def of_length(model: Model, n_ctx: int) -> Memory:
    """The memory of a context with the lab's default settings (which are llama-bench's)."""
    return of_context(model, dataclasses.replace(_DEFAULTS, n_ctx=n_ctx))


def longest(model: Model, available: int) -> int | None:
    """The longest context (a multiple of 256, up to 2^31) that fits into `available` bytes; None if unknown."""
    if of_length(model, PADDING).kv_cache_bytes is None:
        return None
    low, high = 0, 2**31 // PADDING  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        fits = of_length(model, middle * PADDING).total_bytes <= available
        low, high = (middle, high) if fits else (low, middle)
    return low * PADDING


def padded(n: int) -> int:
    """The positions that llama.cpp allocates for n."""
    return -(-n // PADDING) * PADDING
