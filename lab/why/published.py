"""What other people published (models/published.csv), and predictions learned from it (models/learned.toml).

A time is `work at the datasheet's rates / share + constant x layers or activations`. The share is a product of factors:
of the backend, the runtime, the architecture, the quantization, the device. tests/bench/learn_published.py fits them; a
factor with few rows is close to 1. The range is what such predictions were off by for devices that were left out.
"""

from __future__ import annotations

import csv
import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.core import cost
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, PREFILL, Model, Settings
from lab.errors import LabError
from lab.models.catalog import data_file
from lab.why.datasheet import Device


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
    def runtime(self) -> str:
        return "llamafile" if self.source == "localscore" else "llama.cpp"


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


def work_of(model: Model, phase: str, n_prompt: int, n_ubatch: int, kinds: tuple[str, str]) -> Work | None:
    """The work of a token after `n_prompt` others, or of a prompt of that length; `kinds`: of the cache."""
    layers = model.n_layer or 0
    if phase == DECODE:
        token = cost.step(model, 1, n_prompt, 1, *kinds)
        return Work(token.n_bytes, 0.0, layers, 0.0) if token else None
    step = cost.step(model, n_prompt, 0, 1, *kinds)
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


@dataclass(frozen=True)
class Case:
    """What a time is predicted for."""

    phase: str
    device: Device
    gpu_share: float
    backend: str
    runtime: str
    model: str
    quantization: str
    flash_attn: bool | None
    work: Work
    n_prompt: int

    @property
    def levels(self) -> dict[str, str]:
        """What each factor is looked up by."""
        runtime = f"{self.backend} in {self.runtime}"
        return {
            "backend": self.backend,
            "runtime": runtime,
            "architecture": self.device.architecture or "none",
            "family": f"{self.device.architecture or 'none'} on {runtime}",
            "quantization": self.quantization,
            "device": self.device.name + ("" if self.gpu_share == 1 else f" x {self.gpu_share:g}"),
        }

    @property
    def base_s(self) -> float | None:
        """The work at the datasheet's rates; None without a peak."""
        peak = self.device.peak_tflops
        if self.work.flops and not peak:
            return None
        return self.work.flops / ((peak or 1) * self.gpu_share * 1e12) + self.work.n_bytes / self.device.gbps / 1e9

    @property
    def extra(self) -> float:
        """What the constant is multiplied by: microseconds of all layers, or seconds of moving activations."""
        return 1e-6 * self.work.layers if self.phase == DECODE else self.work.activations / self.device.gbps / 1e9


@dataclass(frozen=True)
class Learned:
    """What was learned for a phase: factors of the share, the constant, and what held-out predictions were off by.

    `spread`: standard deviations (of logarithms) between levels of a factor. `ranges`: by runtime, and "all", the
    ratios of measured to predicted times that 3 % and 97 % of the rows of left-out devices stay below; `inside` of
    `n_rows` rows were in the range that the other devices gave.
    """

    share: float
    constant: float
    factors: dict[str, dict[str, float]]
    spread: dict[str, float]
    ranges: dict[str, dict[str, float]]

    def expected_s(self, case: Case) -> float | None:
        """Never below the limit; None without a peak."""
        base, least = case.base_s, case.work.least_s(case.device, case.gpu_share)
        if base is None or least is None:
            return None
        share, constant = self.coefficients(case)
        return max(least, base / share + constant * case.extra)

    def coefficients(self, case: Case) -> tuple[float, float]:
        """The share of the datasheet's rates and the constant of a case, of any length."""
        levels = case.levels
        share = self.share * math.prod(self.factors.get(name, {}).get(at, 1.0) for name, at in levels.items())
        if case.flash_attn is not None:
            share *= self.factors["flash"].get(case.backend, 1.0) ** (0.5 if case.flash_attn else -0.5)
        return share, self.constant * self.factors["constant"].get(levels["runtime"], 1.0)

    def range(self, case: Case) -> tuple[float, float]:
        """The ratios around the expectation, wider for what nobody published."""
        beyond = max(0.0, math.log(case.n_prompt / LONGEST)) if case.phase == PREFILL else 0.0
        *ends, variance = self.spreads(case)
        low, high = (math.hypot(end, SURE * math.sqrt(variance + (PER_LENGTH * beyond) ** 2)) for end in ends)
        return math.exp(-low), math.exp(high)

    def spreads(self, case: Case) -> tuple[float, float, float]:
        """Of a case of any length the logarithms of both ratios, and the variance of what nobody published."""
        found = self.ranges.get(case.levels["runtime"], self.ranges["all"])
        unknown = [name for name, at in case.levels.items() if name != "device" and at not in self.factors[name]]
        unknown += ["constant"] if case.levels["runtime"] not in self.factors["constant"] else []
        unknown += ["model"] if case.model not in self.factors["model"] else []
        variance = math.fsum(self.spread[name] ** 2 for name in unknown)
        return math.log(found["fast"]), math.log(found["slow"]), variance


SURE = 1.645
"""Standard deviations that 90 % of a normal distribution lie within."""

LONGEST, PER_LENGTH = 2048, 0.2
"""Published prompts are shorter than this; beyond, a standard deviation more for each factor of e. An assumption."""


@cache
def learned() -> dict[str, Learned]:
    """By phase, from models/learned.toml."""
    with data_file("learned.toml").open("rb") as file:
        return {phase: Learned(**entry) for phase, entry in tomllib.load(file).items()}


def case_for(model: Model, settings: Settings, device: Device, phase: str, n_prompt: int) -> Case | None:
    """A prediction's; None for a model that cannot be counted."""
    done = work_of(model, phase, n_prompt, settings.n_ubatch, (settings.type_k, settings.type_v))
    flash = {"on": True, "off": False}.get(settings.flash_attn)
    names = backend_of(device), "llama.cpp", model.name, model.quantization or ""
    return Case(phase, device, 1.0, *names, flash, done, n_prompt) if done else None


def times(
    model: Model, settings: Settings, device: Device, n_prompt: int, n_gen: int
) -> dict[str, tuple[float, float, float]]:
    """For each phase the expected seconds, and both ends of the range; a phase without a peak is left out."""
    found = {}
    for phase, n in ((PREFILL, n_prompt), (DECODE, n_prompt + max(0, n_gen - 2) // 2)):
        case = case_for(model, settings, device, phase, n)
        expected, known = None, learned()[phase]
        if case is not None:
            expected, least = known.expected_s(case), case.work.least_s(device)
        if case is None or expected is None or least is None:
            continue
        fast, slow = known.range(case)
        found[phase] = expected, max(least, fast * expected), slow * expected
    return found


def basis(device: Device | None = None) -> str:
    """What predictions from datasheets are learned from, and how often such predictions were right."""
    at = "all" if device is None else f"{backend_of(device)} in llama.cpp"
    own = {phase: known.ranges.get(at) for phase, known in learned().items()}
    if None in own.values():
        at, own = "all", {phase: known.ranges["all"] for phase, known in learned().items()}
    rates = [f"{one['n_rows']:,.0f} {phase} rates" for phase, one in own.items() if one]
    n = max(one["n_devices"] for one in own.values() if one)
    right = [f"{one['inside']:.0f} of {one['n_rows']:.0f} ({phase})" for phase, one in own.items() if one]
    return (
        f"Expected: learned from {' and '.join(rates)} that others published for {plural(round(n), 'device')} "
        f"({'all backends' if at == 'all' else at}). Predicted without a device's own rows, {' and '.join(right)} "
        "were inside the range. Without a known peak, prefill is not predicted."
    )


def measured(device: Device, model: Model) -> str:
    """Sentences with what others measured on this device with this model, first in its quantization; "" for nothing."""
    own = [row for row in rows() if (row.device, row.model) == (device.name, model.name)]
    same, other = (
        [row for row in own if (row.quantization == model.quantization) == is_same and {*row.marks} <= {TOO_FAST}]
        for is_same in (True, False)
    )
    start = f"Measured by others on {device.about}, {model.name}"
    sentences = [f"{start}: {'; '.join(_cited(same))}."] if same else []
    if other:
        words = f"In other quantizations than {model.quantization}"
        sentences.append(f"{words if same else f'{start}, {words[0].lower()}{words[1:]}'}: {'; '.join(_cited(other))}.")
    return " ".join(sentences)


TOO_FAST = "above-bandwidth"
"""The mark of a row that is cited with a doubt; other marked rows are not cited."""


def _cited(own: list[Row]) -> list[str]:
    groups = grouped(
        own,
        lambda row: (
            *(row.quantization, row.phase, row.n_prompt if row.phase == PREFILL else None),
            *(row.source, row.backend, row.runtime, row.date, bool(row.marks)),
        ),
    )
    parts = []
    for (quantization, phase, n_prompt, source, backend, runtime, date, is_doubted), alike in groups.items():
        rates = sorted({round(row.tps, 1) for row in alike})
        figures = f"{rates[0]:,g}" + (f" to {rates[-1]:,g}" if len(rates) > 1 else "")
        of = f" of {n_prompt:,} tokens" if n_prompt else ""
        doubt = "; faster than this device can read its weights" if is_doubted else ""
        parts.append(f"{quantization} {phase}{of} {figures} tokens/s ({source}, {backend} in {runtime}, {date}{doubt})")
    return parts
