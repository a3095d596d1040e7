"""The devices of models/devices.toml.

They are found by the names that people write, and recognised by a driver's description.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lab.core.files import data_file
from lab.errors import LabError
from lab.models import processors

LAPTOP = "laptop"
OF_PROCESSORS = "laptop", "desktop", "cpu"  # kinds whose devices are processors
USUAL_SIMD = "avx2"
ALL = "all"  # stands for all devices, where a kind is allowed
OTHER_DEVICE = re.compile(
    "ti|super|d|laptop|mobile|max|q|pro|ultra|ada|server|pcie|nvl|mig|xt|xtx|gre"
)
"""Words that mark a different device: the rest of a description must not contain them.

q is from Max-Q.
"""

NOT_IN_NAMES = re.compile(
    "nvidia|geforce|amd|radeon|intel|arc|apple|tesla|gpu|graphics|with|in|design|generation|tm|r"
)
"""Words that people write or leave out of a device's name."""

VARIANT = re.compile(r"\d+gb|\d+core|gddr\w+")
"""Words of a name that distinguish variants with equal driver descriptions."""

MEMORY_SIZE = re.compile(r"\d+gb")
SAME_MEMORY = 0.08
"""Drivers reserve some memory: their size may differ from the nominal one by this share."""

READ_SHARE = 0.7
"""The share of a memory's bandwidth that all cores of a processor together read."""

PEAK_OVER_FP32 = {
    "pascal": 4,
    "turing-gtx": 4,
    "ampere": 4,
    "ada": 4,
    "blackwell": 4,
    "rdna4": 4,
    "apple5": 4,
    "volta": 8,
    "turing": 8,
    "orin": 8,
    "alchemist": 8,
    "battlemage": 8,
    "cdna": 8,
    "cdna3": 8,
    "pascal-hbm": 2,
    "polaris": 2,
    "vega": 2,
    "rdna1": 2,
    "rdna2": 2,
    "rdna3": 2,
    "rdna3.5": 2,
    "hopper": 15,
    "ampere-hbm": 16,
    "apple": 1,
    "maxwell": 1,
    "kepler": 1,
    "adreno": 2,
    "gen9": 2,
    "xe-lp": 4,
}
"""The highest arithmetic rate that an architecture offers to llama.cpp over its FP32 rate.

It is that of FP16, or of INT8 by DP4A.
"""


@dataclass(frozen=True)
class Assumption:
    """A fact of a device that nobody said: what --device takes for it, and what was assumed.

    `bandwidth` and `arithmetic`: standard deviations of their logarithms that follow from it.
    """

    field: str
    text: str
    bandwidth: float = 0.0
    arithmetic: float = 0.0

    @property
    def size(self) -> float:
        return max(self.bandwidth, self.arithmetic)


@dataclass(frozen=True)
class DeviceSheet:
    """A device of models/devices.toml, which explains the fields, or one described in words.

    `tflops` is the dense FP16 peak, as published. `backend`: None is the usual one of llama.cpp.
    """

    kind: str
    name: str
    about: str
    gbps: float
    source: str
    tflops: float | None = None
    memory_gb: float | None = None
    checked: str | None = None
    architecture: str | None = None
    fp32: float | None = None
    gpu_cores: int | None = None
    aliases: tuple[str, ...] = ()
    ordinary: bool = False
    simd: str | None = None
    ghz: float | None = None
    cores: float | None = None
    vector_share: float = 1.0
    core: str | None = None
    backend: str | None = None
    assumed: tuple[Assumption, ...] = ()

    @property
    def description_words(self) -> list[str]:
        """The words of a driver's description, in lower case.

        For Apple's chips also the maker, because devices of other makers share their names.
        """
        name_words = self.name.split("-")
        if self.kind == "apple":
            name_words.append("apple")
        return name_words

    @property
    def chip(self) -> str:
        """The name without the size of the memory and the like."""
        return chip_of(self.name)

    @property
    def memory_bytes(self) -> float | None:
        return None if self.memory_gb is None else self.memory_gb * 1e9

    @property
    def reading_slowdown(self) -> float:
        """By how much the cores that are used read slower than all together; 1 for enough cores."""
        if self.core is None or not self.cores:
            return 1.0
        of_cores = self.cores * processors.core_gbps(self.core)
        return max(1.0, READ_SHARE * self.gbps / of_cores)

    @property
    def peak_tflops(self) -> float | None:
        """The published peak, else the one that follows from the architecture and its FP32 rate.

        Of a processor that of its cores.
        """
        if self.tflops:
            return self.tflops
        if self.simd and self.cores and self.ghz:
            operations = processors.operations_of(self.simd) or 0
            return self.cores * self.ghz * operations * self.vector_share / 1e3
        factor = PEAK_OVER_FP32.get(self.architecture or "")
        if self.fp32 is None or factor is None:
            return None
        return self.fp32 * factor

    @property
    def token_tflops(self) -> float | None:
        """The peak of a token's step: of a processor with the instructions that it decodes with."""
        if self.simd is None:
            return self.peak_tflops
        return replace(self, simd=processors.decoding_simd(self.simd)).peak_tflops


UNKNOWN_CORES = Assumption("cores=", "6 cores with AVX2", bandwidth=0.1, arithmetic=0.4)


@cache
def chip_of(name: str) -> str:
    """The name of a device without what only distinguishes variants: a100-80gb is an a100."""
    return "-".join(part for part in name.split("-") if not VARIANT.fullmatch(part))


@cache
def devices() -> dict[str, DeviceSheet]:
    """The devices of models/devices.toml by name. LabError for an invalid entry."""
    with data_file("devices.toml").open("rb") as file:
        try:
            entries = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise LabError(
                f"models/devices.toml is not TOML: {error}.", "Correct that line."
            ) from error
    by_name = {}
    for kind, of_kind in entries.items():
        for name, facts in of_kind.items():
            by_name[name] = from_entry(kind, name, facts)
    return by_name


def from_entry(kind: str, name: str, facts: Any) -> DeviceSheet:
    """The device of an entry. LabError for fields that are missing, unknown or not numbers."""
    try:
        fields = {**facts, "aliases": tuple(facts.get("aliases", ()))}
        if "mtps" in fields:
            fields["gbps"] = fields.pop("bus_bits") * fields.pop("mtps") / 8e3
        device = DeviceSheet(kind=kind, name=name, **fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise LabError(
            f"[{kind}.{name}] of models/devices.toml cannot be used: {error}.",
            "The head of that file explains the fields.",
        ) from error
    has_peak = device.architecture or device.tflops
    if kind in OF_PROCESSORS or not has_peak:
        return with_cores(device)
    return device


def with_cores(device: DeviceSheet) -> DeviceSheet:
    """A processor with the instructions, clock and cores of its family, where it has none."""
    if device.simd:
        return device
    family = processors.family_of(" ".join(alphanumeric_words(device.name)))
    if family is None:
        return replace(device, simd=USUAL_SIMD, ghz=3.6, cores=6.0, assumed=(UNKNOWN_CORES,))
    return replace(
        device,
        simd=family.simd,
        ghz=family.ghz,
        cores=family.cores,
        vector_share=family.vector_share,
        core=family.core,
    )


def ordinary() -> tuple[str, ...]:
    """The names of devices that a ranking shows, in its order: marked `ordinary` in the file."""
    return tuple(name for name, device in devices().items() if device.ordinary)


def kinds() -> tuple[str, ...]:
    """The kinds of devices, in the order of models/devices.toml."""
    return tuple(dict.fromkeys(device.kind for device in devices().values()))


def names_of(group: str) -> tuple[str, ...]:
    """The names of all devices for "all", and those of a kind for its name; else empty.

    Cards of laptops are laptops too.
    """
    key = as_name(group)
    return tuple(name for name, device in devices().items() if key in groups_of(device))


def groups_of(device: DeviceSheet) -> tuple[str, ...]:
    """The names that stand for this device and others."""
    if device.name.endswith(f"-{LAPTOP}"):
        return ALL, device.kind, LAPTOP
    return ALL, device.kind


def find_device(name: str) -> DeviceSheet:
    """A device by its name. LabError with close names for an unknown one, and for a kind's name."""
    device = called(name)
    if device is not None:
        return device
    members = names_of(name)
    if members:
        raise LabError(
            f"{name!r} is a group of {len(members)} devices.",
            f"Name one: {', '.join(members[:3])}, ...",
        )
    hint = (
        "lab predict --all shows all names, and lab predict --device KIND those of a kind:"
        f" {', '.join(kinds())}."
    )
    close = close_names(as_name(name))
    if close:
        hint = f"Did you mean {' or '.join(close[:3])}?"
    raise LabError(f"There is no device named {name!r}.", hint)


def close_names(name: str) -> list[str]:
    """Names of devices and kinds that contain this one, the shortest first, or look like it."""
    choices = [*devices(), *kinds()]
    containing = [choice for choice in choices if name and name in choice]
    if containing:
        return sorted(
            containing, key=lambda choice: (not choice.startswith(name), len(choice))
        )
    return difflib.get_close_matches(name, choices, n=3, cutoff=0.5)


def as_name(text: str) -> str:
    return text.strip().lower().replace(" ", "-")


def called(text: str) -> DeviceSheet | None:
    """The device with this name or alias, whatever its spaces, dashes and maker.

    "NVIDIA GeForce RTX4090" is rtx-4090.
    """
    return by_key().get(key_of(text))


@cache
def by_key() -> dict[str, DeviceSheet]:
    """The devices by the keys of all their names."""
    keys = {}
    for device in devices().values():
        for name in (device.name, *device.aliases):
            keys[key_of(name)] = device
    return keys


def key_of(name: str) -> str:
    """What two ways to write a name have in common."""
    parts = []
    for part in alphanumeric_words(name):
        if part == "mobile":
            part = "laptop"
        if not NOT_IN_NAMES.fullmatch(part):
            parts.append(part)
    return "".join(parts)


def alphanumeric_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def recognise(description: str, memory_bytes: int | None = None) -> DeviceSheet | None:
    """The device with this driver description and memory; None if none fits for sure."""
    words_of_driver = set(alphanumeric_words(description))
    candidates = described_as(words_of_driver)
    variants = set[str]()
    for device in candidates:
        variants.update(filter(VARIANT.fullmatch, device.description_words))
    if variants:
        if not all(variant.endswith("gb") for variant in variants):
            return None
        candidates = with_memory(candidates, sizes_in_gb(words_of_driver, memory_bytes))
    return candidates[0] if len(candidates) == 1 else None


def described_as(words_of_driver: set[str]) -> list[DeviceSheet]:
    """The devices whose names, but for their variants, are the most specific in a description."""
    by_name: dict[frozenset[str], list[DeviceSheet]] = {}
    for device in devices().values():
        name = frozenset(
            part for part in device.description_words if not VARIANT.fullmatch(part)
        )
        remaining = words_of_driver - name
        if name <= words_of_driver and not any(map(OTHER_DEVICE.fullmatch, remaining)):
            by_name.setdefault(name, []).append(device)
    if not by_name:
        return []
    return by_name[max(by_name, key=len)]


def sizes_in_gb(words_of_driver: set[str], memory_bytes: int | None) -> list[float]:
    """The memory that a description names, else the memory that the driver reports."""
    named = [
        float(word.removesuffix("gb"))
        for word in words_of_driver
        if MEMORY_SIZE.fullmatch(word)
    ]
    if named or memory_bytes is None:
        return named
    return [memory_bytes / 2**30]


def with_memory(
    candidates: Sequence[DeviceSheet], sizes_gb: Sequence[float]
) -> list[DeviceSheet]:
    """The devices with about this memory; no chip of Apple, whose driver reports a part of it."""
    fitting = []
    for device in candidates:
        nominal = device.memory_gb
        if device.kind == "apple" or not nominal:
            continue
        if any(abs(size - nominal) <= SAME_MEMORY * nominal for size in sizes_gb):
            fitting.append(device)
    return fitting
