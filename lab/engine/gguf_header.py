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
_INTEGERS = {  # gguf type: suffix of the reading function, and what it returns
    0: ("u8", ctypes.c_uint8),
    1: ("i8", ctypes.c_int8),
    2: ("u16", ctypes.c_uint16),
    3: ("i16", ctypes.c_int16),
    4: ("u32", ctypes.c_uint32),
    5: ("i32", ctypes.c_int32),
    10: ("u64", ctypes.c_uint64),
    11: ("i64", ctypes.c_int64),
}


def read_model(path: Path, name: str, source: str) -> Model:
    """The model in a GGUF file, without its sha256, repo and revision. LabError where
    the file is none, is cut off, or holds no weights."""
    with _opened(path) as (lib, gguf):
        return _model(lib, gguf, path, name, source)


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """The tensors in a GGUF file. LabError as in `read_model`."""
    with _opened(path) as (lib, gguf):
        return tuple(
            Tensor(lib.gguf_get_tensor_name(gguf, i).decode(errors="replace"), lib.gguf_get_tensor_size(gguf, i))
            for i in range(lib.gguf_get_n_tensors(gguf))
        )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """ggml's library, and its handle of a file's header."""
    lib = _gguf_library()
    _check_magic(path)
    native.forget_log()
    gguf = lib.gguf_init_from_file(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
    if not gguf:
        raise LabError(f"{path.name} is a broken GGUF file: {native.complaint()}", "Get the file again.")
    gguf = ctypes.c_void_p(gguf)
    try:
        yield lib, gguf
    finally:
        lib.gguf_free(gguf)


def _model(lib: Any, gguf: Any, path: Path, name: str, source: str) -> Model:
    def find(key: str) -> tuple[int, int | None]:
        index = lib.gguf_find_key(gguf, key.encode())
        return index, None if index < 0 else lib.gguf_get_kv_type(gguf, index)

    def number(key: str) -> int | None:
        index, kind = find(key)
        if kind not in _INTEGERS:
            return None
        value = int(getattr(lib, f"gguf_get_val_{_INTEGERS[kind][0]}")(gguf, index))
        return value if value >= 0 else None

    index, kind = find("general.architecture")
    arch = lib.gguf_get_val_str(gguf, index).decode(errors="replace") if kind == _STRING else None
    if (number("split.count") or 1) > 1:
        raise LabError(
            f"{path.name} is one part of a model in {number('split.count')} files.",
            "Join them with llama.cpp's llama-gguf-split --merge, and measure the whole file.",
        )
    if arch is not None and not re.fullmatch(r"[\w.-]{1,64}", arch):
        raise LabError(f"{path.name} has no usable architecture name.", "Get the file again from where it comes.")
    if lib.gguf_get_n_tensors(gguf) > MOST_TENSORS:
        raise LabError(f"{path.name} names more than {MOST_TENSORS:,} tensors.", "Get the file again, elsewhere.")
    arrays = [i for i in range(lib.gguf_get_n_kv(gguf)) if lib.gguf_get_kv_type(gguf, i) == _ARRAY]
    if any(lib.gguf_get_arr_n(gguf, i) > MOST_ITEMS for i in arrays):
        raise LabError(f"{path.name} has a list of more than {MOST_ITEMS:,} items.", "Get the file again, elsewhere.")
    for key, most in MOST.items():
        value = number(f"{arch}.{key}")
        if value is not None and not (key not in MAY_BE_ZERO) <= value <= most:
            raise LabError(f"{path.name} says {key} = {value:,}, which no model has.", "Get the file again, elsewhere.")
    tensors = {lib.gguf_get_tensor_name(gguf, i): i for i in range(lib.gguf_get_n_tensors(gguf))}
    if not tensors:
        raise LabError(f"{path.name} holds only a vocabulary, no weights.", "Give the file with the model itself.")
    bytes_by_type, end = _tensor_bytes(lib, gguf, list(tensors.values()))
    n_bytes = path.stat().st_size
    if end > n_bytes:
        raise LabError(
            f"{path.name} is cut off: it has {n_bytes:,} of {end:,} bytes.", "Get the file again, to its end."
        )
    embedding, output = tensors.get(b"token_embd.weight"), tensors.get(b"output.weight")
    n_embd = number(f"{arch}.embedding_length")

    def numbers(key: str) -> tuple[int, ...] | None:
        index, kind = find(key)
        return _integers(lib, gguf, index) if kind == _ARRAY else None

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
        n_vocab=None if embedding is None else lib.gguf_get_tensor_ne(gguf, embedding)[1],
        n_ctx_train=number(f"{arch}.context_length"),
        tied_embeddings=b"output.weight" not in tensors,
        tensor_bytes=bytes_by_type,
        embedding_bytes=None if embedding is None else lib.gguf_get_tensor_size(gguf, embedding),
        output_bytes=None if output is None else lib.gguf_get_tensor_size(gguf, output),
        embedding_type=None if embedding is None else _type_name(lib, gguf, embedding),
        output_type=None if output is None else _type_name(lib, gguf, output),
        n_expert=number(f"{arch}.expert_count"),
        n_params=sum(math.prod(lib.gguf_get_tensor_ne(gguf, index)[:4]) for index in tensors.values()),
        n_expert_used=number(f"{arch}.expert_used_count"),
        matrices=shape.group(
            (name.decode(errors="replace"), _type_name(lib, gguf, i), lib.gguf_get_tensor_ne(gguf, i)[:4])
            for name, i in tensors.items()
        ),
        windows=layers.windows,
        heads=layers.heads,
        heads_kv=layers.heads_kv,
        head_dim_v=value_length if value_length != head_dim else None,
        n_ff_expert=number(f"{arch}.expert_feed_forward_length"),
        uncounted=layers.uncounted,
    )


def _integers(lib: Any, gguf: Any, index: int) -> tuple[int, ...] | None:
    """An array of whole numbers (or of yes and no); None where it holds something else."""
    kinds: dict[int, Any] = {_BOOL: ctypes.c_bool} | {number: result for number, (_, result) in _INTEGERS.items()}
    kind = kinds.get(lib.gguf_get_arr_type(gguf, index))
    if kind is None:
        return None
    data = ctypes.cast(lib.gguf_get_arr_data(gguf, index), ctypes.POINTER(kind))
    return tuple(int(value) for value in data[: lib.gguf_get_arr_n(gguf, index)])


def _tensor_bytes(lib: Any, gguf: Any, indices: list[int]) -> tuple[dict[str, int], int]:
    """Bytes by tensor type, and where in the file the last tensor ends."""
    by_type: dict[str, int] = {}
    end = data = lib.gguf_get_data_offset(gguf)
    for index in indices:
        n_bytes = lib.gguf_get_tensor_size(gguf, index)
        kind = _type_name(lib, gguf, index)
        by_type[kind] = by_type.get(kind, 0) + n_bytes
        end = max(end, data + lib.gguf_get_tensor_offset(gguf, index) + n_bytes)
    return by_type, end


def _type_name(lib: Any, gguf: Any, index: int) -> str:
    return str(lib.ggml_type_name(lib.gguf_get_tensor_type(gguf, index)).decode().upper())


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


class _InitParams(ctypes.Structure):
    """struct gguf_init_params of gguf.h: with no_alloc and no ctx, only the header is read."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _gguf_library() -> Any:
    """ggml's GGUF functions with the argument and result types of gguf.h."""
    lib = native.ggml("ggml-base")
    handle, index = ctypes.c_void_p, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "gguf_init_from_file": (handle, [ctypes.c_char_p, _InitParams]),
        "gguf_free": (None, [handle]),
        "gguf_find_key": (index, [handle, ctypes.c_char_p]),
        "gguf_get_kv_type": (ctypes.c_int, [handle, index]),
        "gguf_get_n_kv": (index, [handle]),
        "gguf_get_arr_n": (ctypes.c_size_t, [handle, index]),
        "gguf_get_arr_type": (ctypes.c_int, [handle, index]),
        "gguf_get_arr_data": (handle, [handle, index]),
        "gguf_get_val_str": (ctypes.c_char_p, [handle, index]),
        "gguf_get_n_tensors": (index, [handle]),
        "gguf_get_data_offset": (ctypes.c_size_t, [handle]),
        "gguf_get_tensor_name": (ctypes.c_char_p, [handle, index]),
        "gguf_get_tensor_type": (ctypes.c_int, [handle, index]),
        "gguf_get_tensor_size": (ctypes.c_size_t, [handle, index]),
        "gguf_get_tensor_offset": (ctypes.c_size_t, [handle, index]),
        "gguf_get_tensor_ne": (ctypes.POINTER(ctypes.c_int64), [handle, index]),
        "ggml_type_name": (ctypes.c_char_p, [ctypes.c_int]),
        **{f"gguf_get_val_{name}": (result, [handle, index]) for name, result in _INTEGERS.values()},
    }
    for name, (result, arguments) in signatures.items():
        getattr(lib, name).restype, getattr(lib, name).argtypes = result, arguments
    return lib
