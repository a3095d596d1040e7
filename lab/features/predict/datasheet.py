"""Devices by their published figures, in models/devices.toml, and measurements on such devices.

Measurements replace the assumptions from the datasheet. Runs with ceilings are used like those of this machine
(learning.py). Runs alone give the share of the datasheet's bandwidth and peak that they reached. Ceilings alone give
the least time of a step's kernels.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from lab.core import cost, phases
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.core.record import Device as Described
from lab.errors import LabError
from lab.features.limits import probing, step_kernels, where
from lab.features.limits.where import Where
from lab.features.predict import learning
from lab.features.predict.learning import DEVIATIONS, INSIDE, MODEL, PRIOR, SESSION, Learned
from lab.models.devices import Device, called, devices, find_device, from_entry, kinds, names_of, recognise


def basis(device: Device) -> str:
    """The figures of a device with their source, in a sentence."""
    peak = "; without a known peak, prefill is not predicted"
    if device.peak_tflops:
        peak = f" and {device.peak_tflops:g} TFLOP/s{'' if device.tflops else ' (from its FP32 rate)'}"
    checked = f"checked against {device.checked}" if device.checked else "unchecked"
    return f"From the datasheet: {device.gbps:g} GB/s{peak}. Source: {device.source}, {checked}."


__all__ = ["Device", "called", "devices", "find_device", "from_entry", "kinds", "names_of", "recognise"]
"""Of lab/models/devices.py, for those who need the datasheets too."""

KERNEL_SHARE = 0.78
"""The smallest share of a step's time that kernels at their ceilings took on the measured CPUs."""

CEILINGS_AND_RUNS, RUNS, CEILINGS = "its ceilings and runs", "its runs", "its ceilings"
Shares = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Own:
    """The measurements of a device; `settings` are those to predict with."""

    settings: Settings
    ceilings: Ceilings | None = None
    learned: Learned | None = None
    shares: Shares | None = None
    n_runs: int = 0

    @property
    def rests_on(self) -> str:
        """What was measured, in words."""
        return CEILINGS_AND_RUNS if self.learned else RUNS if self.shares else CEILINGS


def find(
    device: Device, records: Sequence[Record], known: Sequence[Ceilings], model: Model, settings: Settings
) -> Own | None:
    """The measurements of a device that are usable for a model; None if there are none.

    Only runs with all layers on one device count.
    """
    own = [record for record in records if is_on(record, device)]
    chosen = dataclasses.replace(settings, n_gpu_layers=(model.n_layer or 0) + 1, rpc=None, prefill_wait=None)
    if own:  # threads and other settings as in its runs
        kept = ("n_ubatch", "n_batch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "prefill_wait")
        chosen = dataclasses.replace(own[-1].settings, **{name: getattr(chosen, name) for name in kept})
    for place in _places(device, own, known):
        ceilings = probing.known(known, place)
        if ceilings is None or not _answers(ceilings, model, chosen):
            continue
        try:
            learned = learning.learn(own, ceilings, "all")
        except LabError:
            if not own:
                return Own(chosen, ceilings)
            continue
        return Own(chosen, ceilings, learned, n_runs=learned.n_runs)
    shares = shares_of(device, own, model)
    return Own(chosen, shares=shares, n_runs=len(own)) if shares else None


def limits(
    model: Model, settings: Settings, device: Device, n_prompt: int, n_gen: int
) -> tuple[float | None, float] | None:
    """Seconds of prefill (None without a peak) and of a token from the datasheet alone; None for an unknown model."""
    step = cost.step(model, n_prompt, 0, 1, settings.type_k, settings.type_v)
    token = cost.step(model, 1, n_prompt + max(0, n_gen - 2) // 2, 1, settings.type_k, settings.type_v)
    if step is None or token is None:
        return None
    weights_s = token.weight_bytes * -(-n_prompt // settings.n_ubatch) / device.gbps / 1e9
    peak = device.peak_tflops
    prefill_s = None if peak is None else max(step.flops / peak / 1e12, weights_s)
    return prefill_s, token.n_bytes / device.gbps / 1e9


def shares_of(device: Device, own: Sequence[Record], model: Model) -> Shares | None:
    """The shares of the datasheet's figures that runs reached, widened by the spread between sessions and models.

    A phase without runs has the assumed shares. None without runs.
    """
    by_phase: dict[str, dict[object, list[float]]] = {PREFILL: {}, DECODE: {}}
    for record in own:
        for phase, n_prompt, share in _reached(record, device):
            key = record.session, record.model.name, record.model.quantization, n_prompt
            by_phase[phase].setdefault(key, []).append(share)
    if not by_phase[DECODE]:
        return None
    ways = [INSIDE, SESSION] + ([] if any(record.model.name == model.name for record in own) else [MODEL])
    shares: Shares = {}
    for phase, groups in by_phase.items():
        medians = [statistics.median(group) for group in groups.values()]
        if medians:
            wide = math.exp(DEVIATIONS * math.sqrt(sum(PRIOR[way][phase] ** 2 for way in ways)))
            shares[phase] = min(medians) / wide, min(1.0, max(medians) * wide)
    return shares


def _reached(record: Record, device: Device) -> Iterator[tuple[str, int, float]]:
    """For each phase of a run: the least time from the datasheet over the measured one."""
    for run in phases.by_length(record.run):
        least = limits(record.model, record.settings, device, run.n_prompt, run.n_gen)
        if least is None:
            continue
        measured = phases.prefill_ns(run), phases.decode_compute_mean_ns(run)
        for phase, least_s, ns in zip((PREFILL, DECODE), least, measured, strict=True):
            if least_s and ns and 0 < 1e9 * least_s <= ns:
                yield phase, run.n_prompt, 1e9 * least_s / ns


def is_on(record: Record, device: Device) -> bool:
    """Whether a successful run had all its layers on this device."""
    run = record.run
    if not run.is_timed or run.lever is not None or record.settings.n_gpu_layers == 0:
        return False
    names = where.of_record(record).devices
    return len(names) == 1 and _recognised(where.device(record.machine, names[0])) == device


@cache
def _recognised(described: Described | None) -> Device | None:
    """The device of the datasheets that a machine's device is."""
    return None if described is None else recognise(described.description, described.memory_bytes)


def _places(device: Device, own: Sequence[Record], known: Sequence[Ceilings]) -> list[Where]:
    """Where the device was measured: first the places of its runs, the latest first."""
    places = [where.of_record(record) for record in reversed(own)]
    for ceilings in reversed(known):
        name = ceilings.device
        if _recognised(where.device(ceilings.machine, name)) == device:
            places.append(Where(ceilings.machine, (name,)))
    unique: list[Where] = []
    for place in places:
        if place not in unique:
            unique.append(place)
    return unique


def _answers(ceilings: Ceilings, model: Model, settings: Settings) -> bool:
    """Whether the kernels of the model were probed."""
    try:
        step_kernels.total(model, settings, ceilings, settings.n_ubatch, 0, 1)
    except LabError:
        return False
    return True
