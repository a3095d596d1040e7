"""Split a model file into parts as llama.cpp's llama-gguf-split does."""

from pathlib import Path
from typing import Any

import gguf


def split(path: Path, target: Path, n_parts: int, is_first_empty: bool = False) -> list[Path]:
    """Write a model as parts TARGET-00001-of-0000N.gguf. The first has the header's keys.

    `is_first_empty`: it has no tensors (--no-tensor-in-metadata).
    """
    reader = gguf.GGUFReader(path)
    n_with_tensors = n_parts - 1 if is_first_empty else n_parts
    groups: list[list[Any]] = [[] for _ in range(n_parts)]
    for number, tensor in enumerate(reader.tensors):
        index = number * n_with_tensors // len(reader.tensors)
        groups[index + n_parts - n_with_tensors].append(tensor)
    paths = []
    for number, tensors in enumerate(groups):
        name = f"{target.name}-{number + 1:05}-of-{n_parts:05}.gguf"
        paths.append(target.with_name(name))
        writer = gguf.GGUFWriter(paths[-1], "")
        if number == 0:
            _copy_keys(reader, writer)
        else:
            writer.kv_data[0].clear()
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", n_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def _copy_keys(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    writer.kv_data[0].clear()
    for field in reader.fields.values():
        if field.name.startswith("GGUF."):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
