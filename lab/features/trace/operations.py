"""What an operation of ggml's graph is for, its layer, its bytes and its FLOPs."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

from lab.core import matrices
from lab.core.matrices import Matrix, n_experts_read
from lab.features.trace.nodes import Node

PRODUCTS = ("MUL_MAT", "MUL_MAT_ID")
EMPTY = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE")
"""Operations of ggml that only look at a tensor in another way."""

ON_ONE_THREAD = ("GET_ROWS", "SET_ROWS", "SCALE")
"""Operations that the CPU never shares among threads (ggml_get_n_tasks of ggml-cpu.c)."""

OPERATIONS = tomllib.loads(
    Path(__file__).with_name("operations.toml").read_text(encoding="utf-8")
)
"""Names of operations by the weights that they use and by what ggml calls them, and families."""

ATTENTION = "attention"
FEED_FORWARD = "feed-forward"
PROJECTIONS = "Q, K, V and output"
ATTENTION_AND_CACHE = "attention and cache"
OUTPUT_MATRIX = "last matrix"
OUTSIDE_AND_SAMPLING = "outside and sampling"
SMALL = "norms and sums"  # all operations that are in no other family
COPY_NAME = re.compile(r"[^#]+#.+#\d+")  # of what ggml's scheduler copies to another device
WEIGHT_NAME = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+)\.(?:weight|bias|scale)")


def _families() -> dict[str, str]:
    families: dict[str, str] = {}
    for family, operations in OPERATIONS["families"].items():
        families |= dict.fromkeys(operations, family)
    return families


FAMILIES = _families()
"""The family of an operation: operations of one share a colour and a sentence."""


def family_of(operation: str) -> str:
    if operation.startswith(("feed-forward", "router")):
        return FEED_FORWARD
    return FAMILIES.get(operation, SMALL)


def weights_of(node: Node) -> tuple[int | None, str] | None:
    """The layer and plain name of the weights that an operation uses, such as (3, "attn_q").

    None without weights.
    """
    for operand in node.sources:
        name = operand.name
        if COPY_NAME.fullmatch(name):
            name = name.split("#")[-2]
        match = WEIGHT_NAME.fullmatch(name)
        if match:
            layer = int(match[1]) if match[1] else None
            return layer, match[2]
    return None


def place_of(node: Node, previous_layer: int | None) -> tuple[str, int | None]:
    """What an operation is for, and its layer.

    Both follow from its weights, otherwise from names, and the layer from the operation before.
    """
    layer, weights = weights_of(node) or (None, "")
    if layer is None:
        layer = _layer_of_name(node.result.name, previous_layer)
    return _purpose(node, weights), layer


def _layer_of_name(name: str, previous_layer: int | None) -> int | None:
    in_name = re.search(r"(?:-|_l)(\d+)\b", name)
    if in_name:
        return int(in_name[1])
    is_unnamed = re.match(r"node_\d+", name)
    return previous_layer if is_unnamed else None


def _purpose(node: Node, weights: str) -> str:
    if "norm" in weights:
        return "norm"
    if node.op == "GET_ROWS":
        return "embedding" if weights == "token_embd" else "select rows"
    if weights:
        plain = re.sub(r"_(exps|shexp)$", "", weights)
        operation: str = OPERATIONS["weights"].get(plain, f"other weights ({weights})")
        return f"{operation}, experts" if weights.endswith("_exps") else operation
    if node.result.name.startswith(("kq", "v_cont")):
        return ATTENTION
    return str(OPERATIONS["ops"].get(node.op, f"other ({node.op.lower()})"))


def cost_of(node: Node) -> tuple[float, float | None]:
    """Bytes that an operation reads, and FLOPs of products and attention (None: of others).

    Of rows and experts only those that are used count.
    """
    n_bytes = float(sum(operand.n_bytes for operand in node.sources))
    first = node.sources[0]
    result = node.result
    if node.op == "SET_ROWS":  # the others are the positions, and the cache, which is written
        return float(sum(operand.n_bytes for operand in node.sources[:2])), None
    if node.op == "GET_ROWS":
        unread_share = 1 - math.prod(result.ne[1:]) / math.prod(first.ne[1:])
        return n_bytes - first.n_bytes * unread_share, None
    if node.op == "FLASH_ATTN_EXT":
        keys, values = node.sources[1:3]
        return n_bytes, 2.0 * math.prod(first.ne[1:]) * keys.ne[1] * (
            keys.ne[0] + values.ne[0]
        )
    if node.op not in PRODUCTS:
        return n_bytes, None
    flops = 2.0 * first.ne[0] * math.prod(result.ne)
    if node.op == "MUL_MAT_ID":
        matrix = matrix_of(node)
        n_used, n_tokens = node.sources[2].ne[:2]
        n_read = n_experts_read(matrix, n_used, n_tokens)
        n_bytes -= first.n_bytes * (1 - n_read / matrix.n_expert)
    return n_bytes, flops


def matrix_of(node: Node) -> Matrix:
    """The matrix of a product, as the ceilings know it."""
    weights = node.sources[0]
    part = matrices.EXPERTS if node.op == "MUL_MAT_ID" else matrices.FEED_FORWARD
    return Matrix(part, weights.type, weights.ne[1], weights.ne[0], 1, weights.ne[2])
