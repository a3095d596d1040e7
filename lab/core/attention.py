"""The layers of a model that attend: their heads, windows and caches."""

from __future__ import annotations

import collections
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from lab.core.matrices import OTHER
from lab.core.record import Model


@dataclass(frozen=True)
class AttentionLayers:
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


class _Heads(NamedTuple):
    """What a header tells of attention; with values by layer."""

    n_head: tuple[int | None, ...]
    n_head_kv: tuple[int | None, ...]
    windows: tuple[int, ...]
    head_dims: tuple[int | None, ...]
    head_dim_v: int | None
    n_layer_kv: int | None
    is_chunked: bool
    values_in_keys: bool


def attention_layers(model: Model) -> tuple[AttentionLayers, ...] | None:
    """The layers that attend, grouped by equal attention.

    None if the header lacks them, or the lab cannot count the model.
    """
    heads = _heads(model)
    return None if heads is None else _grouped(heads)


def attention_by_layer(model: Model) -> tuple[AttentionLayers | None, ...] | None:
    """The attention of each layer, None for a layer without.

    None for all if the header lacks them, or the lab cannot count the model.
    """
    heads = _heads(model)
    return None if heads is None else _by_layer(heads)


def _heads(model: Model) -> _Heads | None:
    n_layer = model.n_layer
    is_counted = not any(matrix.part == OTHER for matrix in model.matrices or ())
    if not n_layer or model.uncounted or not is_counted:
        return None
    heads = _Heads(
        n_head=model.heads or (model.n_head,) * n_layer,
        n_head_kv=model.heads_kv or (model.n_head_kv,) * n_layer,
        windows=model.windows or (0,) * n_layer,
        head_dims=model.head_dims or (model.head_dim,) * n_layer,
        head_dim_v=model.head_dim_v,
        n_layer_kv=model.n_layer_kv,
        is_chunked=bool(model.is_chunked),
        values_in_keys=bool(model.values_in_keys),
    )
    return heads if {len(values) for values in heads[:4]} == {n_layer} else None


@lru_cache(maxsize=64)
def _grouped(heads: _Heads) -> tuple[AttentionLayers, ...] | None:
    by_layer = _by_layer(heads)
    if by_layer is None:
        return None
    counts = collections.Counter(layer for layer in by_layer if layer is not None)
    return tuple(replace(layer, n_layer=n) for layer, n in counts.items())


@lru_cache(maxsize=64)
def _by_layer(heads: _Heads) -> tuple[AttentionLayers | None, ...] | None:
    by_layer: list[AttentionLayers | None] = []
    for index, (n_head, n_head_kv, window, width) in enumerate(zip(*heads[:4], strict=True)):
        if n_head is None or n_head_kv is None:
            return None
        if not n_head or not n_head_kv:
            by_layer.append(None)
            continue
        if not width:
            return None
        layer = AttentionLayers(
            n_layer=1,
            n_head=n_head,
            n_head_kv=n_head_kv,
            window=window,
            head_dim=width,
            head_dim_v=heads.head_dim_v or width,
            is_chunked=heads.is_chunked and window > 0,
            has_cache=heads.n_layer_kv is None or index < heads.n_layer_kv,
            values_in_keys=heads.values_in_keys,
        )
        by_layer.append(layer)
    return tuple(by_layer)
