"""Predictions for devices that are not here, from what others published.

Published rates are in models/published.csv, coefficients in models/learned.toml. A time is a sum of parts: arithmetic
and attention at the datasheet's peak, weights and cache at its bandwidth, layers of all steps. Each part has a
coefficient: one figure times factors of the backend, the runtime, the architecture, the device, ...
tests/bench/learn_published.py fits them; a factor with few rows is close to 1. The range is what such predictions were
off by for devices that were left out, and wider where a factor is not known.
"""

from __future__ import annotations

import csv
import math
import operator
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lab.core import cost, memory
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, PREFILL, Model, Settings
from lab.errors import LabError
from lab.features.limits import step_kernels
from lab.models.catalog import data_file
from lab.models.devices import Device, called, devices, find_device, from_entry, kinds, names_of, recognise


@dataclass(frozen=True)
class Row:
    """A published measurement. `gpu_share`: the part of the chip's GPU cores that this variant has.

    A prompt of n_prompt tokens after n_depth others; or a token of an answer after n_prompt others, n_depth included.
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
    n_depth: int = 0
    n_ubatch: int = 512

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
    texts = ("source", "device", "backend", "model", "quantization", "phase", "url")
    return Row(
        **{name: line[name] for name in texts},
        gpu_share=float(line["gpu_share"] or 1),
        n_prompt=int(line["n_prompt"]) if line["n_prompt"] else None,
        flash_attn={"1": True, "0": False}.get(line["flash_attn"]),
        tps=float(line["tps"]),
        date=line["collected"],
        marks=tuple(line["marks"].split()),
        n_depth=int(line["n_depth"] or 0),
        n_ubatch=int(line["n_ubatch"] or 512),
    )


@dataclass(frozen=True)
class Work:
    """What a token or a prompt takes: FLOPs of the weights and of attention, bytes of weights and cache, steps' layers.

    The cache of a prompt: what its tokens see, over TILE, because this number of tokens share a reading.
    """

    flops: float
    weight_bytes: float
    attention_flops: float
    cache_bytes: float
    layers: float

    def parts(self, device: Device, gpu_share: float = 1.0) -> tuple[float, float, float, float, float]:
        """Seconds at the datasheet's rates, in the order of PARTS; nan without a peak where that counts."""
        peak, gbps = (device.peak_tflops or math.nan) * gpu_share * 1e12, device.gbps * 1e9
        arithmetic, attention = (flops and flops / peak for flops in (self.flops, self.attention_flops))
        return arithmetic, self.weight_bytes / gbps, attention, self.cache_bytes / gbps, 1e-6 * self.layers

    def least_s(self, device: Device, phase: str, gpu_share: float = 1.0) -> float | None:
        """The limit by bandwidth and peak; None without a peak where that counts."""
        arithmetic, weights, attention, cache, _ = self.parts(device, gpu_share)
        compute = arithmetic + attention
        return None if math.isnan(compute) else max(compute, weights + (cache if phase == DECODE else 0.0))


PARTS = "arithmetic", "weights", "attention", "cache", "layers"
TILE = 64  # tokens of a prompt that share one reading of the cache: the figure that was learned is relative to it


def work_of(
    model: Model, phase: str, n_prompt: int, n_ubatch: int, kinds: tuple[str, str], n_past: int = 0
) -> Work | None:
    """The work of a token after `n_prompt` others, or of such a prompt after n_past; `kinds`: of the cache."""
    layers = model.n_layer or 0
    if phase == DECODE:
        token = cost.step(model, 1, n_prompt, 1, *kinds)
        return Work(0.0, token.weight_bytes, 0.0, token.n_bytes - token.weight_bytes, layers) if token else None
    step = cost.step(model, n_prompt, n_past, 1, *kinds)
    first = cost.step(model, min(n_prompt, n_ubatch), 0, 1, *kinds)
    seen, per_head = cost.attended(model, n_prompt, n_past), memory.bytes_per_head(model, *kinds)
    if step is None or first is None or seen is None or per_head is None:
        return None
    n_steps = -(-n_prompt // n_ubatch)
    cache = sum(per_head * one.heads.n_layer * one.heads.n_head_kv * one.n_pairs for one in seen) / TILE
    flops = step.flops - step.attention_flops
    return Work(flops, first.weight_bytes * n_steps, step.attention_flops, cache, layers * n_steps)


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
    has_experts: bool = False

    @property
    def levels(self) -> dict[str, str]:
        """What each factor is looked up by; factors that do not apply are left out."""
        runtime = f"{self.backend} in {self.runtime}"
        architecture = self.device.architecture or "none"
        found = dict.fromkeys(("runtime", "layers", "weights", "cache"), runtime)
        found |= {"backend": self.backend, "architecture": architecture, "family": f"{architecture} on {runtime}"}
        found["device"] = self.device.name + ("" if self.gpu_share == 1 else f" x {self.gpu_share:g}")
        found["quantization"] = self.quantization
        if self.has_experts:
            found["experts"] = self.backend
        if self.flash_attn is not None:
            found |= {"flash": self.backend, "attention flash": self.backend}
        if self.runtime == "llama.cpp":
            return found | {"attention": runtime, "attention family": f"{architecture} on {runtime}"}
        return found | {"other runtime": runtime}

    @property
    def is_long(self) -> bool:
        return self.n_prompt > LONG

    @property
    def parts(self) -> tuple[float, float, float, float, float]:
        return self.work.parts(self.device, self.gpu_share)


SHARED = "backend", "runtime", "architecture", "family", "device"
FACTORS = {
    PREFILL: {
        "arithmetic": (*SHARED, "quantization", "flash", "experts"),
        "weights": ("weights",),
        "attention": (*SHARED, "attention", "attention family", "attention flash", "other runtime"),
        "cache": ("cache",),
        "layers": ("layers",),
    },
    DECODE: {
        "arithmetic": (*SHARED, "quantization", "flash", "experts"),
        "weights": (*SHARED, "quantization", "flash", "experts"),
        "attention": (),
        "cache": ("attention", "attention family", "attention flash", "other runtime"),
        "layers": ("layers",),
    },
}
"""The factors of each part. Those of flash attention count half: on, or divided by off."""


@dataclass(frozen=True)
class Learned:
    """What was learned for a phase: figures of the parts, factors, and what held-out predictions were off by.

    `spread`: standard deviations (of logarithms) between levels of a factor. `ranges`: by runtime, and "all", the
    ratios of measured to predicted times that 3 % and 97 % (long prompts: 1 % and 99 %) of the rows of left-out devices
    stay below; `inside` of `n_rows` rows were in the range that the other devices gave.
    """

    phase: str
    parts: dict[str, float]
    factors: dict[str, dict[str, float]]
    spread: dict[str, float]
    ranges: dict[str, dict[str, float]]

    def expected_s(self, case: Case) -> float | None:
        """Never below the limit; None without a peak."""
        least = case.work.least_s(case.device, case.phase, case.gpu_share)
        if least is None:
            return None
        return max(least, math.fsum(map(operator.mul, self.coefficients(case), case.parts)))

    def coefficients(self, case: Case) -> tuple[float, ...]:
        """By what the seconds of each part at the datasheet's rates are multiplied, at any length."""
        levels = case.levels
        half = 0.5 if case.flash_attn else -0.5
        found = []
        for part, names in FACTORS[self.phase].items():
            factors = {name: self.factors.get(name, {}).get(levels[name], 1.0) for name in names if name in levels}
            found.append(
                self.parts.get(part, 0.0)
                * math.prod(value ** (half if "flash" in name else 1) for name, value in factors.items())
            )
        return tuple(found)

    def range(self, case: Case) -> tuple[float, float]:
        """The ratios around the expectation, wider for what nobody published."""
        beyond = max(0.0, math.log(case.n_prompt / LONGEST))
        seconds = [each * part for each, part in zip(self.coefficients(case), case.parts, strict=True)]
        total = math.fsum(seconds)
        variance = math.fsum(
            (sd * math.fsum(map(operator.mul, counts, seconds)) / total) ** 2 for sd, counts in self.unknown(case)
        )
        share = math.log(case.n_prompt / WIDENS[0]) / math.log(WIDENS[1] / WIDENS[0])
        share = min(1.0, max(0.0, share))
        low, high = (
            math.hypot(end, SURE * math.sqrt(variance + (PER_LENGTH * beyond) ** 2))
            for end in (short + share * (long - short) for short, long in self.ends(case))
        )
        return math.exp(-low), math.exp(high)

    def ends(self, case: Case) -> list[tuple[float, float]]:
        """For the fast and the slow end the logarithms' sizes: of short prompts, and of long ones."""
        found = [self.ranges.get(case.levels["runtime"] + long, self.ranges[f"all{long}"]) for long in ("", ", long")]
        sizes = [[abs(math.log(one[end])) for one in found] for end in ("fast", "slow")]
        return [(short, max(short, long)) for short, long in sizes]

    def unknown(self, case: Case) -> list[tuple[float, tuple[int, ...]]]:
        """Of each factor that nobody published: the standard deviation, and 1 for the parts that have it."""
        every, levels = FACTORS[self.phase], case.levels
        found = [
            (self.spread[name], tuple(int(name in names) for names in every.values()))
            for name in dict.fromkeys(name for names in every.values() for name in names)
            if name in levels and name not in ("device", "other runtime") and levels[name] not in self.factors[name]
        ]
        if case.model not in self.factors["model"]:
            found.append((self.spread["model"], (1,) * len(every)))
        return found


SURE = 1.645  # standard deviations that 90 % of a normal distribution lie within
WIDENS = 1000, 10_000
"""Between these prompt lengths the logarithms of both ends go from those of short prompts to those of long ones, which
are never narrower, so that no end falls as prompts grow."""

LONG, LONGEST, PER_LENGTH = 3000, 65_536, 0.2
"""Errors for prompts above LONG make the range of long prompts. Few published ones are above LONGEST: a standard
deviation more for each factor of e (an assumption)."""


@cache
def learned() -> dict[str, Learned]:
    """By phase, from models/learned.toml."""
    with data_file("learned.toml").open("rb") as file:
        return {phase: Learned(phase, **entry) for phase, entry in tomllib.load(file).items()}


def case_for(
    model: Model, settings: Settings, device: Device, phase: str, n_prompt: int, work: Work | None = None
) -> Case | None:
    """A prediction's; None for a model that cannot be counted. `work`: if it is known already."""
    done = work or work_of(model, phase, n_prompt, settings.n_ubatch, (settings.type_k, settings.type_v))
    is_flash = settings.flash_attn != "off"  # "auto" is on wherever the device can
    names = backend_of(device), "llama.cpp", model.name, model.quantization or ""
    return Case(phase, device, 1.0, *names, is_flash, done, n_prompt, bool(model.n_expert)) if done else None


def times(
    model: Model, settings: Settings, device: Device, n_prompt: int, n_gen: int
) -> dict[str, tuple[float, float, float, float]]:
    """For each phase the limit, the expected seconds, and both ends of the range; a phase without a peak is left out.

    LabError for a model that cannot be counted.
    """
    found = {}
    for phase, n in ((PREFILL, n_prompt), (DECODE, n_prompt + max(0, n_gen - 2) // 2)):
        case, known = case_for(model, settings, device, phase, n), learned()[phase]
        if case is None:
            raise step_kernels.not_known(model)
        least, expected = case.work.least_s(device, phase), known.expected_s(case)
        if least is not None and expected is not None:
            fast, slow = known.range(case)
            found[phase] = least, expected, max(least, fast * expected), slow * expected
    return found


def basis(device: Device | None = None) -> str:
    """What predictions from datasheets are learned from, and how often such predictions were right."""
    at = "all" if device is None else f"{backend_of(device)} in llama.cpp"
    own = {phase: known.ranges.get(at) for phase, known in learned().items()}
    if None in own.values():
        at, own = "all", {phase: known.ranges["all"] for phase, known in learned().items()}
    rates = [f"{one['n_rows']:,.0f} {phase} rates" for phase, one in own.items() if one]
    n = max(one["n_devices"] for one in own.values() if one)
    right = [f"{one['inside']:.0f} of {one['n_rows']:.0f} {phase} rates" for phase, one in own.items() if one]
    return (
        f"Expected: learned from {' and '.join(rates)} that others published for {plural(round(n), 'device')} "
        f"({'all backends' if at == 'all' else at}). Test: each device was predicted from the other "
        f"devices only; {' and '.join(right)} fell inside the range."
    )


def measured(device: Device, model: Model) -> str:
    """A sentence with what others measured on this device with this model and quantization; "" for nothing."""
    asked = device.name, model.name, model.quantization
    own = [row for row in rows() if (row.device, row.model, row.quantization) == asked and not row.marks]
    cited = list[str]()
    for alike in grouped(
        own,
        lambda row: (row.phase, row.phase == PREFILL and row.n_prompt, row.source, row.backend, row.runtime, row.date),
    ).values():
        first, rates = alike[0], sorted({round(row.tps, 1) for row in alike})
        figures = f"{rates[0]:,g}" + (f" to {rates[-1]:,g}" if len(rates) > 1 else "")
        of = ""
        if first.phase == PREFILL:
            of = f" of {first.n_prompt:,} tokens" if first.n_prompt else " of unknown length"
        where = ", ".join(filter(None, [first.source, f"{first.backend} in {first.runtime}", first.date]))
        cited.append(f"{first.quantization} {first.phase}{of} {figures} tokens/s ({where})")
    return f"Measured by others on {device.about}, {model.name}: {'; '.join(cited)}." if cited else ""


__all__ = ["Device", "called", "devices", "find_device", "from_entry", "kinds", "names_of", "recognise"]
"""Of lab/models/devices.py, for those who need the datasheets too."""
