"""Requests on many devices, and on this machine: predicted, or as they were measured here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from lab.core.arguments import Numbers, StrPath, Texts
from lab.core.byte_sizes import parse_size
from lab.core.keywords import CommonSettings
from lab.core.record import Record
from lab.errors import LabError
from lab.features.predict import wording
from lab.features.predict.slo import Slo, chance
from lab.models import candidates, catalog, described, devices, obtain
from lab.models.asked_devices import HERE, device_called, names_in, names_of_devices
from lab.models.devices import DeviceSheet
from lab.roofline import conditioning, learning, prediction
from lab.roofline.paged_prediction import limited_memory, with_limit
from lab.roofline.prediction import PhaseTime, Prediction, PredictionEvidence
from lab.runner import machine
from lab.runner.cases import Plan
from lab.runner.plan import parse_lengths
from lab.show import summaries, table

LEAST_GBPS = 1
MOST_GBPS = 100_000
NEAR = 0.05
"""Runs whose prompt differs by at most this share of the length count as the same request."""


class PredictSettings(CommonSettings, total=False):
    prompt: Texts | None
    mmap: bool | None


def predict(
    prompt_len: Numbers = "1000",
    gen: int = 200,
    model: Texts = catalog.DEFAULT,
    device: Texts | None = None,
    *,
    sequences: int = 1,
    slo: Slo | None = None,
    ceilings: StrPath = "results",
    measured: Sequence[str] = (),
    gbps: float | None = None,
    backend: str | None = None,
    memory: str | None = None,
    watch: obtain.ShowTransfer = obtain.silently,
    **settings: Unpack[PredictSettings],
) -> list[Prediction]:
    """Predicts the times of requests on devices: for each prompt length the fastest first.

        lab.predict("1000", 200, "llama-3.2-3b", device="rtx-4090")[0].tpot_s
        lab.predict("8000", 300, "llama-3.1-8b:Q4_K_M")[:5]  # the fastest devices

    Without `device` it ranks all devices that the lab knows, and this machine: by runs of such
    a request in the folder `ceilings`, otherwise by its ceilings and runs there. `device` names
    some devices or kinds, or "here", or describes one: "gbps=51.2 cores=8 avx2", "m5-max:cpu".
    `model` is any tool's name; its file is not needed. Several devices and models with commas, or
    in a list. The answers of `sequences` users are decoded together. `measured` are rates of your
    own on the device, such as "llama-3.1-8b:Q4_0=12.4": they narrow its ranges. A `device` that
    ends with .toml is a file of the lessons, which has its words and rates. `gbps` is its
    memory bandwidth, where it differs from the datasheet, `backend` that of llama.cpp. `memory`
    limits that of this machine, such as "8GB": the model may then not fit. `tpot_s` is a range:
    (low, high). LabError for an unknown name, and if "here" lacks ceilings or runs.
    """
    lengths = parse_lengths(prompt_len)
    prediction.check(max(lengths), gen, sequences)
    names = names_of_devices(device or f"all,{HERE}")
    n_bytes = None if memory is None else limit_of(memory, names)
    rates = [conditioning.parse_rate(text) for text in measured]
    if rates or gbps is not None:
        need_one_device(names, gbps)
    rows = list[Prediction]()
    for spec in names_of_models(model):
        plan = prediction.plan_for(spec, settings, watch)
        for listed in devices_in(names):
            sheet = as_asked(listed, gbps, backend, settings.get("threads"))
            user_rates = [*rates, *conditioning.rates_of_sheet(listed)]
            compared = conditioning.compare(
                user_rates, prediction.model_called, plan.settings, sheet
            )
            on_device = prediction.OnDevice(plan.model, plan.settings, sheet, compared)
            rows += [on_device.request(n, gen, sequences) for n in lengths]
        if HERE in names:
            evidence = prediction.evidence_in(Path(ceilings))
            on_this = prediction.on_this_machine if device else ranked_here
            rows_here = on_this(plan, lengths, gen, sequences, evidence)
            if n_bytes is not None:
                limit = limited_memory(n_bytes, plan, file_of(spec), Path(ceilings))
                rows_here = [with_limit(row, plan.settings, limit) for row in rows_here]
            rows += rows_here
    if slo is not None:
        rows = [dataclasses.replace(row, chance=chance(row, slo)) for row in rows]
    return sorted(rows, key=lambda row: (lengths.index(row.n_prompt), *speed_order(row)))


def limit_of(memory: str, names: Sequence[str]) -> int:
    """The bytes that --memory allows. LabError unless it is asked for this machine alone."""
    if list(names) != [HERE]:
        raise LabError(
            "--memory limits this machine, and other devices are asked for.",
            "Add --device here.",
        )
    return parse_size(memory, "--memory")


def file_of(spec: str) -> Path | None:
    """The file of a SPEC; None if it is not on this machine."""
    file = obtain.locate(catalog.parse(spec, or_shape=True))
    return file.path if file else None


def need_one_device(names: Sequence[str], gbps: float | None) -> None:
    """LabError unless one device of the datasheets is named, and its bandwidth is possible."""
    is_one = len(names) == 1 and names[0] != HERE and not devices.names_of(names[0])
    if not is_one:
        raise LabError(
            "--measured and --gbps describe one device, and several are asked for.",
            "Name it: --device epyc-9654",
        )
    if gbps is not None and not LEAST_GBPS <= gbps <= MOST_GBPS:
        raise LabError(
            f"--gbps {gbps:g} is not possible.",
            f"Give its memory bandwidth in GB/s, from {LEAST_GBPS} to {MOST_GBPS:,}.",
        )


def names_of_models(text: Texts) -> list[str]:
    """The names in a list with commas; a quantization alone belongs to the model before it.

    "llama-3.1-8b:Q4_K_M,Q5_K_M" are two.
    """
    names = list[str]()
    for name in names_in(text):
        if names and candidates.is_tag(name):
            model, _ = candidates.without_tag(names[-1])
            name = f"{model}:{name}"
        names.append(name)
    return names


def as_asked(
    device: DeviceSheet, gbps: float | None, backend: str | None, threads: int | None
) -> DeviceSheet:
    """A device with another bandwidth, backend or number of threads, where these are asked for."""
    if gbps is not None:
        device = dataclasses.replace(device, gbps=gbps)
    if backend is not None:
        device = described.on_backend(device, backend)
    if threads and device.simd and device.cores:
        device = dataclasses.replace(device, cores=min(device.cores, threads))
    return device


def devices_in(names: Sequence[str]) -> list[DeviceSheet]:
    """The devices of the datasheets that names and kinds stand for, each once."""
    by_name: dict[str, DeviceSheet] = {}
    for name in names:
        if name == HERE:
            continue
        for member in devices.names_of(name) or [name]:
            device = device_called(member)
            by_name[device.name] = device
    return list(by_name.values())


def ranks(device: str | None) -> bool:
    """Whether to rank devices: without any, or with a kind of them."""
    if device is None:
        return True
    names = names_of_devices(device)
    return any(devices.names_of(name) for name in names if name != HERE)


def speed_order(row: Prediction) -> tuple[bool, float, float]:
    """What fits comes first, the fastest at the top; unknown times come last, by their decode."""
    request_s = row.e2e.shown_s
    if math.isnan(request_s):
        request_s = math.inf
    return row.shortage is not None, request_s, row.tpot_s[0] * row.tpot_s[1]


def ranked_here(
    plan: Plan, lengths: Sequence[int], n_gen: int, users: int, evidence: PredictionEvidence
) -> list[Prediction]:
    """This machine's rows of a ranking: measured where there are such runs, else predicted.

    Without ceilings there is no predicted row, and the table says how to get one.
    """
    rows = list[Prediction]()
    missing = list[int]()
    for n_prompt in lengths:
        runs = same_requests(evidence.records, plan, n_prompt) if users == 1 else []
        if runs:
            rows.append(measured_row(runs, plan, n_prompt, n_gen))
        else:
            missing.append(n_prompt)
    if missing:
        try:
            rows += prediction.on_this_machine(plan, missing, n_gen, users, evidence)
        except LabError:
            return rows
    return rows


def missing_here(spec: str, ceilings: str | Path, settings: dict[str, object]) -> str:
    """Why this machine is not in a ranking of a model, and the commands that change it."""
    plan = prediction.plan_for(spec, settings)
    try:
        prediction.on_this_machine(plan, [1000], 2, 1, prediction.evidence_in(Path(ceilings)))
    except LabError as problem:
        return wording.missing_here(plan.model, problem.what)
    return wording.missing_here(plan.model, "")


def same_requests(records: Sequence[Record], plan: Plan, n_prompt: int) -> list[Record]:
    """The plain runs of this setup with about this number of tokens in the prompt."""
    model = plan.model
    setup = model.name, model.quantization, machine.label(plan.machine, plan.settings)
    same = []
    for record in records:
        label = machine.label(record.machine, record.settings)
        is_near = abs(record.run.n_prompt - n_prompt) <= NEAR * n_prompt
        is_plain = learning.is_plain(record) and not record.run.is_apart
        if (
            is_near
            and is_plain
            and (record.model.name, record.model.quantization, label) == setup
        ):
            same.append(record)
    return same


def measured_row(runs: Sequence[Record], plan: Plan, n_prompt: int, n_gen: int) -> Prediction:
    """A request as it was measured, from the setting with most repeats."""
    summary = summaries.summary(table.runs(runs))
    best = summary.loc[summary.repeats.idxmax()].to_dict()
    row = Prediction(
        plan.model,
        n_prompt,
        n_gen,
        measured_time(best, "ttft_s", 1.0),
        measured_time(best, "tpot_ms", 1e-3),
        doubts=best["doubts"],
        is_measured=True,
    )
    return prediction.with_memory(row, plan.settings, None, runs[0].machine.system_info)


def measured_time(summary: dict[str, object], figure: str, scale: float) -> PhaseTime:
    """A figure with its interval; if it was measured once, the interval is the figure."""
    shown = summaries.shown_in(summary, figure, scale)
    ends = (shown.low or shown.value, shown.high or shown.value)
    return PhaseTime(None, shown.value, ends)
