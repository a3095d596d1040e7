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

from lab.core import cost, memory
from lab.core.lists import grouped, plural
from lab.core.record import DECODE, PREFILL, Model, Settings
from lab.roofline import step_kernels
from lab.models.catalog import data_file
from lab.models.devices import Device

PARTS = "arithmetic", "weights", "attention", "cache", "layers"
SHARED = "backend", "runtime", "architecture", "family", "device"
OTHERS = "attention", "attention family", "attention flash", "other runtime"
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    PREFILL: {
        "arithmetic": (*SHARED, "quantization", "flash", "experts"),
        "weights": ("weights",),
        "attention": (*SHARED, *OTHERS),
        "cache": ("cache",),
        "layers": ("layers",),
    },
    DECODE: {
        "arithmetic": (*SHARED, "quantization", "flash", "experts"),
        "weights": (*SHARED, "quantization", "flash", "experts"),
        "attention": (),
        "cache": OTHERS,
        "layers": ("layers",),
    },
}
"""The factors of each part. Those of flash attention count half: on, or divided by off."""

TILE = 64  # tokens of a prompt that share one reading of the cache: the figure that was learned is relative to it
SURE = 1.645  # standard deviations that 90 % of a normal distribution lie within

WIDENS = 1000, 10_000
"""Between these prompt lengths the logarithms of both ends go from those of short prompts to those of long ones, which
are never narrower, so that no end falls as prompts grow."""

LONG = 3000
LONGEST = 65_536
PER_LENGTH = 0.2
"""Errors for prompts above LONG make the range of long prompts. Few published ones are above LONGEST: a standard
deviation more for each factor of e (an assumption)."""


def runtime_of(source: str) -> str:
    """What a publisher measured with."""
    return "llamafile" if source == "localscore" else "llama.cpp"


def backend_of(device: Device) -> str:
    """The backend that llama.cpp is usually built with for a device."""
    by_kind = {"radeon": "ROCm", "datacenter": "ROCm", "apple": "Metal", "arc": "Vulkan"}
    return (
        "CUDA"
        if "NVIDIA" in device.about
        else by_kind.get(device.kind, "Vulkan" if device.fp32 else "CPU")
    )


@dataclass(frozen=True)
class Case:
    """What a time is predicted for. `parts`: seconds of each of PARTS at the datasheet's rates, nan without a peak."""

    phase: str
    device: Device
    backend: str
    runtime: str
    model: str
    quantization: str
    flash_attn: bool | None
    n_prompt: int
    has_experts: bool
    parts: tuple[float, ...]

    @property
    def least_s(self) -> float | None:
        """The limit by bandwidth and peak; None without a peak where that counts."""
        arithmetic, weights, attention, cache, _ = self.parts
        compute = arithmetic + attention
        return (
            None
            if math.isnan(compute)
            else max(compute, weights + (cache if self.phase == DECODE else 0.0))
        )

    @property
    def levels(self) -> dict[str, str]:
        """What each factor is looked up by; factors that do not apply are left out."""
        runtime = f"{self.backend} in {self.runtime}"
        architecture = self.device.architecture or "none"
        family = f"{architecture} on {runtime}"
        found = dict.fromkeys(("runtime", "layers", "weights", "cache"), runtime)
        found |= {
            "backend": self.backend,
            "architecture": architecture,
            "family": family,
            "device": self.device.name,
        }
        found["quantization"] = self.quantization
        if self.has_experts:
            found["experts"] = self.backend
        if self.flash_attn is not None:
            found |= {"flash": self.backend, "attention flash": self.backend}
        if self.runtime == "llama.cpp":
            return found | {"attention": runtime, "attention family": family}
        return found | {"other runtime": runtime}


def parts_of(
    model: Model,
    device: Device,
    phase: str,
    n: int,
    n_ubatch: int,
    kinds: tuple[str, str],
    n_past: int = 0,
) -> tuple[float, ...]:
    """The parts of a token after n others, or of a prompt of n after n_past. LabError for a model of unknown cost.

    `kinds`: of the cache. That of a prompt: what its tokens see, over TILE, because this number of tokens share a
    reading.
    """
    layers = model.n_layer or 0
    gbps = device.gbps * 1e9
    if phase == DECODE:
        token = step_kernels.step_cost(model, 1, n, 1, *kinds)
        return (
            0.0,
            token.weight_bytes / gbps,
            0.0,
            (token.n_bytes - token.weight_bytes) / gbps,
            1e-6 * layers,
        )
    step, first = (
        step_kernels.step_cost(model, *one, 1, *kinds)
        for one in ((n, n_past), (min(n, n_ubatch), 0))
    )
    seen = cost.attended(model, n, n_past) or ()
    per_head = memory.bytes_per_head(model, *kinds) or 0.0
    peak = (device.peak_tflops or math.nan) * 1e12
    n_steps = -(-n // n_ubatch)
    n_read = (
        sum(per_head * one.heads.n_layer * one.heads.n_head_kv * one.n_pairs for one in seen) / TILE
    )
    arithmetic = (step.flops - step.attention_flops) / peak
    attention = step.attention_flops / peak
    return (
        arithmetic,
        first.weight_bytes * n_steps / gbps,
        attention,
        n_read / gbps,
        1e-6 * (layers * n_steps),
    )


def case_for(
    model: Model, settings: Settings, device: Device, phase: str, n: int, n_past: int = 0
) -> Case:
    """A prediction's. LabError for a model of unknown cost."""
    parts = parts_of(
        model, device, phase, n, settings.n_ubatch, (settings.type_k, settings.type_v), n_past
    )
    names = backend_of(device), "llama.cpp", model.name, model.quantization or ""
    is_flash = settings.flash_attn != "off"  # "auto" is on wherever the device can
    return Case(phase, device, *names, is_flash, n + n_past, bool(model.n_expert), parts)


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

    def coefficients(self, case: Case) -> tuple[float, ...]:
        """By what the seconds of each part at the datasheet's rates are multiplied, at any length."""
        levels = case.levels
        half = 0.5 if case.flash_attn else -0.5
        found = []
        for part, names in FACTORS[self.phase].items():
            factors = {
                name: self.factors.get(name, {}).get(levels[name], 1.0)
                for name in names
                if name in levels
            }
            product = math.prod(
                value ** (half if "flash" in name else 1) for name, value in factors.items()
            )
            found.append(self.parts.get(part, 0.0) * product)
        return tuple(found)

    def expected_s(self, case: Case) -> float | None:
        """Never below the limit; None without a peak."""
        least = case.least_s
        return least and max(
            least, math.fsum(map(operator.mul, self.coefficients(case), case.parts))
        )

    def range(self, case: Case) -> tuple[float, float]:
        """The ratios around the expectation, wider for what nobody published."""
        seconds = [
            each * part for each, part in zip(self.coefficients(case), case.parts, strict=True)
        ]
        total = math.fsum(seconds)
        beyond = max(0.0, math.log(case.n_prompt / LONGEST))
        unknown = self.unknown(case)
        variance = math.fsum(
            (sd * math.fsum(map(operator.mul, counts, seconds)) / total) ** 2
            for sd, counts in unknown
        )
        wide = SURE * math.sqrt(variance + (PER_LENGTH * beyond) ** 2)
        share = math.log(case.n_prompt / WIDENS[0]) / math.log(WIDENS[1] / WIDENS[0])
        share = min(1.0, max(0.0, share))
        low, high = (
            math.hypot(short + share * (long - short), wide) for short, long in self.ends(case)
        )
        return math.exp(-low), math.exp(high)

    def ends(self, case: Case) -> list[tuple[float, float]]:
        """For the fast and the slow end the logarithms' sizes: of short prompts, and of long ones."""
        found = [
            self.ranges.get(case.levels["runtime"] + long, self.ranges[f"all{long}"])
            for long in ("", ", long")
        ]
        sizes = [[abs(math.log(one[end])) for one in found] for end in ("fast", "slow")]
        return [(short, max(short, long)) for short, long in sizes]

    def unknown(self, case: Case) -> list[tuple[float, tuple[int, ...]]]:
        """Of each factor that nobody published: the standard deviation, and 1 for the parts that have it."""
        every = FACTORS[self.phase]
        levels = case.levels
        found = [
            (self.spread[name], tuple(int(name in names) for names in every.values()))
            for name in dict.fromkeys(name for names in every.values() for name in names)
            if name in levels
            and name not in ("device", "other runtime")
            and levels[name] not in self.factors[name]
        ]
        if case.model not in self.factors["model"]:
            found.append((self.spread["model"], (1,) * len(every)))
        return found


@cache
def learned() -> dict[str, Learned]:
    """By phase, from models/learned.toml."""
    with data_file("learned.toml").open("rb") as file:
        return {phase: Learned(phase, **entry) for phase, entry in tomllib.load(file).items()}


def basis(device: Device | None = None) -> str:
    """What predictions from datasheets are learned from, and how often such predictions were right."""
    at = "all" if device is None else f"{backend_of(device)} in llama.cpp"
    if any(at not in known.ranges for known in learned().values()):
        at = "all"
    own = {phase: known.ranges[at] for phase, known in learned().items()}
    rates = " and ".join(f"{one['n_rows']:,.0f} {phase} rates" for phase, one in own.items())
    right = " and ".join(
        f"{one['inside']:.0f} of {one['n_rows']:.0f} {phase} rates" for phase, one in own.items()
    )
    n_devices = plural(round(max(one["n_devices"] for one in own.values())), "device")
    return (
        "Expected: slower than the limit, as real devices are. By how much was learned "
        f"from {rates} published for {n_devices} ({'all backends' if at == 'all' else at}). Test: "
        f"each device was predicted from the other devices only; {right} fell inside the range."
    )


def measured(device: Device, model: Model) -> str:
    """A sentence with what others measured on this device with this model and quantization; "" for nothing."""
    asked = {
        "device": device.name,
        "model": model.name,
        "quantization": model.quantization,
        "marks": "",
    }
    with data_file("published.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if asked.items() <= row.items()]

    def what_and_where(row: dict[str, str]) -> tuple[str, str]:
        of = f" of {int(row['n_prompt']):,} tokens" if row["n_prompt"] else " of unknown length"
        where = f"{row['backend']} in {runtime_of(row['source'])}"
        what = f"{row['quantization']} {row['phase']}{of if row['phase'] == PREFILL else ''}"
        return what, ", ".join(filter(None, [row["source"], where, row["collected"]]))

    cited = []
    for (what, where), alike in grouped(rows, what_and_where).items():
        rates = sorted({round(float(row["tps"]), 1) for row in alike})
        figures = " to ".join(f"{rate:,g}" for rate in dict.fromkeys([rates[0], rates[-1]]))
        cited.append(f"{what} {figures} tokens/s ({where})")
    return (
        f"Measured by others on {device.about}, {model.name}: {'; '.join(cited)}." if cited else ""
    )
