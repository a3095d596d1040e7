"""Describe a model without its file, from its shape in the catalog and a quantization.

Ceilings and predictions need the number and the size of the weights, but not their values.
"""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import suppress
from pathlib import Path

from lab.core import placement
from lab.core.layers import read_layers as layers_of
from lab.core.lists import grouped
from lab.core.record import Model
from lab.core.shape import group
from lab.errors import LabError
from lab.models import catalog, hub, synthetic
from lab.models.catalog import HUB, Entry, Spec
from lab.models.hub import Remote
from lab.models.obtain import how_to_get, locate
from lab.models.quantization import known
from lab.process.worker import Worker

COMMON_QUANTIZATIONS = ("Q4_0", "Q4_K_M", "Q8_0", "F16")
USUAL = "Q4_K_M"
"""Used if neither the user nor the catalog names a quantization."""


def parse(text: str) -> Spec:
    """`catalog.parse`, but a model that the catalog has only as a shape becomes synthetic."""
    try:
        return catalog.parse(text)
    except LabError:
        name = text.partition(":")[0].lower().strip()
        if not any(name in (entry.name, *entry.aliases) for entry in catalog.entries().values()):
            raise
        return catalog.parse(f"synthetic:{text}")


def find(worker: Worker, text: str) -> Model:
    """The model that `text` names: from its file's header if it is here, or else from its shape in the catalog.

    Of a file on the hub that is not here only the header is read.
    """
    spec = parse(text)
    file = locate(spec)
    if file is None:
        if spec.entry:
            return model_of(spec.entry, spec.quantization or spec.entry.quantization or USUAL)
        if not spec.repo or not spec.file:
            raise LabError(f"{spec.text} is not on this machine.", f"Get it first: {how_to_get(spec)}")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / Path(spec.file).name
            hub.header(Remote(spec.repo, spec.file, spec.revision), path)
            return worker.read_model(path, path.stem, HUB)
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
    quantization = known(quantization)
    tensors = synthetic.tensors(entry.shape, quantization)
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
    return tuple(
        placement.Tensor(tensor.name, tensor.n_bytes) for tensor in synthetic.tensors(entry.shape, known(quantization))
    )
