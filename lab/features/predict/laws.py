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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lab.core import cost, memory, shape
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.errors import LabError
from lab.roofline import explanation, probing, step_kernels
from lab.roofline import datasheet, learning
from lab.roofline.learning import Learned
from lab.models import catalog, devices, synthetic
from lab.runner import machine

Numbers = dict[
    str, Any
]  # lists, dicts, texts and finite numbers, as JSON has them; None: not known
Place = tuple[
    Numbers, Settings, Callable[[Model], Numbers]
]  # a device to predict for, and its law for a model

MOST_USERS = 32
MOST_GENERATED = 4096
MOST_PROMPT = 131_072
"""The ends of the scales: users at once, tokens of an answer, tokens of a prompt (and not beyond what was trained)."""

MOST_UBATCH = 16_384
MOST_LAYERS = 10_000
MOST_SIZE = 10_000_000
"""Larger numbers in records are errors: tokens of a step, layers of a model, its other sizes."""

COUNTED = ("type_k", "type_v", "n_ubatch", "n_batch", "flash_attn", "flash_attn_resolved")
"""The settings that the numbers of `shape_of` depend on."""

DIGITS = 9  # significant digits of numbers in a page


def laws(
    records: Sequence[Record], known: Sequence[Ceilings], others: Sequence[Record] = ()
) -> Numbers:
    """Everything that a page needs to predict for the models and setups of plain runs, and for all known devices."""
    records, others = ([one for one in runs if _is_possible(one)] for runs in (records, others))
    plain = [one for one in records if learning.is_plain(one)]
    plain = [
        one
        for one in plain
        if cost.step(one.model, 1, 0, 1, one.settings.type_k, one.settings.type_v)
    ]
    models: dict[str, Model] = {}
    for model in {(one.model.name, one.model.quantization): one.model for one in plain}.values():
        entry = catalog.entries().get(model.name)
        for one in (model, *(synthetic.by_quantization(entry).values() if entry else ())):
            if cost.step(one, 1, 0, 1) is not None:
                models.setdefault(f"{one.name} {one.quantization or ''}".strip(), one)
    if not models:
        raise LabError(
            "There is nothing to explore: no plain run of a known model.",
            "Measure one: lab measure",
        )
    longest = max(
        *(one.run.n_prompt for one in plain),
        *(model.n_ctx_train or 4096 for model in models.values()),
    )
    most = {"prompt": min(longest, MOST_PROMPT), "gen": MOST_GENERATED, "users": MOST_USERS}
    shapes: dict[str, Numbers] = {}
    places = [*_measured(plain, known, [*records, *others]), *_devices(plain[0].settings)]
    table = []
    for _, settings, law_of in places:
        row = []
        for label, model in models.items():
            key = f"{label} {[getattr(settings, name) for name in COUNTED]}"
            if key not in shapes:
                shapes[key] = shape_of(model, settings, most["prompt"] + most["gen"])
            try:
                law = law_of(model)
                json.dumps(law, allow_nan=False)
            except LabError as error:
                law = {"why": f"{error.what} {error.hint}"}
            except (ArithmeticError, ValueError):
                words = "The ceilings or runs of this device hold impossible numbers. Measure again: lab ceilings"
                law = {"why": words}
            row.append({"shape": [*shapes].index(key)} | law)
        table.append(row)
    published = {"sure": datasheet.SURE, "widens": datasheet.WIDENS, "longest": datasheet.LONGEST}
    found: Numbers = _short(
        {
            "models": [*models],
            "devices": [facts for facts, *_ in places],
            "laws": table,
            "shapes": [*shapes.values()],
            "most": most,
            "start": {"prompt": min(1000, most["prompt"]), "gen": 200},
            "near": learning.NEAR,
            "deviations": learning.DEVIATIONS,
            "published": {**published, "perLength": datasheet.PER_LENGTH, "tile": datasheet.TILE},
            "shares": [
                explanation.OVERHEAD_SHARE,
                explanation.ATTENTION_SHARE,
                explanation.KERNEL_FACTOR,
            ],
        }
    )
    return found


def shape_of(model: Model, settings: Settings, n_ctx: int) -> Numbers:
    """FLOPs, bytes and memory of a model: of contexts up to n_ctx tokens, as points between which they are linear.

    Weights are [share of the experts that a token uses (1 for others), bytes read for all tokens of a step, bytes read
    for those with logits]. LabError for a model whose steps have an unknown cost.
    """
    kinds = settings.type_k, settings.type_v
    step = step_kernels.step_cost(model, 1, 0, 1, *kinds)
    work = cost.products(model, 1, 1) or []
    layers = shape.heads(model) or ()
    per_head = memory.bytes_per_head(model, *kinds) or 0.0
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
    inner = zip(
        points, points[1:], points[2:], strict=False
    )  # without those on the line between their neighbours
    bent = [
        b
        for a, b, c in inner
        if any(abs(x + z - 2 * y) > 1 for x, y, z in zip(a, b, c, strict=True))
    ]
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
            {
                "work": 2 * width * h.n_layer * h.n_head,
                "kv": per_head * h.n_layer * h.n_head_kv,
                "window": h.window,
            }
            for h in layers
        ],
        "file": model.n_bytes or 0,
        "context": [points[0], *bent, points[-1]],
    }


def of_place(model: Model, settings: Settings, ceilings: Ceilings, learned: Learned) -> Numbers:
    """The law of `prediction.here`: seconds of kernels, and the fit with its errors and points. LabError without it."""
    if ceilings.others:
        raise LabError(
            "A page does not explore a model on several devices.",
            "Predict single lengths: lab predict",
        )
    best = step_kernels.roof(ceilings)
    n_ubatch = max(1, settings.n_ubatch)

    def weights_s(n_tokens: int, n_outputs: int) -> float:
        kernels = step_kernels.total(model, settings, ceilings, n_tokens, 0, n_outputs)
        return kernels.layers_s + kernels.head_s

    def attention_s(heads: shape.Heads, n_threads: int) -> list[Any]:
        kind = settings.type_k.upper()
        is_flash = settings.flash_attn_resolved != "off"
        points = step_kernels.attention_points(
            ceilings, model, heads, kind, n_ubatch, n_threads, is_flash
        )
        return [[n, sorted(by_position.items())] for n, by_position in sorted(points.items())]

    fit: Numbers = {"step": learned.fit.per_layer_step_s, "value": learned.fit.per_layer_value_s}
    for phase, factor in (
        (PREFILL, learned.fit.prefill_factor),
        (DECODE, learned.fit.decode_factor),
    ):
        known = learned.known[phase]
        case = learning.case_of(phase, known.longest, model, settings)
        fit[phase] = {
            "factor": factor,
            "own": learned.fit.own.get(case.setup, 1.0),
            "variance": (math.log(learned.factor(case)) / learning.DEVIATIONS)
            ** 2,  # at a known length
            "longer": learned.variance(phase, learning.LONGER),
            "shorter": learned.variance(phase, learning.SHORTER),
            "shortest": known.shortest,
            "longest": known.longest,
            "fastest": learned.fastest(phase),
            "beyond": bool(known.beyond(case)),
            "points": [
                [one.case.length, one.seconds]
                for one in learned.points
                if one.case.setup == case.setup
            ],
        }
    both = settings.n_threads, settings.n_threads_batch
    disturbed = [point.is_disturbed for point in learned.points]
    doubts = probing.doubt_words(ceilings)
    if any(disturbed):
        doubts = [
            f"{sum(disturbed)} of the {len(disturbed)} points behind it come from disturbed runs.",
            *doubts,
        ]
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


def _is_possible(record: Record) -> bool:
    """Whether the sizes of a model and of its steps are in the range of real ones: a file may hold anything."""
    model = record.model
    n_ubatch = record.settings.n_ubatch
    sizes = (model.n_embd, model.n_ff, model.n_head, model.n_head_kv, model.head_dim, model.n_vocab)
    is_possible = all(size is None or 0 < size <= MOST_SIZE for size in sizes)
    return is_possible and 0 <= (model.n_layer or 0) <= MOST_LAYERS and 0 < n_ubatch <= MOST_UBATCH


def _measured(
    plain: Sequence[Record], known: Sequence[Ceilings], runs: Sequence[Record]
) -> Iterator[Place]:
    """The setups of plain runs; those that differ in more than the model have names of their own."""
    seen = set[object]()
    names = Counter[str]()
    for one in plain:
        on = probing.place_of_record(one)
        settings = one.settings
        label = machine.label(one.machine, settings)
        key = label, learning.case_of(PREFILL, 1.0, one.model, settings).settings
        if key in seen:
            continue
        seen.add(key)
        name = f"{label}, {settings.n_threads} threads" if None in on.devices else label
        names[name] += 1
        name += f", setup {names[name]}" if names[name] > 1 else ""
        device = probing.device_of(one.machine, on.devices[0])
        size = (
            one.machine.ram_bytes
            if on.devices[0] is None
            else device.memory_bytes
            if device
            else None
        )
        size = (
            size if len(on.devices) == 1 else None
        )  # of several: each has its share, not known here

        def law(model: Model, one: Record = one) -> Numbers:
            ceilings = probing.need(
                known, probing.place_of(one.machine, model, one.settings), "this machine"
            )
            learned = learning.learn(runs, ceilings, learning.offload_of(model, one.settings))
            return of_place(model, one.settings, ceilings, learned)

        yield (
            {"name": name, "group": "Measured in these results", "memory": size, "about": ""},
            settings,
            law,
        )


def _devices(settings: Settings) -> Iterator[Place]:
    """All devices of the datasheets, with the law of `prediction.on_device`; None for a phase that is not predicted."""
    for device in devices.devices().values():

        def law(model: Model, device: devices.Device = device) -> Numbers:
            numbers: Numbers = {"gbps": device.gbps, "peak": device.peak_tflops}
            for phase, found in datasheet.learned().items():
                case = datasheet.case_for(model, settings, device, phase, 1)
                of_case = {
                    "parts": found.coefficients(case),
                    "ends": found.ends(case),
                    "unknown": found.unknown(case),
                }
                numbers[phase] = None if case.least_s is None else of_case
            return numbers

        peak = f", {device.peak_tflops:g} TFLOP/s" if device.peak_tflops else ""
        group = f"Predicted from datasheets: {device.kind}"
        about = f"{device.about}: {device.gbps:g} GB/s{peak}"
        yield (
            {"name": device.name, "group": group, "memory": device.memory_bytes, "about": about},
            settings,
            law,
        )


def _short(value: Any) -> Any:
    """The same with numbers of DIGITS significant digits."""
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
