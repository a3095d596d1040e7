"""The record of errors: published rates that were predicted from other publishers' rates."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from lab.core.memory import CPU
from lab.models.catalog import data_file
from lab.show.wording import percent


@dataclass(frozen=True)
class RecordedRate:
    """A published rate beside its prediction, in tokens/s. `backend` is llama.cpp's."""

    phase: str
    backend: str
    device: str
    model: str
    quantization: str
    n_prompt: str
    threads: str
    tps: float
    expected: float
    low: float
    high: float
    source: str

    @property
    def is_inside(self) -> bool:
        return self.low <= self.tps <= self.high

    @property
    def off(self) -> float:
        """Logarithm of the predicted over the published rate."""
        return math.log(self.expected / self.tps)


@cache
def recorded_rates() -> tuple[RecordedRate, ...]:
    """The rows of models/record.csv, which tests/bench/published.py writes."""
    rates = []
    with data_file("record.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            rates.append(
                RecordedRate(
                    phase=line["phase"],
                    backend=line["backend"],
                    device=line["device"],
                    model=line["model"],
                    quantization=line["quantization"],
                    n_prompt=line["n_prompt"],
                    threads=line["threads"],
                    tps=float(line["tps"]),
                    expected=float(line["expected"]),
                    low=float(line["low"]),
                    high=float(line["high"]),
                    source=line["source"],
                )
            )
    return tuple(rates)


def of_kind(phase: str, is_processor: bool) -> list[RecordedRate]:
    """The rates of a phase on processors, or on GPUs."""
    return [
        rate
        for rate in recorded_rates()
        if rate.phase == phase and (rate.backend == CPU) == is_processor
    ]


def median_error(offs: Sequence[float]) -> float:
    """The median of errors that are given as logarithms, as a share."""
    return math.expm1(statistics.median(abs(off) for off in offs))


def place_of(phase: str, is_processor: bool, offs: Sequence[float]) -> str:
    """Where errors of a user's rates lie among those of published rates, in two sentences."""
    rates = of_kind(phase, is_processor)
    kind = "processors" if is_processor else "GPUs"
    n_inside = sum(rate.is_inside for rate in rates)
    own = statistics.median(abs(off) for off in offs)
    n_further = sum(abs(rate.off) > own for rate in rates)
    return (
        f"{phase.capitalize()}: of {len(rates)} rates that others published for {kind}"
        f" {percent(n_inside / len(rates))} lay inside their ranges, off by"
        f" {percent(median_error([rate.off for rate in rates]))} at the median. Yours, off by"
        f" {percent(math.expm1(own))}, are nearer than {percent(n_further / len(rates))} of them."
    )
