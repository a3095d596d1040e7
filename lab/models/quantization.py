"""Which type llama.cpp's quantizer gives to each tensor of a model: llama_tensor_get_type_impl of src/llama-quant.cpp.

Without an importance matrix where it can do without; not for models of 8 experts and architectures with own rules.
"""

from __future__ import annotations

from lab.core.shape import BLOCKS
from lab.errors import LabError
from lab.models.catalog import Shape

PLAIN = ("F32", "F16", "BF16")
TYPES = {
    **{kind: kind for kind in (*PLAIN, "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_0", "Q2_K", "Q6_K")},
    **{kind: kind for kind in ("TQ1_0", "TQ2_0", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ3_S")},
    **{f"Q{bits}_K_{size}": f"Q{bits}_K" for bits in (3, 4, 5) for size in "SM"},
    **{"Q2_K_S": "Q2_K", "Q3_K_L": "Q3_K", "MXFP4_MOE": "MXFP4", "IQ4_NL": "IQ4_NL", "IQ4_XS": "IQ4_XS"},
    **{"IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S"},
}
"""The type of most weights in each quantization that llama.cpp makes."""

ALIASES = {"MXFP4": "MXFP4_MOE", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
"""What llama.cpp and its users call them too."""

ONE, TWO = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"), ("IQ2_S", "IQ2_M")
EMBEDDINGS = {
    **dict.fromkeys(ONE, "Q2_K"),
    **dict.fromkeys((*TWO, "IQ3_XXS"), "IQ3_S"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "Q4_K"),
}
QUERIES = {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}
OUTPUTS = {
    **dict.fromkeys(ONE[:2], "IQ2_XXS"),
    **dict.fromkeys((*TWO, "IQ3_XXS"), "IQ3_S"),
    **{"Q2_K": "Q3_K", "IQ3_M": "Q4_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"},
}
VALUES = {
    **dict.fromkeys(ONE, "Q2_K"),
    **dict.fromkeys(TWO, "IQ3_S"),
    **{"Q2_K": "Q3_K", "IQ3_M": "Q4_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"},
}
SHARED_VALUES = {
    **dict.fromkeys((*ONE, *TWO, "Q2_K", "Q2_K_S", "IQ3_XXS", "IQ3_XS", "IQ3_S"), "Q4_K"),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), "Q5_K"),
}
"""Values that at least four heads share are small, so they get more bits."""

DOWN = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}
FIRST_DOWN = DOWN | {
    **dict.fromkeys(ONE, "Q2_K"),
    **dict.fromkeys(TWO, "IQ3_S"),
    **dict.fromkeys(("Q2_K_S", "IQ3_M"), "Q4_K"),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS", "Q4_K_S"), "Q5_K"),
}
"""Of the first eighth of the layers."""

NARROW = {
    **dict.fromkeys((*ONE, *TWO, "IQ3_XXS", "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("Q2_0", "Q2_K", "Q3_K", "TQ1_0", "TQ2_0"), "Q4_0"),
    **{"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"},
}
"""The type in its place where a row is no multiple of its block."""


def known(quantization: str) -> str:
    """llama.cpp's name of a quantization. LabError for one that it does not make."""
    name = ALIASES.get(quantization.upper(), quantization.upper())
    if name.startswith("UD-"):
        what = f"llama.cpp makes no quantization {quantization}: Unsloth chooses its types for each model."
        raise LabError(what, "Name the file: --model hf:OWNER/REPO/FILE.gguf (lab predict reads only its header)")
    if name not in TYPES:
        raise LabError(f"llama.cpp makes no quantization {quantization}.", f"Use one of: {', '.join(TYPES)}.")
    return name


def type_of(shape: Shape, quantization: str, name: str, columns: int) -> str:
    """The type of a matrix with this name and length of rows."""
    kind = TYPES[quantization]
    if kind in PLAIN:
        return kind
    kind = _chosen(shape, quantization, name, kind, columns)
    if columns % BLOCKS[kind][0]:
        kind = NARROW.get(kind, kind)
    return kind if columns % BLOCKS[kind][0] == 0 else "F16"


def _chosen(shape: Shape, quantization: str, name: str, kind: str, columns: int) -> str:
    _, layer, part, *_ = [*name.split("."), "", ""]
    if name == "output.weight" or (name == "token_embd.weight" and shape.tied_embeddings):
        if quantization == "MXFP4_MOE" or kind == "Q8_0" or columns % BLOCKS[kind][0]:
            return "Q8_0"
        return "Q5_K" if quantization in (*ONE, *TWO) else "Q6_K"
    if quantization == "MXFP4_MOE":
        return "MXFP4" if part.endswith("_exps") else "Q8_0"
    if name == "token_embd.weight":
        return EMBEDDINGS.get(quantization, kind)
    return _in_layer(shape, quantization, part, int(layer), kind)


def _in_layer(shape: Shape, quantization: str, part: str, i: int, kind: str) -> str:
    n = shape.n_layer
    has_more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2  # use_more_bits
    is_value, is_down = part in ("attn_v", "attn_qkv"), part.startswith("ffn_down")
    is_shared = shape.n_head >= 4 * shape.n_head_kv or (quantization in (*ONE, *TWO) and (shape.n_expert or 0) >= 4)
    table = {"attn_q": QUERIES, "attn_k": QUERIES, "attn_output": OUTPUTS}.get(part, {})
    table = VALUES if is_value else (FIRST_DOWN if i < n // 8 else DOWN) if is_down else table
    kind = table.get(quantization, kind)
    if is_value and is_shared:
        kind = SHARED_VALUES.get(quantization, kind)
    if (is_value or is_down) and has_more and quantization in ("Q4_K_M", "Q5_K_M"):
        kind = "Q6_K"
    first = {"Q3_K_M": n // 16} if is_down else {"Q3_K_M": 2, "Q4_K_S": 4} if is_value else {}
    if i < first.get(quantization, 0) or (is_value and shape.arch == "llama" and n == 80 and kind in ("Q3_K", "Q4_K")):
        kind = "Q5_K"
    if part.startswith(("ffn_gate", "ffn_up")) and quantization == "IQ3_XS" and n // 8 <= i < 7 * n // 8:
        kind = "IQ3_XXS"
    return kind
