"""The tensors and the header of a shape, by the table of its architecture (architectures.toml)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lab.core.layers import architectures, has_delta_nets
from lab.models.catalog import Dimensions

ATTENDS = "*"
ATTENDS_IN_WINDOW = "w"
RECURRENT = "r"
FEEDS_FORWARD = "f"
"""Letters of `Dimensions.layers`. Where some layers only feed forward, no other layer does."""

WHOLE_NAMES = (".bias", ".scale", ".")
"""Endings of names of the table that get no `.weight`; a dot at the end is left out."""

Value = int | float | bool | list[int] | list[bool]


class Row(NamedTuple):
    """A tensor: its name in the file without the layer, its rows and columns, its slices."""

    name: str
    rows: int
    columns: int
    n_slices: int = 1


def letters(shape: Dimensions) -> str:
    """The kind of each layer, a letter each."""
    pattern = shape.layers or architectures()["architectures"][shape.arch].get(
        "layers", ATTENDS
    )
    return (pattern * shape.n_layer)[: shape.n_layer]


def header(shape: Dimensions) -> dict[str, Value]:
    """The keys of the header that follow from the kinds of layers, and those of the shape.

    Without the architecture's name.
    """
    kinds = letters(shape)
    keys: dict[str, Value] = {}
    heads_kv = [_heads_kv(shape, kind) for kind in kinds]
    has_same_heads = len(set(heads_kv)) == 1 and heads_kv[0] == shape.n_head_kv
    if not has_same_heads and not has_delta_nets(shape.arch):
        keys["attention.head_count_kv"] = heads_kv
    if FEEDS_FORWARD in kinds:
        keys["feed_forward_length"] = [
            shape.n_ff if kind == FEEDS_FORWARD else 0 for kind in kinds
        ]
    if ATTENDS_IN_WINDOW in kinds:
        keys["attention.sliding_window_pattern"] = [
            kind == ATTENDS_IN_WINDOW for kind in kinds
        ]
    for name, value in (shape.keys or {}).items():
        keys[name] = value
    return keys


def _heads_kv(shape: Dimensions, kind: str) -> int:
    if kind in (RECURRENT, FEEDS_FORWARD):
        return 0
    if kind == ATTENDS and shape.n_head_kv_full:
        return shape.n_head_kv_full
    return shape.n_head_kv


def layer_rows(shape: Dimensions, layer: int) -> list[Row]:
    """The tensors of a layer."""
    groups = architectures()["architectures"][shape.arch]
    kind = letters(shape)[layer]
    names: list[str] = []
    if kind in (ATTENDS, ATTENDS_IN_WINDOW):
        names += groups.get("attention", ())
        names += _queries(shape)
    if kind == RECURRENT:
        names += groups["recurrent"]
    names += groups["every"]
    if _feeds_forward(shape, kind):
        names += groups["experts"] if _has_experts(shape, layer) else groups["dense"]
        names += _options(shape, layer)
    rows = _rows(names, _values(shape, kind))
    if shape.has_keys_as_values and kind == ATTENDS:
        return [row for row in rows if row.name != "attn_v.weight"]
    return list(rows)


def model_rows(shape: Dimensions) -> list[Row]:
    """The tensors outside the layers, without embedding, output and their norm."""
    names = list(architectures()["architectures"][shape.arch].get("model", ()))
    if _has_embeddings_by_layer(shape):
        names.append("tables_by_layer")
    if shape.arch.startswith("lfm2"):
        names.append("lfm2_norm")
    else:
        names.append("output_norm")
    return list(_rows(names, _values(shape, ATTENDS)))


def _queries(shape: Dimensions) -> list[str]:
    """The group of queries where keys are compressed."""
    keys = shape.keys or {}
    if "attention.kv_lora_rank" not in keys:
        return []
    return ["latent_queries" if "attention.q_lora_rank" in keys else "plain_queries"]


def _options(shape: Dimensions, layer: int) -> list[str]:
    """Groups that some models of an architecture have."""
    names = []
    if _has_embeddings_by_layer(shape):
        names.append("embeddings_by_layer")
    if _has_experts(shape, layer) and "moe_latent_size" in (shape.keys or {}):
        names.append("latent_experts")
    return names


def _has_embeddings_by_layer(shape: Dimensions) -> bool:
    return bool((shape.keys or {}).get("embedding_length_per_layer_input"))


def _feeds_forward(shape: Dimensions, kind: str) -> bool:
    has_separate_layers = FEEDS_FORWARD in (shape.layers or "")
    groups = architectures()["architectures"][shape.arch]
    has_groups = "dense" in groups or "experts" in groups
    return has_groups and (kind == FEEDS_FORWARD or not has_separate_layers)


def _has_experts(shape: Dimensions, layer: int) -> bool:
    keys = shape.keys or {}
    n_dense = int(keys.get("leading_dense_block_count", 0))
    period = int(keys.get("interleave_moe_layer_step", 1))
    return bool(shape.n_expert) and layer >= n_dense and (layer + 1) % period == 0


def _values(shape: Dimensions, kind: str) -> dict[str, int]:
    """What the sizes of the table name, for a layer of a kind."""
    keys = shape.keys or {}
    values = {name: value for name, value in vars(shape).items() if isinstance(value, int)}
    for name, value in keys.items():
        if isinstance(value, int):
            values[name] = value
    for name, value in (shape.ssm or {}).items():
        values[f"ssm.{name}"] = value
    head_dim = shape.head_dim
    head_dim_v = shape.head_dim_v or shape.head_dim
    if kind == ATTENDS_IN_WINDOW:
        head_dim = int(keys.get("attention.key_length_swa", head_dim))
        head_dim_v = int(keys.get("attention.value_length_swa", head_dim_v))
    values["head_dim"] = head_dim
    values["head_dim_v"] = head_dim_v
    values["n_half_head"] = shape.head_dim // 2
    values["n_head_kv"] = _heads_kv(shape, kind)
    n_rot = shape.n_rot or 0
    values["n_key_without_rope"] = values.get("attention.key_length_mla", 0) - n_rot
    values["n_expert_inputs"] = values.get("moe_latent_size", shape.n_embd)
    if "ssm.group_count" in values:
        n_group = max(1, values["ssm.group_count"])
        values["n_ssm_group"] = values.get("ssm.inner_size", 0) // n_group
    return values


def _rows(names: list[str], values: Mapping[str, int]) -> Iterator[Row]:
    """The tensors of groups, with their sizes."""
    groups = architectures()["groups"]
    for group in names:
        for name, text in groups[group].items():
            columns, *sizes_after = [_sum(size, values) for size in text.split(",")]
            rows, n_slices, *_ = [*sizes_after, 1, 1]
            if not name.endswith(WHOLE_NAMES):
                name = f"{name}.weight"
            yield Row(name.removesuffix("."), rows, columns, n_slices)


def _sum(expression: str, values: Mapping[str, int]) -> int:
    """The value of a sum of products, such as "2*n_embd + n_rot"."""
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.strip().split("*"):
            product *= int(factor) if factor.isdecimal() else values[factor]
        total += product
    return total
