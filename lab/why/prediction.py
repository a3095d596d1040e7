"""What a model would do: on this machine from its kernels' ceilings, on another from its datasheet.

On this machine a step takes its kernels' time, times a factor, plus what every layer costs beside them (per step:
threads that meet; per token: norms, activations, copies). The three coefficients are fitted to runs that were
measured here, of whatever models. For a device that nobody here has there is only its datasheet: the theoretical
limit is bytes over bandwidth, or FLOPs over peak; what people measure is a part of that, and the part that is
taken here is stated with its source.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lab.core import cost, phases, stats
from lab.core import results as results_files
from lab.core.record import DECODE, OK, Ceilings, Model, Record, Settings, Steps
from lab.errors import LabError
from lab.models import catalog, shapes
from lab.models.catalog import data_file
from lab.process.worker import Worker
from lab.runner.plan import check_lengths, make_plan, parse_lengths
from lab.why import probing, roofline
from lab.why.roofline import Kernels

DECODE_SHARE, PREFILL_SHARE = (0.55, 0.80), (0.25, 0.70)
"""Parts of the datasheet's bandwidth, and of its FLOP/s, that llama.cpp reaches on GPUs.

Decode: seven published runs of Llama 3.2 3B Q4_K_M (geerlingguy/ai-benchmarks) reach 0.58 to 0.72.
Prefill: a rule of thumb, since published prompts differ too much; it is the least certain figure here.
"""


@dataclass(frozen=True)
class Device:
    """A device of models/devices.toml. `tflops`: dense FP16 peak; both are the datasheet's."""

    name: str
    about: str
    gbps: float
    source: str
    tflops: float | None = None
    memory_gb: float | None = None


@dataclass(frozen=True)
class Efficiency:
    """How measured steps relate to their kernels: seconds = factor x kernels + per_step + per_token, over layers.

    `per_layer_step_s` for every layer and step, `per_layer_value_s` for every layer, token and value of the
    layer's width (n_embd + n_ff). `n_runs` runs of `models` were fitted, off by `rms`.
    """

    factor: float
    per_layer_step_s: float
    per_layer_value_s: float
    n_runs: int
    models: tuple[str, ...]
    rms: float

    def seconds(self, kernels: Kernels, model: Model, n_tokens: int) -> float:
        layers = model.n_layer or 0
        width = (model.n_embd or 0) + (model.n_ff or 0)
        beside = layers * (self.per_layer_step_s + n_tokens * width * self.per_layer_value_s)
        return self.factor * kernels.total_s + beside


@dataclass(frozen=True)
class Prediction:
    """A run of n_prompt and n_gen tokens in seconds: the theoretical limit, and what to expect (a range)."""

    n_prompt: int
    n_gen: int
    prefill_limit_s: float | None
    prefill_s: tuple[float, float]
    tpot_limit_s: float
    tpot_s: tuple[float, float]

    @property
    def e2e_s(self) -> tuple[float, float]:
        low, high = (
            prefill + (self.n_gen - 1) * tpot for prefill, tpot in zip(self.prefill_s, self.tpot_s, strict=True)
        )
        return low, high


def predict(
    prompt_len: str | Sequence[int] = "10,1000,10000",
    gen: int = 200,
    model: str = catalog.DEFAULT,
    device: str | None = None,
    *,
    results: str | Path = "results",
    **settings: Any,
) -> list[Prediction]:
    """How long requests would take: a Prediction for each prompt length, with `gen` tokens generated.

        lab.predict("1000", 200, "llama-3.2-3b", device="rtx-4090")[0].tpot_s

    Without `device` for this machine, from the ceilings and runs in the folder `results`; else for a device of
    models/devices.toml, from its datasheet. `model` is a SPEC, and need not be here. LabError for an unknown name,
    and where ceilings or runs are missing.
    """
    lengths = parse_lengths(prompt_len) if isinstance(prompt_len, str) else tuple(prompt_len)
    check_lengths(lengths)
    chosen = find_device(device) if device else None
    with Worker() as worker:
        shape, plan = shapes.find(worker, model), make_plan(worker, [1], 1, 1, **settings)
    if chosen:
        return [elsewhere(shape, plan.settings, chosen, n, gen) for n in lengths]
    folder = Path(results)
    best = probing.need(probing.kept(folder), plan.machine, plan.settings.n_gpu_layers > 0, False, "this machine")
    efficiency = learn(results_files.read([folder]).records, best)
    return [here(shape, plan.settings, best, efficiency, n, gen) for n in lengths]


@cache
def devices() -> dict[str, Device]:
    """The devices of models/devices.toml by name."""
    with data_file("devices.toml").open("rb") as file:
        return {name: Device(name=name, **facts) for name, facts in tomllib.load(file).items()}


def find_device(name: str) -> Device:
    """A device by its name. LabError with close names for an unknown one."""
    known = devices()
    found = known.get(name.lower().replace(" ", "-"))
    if found is None:
        close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        offer = f"Did you mean {' or '.join(close)}?" if close else f"Known: all, {', '.join(known)}."
        raise LabError(f"There is no device named {name!r}.", offer)
    return found


def memory_bytes(model: Model, settings: Settings, n_ctx: int) -> int:
    """About what a context of so many tokens needs, weights included."""
    return cost.memory(model, dataclasses.replace(settings, n_ctx=n_ctx)).total_bytes


def basis_here(efficiency: Efficiency) -> str:
    """What a prediction for this machine rests on, in words."""
    return (
        f"Expected: {efficiency.factor:.2f} x the kernels' best time, plus "
        f"{1e6 * efficiency.per_layer_step_s:.3g} us per layer and step, plus "
        f"{1e12 * efficiency.per_layer_value_s:.3g} ps per layer, token and value; fitted to {efficiency.n_runs} "
        f"runs of {', '.join(efficiency.models)} on this machine, off by {efficiency.rms:.0%}."
    )


BASIS_ELSEWHERE = (
    f"Expected: {DECODE_SHARE[0]:.0%} to {DECODE_SHARE[1]:.0%} of the datasheet's bandwidth, as in published runs, and "
    f"{PREFILL_SHARE[0]:.0%} to {PREFILL_SHARE[1]:.0%} of its peak, a rule of thumb; without a published FP16 peak no "
    "prefill."
)


def basis_elsewhere(chosen: Device) -> str:
    """What a prediction for a device rests on, in words."""
    peak = f" and {chosen.tflops:g} TFLOP/s" if chosen.tflops else "; no FP16 peak"
    return f"From the datasheet: {chosen.gbps:g} GB/s{peak} ({chosen.source}). {BASIS_ELSEWHERE}"


def learn(records: Sequence[Record], ceilings: Ceilings) -> Efficiency:
    """The efficiency of the runs that this machine made. LabError where there are too few."""
    rows: list[tuple[float, float, float, float]] = []
    models = set()
    n_runs = 0
    for record in records:
        if record.run.status != OK or record.run.warmup or not probing.same(record.machine, ceilings.machine):
            continue
        try:
            found = [row for leg in phases.by_length(record.run) for row in _rows(record, leg.steps, ceilings)]
        except LabError:  # a type or thread count without a ceiling
            continue
        rows += found
        n_runs += bool(found)
        models.add(f"{record.model.name} {record.model.quantization or ''}".strip())
    if len(rows) < 3:
        raise LabError(
            "There are too few runs of this machine to learn its efficiency from.",
            "Measure some: lab measure, then lab ceilings",
        )
    seconds, *columns = zip(*rows, strict=True)
    factor, per_step, per_value = stats.fit(columns, seconds)
    fitted = [sum(c * x for c, x in zip((factor, per_step, per_value), row[1:], strict=True)) for row in rows]
    rms = (sum((fit / row[0] - 1) ** 2 for fit, row in zip(fitted, rows, strict=True)) / len(rows)) ** 0.5
    return Efficiency(factor, per_step, per_value, n_runs, tuple(sorted(models)), rms)


def here(
    model: Model, settings: Settings, ceilings: Ceilings, efficiency: Efficiency, n_prompt: int, n_gen: int
) -> Prediction:
    """A run on this machine. The range is the fit's error on either side."""
    best = roofline.roof(ceilings)
    prefill, prefill_limit = 0.0, 0.0
    for first in range(0, n_prompt, settings.n_ubatch):
        n_tokens = min(settings.n_ubatch, n_prompt - first)
        n_outputs = int(first + n_tokens == n_prompt)
        prefill += _step(model, settings, ceilings, efficiency, n_tokens, first, n_outputs)
        prefill_limit += _limit(model, settings, best.gbps, best.gflops, n_tokens, first, n_outputs)
    middle = n_prompt + max(0, n_gen - 2) // 2
    tpot = _step(model, settings, ceilings, efficiency, 1, middle, 1)
    tpot_limit = _limit(model, settings, best.gbps, best.gflops, 1, middle, 1)
    low, high = 1 - efficiency.rms, 1 + efficiency.rms
    return Prediction(
        n_prompt, n_gen, prefill_limit, (low * prefill, high * prefill), tpot_limit, (low * tpot, high * tpot)
    )


def on_devices(
    model: Model, settings: Settings, n_prompt: int, n_gen: int, names: Sequence[str] = ()
) -> list[tuple[Device, Prediction, bool | None]]:
    """A run on these devices (without `names` on every known one), fastest writers first, and whether it fits there.

    None where the device's memory is not known.
    """
    need = memory_bytes(model, settings, n_prompt + n_gen) / 1e9
    found = [
        (
            each,
            elsewhere(model, settings, each, n_prompt, n_gen),
            None if not each.memory_gb else need <= each.memory_gb,
        )
        for each in (map(find_device, names) if names else devices().values())
    ]
    return sorted(found, key=lambda row: row[1].tpot_limit_s)


def elsewhere(model: Model, settings: Settings, device: Device, n_prompt: int, n_gen: int) -> Prediction:
    """A run on a device of which only the datasheet is known."""
    step = cost.step(model, n_prompt, 0, 1, settings.type_k, settings.type_v)
    token = cost.step(model, 1, n_prompt + max(0, n_gen - 2) // 2, 1, settings.type_k, settings.type_v)
    if step is None or token is None:
        raise LabError(f"What a step of {model.name} costs is not known from its shape.", "Take another model.")
    prefill_limit = None
    prefill = (float("nan"), float("nan"))
    if device.tflops is not None:
        reading = token.weight_bytes * -(-n_prompt // settings.n_ubatch) / device.gbps / 1e9
        prefill_limit = max(step.flops / device.tflops / 1e12, reading)
        prefill = (prefill_limit / PREFILL_SHARE[1], prefill_limit / PREFILL_SHARE[0])
    limit = token.n_bytes / device.gbps / 1e9
    tpot = limit / DECODE_SHARE[1], limit / DECODE_SHARE[0]
    return Prediction(n_prompt, n_gen, prefill_limit, prefill, limit, tpot)


def _step(
    model: Model, settings: Settings, ceilings: Ceilings, efficiency: Efficiency, n_tokens: int, n_past: int, n_out: int
) -> float:
    kernels = roofline.step_kernels(model, settings, ceilings, n_tokens, n_past, n_out)
    if kernels is None:
        raise LabError(f"What a step of {model.name} costs is not known from its shape.", "Take another model.")
    return efficiency.seconds(kernels, model, n_tokens)


def _limit(
    model: Model, settings: Settings, gbps: float, gflops: float, n_tokens: int, n_past: int, n_out: int
) -> float:
    step = cost.step(model, n_tokens, n_past, n_out, settings.type_k, settings.type_v)
    assert step is not None
    return max(step.n_bytes / gbps, step.flops / gflops) / 1e9


def _rows(record: Record, steps: Steps, ceilings: Ceilings) -> list[tuple[float, float, float, float]]:
    """A run's prefill and its decode: seconds, kernels' seconds, layers x steps, layers x tokens x width."""
    model, found = record.model, []
    width = (model.n_embd or 0) + (model.n_ff or 0)
    last = len(steps.kind) - 1 - steps.kind[::-1].index("prefill")
    for decode in (False, True):
        chosen = [i for i, kind in enumerate(steps.kind) if (kind == DECODE) == decode]
        if not chosen:
            continue
        kernels = 0.0
        for i in chosen:
            step = roofline.step_kernels(
                model, record.settings, ceilings, steps.n_tokens[i], steps.n_past[i], int(i >= last)
            )
            if step is None:
                return []
            kernels += step.total_s
        seconds = sum(steps.ready_ns[i] - steps.start_ns[i] for i in chosen) / 1e9
        layers = model.n_layer or 0
        n_tokens = sum(steps.n_tokens[i] for i in chosen)
        found.append((seconds, kernels, float(layers * len(chosen)), float(layers * n_tokens * width)))
    return found
