"""Predicts requests: on this machine from its kernels' ceilings, on other devices from their datasheets.

On this machine the expected time is fitted to earlier runs (learning.py). For a device that was not measured it is
learned from what others published (datasheet.py). The range comes from the errors of predictions of what was left out.
Several users decode together in one step, which reads the weights once and each user's cache: its time is that of a
single user's step times the ratio of their predicted times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from lab.core import cost, memory, results as results_files, shown
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.features.predict.slo import Slo
from lab.errors import LabError
from lab.roofline import probing, step_kernels
from lab.roofline import datasheet, learning
from lab.roofline.learning import (
    LONGER,
    MODEL,
    QUANTIZATION,
    SETTINGS,
    SHORTER,
    Learned,
    StepPrediction,
)
from lab.models import catalog, devices, obtain, synthetic
from lab.models.devices import Device
from lab.process.worker import Worker
from lab.runner import machine
from lab.runner.cases import Plan
from lab.runner.placing import memory_for
from lab.runner.plan import make_plan, parse_lengths
from lab.show import canvas, table, wording
from lab.show.canvas import COLOURS, INK
from lab.show.section import UNKNOWN, Columns, Section, tabled
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HERE = "this machine"
MOST_TOKENS = 10_000_000  # the longest context that can be predicted
NEAR = 0.05  # runs whose prompt length differs by at most this share of the wanted one count as the same request
WITHIN = 0.90  # the share of requests that a range is to hold
CERTAIN = 0.95  # the chance from which limits are said to be kept
TOO_FAST = 1.1  # runs faster than their kernels' ceilings by this factor show that the ceilings are too low
MOST_ROWS = 15  # devices of a ranking that are shown, with this machine

Span = tuple[float, float]  # the ends of a range


@dataclass(frozen=True)
class Prediction:
    """A request on a device, in seconds: the theoretical limit, the expected value if there is one, and the range (NaN:
    not known).

    `is_measured`: the range is that of runs on this machine. `beyond` says how it extrapolates. `chance`: the
    probability that it keeps the limits, where some were given.
    """

    model: Model
    n_prompt: int
    n_gen: int
    prefill_limit_s: float | None
    prefill_s: Span
    tpot_limit_s: float
    tpot_s: Span
    prefill_expected_s: float | None = None
    tpot_expected_s: float | None = None
    beyond: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()  # some of core/shown.py
    misfit: str | None = (
        None  # what is missing if it does not fit into memory: then no times are shown
    )
    needed_bytes: int = 0
    memory_bytes: float | None = None
    users: int = 1
    name: str = HERE
    about: str = HERE
    basis: str = ""
    is_measured: bool = False
    chance: float | None = None

    @property
    def label(self) -> str:
        """The model and its quantization."""
        return f"{self.model.name} {self.model.quantization or ''}".strip()

    @property
    def e2e_s(self) -> Span:
        """Seconds of the whole request."""
        low, high = (
            a + (self.n_gen - 1) * b for a, b in zip(self.prefill_s, self.tpot_s, strict=True)
        )
        return low, high

    @property
    def tps(self) -> Span:
        """Tokens per second of each user."""
        return 1 / self.tpot_s[1], 1 / self.tpot_s[0]

    @property
    def is_known(self) -> bool:
        """Whether it fits and has times of both phases."""
        return not self.misfit and self.e2e_s[0] == self.e2e_s[0]


def predict(
    prompt_len: str | Sequence[int] = "1000",
    gen: int = 200,
    model: str = catalog.DEFAULT,
    device: str | None = None,
    *,
    users: int = 1,
    slo: Slo | None = None,
    results: str | Path = "results",
    **settings: Any,
) -> list[Prediction]:
    """Predicts the times of requests on devices, a Prediction each: for each prompt length the fastest first.

        lab.predict("1000", 200, "llama-3.2-3b", device="rtx-4090")[0].tpot_s
        lab.predict("8000", 300, "llama-3.1-8b:Q4_K_M")[:5]  # the fastest devices

    Without `device` it ranks all devices of models/devices.toml, and this machine: by runs of such a request in the
    folder `results`, otherwise by its ceilings and runs there. `device` names some devices or kinds, or "here". `model`
    is a SPEC; its file is not needed. Several devices and models with commas. The answers of `users` are decoded
    together. LabError for an unknown name, and if "here" lacks ceilings or runs.
    """
    lengths = parse_lengths(prompt_len)
    if max(lengths) + gen > MOST_TOKENS:
        raise LabError(
            f"{max(lengths) + gen:,} tokens are too many.", f"Give at most {MOST_TOKENS:,}."
        )
    if gen < 2:
        raise LabError(f"--gen {gen} leaves nothing to decode.", "Give at least --gen 2.")
    if users < 1:
        raise LabError(f"--users {users} is not possible.", "Give 1 or more.")
    names = parts(device or f"all,{HERE}")
    rows = list[Prediction]()
    others = [one for name in names if name != HERE for one in devices.names_of(name) or [name]]
    chosen = dict.fromkeys(map(devices.find_device, others))
    for spec in parts(model):
        plan = plan_for(spec, settings)
        for one in chosen:
            basis = basis_of(one, plan.model)
            found = (on_device(plan.model, plan.settings, one, n, gen, users) for n in lengths)
            rows += [dataclasses.replace(row, basis=basis) for row in found]
        if HERE in names:
            rows += _on_this(plan, lengths, gen, users, Path(results), is_ranked=device is None)

    def order(row: Prediction) -> tuple[int, bool, float]:
        middle = math.sqrt(row.e2e_s[0] * row.e2e_s[1])
        return (
            lengths.index(row.n_prompt),
            bool(row.misfit),
            math.inf if middle != middle else middle,
        )

    return [
        dataclasses.replace(row, chance=chance(row, slo) if slo else None)
        for row in sorted(rows, key=order)
    ]


def parts(text: str) -> list[str]:
    """The parts of a list with commas; "here" is this machine."""
    return [
        HERE if part.strip().lower() == "here" else part.strip()
        for part in text.split(",")
        if part.strip()
    ]


def ranks(device: str | None) -> bool:
    """Whether to rank devices: without any, or with a kind of them."""
    return device is None or any(name != HERE and devices.names_of(name) for name in parts(device))


def plan_for(model: str, settings: dict[str, Any]) -> Plan:
    """This machine and the settings, for a model; only its shape is needed."""
    with Worker() as worker:
        shape = obtain.find(worker, model)
        plan = make_plan(worker, [1], 1, 1, **settings)
    chosen = plan.settings
    if chosen.n_gpu_layers and settings.get("n_gpu_layers") is None and shape.n_layer is not None:
        chosen = dataclasses.replace(chosen, n_gpu_layers=shape.n_layer + 1)
    return dataclasses.replace(plan, model=shape, settings=chosen)


def basis_of(device: Device, model: Model) -> str:
    """The basis of a prediction for a device of the datasheets, in sentences."""
    peak = "; without a known peak, prefill is not predicted"
    if device.peak_tflops:
        peak = f", arithmetic {device.peak_tflops:g} TFLOP/s{'' if device.tflops else ' (from its FP32 rate)'}"
    checked = f"checked against {device.checked}" if device.checked else "unchecked"
    source = f"From the datasheet: memory {device.gbps:g} GB/s{peak}. Source: {device.source}, {checked}."
    return " ".join(
        filter(None, [source, datasheet.basis(device), datasheet.measured(device, model)])
    )


def on_device(
    model: Model, settings: Settings, device: Device, n_prompt: int, n_gen: int, users: int = 1
) -> Prediction:
    """A request on a device of the datasheets, as published runs on such devices do."""
    figures = dict[str, Any]()
    middle = n_prompt + max(0, n_gen - 2) // 2
    for phase, name, n in ((PREFILL, "prefill", n_prompt), (DECODE, "tpot", middle)):
        case = datasheet.case_for(model, settings, device, phase, n)
        known = datasheet.learned()[phase]
        least = case.least_s
        expected = known.expected_s(case)
        figures |= {
            f"{name}_limit_s": least,
            f"{name}_expected_s": expected,
            f"{name}_s": (math.nan, math.nan),
        }
        if least and expected:
            fast, slow = known.range(case)
            figures[f"{name}_s"] = max(least, fast * expected), slow * expected
    row = Prediction(model, n_prompt, n_gen, **figures, name=device.name, about=device.about)
    if users > 1:
        gbps = device.gbps * 1e9
        times = list[float | None]()
        for n in (1, users):  # of several users arithmetic counts
            size = 1, middle, n, settings.type_k, settings.type_v, [(1, middle)] * (n - 1)
            step = step_kernels.step_cost(model, *size)
            arithmetic = step.flops / device.peak_tflops / 1e12 if device.peak_tflops else 0.0
            moved = step.weight_bytes / gbps, 0.0, (step.n_bytes - step.weight_bytes) / gbps
            case = dataclasses.replace(case, parts=(arithmetic, *moved, case.parts[-1]))
            times.append(known.expected_s(case))
        row = _of_users(row, users, times[0], times[1], case.least_s or math.nan)
    return with_memory(row, settings, device.memory_bytes)


def here(
    model: Model,
    settings: Settings,
    ceilings: Ceilings,
    learned: Learned,
    n_prompt: int,
    n_gen: int,
    users: int = 1,
) -> Prediction:
    """A request on this machine. Neither the expected time nor the range goes below the limit."""
    middle = n_prompt + max(0, n_gen - 2) // 2
    kinds = (settings.type_k, settings.type_v)
    best = step_kernels.roof(ceilings, probing.layers(ceilings.machine, model, settings))

    def least_s(n: int, n_past: int, n_outputs: int, others: Sequence[cost.Span] = ()) -> float:
        step = step_kernels.step_cost(model, n, n_past, n_outputs, *kinds, others)
        return max(step.n_bytes / best.gbps, step.flops / best.gflops) / 1e9

    figures = dict[str, Any]()
    words = list[str]()
    doubts = [probing.doubts(ceilings)]
    for phase, name, what, length, steps in (
        (PREFILL, "prefill", "prompt", n_prompt, learning.prompt_steps(n_prompt, settings)),
        (DECODE, "tpot", "context", middle, [(1, middle, 1)]),
    ):
        limit = sum(least_s(*step) for step in steps)
        case = learning.case_of(phase, float(length), model, settings)
        known = learned.known[phase]
        expected = max(
            limit, learned.fit.seconds(case, learning.costs_of(model, settings, ceilings, steps))
        )
        wide = learned.factor(case)
        fastest = learned.fastest(phase)
        figures |= {f"{name}_limit_s": limit, f"{name}_expected_s": expected}
        figures[f"{name}_s"] = max(limit, expected / wide * fastest), expected * wide
        said = {
            LONGER: f"to {case.length / known.longest:.3g}x the longest measured {what} ({known.longest:,.0f} tokens)",
            SHORTER: f"below the shortest measured {what} ({known.shortest:,.0f} tokens)",
            MODEL: "to another model",
            QUANTIZATION: f"to another quantization ({case.quantization})",
            SETTINGS: "to other settings (threads, --ubatch, cache types or flash attention)",
        }
        if ways := ", ".join(said[way] for way in known.beyond(case)):
            ends = f"{digits(1 / wide)}-{digits(wide)}x the expected time"
            words.append(f"{phase} extrapolates {ways}: range widened to {ends}")
        alike = [point.is_disturbed for point in learned.points if point.case.phase == phase]
        above = (shown.ABOVE,) if fastest < 1 / TOO_FAST else ()
        doubts += [
            (shown.EXTRAPOLATED,) if words else (),
            shown.of_runs(len(alike), sum(alike), 0),
            above,
        ]
    row = Prediction(
        model, n_prompt, n_gen, **figures, beyond=tuple(words), doubts=shown.all_of(doubts)
    )
    if users == 1:
        return row
    predicted = StepPrediction(model, settings, ceilings, learned.fit, learned.n_runs)
    one, many = (predicted.seconds(1, middle, n, [(1, middle)] * (n - 1)) for n in (1, users))
    return _of_users(row, users, one, many, least_s(1, middle, users, [(1, middle)] * (users - 1)))


def _of_users(
    row: Prediction, users: int, one_s: float | None, many_s: float | None, limit_s: float
) -> Prediction:
    """The prediction of one user's request, for several users: their step takes many_s where one's takes one_s."""
    slower = many_s / one_s if one_s and many_s else math.nan
    expected = row.tpot_expected_s
    (low, high) = row.tpot_s
    return dataclasses.replace(
        row,
        users=users,
        tpot_limit_s=limit_s,
        tpot_expected_s=expected and max(limit_s, slower * expected),
        tpot_s=(max(limit_s, slower * low), slower * high),
    )


def _on_this(
    plan: Plan, lengths: Sequence[int], n_gen: int, users: int, folder: Path, is_ranked: bool
) -> list[Prediction]:
    """The rows of this machine. A ranking prefers what was measured of such a request, and may lack the machine."""
    records = list[Record]()
    known = list[Ceilings]()
    if folder.is_dir() and any(folder.glob("*.jsonl")):
        contents = results_files.read([folder])
        records = list(contents.records)
        known = list(dict.fromkeys([*contents.ceilings, *probing.kept(folder)]))
    model = plan.model
    settings = plan.settings
    rows = list[Prediction]()
    missing = list[int]()
    setup = model.name, model.quantization, machine.label(plan.machine, settings)
    same = [
        one
        for one in (records if is_ranked and users == 1 else [])
        if learning.is_plain(one)
        and one.run.tuning is None
        and (one.model.name, one.model.quantization, machine.label(one.machine, one.settings))
        == setup
    ]
    for n in lengths:
        summary = table.summary(
            table.runs([one for one in same if abs(one.run.n_prompt - n) <= NEAR * n])
        )
        if summary.empty:
            missing.append(n)
            continue
        best = summary.loc[summary.repeats.idxmax()].to_dict()
        figures = [
            table.shown_in(best, name, scale)
            for name, scale in (("ttft_s", 1.0), ("tpot_ms", 1e-3))
        ]
        ttft, tpot = ((one.low or one.value, one.high or one.value) for one in figures)
        row = Prediction(
            model, n, n_gen, None, ttft, math.nan, tpot, doubts=best["doubts"], is_measured=True
        )
        rows.append(with_memory(row, settings, None))
    if not missing:
        return rows
    try:
        ceilings = probing.need(known, probing.place_of(plan.machine, model, settings), HERE)
        learned = learning.learn(records, ceilings, learning.offload_of(model, settings))
        predicted = [here(model, settings, ceilings, learned, n, n_gen, users) for n in missing]
    except LabError:
        if is_ranked:  # the table says how to get them
            return rows
        raise
    basis = " ".join([basis_here(learned), *probing.doubt_words(ceilings)])
    available = memory_for(plan)
    return rows + [
        with_memory(dataclasses.replace(row, basis=basis), settings, available) for row in predicted
    ]


def basis_here(learned: Learned) -> str:
    """The basis of a prediction for this machine, in sentences."""
    fit = learned.fit
    sentence = (
        f"Expected times are fitted to {plural(learned.n_runs, 'run')} of {', '.join(learned.models)} on this machine "
        f"({len(learned.points)} points: medians by length and phase): {digits(fit.prefill_factor)}x the kernels' best "
        f"time in prefill, {digits(fit.decode_factor)}x in decode, plus {1e6 * fit.per_layer_step_s:.3g} us per layer "
        f"and step, plus {1e12 * fit.per_layer_value_s:.3g} ps per layer, token and value, corrected by the mean "
        f"deviation of each setup. Ranges are {learning.DEVIATIONS:g} standard deviations of {len(learned.held_out)} "
        "held-out predictions, supplemented by the lab's benchmark (tests/bench/held_out.py) where these are few."
    )
    if n_disturbed := sum(point.is_disturbed for point in learned.points):
        sentence += (
            f" {n_disturbed} of the points come from disturbed runs, which widens all ranges."
        )
    fastest = min(learned.fastest(PREFILL), learned.fastest(DECODE))
    if fastest < 1 / TOO_FAST:
        sentence += (
            f" Some of these runs took only {digits(fastest)}x their kernels' best time: ceilings are too low, so "
            "expected times are too long, and the ranges start lower by this factor. Run: lab ceilings --again"
        )
    return sentence


def chance(row: Prediction, slo: Slo) -> float:
    """The probability that a row keeps all limits, taking its ranges for those of logarithms of normal errors."""

    def below(span: Span, limit: float) -> float:
        low, high = span
        if not low < high:
            return math.nan if low != low else float(low <= limit)
        middle = math.log(low * high) / 2
        half = math.log(high / low) / 2
        return NormalDist(middle, half / NormalDist().inv_cdf((1 + WITHIN) / 2)).cdf(
            math.log(limit)
        )

    limits = ((row.prefill_s, slo.ttft_s), (row.tpot_s, slo.tpot_s), (row.e2e_s, slo.e2e_s))
    return (
        0.0
        if row.misfit
        else min((below(span, limit) for span, limit in limits if limit is not None), default=1.0)
    )


def memory_bytes(model: Model, settings: Settings, n_ctx: int, users: int = 1) -> int:
    """About how many bytes a context of n_ctx tokens for each user needs, weights included."""
    shared = dataclasses.replace(settings, n_ctx=users * memory.padded(n_ctx), n_seq_max=users)
    return memory.of_context(model, shared).total_bytes


def with_memory(row: Prediction, settings: Settings, available: float | None) -> Prediction:
    """The prediction with the bytes it needs and has; if they do not suffice, `misfit` names what would fit."""
    n_ctx = row.n_prompt + row.n_gen
    model = row.model
    need = memory_bytes(model, settings, n_ctx, row.users)
    row = dataclasses.replace(row, needed_bytes=need, memory_bytes=available)
    if available is None or need <= available:
        return row
    over = f"needs {need / 1e9:,.1f} GB of {available / 1e9:,.1f}"
    if row.users > 1:
        return dataclasses.replace(row, misfit=f"{over} for {row.users} users")
    entry = catalog.entries().get(model.name)
    longest = memory.longest(model, round(available))
    smaller = synthetic.by_quantization(entry) if entry else {}
    sizes = {name: memory_bytes(other, settings, n_ctx) for name, other in smaller.items()}
    fitting = [name for name, size in sizes.items() if size <= available]
    what = f"up to {longest:,} tokens" if longest else "a smaller model"
    what = max(fitting, key=lambda name: sizes[name]) if fitting else what
    return dataclasses.replace(row, misfit=f"{over}: {what} would fit")


# What is shown


def sections(
    rows: Sequence[Prediction], slo: Slo | None, is_ranking: bool, shows_all: bool
) -> list[Section]:
    """A ranking for each prompt length, or an explanation of each model on each device."""
    if is_ranking:
        by_length = grouped(rows, lambda row: row.n_prompt).values()
        return [ranking(own, slo, None if shows_all else MOST_ROWS) for own in by_length]
    return [
        explanation(own, slo) for own in grouped(rows, lambda row: (row.name, row.label)).values()
    ]


def _figure(row: Prediction, *values: float | None, doubts: Sequence[str] = ()) -> str:
    """One value or both ends of a range, with a mark of doubt."""
    known = [digits(value) for value in values if value is not None and value == value]
    return (
        UNKNOWN if row.misfit or not known else "-".join(dict.fromkeys(known)) + shown.mark(doubts)
    )


def _times(row: Prediction) -> str:
    return " to ".join(dict.fromkeys(map(wording.seconds, row.e2e_s)))


def _keeps(row: Prediction) -> str:
    if row.chance is None or row.chance != row.chance:
        return UNKNOWN
    return (
        "yes"
        if row.chance >= CERTAIN
        else "no"
        if row.chance <= 1 - CERTAIN
        else f"{100 * row.chance:.0f} %"
    )


def ranking(rows: Sequence[Prediction], slo: Slo | None = None, most: int | None = None) -> Section:
    """The fastest `most` rows and this machine in a table, and what is not shown."""
    models = list(dict.fromkeys(row.label for row in rows))
    first = rows[0]
    is_shown = [most is None or i < most or row.name == HERE for i, row in enumerate(rows)]
    rest = [row for row, is_in in zip(rows, is_shown, strict=True) if not is_in]

    def note(row: Prediction) -> str:
        if row.misfit or row.is_measured:
            return row.misfit or "measured"
        return "memory size unknown" if row.name != HERE and row.memory_bytes is None else ""

    columns: Columns = (
        ("name", lambda row: row.name),
        ("model", lambda row: row.label if len(models) > 1 else UNKNOWN),
        ("TTFT\ns", lambda row: _figure(row, *row.prefill_s, doubts=row.doubts)),
        ("decode\ntokens/s", lambda row: _figure(row, *row.tps, doubts=row.doubts)),
        ("E2E\ns", lambda row: _figure(row, *row.e2e_s, doubts=row.doubts)),
        ("memory\nGB", lambda row: digits(row.needed_bytes / 1e9)),
        ("keeps\nlimits", _keeps),
        ("note", note),
    )
    known = [row for row in rows if row.is_known]
    sentences = []
    answer = "No device here can run this."
    if known:
        name = f"{known[0].name} with {known[0].label}" if len(models) > 1 else known[0].name
        answer = f"The fastest is {name}: {_times(known[0])} for the whole request."
    if slo is not None:
        n = sum((row.chance or 0.0) >= CERTAIN for row in known)
        sentences.append(
            f"{n} of {len(rows)} keep {slo.label} with at least {100 * CERTAIN:.0f} % certainty."
        )
    if rest:
        n_small = sum(bool(row.misfit) for row in rest)
        n_known = sum(row.is_known for row in rest)
        counts = {"slower": n_known, "with too little memory": n_small}
        counts["without a known peak, so prefill is not predicted"] = len(rest) - n_small - n_known
        words = ", ".join(f"{n} {what}" for what, n in counts.items() if n)
        sentences.append(f"Not shown: {words}. To see them: --all")
    if first.users > 1:
        sentences.append(
            "TTFT is that of one prompt at a time; tokens/s is the rate of each user. It assumes that a step of "
            "several users reaches the same share of the datasheet's figures as that of one."
        )
    if not all(row.is_measured for row in rows):
        sentences.append(datasheet.basis())
    return Section(
        models[0] if len(models) == 1 else "Several models",
        f"{first.n_prompt:,} tokens in, {first.n_gen:,} out{_at_once(first)}",
        words=[answer],
        **tabled(columns, [row for row, is_in in zip(rows, is_shown, strict=True) if is_in]),
        sentences=sentences,
    )


def _at_once(row: Prediction) -> str:
    return f", {row.users} users at once" if row.users > 1 else ""


def explanation(rows: Sequence[Prediction], slo: Slo | None = None) -> Section:
    """For each prompt length the limits, the expected ranges and the memory; then their basis."""
    first = rows[0]
    longest = rows[-1]
    columns: Columns = (
        ("prompt\ntokens", lambda row: f"{row.n_prompt:,}"),
        ("prefill s\nexpected", lambda row: _figure(row, *row.prefill_s)),
        ("TPOT ms\nexpected", lambda row: _figure(row, 1e3 * row.tpot_s[0], 1e3 * row.tpot_s[1])),
        ("tokens/s\nin decode", lambda row: _figure(row, *row.tps)),
        ("E2E s\nexpected", lambda row: _figure(row, *row.e2e_s)),
        ("prefill s\nlimit", lambda row: _figure(row, row.prefill_limit_s)),
        ("TPOT ms\nlimit", lambda row: _figure(row, 1e3 * row.tpot_limit_s)),
        ("memory\nGB", lambda row: digits(row.needed_bytes / 1e9)),
        ("keeps\nlimits", _keeps),
        (
            "note",
            lambda row: f"does not fit: {row.misfit}" if row.misfit else ", ".join(row.doubts),
        ),
    )
    request = f"A request of {longest.n_prompt:,} tokens with {longest.n_gen:,} back"
    words = [f"{request} does not fit: {longest.misfit}."] if longest.misfit else []
    if longest.is_known:
        share = longest.prefill_s[0] * longest.prefill_s[1] / (longest.e2e_s[0] * longest.e2e_s[1])
        words = [
            f"{request} takes {_times(longest)}: about {100 * math.sqrt(share):.0f} % of it is prefill."
        ]
    limit = "the ceilings of its kernels" if first.name == HERE else "the datasheet's peak"
    return Section(
        f"{first.model.name} {first.model.quantization or ''} on {first.about}{_at_once(first)}",
        f"columns named limit: the least possible time, at {limit}",
        answer=words[0] if words else "",
        **tabled(columns, rows),
        sentences=[
            *(f"{row.n_prompt:,} tokens: {sentence}." for row in rows for sentence in row.beyond),
            *([f"keeps limits: the probability of {slo.label}."] if slo else []),
            first.basis,
        ],
    )


def plot_requests(rows: Sequence[Prediction], ax: Axes | None = None) -> Axes:
    """Stacked bars of prefill and decode over devices, fastest first, with the range of the whole.

    lab.plot_requests(lab.predict("8000", 300, "llama-3.1-8b", "geforce")[:5])
    """
    ax = ax or canvas.new_axes()
    figure = canvas.figure_of(ax)
    first = rows[0]
    rows = rows[::-1]
    several = len({row.label for row in rows}) > 1
    names = [f"{row.name}, {row.label}" if several else row.name for row in rows]
    prefill = [math.sqrt(row.prefill_s[0] * row.prefill_s[1]) for row in rows]
    decode = [(row.n_gen - 1) * math.sqrt(row.tpot_s[0] * row.tpot_s[1]) for row in rows]
    ax.barh(names, prefill, color=COLOURS[0], label="prefill")
    ax.barh(
        names, decode, left=prefill, color=COLOURS[1], hatch="//", edgecolor="white", label="decode"
    )
    for name, row in zip(names, rows, strict=True):
        ax.plot(row.e2e_s, [name, name], ls="-" if row.is_measured else "--", color=INK, lw=1.2)
    ax.plot([], [], color=INK, ls="--", label="90 % range, predicted")
    if any(row.is_measured for row in rows):
        ax.plot([], [], color=INK, ls="-", label="range, measured")
    ax.set_xlabel("time of the request (s)")
    figure.set_figheight(max(figure.get_figheight(), 1.6 + 0.28 * len(rows)))
    canvas.finish([ax], f"{first.label}: {first.n_prompt:,} tokens in, {first.n_gen:,} out")
    return ax
