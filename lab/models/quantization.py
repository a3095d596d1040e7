"""Which type llama.cpp's quantizer gives to each tensor of a model: llama_tensor_get_type_impl of src/llama-quant.cpp.

Without an importance matrix where it can do without; not for models of 8 experts and architectures with own rules. The
types are in models/quantizations.toml.
"""

from __future__ import annotations

import tomllib
from functools import cache

from lab.core.shape import BLOCKS
from lab.errors import LabError
from lab.models.catalog import Shape, data_file


@cache
def table(name: str) -> dict[str, str]:
    """A table of models/quantizations.toml, such as `types`: the type of most weights in each quantization."""
    return dict(tomllib.loads(data_file("quantizations.toml").read_text(encoding="utf-8"))[name])


def known(quantization: str) -> str:
    """llama.cpp's name of a quantization. LabError for one that it does not make."""
    name = table("aliases").get(quantization.upper(), quantization.upper())
    if name.startswith("UD-"):
        what = f"llama.cpp makes no quantization {quantization}: Unsloth chooses its types for each model."
        raise LabError(what, "Name the file: --model hf:OWNER/REPO/FILE.gguf (lab predict reads only its header)")
    if name not in table("types"):
        raise LabError(f"llama.cpp makes no quantization {quantization}.", f"Use one of: {', '.join(table('types'))}.")
    return name


def type_of(shape: Shape, quantization: str, name: str, columns: int) -> str:
    """The type of a matrix with this name and length of rows."""
    kind = table("types")[quantization]
    if kind in ("F32", "F16", "BF16"):
        return kind
    kind = _chosen(shape, quantization, name, kind, columns)
    if columns % BLOCKS[kind][0]:
        kind = table("narrow").get(kind, kind)
    return kind if columns % BLOCKS[kind][0] == 0 else "F16"


def _chosen(shape: Shape, quantization: str, name: str, kind: str, columns: int) -> str:
    _, layer, part, *_ = [*name.split("."), "", ""]
    is_low = quantization.startswith(("IQ1_", "IQ2_"))
    if name == "output.weight" or (name == "token_embd.weight" and shape.tied_embeddings):
        if quantization == "MXFP4_MOE" or kind == "Q8_0" or columns % BLOCKS[kind][0]:
            return "Q8_0"
        return "Q5_K" if is_low else "Q6_K"
    if quantization == "MXFP4_MOE":
        return "MXFP4" if part.endswith("_exps") else "Q8_0"
    if name == "token_embd.weight":
        return table("embeddings").get(quantization, kind)
    i, n = int(layer), shape.n_layer
    has_more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2  # use_more_bits
    is_value, is_down = part in ("attn_v", "attn_qkv"), part.startswith("ffn_down")
    of_part = {"attn_q": "queries", "attn_k": "queries", "attn_output": "outputs"}.get(part)
    of_part = "values" if is_value else ("first_down" if i < n // 8 else "down") if is_down else of_part
    kind = table(of_part).get(quantization, kind) if of_part else kind
    if is_value and (shape.n_head >= 4 * shape.n_head_kv or (is_low and (shape.n_expert or 0) >= 4)):
        kind = table("shared_values").get(quantization, kind)
    if (is_value or is_down) and has_more and quantization in ("Q4_K_M", "Q5_K_M"):
        kind = "Q6_K"
    first = {"Q3_K_M": n // 16} if is_down else {"Q3_K_M": 2, "Q4_K_S": 4} if is_value else {}
    if i < first.get(quantization, 0) or (is_value and shape.arch == "llama" and n == 80 and kind in ("Q3_K", "Q4_K")):
        kind = "Q5_K"
    if part.startswith(("ffn_gate", "ffn_up")) and quantization == "IQ3_XS" and n // 8 <= i < 7 * n // 8:
        kind = "IQ3_XXS"
    return kind
