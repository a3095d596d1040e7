"""A load on a server, as data: how requests came, for how long, and which limits an answer was to keep.

A closed loop has so many users, each of whom sends the next request when the last one has ended. An open loop sends at
intended times, whatever the server does. A load is warmed up first, then its steady window is measured; requests of
that window end under the same load, which goes on until the last of them has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lab.errors import LabError

CLOSED, POISSON, CONSTANT, REPLAY = "closed", "poisson", "constant", "replay"


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Limits that an answer is to keep (service level objectives), in seconds. None: no such limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def words(self) -> str:
        """Such as "TTFT 1 s, TPOT 50 ms"; empty without limits."""
        named = (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("E2E", self.e2e_s))
        return ", ".join(
            f"{name} {seconds:g} s" if seconds >= 1 else f"{name} {1e3 * seconds:g} ms"
            for name, seconds in named
            if seconds is not None
        )


def parse_slo(text: str) -> Slo:
    """Limits as they are written: `ttft=1s,tpot=50ms,e2e=10s`, any of them. LabError for anything else."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot|e2e)=(\d+\.?\d*|\.\d+)(ms|s)", part.strip().lower())
        seconds = float(match[2]) / (1000 if match[3] == "ms" else 1) if match else 0.0
        if match is None or not 0 < seconds < float("inf") or f"{match[1]}_s" in limits:
            raise LabError(f"The limits {text!r} are not understood.", "Write them as ttft=1s,tpot=50ms,e2e=10s.")
        limits[f"{match[1]}_s"] = seconds
    return Slo(**limits)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load that a request was a part of: one arm of a measurement, in one of its rounds."""

    arrivals: str  # closed, poisson, constant, replay
    concurrency: int | None = None  # of a closed loop: users
    rate: float | None = None  # of an open loop: requests per second, intended
    round: int  # arms are measured once in each round
    warmup_s: float
    duration_s: float  # of the steady window, which begins at warmup_s
    lengths: str  # of prompts and answers, in the user's words
    seed: int
    slo: Slo | None = None

    @property
    def words(self) -> str:
        """Such as "8 users" or "2 requests/s"."""
        if self.arrivals == CLOSED:
            return f"{self.concurrency} user{'' if self.concurrency == 1 else 's'}"
        if self.arrivals == REPLAY:
            return "replay"
        word = "request" if self.rate == 1 else "requests"
        return f"{self.rate:g} {word}/s" + (", evenly" if self.arrivals == CONSTANT else "")
