"""A network between a client and its servers, and how users write one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lab.errors import LabError

MOST_S = 10.0
"""The longest round trip that is accepted."""

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BITS = {"kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
_NUMBER = r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*"


@dataclass(frozen=True)
class Link:
    """Seconds of the round trip of a small request, and bytes per second (None: unlimited)."""

    round_trip_s: float
    bytes_per_s: float | None = None

    @property
    def words(self) -> str:
        """Such as `0.3 ms, 1 Gbit/s`."""
        return f"{milliseconds(self.round_trip_s)}, {bandwidth(self.bytes_per_s)}"


def milliseconds(seconds: float) -> str:
    """Such as `0.3 ms`."""
    return f"{1e3 * seconds:.3g} ms"


def bandwidth(bytes_per_s: float | None) -> str:
    """Such as `2.5 Gbit/s`."""
    if bytes_per_s is None:
        return "any bandwidth"
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def parse_round_trip(text: str) -> float:
    """Seconds of `0.3ms`, `300us` or `0.01s`. LabError for anything else."""
    match = re.fullmatch(_NUMBER + "(s|ms|us)\\s*", text)
    seconds = float(match[1]) * _SECONDS[match[2]] if match else -1.0
    if not 0 <= seconds <= MOST_S:
        raise LabError(
            f"--latency: {text!r} is not a round trip from 0 to {MOST_S:g} s.",
            "Write the time that ping shows, with its unit: 0.3ms. Separate several with commas.",
        )
    return seconds


def parse_bandwidth(text: str) -> float:
    """Bytes per second of `1Gbit`, `2.5Gbit/s` or `100Mbit`. LabError for anything else."""
    match = re.fullmatch(_NUMBER + "([kMG]bit)(?:/s|ps)?\\s*", text)
    if not match or not float(match[1]):
        raise LabError(
            f"--bandwidth: {text!r} is not a bandwidth.",
            "Write bits per second with a unit: 1Gbit, 2.5Gbit, 100Mbit.",
        )
    return float(match[1]) * _BITS[match[2]] / 8
