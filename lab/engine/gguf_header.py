"""Read a model's shape and the types of its tensors from the header of its GGUF file, with ggml's parser."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lab.core.memory import Tensor
from lab.core.record import Model
from lab.core.shape import group, read_layers
from lab.engine import devices, llama
from lab.engine.bindings import GGUF_INTEGERS, GgufParams, ggml
from lab.errors import LabError, printable

MOST_TENSORS = 20_000
MOST_ITEMS = 1 << 20
MOST = {
    # Limits far above any real model. With larger values llama.cpp would take hours or all memory.
    "block_count": 2_000,
    "embedding_length": 1_000_000,
    "feed_forward_length": 10_000_000,
    "attention.head_count": 10_000,
    "context_length": 1_000_000_000,
    "attention.key_length": 100_000,
    "vocab_size": 10_000_000,
}
MAY_BE_ZERO = ("feed_forward_length", "attention.head_count")  # in recurrent models

_BOOL = 7
_STRING = 8
_ARRAY = 9


class _Weights(NamedTuple):
    """A tensor of the header's table: type, sizes (inner dimension first), bytes, and the file offset of its end."""

    type: str
    sizes: tuple[int, ...]
    n_bytes: int
    end: int


@dataclass
class _Header:
    """The header of an open file: the values of its keys, and its table of tensors."""

    gguf: Any

    def text(self, key: str) -> str | None:
        """The value of a key, if it is a string."""
        index, kind = self._find(key)
        return (
            ggml().gguf_get_val_str(self.gguf, index).decode(errors="replace")
            if kind == _STRING
            else None
        )

    def number(self, key: str) -> int | None:
        """The value of a key, if it is a non-negative integer."""
        index, kind = self._find(key)
        if kind not in GGUF_INTEGERS:
            return None
        value = int(getattr(ggml(), f"gguf_get_val_{GGUF_INTEGERS[kind][0]}")(self.gguf, index))
        return value if value >= 0 else None

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """The value of a key, if it is a list of integers or booleans."""
        index, kind = self._find(key)
        known = {
            _BOOL: ctypes.c_bool,
            **{number: result for number, (_, result) in GGUF_INTEGERS.items()},
        }
        item: Any = (
            known.get(ggml().gguf_get_arr_type(self.gguf, index)) if kind == _ARRAY else None
        )
        if item is None:
            return None
        data = ctypes.cast(ggml().gguf_get_arr_data(self.gguf, index), ctypes.POINTER(item))
        return tuple(int(value) for value in data[: ggml().gguf_get_arr_n(self.gguf, index)])

    def _find(self, key: str) -> tuple[int, int | None]:
        index = ggml().gguf_find_key(self.gguf, key.encode())
        return index, None if index < 0 else ggml().gguf_get_kv_type(self.gguf, index)

    def tensors(self) -> dict[str, _Weights]:
        lib = ggml()
        gguf = self.gguf
        data = ggml().gguf_get_data_offset(self.gguf)
        table = {}
        for i in range(lib.gguf_get_n_tensors(gguf)):
            n_bytes = lib.gguf_get_tensor_size(gguf, i)
            table[lib.gguf_get_tensor_name(gguf, i).decode(errors="replace")] = _Weights(
                type=lib.ggml_type_name(lib.gguf_get_tensor_type(gguf, i)).decode().upper(),
                sizes=tuple(lib.gguf_get_tensor_ne(gguf, i)[:4]),
                n_bytes=n_bytes,
                end=data + lib.gguf_get_tensor_offset(gguf, i) + n_bytes,
            )
        return table


def read_model(path: Path, name: str, source: str) -> Model:
    """The model in a GGUF file. LabError if the file is not GGUF, is truncated, or holds no weights."""
    with _opened(path) as header:
        arch = header.text("general.architecture")
        _check(header, arch, path)
        tensors = header.tensors()
        n_bytes = path.stat().st_size
        if not tensors:
            raise LabError(
                f"{path.name} holds only a vocabulary, no weights.",
                "Give the file that holds the weights.",
            )
        if (end := max(one.end for one in tensors.values())) > n_bytes:
            what = f"{path.name} is truncated: it has {n_bytes:,} of {end:,} bytes."
            raise LabError(what, "Get the complete file again.")

        def number(key: str) -> int | None:
            return header.number(f"{arch}.{key}")

        n_embd = number("embedding_length")
        value_length = number("attention.value_length")
        layers = read_layers(arch, number("block_count"), header.number, header.numbers)
        n_head = layers["n_head"]
        head_dim = number("attention.key_length") or (
            n_embd // n_head if n_embd and n_head else None
        )
        table = tensors.get("token_embd.weight")
        output = tensors.get("output.weight")
        by_type = collections.Counter[str]()
        for one in tensors.values():
            by_type[one.type] += one.n_bytes
        file_type = header.number("general.file_type")
        names = {number: name for name, number in llama.quantizations().items()} | {0: "F32"}
        return Model(
            name=name,
            source=source,
            file=printable(path.name),
            n_bytes=n_bytes,
            **layers,
            quantization=None if file_type is None else names.get(file_type),
            arch=arch,
            n_layer=number("block_count"),
            n_embd=n_embd,
            head_dim=head_dim,
            head_dim_v=value_length if value_length != head_dim else None,
            n_ff=number("feed_forward_length"),
            n_ctx_train=number("context_length"),
            n_expert=number("expert_count"),
            n_expert_used=number("expert_used_count"),
            n_ff_expert=number("expert_feed_forward_length"),
            n_vocab=table.sizes[1] if table else None,
            tied_embeddings=output is None,
            tensor_bytes=dict(by_type),
            embedding_bytes=table.n_bytes if table else None,
            output_bytes=output.n_bytes if output else None,
            output_type=output.type if output else None,
            n_params=sum(math.prod(one.sizes) for one in tensors.values()),
            matrices=group((name, one.type, one.sizes) for name, one in tensors.items()),
        )


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """The tensors in a GGUF file. LabError as in `read_model`."""
    with _opened(path) as header:
        return tuple(Tensor(name, one.n_bytes) for name, one in header.tensors().items())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Header]:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as problem:
        raise LabError(
            f"The model file {path} cannot be read: {problem.strerror}.", "Check its permissions."
        ) from None
    if not magic:
        raise LabError(f"{path.name} is empty.", "Get the file again.")
    if magic != b"GGUF":
        what = f"{path.name} is not a GGUF file (it begins with {magic!r})."
        raise LabError(what, "Give a model in llama.cpp's format, GGUF.")
    devices.clear_log()
    gguf = ggml().gguf_init_from_file(os.fsencode(path), GgufParams(no_alloc=True, ctx=None))
    if not gguf:
        raise LabError(
            f"{path.name} is a broken GGUF file: {devices.last_warnings()}", "Get the file again."
        )
    try:
        yield _Header(gguf)
    finally:
        ggml().gguf_free(gguf)


def _check(header: _Header, arch: str | None, path: Path) -> None:
    """LabError for a part of a model, and for impossible values, which llama.cpp would accept."""
    if (header.number("split.count") or 1) > 1:
        what = (
            f"{path.name} is one part of a model split into {header.number('split.count')} files."
        )
        raise LabError(
            what,
            "Join them with llama.cpp's llama-gguf-split --merge, and measure the merged file.",
        )
    lib = ggml()
    gguf = header.gguf
    problem = ""
    lists = (i for i in range(lib.gguf_get_n_kv(gguf)) if lib.gguf_get_kv_type(gguf, i) == _ARRAY)
    if arch is not None and not re.fullmatch(r"[\w.-]{1,64}", arch):
        problem = f"has an invalid architecture name: {arch[:64]!r}."
    elif lib.gguf_get_n_tensors(gguf) > MOST_TENSORS:
        problem = f"lists more than {MOST_TENSORS:,} tensors, so it is damaged."
    elif max((lib.gguf_get_arr_n(gguf, i) for i in lists), default=0) > MOST_ITEMS:
        problem = f"has a list of more than {MOST_ITEMS:,} items, so it is damaged."
    for key, most in () if problem else MOST.items():
        value = header.number(f"{arch}.{key}")
        if value is not None and not (0 if key in MAY_BE_ZERO else 1) <= value <= most:
            problem = f"is damaged: its header says {key} = {value:,}."
    if problem:
        raise LabError(f"{path.name} {problem}", "Get the file again, or from another source.")
