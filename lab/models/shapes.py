"""A model without its file: how large it is and what it computes, from the catalog's shape alone.

Ceilings and predictions need no weights: the shape says how many there are, and a quantization how many bytes each
takes.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress

from lab.core import placement
from lab.core.layers import read_layers as layers_of
from lab.core.lists import grouped
from lab.core.record import Model
from lab.core.shape import BLOCKS, group
from lab.errors import LabError
from lab.models import catalog, synthetic
from lab.models.catalog import Entry, Shape, Spec
from lab.models.obtain import base_is_here, locate, obtain
from lab.models.synthetic import Tensor
from lab.process.worker import Worker

MIXES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "IQ4_XS": "IQ4_XS"}
"""Quantizations that mix types, and the type of most of their weights."""

COMMON_QUANTIZATIONS = ("Q4_0", "Q4_K_M", "Q8_0", "F16")
USUAL = "Q4_K_M"
"""Taken where neither the user nor the catalog names a quantization."""

NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""What llama.cpp's quantizer takes where rows are no multiple of 256 weights."""


def parse(text: str) -> Spec:
    """What `text` means, where a shape is enough: a model without a file to get is its shape with random weights."""
    try:
        return catalog.parse(text)
    except LabError:
        if text.partition(":")[0] not in catalog.entries():
            raise
        return catalog.parse(f"synthetic:{text}")


def find(worker: Worker, text: str) -> Model:
    """The model that `text` names: from its file's header where it is here, else from its shape in the catalog.

    A quantization whose mix of types only a file tells is made where the file that it is made from is here.
    """
    spec = parse(text)
    file = locate(spec)
    if file is None:
        if spec.entry is None:
            raise LabError(f"{spec.text} is not on this machine.", f"Get it first: lab models pull {spec.text}")
        try:
            return model_of(spec.entry, spec.quantization or spec.entry.quantization or USUAL)
        except LabError:
            if not base_is_here(spec):
                raise
        file = obtain(spec, worker, lambda what, done, total: None)
    return worker.read_model(file.path, file.name, file.source)


def by_quantization(entry: Entry) -> dict[str, Model]:
    """The model in common quantizations, without a file; those whose mix of types is not known are left out."""
    models = {}
    for quantization in COMMON_QUANTIZATIONS:
        with suppress(LabError):
            models[quantization] = model_of(entry, quantization)
    return models


def model_of(entry: Entry, quantization: str) -> Model:
    """A model of the catalog as its header would tell it, without a file."""
    tensors = _tensors(entry.shape, quantization)
    by_type = {kind: sum(t.n_bytes for t in own) for kind, own in grouped(tensors, lambda t: t.type).items()}
    sizes = {tensor.name: tensor.n_bytes for tensor in tensors}
    types = {tensor.name: tensor.type for tensor in tensors}
    shape, own = entry.shape, dataclasses.asdict(entry.shape)
    keys = {"attention.sliding_window": shape.window}
    layers = layers_of(shape.arch, shape.n_layer, lambda key: keys.get(key.partition(".")[2]), lambda key: None)
    return Model(
        name=entry.name,
        source="shape",
        repo=entry.repo,
        file=entry.file or "",
        revision=None,
        sha256=None,
        n_bytes=sum(by_type.values()),
        quantization=quantization,
        tensor_bytes=by_type,
        embedding_bytes=sizes["token_embd.weight"],
        output_bytes=sizes.get("output.weight"),
        embedding_type=types["token_embd.weight"],
        output_type=types.get("output.weight"),
        n_params=sum(tensor.n_weights for tensor in tensors),
        matrices=group((tensor.name, tensor.type, tensor.dimensions) for tensor in tensors),
        windows=layers.windows,
        **{field.name: own[field.name] for field in dataclasses.fields(Model) if field.name in own},
    )


def tensors(entry: Entry, quantization: str) -> tuple[placement.Tensor, ...]:
    """The tensors that such a model's file has."""
    return tuple(placement.Tensor(tensor.name, tensor.n_bytes) for tensor in _tensors(entry.shape, quantization))


def _tensors(shape: Shape, quantization: str) -> list[Tensor]:
    """The tensors of a shape in a quantization; those of MIXES as llama.cpp's quantizer mixes their types."""
    if quantization in synthetic.QUANTIZATIONS:
        return synthetic.tensors(shape, quantization)
    if quantization not in MIXES:
        raise LabError(
            f"The mix of types in {quantization} is known only from a file.",
            f"Get one (lab models make synthetic:NAME:{quantization}), or take one of: "
            f"{', '.join((*synthetic.QUANTIZATIONS, *MIXES))}.",
        )
    mixed = []
    for tensor in synthetic.tensors(shape, "Q4_0"):
        kind = tensor.type
        _, layer, part, *_ = [*tensor.name.split("."), "", ""]
        if tensor.name == "token_embd.weight" and not shape.tied_embeddings:
            kind = MIXES[quantization]
        elif tensor.name in ("token_embd.weight", "output.weight"):
            kind = "Q6_K"
        elif kind in ("Q4_0", "Q8_0") and tensor.rows > 1:
            kind = _type_in_layer(shape, quantization, part, int(layer))
        if kind in NARROW and tensor.columns % BLOCKS[kind][0]:
            kind = NARROW[kind]
        mixed.append(dataclasses.replace(tensor, type=kind))
    return mixed


def _type_in_layer(shape: Shape, quantization: str, part: str, layer: int) -> str:
    """The type of a matrix (llama_tensor_get_type_impl in llama.cpp's src/llama-quant.cpp): some get more bits."""
    n, kind = shape.n_layer, MIXES[quantization]
    is_value, is_down = part in ("attn_v", "attn_qkv"), part in ("ffn_down", "ffn_down_exps")
    is_better = layer < n // 8 or layer >= 7 * n // 8 or (layer - n // 8) % 3 == 2  # use_more_bits
    if quantization == "IQ4_XS":
        is_shared = shape.n_head >= 4 * shape.n_head_kv
        return "Q5_K" if (is_value and is_shared) or (is_down and layer < n // 8) else kind
    if (is_value or is_down) and is_better:
        kind = "Q6_K"
    is_70b = shape.arch == "llama" and n == 80
    return "Q5_K" if is_value and is_70b and kind == "Q4_K" else kind
