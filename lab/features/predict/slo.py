"""Limits for the times of a request (service level objectives), and the chance to keep them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import NormalDist

from lab.core.stats import Range
from lab.errors import LabError
from lab.roofline.prediction import WITHIN, Prediction


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
        return ", ".join(
            _limit(name, seconds) for name, seconds in limits if seconds is not None
        )


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


def chance(row: Prediction, slo: Slo) -> float:
    """The probability that a row keeps all limits; NaN if a range that counts is not known.

    It takes the ranges for those of logarithms of normal errors.
    """
    if row.shortage is not None:
        return 0.0
    limits = ((row.prefill_s, slo.ttft_s), (row.tpot_s, slo.tpot_s), (row.e2e_s, slo.e2e_s))
    chances = [chance_below(span, limit) for span, limit in limits if limit is not None]
    return min(chances, default=1.0)


def chance_below(span: Range, limit: float) -> float:
    """The probability that a time with this range is at most `limit`."""
    low, high = span
    if math.isnan(low):
        return math.nan
    if low >= high:
        return float(low <= limit)
    middle = math.log(low * high) / 2
    half = math.log(high / low) / 2
    deviation = half / NormalDist().inv_cdf((1 + WITHIN) / 2)
    return NormalDist(middle, deviation).cdf(math.log(limit))
