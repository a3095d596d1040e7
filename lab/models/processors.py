"""Processors by family: what memory, instructions and cores a name such as core-i7-8700 tells."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from lab.core.files import data_file

BITS_OF_CHANNEL = 64

MEMORY = re.compile(
    r"(?:\b(?P<before>\d{1,2}) ?x ?)?\b(?P<type>(?:lp)?ddr[345]x?)l?[- ]?(?P<mtps>\d{4,5})?\b"
    r"(?: ?(?:mt/s|mhz))?(?: ?x ?(?P<times>\d+(?:\.\d+)?) ?(?P<bits>bit)?)?",
    re.IGNORECASE,
)

USUAL_MTPS = {
    "ddr3": 1600,
    "ddr4": 3200,
    "ddr5": 5600,
    "lpddr3": 2133,
    "lpddr4": 3200,
    "lpddr4x": 4266,
    "lpddr5": 6400,
    "lpddr5x": 8533,
}


@dataclass(frozen=True)
class RamType:
    """Memory as people write it, such as DDR4-3200 x 2. `channels` of 64 bits; None: not said."""

    type: str
    mtps: float
    channels: float | None
    is_rate_told: bool = True

    @property
    def gbps(self) -> float:
        """Bandwidth in 10^9 bytes/s, of two channels if their number is not known."""
        return self.mtps * (self.channels or 2) * BITS_OF_CHANNEL / 8e3


@dataclass(frozen=True)
class Family:
    """A family of models/processors.toml, which explains the fields."""

    name: str
    gbps: float
    memory: str
    simd: str
    ghz: float
    cores: float
    vector_share: float
    core: str | None
    is_hybrid: bool


def memory_in(text: str) -> RamType | None:
    """The memory that a text names; None without one."""
    match = MEMORY.search(text)
    if match is None:
        return None
    kind = match["type"].lower()
    mtps = float(match["mtps"] or USUAL_MTPS.get(kind, 3200))
    channels = match["times"] or match["before"]
    n_channels = float(channels) if channels else None
    if n_channels and match["bits"]:
        n_channels /= BITS_OF_CHANNEL
    return RamType(kind, mtps, n_channels, match["mtps"] is not None)


def family_of(text: str) -> Family | None:
    """The family of processors that a text in lower case names; None if no one matches."""
    for name, facts in _families().items():
        match = re.search(facts["match"], text)
        if match:
            return _family(name, facts, match)
    return None


def operations_of(simd: str) -> float | None:
    """Operations that a core starts in a cycle with these instructions; None for unknown ones."""
    operations: float | None = _tables()["simd"].get(simd)
    return operations


def decoding_simd(simd: str) -> str:
    """The instructions of a product with a single vector, which matrix units do not help."""
    name: str = _tables()["decoding"].get(simd, simd)
    return name


def is_repacked(simd: str, quantization: str, month: str) -> bool:
    """Whether llama.cpp had rearranged weights for these instructions; "" for today's."""
    since: dict[str, str] = _tables()["repacked"].get(simd, {})
    for name, start in since.items():
        if quantization.startswith(name):
            return not month or month >= start
    return False


def core_of(family: str) -> str | None:
    """The kind of cores that a family has; None for one that no entry names."""
    for name, facts in _tables()["cores"].items():
        if re.match(facts["families"], family):
            return str(name)
    return None


def core_gbps(core: str) -> float:
    """How fast one core of this kind reads from memory, in 10^9 bytes/s."""
    gbps: float = _tables()["cores"][core]["core_gbps"]
    return gbps


def instruction_sets() -> tuple[str, ...]:
    """The names of instruction sets, the slowest first."""
    sets: dict[str, float] = _tables()["simd"]
    return tuple(sorted(sets, key=lambda name: sets[name]))


def _family(name: str, facts: dict[str, Any], match: re.Match[str]) -> Family:
    tier = match.groupdict().get("tier") or "other"
    memory = memory_in(facts.get("memory", ""))
    return Family(
        name,
        gbps=memory.gbps if memory else facts["gbps"],
        memory=facts.get("memory", f"{facts.get('gbps')} GB/s"),
        simd=facts["simd"],
        ghz=_of_tier(facts["ghz"], tier),
        cores=_of_tier(facts["cores"], tier),
        vector_share=_of_tier(facts.get("vector_share", 1.0), tier),
        core=core_of(name),
        is_hybrid=facts.get("hybrid", False),
    )


def _of_tier(value: float | dict[str, float], tier: str) -> float:
    """A figure of a family; where tiers differ, that of the tier."""
    if isinstance(value, dict):
        return value.get(tier, value["other"])
    return value


def _families() -> dict[str, Any]:
    return _tables()["families"]


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return tomllib.loads(data_file("processors.toml").read_text(encoding="utf-8"))
