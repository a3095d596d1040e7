"""A model file's header: its shape and the types of its tensors, without reading a weight.

A GGUF file begins with key-value pairs (`llama.block_count = 30`) and a table of tensors (name, type,
shape, offset); the weights follow. ggml's own parser reads it here.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.core import shape
from lab.core.layers import read_layers
from lab.core.placement import Tensor
from lab.core.record import Model
from lab.engine import llama, native
from lab.engine.bindings import GGUF_INTEGERS, GgufParams, ggml
from lab.errors import LabError, printable

MOST_TENSORS, MOST_ITEMS = 20_000, 1 << 20
MOST = {
    # Far above any model there is; llama.cpp would believe more, and take hours or all the memory.
    "block_count": 2_000,
    "embedding_length": 1_000_000,
    "feed_forward_length": 10_000_000,
    "attention.head_count": 10_000,
    "context_length": 1_000_000_000,
    "attention.key_length": 100_000,
    "vocab_size": 10_000_000,
}
MAY_BE_ZERO = ("feed_forward_length", "attention.head_count")  # recurrent models have neither

_BOOL, _STRING, _ARRAY = 7, 8, 9


def read_model(path: Path, name: str, source: str) -> Model:
    """The model in a GGUF file, without its sha256, repo and revision. LabError where
    the file is none, is cut off, or holds no weights."""
    with _opened(path) as gguf:
        return _model(gguf, path, name, source)


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """The tensors in a GGUF file. LabError as in `read_model`."""
    with _opened(path) as gguf:
        return tuple(
            Tensor(ggml().gguf_get_tensor_name(gguf, i).decode(errors="replace"), ggml().gguf_get_tensor_size(gguf, i))
            for i in range(ggml().gguf_get_n_tensors(gguf))
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """ggml's handle of a file's header."""
    _check_magic(path)
    native.forget_log()
    gguf = ggml().gguf_init_from_file(os.fsencode(path), GgufParams(no_alloc=True, ctx=None))
    if not gguf:
        raise LabError(f"{path.name} is a broken GGUF file: {native.complaint()}", "Get the file again.")
    gguf = ctypes.c_void_p(gguf)
    try:
        yield gguf
    finally:
        ggml().gguf_free(gguf)


def _model(gguf: Any, path: Path, name: str, source: str) -> Model:
    def find(key: str) -> tuple[int, int | None]:
        index = ggml().gguf_find_key(gguf, key.encode())
        return index, None if index < 0 else ggml().gguf_get_kv_type(gguf, index)

    def number(key: str) -> int | None:
        index, kind = find(key)
        if kind not in GGUF_INTEGERS:
            return None
        value = int(getattr(ggml(), f"gguf_get_val_{GGUF_INTEGERS[kind][0]}")(gguf, index))
        return value if value >= 0 else None

    index, kind = find("general.architecture")
    arch = ggml().gguf_get_val_str(gguf, index).decode(errors="replace") if kind == _STRING else None
    if (number("split.count") or 1) > 1:
        raise LabError(
            f"{path.name} is one part of a model in {number('split.count')} files.",
            "Join them with llama.cpp's llama-gguf-split --merge, and measure the whole file.",
        )
    if arch is not None and not re.fullmatch(r"[\w.-]{1,64}", arch):
        raise LabError(f"{path.name} has no usable architecture name.", "Get the file again from where it comes.")
    if ggml().gguf_get_n_tensors(gguf) > MOST_TENSORS:
        raise LabError(f"{path.name} names more than {MOST_TENSORS:,} tensors.", "Get the file again, elsewhere.")
    arrays = [i for i in range(ggml().gguf_get_n_kv(gguf)) if ggml().gguf_get_kv_type(gguf, i) == _ARRAY]
    if any(ggml().gguf_get_arr_n(gguf, i) > MOST_ITEMS for i in arrays):
        raise LabError(f"{path.name} has a list of more than {MOST_ITEMS:,} items.", "Get the file again, elsewhere.")
    for key, most in MOST.items():
        value = number(f"{arch}.{key}")
        if value is not None and not (key not in MAY_BE_ZERO) <= value <= most:
            raise LabError(f"{path.name} says {key} = {value:,}, which no model has.", "Get the file again, elsewhere.")
    tensors = {ggml().gguf_get_tensor_name(gguf, i): i for i in range(ggml().gguf_get_n_tensors(gguf))}
    if not tensors:
        raise LabError(f"{path.name} holds only a vocabulary, no weights.", "Give the file with the model itself.")
    bytes_by_type, end = _tensor_bytes(gguf, list(tensors.values()))
    n_bytes = path.stat().st_size
    if end > n_bytes:
        raise LabError(
            f"{path.name} is cut off: it has {n_bytes:,} of {end:,} bytes.", "Get the file again, to its end."
        )
    embedding, output = tensors.get(b"token_embd.weight"), tensors.get(b"output.weight")
    n_embd = number(f"{arch}.embedding_length")

    def numbers(key: str) -> tuple[int, ...] | None:
        index, kind = find(key)
        return _integers(gguf, index) if kind == _ARRAY else None

    layers = read_layers(arch, number(f"{arch}.block_count"), number, numbers)
    key_length, value_length = (number(f"{arch}.attention.{name}_length") for name in ("key", "value"))
    head_dim = key_length or (n_embd // layers.n_head if n_embd and layers.n_head else None)
    return Model(
        name=name,
        source=source,
        repo=None,
        file=printable(path.name),
        revision=None,
        sha256=None,
        n_bytes=n_bytes,
        quantization=_quantization(number("general.file_type")),
        arch=arch,
        n_layer=number(f"{arch}.block_count"),
        n_embd=n_embd,
        n_head=layers.n_head,
        n_head_kv=layers.n_head_kv,
        head_dim=head_dim,
        n_ff=number(f"{arch}.feed_forward_length"),
        n_vocab=None if embedding is None else ggml().gguf_get_tensor_ne(gguf, embedding)[1],
        n_ctx_train=number(f"{arch}.context_length"),
        tied_embeddings=b"output.weight" not in tensors,
        tensor_bytes=bytes_by_type,
        embedding_bytes=None if embedding is None else ggml().gguf_get_tensor_size(gguf, embedding),
        output_bytes=None if output is None else ggml().gguf_get_tensor_size(gguf, output),
        embedding_type=None if embedding is None else _type_name(gguf, embedding),
        output_type=None if output is None else _type_name(gguf, output),
        n_expert=number(f"{arch}.expert_count"),
        n_params=sum(math.prod(ggml().gguf_get_tensor_ne(gguf, index)[:4]) for index in tensors.values()),
        n_expert_used=number(f"{arch}.expert_used_count"),
        matrices=shape.group(
            (name.decode(errors="replace"), _type_name(gguf, i), ggml().gguf_get_tensor_ne(gguf, i)[:4])
            for name, i in tensors.items()
        ),
        windows=layers.windows,
        heads=layers.heads,
        heads_kv=layers.heads_kv,
        head_dim_v=value_length if value_length != head_dim else None,
        n_ff_expert=number(f"{arch}.expert_feed_forward_length"),
        uncounted=layers.uncounted,
    )


def _integers(gguf: Any, index: int) -> tuple[int, ...] | None:
    """An array of whole numbers (or of yes and no); None where it holds something else."""
    kinds: dict[int, Any] = {_BOOL: ctypes.c_bool} | {number: result for number, (_, result) in GGUF_INTEGERS.items()}
    kind = kinds.get(ggml().gguf_get_arr_type(gguf, index))
    if kind is None:
        return None
    data = ctypes.cast(ggml().gguf_get_arr_data(gguf, index), ctypes.POINTER(kind))
    return tuple(int(value) for value in data[: ggml().gguf_get_arr_n(gguf, index)])


def _tensor_bytes(gguf: Any, indices: list[int]) -> tuple[dict[str, int], int]:
    """Bytes by tensor type, and where in the file the last tensor ends."""
    by_type: dict[str, int] = {}
    end = data = ggml().gguf_get_data_offset(gguf)
    for index in indices:
        n_bytes = ggml().gguf_get_tensor_size(gguf, index)
        kind = _type_name(gguf, index)
        by_type[kind] = by_type.get(kind, 0) + n_bytes
        end = max(end, data + ggml().gguf_get_tensor_offset(gguf, index) + n_bytes)
    return by_type, end


def _type_name(gguf: Any, index: int) -> str:
    return str(ggml().ggml_type_name(ggml().gguf_get_tensor_type(gguf, index)).decode().upper())


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as problem:
        raise LabError(f"The model file {path} cannot be read: {problem.strerror}.", "Check its permissions.") from None
    if magic != b"GGUF":
        raise LabError(
            f"{path.name} is not a GGUF file (it begins with {magic!r}).", "Give a model in llama.cpp's GGUF format."
        )


def _quantization(file_type: int | None) -> str | None:
    """The usual name (Q4_K_M) of a GGUF's general.file_type."""
    names = {number: name for name, number in llama.quantizations().items()}
    return {0: "F32", **names}.get(file_type) if file_type is not None else None
