"""Devices that nobody here has: what their makers publish, in models/devices.toml."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache

from lab.errors import LabError
from lab.models.catalog import data_file

DECODE_SHARE, PREFILL_SHARE = (0.55, 0.80), (0.25, 0.70)
"""Parts of the datasheet's bandwidth, and of its FLOP/s, that llama.cpp reaches on GPUs.

Decode: seven published runs of Llama 3.2 3B Q4_K_M (geerlingguy/ai-benchmarks) reach 0.58 to 0.72.
Prefill: a rule of thumb, since published prompts differ too much; it is the least certain figure here.
"""

BASIS = (
    f"Expected: {DECODE_SHARE[0]:.0%} to {DECODE_SHARE[1]:.0%} of the datasheet's bandwidth, as in published runs, and "
    f"{PREFILL_SHARE[0]:.0%} to {PREFILL_SHARE[1]:.0%} of its peak, a rule of thumb; without a published FP16 peak no "
    "prefill."
)


@dataclass(frozen=True)
class Device:
    """A device of models/devices.toml. `tflops`: dense FP16 peak; both are the datasheet's."""

    name: str
    about: str
    gbps: float
    source: str
    tflops: float | None = None
    memory_gb: float | None = None

    @property
    def memory_bytes(self) -> float | None:
        return None if self.memory_gb is None else self.memory_gb * 1e9


@cache
def devices() -> dict[str, Device]:
    """The devices of models/devices.toml by name."""
    with data_file("devices.toml").open("rb") as file:
        return {name: Device(name=name, **facts) for name, facts in tomllib.load(file).items()}


def find_device(name: str) -> Device:
    """A device by its name. LabError with close names for an unknown one."""
    known = devices()
    device = known.get(name.lower().replace(" ", "-"))
    if device is None:
        close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
        offer = f"Did you mean {' or '.join(close)}?" if close else f"Known: all, {', '.join(known)}."
        raise LabError(f"There is no device named {name!r}.", offer)
    return device


def basis(device: Device) -> str:
    """What a prediction for a device rests on, in words."""
    peak = f" and {device.tflops:g} TFLOP/s" if device.tflops else "; no FP16 peak"
    return f"From the datasheet: {device.gbps:g} GB/s{peak} ({device.source}). {BASIS}"
