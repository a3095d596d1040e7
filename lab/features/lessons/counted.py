"""What the lessons count without a run: kernels at their ceilings, models by their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core import cost, memory
from lab.core.cost import StepCost
from lab.core.record import Ceilings, Model, Record, Settings
from lab.core.results import Contents
from lab.errors import LabError
from lab.models import catalog, synthetic
from lab.process.wire import MUL_MAT
from lab.roofline import probing, step_kernels
from lab.roofline.step_kernels import StepKernels
from lab.runner import machine

if TYPE_CHECKING:
    import pandas as pd


def kernels(
    ceilings: Ceilings, model: Model, n_threads: int, types: Sequence[str]
) -> pd.DataFrame:
    """Kernel rates at a model's feed-forward shape: one row per quantization and number of
    tokens."""
    import pandas as pd

    measured = []
    for rate in ceilings.rates:
        has_shape = (rate.op, rate.rows, rate.columns) == (MUL_MAT, model.n_ff, model.n_embd)
        if has_shape and rate.n_threads == n_threads and rate.type in types:
            row = {
                "type": rate.type,
                "tokens at once": rate.n_tokens,
                "GB/s": round(probing.gbps(rate), 2),
                "GFLOP/s": round(probing.gflops(rate), 1),
            }
            measured.append(row)
    if not measured:
        raise LabError(
            f"The kernels of {', '.join(types)} with {n_threads} threads are not measured at this "
            "model's shape.",
            "Measure them: lab.ceilings(types=[...], threads=...)",
        )
    return pd.DataFrame(measured).sort_values(["type", "tokens at once"], ignore_index=True)


def step_ms(
    ceilings: Ceilings, model: Model, settings: Settings, n_tokens: int, n_past: int
) -> float:
    """The milliseconds of one step if each kernel runs at its ceiling.

    LabError for a kernel without a ceiling.
    """
    return 1e3 * StepKernels(model, settings, ceilings).total(n_tokens, n_past, 1).total_s


def step_cost(model: Model, n_tokens: int, n_past: int = 0) -> StepCost:
    """FLOPs and bytes of one step of `n_tokens` after `n_past`, with logits for the last token."""
    return step_kernels.known(cost.step(model, n_tokens, n_past, 1), model)


def shape(name: str, quantization: str) -> Model:
    """A model of `lab models` in a quantization, made from its shape; needs no file."""
    return synthetic.model_of(catalog.find(name), quantization)


def kv_bytes(model: Model, kind: str = "f16") -> float:
    """Bytes of one token in a KV cache of type `kind`. LabError if the model's header does not
    tell."""
    n_bytes = memory.kv_bytes_per_position(model, kind, kind)
    if not n_bytes:
        raise step_kernels.not_known(model)
    return n_bytes


def memory_bytes(record: Record) -> float:
    """The memory of the device that computed a run: of a GPU its own, of a CPU the machine's.

    LabError for several devices, and for one whose memory is unknown.
    """
    n_bytes = probing.memory_bytes(record)
    if n_bytes is None:
        raise LabError(
            f"The memory of {machine_name(record)} is unknown.",
            "Enter the bytes of its memory instead, such as 24e9.",
        )
    return n_bytes


def caches(models: Sequence[Model]) -> pd.DataFrame:
    """KV cache sizes (F16): bytes per token, at 8,192 tokens, and the length at which the cache
    equals the weights."""
    import pandas as pd

    sizes = []
    for model in models:
        if not model.n_bytes:
            continue
        token_bytes = kv_bytes(model)
        row = {
            "model": f"{model.name} {model.quantization}",
            "queries per kv head": (model.n_head or 0) // (model.n_head_kv or 1),
            "bytes per token": f"{token_bytes:,.0f}",
            "cache at 8,192 tokens, GB": round(8192 * token_bytes / 1e9, 2),
            "weights, GB": round(model.n_bytes / 1e9, 2),
            "tokens until the cache weighs as much": f"{model.n_bytes / token_bytes:,.0f}",
        }
        sizes.append(row)
    return pd.DataFrame(sizes)


def ceilings_of(contents: Contents) -> Ceilings:
    """The ceilings in a results file for the machine of its first record. LabError without any."""
    place = probing.place_of_record(contents.records[0])
    return probing.need(contents.ceilings, place, "this file")


def machine_name(record: Record) -> str:
    """The machine that made a record, as the plots name it."""
    return machine.label(record.machine, record.settings)
