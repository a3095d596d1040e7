"""Describe a model without its file, from its shape in the catalog and a quantization.

Ceilings and predictions need the number and the size of the weights, but not their values.
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
from lab.models.obtain import base_is_here, how_to_get, locate, obtain
from lab.models.synthetic import Tensor
from lab.process.worker import Worker

MIXES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K", "Q6_K": "Q6_K", "IQ4_XS": "IQ4_XS"}
"""Quantizations that mix types, with the type of most weights."""

COMMON_QUANTIZATIONS = ("Q4_0", "Q4_K_M", "Q8_0", "F16")
USUAL = "Q4_K_M"
"""Used if neither the user nor the catalog names a quantization."""

NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}
"""The types that llama.cpp's quantizer uses instead if a row is not a multiple of 256 weights."""


def parse(text: str) -> Spec:
    """`catalog.parse`, but a model that the catalog has only as a shape becomes synthetic."""
    try:
        return catalog.parse(text)
    except LabError:
        if text.partition(":")[0] not in catalog.entries():
            raise
        return catalog.parse(f"synthetic:{text}")


def find(worker: Worker, text: str) -> Model:
    """The model that `text` names: from its file's header if it is here, or else from its shape in the catalog.

    If the quantization's mix of types is known only from a file, makes that file if its base is here.
    """
    spec = parse(text)
    file = locate(spec)
    if file is None:
        if spec.entry is None:
            raise LabError(f"{spec.text} is not on this machine.", f"Get it first: {how_to_get(spec)}")
        try:
            return model_of(spec.entry, spec.quantization or spec.entry.quantization or USUAL)
        except LabError:
            if not base_is_here(spec):
                raise
        file = obtain(spec, worker)
    return worker.read_model(file.path, file.name, file.source)


def by_quantization(entry: Entry) -> dict[str, Model]:
    """The model in common quantizations, without a file; omits those with an unknown mix of types."""
    models = {}
    for quantization in COMMON_QUANTIZATIONS:
        with suppress(LabError):
            models[quantization] = model_of(entry, quantization)
    return models


def model_of(entry: Entry, quantization: str) -> Model:
    """A model of the catalog with the fields that its file's header would have."""
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
    """The tensors of such a model's file."""
    return tuple(placement.Tensor(tensor.name, tensor.n_bytes) for tensor in _tensors(entry.shape, quantization))


def _tensors(shape: Shape, quantization: str) -> list[Tensor]:
    """The tensors of a shape in a quantization; for MIXES with the types that llama.cpp's quantizer chooses."""
    if quantization in synthetic.QUANTIZATIONS:
        return synthetic.tensors(shape, quantization)
    if quantization not in MIXES:
        raise LabError(
            f"The lab cannot tell the mix of types in {quantization} without a file.",
            f"Make one (lab models make synthetic:NAME:{quantization}), or use one of: "
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
    """The type of a matrix, as in llama_tensor_get_type_impl of llama.cpp's src/llama-quant.cpp."""
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
