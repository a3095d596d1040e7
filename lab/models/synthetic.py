"""A model without its file: its tensors and their types from its shape, and a file of that shape with random weights.

Not zeros, which may be faster in caches and kernels: the standard deviation 1 / sqrt(inputs) keeps activations finite.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from lab.core.record import Model
from lab.core.shape import BLOCKS, DELTA_NETS, group, read_layers
from lab.errors import LabError
from lab.models.catalog import Entry, Shape, data_file

QUANTIZATIONS = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "F16": 1, "MXFP4_MOE": 38}
"""What the lab writes directly, with LLAMA_FTYPE_* of llama.h; llama.cpp's quantizer makes the others from these."""

HAS_QK_NORMS = "qwen3", "qwen3moe", "gemma3", *DELTA_NETS

_CHUNK_WEIGHTS = 1 << 23

FACTORS = {"Q4_0": (0, 4.61), "Q4_1": (0, 4.61), "Q8_0": (0, 73.9), "Q6_K": (208, 18.5 * 5.05)}
"""Where a block has its factor d, and the spread of its quants: -8 to 7; 0 to 15 and a minimum; -128 to 127; -32 to 31
and 16 scales."""

USUAL = "Q4_K_M"  # used if neither the user nor the catalog names a quantization


@dataclass(frozen=True)
class Tensor:
    """A matrix (or a vector, rows = 1) with its GGUF name: `columns` inputs, `rows` outputs, for each of `n_expert`."""

    name: str
    rows: int
    columns: int
    type: str
    n_expert: int = 1

    @property
    def n_weights(self) -> int:
        return self.rows * self.columns * self.n_expert

    @property
    def n_bytes(self) -> int:
        n_weights, n_bytes = BLOCKS[self.type]
        return self.n_weights // n_weights * n_bytes

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions in GGUF's order, the inner one first."""
        outer = (
            (self.rows, self.n_expert)
            if self.n_expert > 1
            else (self.rows,)
            if self.rows > 1
            else ()
        )
        return (self.columns, *outer)


@cache
def quantizations(name: str) -> dict[str, str]:
    """A table of models/quantizations.toml, such as `types`: the type of most weights in each quantization."""
    return dict(tomllib.loads(data_file("quantizations.toml").read_text(encoding="utf-8"))[name])


def known(quantization: str) -> str:
    """llama.cpp's name of a quantization. LabError for one that it does not make."""
    name = quantizations("aliases").get(quantization.upper(), quantization.upper())
    if name.startswith("UD-"):
        what = f"llama.cpp makes no quantization {quantization}: Unsloth chooses its types for each model."
        raise LabError(
            what,
            "Name the file: --model hf:OWNER/REPO/FILE.gguf (lab predict reads only its header)",
        )
    if name not in quantizations("types"):
        hint = f"Use one of: {', '.join(quantizations('types'))}."
        raise LabError(f"llama.cpp makes no quantization {quantization}.", hint)
    return name


def type_of(shape: Shape, quantization: str, name: str, columns: int) -> str:
    """The type of a matrix: llama_tensor_get_type_impl of src/llama-quant.cpp, without an importance matrix."""
    kind = quantizations("types")[quantization]
    if kind in ("F32", "F16", "BF16"):
        return kind
    kind = _chosen(shape, quantization, name, kind, columns)
    if columns % BLOCKS[kind][0]:
        kind = quantizations("narrow").get(kind, kind)
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
        return quantizations("embeddings").get(quantization, kind)
    i = int(layer)
    n = shape.n_layer
    has_more = i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2  # use_more_bits
    is_value = part in ("attn_v", "attn_qkv")
    is_down = part.startswith("ffn_down")
    of_part = {"attn_q": "queries", "attn_k": "queries", "attn_output": "outputs"}.get(part)
    of_part = (
        "values" if is_value else ("first_down" if i < n // 8 else "down") if is_down else of_part
    )
    kind = quantizations(of_part).get(quantization, kind) if of_part else kind
    if is_value and (
        shape.n_head >= 4 * shape.n_head_kv or (is_low and (shape.n_expert or 0) >= 4)
    ):
        kind = quantizations("shared_values").get(quantization, kind)
    if (is_value or is_down) and has_more and quantization in ("Q4_K_M", "Q5_K_M"):
        kind = "Q6_K"
    first = {"Q3_K_M": n // 16} if is_down else {"Q3_K_M": 2, "Q4_K_S": 4} if is_value else {}
    if i < first.get(quantization, 0) or (
        is_value and shape.arch == "llama" and n == 80 and kind in ("Q3_K", "Q4_K")
    ):
        kind = "Q5_K"
    if (
        part.startswith(("ffn_gate", "ffn_up"))
        and quantization == "IQ3_XS"
        and n // 8 <= i < 7 * n // 8
    ):
        kind = "IQ3_XXS"
    return kind


def tensors(shape: Shape, quantization: str) -> list[Tensor]:
    """The tensors of such a model. A tensor's random numbers depend on the order of this list."""
    arch = shape.arch
    width = shape.n_embd
    n_ff = shape.n_ff
    n_ff_expert = shape.n_ff_expert or 0
    heads = shape.n_head * shape.head_dim
    kv = shape.n_head_kv * shape.head_dim
    is_hybrid = arch in DELTA_NETS
    n_shared = shape.n_ff_shared or 0
    qkv = {
        "q": 2 * heads if is_hybrid else heads,
        "k": kv,
        "v": kv,
    }  # a hybrid's queries come with their gates
    n = shape.n_expert if shape.n_expert and n_ff_expert else 0
    experts = (
        {"gate": (n_ff_expert, width), "up": (n_ff_expert, width), "down": (width, n_ff_expert)}
        if n
        else {}
    )
    is_oss = arch == "gpt-oss"
    is_dense = not shape.n_expert
    is_fused = arch in ("phi3", "glm4")
    has_post = arch in ("gemma2", "gemma3", "glm4")
    layer = [  # whether it is there; name, rows, columns
        (True, "attn_output.weight", width, heads),
        (n_shared > 0, "ffn_down_shexp.weight", width, n_shared),
        *((n_shared > 0, f"ffn_{part}_shexp.weight", n_shared, width) for part in ("gate", "up")),
        (n_shared > 0, "ffn_gate_inp_shexp.weight", 1, width),
        (is_dense, "ffn_down.weight", width, n_ff),
        (arch == "phi3", "attn_qkv.weight", heads + 2 * kv, width),
        *((arch != "phi3", f"attn_{part}.weight", rows, width) for part, rows in qkv.items()),
        (is_dense and is_fused, "ffn_up.weight", 2 * n_ff, width),
        *(
            (is_dense and not is_fused, f"ffn_{part}.weight", n_ff, width)
            for part in ("gate", "up")
        ),
        *((True, f"ffn_{part}_exps.weight", *sizes) for part, sizes in experts.items()),
        (n > 0, "ffn_gate_inp.weight", n, width),
        *((is_oss, f"ffn_{part}_exps.bias", n, rows) for part, (rows, _) in experts.items()),
        (True, "attn_norm.weight", 1, width),
        *((arch in HAS_QK_NORMS, f"attn_{part}_norm.weight", 1, shape.head_dim) for part in "qk"),
        (has_post or is_oss or is_hybrid, "post_attention_norm.weight", 1, width),
        (is_oss, "attn_sinks.weight", 1, shape.n_head),
        (not is_oss and not is_hybrid, "ffn_norm.weight", 1, width),
        (has_post, "post_ffw_norm.weight", 1, width),
        *(
            (arch in ("qwen2", "gpt-oss"), f"attn_{part}.bias", 1, rows)
            for part, rows in qkv.items()
        ),
        (is_oss, "attn_output.bias", 1, width),
        (is_oss and n > 0, "ffn_gate_inp.bias", 1, n),
    ]
    listed = [("token_embd.weight", shape.n_vocab, width), ("output_norm.weight", 1, width)]
    if not shape.tied_embeddings:
        listed.insert(1, ("output.weight", shape.n_vocab, width))
    listed += [
        (f"blk.{i}.{name}", rows, columns)
        for i in range(shape.n_layer)
        for is_there, name, rows, columns in (
            _without_attention(layer, shape) if is_hybrid and (i + 1) % 4 else layer
        )
        if is_there
    ]
    made = []
    for name, rows, columns in listed:
        is_plain = rows == 1 or name.endswith(
            (".bias", "ffn_gate_inp.weight", "ssm_conv1d.weight", "ssm_a")
        )
        kind = "F32" if is_plain else type_of(shape, quantization, name, columns)
        made.append(Tensor(name, rows, columns, kind, n if name.endswith("_exps.weight") else 1))
    return made


def _without_attention(
    layer: list[tuple[bool, str, int, int]], shape: Shape
) -> list[tuple[bool, str, int, int]]:
    """The same layer with a gated delta net in the place of attention (llama.cpp 0c1e570, src/models/qwen35.cpp)."""
    ssm = shape.ssm or {}
    width = shape.n_embd
    n_value = ssm["time_step_rank"]
    values = ssm["state_size"] * ssm["time_step_rank"]
    mixed = 2 * ssm["state_size"] * ssm["group_count"] + values
    return [
        (True, "attn_qkv.weight", mixed, width),
        (True, "attn_gate.weight", values, width),
        (True, "ssm_conv1d.weight", mixed, ssm["conv_kernel"]),
        (True, "ssm_dt.bias", 1, n_value),
        (True, "ssm_a", 1, n_value),
        *((True, f"ssm_{part}.weight", n_value, width) for part in ("beta", "alpha")),
        (True, "ssm_norm.weight", 1, ssm["state_size"]),
        (True, "ssm_out.weight", width, values),
        *(row for row in layer if not row[1].startswith("attn_") or row[1] == "attn_norm.weight"),
    ]


def by_quantization(entry: Entry) -> dict[str, Model]:
    """The model in common quantizations, without a file."""
    return {
        quantization: model_of(entry, quantization)
        for quantization in ("Q4_0", "Q4_K_M", "Q8_0", "F16")
    }


def model_of(entry: Entry, quantization: str) -> Model:
    """A model of the catalog with the fields that its file's header would have."""
    quantization = known(quantization)
    listed = {tensor.name: tensor for tensor in tensors(entry.shape, quantization)}
    by_type = collections.Counter[str]()
    for tensor in listed.values():
        by_type[tensor.type] += tensor.n_bytes
    shape = entry.shape
    own = dataclasses.asdict(entry.shape)
    table = listed["token_embd.weight"]
    output = listed.get("output.weight")
    keys = {
        "attention.sliding_window": shape.window,
        **{f"ssm.{key}": n for key, n in (shape.ssm or {}).items()},
    }
    keys |= {"attention.head_count": shape.n_head, "attention.head_count_kv": shape.n_head_kv}
    layers = read_layers(
        shape.arch, shape.n_layer, lambda key: keys.get(key.partition(".")[2]), lambda key: None
    )
    return Model(
        name=entry.name,
        source="shape",
        repo=entry.repo,
        file=entry.file or "",
        n_bytes=by_type.total(),
        quantization=quantization,
        tensor_bytes=dict(by_type),
        embedding_bytes=table.n_bytes,
        output_bytes=output.n_bytes if output else None,
        output_type=output.type if output else None,
        n_params=sum(tensor.n_weights for tensor in listed.values()),
        matrices=group((tensor.name, tensor.type, tensor.dimensions) for tensor in listed.values()),
        **{field.name: own[field.name] for field in dataclasses.fields(Model) if field.name in own}
        | layers,
    )


def n_bytes(shape: Shape, quantization: str) -> int:
    return sum(tensor.n_bytes for tensor in tensors(shape, quantization))


def write(
    shape: Shape,
    quantization: str,
    path: Path,
    seed: int = 1,
    watch: Callable[[int, int], object] = lambda *_: None,
) -> None:
    """Write such a model in one of QUANTIZATIONS; the same seed gives the same bytes. LabError if the disk is full."""
    import gguf
    import numpy as np

    planned = tensors(shape, quantization)
    total = sum(tensor.n_bytes for tensor in planned)
    done = 0
    values: dict[str, Any] = {
        "name": "random weights",  # neutral: from some names llama.cpp derives a family, and then expects its tokens
        "file_type": QUANTIZATIONS[quantization],
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "feed_forward_length": shape.n_ff,
        "head_count": shape.n_head,
        "head_count_kv": shape.n_head_kv,
        "key_length": shape.head_dim,
        "value_length": shape.head_dim,
        "rope_dimension_count": shape.n_rot or shape.head_dim,
        "rope_freq_base": shape.rope_base,
        "layer_norm_rms_eps": 1e-5,
        "vocab_size": shape.n_vocab,
        "tokenizer_model": "no_vocab",
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_expert_used,
        "expert_feed_forward_length": shape.n_ff_expert,
        "sliding_window": shape.window,
        "expert_shared_feed_forward_length": shape.n_ff_shared,
        **{f"ssm_{key}": value for key, value in (shape.ssm or {}).items()},
    }
    if shape.arch in DELTA_NETS:
        values["rope_dimension_sections"] = [*[shape.head_dim // 8] * 3, 0]
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        writer = gguf.GGUFWriter(part, shape.arch)
        for name, value in values.items():
            if value is not None:
                getattr(writer, f"add_{name}")(value)
        for tensor in planned:
            kind = gguf.GGMLQuantizationType[tensor.type]
            dimensions = tensor.dimensions[::-1]  # as numpy has them
            writer.add_tensor_info(
                tensor.name, dimensions, np.dtype(np.float32), tensor.n_bytes, raw_dtype=kind
            )
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for index, tensor in enumerate(planned):
                generator = np.random.Generator(np.random.SFC64([seed, index]))
                writer.write_tensor_data(_Random(tensor, generator))  # type: ignore[arg-type]
                done += tensor.n_bytes
                watch(done, total)
        finally:
            writer.close()
        part.replace(path)
    except OSError as problem:
        what = f"The model {path.name} cannot be written: {problem.strerror}."
        raise LabError(what, f"It needs {total / 1e9:.1f} GB in {path.parent}.") from None
    finally:
        part.unlink(missing_ok=True)


class _Random:
    """Acts as an array for the writer, but creates the random weights only when they are written."""

    def __init__(self, tensor: Tensor, generator: Any) -> None:
        self._tensor = tensor
        self._generator = generator
        self.nbytes = tensor.n_bytes

    def tofile(self, file: IO[bytes]) -> None:
        one = self._tensor
        n = self._tensor.n_weights
        kind = "decay" if one.name.endswith("ssm_a") else "vector" if one.rows == 1 else one.type
        for first in range(0, n, _CHUNK_WEIGHTS):
            size = min(n - first, _CHUNK_WEIGHTS)
            file.write(_weights(kind, size, 1 / math.sqrt(one.columns), self._generator).data)


def _weights(kind: str, n: int, scale: float, generator: Any) -> Any:
    """n random weights with standard deviation `scale`, as bytes in the block layouts of ggml-common.h."""
    import numpy as np

    def half(values: Any) -> Any:
        return np.asarray(values, dtype=np.float16).reshape(-1, 1).view(np.uint8)

    if kind in (
        "vector",
        "decay",
    ):  # norms and biases: around one; decays of a state: around minus one
        sign = np.float32(-1 if kind == "decay" else 1)
        return (sign * (1 + 0.1 * generator.standard_normal(n, dtype=np.float32))).view(np.uint8)
    if kind == "F32":
        return (np.float32(scale) * generator.standard_normal(n, dtype=np.float32)).view(np.uint8)
    if (
        kind == "F16"
    ):  # a random sign and mantissa under one exponent: between 1 and 2 times a power of two
        exponent = round(math.log2(scale / 1.53)) + 15
        words = generator.bit_generator.random_raw(-(-n // 4)).view(np.uint16)[:n]
        return ((words & 0x83FF) | (exponent << 10)).view(np.uint8)
    n_weights, n_block_bytes = BLOCKS[kind]
    n_blocks = n // n_weights
    raw = generator.bit_generator.random_raw(-(-n_blocks * n_block_bytes // 8))
    blocks = raw.view(np.uint8)[: n_blocks * n_block_bytes].reshape(n_blocks, n_block_bytes)
    signs = np.where(blocks[:, 0] & 1, 1.0, -1.0)
    if kind in FACTORS:
        at, spread = FACTORS[kind]
        blocks[:, at : at + 2] = half(signs * scale / spread)
        if kind == "Q4_1":
            blocks[:, 2:4] = half(signs * scale / spread * -7.5)
        if kind == "Q6_K":
            blocks[:, 192:208] = (1 + (blocks[:, 192:208] & 7)) * np.where(
                blocks[:, 192:208] & 8, 1, 255
            )
    else:  # MXFP4: a power of two, then 32 quants of -6 to 6
        blocks[:, 0] = 127 + round(math.log2(scale / 2.93))
    return blocks.reshape(-1)
