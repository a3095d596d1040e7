"""What was measured on a device of the datasheets: its own ceilings and runs say more than what its maker publishes.

Runs with ceilings teach as those of this machine do (learning.py). Runs alone say which part of the datasheet's
bandwidth and peak they reached. Ceilings alone say what a step's kernels take at least.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from lab.core import cost, phases
from lab.core.record import DECODE, OK, PREFILL, Ceilings, Model, Record, Settings
from lab.core.record import Device as Described
from lab.errors import LabError
from lab.why import datasheet, learning, probing, step_kernels, where
from lab.why.datasheet import Device
from lab.why.learning import Learned
from lab.why.uncertainty import DEVIATIONS, INSIDE, MODEL, PRIOR, SESSION
from lab.why.where import Where

KERNEL_SHARE = 0.78
"""The smallest part of a step's time that kernels at their ceilings accounted for on the CPUs that were measured."""

CEILINGS_AND_RUNS, RUNS, CEILINGS = "its ceilings and runs", "its runs", "its ceilings"
Shares = dict[str, tuple[float, float]]


def datasheet_shares() -> Shares:
    """What is expected of a device that nobody measured."""
    return {DECODE: datasheet.DECODE_SHARE, PREFILL: datasheet.PREFILL_SHARE}


@dataclass(frozen=True)
class Own:
    """What is known of a device from measurements, the best of it; `settings` are those to predict with."""

    settings: Settings
    ceilings: Ceilings | None = None
    learned: Learned | None = None
    shares: Shares | None = None
    n_runs: int = 0

    @property
    def rests_on(self) -> str:
        """In words."""
        return CEILINGS_AND_RUNS if self.learned else RUNS if self.shares else CEILINGS


def find(
    device: Device, records: Sequence[Record], known: Sequence[Ceilings], model: Model, settings: Settings
) -> Own | None:
    """What records and ceilings tell of a device for a model; None where they tell nothing.

    Only runs with all layers on one device count.
    """
    own = [record for record in records if _is_on(record, device)]
    chosen = dataclasses.replace(settings, n_gpu_layers=(model.n_layer or 0) + 1, rpc=None, prefill_wait=None)
    if own:  # where it runs, threads and the like are those of its runs
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
    """Seconds of prefill (None without a peak) and of a token by the datasheet alone; None for an unknown model."""
    step = cost.step(model, n_prompt, 0, 1, settings.type_k, settings.type_v)
    token = cost.step(model, 1, n_prompt + max(0, n_gen - 2) // 2, 1, settings.type_k, settings.type_v)
    if step is None or token is None:
        return None
    weights_s = token.weight_bytes * -(-n_prompt // settings.n_ubatch) / device.gbps / 1e9
    prefill_s = None if device.tflops is None else max(step.flops / device.tflops / 1e12, weights_s)
    return prefill_s, token.n_bytes / device.gbps / 1e9


def shares_of(device: Device, own: Sequence[Record], model: Model) -> Shares | None:
    """Which parts of the datasheet's figures runs reached, widened by what sessions differ by, and other models.

    Of a phase without runs those of other devices. None where there are none.
    """
    by_phase: dict[str, dict[object, list[float]]] = {PREFILL: {}, DECODE: {}}
    for record in own:
        for phase, n_prompt, share in _reached(record, device):
            key = record.session, record.model.name, record.model.quantization, n_prompt
            by_phase[phase].setdefault(key, []).append(share)
    if not by_phase[DECODE]:
        return None
    ways = [INSIDE, SESSION] + ([] if any(record.model.name == model.name for record in own) else [MODEL])
    shares = datasheet_shares()
    for phase, groups in by_phase.items():
        medians = [statistics.median(group) for group in groups.values()]
        if medians:
            wide = math.exp(DEVIATIONS * math.sqrt(sum(PRIOR[way][phase] ** 2 for way in ways)))
            shares[phase] = min(medians) / wide, min(1.0, max(medians) * wide)
    return shares


def _reached(record: Record, device: Device) -> Iterator[tuple[str, int, float]]:
    """Of each phase of a run: the least time by the datasheet over the measured one."""
    for run in phases.by_length(record.run):
        least = limits(record.model, record.settings, device, run.n_prompt, run.n_gen)
        if least is None:
            continue
        measured = phases.prefill_ns(run), phases.decode_compute_mean_ns(run)
        for phase, least_s, ns in zip((PREFILL, DECODE), least, measured, strict=True):
            if least_s and ns and 0 < 1e9 * least_s <= ns:
                yield phase, run.n_prompt, 1e9 * least_s / ns


def _is_on(record: Record, device: Device) -> bool:
    """Whether a run went well and had all its layers on this device."""
    run = record.run
    if run.status != OK or run.warmup or run.lever is not None or record.settings.n_gpu_layers == 0:
        return False
    names = where.of_record(record).devices
    return len(names) == 1 and _recognised(where.device(record.machine, names[0])) == device


@cache
def _recognised(described: Described | None) -> Device | None:
    """The device of the datasheets that a machine's device is."""
    return None if described is None else datasheet.recognise(described.description, described.memory_bytes)


def _places(device: Device, own: Sequence[Record], known: Sequence[Ceilings]) -> list[Where]:
    """Where the device was measured: first where its runs are from, the latest first."""
    places = [where.of_record(record) for record in reversed(own)]
    for ceilings in reversed(known):
        name = where.measured_on(ceilings)
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
        return step_kernels.total(model, settings, ceilings, settings.n_ubatch, 0, 1) is not None
    except LabError:
        return False
