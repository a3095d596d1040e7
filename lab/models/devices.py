"""The devices of models/devices.toml: found by the names that people write, recognised by a driver's description."""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from lab.errors import LabError
from lab.models.catalog import data_file

ALL = "all"  # stands for all devices, where a kind is allowed
NOT_THE_SAME = re.compile(
    "ti|super|d|laptop|mobile|max|q|pro|ultra|ada|server|pcie|nvl|mig|xt|xtx|gre"
)
"""Words that mark a different device: the rest of a description must not contain them. (q: Max-Q.)"""

NOT_IN_NAMES = re.compile(
    "nvidia|geforce|amd|radeon|intel|arc|apple|tesla|gpu|graphics|with|in|design|generation|tm|r"
)
"""Words that people write or leave out of a device's name."""

VARIANT = re.compile(r"\d+gb|\d+core|gddr\w+")
"""Words of a name that distinguish variants with equal driver descriptions."""

SAME_MEMORY = 0.08
"""Drivers reserve some memory: the size that they report may differ from the nominal size by this share."""


PEAK_OVER_FP32 = {
    **dict.fromkeys(("pascal", "turing-gtx", "ampere", "ada", "blackwell", "rdna4", "apple5"), 4),
    **dict.fromkeys(("volta", "turing", "orin", "alchemist", "battlemage", "cdna", "cdna3"), 8),
    **dict.fromkeys(("pascal-hbm", "polaris", "vega", "rdna1", "rdna2", "rdna3", "rdna3.5"), 2),
    **{"hopper": 15, "ampere-hbm": 16, "apple": 1},
}
"""The highest arithmetic rate that an architecture offers to llama.cpp (FP16, or INT8 by DP4A) over its FP32 rate."""


@dataclass(frozen=True)
class Device:
    """A device of models/devices.toml, which explains the fields. `tflops`: dense FP16 peak, as published."""

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

    @property
    def words(self) -> list[str]:
        """The words of a driver's description; for Apple's chips also the maker, because others share their names."""
        return [*self.name.split("-"), *(["apple"] if self.kind == "apple" else [])]

    @property
    def memory_bytes(self) -> float | None:
        return None if self.memory_gb is None else self.memory_gb * 1e9

    @property
    def peak_tflops(self) -> float | None:
        """The published peak, else the one that follows from the architecture and its FP32 rate."""
        factor = PEAK_OVER_FP32.get(self.architecture or "")
        return self.tflops or (self.fp32 * factor if self.fp32 and factor else None)


@cache
def devices() -> dict[str, Device]:
    """The devices of models/devices.toml by name. LabError for an invalid entry."""
    with data_file("devices.toml").open("rb") as file:
        try:
            entries = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise LabError(
                f"models/devices.toml is not TOML: {error}.", "Correct that line."
            ) from error
    return {
        name: from_entry(kind, name, facts)
        for kind in entries
        for name, facts in entries[kind].items()
    }


def from_entry(kind: str, name: str, facts: Any) -> Device:
    """The device of an entry. LabError for fields that are missing, unknown or not numbers."""
    try:
        rest = {**facts, "aliases": tuple(facts.get("aliases", ()))}
        if "mtps" in rest:
            rest["gbps"] = rest.pop("bus_bits") * rest.pop("mtps") / 8e3
        return Device(kind=kind, name=name, **rest)
    except (TypeError, KeyError, AttributeError) as error:
        hint = "The head of that file explains the fields."
        raise LabError(
            f"[{kind}.{name}] of models/devices.toml cannot be used: {error}.", hint
        ) from error


def kinds() -> tuple[str, ...]:
    """The kinds of devices, in the order of models/devices.toml."""
    return tuple(dict.fromkeys(device.kind for device in devices().values()))


def names_of(group: str) -> tuple[str, ...]:
    """The names of all devices for "all", those of a kind for its name, those of a list; empty for any other word."""
    if "," in group:
        return tuple(
            dict.fromkeys(find_device(name).name for name in group.split(",") if name.strip())
        )
    return tuple(
        name for name, device in devices().items() if _as_name(group) in (ALL, device.kind)
    )


def find_device(name: str) -> Device:
    """A device by its name. LabError with close names for an unknown one, and for the name of a kind."""
    if device := called(name):
        return device
    if members := names_of(name):
        raise LabError(
            f"{name!r} is a group of {len(members)} devices.",
            f"Name one: {', '.join(members[:3])}, ...",
        )
    wanted = _as_name(name)
    choices = [*devices(), *kinds()]
    close = [choice for choice in choices if wanted and wanted in choice]
    close.sort(key=lambda choice: (not choice.startswith(wanted), len(choice)))
    close = close or difflib.get_close_matches(wanted, choices, n=3, cutoff=0.5)
    hint = f"lab predict --all shows all names, and lab predict --device KIND those of a kind: {', '.join(kinds())}."
    if close:
        hint = f"Did you mean {' or '.join(close[:3])}?"
    raise LabError(f"There is no device named {name!r}.", hint)


def _as_name(words: str) -> str:
    return words.strip().lower().replace(" ", "-")


def called(words: str) -> Device | None:
    """The device with this name or alias, whatever its spaces, dashes and maker: "NVIDIA GeForce RTX4090"."""
    return _by_key().get(_key(words))


@cache
def _by_key() -> dict[str, Device]:
    return {
        _key(name): device
        for device in devices().values()
        for name in (device.name, *device.aliases)
    }


def _key(words: str) -> str:
    parts = re.findall(r"[a-z0-9]+", words.lower())
    return "".join(
        "laptop" if part == "mobile" else part for part in parts if not NOT_IN_NAMES.fullmatch(part)
    )


def recognise(description: str, memory_bytes: int | None = None) -> Device | None:
    """The device with this driver description and memory; None if none fits for sure."""
    words = set(re.findall(r"[a-z0-9]+", description.lower()))
    fitting: dict[frozenset[str], list[Device]] = {}
    for device in devices().values():
        parts = frozenset(part for part in device.words if not VARIANT.fullmatch(part))
        if parts <= words and not any(NOT_THE_SAME.fullmatch(word) for word in words - parts):
            fitting.setdefault(parts, []).append(device)
    alike = fitting[max(fitting, key=len)] if fitting else []
    variants = {part for device in alike for part in device.words if VARIANT.fullmatch(part)}
    if variants:
        if not all(variant.endswith("gb") for variant in variants):
            return None
        sizes = [float(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
        sizes = sizes or ([] if memory_bytes is None else [memory_bytes / 2**30])
        # Apple's driver reports a part of the memory, so a size tells nothing there.
        known = [
            (device, device.memory_gb)
            for device in alike
            if device.kind != "apple" and device.memory_gb
        ]
        alike = [
            device
            for device, gb in known
            if any(abs(size - gb) <= SAME_MEMORY * gb for size in sizes)
        ]
    return alike[0] if len(alike) == 1 else None
