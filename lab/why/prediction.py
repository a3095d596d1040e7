"""What a model would do: on this machine from its kernels' ceilings, on another from its datasheet.

On this machine the expectation comes from what its runs taught (lab/why/learning.py), and so does the range around
it: how far off such predictions were of points that were held out, wider where it extrapolates. For a device that
nobody here has there is only its datasheet: the theoretical limit is bytes over bandwidth, or FLOPs over peak; what
people measure is a part of that, and the part that is taken here is stated with its source.

`basis_here` and `basis_of` say what a prediction is based on, `beyond` where it extrapolates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.core import cost, memory, shown
from lab.core import results as results_files
from lab.core.lists import plural
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.errors import LabError
from lab.models import catalog, shapes
from lab.process.worker import Worker
from lab.runner.cases import Plan
from lab.runner.plan import check_lengths, make_plan, parse_lengths
from lab.runner.plan_needs import memory_for
from lab.why import datasheet, learning, probing, roofline, step_kernels, where
from lab.why.datasheet import KERNEL_SHARE, Device, Own, Shares
from lab.why.learning import LONGER, MODEL, QUANTIZATION, SETTINGS, SHORTER, Case, Learned, Step, Uncertainty

TOO_FAST = 1.1
"""Runs faster than their kernels' ceilings by this factor show that the ceilings are too low."""


def basis_here(learned: Learned) -> str:
    """What a prediction for this machine is based on, in words."""
    fit, errors = learned.fit, learned.uncertainty
    sentence = (
        f"Expected: {fit.prefill_factor:.2f} x the kernels' best time in prefill and {fit.decode_factor:.2f} x in "
        f"decode, plus {1e6 * fit.per_layer_step_s:.3g} us per layer and step, plus "
        f"{1e12 * fit.per_layer_value_s:.3g} ps per layer, token and value; fitted to "
        f"{plural(learned.n_runs, 'run')} of {', '.join(learned.models)} on this machine "
        f"({len(learned.points)} points: medians by length and phase), and "
        "corrected by what runs of the same setup differ from that on average. "
        f"Ranges: {learning.DEVIATIONS:g} standard deviations of {len(errors.held_out)} predictions of points that "
        "were held out, and of those of the lab's own bench (tests/bench/held_out.py) where few could be."
    )
    if n_disturbed := sum(point.is_disturbed for point in learned.points):
        sentence += f" {n_disturbed} of the points are of disturbed runs, which widens all ranges."
    fastest = min(errors.fastest(PREFILL), errors.fastest(DECODE))
    if fastest < 1 / TOO_FAST:
        sentence += (
            f" Some of these runs took only {fastest:.2f} x their kernels' best time: ceilings are too low, so the "
            "expectation is too slow, and the ranges reach down by as much. Run: lab ceilings --again"
        )
    return sentence


def basis_of(device: Device, own: Own | None) -> str:
    """What a prediction for a device of the datasheets is based on."""
    if own is None:
        return datasheet.basis(device)
    if own.learned is not None:
        return basis_here(own.learned).replace("on this machine", "on such a device")
    if own.shares is None:
        day = own.ceilings.measured_at[:10] if own.ceilings else ""
        return (
            f"From ceilings of such a device in the results ({day}): at least the time of its kernels, "
            f"at most {1 / KERNEL_SHARE:.2f}x as long, as on CPUs. With runs it is surer: lab measure"
        )
    figures = {DECODE: f"{device.gbps:g} GB/s", PREFILL: f"{device.tflops:g} TFLOP/s" if device.tflops else ""}
    parts = [f"{low:.0%} to {high:.0%} of {figures[phase]} in {phase}" for phase, (low, high) in own.shares.items()]
    return (
        f"From {plural(own.n_runs, 'run')} on such a device in the results: {' and '.join(parts)} of its datasheet "
        f"({device.source}), widened by what other sessions differ by. With its ceilings it is surer: lab ceilings"
    )


def beyond(case: Case, errors: Uncertainty, wide: float) -> list[str]:
    """In which ways a prediction extrapolates, and how wide its range is therefore; none: an empty list."""
    known = errors.known[case.phase]
    ways, longest = known.beyond(case), known.longest
    what = "prompt" if case.phase == PREFILL else "context"
    words = {
        LONGER: f"to {case.length / longest:.3g} times the longest {what} learned from ({longest:,.0f} tokens)",
        SHORTER: f"below the shortest {what} learned from ({known.shortest:,.0f} tokens)",
        MODEL: "to another model",
        QUANTIZATION: f"to another quantization ({case.quantization})",
        SETTINGS: "to other settings (threads, --ubatch, cache types or flash attention)",
    }
    if not ways:
        return []
    beyond = ", ".join(words[way] for way in ways)
    return [f"{case.phase} extrapolates {beyond}: range widened to {1 / wide:.2g} to {wide:.2g} times the expectation"]


MOST_TOKENS = 10_000_000
"""More than any context that is asked about."""


@dataclass(frozen=True)
class Prediction:
    """A run of n_prompt and n_gen tokens in seconds: the theoretical limit, and what to expect (a range).

    On this machine also the single value to expect, which the range is around; a datasheet gives none. `beyond`
    says in words in which ways it goes beyond what was learned from.
    """

    n_prompt: int
    n_gen: int
    prefill_limit_s: float | None
    prefill_s: tuple[float, float]
    tpot_limit_s: float
    tpot_s: tuple[float, float]
    prefill_expected_s: float | None = None
    tpot_expected_s: float | None = None
    beyond: tuple[str, ...] = ()
    rests_on: str | None = None  # of a device of the datasheets: what was measured on it; None: nothing
    doubts: tuple[str, ...] = ()  # some of core/shown.py
    misfit: str | None = None  # that it does not fit into the memory, and what would: then no times are shown

    @property
    def e2e_s(self) -> tuple[float, float]:
        low, high = (
            prefill + (self.n_gen - 1) * tpot for prefill, tpot in zip(self.prefill_s, self.tpot_s, strict=True)
        )
        return low, high


@dataclass(frozen=True)
class Predictions:
    """Predictions for a model on one device: the bytes that each length needs, the memory there, and the basis."""

    model: Model
    where: str
    rows: list[Prediction]
    needed: dict[int, int]
    memory_bytes: float | None
    basis: str


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
    return predictions(prompt_len, gen, model, device, results, **settings).rows


def predictions(
    prompt_len: str | Sequence[int],
    gen: int,
    model: str,
    device: str | None = None,
    results: str | Path = "results",
    **settings: Any,
) -> Predictions:
    """What `predict` returns, with the memory it needs and what it is based on."""
    lengths = checked_lengths(prompt_len, gen)
    chosen = datasheet.find_device(device) if device else None
    plan = plan_for(model, settings)
    needed = {n: memory_bytes(plan.model, plan.settings, n + gen) for n in lengths}
    folder = Path(results)
    if chosen:
        own = datasheet.find(chosen, *kept(folder), plan.model, plan.settings)
        rows = [on_device(plan.model, plan.settings, chosen, own, n, gen) for n in lengths]
        basis = basis_of(chosen, own)
        rows = [with_misfit(row, plan.model, plan.settings, chosen.memory_bytes) for row in rows]
        return Predictions(plan.model, chosen.about, rows, needed, chosen.memory_bytes, basis)
    place = where.of(plan.machine, plan.model, plan.settings)
    records, known = kept(folder)
    best = probing.need(known, place, False, "this machine")
    learned = learning.learn(records, best, learning.offload_of(plan.model, plan.settings))
    rows = [here(plan.model, plan.settings, best, learned, n, gen) for n in lengths]
    basis = " ".join([basis_here(learned), *probing.doubt_words(best)])
    available = memory_for(plan)
    rows = [with_misfit(row, plan.model, plan.settings, available) for row in rows]
    return Predictions(plan.model, "this machine", rows, needed, available, basis)


def with_misfit(row: Prediction, model: Model, settings: Settings, available: float | None) -> Prediction:
    """The prediction; where its context does not fit into the available bytes, `misfit` says so, and what would fit."""
    n_ctx = row.n_prompt + row.n_gen
    need = memory_bytes(model, settings, n_ctx)
    if available is None or need <= available:
        return row
    entry, over = catalog.entries().get(model.name), f"needs {need / 1e9:,.1f} GB of {available / 1e9:,.1f}"
    smaller = shapes.by_quantization(entry) if entry else {}
    sizes = {name: memory_bytes(other, settings, n_ctx) for name, other in smaller.items()}
    fitting = [name for name, size in sizes.items() if size <= available]
    longest = memory.longest(model, round(available))
    what = f"up to {longest:,} tokens" if longest else "a smaller model"
    what = max(fitting, key=lambda name: sizes[name]) if fitting else what
    return dataclasses.replace(row, misfit=f"{over}: {what} would fit")


def predictions_on(
    prompt_len: str | Sequence[int],
    gen: int,
    model: str,
    names: Sequence[str] = (),
    results: str | Path = "results",
    **settings: Any,
) -> tuple[Model, dict[int, list[tuple[Device, Prediction, bool | None]]]]:
    """The model, and for each prompt length what `on_devices` predicts for these devices, or for all.

    Of devices that were measured in the folder `results`, from that.
    """
    lengths = checked_lengths(prompt_len, gen)
    plan, known = plan_for(model, settings), kept(Path(results))
    return plan.model, {n: on_devices(plan.model, plan.settings, n, gen, names, *known) for n in lengths}


def kept(folder: Path) -> tuple[list[Record], list[Ceilings]]:
    """The records and the ceilings in a folder; none where it is not there."""
    if not (folder.is_dir() and any(folder.glob("*.jsonl"))):
        return [], []
    contents = results_files.read([folder])
    return list(contents.records), list(dict.fromkeys([*contents.ceilings, *probing.kept(folder)]))


def memory_bytes(model: Model, settings: Settings, n_ctx: int) -> int:
    """About how many bytes a context of n_ctx tokens needs, weights included."""
    return memory.of_context(model, dataclasses.replace(settings, n_ctx=n_ctx)).total_bytes


def here(
    model: Model, settings: Settings, ceilings: Ceilings, learned: Learned | None, n_prompt: int, n_gen: int
) -> Prediction:
    """A run on this machine. Neither the expectation nor the range goes below the limit.

    Without learned runs there is only a range: from the kernels' least time to that time over KERNEL_SHARE.
    """
    prefill = learning.prompt_steps(n_prompt, settings)
    middle = n_prompt + max(0, n_gen - 2) // 2
    best = roofline.roof(ceilings, where.layers(ceilings.machine, model, settings))
    parts_of = learning.step_costs(model, settings, ceilings)
    limits, expected, ranges, words = {}, {}, {}, list[str]()
    doubts: list[Sequence[str]] = [probing.doubts(ceilings)]
    for phase, length, steps in ((PREFILL, n_prompt, prefill), (DECODE, middle, [(1, middle, 1)])):
        is_pipeline = phase == PREFILL and learning.overlaps(settings, ceilings)
        costs = learning.costs_of(model, steps, parts_of, is_pipeline)
        limits[phase] = limit = sum(_limit(model, settings, best, step) for step in steps)
        if learned is None:
            ranges[phase] = max(limit, costs.kernels_s), max(limit, costs.kernels_s) / datasheet.KERNEL_SHARE
            continue
        case, errors = learning.case_of(phase, float(length), model, settings), learned.uncertainty
        expected[phase] = max(limit, learned.fit.seconds(case, costs))
        wide = errors.factor(case)
        ranges[phase] = max(limit, expected[phase] / wide * errors.fastest(phase)), expected[phase] * wide
        words += beyond(case, errors, wide)
        alike = [point.is_disturbed for point in errors.points if point.case.phase == phase]
        too_low = errors.fastest(phase) < 1 / TOO_FAST
        doubts += [[shown.EXTRAPOLATED] if words else [], shown.of_runs(len(alike), sum(alike), 0)]
        doubts.append([shown.ABOVE] if too_low else [])
    return Prediction(
        n_prompt,
        n_gen,
        limits[PREFILL],
        ranges[PREFILL],
        limits[DECODE],
        ranges[DECODE],
        expected.get(PREFILL),
        expected.get(DECODE),
        tuple(words),
        doubts=shown.all_of(doubts),
    )


def on_device(
    model: Model, settings: Settings, device: Device, own: Own | None, n_prompt: int, n_gen: int
) -> Prediction:
    """A run on a device of the datasheets: from what was measured on it, else by its datasheet."""
    if own is None:
        return elsewhere(model, settings, device, n_prompt, n_gen)
    if own.shares:
        row = elsewhere(model, settings, device, n_prompt, n_gen, own.shares)
    else:
        assert own.ceilings is not None
        row = here(model, own.settings, own.ceilings, own.learned, n_prompt, n_gen)
    return dataclasses.replace(row, rests_on=own.rests_on)


def on_devices(
    model: Model,
    settings: Settings,
    n_prompt: int,
    n_gen: int,
    names: Sequence[str] = (),
    records: Sequence[Record] = (),
    known: Sequence[Ceilings] = (),
) -> list[tuple[Device, Prediction, bool | None]]:
    """A run on these devices (without `names` on every known one), fastest decode first, and whether it fits there.

    None where the device's memory is not known.
    """
    rows = []
    for device in map(datasheet.find_device, names) if names else datasheet.devices().values():
        own = datasheet.find(device, records, known, model, settings)
        row = on_device(model, settings, device, own, n_prompt, n_gen)
        row = with_misfit(row, model, settings, device.memory_bytes)
        rows.append((device, row, None if device.memory_bytes is None else row.misfit is None))
    return sorted(rows, key=lambda row: row[1].tpot_limit_s)


def elsewhere(
    model: Model,
    settings: Settings,
    device: Device,
    n_prompt: int,
    n_gen: int,
    shares: Shares | None = None,
) -> Prediction:
    """A run on a device by its datasheet, of whose figures these shares are reached."""
    shares = datasheet.datasheet_shares() if shares is None else shares
    least = datasheet.limits(model, settings, device, n_prompt, n_gen)
    if least is None:
        raise step_kernels.not_known(model)
    prefill_s, token_s = least
    (slow, fast), (slow_token, fast_token) = shares[PREFILL], shares[DECODE]
    prefill = (math.nan, math.nan) if prefill_s is None else (prefill_s / fast, prefill_s / slow)
    tpot = token_s / fast_token, token_s / slow_token
    return Prediction(n_prompt, n_gen, prefill_s, prefill, token_s, tpot, doubts=(shown.ASSUMED,))


def checked_lengths(prompt_len: str | Sequence[int], gen: int) -> tuple[int, ...]:
    """The prompt lengths. LabError for what cannot be predicted."""
    lengths = parse_lengths(prompt_len)
    check_lengths(lengths)
    if max(lengths) + gen > MOST_TOKENS:
        raise LabError(f"{max(lengths) + gen:,} tokens are no context.", f"Give at most {MOST_TOKENS:,}.")
    if gen < 2:
        raise LabError(f"--gen {gen} leaves nothing to decode.", "Give 2 or more.")
    return lengths


def plan_for(model: str, settings: dict[str, Any]) -> Plan:
    """This machine and the settings, for a model; only the model's shape has to be known here."""
    with Worker() as worker:
        shape, plan = shapes.find(worker, model), make_plan(worker, [1], 1, 1, **settings)
    chosen = plan.settings
    if chosen.n_gpu_layers and settings.get("n_gpu_layers") is None and shape.n_layer is not None:
        chosen = dataclasses.replace(chosen, n_gpu_layers=shape.n_layer + 1)
    return dataclasses.replace(plan, model=shape, settings=chosen)


def _limit(model: Model, settings: Settings, best: roofline.Roof, step: Step) -> float:
    what = cost.step(model, *step, settings.type_k, settings.type_v)
    if what is None:
        raise step_kernels.not_known(model)
    return max(what.n_bytes / best.gbps, what.flops / best.gflops) / 1e9
