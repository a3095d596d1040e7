"""The sentences of predictions: what they come from, how they extrapolate, and what would fit."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import shell
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, PREFILL, Model
from lab.models import catalog, named, synthetic
from lab.models.devices import DeviceSheet
from lab.roofline import datasheet, learning
from lab.roofline.conditioning import ComparedRate
from lab.roofline.datasheet import PublishedRate
from lab.roofline.learning import Learned
from lab.roofline.prediction import TOO_FAST, Extrapolation, Prediction, Shortage
from lab.roofline.probes import used_types
from lab.show.text_ceilings import doubt_sentences
from lab.show.wording import digits, percent


def basis(row: Prediction) -> str:
    """What a prediction comes from, in sentences; "" for a measurement."""
    if row.device is not None:
        sentences = [basis_of_device(row.device)]
        sentences += [narrowed_by(own_rate) for own_rate in row.own_rates]
        return " ".join(sentences)
    if row.learned is None or row.ceilings is None:
        return ""
    return " ".join([basis_here(row.learned), *doubt_sentences(row.ceilings)])


def reads_again(row: Prediction) -> str:
    """What the wait for the disk comes from, if the model's file does not fit."""
    limit_gb = (row.memory_bytes or 0) / 1e9
    return (
        f"With {digits(limit_gb)} GB of memory {percent(row.room or 0)} of the file has room: each"
        " token reads from the disk again, for as long as other files took here (lab start"
        " --memory; the same kernel, and the same disk if the file is here). For prefill the wait"
        " is assumed once for each ubatch, which was not measured."
    )


def narrowed_by(compared: ComparedRate) -> str:
    """What a rate of the user's own says about the device."""
    rate = compared.rate
    ends = f"{digits(compared.low_tps)} to {digits(compared.high_tps)}"
    sentence = (
        f"Narrowed by your own rate: {compared.model.name} {compared.model.quantization},"
        f" {rate.phase} {digits(rate.tps)} tokens/s (predicted without it: {ends})."
    )
    if compared.is_inside:
        return sentence
    return (
        f"{sentence} It lies outside of that range: check the device, its bandwidth (--gbps) and"
        " the model's quantization."
    )


def evidence(rows: Sequence[Prediction]) -> list[str]:
    """What others measured on the device, what was assumed, and how to narrow a wide range.

    `rows`: one device with one model, at several lengths.
    """
    row = rows[0]
    sentences = list[str]()
    if row.device is None:
        return sentences
    rates = datasheet.published_rates(row.device, row.model)
    if rates:
        sentences.append(cited(rates))
    assumed = assumptions([row])
    is_wide = any(max(ratio_of(one.tps), ratio_of(one.prefill_s)) > WIDE for one in rows)
    if is_wide and not row.own_rates and not assumed:
        sentences.append(f"The range is wide. {HOW_TO_NARROW}")
    return sentences + assumed


def ratio_of(ends: tuple[float, float]) -> float:
    """How many times as large the high end is."""
    return ends[1] / ends[0]


def assumptions(rows: Sequence[Prediction]) -> list[str]:
    """What was assumed of each device, and what would narrow its range most."""
    sentences = list[str]()
    for device in dict.fromkeys(row.device for row in rows):
        if device is None or not device.assumed:
            continue
        assumed = sorted(device.assumed, key=lambda assumption: -assumption.size)
        texts = [f"{assumption.text} ({assumption.field})" for assumption in assumed]
        sentences.append(
            f"{device.name}: assumed {', '.join(texts)}."
            f" To narrow the range, give {assumed[0].field} or a rate of your own: --measured"
            " MODEL=TOKENS_PER_SECOND"
        )
    return sentences


def approximations(rows: Sequence[Prediction]) -> list[str]:
    """Sentences on models that are approximated, and on types of other quantizations."""
    sentences = list[str]()
    models = {row.label: row.model for row in rows}
    for model in models.values():
        like = synthetic.like_quantization(model.quantization or "")
        if model.source == named.APPROXIMATE:
            size = (model.n_params or 0) / 1e9
            sentences.append(
                f"{model.name} is not in the list (lab models): approximated by a model of"
                f" {digits(size)} billion parameters. Its file would tell: -m hf:OWNER/REPO:"
                f"{model.quantization}"
            )
        elif like and like.name != model.quantization and model.source == "shape":
            sentences.append(
                f"{model.quantization} is predicted as {like.name}, whose types are the most alike."
            )
    return sentences


def basis_of_device(device: DeviceSheet) -> str:
    """The datasheet, and what was learned from others' rates."""
    return f"{datasheet_source(device)} {basis_of_datasheets(device)}"


WIDE = 2.5  # ends of rates that are further apart are wide
MOST_CITED = 3
HOW_TO_NARROW = "A rate of your own narrows it: --measured MODEL=TOKENS_PER_SECOND"


def datasheet_source(device: DeviceSheet) -> str:
    checked = f"checked against {device.checked}" if device.checked else "unchecked"
    if device.tflops:
        return (
            f"From the datasheet: memory {device.gbps:,g} GB/s,"
            f" arithmetic {device.peak_tflops:,g} TFLOP/s. Source: {device.source}, {checked}."
        )
    if device.peak_tflops:
        return (
            f"From the datasheet: memory {device.gbps:,g} GB/s, arithmetic"
            f" {device.peak_tflops:,g} TFLOP/s (from its FP32 rate)."
            f" Source: {device.source}, {checked}."
        )
    return (
        f"From the datasheet: memory {device.gbps:,g} GB/s; without a known peak,"
        f" prefill is not predicted. Source: {device.source}, {checked}."
    )


def basis_of_datasheets(device: DeviceSheet | None = None) -> str:
    """What predictions from datasheets are learned from, and how often they were right."""
    evaluation = datasheet.evaluation_of(device)
    inside = " and ".join(
        f"{evaluation.n_inside[phase]} of {n} {phase} rates"
        for phase, n in evaluation.n_rows.items()
    )
    return (
        "Expected: slower than the limit, as real devices are. By how much was learned from"
        " published rates (models/published.csv). Test of the method, with rates of publishers that"
        f" were kept aside ({evaluation.kind}): {inside} fell inside."
    )


def cited(rates: Sequence[PublishedRate]) -> str:
    """A sentence with what others measured; rates of one source and length as their range."""
    citations = []
    for (what, source), group in grouped(rates, what_and_source).items():
        figures = sorted({round(rate.tps, 1) for rate in group})
        ends = dict.fromkeys([figures[0], figures[-1]])
        figures_text = " to ".join(f"{tps:,g}" for tps in ends)
        citations.append(f"{what} {figures_text} tokens/s ({source})")
    n_more = len(citations) - MOST_CITED
    if n_more > 0:
        citations = [*citations[:MOST_CITED], f"{n_more} more"]
    return f"Others measured: {'; '.join(citations)}."


def what_and_source(rate: PublishedRate) -> tuple[str, str]:
    if rate.phase == DECODE:
        what = rate.phase
    elif rate.n_prompt is None:
        what = f"{rate.phase} of unknown length"
    else:
        what = f"{rate.phase} of {plural(rate.n_prompt, 'token')}"
    backend = f"{rate.backend} in {rate.runtime}"
    return what, ", ".join(filter(None, [rate.source, backend, rate.collected]))


def chosen_quantizations(rows: Sequence[Prediction], specs: Sequence[str]) -> list[str]:
    """Sentences on quantizations that the lab chose, because only a model was named."""
    models = {row.label: row.model for row in rows}
    sentences = list[str]()
    for model in models.values():
        if model.name in specs and model.source == "shape":
            is_of_file = model.quantization == catalog.find(model.name).quantization
            reason = "the usual type of files on the hub"
            if is_of_file:
                reason = "the type of its file (lab models)"
            other = "Q4_0" if model.quantization == "Q8_0" else "Q8_0"
            sentences.append(
                f"{model.name} is predicted in {model.quantization}, {reason}, because none was"
                f" named. Another: -m {model.name}:{other}"
            )
    return sentences


def missing_here(model: Model, reason: str) -> str:
    """Why this machine is not ranked, and the commands that change it."""
    types = ",".join(used_types(model))
    ceilings = shell.lab("ceilings", "-m", catalog.spec_of(model), "--types", types)
    return (
        f"This machine is not in the table. {reason} Its prediction needs the ceilings of this"
        f" model's types, and a run of any model: {ceilings}; lab measure"
    )


def basis_here(learned: Learned) -> str:
    """The basis of a prediction for this machine, in sentences."""
    fit = learned.fit
    sentences = [
        f"Expected times are fitted to {plural(learned.n_runs, 'run')} of"
        f" {', '.join(learned.models)} on this machine ({len(learned.points)} points: medians by"
        f" length and phase): {digits(fit.prefill_factor)}x the kernels' best time in prefill,"
        f" {digits(fit.decode_factor)}x in decode, plus {1e6 * fit.per_layer_step_s:.3g} us per"
        f" layer and step, plus {1e12 * fit.per_layer_value_s:.3g} ps per layer, token and value,"
        " corrected by the mean deviation of each setup.",
        f"Ranges are {learning.DEVIATIONS:g} standard deviations of {len(learned.held_out)}"
        " held-out predictions, supplemented by the lab's benchmark (tests/bench/held_out.py)"
        " where these are few.",
    ]
    n_disturbed = sum(point.is_disturbed for point in learned.points)
    if n_disturbed:
        sentences.append(
            f"{n_disturbed} of the points come from disturbed runs, which widens all ranges."
        )
    fastest = min(learned.fastest(PREFILL), learned.fastest(DECODE))
    if fastest < 1 / TOO_FAST:
        sentences.append(
            f"Some of these runs took only {digits(fastest)}x their kernels' best time: ceilings"
            " are too low, so expected times are too long, and the ranges start lower by this"
            " factor. Run: lab ceilings --again"
        )
    return " ".join(sentences)


def beyond(extrapolations: Sequence[Extrapolation]) -> list[str]:
    """How phases extrapolate, and their ranges; a clause for each of them."""
    clauses = []
    for extrapolation in extrapolations:
        ways = [way(extrapolation, kind) for kind in extrapolation.kinds]
        factor = extrapolation.factor
        ends = f"{digits(1 / factor)}-{digits(factor)}x the expected time"
        clauses.append(
            f"{extrapolation.case.phase} extrapolates {', '.join(ways)}: range widened to {ends}"
        )
    return clauses


def way(extrapolation: Extrapolation, kind: str) -> str:
    """A kind of extrapolation in words."""
    case = extrapolation.case
    coverage = extrapolation.coverage
    tokens = "prompt" if case.phase == PREFILL else "context"
    if kind == learning.LONGER:
        times = f"{case.length / coverage.longest:.3g}x"
        return f"to {times} the longest measured {tokens} ({coverage.longest:,.0f} tokens)"
    if kind == learning.SHORTER:
        return f"below the shortest measured {tokens} ({coverage.shortest:,.0f} tokens)"
    if kind == learning.MODEL:
        return "to another model"
    if kind == learning.QUANTIZATION:
        return f"to another quantization ({case.quantization})"
    return "to other settings (threads, --ubatch, cache types or flash attention)"


def misfit(shortage: Shortage | None) -> str | None:
    """What a request lacks, and what would fit; None if it fits."""
    if shortage is None:
        return None
    need = (
        f"needs {shortage.needed_bytes / 1e9:,.1f} GB of {shortage.available_bytes / 1e9:,.1f}"
    )
    if shortage.users > 1:
        return f"{need} for {shortage.users} users"
    if shortage.quantization:
        return f"{need}: {shortage.quantization} would fit"
    if shortage.longest:
        return f"{need}: up to {plural(shortage.longest, 'token')} would fit"
    return f"{need}: a smaller model would fit"
