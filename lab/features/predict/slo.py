"""Limits for the times of a request (service level objectives), as `lab predict --slo` takes them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lab.errors import LabError


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits in seconds. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def label(self) -> str:
        """Such as "TTFT 1 s, TPOT 50 ms"; empty without limits."""
        limits = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s))
        return ", ".join(_limit(name, seconds) for name, seconds in limits if seconds is not None)


def _limit(name: str, seconds: float) -> str:
    if seconds >= 1:
        return f"{name} {seconds:g} s"
    return f"{name} {1e3 * seconds:g} ms"


def parse_slo(text: str) -> Slo:
    """The limits in `ttft=1s,tpot=50ms,e2e=10s`, or a part of it. LabError for anything else."""
    problem = LabError(
        f"The limits {text!r} cannot be read.",
        "Write them as ttft=1s,tpot=50ms,e2e=10s, each at most once.",
    )
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot|e2e)=(\d+\.?\d*|\.\d+)(ms|s)", part.strip().lower())
        if match is None or f"{match[1]}_s" in limits:
            raise problem
        seconds = float(match[2])
        if match[3] == "ms":
            seconds /= 1000
        if not 0 < seconds < float("inf"):
            raise problem
        limits[f"{match[1]}_s"] = seconds
    return Slo(**limits)
