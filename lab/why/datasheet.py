"""Devices by their published figures, in models/devices.toml, and measurements on such devices.

Measurements replace the assumptions from the datasheet. Runs with ceilings are used like those of this machine
(learning.py). Runs alone give the share of the datasheet's bandwidth and peak that they reached. Ceilings alone give
the least time of a step's kernels.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from lab.core import cost, phases
from lab.core.record import DECODE, PREFILL, Ceilings, Model, Record, Settings
from lab.core.record import Device as Described
from lab.errors import LabError
from lab.models.catalog import data_file
from lab.why import learning, probing, step_kernels, where
from lab.why.learning import DEVIATIONS, INSIDE, MODEL, PRIOR, SESSION, Learned
from lab.why.where import Where

ALL = "all"
"""Stands for all devices, where a kind is allowed."""

NOT_THE_SAME = re.compile("ti|super|d|laptop|mobile|max|q|pro|ultra|ada|server|pcie|nvl|mig|xt|xtx|gre")
"""Words that mark a different device: the rest of a description must not contain them. (q: Max-Q.)"""

NOT_IN_NAMES = re.compile("nvidia|geforce|amd|radeon|intel|arc|apple|tesla|gpu|graphics|with|in|design|generation|tm|r")
"""Words that people write or leave out of a device's name."""

KINDS_CALLED = {"macbook": "apple", "macbook-pro": "apple", "macbook-air": "apple", "mac": "apple"}
"""What people call devices of a kind."""

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
            raise LabError(f"models/devices.toml is not TOML: {error}.", "Correct that line.") from error
    return {name: from_entry(kind, name, facts) for kind in entries for name, facts in entries[kind].items()}


def from_entry(kind: str, name: str, facts: Any) -> Device:
    """The device of an entry. LabError for fields that are missing, unknown, not numbers, or contradictory."""
    try:
        if not isinstance(facts, dict):
            raise TypeError(f"its heading must be [KIND.NAME], not [{kind}]")
        rest = dict(facts)
        bus_bits, mtps = rest.pop("bus_bits", None), rest.pop("mtps", None)
        if (bus_bits is None) != (mtps is None) or (bus_bits is None) != ("gbps" in rest):
            raise TypeError("it needs either gbps, or bus_bits and mtps")
        if bus_bits is not None:
            rest["gbps"] = bus_bits * mtps / 8e3
        for field in ("gbps", "tflops", "memory_gb", "fp32", "gpu_cores"):
            if field in rest and not rest[field] > 0:
                raise TypeError(f"{field} must be above 0")
        rest["aliases"] = tuple(rest.get("aliases", ()))
        return Device(kind=kind, name=name, **rest)
    except TypeError as error:
        hint = "The head of that file explains the fields."
        raise LabError(f"[{kind}.{name}] of models/devices.toml cannot be used: {error}.", hint) from error


def kinds() -> tuple[str, ...]:
    """The kinds of devices, in the order of models/devices.toml."""
    return tuple(dict.fromkeys(device.kind for device in devices().values()))


def names_of(group: str) -> tuple[str, ...]:
    """The names of all devices for "all", those of a kind for its name, those of a list; empty for any other word."""
    if "," in group:
        return tuple(dict.fromkeys(find_device(name).name for name in group.split(",") if name.strip()))
    wanted = KINDS_CALLED.get(_as_name(group), _as_name(group))
    return tuple(name for name, device in devices().items() if wanted in (ALL, device.kind))


def find_device(name: str) -> Device:
    """A device by its name. LabError with close names for an unknown one, and for the name of a kind."""
    wanted, known = _as_name(name), devices()
    if device := called(name):
        return device
    if members := names_of(wanted):
        raise LabError(f"{name!r} is a group of {len(members)} devices.", f"Name one: {', '.join(members[:3])}, ...")
    choices = [*known, *kinds()]
    close = [choice for choice in choices if wanted and wanted in choice]
    close.sort(key=lambda choice: (not choice.startswith(wanted), len(choice)))
    close = close or difflib.get_close_matches(wanted, choices, n=3, cutoff=0.5)
    raise LabError(
        f"There is no device named {name!r}.",
        f"Did you mean {' or '.join(close[:3])}?"
        if close
        else f"lab predict --all shows all names, and lab predict --device KIND those of a kind: {', '.join(kinds())}.",
    )


def _as_name(words: str) -> str:
    return words.strip().lower().replace(" ", "-")


def called(words: str) -> Device | None:
    """The device with this name or alias, whatever its spaces, dashes and maker: "NVIDIA GeForce RTX4090"."""
    return _by_key().get(_key(words))


@cache
def _by_key() -> dict[str, Device]:
    return {_key(name): device for device in devices().values() for name in (device.name, *device.aliases)}


def _key(words: str) -> str:
    parts = re.findall(r"[a-z0-9]+", words.lower())
    return "".join("laptop" if part == "mobile" else part for part in parts if not NOT_IN_NAMES.fullmatch(part))


def recognise(description: str, memory_bytes: int | None = None) -> Device | None:
    """The device with this driver description and memory; None if none fits for sure."""
    words = set(re.findall(r"[a-z0-9]+", description.lower()))
    fitting: dict[frozenset[str], list[Device]] = {}
    for device in devices().values():
        parts = frozenset(part for part in _words(device) if not VARIANT.fullmatch(part))
        if parts <= words and not any(NOT_THE_SAME.fullmatch(word) for word in words - parts):
            fitting.setdefault(parts, []).append(device)
    alike = fitting[max(fitting, key=len)] if fitting else []
    variants = {part for device in alike for part in _words(device) if VARIANT.fullmatch(part)}
    if variants:
        if not all(variant.endswith("gb") for variant in variants):
            return None
        sizes = [float(word[:-2]) for word in words if re.fullmatch(r"\d+gb", word)]
        sizes = sizes or ([] if memory_bytes is None else [memory_bytes / 2**30])
        alike = [device for device in alike if _has_memory(device, sizes)]
    return alike[0] if len(alike) == 1 else None


def _words(device: Device) -> Sequence[str]:
    """The words of a driver's description; for Apple's chips also the maker, because others share their names."""
    return [*device.name.split("-"), *(["apple"] if device.kind == "apple" else [])]


def _has_memory(device: Device, sizes: Sequence[float]) -> bool:
    """Whether a device has one of these sizes in GB. Apple's driver reports a part of the memory: never for Apple."""
    nominal = None if device.kind == "apple" else device.memory_gb
    return nominal is not None and any(abs(size - nominal) <= SAME_MEMORY * nominal for size in sizes)


def basis(device: Device) -> str:
    """The figures of a device with their source, in a sentence."""
    peak = f" and {device.peak_tflops:g} TFLOP/s" if device.peak_tflops else "; no known peak"
    peak += "" if device.tflops or not device.peak_tflops else f" ({device.architecture}: from its FP32 peak)"
    checked = f"checked: {device.checked}" if device.checked else "unchecked"
    return f"From the datasheet: {device.gbps:g} GB/s{peak} ({device.source}; {checked})."


KERNEL_SHARE = 0.78
"""The smallest share of a step's time that kernels at their ceilings took on the measured CPUs."""

CEILINGS_AND_RUNS, RUNS, CEILINGS = "its ceilings and runs", "its runs", "its ceilings"
Shares = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Own:
    """The measurements of a device; `settings` are those to predict with."""

    settings: Settings
    ceilings: Ceilings | None = None
    learned: Learned | None = None
    shares: Shares | None = None
    n_runs: int = 0

    @property
    def rests_on(self) -> str:
        """What was measured, in words."""
        return CEILINGS_AND_RUNS if self.learned else RUNS if self.shares else CEILINGS


def find(
    device: Device, records: Sequence[Record], known: Sequence[Ceilings], model: Model, settings: Settings
) -> Own | None:
    """The measurements of a device that are usable for a model; None if there are none.

    Only runs with all layers on one device count.
    """
    own = [record for record in records if is_on(record, device)]
    chosen = dataclasses.replace(settings, n_gpu_layers=(model.n_layer or 0) + 1, rpc=None, prefill_wait=None)
    if own:  # threads and other settings as in its runs
        kept = ("n_ubatch", "n_batch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "prefill_wait")
        chosen = dataclasses.replace(own[-1].settings, **{name: getattr(chosen, name) for name in kept})
    for place in _places(device, own, known):
        ceilings = probing.known(known, place)
        if ceilings is None or not _answers(ceilings, model, chosen):
            continue
        try:
            learned = learning.learn(own, ceilings, "all")
        except LabError:
            if not own:
                return Own(chosen, ceilings)
            continue
        return Own(chosen, ceilings, learned, n_runs=learned.n_runs)
    shares = shares_of(device, own, model)
    return Own(chosen, shares=shares, n_runs=len(own)) if shares else None


def limits(
    model: Model, settings: Settings, device: Device, n_prompt: int, n_gen: int
) -> tuple[float | None, float] | None:
    """Seconds of prefill (None without a peak) and of a token from the datasheet alone; None for an unknown model."""
    step = cost.step(model, n_prompt, 0, 1, settings.type_k, settings.type_v)
    token = cost.step(model, 1, n_prompt + max(0, n_gen - 2) // 2, 1, settings.type_k, settings.type_v)
    if step is None or token is None:
        return None
    weights_s = token.weight_bytes * -(-n_prompt // settings.n_ubatch) / device.gbps / 1e9
    peak = device.peak_tflops
    prefill_s = None if peak is None else max(step.flops / peak / 1e12, weights_s)
    return prefill_s, token.n_bytes / device.gbps / 1e9


def shares_of(device: Device, own: Sequence[Record], model: Model) -> Shares | None:
    """The shares of the datasheet's figures that runs reached, widened by the spread between sessions and models.

    A phase without runs has the assumed shares. None without runs.
    """
    by_phase: dict[str, dict[object, list[float]]] = {PREFILL: {}, DECODE: {}}
    for record in own:
        for phase, n_prompt, share in _reached(record, device):
            key = record.session, record.model.name, record.model.quantization, n_prompt
            by_phase[phase].setdefault(key, []).append(share)
    if not by_phase[DECODE]:
        return None
    ways = [INSIDE, SESSION] + ([] if any(record.model.name == model.name for record in own) else [MODEL])
    shares: Shares = {}
    for phase, groups in by_phase.items():
        medians = [statistics.median(group) for group in groups.values()]
        if medians:
            wide = math.exp(DEVIATIONS * math.sqrt(sum(PRIOR[way][phase] ** 2 for way in ways)))
            shares[phase] = min(medians) / wide, min(1.0, max(medians) * wide)
    return shares


def _reached(record: Record, device: Device) -> Iterator[tuple[str, int, float]]:
    """For each phase of a run: the least time from the datasheet over the measured one."""
    for run in phases.by_length(record.run):
        least = limits(record.model, record.settings, device, run.n_prompt, run.n_gen)
        if least is None:
            continue
        measured = phases.prefill_ns(run), phases.decode_compute_mean_ns(run)
        for phase, least_s, ns in zip((PREFILL, DECODE), least, measured, strict=True):
            if least_s and ns and 0 < 1e9 * least_s <= ns:
                yield phase, run.n_prompt, 1e9 * least_s / ns


def is_on(record: Record, device: Device) -> bool:
    """Whether a successful run had all its layers on this device."""
    run = record.run
    if not run.is_timed or run.lever is not None or record.settings.n_gpu_layers == 0:
        return False
    names = where.of_record(record).devices
    return len(names) == 1 and _recognised(where.device(record.machine, names[0])) == device


@cache
def _recognised(described: Described | None) -> Device | None:
    """The device of the datasheets that a machine's device is."""
    return None if described is None else recognise(described.description, described.memory_bytes)


def _places(device: Device, own: Sequence[Record], known: Sequence[Ceilings]) -> list[Where]:
    """Where the device was measured: first the places of its runs, the latest first."""
    places = [where.of_record(record) for record in reversed(own)]
    for ceilings in reversed(known):
        name = where.measured_on(ceilings)
        if _recognised(where.device(ceilings.machine, name)) == device:
            places.append(Where(ceilings.machine, (name,)))
    unique: list[Where] = []
    for place in places:
        if place not in unique:
            unique.append(place)
    return unique


def _answers(ceilings: Ceilings, model: Model, settings: Settings) -> bool:
    """Whether the kernels of the model were probed."""
    try:
        step_kernels.total(model, settings, ceilings, settings.n_ubatch, 0, 1)
    except LabError:
        return False
    return True
