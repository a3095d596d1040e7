"""Predicts a model's times: on this machine from its kernels' ceilings, on another device from its datasheet.

On this machine the expected time is fitted to earlier runs (lab/why/learning.py). The range around it comes from the
errors of predictions of held-out points, and is wider where it extrapolates. For a device that was not measured, the
theoretical limit is bytes over bandwidth, or FLOPs over peak, from its datasheet; the share of it that is assumed is
stated with its source.

`basis_here` and `basis_of` describe the basis of a prediction, `beyond` where it extrapolates.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.analysis.wording import digits
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
from lab.why import datasheet, learning, probing, published, roofline, step_kernels, where
from lab.why.datasheet import KERNEL_SHARE, Device, Own, Shares
from lab.why.learning import LONGER, MODEL, QUANTIZATION, SETTINGS, SHORTER, Case, Learned, Step, Uncertainty

TOO_FAST = 1.1
"""Runs faster than their kernels' ceilings by this factor show that the ceilings are too low."""


def basis_here(learned: Learned) -> str:
    """The basis of a prediction for this machine, in sentences."""
    fit, errors = learned.fit, learned.uncertainty
    sentence = (
        f"Expected times are fitted to {plural(learned.n_runs, 'run')} of {', '.join(learned.models)} on this machine "
        f"({len(learned.points)} points: medians by length and phase): {digits(fit.prefill_factor)}x the kernels' best "
        f"time in prefill, {digits(fit.decode_factor)}x in decode, plus {1e6 * fit.per_layer_step_s:.3g} us per layer "
        f"and step, plus {1e12 * fit.per_layer_value_s:.3g} ps per layer, token and value, corrected by the mean "
        f"deviation of each setup. Ranges are {learning.DEVIATIONS:g} standard deviations of {len(errors.held_out)} "
        "held-out predictions, supplemented by the lab's benchmark (tests/bench/held_out.py) where these are few."
    )
    if n_disturbed := sum(point.is_disturbed for point in learned.points):
        sentence += f" {n_disturbed} of the points come from disturbed runs, which widens all ranges."
    fastest = min(errors.fastest(PREFILL), errors.fastest(DECODE))
    if fastest < 1 / TOO_FAST:
        sentence += (
            f" Some of these runs took only {digits(fastest)}x their kernels' best time: ceilings are too low, so "
            "expected times are too long, and the ranges start lower by this factor. Run: lab ceilings --again"
        )
    return sentence


def basis_of(device: Device, own: Own | None) -> str:
    """The basis of a prediction for a device of the datasheets, in sentences."""
    if own is None:
        return f"{datasheet.basis(device)} {published.basis(device)}"
    if own.learned is not None:
        return basis_here(own.learned).replace("on this machine", "on such a device")
    if own.shares is None:
        day = own.ceilings.measured_at[:10] if own.ceilings else ""
        return (
            f"From ceilings of such a device in the results ({day}): from the time of its kernels up to "
            f"{digits(1 / KERNEL_SHARE)}x that, the range measured on CPUs. Runs would narrow it: lab measure"
        )
    figures = {DECODE: f"{device.gbps:g} GB/s", PREFILL: f"{device.tflops:g} TFLOP/s" if device.tflops else ""}
    parts = [
        f"{100 * low:.0f} to {100 * high:.0f} % of {figures[phase]} in {phase}"
        for phase, (low, high) in own.shares.items()
    ]
    return (
        f"From {plural(own.n_runs, 'run')} on such a device in the results: {' and '.join(parts)} of its datasheet "
        f"({device.source}), widened by the spread between sessions. Its ceilings would narrow it: lab ceilings"
    )


def beyond(case: Case, errors: Uncertainty, wide: float) -> list[str]:
    """A sentence on how a prediction extrapolates and how wide its range is; empty if it does not."""
    known = errors.known[case.phase]
    ways, longest = known.beyond(case), known.longest
    what = "prompt" if case.phase == PREFILL else "context"
    words = {
        LONGER: f"to {case.length / longest:.3g}x the longest measured {what} ({longest:,.0f} tokens)",
        SHORTER: f"below the shortest measured {what} ({known.shortest:,.0f} tokens)",
        MODEL: "to another model",
        QUANTIZATION: f"to another quantization ({case.quantization})",
        SETTINGS: "to other settings (threads, --ubatch, cache types or flash attention)",
    }
    if not ways:
        return []
    beyond = ", ".join(words[way] for way in ways)
    ends = f"{digits(1 / wide)}-{digits(wide)}x the expected time"
    return [f"{case.phase} extrapolates {beyond}: range widened to {ends}"]


MOST_TOKENS = 10_000_000
"""The longest context that can be predicted."""


@dataclass(frozen=True)
class Prediction:
    """A run of n_prompt and n_gen tokens in seconds: the theoretical limit, and the expected range.

    On this machine also the single expected value inside the range; a datasheet gives none. `beyond` says how it
    extrapolates.
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
    rests_on: str | None = None  # for a device of the datasheets: what was measured on it; None: nothing
    doubts: tuple[str, ...] = ()  # some of core/shown.py
    misfit: str | None = None  # what is missing if it does not fit into memory: then no times are shown

    @property
    def e2e_s(self) -> tuple[float, float]:
        low, high = (
            prefill + (self.n_gen - 1) * tpot for prefill, tpot in zip(self.prefill_s, self.tpot_s, strict=True)
        )
        return low, high


@dataclass(frozen=True)
class Predictions:
    """Predictions for a model on one device, with the bytes that each length needs, its memory, and the basis."""

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
    """Predicts the times of requests: a Prediction for each prompt length, with `gen` tokens generated.

        lab.predict("1000", 200, "llama-3.2-3b", device="rtx-4090")[0].tpot_s

    Without `device` it predicts for this machine, from the ceilings and runs in the folder `results`; else for a device
    of models/devices.toml, from its datasheet. `model` is a SPEC; its file is not needed. LabError for an unknown name,
    and if ceilings or runs are missing.
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
    """The results of `predict` with the memory needed and the basis."""
    lengths = checked_lengths(prompt_len, gen)
    chosen = datasheet.find_device(device) if device else None
    plan = plan_for(model, settings)
    needed = {n: memory_bytes(plan.model, plan.settings, n + gen) for n in lengths}
    folder = Path(results)
    if chosen:
        own = datasheet.find(chosen, *kept(folder), plan.model, plan.settings)
        rows = [on_device(plan.model, plan.settings, chosen, own, n, gen) for n in lengths]
        basis = " ".join(filter(None, [basis_of(chosen, own), published.measured(chosen, plan.model)]))
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
    """The prediction; if its context does not fit into the available bytes, `misfit` names what would fit."""
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


def kept(folder: Path) -> tuple[list[Record], list[Ceilings]]:
    """The records and the ceilings in a folder; none if it does not exist."""
    if not (folder.is_dir() and any(folder.glob("*.jsonl"))):
        return [], []
    contents = results_files.read([folder])
    return list(contents.records), list(dict.fromkeys([*contents.ceilings, *probing.kept(folder)]))


def memory_bytes(model: Model, settings: Settings, n_ctx: int, users: int = 1) -> int:
    """About how many bytes a context of n_ctx tokens for each user needs, weights included."""
    shared = dataclasses.replace(settings, n_ctx=users * memory.padded(n_ctx), n_seq_max=users)
    return memory.of_context(model, shared).total_bytes


def here(
    model: Model, settings: Settings, ceilings: Ceilings, learned: Learned | None, n_prompt: int, n_gen: int
) -> Prediction:
    """A run on this machine. Neither the expected time nor the range goes below the limit.

    Without earlier runs there is only a range: from the kernels' least time to that time over KERNEL_SHARE.
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
    """A run on a device of the datasheets: from measurements on it, else from its datasheet."""
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
) -> list[tuple[Device, Prediction]]:
    """A run on these devices, without `names` on every known one."""
    rows = []
    for device in map(datasheet.find_device, names) if names else datasheet.devices().values():
        own = datasheet.find(device, records, known, model, settings)
        row = on_device(model, settings, device, own, n_prompt, n_gen)
        rows.append((device, with_misfit(row, model, settings, device.memory_bytes)))
    return rows


def elsewhere(
    model: Model,
    settings: Settings,
    device: Device,
    n_prompt: int,
    n_gen: int,
    shares: Shares | None = None,
) -> Prediction:
    """A run on a device that reaches these shares of its datasheet's figures; for other phases as published runs do."""
    least = datasheet.limits(model, settings, device, n_prompt, n_gen)
    if least is None:
        raise step_kernels.not_known(model)
    unknown = None, math.nan, math.nan
    learned: dict[str, tuple[float | None, float, float]] = {PREFILL: unknown}
    learned |= published.times(model, settings, device, n_prompt, n_gen)
    for phase, limit in zip((PREFILL, DECODE), least, strict=True):
        if shares and limit and phase in shares:
            slow, fast = shares[phase]
            learned[phase] = None, limit / fast, limit / slow
    (prefill, *prefill_s), (tpot, *tpot_s) = learned[PREFILL], learned[DECODE]
    ranges = (prefill_s[0], prefill_s[1]), (tpot_s[0], tpot_s[1])
    return Prediction(
        n_prompt,
        n_gen,
        least[0],
        ranges[0],
        least[1],
        ranges[1],
        prefill,
        tpot,
        doubts=(shown.ASSUMED,) if shares else (),
    )


def checked_lengths(prompt_len: str | Sequence[int], gen: int) -> tuple[int, ...]:
    """The prompt lengths. LabError for impossible ones."""
    lengths = parse_lengths(prompt_len)
    check_lengths(lengths)
    if max(lengths) + gen > MOST_TOKENS:
        raise LabError(f"{max(lengths) + gen:,} tokens are too many.", f"Give at most {MOST_TOKENS:,}.")
    if gen < 2:
        raise LabError(f"--gen {gen} leaves nothing to decode.", "Give at least --gen 2.")
    return lengths


def plan_for(model: str, settings: dict[str, Any]) -> Plan:
    """This machine and the settings, for a model; only its shape is needed."""
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
