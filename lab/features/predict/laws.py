"""Predictions as numbers: what a page needs to predict any request as `lab predict` does, without Python.

A prediction is a sum over steps. The time of a step's weights depends only on its number of tokens: a table has them
all. Attention depends on the positions too: its probed points are kept, and interpolated as step_kernels.py does. The
other numbers are the coefficients of the fit (learning.py) or of the published rates (datasheet.py), the errors, and
the FLOPs and bytes of a model (lab/core/cost.py). lab/show/explore.js computes with them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.core import cost, memory, shape
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.errors import LabError
from lab.features.limits import explanation, probing, step_kernels
from lab.features.predict import datasheet, learning
from lab.features.predict.learning import Learned
from lab.models import catalog, synthetic
from lab.runner import machine

Numbers = dict[str, Any]  # lists, dicts, texts and finite numbers, as JSON has them; None: not known
MOST_USERS, MOST_GENERATED, MOST_PROMPT = 32, 4096, 131_072
"""The ends of the scales: users at once, tokens of an answer, tokens of a prompt (and not beyond what was trained)."""

MOST_UBATCH, MOST_LAYERS, MOST_SIZE = 16_384, 10_000, 10_000_000
"""Larger numbers in records are errors: tokens of a step, layers of a model, its other sizes."""

MEASURED, PREDICTED = "Measured in these results", "Predicted from datasheets"
DIGITS = 9
"""Significant digits of numbers in a page."""


@dataclass(frozen=True)
class Place:
    """A device to predict for: its law for a model, its memory in bytes if known, and what it is."""

    name: str
    group: str
    memory_bytes: float | None
    settings: Settings
    law: Callable[[Model], Numbers]
    about: str = ""


def laws(records: Sequence[Record], known: Sequence[Ceilings], others: Sequence[Record] = ()) -> Numbers:
    """Everything that a page needs to predict for the models and setups of plain runs, and for all known devices.

    `others` are more runs that predictions are fitted to. LabError if no model of the records can be predicted.
    """
    records, others = ([one for one in runs if _is_possible(one)] for runs in (records, others))
    plain = [one for one in records if one.run.is_timed and one.run.lever is None and one.run.totals is None]
    plain = [one for one in plain if cost.step(one.model, 1, 0, 1, one.settings.type_k, one.settings.type_v)]
    models = _models([*{(one.model.name, one.model.quantization): one.model for one in plain}.values()])
    if not models:
        raise LabError("There is nothing to explore: no plain run of a known model.", "Measure one: lab measure")
    places = [*_measured(plain, known, [*records, *others]), *_devices(plain[0].settings)]
    shapes_by_key: dict[str, Numbers] = {}
    longest = max(*(one.run.n_prompt for one in plain), *(model.n_ctx_train or 4096 for model in models.values()))
    most = {"prompt": min(longest, MOST_PROMPT), "gen": MOST_GENERATED, "users": MOST_USERS}
    table = []
    for place in places:
        row = []
        for label, model in models.items():
            key = f"{label} {[getattr(place.settings, name) for name in COUNTED]}"
            if key not in shapes_by_key:
                shapes_by_key[key] = shape_of(model, place.settings, most["prompt"] + most["gen"])
            try:
                law = place.law(model)
                json.dumps(law, allow_nan=False)
            except LabError as error:
                law = {"why": f"{error.what} {error.hint}"}
            except (ArithmeticError, ValueError):
                words = "The ceilings or runs of this device hold impossible numbers. Measure again: lab ceilings"
                law = {"why": words}
            row.append({"shape": [*shapes_by_key].index(key)} | law)
        table.append(row)
    found: Numbers = _short(
        {
            "models": [*models],
            "devices": [
                {"name": one.name, "group": one.group, "memory": one.memory_bytes, "about": one.about} for one in places
            ],
            "laws": table,
            "shapes": [*shapes_by_key.values()],
            "most": most,
            "start": {"prompt": min(1000, most["prompt"]), "gen": 200},
            "near": learning.NEAR,
            "deviations": learning.DEVIATIONS,
            "published": {
                **{"sure": datasheet.SURE, "widens": datasheet.WIDENS, "longest": datasheet.LONGEST},
                **{"perLength": datasheet.PER_LENGTH, "tile": datasheet.TILE},
            },
            "shares": [explanation.OVERHEAD_SHARE, explanation.ATTENTION_SHARE, explanation.KERNEL_FACTOR],
        }
    )
    return found


COUNTED = ("type_k", "type_v", "n_ubatch", "n_batch", "flash_attn", "flash_attn_resolved")
"""The settings that the numbers of `shape_of` depend on."""


def shape_of(model: Model, settings: Settings, n_ctx: int) -> Numbers:
    """FLOPs, bytes and memory of a model: of contexts up to n_ctx tokens, as points between which they are linear.

    Weights are [share of the experts that a token uses (1 for others), bytes read for all tokens of a step, bytes read
    for those with logits]. LabError for a model whose steps have an unknown cost.
    """
    work, step, layers = cost.products(model, 1, 1), cost.step(model, 1, 0, 1), shape.heads(model)
    per_head = memory.bytes_per_head(model, settings.type_k, settings.type_v)
    if work is None or step is None or layers is None or per_head is None:
        raise step_kernels.not_known(model)
    weights: dict[float, list[float]] = {}
    flops = [0.0, 0.0]
    for product in work:
        only_outputs = product.is_head or product.is_last
        part = 1.0 if product.n_used is None else min(1.0, product.n_used / product.matrix.n_expert)
        weights.setdefault(part, [0.0, 0.0])[only_outputs] += product.n_bytes / part
        flops[only_outputs] += product.flops
    points: list[tuple[float, ...]] = []
    for n in range(0, n_ctx + memory.PADDING, memory.PADDING):
        need = memory.of_context(model, dataclasses.replace(settings, n_ctx=n, n_seq_max=1))
        points.append((n, need.kv_cache_bytes or 0, need.compute_bytes or 0))
    inner = zip(points, points[1:], points[2:], strict=False)  # without those on the line between their neighbours
    bent = [b for a, b, c in inner if any(abs(x + z - 2 * y) > 1 for x, y, z in zip(a, b, c, strict=True))]
    width = (model.head_dim or 0) + (model.head_dim_v or model.head_dim or 0)
    return {
        "layers": model.n_layer,
        "width": (model.n_embd or 0) + (model.n_ff or 0),
        "ubatch": max(1, settings.n_ubatch),
        "rows": min(settings.n_ubatch, settings.n_batch),
        "flops": flops,
        "vectors": step.weight_bytes - sum(product.n_bytes for product in work),
        "weights": [[part, *sizes] for part, sizes in weights.items()],
        "heads": [
            {"work": 2 * width * h.n_layer * h.n_head, "kv": per_head * h.n_layer * h.n_head_kv, "window": h.window}
            for h in layers
        ],
        "file": model.n_bytes or 0,
        "context": [points[0], *bent, points[-1]],
    }


def of_place(model: Model, settings: Settings, ceilings: Ceilings, learned: Learned) -> Numbers:
    """The law of `prediction.here`: seconds of kernels, and the fit with its errors and points.

    LabError if a kernel was not probed, and for layers on a GPU and the CPU.
    """
    if ceilings.others:
        raise LabError("A page does not explore a model on several devices.", "Predict single lengths: lab predict")
    best, n_ubatch = step_kernels.roof(ceilings), max(1, settings.n_ubatch)

    def weights_s(n_tokens: int, n_outputs: int) -> float:
        kernels = step_kernels.total(model, settings, ceilings, n_tokens, 0, n_outputs)
        return kernels.layers_s + kernels.head_s

    def attention_s(heads: shape.Heads, n_threads: int) -> list[Any]:
        kind, is_flash = settings.type_k.upper(), settings.flash_attn_resolved != "off"
        points = step_kernels.attention_points(ceilings, model, heads, kind, n_ubatch, n_threads, is_flash)
        return [[n, sorted(by_position.items())] for n, by_position in sorted(points.items())]

    fit: Numbers = {"step": learned.fit.per_layer_step_s, "value": learned.fit.per_layer_value_s}
    for phase, factor in ((PREFILL, learned.fit.prefill_factor), (DECODE, learned.fit.decode_factor)):
        known = learned.known[phase]
        case = learning.case_of(phase, known.longest, model, settings)
        fit[phase] = {
            "factor": factor,
            "own": learned.fit.own.get(case.setup, 1.0),
            "variance": (math.log(learned.factor(case)) / learning.DEVIATIONS) ** 2,  # at a known length
            "longer": learned.variance(phase, learning.LONGER),
            "shorter": learned.variance(phase, learning.SHORTER),
            "shortest": known.shortest,
            "longest": known.longest,
            "fastest": learned.fastest(phase),
            "beyond": bool(known.beyond(case)),
            "points": [[one.case.length, one.seconds] for one in learned.points if one.case.setup == case.setup],
        }
    both = settings.n_threads, settings.n_threads_batch
    disturbed = [point.is_disturbed for point in learned.points]
    doubts = probing.doubt_words(ceilings)
    if any(disturbed):
        doubts = [f"{sum(disturbed)} of the {len(disturbed)} points behind it come from disturbed runs.", *doubts]
    return {
        "gbps": best.gbps,
        "gflops": best.gflops,
        "doubts": " ".join(doubts),
        "last": [weights_s(n, 1) for n in range(1, n_ubatch + 1)],
        "full": weights_s(n_ubatch, 0),
        "users": [weights_s(n, n) for n in range(1, MOST_USERS + 1)],
        "attention": [[attention_s(heads, n) for n in both] for heads in shape.heads(model) or ()],
        "fit": fit,
    }


def of_datasheet(
    model: Model, settings: Settings, device: datasheet.Device, works: Mapping[str, datasheet.Work | None]
) -> Numbers:
    """The law of `datasheet.times`; a phase that is not predicted is None.

    Of a phase the coefficients of its parts, for both ends of the range the logarithms (of short and of long prompts),
    and what nobody published. `works`: of each phase.
    """
    law: Numbers = {"gbps": device.gbps, "peak": device.peak_tflops}
    for phase in (PREFILL, DECODE):
        case = datasheet.case_for(model, settings, device, phase, 1, works[phase])
        found = datasheet.learned()[phase]
        if case is None or case.work.least_s(device, phase) is None:
            law[phase] = None
            continue
        law[phase] = {
            "parts": found.coefficients(case),
            "ends": found.ends(case),
            "unknown": found.unknown(case),
        }
    return law


def _is_possible(record: Record) -> bool:
    """Whether the sizes of a model and of its steps are in the range of real ones: a file may hold anything."""
    model, n_ubatch = record.model, record.settings.n_ubatch
    sizes = (model.n_embd, model.n_ff, model.n_head, model.n_head_kv, model.head_dim, model.n_vocab)
    is_possible = all(size is None or 0 < size <= MOST_SIZE for size in sizes)
    return is_possible and 0 <= (model.n_layer or 0) <= MOST_LAYERS and 0 < n_ubatch <= MOST_UBATCH


def _models(measured: Sequence[Model]) -> dict[str, Model]:
    """The models of runs by name and quantization, and each in common quantizations; none of unknown cost."""
    found: dict[str, Model] = {}
    for model in measured:
        entry = catalog.entries().get(model.name)
        for one in (model, *(synthetic.by_quantization(entry).values() if entry else ())):
            if cost.step(one, 1, 0, 1) is not None:
                found.setdefault(f"{one.name} {one.quantization or ''}".strip(), one)
    return found


def _measured(plain: Sequence[Record], known: Sequence[Ceilings], runs: Sequence[Record]) -> list[Place]:
    """The setups of plain runs; those that differ in more than the model have names of their own."""
    places: dict[object, Place] = {}
    names: dict[str, int] = {}
    for one in plain:
        on, settings = probing.place_of_record(one), one.settings
        key = machine.label(one.machine, settings), learning.case_of(PREFILL, 1.0, one.model, settings).settings
        if key in places:
            continue
        name = f"{key[0]}, {settings.n_threads} threads" if None in on.devices else key[0]
        names[name] = names.get(name, 0) + 1
        name += f", setup {names[name]}" if names[name] > 1 else ""
        device = probing.device_of(one.machine, on.devices[0])
        size = one.machine.ram_bytes if on.devices[0] is None else device.memory_bytes if device else None
        size = size if len(on.devices) == 1 else None  # of several: each has its share, not known here

        def law(model: Model, one: Record = one) -> Numbers:
            place = probing.place_of(one.machine, model, one.settings)
            ceilings = probing.need(known, place, "this machine")
            learned = learning.learn(runs, ceilings, learning.offload_of(model, one.settings))
            return of_place(model, one.settings, ceilings, learned)

        places[key] = Place(name, MEASURED, size, settings, law)
    return [*places.values()]


def _devices(settings: Settings) -> list[Place]:
    """All devices of the datasheets."""
    works: dict[str, dict[str, datasheet.Work | None]] = {}  # the same on all devices

    def place(device: datasheet.Device) -> Place:
        def law(model: Model) -> Numbers:
            key = f"{model.name} {model.quantization}"
            if key not in works:
                how = 1, settings.n_ubatch, (settings.type_k, settings.type_v)
                works[key] = {phase: datasheet.work_of(model, phase, *how) for phase in (PREFILL, DECODE)}
            return of_datasheet(model, settings, device, works[key])

        peak = f", {device.peak_tflops:g} TFLOP/s" if device.peak_tflops else ""
        about = f"{device.about}: {device.gbps:g} GB/s{peak}"
        return Place(device.name, f"{PREDICTED}: {device.kind}", device.memory_bytes, settings, law, about)

    return [place(device) for device in datasheet.devices().values()]


def _short(value: Any) -> Any:
    """The same with numbers of DIGITS significant digits."""
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
