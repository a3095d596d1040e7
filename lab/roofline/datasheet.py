"""Predictions for devices that are not here, from what others published.

Published rates are in models/published.csv, coefficients in models/learned.toml. A time is a sum of
parts: arithmetic and attention at the datasheet's peak, weights and cache at its bandwidth, layers
of all steps. Each part has a coefficient: one figure times factors of the backend, the runtime, the
architecture, the device, ... tests/bench/learn_published.py fits them; a factor with few rows is
close to 1. The range is what such predictions were off by for devices that were left out, and wider
where a factor is not known.
"""

from __future__ import annotations

import csv
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from statistics import geometric_mean
from typing import NamedTuple, TypeVar

from lab.core import cost, memory
from lab.core.files import data_file
from lab.core.memory import CPU
from lab.core.record import DECODE, PREFILL, Model, Settings
from lab.models import named, processors, synthetic
from lab.models.devices import DeviceSheet, chip_of
from lab.roofline import step_kernels

T = TypeVar("T")

PARTS = "arithmetic", "weights", "attention", "cache", "layers"
SHARED = "backend", "runtime", "architecture", "family", "device"
OF_PRODUCTS = *SHARED, "quantization", "kernel", "flash", "experts"
OF_ATTENTION = "attention", "attention family", "attention flash", "other runtime"
OF_DECODING_KERNELS = (
    "architecture",
    "core",
    "products",
    "quantization",
    "kernel",
    "experts",
    "device",
)
OF_KERNELS = *OF_DECODING_KERNELS, "repacked"
PREFILL_CPU = "prefill on CPU"
DECODE_CPU = "decode on CPU"
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    PREFILL: {
        "arithmetic": OF_PRODUCTS,
        "weights": ("weights",),
        "attention": (*SHARED, *OF_ATTENTION),
        "cache": ("cache",),
        "layers": ("layers",),
    },
    DECODE: {
        "arithmetic": OF_PRODUCTS,
        "weights": OF_PRODUCTS,
        "attention": (),
        "cache": OF_ATTENTION,
        "layers": ("layers",),
    },
    PREFILL_CPU: {
        "arithmetic": OF_KERNELS,
        "weights": (),
        "attention": ("architecture", "attention"),
        "cache": (),
        "layers": (),
    },
    DECODE_CPU: {
        "arithmetic": OF_DECODING_KERNELS,
        "weights": ("reading", "device"),
        "attention": (),
        "cache": ("attention",),
        "layers": (),
    },
}
"""The factors of each part. Those of flash attention count half: on, or divided by off.

Processors have a law of their own: a token takes the longer of reading the weights at the memory's
bandwidth and of multiplying them with the cores that are used, and a little more where both are
alike (OVERLAP). Few cores read slower than the memory allows.
"""

UNQUANTIZED = "F32", "F16", "BF16"
"""Types for which some backends of GPUs have no fast kernels."""

CODEBOOKS = "IQ1", "IQ2", "IQ3"
"""Types whose weights are looked up in a table, eight or four at a time, before they multiply."""

OVERLAP = 3.0
"""The power mean of both times: seconds = (reading ** p + multiplying ** p) ** (1 / p)."""

NEVER_WIDEN = "device", "kernel", "other runtime"
"""Factors that do not widen a range where they are unknown: the range is of left-out devices."""

TILE = 64
"""Tokens of a prompt that share a reading of the cache; the learned figure is relative to it."""

FAMILY_KNOWN = "family known"
NOTHING_KNOWN = "nothing known"
OWN_RATE = "own rate"
OWN_RATE_OF_TYPE = "own rate of the type"
LONG_ONES = ", long"
"""Groups of rows that have ranges of their own; prompts above LONG have others."""

SURE = 1.645  # standard deviations that 90 % of a normal distribution lie within

WIDENS = 1000, 10_000
"""Between these prompt lengths the logarithms of both ends go from those of short prompts to those
of long ones, which are never narrower, so that no end falls as prompts grow."""

LONG = 3000
LONGEST = 65_536
PER_LENGTH = 0.2
"""Errors for prompts above LONG make the range of long prompts. Few published ones are above
LONGEST: a standard deviation more for each factor of e (an assumption)."""

LAYER_S = 1e-6  # the unit of a layer in a step: microseconds
FEW_CORES = 8
"""Cores of a processor beyond which their waiting for each other counts, in proportion to their
number: all threads meet after every operation (ggml_barrier in ggml/src/ggml-cpu/ggml-cpu.c).
With it, rates of left-out publishers lie in ranges that are 2.8 instead of 3.3 times wide."""


def runtime_of(source: str) -> str:
    """What a publisher measured with."""
    return "llamafile" if source == "localscore" else "llama.cpp"


def backend_of(device: DeviceSheet) -> str:
    """The backend that was asked for, or that llama.cpp is usually built with for a device."""
    if device.backend:
        return device.backend
    if "NVIDIA" in device.about:
        return "CUDA"
    by_kind = {"radeon": "ROCm", "datacenter": "ROCm", "apple": "Metal", "arc": "Vulkan"}
    if device.kind in by_kind:
        return by_kind[device.kind]
    return "Vulkan" if device.fp32 else CPU


class DatasheetParts(NamedTuple):
    """Seconds of a time's parts at the datasheet's rates, in the order of PARTS.

    Arithmetic and attention are nan without a known peak.
    """

    arithmetic: float
    weights: float
    attention: float
    cache: float
    layers: float


@dataclass(frozen=True)
class DatasheetCase:
    """What a time is predicted for. `flash_attn` is None where nobody published it.

    `month`: of llama.cpp's build, such as 2026-05; "" for today's.
    """

    phase: str
    device: DeviceSheet
    backend: str
    runtime: str
    model: str
    quantization: str
    flash_attn: bool | None
    n_prompt: int
    has_experts: bool
    parts: DatasheetParts
    doubts: tuple[Unpublished, ...] = ()
    month: str = ""

    @property
    def law(self) -> str:
        """The key of FACTORS and of what was learned: the phase, on a processor its own."""
        if self.backend != CPU:
            return self.phase
        return PREFILL_CPU if self.phase == PREFILL else DECODE_CPU

    @property
    def least_s(self) -> float | None:
        """The limit by bandwidth and peak; None without a peak where that counts."""
        compute = self.parts.arithmetic + self.parts.attention
        if math.isnan(compute):
            return None
        traffic = self.parts.weights
        if self.phase == DECODE:
            traffic += self.parts.cache
        return max(compute, traffic)

    def slowdown(self, part: str) -> float:
        """By how much a part is slower than at the datasheet's rates because few cores read."""
        if self.law == DECODE_CPU and part == "weights":
            return self.device.reading_slowdown
        return 1.0

    @cached_property
    def levels(self) -> dict[str, str]:
        """What each factor is looked up by; factors that do not apply are left out."""
        runtime = f"{self.backend} in {self.runtime}"
        architecture = self.device.architecture or "none"
        if self.backend == CPU:
            architecture = self.device.simd or "none"
            if self.phase == DECODE:
                architecture = processors.decoding_simd(architecture)
        family = f"{architecture} on {runtime}"
        levels = {
            "runtime": runtime,
            "layers": runtime,
            "weights": runtime,
            "cache": runtime,
            "backend": self.backend,
            "architecture": architecture,
            "family": family,
            "device": self.device.name,
            "quantization": self.quantization,
            "reading": architecture,
        }
        if self.backend == CPU:
            levels["kernel"] = f"{self.quantization} with {architecture}"
            levels["products"] = products_of(self.quantization)
            if self.device.core:
                levels["core"] = self.device.core
            if processors.is_repacked(architecture, self.quantization, self.month):
                levels["repacked"] = architecture
                levels["kernel"] += ", repacked"
        elif self.quantization in UNQUANTIZED:
            levels["kernel"] = f"{self.quantization} on {self.backend}"
        if self.has_experts:
            levels["experts"] = self.backend
        if self.flash_attn is not None:
            levels["flash"] = self.backend
            levels["attention flash"] = self.backend
        if self.runtime == "llama.cpp":
            levels["attention"] = runtime
            levels["attention family"] = family
        else:
            levels["other runtime"] = runtime
        return levels


CacheTypes = tuple[str, str]  # of keys and of values


def parts_of_token(
    model: Model, device: DeviceSheet, n_past: int, types: CacheTypes
) -> DatasheetParts:
    """The parts of a token of one user. LabError for a model of unknown cost.

    Arithmetic counts on processors alone.
    """
    parts = parts_of_users(model, device, n_past, types, 1)
    if backend_of(device) == CPU:
        return parts
    return parts._replace(arithmetic=0.0)


def parts_of_users(
    model: Model, device: DeviceSheet, n_past: int, types: CacheTypes, users: int
) -> DatasheetParts:
    """The parts of a step with one token of each user. With several, arithmetic counts."""
    gbps = device.gbps * 1e9
    other_users = [(1, n_past)] * (users - 1)
    step = cost.step(model, 1, n_past, users, *types, other_users)
    step = step_kernels.known(step, model)
    arithmetic = 0.0
    if device.token_tflops:
        arithmetic = step.flops / device.token_tflops / 1e12
    cache_bytes = step.n_bytes - step.weight_bytes
    layers_s = LAYER_S * (model.n_layer or 0)
    if backend_of(device) == CPU and device.cores:
        layers_s *= max(1.0, device.cores / FEW_CORES)
    return DatasheetParts(
        arithmetic, step.weight_bytes / gbps, 0.0, cache_bytes / gbps, layers_s
    )


def parts_of_prompt(
    model: Model,
    device: DeviceSheet,
    n: int,
    n_ubatch: int,
    types: CacheTypes,
    n_past: int = 0,
) -> DatasheetParts:
    """The parts of a prompt of n tokens after n_past. LabError for a model of unknown cost.

    The cache: what the tokens see, over TILE, because this number of tokens share a reading.
    """
    gbps = device.gbps * 1e9
    peak = (device.peak_tflops or math.nan) * 1e12
    prompt = step_kernels.known(cost.step(model, n, n_past, 1, *types), model)
    first_step = cost.step(model, min(n, n_ubatch), 0, 1, *types)
    first_step = step_kernels.known(first_step, model)
    n_steps = math.ceil(n / n_ubatch)
    seen_bytes = 0.0
    for layers in cost.attended(model, n, n_past) or ():
        layer_bytes = memory.bytes_per_position(layers.heads, *types) * layers.n_pairs
        seen_bytes += layers.heads.n_layer * layer_bytes
    return DatasheetParts(
        arithmetic=(prompt.flops - prompt.attention_flops) / peak,
        weights=first_step.weight_bytes * n_steps / gbps,
        attention=prompt.attention_flops / peak,
        cache=seen_bytes / TILE / gbps,
        layers=LAYER_S * ((model.n_layer or 0) * n_steps),
    )


def parts_of(
    model: Model,
    device: DeviceSheet,
    phase: str,
    n: int,
    n_ubatch: int,
    types: CacheTypes,
    n_past: int = 0,
) -> DatasheetParts:
    """The parts of a token after n others, or of a prompt of n after n_past."""
    if phase == DECODE:
        return parts_of_token(model, device, n, types)
    return parts_of_prompt(model, device, n, n_ubatch, types, n_past)


def case_for(
    model: Model, settings: Settings, device: DeviceSheet, phase: str, n: int, n_past: int = 0
) -> DatasheetCase:
    """The case of a prediction: a prompt of n tokens, or a token after n."""
    types = settings.cache_types
    like = synthetic.like_quantization(model.quantization or "")
    return DatasheetCase(
        phase,
        device,
        backend=backend_of(device),
        runtime="llama.cpp",
        model=model.name,
        quantization=like.name if like else model.quantization or "",
        flash_attn=settings.stated_flash,
        n_prompt=n + n_past,
        has_experts=bool(model.n_expert),
        parts=parts_of(model, device, phase, n, settings.n_ubatch, types, n_past),
        doubts=doubts_of(model, device, phase),
    )


def doubts_of(model: Model, device: DeviceSheet, phase: str) -> tuple[Unpublished, ...]:
    """The spread that follows from what was assumed of a device, a model or a quantization."""
    doubts = []
    for assumption in device.assumed:
        doubts.append(Unpublished(assumption.bandwidth, OF_BANDWIDTH))
        doubts.append(Unpublished(assumption.arithmetic, OF_ARITHMETIC))
    like = synthetic.like_quantization(model.quantization or "")
    if like is not None and like.spread and phase == DECODE:
        doubts.append(Unpublished(like.spread, OF_BANDWIDTH))
    if model.source == named.APPROXIMATE:
        doubts.append(Unpublished(APPROXIMATE_SPREAD, OF_ALL))
    return tuple(doubt for doubt in doubts if doubt.deviation)


class Condition(NamedTuple):
    """What is known of a device from a rate of the user's own (conditioning.py).

    `shift` of the logarithm of its times, and the standard deviation of that shift. `is_of_type`:
    a file with the quantization that is predicted was measured.
    """

    shift: float
    deviation: float
    is_of_type: bool = False

    @property
    def knowledge(self) -> str:
        return OWN_RATE_OF_TYPE if self.is_of_type else OWN_RATE


OF_BANDWIDTH = (0, 1, 0, 1, 0)
OF_ARITHMETIC = (1, 0, 1, 0, 0)
OF_ALL = (1, 1, 1, 1, 1)
"""The parts that a doubt counts for, in the order of PARTS."""

APPROXIMATE_SPREAD = 0.15
"""Of times of a model that is approximated by its parameters (an assumption)."""


class End(NamedTuple):
    """How far an end of a range lies from the expectation: sizes of logarithms of ratios."""

    short: float  # for short prompts
    long: float


class Unpublished(NamedTuple):
    """A factor that nobody published: its standard deviation, and for each part 1 if it has it."""

    deviation: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class LearnedRates:
    """What was learned for a phase: figures of the parts, factors, and errors when left out.

    `spread`: standard deviations (of logarithms) between levels of a factor. `sd`: how uncertain
    the factors of a device, of a family of chips and of a runtime are together, and the noise of
    rows. `ranges`: by runtime, and "all", the ratios of measured to predicted times, where one
    standard deviation (`deviation`) is a factor of e, that some rows of left-out publishers lie
    beyond. `scale`: by group, where it has enough publishers, how much wider ranges are so that
    they hold the rows of another publisher. `evaluation`: by backend,
    `inside` of `n_rows` rows of a third group of publishers were in the range.
    """

    phase: str
    parts: dict[str, float]
    factors: dict[str, dict[str, float]]
    spread: dict[str, float]
    ranges: dict[str, dict[str, float]]
    sd: dict[str, dict[str, float]] = field(default_factory=dict)
    evaluation: dict[str, dict[str, float]] = field(default_factory=dict)
    scale: dict[str, float] = field(default_factory=dict)

    def coefficients(self, case: DatasheetCase) -> tuple[float, ...]:
        """What the seconds of each part at the datasheet's rates are multiplied by."""
        coefficients = []
        for part, names in FACTORS[case.law].items():
            product = case.slowdown(part)
            for name in names:
                product *= self._factor(name, case)
            coefficients.append(self.parts.get(part, 0.0) * product)
        return tuple(coefficients)

    def _factor(self, name: str, case: DatasheetCase) -> float:
        """A factor of the case; 1 where it does not apply or nobody published it."""
        level = case.levels.get(name)
        if level is None:
            return 1.0
        value = self.factors.get(name, {}).get(level, 1.0)
        if name == "device" and level not in self.factors.get(name, {}):
            return self._factor_of_variants(case.device)
        if "flash" not in name:
            return value
        return math.pow(value, 0.5 if case.flash_attn else -0.5)

    def _factor_of_variants(self, device: DeviceSheet) -> float:
        """The factor of devices with the same chip, so that more memory makes none slower."""
        chip = device.chip
        factors = []
        for name, factor in self.factors.get("device", {}).items():
            if chip_of(name) == chip:
                factors.append(factor)
        return geometric_mean(factors) if factors else 1.0

    def part_times(self, case: DatasheetCase) -> list[float]:
        """Expected seconds of each part; the times add up, also where two of them overlap."""
        pairs = zip(self.coefficients(case), case.parts, strict=True)
        times = [coefficient * seconds for coefficient, seconds in pairs]
        if case.law == DECODE_CPU:
            times[:2] = overlapping(*times[:2])
        return times

    def expected_s(
        self, case: DatasheetCase, condition: Condition | None = None
    ) -> float | None:
        """Expected seconds, never below the limit; None without a peak."""
        least_s = case.least_s
        if least_s is None:
            return None
        expected_s = math.fsum(self.part_times(case))
        if condition is not None:
            expected_s *= math.exp(condition.shift)
        return max(least_s, expected_s)

    def wide(self, case: DatasheetCase) -> float:
        """By how much unpublished factors and a very long prompt widen each end of the range."""
        times = self.part_times(case)
        total = math.fsum(times)
        squares = []
        for deviation, counts in self.unpublished(case):
            squares.append((deviation * dot(counts, times) / total) ** 2)
        beyond = max(0.0, math.log(case.n_prompt / LONGEST))
        variance = math.fsum(squares) + (PER_LENGTH * beyond) ** 2
        return SURE * math.sqrt(variance)

    def range(
        self, case: DatasheetCase, condition: Condition | None = None
    ) -> tuple[float, float]:
        """The ratios around the expectation, wider for what nobody published."""
        wide = self.wide(case)
        fast, slow = self.ends(case, condition)
        low = math.hypot(at_length(fast, case.n_prompt), wide)
        high = math.hypot(at_length(slow, case.n_prompt), wide)
        return math.exp(-low), math.exp(high)

    def uncertainty(self, case: DatasheetCase) -> float:
        """Standard deviation of the shared factors' product: small where the device has rows.

        Else that of its family of chips, or of the runtime, and the spread of what is not known.
        """
        levels = case.levels
        of_device = self.sd["device"].get(device_on(levels))
        if of_device is not None:
            return of_device
        shared_sd = self.sd["family"].get(levels["family"])
        lacking: tuple[str, ...] = ("device",)
        if shared_sd is None:
            shared_sd = self.sd["runtime"].get(levels["runtime"])
            lacking = ("architecture", "family", "device")
        if shared_sd is None:
            shared_sd = 0.0
            lacking = SHARED
        used = {name for names in FACTORS[case.law].values() for name in names}
        return math.hypot(shared_sd, *(self.spread[name] for name in lacking if name in used))

    @property
    def noise(self) -> float:
        """Standard deviation of single rates, of logarithms."""
        return self.sd["noise"]["all"]

    @property
    def noise_of_files(self) -> float:
        """By how much the errors of files on one device differ, of logarithms."""
        return self.sd["noise"].get("files", self.noise)

    @property
    def noise_of_models(self) -> float:
        """The same of files with one quantization."""
        return self.sd["noise"].get("models", self.noise_of_files)

    def deviation(self, case: DatasheetCase, condition: Condition | None = None) -> float:
        """Standard deviation of the logarithm of measured over predicted time."""
        if not self.sd:
            return 1.0
        if condition is not None:
            noise = self.noise_of_models if condition.is_of_type else self.noise_of_files
            return math.hypot(noise, condition.deviation)
        return math.hypot(self.noise, self.uncertainty(case))

    def knowledge(self, case: DatasheetCase) -> str:
        """Whether rows tell of a device like the case's: FAMILY_KNOWN or NOTHING_KNOWN."""
        if not self.sd or case.levels["family"] in self.sd["family"]:
            return FAMILY_KNOWN
        return NOTHING_KNOWN

    def ends(self, case: DatasheetCase, condition: Condition | None = None) -> list[End]:
        """The fast and the slow end of the range; with a rate of the user's own never wider."""
        ends = self._ends(case, condition)
        if condition is None:
            return ends
        pairs = zip(ends, self._ends(case, None), strict=True)
        return [
            End(min(narrow.short, end.short), min(narrow.long, end.long))
            for narrow, end in pairs
        ]

    def _ends(self, case: DatasheetCase, condition: Condition | None) -> list[End]:
        deviation = self.deviation(case, condition)
        knowledge = self.knowledge(case) if condition is None else condition.knowledge
        groups = range_groups(case, knowledge)
        short = of_narrowest(self.ranges, groups, "")
        long = of_narrowest(self.ranges, groups, LONG_ONES)
        ends = []
        scales = [
            of_narrowest(self.scale, groups, ending) if self.scale else 1.0
            for ending in ("", LONG_ONES)
        ]
        for side in ("fast", "slow"):
            short_size = scales[0] * deviation * abs(math.log(short[side]))
            long_size = scales[1] * deviation * abs(math.log(long[side]))
            if self.phase == DECODE and side == "fast":
                long_size = short_size  # a token hardly gets slower: the end must not fall
            ends.append(End(short_size, max(short_size, long_size)))
        return ends

    def unpublished(self, case: DatasheetCase) -> list[Unpublished]:
        """The factors of the case that nobody published, in the order of FACTORS."""
        by_part = list(FACTORS[case.law].values())
        levels = case.levels
        factors = []
        for name in dict.fromkeys(name for names in by_part for name in names):
            if name not in levels or name in NEVER_WIDEN or (self.sd and name in SHARED):
                continue
            if levels[name] not in self.factors[name]:
                counts = tuple(int(name in names) for names in by_part)
                factors.append(Unpublished(self.spread[name], counts))
        if case.model not in self.factors["model"]:
            factors.append(Unpublished(self.spread["model"], (1,) * len(by_part)))
        return [*factors, *case.doubts]


def of_narrowest(of_groups: Mapping[str, T], groups: Sequence[str], ending: str) -> T:
    """What the narrowest of these groups has that has any."""
    for group in (*groups, "all"):
        if group + ending in of_groups:
            return of_groups[group + ending]
    return of_groups["all"]


def products_of(quantization: str) -> str:
    """How processors multiply weights of a type."""
    if quantization in UNQUANTIZED:
        return "floats"
    return "of a codebook" if quantization.startswith(CODEBOOKS) else "integers"


def overlapping(multiplying_s: float, reading_s: float) -> tuple[float, float]:
    """The shares of both in the time of a step that does them at once."""
    slower = max(multiplying_s, reading_s)
    if slower <= 0 or math.isnan(slower):
        return multiplying_s, reading_s
    powers = [(seconds / slower) ** OVERLAP for seconds in (multiplying_s, reading_s)]
    total_s = slower * math.fsum(powers) ** (1 / OVERLAP)
    return total_s * powers[0] / math.fsum(powers), total_s * powers[1] / math.fsum(powers)


def range_groups(case: DatasheetCase, knowledge: str) -> list[str]:
    """The groups of rows that a range may be of, the narrowest first."""
    groups = [f"{case.levels['runtime']}, {knowledge}", knowledge]
    if knowledge == OWN_RATE_OF_TYPE:
        groups.append(OWN_RATE)
    return groups


def device_on(levels: Mapping[str, str]) -> str:
    """The name of a device on a runtime in `LearnedRates.sd`."""
    return f"{levels['device']} on {levels['runtime']}"


def dot(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """The exactly rounded sum of the products."""
    return math.fsum(n * s for n, s in zip(counts, seconds, strict=True))


def at_length(end: End, n_prompt: int) -> float:
    """The size of an end at a prompt length: between short and long prompts by its logarithm."""
    shortest, longest = WIDENS
    share = math.log(n_prompt / shortest) / math.log(longest / shortest)
    share = min(1.0, max(0.0, share))
    return end.short + share * (end.long - end.short)


@cache
def learned() -> dict[str, LearnedRates]:
    """What was learned by law (`DatasheetCase.law`), from models/learned.toml."""
    with data_file("learned.toml").open("rb") as file:
        return {
            law: LearnedRates(law.partition(" on ")[0], **entry)
            for law, entry in tomllib.load(file).items()
        }


def learned_for(case: DatasheetCase) -> LearnedRates:
    """What was learned for cases like this one."""
    return learned()[case.law]


class Evaluation(NamedTuple):
    """The test of predictions: rates of publishers that nothing was learned from."""

    kind: str  # "GPUs" or "processors"
    n_rows: dict[str, int]  # published rates by phase
    n_inside: dict[str, int]  # of these in the predicted range
    n_devices: int


def evaluation_of(device: DeviceSheet | None = None) -> Evaluation:
    """The test of predictions for processors, if the device is one, else for GPUs."""
    is_processor = device is not None and backend_of(device) == CPU
    laws = (DECODE_CPU, PREFILL_CPU) if is_processor else (DECODE, PREFILL)
    n_rows = {}
    n_inside = {}
    n_devices = 0
    for law in laws:
        of_law = learned()[law]
        figures = of_law.evaluation["all"]
        n_rows[of_law.phase] = round(figures["n_rows"])
        n_inside[of_law.phase] = round(figures["inside"])
        n_devices = max(n_devices, round(figures["n_devices"]))
    return Evaluation("processors" if is_processor else "GPUs", n_rows, n_inside, n_devices)


class PublishedRate(NamedTuple):
    """A rate that others measured, in tokens/s. `n_prompt` is None where it is not published."""

    phase: str
    n_prompt: int | None
    tps: float
    source: str
    backend: str
    runtime: str
    collected: str


def published_rates(device: DeviceSheet, model: Model) -> list[PublishedRate]:
    """What others measured on this device with this model and quantization, if it is clean."""
    wanted = {
        "device": device.name,
        "model": model.name,
        "quantization": model.quantization,
        "marks": "",
    }
    rates = []
    with data_file("published.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not wanted.items() <= row.items():
                continue
            rates.append(
                PublishedRate(
                    phase=row["phase"],
                    n_prompt=int(row["n_prompt"]) if row["n_prompt"] else None,
                    tps=float(row["tps"]),
                    source=row["source"],
                    backend=row["backend"],
                    runtime=runtime_of(row["source"]),
                    collected=row["collected"],
                )
            )
    return rates
