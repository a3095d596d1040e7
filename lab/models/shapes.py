"""Describe a model without its file, from its shape in the catalog and a quantization.

Ceilings and predictions need the number and the size of the weights, but not their values.
"""

from __future__ import annotations

import collections
import dataclasses
import tempfile
from pathlib import Path

from lab.core import placement
from lab.core.record import Model
from lab.core.shape import group
from lab.core.shape import read_layers as layers_of
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
    """The model in common quantizations, without a file."""
    return {quantization: model_of(entry, quantization) for quantization in COMMON_QUANTIZATIONS}


def model_of(entry: Entry, quantization: str) -> Model:
    """A model of the catalog with the fields that its file's header would have."""
    quantization = known(quantization)
    listed = {tensor.name: tensor for tensor in synthetic.tensors(entry.shape, quantization)}
    by_type = collections.Counter[str]()
    for tensor in listed.values():
        by_type[tensor.type] += tensor.n_bytes
    shape, own = entry.shape, dataclasses.asdict(entry.shape)
    table, output = listed["token_embd.weight"], listed.get("output.weight")
    keys = {"attention.sliding_window": shape.window, **{f"ssm.{key}": n for key, n in (shape.ssm or {}).items()}}
    keys |= {"attention.head_count": shape.n_head, "attention.head_count_kv": shape.n_head_kv}
    layers = layers_of(shape.arch, shape.n_layer, lambda key: keys.get(key.partition(".")[2]), lambda key: None)
    return Model(
        name=entry.name,
        source="shape",
        repo=entry.repo,
        file=entry.file or "",
        n_bytes=by_type.total(),
        quantization=quantization,
        tensor_bytes=dict(by_type),
        embedding_bytes=table.n_bytes,
        output_bytes=output.n_bytes if output else None,
        embedding_type=table.type,
        output_type=output.type if output else None,
        n_params=sum(tensor.n_weights for tensor in listed.values()),
        matrices=group((tensor.name, tensor.type, tensor.dimensions) for tensor in listed.values()),
        **{field.name: own[field.name] for field in dataclasses.fields(Model) if field.name in own}
        | dataclasses.asdict(layers),
    )


def tensors(entry: Entry, quantization: str) -> tuple[placement.Tensor, ...]:
    """The tensors of such a model's file."""
    listed = synthetic.tensors(entry.shape, known(quantization))
    return tuple(placement.Tensor(tensor.name, tensor.n_bytes) for tensor in listed)
