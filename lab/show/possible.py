"""Can a run have been as fast as its record says? No device reads weights faster than its memory delivers them."""

from __future__ import annotations

import re
from functools import cache

from lab.core import cost, phases
from lab.core.record import Model, Record
from lab.errors import LabError
from lab.models import catalog, devices, shapes
from lab.runner import machine

CACHED_BYTES = 1e9
"""Smaller weights can lie in a cache: the last cache of no device that is sold is larger."""

MARGIN = 1.05
"""How far above the maker's bandwidth a rate may lie: clocks and rounding."""


def of_bandwidth(record: Record) -> float:
    """The rate at which a plain run read its weights, over the bandwidth of its device by the datasheet; 0: not known.

    Of an unknown device the fastest one that is sold counts.
    """
    run, settings = record.run, record.settings
    if not run.is_timed or run.lever is not None:
        return 0.0
    model = record.model if record.model.tensor_bytes else _of_catalog(record.model.name)
    step = cost.step(model, 1, 0, 1) if model else None
    if step is None or step.weight_bytes < CACHED_BYTES:
        return 0.0
    used = machine.used(record.machine, settings)
    is_whole = settings.n_gpu_layers < 0 or settings.n_gpu_layers > (model.n_layer if model and model.n_layer else 0)
    device = devices.recognise(used[0].description, used[0].memory_bytes) if len(used) == 1 and is_whole else None
    most = device.gbps if device else max(one.gbps for one in devices.devices().values()) * max(1, len(used))
    rates = [0.0]
    for leg in phases.by_length(run):
        tpot, prefill = phases.decode_compute_mean_ns(leg), phases.prefill_ns(leg)
        n_steps = -(-leg.n_prompt // max(1, settings.n_ubatch))
        rates += [n * step.weight_bytes / ns / most for n, ns in ((1, tpot), (n_steps, prefill)) if ns]
    return max(rates)


@cache
def _of_catalog(name: str) -> Model | None:
    """The model of the catalog that a file name such as Llama-3.1-8B-Instruct-Q4_0 means; None where none is sure."""
    found = re.fullmatch(r"(.+?)(?:-instruct|-it|-chat)?[-.]((?:iq|q|f|bf|mxfp)\d\w*)", name.lower())
    try:
        return shapes.model_of(catalog.find(found[1]), found[2].upper()) if found else None
    except LabError:
        return None
