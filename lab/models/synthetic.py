"""Write a model of a known shape with random weights, for example to measure a Llama 3.2 3B without downloading it.

A model's speed depends on its shape and the types of its tensors, not on the values of its weights. So architecture,
tensor names, types and the size of the vocabulary are those of the real model. The weights are random, because zeros
may be faster in caches and kernels, with standard deviation 1 / sqrt(inputs), so that activations stay finite.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lab.core.shape import BLOCKS
from lab.errors import LabError
from lab.models.catalog import Shape
from lab.models.quantization import type_of

QUANTIZATIONS = ("Q4_0", "Q4_1", "Q8_0", "F16", "MXFP4_MOE")
"""Quantizations that the lab writes directly; llama.cpp's quantizer makes the others from these."""

ARCHITECTURES = (
    *("llama", "phi3", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "gpt-oss", "smollm3", "mistral3", "glm4"),
)

_CHUNK_WEIGHTS = 1 << 23
_FILE_TYPES = {"F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "MXFP4_MOE": 38}  # LLAMA_FTYPE_* of llama.h


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
        outer = (self.rows, self.n_expert) if self.n_expert > 1 else (self.rows,) if self.rows > 1 else ()
        return (self.columns, *outer)


def tensors(shape: Shape, quantization: str) -> list[Tensor]:
    """The tensors of a model of this shape, with the types that llama.cpp's quantizer chooses.

    Vectors and the routers of experts stay F32.
    """
    listed = [_matrix("token_embd", shape.n_vocab, shape.n_embd)]
    if not shape.tied_embeddings:
        listed.append(_matrix("output", shape.n_vocab, shape.n_embd))
    listed.append(_vector("output_norm.weight", shape.n_embd))
    for i in range(shape.n_layer):
        layer = [*_attention(shape), *_feed_forward(shape), *_experts(shape)]
        layer.sort(key=_place)  # a tensor's random numbers depend on this order, so it must not change
        listed += [dataclasses.replace(tensor, name=f"blk.{i}.{tensor.name}") for tensor in layer]
    return [
        tensor if tensor.type == "F32" else dataclasses.replace(tensor, type=_type(shape, quantization, tensor))
        for tensor in listed
    ]


def _type(shape: Shape, quantization: str, tensor: Tensor) -> str:
    return type_of(shape, quantization, tensor.name, tensor.columns)


def _place(tensor: Tensor) -> int:
    """The order in a layer: output matrices, other matrices, norms, biases."""
    if tensor.rows == 1:
        return 4 if tensor.name.endswith(".weight") else 5
    return {"attn_output.weight": 0, "ffn_down.weight": 1}.get(tensor.name, 2 if tensor.name[0] == "a" else 3)


def _attention(shape: Shape) -> list[Tensor]:
    """The attention tensors of a layer, and its norms."""
    heads, kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    listed = [_matrix("attn_output", shape.n_embd, heads), _vector("attn_norm.weight", shape.n_embd)]
    parts = (("q", heads), ("k", kv), ("v", kv))
    if shape.arch == "phi3":
        listed.append(_matrix("attn_qkv", heads + 2 * kv, shape.n_embd))
    else:
        listed += [_matrix(f"attn_{name}", rows, shape.n_embd) for name, rows in parts]
    if shape.arch in ("qwen2", "gpt-oss"):
        listed += [_vector(f"attn_{name}.bias", rows) for name, rows in parts]
    if shape.arch in ("qwen3", "qwen3moe", "gemma3"):
        listed += [_vector(f"attn_{name}_norm.weight", shape.head_dim) for name in "qk"]
    if shape.arch in ("gemma2", "gemma3", "glm4", "gpt-oss"):
        listed.append(_vector("post_attention_norm.weight", shape.n_embd))
    if shape.arch == "gpt-oss":
        listed += [_vector("attn_output.bias", shape.n_embd), _vector("attn_sinks.weight", shape.n_head)]
    return listed


def _feed_forward(shape: Shape) -> list[Tensor]:
    """The feed-forward tensors of a layer: its norms, and the matrices of models without experts."""
    listed = [] if shape.arch == "gpt-oss" else [_vector("ffn_norm.weight", shape.n_embd)]
    if shape.arch in ("gemma2", "gemma3", "glm4"):
        listed.append(_vector("post_ffw_norm.weight", shape.n_embd))
    if shape.n_expert:
        return listed
    listed.append(_matrix("ffn_down", shape.n_embd, shape.n_ff))
    if shape.arch in ("phi3", "glm4"):  # gate and up in one
        return [*listed, _matrix("ffn_up", 2 * shape.n_ff, shape.n_embd)]
    return [*listed, *(_matrix(f"ffn_{name}", shape.n_ff, shape.n_embd) for name in ("gate", "up"))]


def _experts(shape: Shape) -> list[Tensor]:
    """The experts of a layer, and their router."""
    n, n_ff = shape.n_expert, shape.n_ff_expert
    if not n or not n_ff:
        return []
    sizes = (("gate", n_ff, shape.n_embd), ("up", n_ff, shape.n_embd), ("down", shape.n_embd, n_ff))
    listed = [
        dataclasses.replace(_matrix(f"ffn_{name}_exps", rows, columns), n_expert=n) for name, rows, columns in sizes
    ]
    listed.append(Tensor("ffn_gate_inp.weight", n, shape.n_embd, "F32"))
    if shape.arch == "gpt-oss":
        listed += [Tensor(f"ffn_{name}_exps.bias", n, rows, "F32") for name, rows, _ in sizes]
        listed.append(_vector("ffn_gate_inp.bias", n))
    return listed


def n_bytes(shape: Shape, quantization: str) -> int:
    """Bytes of the weights of such a model."""
    return sum(tensor.n_bytes for tensor in tensors(shape, quantization))


def write(
    shape: Shape,
    quantization: str,
    path: Path,
    seed: int = 1,
    watch: Callable[[int, int], None] = lambda done, total: None,
    types: Mapping[str, str] | None = None,
) -> None:
    """Write such a model to `path`; the same seed gives the same bytes.

    Calls `watch` with the bytes written and the total. `types` (by tensor name) overrides the quantization's types. The
    file gets its name when it is complete. LabError if the disk is full.
    """
    if quantization not in QUANTIZATIONS:
        raise LabError(f"{quantization} cannot be written directly.", f"Use one of: {', '.join(QUANTIZATIONS)}.")
    if shape.arch not in ARCHITECTURES:
        raise LabError(
            f"Synthetic models of architecture {shape.arch} are not supported.",
            f"Supported: {', '.join(ARCHITECTURES)}.",
        )
    planned = [
        dataclasses.replace(tensor, type=(types or {}).get(tensor.name, tensor.type))
        for tensor in tensors(shape, quantization)
    ]
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        _write(shape, _FILE_TYPES[quantization], planned, part, seed, watch)
        part.replace(path)
    except OSError as problem:
        raise LabError(
            f"The model {path.name} cannot be written: {problem.strerror}.",
            f"It needs {sum(t.n_bytes for t in planned) / 1e9:.1f} GB in {path.parent}.",
        ) from None
    finally:
        part.unlink(missing_ok=True)


def _write(
    shape: Shape, file_type: int, planned: list[Tensor], path: Path, seed: int, watch: Callable[[int, int], None]
) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, shape.arch)
    # A neutral name: from some names llama.cpp derives a model's family and then expects its tokens.
    writer.add_name("random weights")
    writer.add_file_type(file_type)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.n_rot or shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_tokenizer_model("no_vocab")
    if shape.n_expert and shape.n_expert_used and shape.n_ff_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
        writer.add_expert_feed_forward_length(shape.n_ff_expert)
    if shape.window:
        writer.add_sliding_window(shape.window)
    for tensor in planned:
        kind = gguf.GGMLQuantizationType[tensor.type]
        dimensions = tensor.dimensions[::-1]  # as numpy has them
        writer.add_tensor_info(tensor.name, dimensions, np.dtype(np.float32), tensor.n_bytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total, done = sum(tensor.n_bytes for tensor in planned), 0
        for index, tensor in enumerate(planned):
            generator = np.random.Generator(np.random.SFC64([seed, index]))
            writer.write_tensor_data(_Random(tensor, generator))  # type: ignore[arg-type]
            done += tensor.n_bytes
            watch(done, total)
    finally:
        writer.close()


class _Random:
    """Acts as an array for the writer, but creates the random weights only when they are written."""

    def __init__(self, tensor: Tensor, generator: Any) -> None:
        self._tensor, self._generator = tensor, generator
        self.nbytes = tensor.n_bytes

    def tofile(self, file: IO[bytes]) -> None:
        left = self._tensor.n_weights
        scale = 1 / math.sqrt(self._tensor.columns)
        kind = "vector" if self._tensor.rows == 1 else self._tensor.type
        while left:
            n = min(left, _CHUNK_WEIGHTS)
            file.write(_weights(kind, n, scale, self._generator).data)
            left -= n


def _weights(kind: str, n: int, scale: float, generator: Any) -> Any:
    """n random weights (a multiple of the type's block) with standard deviation `scale`, as bytes.

    The block layouts are those of ggml-common.h. Quants are uniform; the block's factor corrects for their spread.
    """
    import numpy as np

    def half(values: Any) -> Any:
        return np.asarray(values, dtype=np.float16).reshape(-1, 1).view(np.uint8)

    if kind == "vector":  # norms and biases: around one
        return (1 + 0.1 * generator.standard_normal(n, dtype=np.float32)).view(np.uint8)
    if kind == "F32":
        return (np.float32(scale) * generator.standard_normal(n, dtype=np.float32)).view(np.uint8)
    if kind == "F16":  # a random sign and mantissa under one exponent: between 1 and 2 times a power of two
        exponent = round(math.log2(scale / 1.53)) + 15
        words = generator.bit_generator.random_raw(-(-n // 4)).view(np.uint16)[:n]
        return ((words & 0x83FF) | (exponent << 10)).view(np.uint8)
    n_weights, n_block_bytes = BLOCKS[kind]
    n_blocks = n // n_weights
    raw = generator.bit_generator.random_raw(-(-n_blocks * n_block_bytes // 8))
    blocks = raw.view(np.uint8)[: n_blocks * n_block_bytes].reshape(n_blocks, n_block_bytes)
    signs = np.where(blocks[:, 0] & 1, 1.0, -1.0)
    if kind == "Q4_0":  # d, then 32 quants of -8 to 7
        blocks[:, :2] = half(signs * scale / 4.61)
    elif kind == "Q4_1":  # d and the minimum, then 32 quants of 0 to 15
        blocks[:, :2] = half(signs * scale / 4.61)
        blocks[:, 2:4] = half(signs * scale / 4.61 * -7.5)
    elif kind == "Q8_0":  # d, then 32 quants of -128 to 127
        blocks[:, :2] = half(signs * scale / 73.9)
    elif kind == "Q6_K":  # 256 quants of -32 to 31 (low 4 bits, high 2 bits), 16 scales, d
        blocks[:, 192:208] = (1 + (blocks[:, 192:208] & 7)) * np.where(blocks[:, 192:208] & 8, 1, 255)
        blocks[:, 208:] = half(signs * scale / (18.5 * 5.05))
    elif kind == "MXFP4":  # a power of two, then 32 quants of -6 to 6
        blocks[:, 0] = 127 + round(math.log2(scale / 2.93))
    else:
        raise LabError(f"Random weights of type {kind} are not supported.", f"Use one of: {', '.join(QUANTIZATIONS)}.")
    return blocks.reshape(-1)


def _matrix(name: str, rows: int, columns: int) -> Tensor:
    return Tensor(f"{name}.weight", rows, columns, "F16")


def _vector(name: str, n: int) -> Tensor:
    return Tensor(name, 1, n, "F32")
