"""A model without its file: its tensors from its shape, and a file with random weights.

Not zeros, which may be faster in caches and kernels: the standard deviation 1 / sqrt(inputs) keeps
activations finite.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from lab.core.files import data_file
from lab.core.layers import has_delta_nets, with_layers
from lab.core.matrices import BLOCKS, group
from lab.core.record import Model
from lab.errors import LabError
from lab.models import architectures
from lab.models.architectures import Row
from lab.models.candidates import quantization_of
from lab.models.catalog import Dimensions, Entry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from gguf import GGUFWriter

    Bytes = npt.NDArray[np.uint8]
QUANTIZATIONS = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "F16": 1, "MXFP4_MOE": 38}
"""What the lab writes directly, with LLAMA_FTYPE_* of llama.h.

llama.cpp's quantizer makes the others from these.
"""

COMMON = ("Q4_0", "Q4_K_M", "Q8_0", "F16")

FACTORS = {"Q4_0": (0, 4.61), "Q4_1": (0, 4.61), "Q8_0": (0, 73.9), "Q6_K": (208, 18.5 * 5.05)}
"""Where a block has its factor d, and the spread of its quants.

They are -8 to 7; 0 to 15 and a minimum; -128 to 127; -32 to 31 and 16 scales.
"""

UNQUANTIZED = (
    ".bias",
    ".scale",
    "_norm",
    "ffn_gate_inp.",
    "ssm_conv1d",
    "ssm_a",
    "ssm_d",
    "shortconv.conv",
    "altup",
    "laurel",
    "per_layer_model_proj",
)
"""Parts of the names of tensors that stay in F32 (tensor_allows_quantization, llama-quant.cpp)."""

_CHUNK_WEIGHTS = 1 << 23


@dataclass(frozen=True)
class PlannedTensor:
    """A matrix (or a vector, rows = 1) with its GGUF name.

    `columns` inputs, `rows` outputs, for each of `n_expert`.
    """

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
        block_weights, block_bytes = BLOCKS[self.type]
        return self.n_weights // block_weights * block_bytes

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The dimensions in GGUF's order, the inner one first."""
        if self.n_expert > 1:
            return (self.columns, self.rows, self.n_expert)
        if self.rows > 1:
            return (self.columns, self.rows)
        return (self.columns,)


# The types of a quantization


@cache
def quantizations(name: str) -> dict[str, str]:
    """A table of models/quantizations.toml, such as `types`: a quantization's usual type."""
    return dict(
        tomllib.loads(data_file("quantizations.toml").read_text(encoding="utf-8"))[name]
    )


def quantization_name(quantization: str) -> str:
    """llama.cpp's name of a quantization. LabError for one that it does not make."""
    name = quantization_of(quantization)
    if name.startswith("UD-"):
        what = (
            f"llama.cpp makes no quantization {quantization}: "
            "Unsloth chooses its types for each model."
        )
        hint = "Name the file: --model hf:OWNER/REPO/FILE.gguf (lab predict reads only its header)"
        raise LabError(what, hint)
    if name not in quantizations("types"):
        hint = f"Use one of: {', '.join(quantizations('types'))}."
        raise LabError(f"llama.cpp makes no quantization {quantization}.", hint)
    return name


class LikeQuantization(NamedTuple):
    """The quantization of llama.cpp that another one is like.

    `size`: its bytes over those of that one, with the standard deviation of the logarithm.
    """

    name: str
    size: float = 1.0
    spread: float = 0.0


OF_UNSLOTH = LikeQuantization("", 1.02, 0.06)  # UD-IQ2_M is like IQ2_M
OF_BITS = 0.2  # the spread of a name that only tells the number of bits


@cache
def like_quantization(quantization: str) -> LikeQuantization | None:
    """The quantization of llama.cpp that a name stands for or is most like; None for no name."""
    name = quantization_of(quantization)
    if name in quantizations("types"):
        return LikeQuantization(name)
    plain = quantization_of(name.removeprefix("UD-"))
    others = quantizations("others")
    if plain in others:
        return LikeQuantization(*others[plain])
    if plain in quantizations("types"):
        return OF_UNSLOTH._replace(name=plain)
    for bits in re.findall(r"\d+", plain):
        if bits in quantizations("bits"):
            return LikeQuantization(quantizations("bits")[bits], spread=OF_BITS)
    return None


def model_like(entry: Entry, quantization: str) -> Model:
    """A model of the catalog in any quantization: its matrices are those of the one it is like.

    LabError for a name without a number of bits.
    """
    like = like_quantization(quantization)
    if like is None:
        return model_of(entry, quantization)
    model = model_of(entry, like.name)
    return dataclasses.replace(
        model,
        quantization=quantization_of(quantization),
        n_bytes=round((model.n_bytes or 0) * like.size),
    )


def type_of(shape: Dimensions, quantization: str, name: str, columns: int) -> str:
    """The type of a matrix in a file that llama.cpp quantizes without an importance matrix.

    llama_tensor_get_type_impl of src/llama-quant.cpp.
    """
    kind = quantizations("types")[quantization]
    if kind in ("F32", "F16", "BF16"):
        return kind
    if name == "output.weight" or (name == "token_embd.weight" and shape.tied_embeddings):
        kind = _type_of_head(quantization, kind, columns)
    elif quantization == "MXFP4_MOE":
        kind = "MXFP4" if name.endswith("_exps.weight") else "Q8_0"
    elif name == "token_embd.weight":
        kind = quantizations("embeddings").get(quantization, kind)
    elif name.startswith("blk."):
        kind = _type_in_layer(shape, quantization, name, kind)
    if columns % BLOCKS[kind][0]:
        kind = quantizations("narrow").get(kind, kind)
    return kind if columns % BLOCKS[kind][0] == 0 else "F16"


def _is_low(quantization: str) -> bool:
    return quantization.startswith(("IQ1_", "IQ2_"))


def _type_of_head(quantization: str, kind: str, columns: int) -> str:
    if quantization == "MXFP4_MOE" or kind == "Q8_0" or columns % BLOCKS[kind][0]:
        return "Q8_0"
    return "Q5_K" if _is_low(quantization) else "Q6_K"


def _type_in_layer(shape: Dimensions, quantization: str, name: str, kind: str) -> str:
    """The type of the matrix `blk.LAYER.PART.weight`; `kind` is the quantization's usual type."""
    _, number, part = name.removesuffix(".weight").split(".", 2)
    layer = int(number)
    eighth = shape.n_layer // 8
    if part in ("attn_v", "attn_qkv"):
        return _type_of_values(shape, quantization, layer, kind)
    if part.startswith("ffn_down"):
        return _type_of_down(shape, quantization, layer, kind)
    if part in ("attn_q", "attn_k"):
        return quantizations("queries").get(quantization, kind)
    if part == "attn_output":
        return quantizations("outputs").get(quantization, kind)
    if part.startswith(("ffn_gate", "ffn_up")) and quantization == "IQ3_XS":
        return "IQ3_XXS" if eighth <= layer < 7 * shape.n_layer // 8 else kind
    return kind


def _type_of_values(shape: Dimensions, quantization: str, layer: int, kind: str) -> str:
    kind = quantizations("values").get(quantization, kind)
    has_many_experts = (shape.n_expert or 0) >= 4
    is_shared = shape.n_head >= 4 * shape.n_head_kv
    if is_shared or (_is_low(quantization) and has_many_experts):
        kind = quantizations("shared_values").get(quantization, kind)
    if quantization in ("Q4_K_M", "Q5_K_M") and _uses_more_bits(shape, layer):
        kind = "Q6_K"
    n_first = {"Q3_K_M": 2, "Q4_K_S": 4}.get(quantization, 0)
    is_llama_70b = shape.arch == "llama" and shape.n_layer == 80
    if layer < n_first or (is_llama_70b and kind in ("Q3_K", "Q4_K")):
        return "Q5_K"
    return kind


def _type_of_down(shape: Dimensions, quantization: str, layer: int, kind: str) -> str:
    table = "first_down" if layer < shape.n_layer // 8 else "down"
    kind = quantizations(table).get(quantization, kind)
    if quantization in ("Q4_K_M", "Q5_K_M") and _uses_more_bits(shape, layer):
        return "Q6_K"
    if quantization == "Q3_K_M" and layer < shape.n_layer // 16:
        return "Q5_K"
    return kind


def _uses_more_bits(shape: Dimensions, layer: int) -> bool:
    """The first and the last eighth of the layers and every third between (use_more_bits)."""
    n = shape.n_layer
    return layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2


# The tensors of a shape


def tensors(shape: Dimensions, quantization: str) -> list[PlannedTensor]:
    """The tensors of such a model. A tensor's random numbers depend on the order of this list."""
    rows = [Row("token_embd.weight", shape.n_vocab, shape.n_embd)]
    if not shape.tied_embeddings:
        rows.append(Row("output.weight", shape.n_vocab, shape.n_embd))
    rows += architectures.model_rows(shape)
    for layer in range(shape.n_layer):
        for row in architectures.layer_rows(shape, layer):
            rows.append(row._replace(name=f"blk.{layer}.{row.name}"))
    return [_tensor(shape, quantization, row) for row in rows]


def _tensor(shape: Dimensions, quantization: str, row: Row) -> PlannedTensor:
    if row.rows == 1 or any(part in row.name for part in UNQUANTIZED):
        kind = "F32"
    else:
        kind = type_of(shape, quantization, row.name, row.columns)
    n_expert = row.n_slices
    if row.name.endswith("_exps.weight") and shape.n_expert:
        n_expert = shape.n_expert
    return PlannedTensor(row.name, row.rows, row.columns, kind, n_expert)


# A model without a file


@dataclass(frozen=True)
class _ShapeKeys:
    """The keys of a shape, as a header would have them."""

    shape: Dimensions

    def number(self, key: str) -> int | None:
        """The value of ARCHITECTURE.KEY."""
        name = key.removeprefix(f"{self.shape.arch}.")
        if name.startswith("ssm."):
            return (self.shape.ssm or {}).get(name.removeprefix("ssm."))
        values = {
            "attention.head_count": self.shape.n_head,
            "attention.head_count_kv": self.shape.n_head_kv,
            "attention.sliding_window": self.shape.window,
            "attention.key_length": self.shape.head_dim,
            "embedding_length": self.shape.n_embd,
        }
        value = self.header.get(name, values.get(name))
        return None if isinstance(value, list) else value

    def numbers(self, key: str) -> tuple[int, ...] | None:
        value = self.header.get(key.removeprefix(f"{self.shape.arch}."))
        return tuple(value) if isinstance(value, list) else None

    @cached_property
    def header(self) -> Mapping[str, Any]:
        return architectures.header(self.shape)


def by_quantization(entry: Entry) -> dict[str, Model]:
    """The model in common quantizations, without a file."""
    return {quantization: model_of(entry, quantization) for quantization in COMMON}


@lru_cache(maxsize=64)
def model_of(entry: Entry, quantization: str) -> Model:
    """A model of the catalog with the fields that its file's header would have."""
    quantization = quantization_name(quantization)
    shape = entry.shape
    planned = tensors(shape, quantization)
    by_name = {tensor.name: tensor for tensor in planned}
    table = by_name["token_embd.weight"]
    output = by_name.get("output.weight")
    bytes_by_type = collections.Counter[str]()
    for tensor in planned:
        bytes_by_type[tensor.type] += tensor.n_bytes
    model = Model(
        name=entry.name,
        source="shape",
        repo=entry.repo,
        file=entry.file or "",
        n_bytes=bytes_by_type.total(),
        quantization=quantization,
        arch=shape.arch,
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        n_ff=shape.n_ff,
        n_vocab=shape.n_vocab,
        n_ctx_train=shape.n_ctx_train,
        tied_embeddings=shape.tied_embeddings,
        n_expert=shape.n_expert,
        n_expert_used=shape.n_expert_used,
        n_ff_expert=shape.n_ff_expert,
        tensor_bytes=dict(bytes_by_type),
        embedding_bytes=table.n_bytes,
        output_bytes=output.n_bytes if output else None,
        output_type=output.type if output else None,
        n_params=sum(tensor.n_weights for tensor in planned),
    )
    model = with_layers(model, _ShapeKeys(shape))
    matrices = [(tensor.name, tensor.type, tensor.dimensions) for tensor in planned]
    return dataclasses.replace(
        model, matrices=group(matrices, shape.n_layer, model.n_layer_kv)
    )


def n_bytes(shape: Dimensions, quantization: str) -> int:
    return sum(tensor.n_bytes for tensor in tensors(shape, quantization))


# A file with random weights


def write(
    shape: Dimensions,
    quantization: str,
    path: Path,
    seed: int = 1,
    watch: Callable[[int, int], object] = lambda *_: None,
    sharpness: float = 1.0,
) -> None:
    """Write such a model in one of QUANTIZATIONS; the same seed gives the same bytes.

    `sharpness` is the standard deviation of its logits. `watch` is called with the bytes done and
    all bytes. LabError if the disk is full.
    """
    import gguf
    import numpy as np

    planned = tensors(shape, quantization)
    total = sum(tensor.n_bytes for tensor in planned)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        writer = gguf.GGUFWriter(part, shape.arch)
        _add_header(writer, shape, quantization, planned)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            done = 0
            for index, tensor in enumerate(planned):
                generator = np.random.Generator(np.random.SFC64([seed, index]))
                array = _RandomArray(tensor, generator, sharpness)
                writer.write_tensor_data(array)  # type: ignore[arg-type]
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


def _add_header(
    writer: GGUFWriter, shape: Dimensions, quantization: str, planned: list[PlannedTensor]
) -> None:
    """Give a gguf.GGUFWriter the keys and the table of tensors."""
    keys: dict[str, object] = {
        # Neutral: from some names llama.cpp derives a family, and then expects its tokens.
        "name": "random weights",
        "file_type": QUANTIZATIONS[quantization],
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "block_count": shape.n_layer,
        "head_count": shape.n_head,
        "key_length": shape.head_dim,
        "value_length": shape.head_dim_v or shape.head_dim,
        "rope_dimension_count": shape.n_rot or shape.head_dim,
        "rope_freq_base": shape.rope_base,
        "layer_norm_rms_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "vocab_size": shape.n_vocab,
        "tokenizer_model": "no_vocab",
        "expert_count": shape.n_expert,
        "expert_used_count": shape.n_expert_used,
        "expert_feed_forward_length": shape.n_ff_expert,
        "sliding_window": shape.window,
        "expert_shared_feed_forward_length": shape.n_ff_shared,
    }
    for name, value in (shape.ssm or {}).items():
        keys[f"ssm_{name}"] = value
    if has_delta_nets(shape.arch):
        section = shape.head_dim // 8
        keys["rope_dimension_sections"] = [section, section, section, 0]
    further = architectures.header(shape)
    keys["head_count_kv"] = further.pop("attention.head_count_kv", shape.n_head_kv)
    keys["feed_forward_length"] = further.pop("feed_forward_length", shape.n_ff)
    for name, known in keys.items():
        if known is not None:
            getattr(writer, f"add_{name}")(known)
    for name, item in further.items():
        _add_key(writer, f"{shape.arch}.{name}", item)
    _add_tensors(writer, planned)


def _add_tensors(writer: GGUFWriter, planned: list[PlannedTensor]) -> None:
    """Give a gguf.GGUFWriter the table of tensors."""
    import gguf
    import numpy as np

    for tensor in planned:
        kind = gguf.GGMLQuantizationType[tensor.type]
        dimensions = tensor.dimensions[::-1]  # as numpy has them
        data_type = np.dtype(np.float32)
        writer.add_tensor_info(
            tensor.name, dimensions, data_type, tensor.n_bytes, raw_dtype=kind
        )


def _add_key(writer: GGUFWriter, key: str, value: architectures.Value) -> None:
    """Give a gguf.GGUFWriter a key, in the type that llama.cpp expects."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)


class _RandomArray:
    """Acts as an array for the writer, but draws the random weights only when they are written."""

    def __init__(
        self, tensor: PlannedTensor, generator: np.random.Generator, sharpness: float
    ) -> None:
        self._tensor = tensor
        self._centre = 1.0  # of a vector's weights
        if tensor.name == "output_norm.weight":
            self._centre = sharpness
        self._generator = generator
        self.nbytes = tensor.n_bytes

    def tofile(self, file: IO[bytes]) -> None:
        tensor = self._tensor
        scale = 1 / math.sqrt(tensor.columns)
        for first in range(0, tensor.n_weights, _CHUNK_WEIGHTS):
            n = min(tensor.n_weights - first, _CHUNK_WEIGHTS)
            if tensor.name.endswith("ssm_a"):
                weights = _around(-1, n, self._generator)  # decays of a state
            elif tensor.rows == 1:
                weights = _around(self._centre, n, self._generator)  # norms and biases
            else:
                weights = _matrix_weights(tensor.type, n, scale, self._generator)
            file.write(weights.data)


def _around(centre: float, n: int, generator: np.random.Generator) -> Bytes:
    """n random F32 numbers around a centre, as bytes."""
    import numpy as np

    spread = 1 + 0.1 * generator.standard_normal(n, dtype=np.float32)
    return (np.float32(centre) * spread).view(np.uint8)


def _matrix_weights(kind: str, n: int, scale: float, generator: np.random.Generator) -> Bytes:
    """n random weights with standard deviation `scale`, as the bytes of a type."""
    import numpy as np

    if kind == "F32":
        return (np.float32(scale) * generator.standard_normal(n, dtype=np.float32)).view(
            np.uint8
        )
    if kind == "F16":
        # A random sign and mantissa under one exponent: between 1 and 2 times a power of two.
        exponent = round(math.log2(scale / 1.53)) + 15
        bits = _random_bytes(2 * n, generator).view(np.uint16)
        return ((bits & 0x83FF) | (exponent << 10)).view(np.uint8)
    return _blocks(kind, n, scale, generator)


def _random_bytes(n: int, generator: np.random.Generator) -> Bytes:
    import numpy as np

    return generator.bit_generator.random_raw(math.ceil(n / 8)).view(np.uint8)[:n]


def _blocks(kind: str, n: int, scale: float, generator: np.random.Generator) -> Bytes:
    """n random weights in the block layouts of ggml-common.h, as bytes."""
    import numpy as np

    def write_factors(at: int, factors: npt.NDArray[np.float64]) -> None:
        halves = factors.astype(np.float16).reshape(-1, 1)
        blocks[:, at : at + 2] = halves.view(np.uint8)

    block_weights, block_bytes = BLOCKS[kind]
    n_blocks = n // block_weights
    blocks = _random_bytes(n_blocks * block_bytes, generator).reshape(n_blocks, block_bytes)
    signs = np.where(blocks[:, 0] & 1, 1.0, -1.0)
    if kind == "MXFP4":  # a power of two, then 32 quants of -6 to 6
        blocks[:, 0] = 127 + round(math.log2(scale / 2.93))
        return blocks.reshape(-1)
    at, spread = FACTORS[kind]
    write_factors(at, signs * scale / spread)
    if kind == "Q4_1":  # its minimum
        write_factors(2, signs * scale / spread * -7.5)
    if kind == "Q6_K":
        scales = blocks[:, 192:208]
        blocks[:, 192:208] = (1 + (scales & 7)) * np.where(scales & 8, 1, 255)
    return blocks.reshape(-1)
