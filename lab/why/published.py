"""What other people published: models/published.csv, and the least time that physics allows for each of its rows."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.core import cost
from lab.core.record import DECODE, Model
from lab.errors import LabError
from lab.models import catalog, shapes
from lab.models.catalog import data_file
from lab.why import datasheet
from lab.why.datasheet import Device

USUAL_LENGTH = 1024
"""Tokens of a prompt whose length is not published."""

UBATCH = 512


@dataclass(frozen=True)
class Row:
    """A published measurement. `gpu_share`: the part of the chip's GPU cores that this variant has.

    `marks` are the rules of tests/bench/clean_published.py that the row breaks; without marks it is clean.
    """

    source: str
    device: str
    gpu_share: float
    backend: str
    model: str
    quantization: str
    phase: str
    n_prompt: int | None
    flash_attn: bool | None
    tps: float
    date: str
    marks: tuple[str, ...] = ()
    url: str = ""

    @property
    def seconds(self) -> float:
        """Of a token in decode, of the whole prompt in prefill."""
        return (1 if self.phase == DECODE else self.n_prompt or USUAL_LENGTH) / self.tps


@cache
def rows() -> tuple[Row, ...]:
    """The rows of models/published.csv, those with marks too."""
    return read(data_file("published.csv"))


def read(path: Path) -> tuple[Row, ...]:
    """The rows of such a file. LabError where it is none."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return tuple(row_of(line) for line in csv.DictReader(file))
    except (OSError, KeyError, ValueError, AttributeError, csv.Error) as problem:
        what = f"{path} is not a table of published measurements: {problem}."
        raise LabError(what, "Its columns must be those of models/published.csv.") from None


def row_of(line: dict[str, str]) -> Row:
    return Row(
        line["source"],
        line["device"],
        float(line["gpu_share"] or 1),
        line["backend"],
        line["model"],
        line["quantization"],
        line["phase"],
        int(line["n_prompt"]) if line["n_prompt"] else None,
        {"1": True, "0": False}.get(line["flash_attn"]),
        float(line["tps"]),
        line["collected"],
        tuple(line["marks"].split()),
        line["url"],
    )


@dataclass(frozen=True)
class Work:
    """What a token (decode) or a prompt (prefill) takes: bytes read, FLOPs, steps' layers, and activations' bytes."""

    n_bytes: float
    flops: float
    layers: float
    activations: float

    def least_s(self, device: Device, gpu_share: float = 1.0) -> float | None:
        """The limit by bandwidth and peak; None without a peak where that counts."""
        peak = device.peak_tflops
        if self.flops and not peak:
            return None
        compute_s = self.flops / ((peak or 1) * gpu_share * 1e12)
        return max(self.n_bytes / device.gbps / 1e9, compute_s)


@cache
def work(name: str, quantization: str, phase: str, n_prompt: int) -> Work | None:
    """The work on a model of the catalog; None where it, or its quantization, is unknown."""
    try:
        model = shapes.model_of(catalog.find(name), quantization)
    except LabError:
        return None
    return work_of(model, phase, n_prompt)


def work_of(model: Model, phase: str, n_prompt: int, n_ubatch: int = UBATCH) -> Work | None:
    """The work of a token after `n_prompt` others, or of a prompt of that length."""
    layers = model.n_layer or 0
    if phase == DECODE:
        token = cost.step(model, 1, n_prompt, 1, "f16", "f16")
        return Work(token.n_bytes, 0.0, layers, 0.0) if token else None
    step = cost.step(model, n_prompt, 0, 1, "f16", "f16")
    n_steps = -(-n_prompt // n_ubatch)
    pairs = (model.n_head or 0) * n_prompt * n_prompt / 2
    return Work(step.weight_bytes * n_steps, step.flops, layers * n_steps, 4 * layers * pairs) if step else None


def backend_of(device: Device) -> str:
    """The backend that llama.cpp is usually built with for a device."""
    if "NVIDIA" in device.about:
        return "CUDA"
    if device.kind in ("radeon", "datacenter"):
        return "ROCm"
    return {"apple": "Metal", "arc": "Vulkan"}.get(device.kind, "Vulkan" if device.fp32 else "CPU")


def marks_of(row: Row) -> tuple[str, ...]:
    """Why a row cannot be used: its device or model is unknown, or it breaks a limit."""
    device = datasheet.called(row.device)
    done = work(row.model, row.quantization, row.phase, row.n_prompt or (0 if row.phase == DECODE else USUAL_LENGTH))
    marks = [] if device else ["unknown-device"]
    if done is None:
        return (*marks, "unknown-model")
    if device is None:
        return tuple(marks)
    model = shapes.model_of(catalog.find(row.model), row.quantization)
    if device.memory_gb and (model.n_bytes or 0) > 0.95 * device.memory_gb * 2**30:
        marks.append("does-not-fit")
    least = done.least_s(device, row.gpu_share)
    if least is None:
        marks.append("no-peak")
    elif row.seconds < least:
        marks.append("above-bandwidth" if row.phase == DECODE else "above-peak")
    return tuple(marks)
