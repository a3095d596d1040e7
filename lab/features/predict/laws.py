"""Predictions as numbers: what a page needs to predict as `lab predict` does, without Python.

A prediction is a sum over steps. The time of a step's weights depends only on its number of tokens:
a table has them all. Attention depends on the positions too: its probed points are kept, and
interpolated as kernel_rates.py does. The other numbers are the coefficients of the fit
(learning.py) or of the published rates (datasheet.py), the errors, and the FLOPs and bytes of a
model (lab/core/cost.py). lab/show/explore.js computes with them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lab.core import cost, memory
from lab.core.attention import attention_layers
from lab.core.lists import grouped
from lab.core.memory import CPU
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.errors import LabError
from lab.models import catalog, devices, synthetic
from lab.models.devices import DeviceSheet
from lab.roofline import datasheet, explanation, kernel_rates, learning, probing, step_kernels
from lab.roofline.learning import Learned
from lab.roofline.step_kernels import StepKernels
from lab.runner import machine
from lab.show.text_ceilings import doubt_sentences

Numbers = dict[str, Any]
"""What JSON has: lists, dicts, texts and finite numbers; None: not known."""

MOST_USERS = 32
MOST_GENERATED = 4096
MOST_PROMPT = 131_072
"""The ends of the scales: users at once, tokens of an answer, tokens of a prompt (and not beyond
what was trained)."""

MOST_UBATCH = 16_384
MOST_LAYERS = 10_000
MOST_SIZE = 10_000_000
"""Larger numbers in records are errors: tokens of a step, layers of a model, its other sizes.

A file may hold anything.
"""

SIZES = ("n_embd", "n_ff", "n_head", "n_head_kv", "head_dim", "n_vocab")

COUNTED = ("type_k", "type_v", "n_ubatch", "n_batch", "flash_attn", "flash_attn_resolved")
"""The settings that the numbers of `shape_of` depend on."""

DIGITS = 9  # significant digits of numbers in a page


class PredictedDevice(NamedTuple):
    """A device to predict for: what a page shows of it, and its law for a model."""

    facts: Numbers
    settings: Settings
    law_of: Callable[[Model], Numbers]


def laws(
    records: Sequence[Record],
    ceilings: Sequence[Ceilings],
    more_records: Sequence[Record] = (),
) -> Numbers:
    """What a page needs to predict for the models and setups of plain runs, and for all devices."""
    records = list(filter(has_possible_sizes, records))
    runs = [*records, *filter(has_possible_sizes, more_records)]
    plain = [record for record in records if learning.is_plain(record) and is_counted(record)]
    models = models_of(plain)
    if not models:
        raise LabError(
            "There is nothing to explore: no plain run of a known model.",
            "Measure one: lab measure",
        )
    ends = ends_of_scales(plain, list(models.values()))
    places = [*measured_places(plain, ceilings, runs), *published_places(plain[0].settings)]
    shapes, table = laws_of_places(places, models, ends["prompt"] + ends["gen"])
    numbers: Numbers = short(
        {
            "models": list(models),
            "devices": [place.facts for place in places],
            "laws": table,
            "shapes": shapes,
            "most": ends,
            "start": {"prompt": min(1000, ends["prompt"]), "gen": 200},
            "near": learning.NEAR,
            "deviations": learning.DEVIATIONS,
            "published": {
                "sure": datasheet.SURE,
                "widens": datasheet.WIDENS,
                "longest": datasheet.LONGEST,
                "perLength": datasheet.PER_LENGTH,
                "tile": datasheet.TILE,
            },
            "shares": [
                explanation.OVERHEAD_SHARE,
                explanation.ATTENTION_SHARE,
                explanation.KERNEL_FACTOR,
            ],
        }
    )
    return numbers


def laws_of_places(
    places: Sequence[PredictedDevice], models: Mapping[str, Model], n_ctx: int
) -> tuple[list[Numbers], list[list[Numbers]]]:
    """All shapes, and the law of each device (a row) for each model (a column).

    A law names its shape by the place in the list: devices with equal settings share them.
    """
    shapes: dict[tuple[object, ...], Numbers] = {}
    table = []
    for place in places:
        row = []
        for label, model in models.items():
            key = (label, *(getattr(place.settings, name) for name in COUNTED))
            if key not in shapes:
                shapes[key] = shape_of(model, place.settings, n_ctx)
            row.append({"shape": list(shapes).index(key), **law_or_reason(place, model)})
        table.append(row)
    return list(shapes.values()), table


def has_possible_sizes(record: Record) -> bool:
    """Whether the sizes of a model and of its steps are in the range of real ones."""
    model = record.model
    for name in SIZES:
        size = getattr(model, name)
        if size is not None and not 0 < size <= MOST_SIZE:
            return False
    has_possible_layers = 0 <= (model.n_layer or 0) <= MOST_LAYERS
    return has_possible_layers and 0 < record.settings.n_ubatch <= MOST_UBATCH


def is_counted(record: Record) -> bool:
    """Whether the cost of the model's steps is known."""
    settings = record.settings
    return cost.step(record.model, 1, 0, 1, settings.type_k, settings.type_v) is not None


def models_of(plain: Sequence[Record]) -> dict[str, Model]:
    """The models of runs, and their other quantizations in the catalog, by label."""
    measured = grouped(plain, lambda record: (record.model.name, record.model.quantization))
    models: dict[str, Model] = {}
    for records in measured.values():
        variants = [records[-1].model]
        entry = catalog.entries().get(variants[0].name)
        if entry is not None:
            variants += synthetic.by_quantization(entry).values()
        for variant in variants:
            if cost.step(variant, 1, 0, 1) is not None:
                models.setdefault(learning.model_label(variant), variant)
    return models


def ends_of_scales(plain: Sequence[Record], models: Sequence[Model]) -> dict[str, int]:
    """The largest values of the sliders."""
    measured = max(record.run.n_prompt for record in plain)
    trained = max(model.n_ctx_train or 4096 for model in models)
    prompt = min(max(measured, trained), MOST_PROMPT)
    return {"prompt": prompt, "gen": MOST_GENERATED, "users": MOST_USERS}


def law_or_reason(place: PredictedDevice, model: Model) -> Numbers:
    """The law of a model on a device, or why there is none."""
    try:
        law = place.law_of(model)
        json.dumps(law, allow_nan=False)
    except LabError as error:
        return {"why": f"{error.what} {error.hint}"}
    except (ArithmeticError, ValueError):
        reason = (
            "The ceilings or runs of this device hold impossible numbers."
            " Measure again: lab ceilings"
        )
        return {"why": reason}
    return law


def short(value: object) -> Any:
    """The same with numbers of DIGITS significant digits."""
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [short(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return value


# The cost of steps


def shape_of(model: Model, settings: Settings, n_ctx: int) -> Numbers:
    """FLOPs, bytes and memory of a model, for contexts up to n_ctx tokens.

    Weights are [share of the experts that a token uses (1 for others), bytes read for all tokens of
    a step, bytes read for those with logits]. LabError for a model of unknown cost.
    """
    types = settings.type_k, settings.type_v
    step = step_kernels.known(cost.step(model, 1, 0, 1, *types), model)
    layers: list[object] = []
    for heads in attention_layers(model) or ():
        layers.append(
            {
                "work": 2 * (heads.head_dim + heads.head_dim_v) * heads.n_layer * heads.n_head,
                "kv": heads.n_layer * memory.bytes_per_position(heads, *types),
                "window": heads.window,
            }
        )
    products = cost.products(model, 1, 1) or []
    return {
        "layers": model.n_layer,
        "width": learning.width_of(model),
        "ubatch": max(1, settings.n_ubatch),
        "rows": min(settings.n_ubatch, settings.n_batch),
        "flops": flops_of(products),
        "vectors": step.weight_bytes - sum(product.n_bytes for product in products),
        "weights": weights_of(products),
        "heads": layers,
        "file": model.n_bytes or 0,
        "context": contexts_of(model, settings, n_ctx),
    }


def flops_of(products: Sequence[cost.Product]) -> list[float]:
    """FLOPs of a token, and those of a token with logits beyond that."""
    each_token = 0.0
    each_output = 0.0
    for product in products:
        if is_of_outputs(product):
            each_output += product.flops
        else:
            each_token += product.flops
    return [each_token, each_output]


def weights_of(products: Sequence[cost.Product]) -> list[list[float]]:
    """[share of the experts that a token uses, bytes for all tokens, bytes for outputs]."""
    rows: dict[float, list[float]] = {}
    for product in products:
        share = 1.0
        if product.n_used is not None:
            share = min(1.0, product.n_used / product.matrix.n_expert)
        row = rows.setdefault(share, [share, 0.0, 0.0])
        row[2 if is_of_outputs(product) else 1] += product.n_bytes / share
    return list(rows.values())


def is_of_outputs(product: cost.Product) -> bool:
    """Whether only tokens with logits go through it."""
    return product.is_head or product.is_last


def contexts_of(model: Model, settings: Settings, n_ctx: int) -> list[tuple[float, ...]]:
    """Points of tokens, bytes of cache and of compute buffer, linear between them."""
    points: list[tuple[float, ...]] = []
    for n in range(0, n_ctx + memory.PADDING, memory.PADDING):
        of_length = dataclasses.replace(settings, n_ctx=n, n_seq_max=1)
        need = memory.of_context(model, of_length)
        points.append((n, need.kv_cache_bytes or 0, need.compute_bytes or 0))
    bent = []
    for before, point, after in zip(points[:-2], points[1:-1], points[2:], strict=True):
        if not is_straight(before, point, after):
            bent.append(point)
    return [points[0], *bent, points[-1]]


def is_straight(
    before: Sequence[float], point: Sequence[float], after: Sequence[float]
) -> bool:
    """Whether a point lies on the line between its neighbours, to within a byte."""
    for low, middle, high in zip(before, point, after, strict=True):
        if abs(low + high - 2 * middle) > 1:
            return False
    return True


# Measured setups


def measured_places(
    plain: Sequence[Record], ceilings: Sequence[Ceilings], runs: Sequence[Record]
) -> Iterator[PredictedDevice]:
    """The setups of plain runs; those that differ in more than the model have their own names."""
    seen = set[object]()
    names = Counter[str]()
    for record in plain:
        settings = record.settings
        label = machine.label(record.machine, settings)
        key = label, learning.case_of(PREFILL, 1.0, record.model, settings).settings
        if key in seen:
            continue
        seen.add(key)
        where = probing.place_of_record(record)
        name = label
        if None in where.devices:
            name = f"{label}, {settings.n_threads} threads"
        names[name] += 1
        if names[name] > 1:
            name = f"{name}, setup {names[name]}"
        facts = {
            "name": name,
            "group": "Measured in these results",
            "memory": probing.memory_bytes(record),
            "about": "",
        }
        yield PredictedDevice(facts, settings, law_of_runs(record, ceilings, runs))


def law_of_runs(
    record: Record, ceilings: Sequence[Ceilings], runs: Sequence[Record]
) -> Callable[[Model], Numbers]:
    """The law of a run's setup, for a model."""

    def law(model: Model) -> Numbers:
        settings = record.settings
        place = probing.place_of(record.machine, model, settings)
        best = probing.need(ceilings, place, "these runs")
        learned = learning.learn(runs, best, learning.offload_of(model, settings))
        system_info = record.machine.system_info
        weights_bytes = memory.of_context(model, settings, system_info).weights_bytes
        return {
            **of_place(model, settings, best, learned),
            "resident": weights_bytes,  # the CPU's layouts may take more than the file
        }

    return law


def of_place(
    model: Model, settings: Settings, ceilings: Ceilings, learned: Learned
) -> Numbers:
    """The law of this machine: seconds of kernels, and the fit with its errors and points.

    LabError for a missing ceiling, and for several devices.
    """
    if ceilings.others:
        raise LabError(
            "A page does not explore a model on several devices.",
            "Predict single lengths: lab predict",
        )
    n_ubatch = max(1, settings.n_ubatch)
    best = kernel_rates.roof(ceilings)

    def weights_s(n_tokens: int, n_outputs: int) -> float:
        kernels = StepKernels(model, settings, ceilings).total(n_tokens, 0, n_outputs)
        return kernels.layers_s + kernels.head_s

    return {
        "gbps": best.gbps,
        "gflops": best.gflops,
        "doubts": doubts_of(ceilings, learned),
        "last": [weights_s(n, 1) for n in range(1, n_ubatch + 1)],
        "full": weights_s(n_ubatch, 0),
        "users": [weights_s(n, n) for n in range(1, MOST_USERS + 1)],
        "attention": attention_of(model, settings, ceilings),
        "fit": {
            "step": learned.fit.per_layer_step_s,
            "value": learned.fit.per_layer_value_s,
            PREFILL: fit_of(PREFILL, model, settings, learned),
            DECODE: fit_of(DECODE, model, settings, learned),
        },
    }


def doubts_of(ceilings: Ceilings, learned: Learned) -> str:
    """Sentences on disturbed runs and ceilings; "" for none."""
    sentences = []
    n_points = len(learned.points)
    n_disturbed = len([point for point in learned.points if point.is_disturbed])
    if n_disturbed:
        sentences.append(
            f"{n_disturbed} of the {n_points} points behind it come from disturbed runs."
        )
    sentences += doubt_sentences(ceilings)
    return " ".join(sentences)


def attention_of(model: Model, settings: Settings, ceilings: Ceilings) -> list[object]:
    """Seconds per FLOP of attention, for each kind of layers: in decode, then in prefill.

    Each as [tokens, [position, seconds] ...] in order.
    """
    layers: list[object] = []
    for heads in attention_layers(model) or ():
        by_phase = []
        for n_threads in (settings.n_threads, settings.n_threads_batch):
            points = kernel_rates.attention_points(
                ceilings,
                model,
                heads,
                settings.cache_types[0].upper(),
                n_threads,
                settings.uses_flash,
            )
            by_phase.append([[n, sorted(points[n].items())] for n in sorted(points)])
        layers.append(by_phase)
    return layers


def fit_of(phase: str, model: Model, settings: Settings, learned: Learned) -> Numbers:
    """The fit of a phase, with its errors and the points of this setup."""
    coverage = learned.coverage[phase]
    case = learning.case_of(phase, coverage.longest, model, settings)
    fit = learned.fit
    points = []
    for point in learned.points:
        if point.case.setup == case.setup:
            points.append([point.case.length, point.seconds])
    deviation = math.log(learned.factor(case)) / learning.DEVIATIONS
    return {
        "factor": fit.prefill_factor if phase == PREFILL else fit.decode_factor,
        "correction": fit.correction(case),
        "variance": deviation**2,  # at a measured length
        "longer": learned.variance(phase, learning.LONGER),
        "shorter": learned.variance(phase, learning.SHORTER),
        "shortest": coverage.shortest,
        "longest": coverage.longest,
        "fastest": learned.fastest(phase),
        "beyond": bool(coverage.extrapolations(case)),
        "points": points,
    }


# Devices of the datasheets


def published_places(settings: Settings) -> Iterator[PredictedDevice]:
    """All devices of the datasheets."""
    for device in devices.devices().values():
        about = f"{device.about}: {device.gbps:g} GB/s"
        if device.peak_tflops:
            about = f"{about}, {device.peak_tflops:g} TFLOP/s"
        facts = {
            "name": device.name,
            "group": f"Predicted from datasheets: {device.kind}",
            "memory": device.memory_bytes,
            "about": about,
        }
        yield PredictedDevice(facts, settings, law_of_datasheet(device, settings))


def law_of_datasheet(device: DeviceSheet, settings: Settings) -> Callable[[Model], Numbers]:
    """The law of a device, for a model; None for a phase that is not predicted."""

    def law(model: Model) -> Numbers:
        numbers: Numbers = {
            "gbps": device.gbps,
            "peak": device.peak_tflops,
            "tokenPeak": device.token_tflops,
            "overlap": datasheet.OVERLAP if datasheet.backend_of(device) == CPU else None,
        }
        for phase in (PREFILL, DECODE):
            case = datasheet.case_for(model, settings, device, phase, 1)
            learned = datasheet.learned_for(case)
            numbers[phase] = None
            if case.least_s is not None:
                numbers[phase] = {
                    "parts": learned.coefficients(case),
                    "ends": learned.ends(case),
                    "unknown": learned.unpublished(case),
                }
        return numbers

    return law
