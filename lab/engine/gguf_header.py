"""Read a model's shape and the types of its tensors from the header of its GGUF file.

With ggml's parser: the `gguf` package takes 5.5 s for a vocabulary of 49,152 tokens, ggml 0.3 s.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from lab.core import split_files
from lab.core.files import GET_AGAIN
from lab.core.layers import n_layers_run, with_layers
from lab.core.matrices import group
from lab.core.memory import Tensor
from lab.core.record import Model
from lab.engine import devices, llama, refusals
from lab.engine.bindings import GGUF_INTEGERS, GgufParams, P, ggml
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

_LAYER = re.compile(r"blk\.(\d+)\.")
_BOOL = 7
_STRING = 8
_ARRAY = 9


class _Weights(NamedTuple):
    """A tensor of the header's table.

    `sizes`: the inner dimension first. `end`: the offset in the file behind its last byte.
    """

    type: str
    sizes: tuple[int, ...]
    n_bytes: int
    end: int


@dataclass
class _Header:
    """The header of an open file: the values of its keys, and its table of tensors."""

    gguf: P

    def text(self, key: str) -> str | None:
        """The value of a key, if it is a string."""
        index, kind = self._find(key)
        if kind != _STRING:
            return None
        value: bytes = ggml().gguf_get_val_str(self.gguf, index)
        return value.decode(errors="replace")

    def number(self, key: str) -> int | None:
        """The value of a key, if it is a non-negative integer."""
        index, kind = self._find(key)
        if kind not in GGUF_INTEGERS:
            return None
        type_name, _ = GGUF_INTEGERS[kind]
        read = getattr(ggml(), f"gguf_get_val_{type_name}")
        value = int(read(self.gguf, index))
        return value if value >= 0 else None

    def numbers(self, key: str) -> tuple[int, ...] | None:
        """The value of a key, if it is a list of integers or booleans."""
        index, kind = self._find(key)
        if kind != _ARRAY:
            return None
        item_kind = ggml().gguf_get_arr_type(self.gguf, index)
        item: type[ctypes.c_bool] | type[ctypes._SimpleCData[int]]
        if item_kind == _BOOL:
            item = ctypes.c_bool
        elif item_kind in GGUF_INTEGERS:
            _, item = GGUF_INTEGERS[item_kind]
        else:
            return None
        data = ctypes.cast(ggml().gguf_get_arr_data(self.gguf, index), ctypes.POINTER(item))
        n = ggml().gguf_get_arr_n(self.gguf, index)
        return tuple(int(value) for value in data[:n])

    def n_items(self) -> int:
        """The number of items in the longest list."""
        lib = ggml()
        longest = 0
        for index in range(lib.gguf_get_n_kv(self.gguf)):
            if lib.gguf_get_kv_type(self.gguf, index) == _ARRAY:
                longest = max(longest, lib.gguf_get_arr_n(self.gguf, index))
        return longest

    def n_tensors(self) -> int:
        return int(ggml().gguf_get_n_tensors(self.gguf))

    def tensors(self) -> dict[str, _Weights]:
        """The tensors by name."""
        lib = ggml()
        gguf = self.gguf
        data_offset = lib.gguf_get_data_offset(gguf)
        table = {}
        for i in range(self.n_tensors()):
            name = lib.gguf_get_tensor_name(gguf, i).decode(errors="replace")
            type_name = lib.ggml_type_name(lib.gguf_get_tensor_type(gguf, i))
            n_bytes = lib.gguf_get_tensor_size(gguf, i)
            table[name] = _Weights(
                type=type_name.decode().upper(),
                sizes=tuple(lib.gguf_get_tensor_ne(gguf, i)[:4]),
                n_bytes=n_bytes,
                end=data_offset + lib.gguf_get_tensor_offset(gguf, i) + n_bytes,
            )
        return table

    def _find(self, key: str) -> tuple[int, int | None]:
        """The index and the type of a key; None for a key that the header lacks."""
        index = ggml().gguf_find_key(self.gguf, key.encode())
        if index < 0:
            return index, None
        return index, ggml().gguf_get_kv_type(self.gguf, index)


def read_model(path: Path, name: str, source: str) -> Model:
    """The model in a GGUF file, or in all parts of a split one.

    LabError if a file is not GGUF, is truncated, or holds no weights.
    """
    with _opened(path) as header:
        arch = header.text("general.architecture")
        files = _files(header, path)
        _check(header, arch, path)
        model = Model(
            name=name, source=source, file=printable(path.name), arch=arch, tensor_bytes={}
        )
        model = _with_dimensions(model, header)
        quantization = _quantization(header)
        tensors = _table(header, files)

    n_params = sum(math.prod(weights.sizes) for weights in tensors.values())
    tensors = _tensors_run(tensors, model.n_layer)
    table = tensors.get("token_embd.weight")
    output = tensors.get("output.weight")
    bytes_by_type = collections.Counter[str]()
    for weights in tensors.values():
        bytes_by_type[weights.type] += weights.n_bytes
    return replace(
        model,
        n_bytes=sum(file.stat().st_size for file in files),
        quantization=quantization,
        n_vocab=table.sizes[1] if table else None,
        tied_embeddings=output is None,
        tensor_bytes=dict(bytes_by_type),
        embedding_bytes=table.n_bytes if table else None,
        output_bytes=output.n_bytes if output else None,
        output_type=output.type if output else None,
        n_params=n_params,
        matrices=group(
            [(name, tensor.type, tensor.sizes) for name, tensor in tensors.items()],
            model.n_layer,
            model.n_layer_kv,
        ),
    )


def read_tensors(path: Path) -> tuple[Tensor, ...]:
    """The tensors in a GGUF file. LabError as in `read_model`."""
    with _opened(path) as header:
        n_layer = n_layers_run(header, header.text("general.architecture"))
        table = _tensors_run(_table(header, _files(header, path)), n_layer)
    return tuple(
        Tensor(name, weights.n_bytes, weights.type, weights.sizes)
        for name, weights in table.items()
    )


def _tensors_run(tensors: dict[str, _Weights], n_layer: int | None) -> dict[str, _Weights]:
    """The tensors without those of layers that only draft, which llama.cpp does not load."""
    if n_layer is None:
        return tensors
    loaded = {}
    for name, weights in tensors.items():
        layer = _LAYER.match(name)
        if layer is None or int(layer[1]) < n_layer:
            loaded[name] = weights
    return loaded


def _with_dimensions(model: Model, header: _Header) -> Model:
    """A model with what the architecture's keys tell."""

    def number(key: str) -> int | None:
        return header.number(f"{model.arch}.{key}")

    model = replace(model, n_layer=n_layers_run(header, model.arch))
    model = with_layers(model, header)
    n_embd = number("embedding_length")
    head_dim = number("attention.key_length")
    if not head_dim and n_embd and model.n_head:
        head_dim = n_embd // model.n_head
    value_length = number("attention.value_length")
    widths = header.numbers(f"{model.arch}.feed_forward_length") or ()
    return replace(
        model,
        n_embd=n_embd,
        head_dim=head_dim or None,
        head_dim_v=value_length if value_length != head_dim else None,
        n_ff=number("feed_forward_length") or max(widths, default=None),
        n_ctx_train=number("context_length"),
        n_expert=number("expert_count"),
        n_expert_used=number("expert_used_count"),
        n_ff_expert=number("expert_feed_forward_length"),
    )


def _quantization(header: _Header) -> str | None:
    """llama.cpp's name of the quantization, if the file says which one it is."""
    file_type = header.number("general.file_type")
    if file_type is None:
        return None
    if file_type == 0:
        return "F32"
    for name, number in llama.quantizations().items():
        if number == file_type:
            return name
    return None


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Header]:
    """The header of a file. LabError if it is not GGUF."""
    head = _head(path)
    if not head.startswith(b"GGUF"):
        raise refusals.of_start(path, head)
    devices.clear_log()
    gguf = ggml().gguf_init_from_file(os.fsencode(path), GgufParams(no_alloc=True, ctx=None))
    if not gguf:
        raise refusals.of_header(path, head, devices.last_warnings())
    try:
        yield _Header(gguf)
    finally:
        ggml().gguf_free(gguf)


def _head(path: Path) -> bytes:
    """The first bytes of a file. LabError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(refusals.HEAD_BYTES)
    except FileNotFoundError:
        what = f"The model file {path} is not there."
        raise LabError(what, "Check the path, or get the file again.") from None
    except OSError as problem:
        what = f"The model file {path} cannot be read: {problem.strerror}."
        raise LabError(what, "Check its permissions.") from None


def _files(header: _Header, path: Path) -> tuple[Path, ...]:
    """The files of the model that begins with `path`. LabError if they are not all there."""
    n_files = header.number("split.count") or 1
    number = header.number("split.no") or 0
    files = split_files.paths_of(path) if n_files > 1 else (path,)
    if n_files != len(files) or files[0] != path or number != 0:
        what = f"{path.name} is part {number + 1} of {n_files} by its header, not by its name."
        hint = f"Name the parts NAME-00001-of-{n_files:05}.gguf and so on, as they were published."
        raise LabError(what, hint)
    return files


def _table(first: _Header, files: tuple[Path, ...]) -> dict[str, _Weights]:
    """The tensors in all files of a model. LabError if they do not belong together."""
    tensors = _complete(first, files[0])
    for number, path in enumerate(files[1:], start=1):
        with _opened(path) as header:
            place = header.number("split.no"), header.number("split.count")
            table = _complete(header, path)
        if place != (number, len(files)) or tensors.keys() & table.keys():
            raise _mixed(path, files[0])
        tensors |= table
    if not tensors:
        what = f"{files[0].name} holds only a vocabulary, no weights."
        raise LabError(what, "Give the file that holds the weights.")
    n_tensors = first.number("split.tensors.count")
    if len(files) > 1 and n_tensors not in (None, len(tensors)):
        raise _mixed(files[-1], files[0])
    return tensors


def _mixed(path: Path, first: Path) -> LabError:
    what = f"{path.name} and {first.name} are not parts of one model: their headers differ."
    return LabError(what, "Get all parts from one place.")


def _complete(header: _Header, path: Path) -> dict[str, _Weights]:
    """The tensors in a file. LabError if it ends before the last of them."""
    tensors = header.tensors()
    n_bytes = path.stat().st_size
    end = max((weights.end for weights in tensors.values()), default=0)
    if end > n_bytes:
        what = f"{path.name} is truncated: it has {n_bytes:,} of {end:,} bytes."
        is_piece = refusals.PIECE.search(path.name)
        raise LabError(what, refusals.JOIN if is_piece else GET_AGAIN)
    return tensors


def _check(header: _Header, arch: str | None, path: Path) -> None:
    """LabError for a file without a model, and for impossible values, which llama.cpp accepts."""
    damage = _damage(header, arch)
    if damage:
        raise LabError(f"{path.name} {damage}", "Get the file again, or from another source.")
    other = refusals.of_kind(path, header.text("general.type"), arch, header.tensors())
    if other:
        raise other
    if header.n_tensors() and header.number(f"{arch}.block_count") is None:
        key = f"{arch}.block_count" if arch else "general.architecture"
        what = f"{path.name} does not describe a model: its header lacks {key}."
        raise LabError(what, "Get a file of the model by another maker.")


def _damage(header: _Header, arch: str | None) -> str:
    """What is impossible in a header; "" for a header without damage."""
    if arch is not None and not re.fullmatch(r"[\w.-]{1,64}", arch):
        return f"has an invalid architecture name: {arch[:64]!r}."
    if header.n_tensors() > MOST_TENSORS:
        return f"lists more than {MOST_TENSORS:,} tensors, so it is damaged."
    if header.n_items() > MOST_ITEMS:
        return f"has a list of more than {MOST_ITEMS:,} items, so it is damaged."
    for key, most in MOST.items():
        value = header.number(f"{arch}.{key}")
        least = 0 if key in MAY_BE_ZERO else 1
        if value is not None and not least <= value <= most:
            return f"is damaged: its header says {key} = {value:,}."
    return ""
