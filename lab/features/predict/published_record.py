"""The record of errors: published rates that were predicted from other publishers' rates."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from lab.core.files import data_file
from lab.core.lists import grouped
from lab.core.memory import CPU
from lab.show.cells import Column
from lab.show.section import Columns, Section, tabled
from lab.show.wording import percent

PHASES = ("decode", "prefill")
KINDS = {"GPUs": False, "processors": True}
"""Words for devices, and whether they are processors."""


@dataclass(frozen=True)
class RecordedRate:
    """A measured rate beside its prediction, in tokens/s. `backend` is llama.cpp's.

    `n_prompt` and `threads` are None where they were not published.
    """

    phase: str
    backend: str
    device: str
    model: str
    quantization: str
    n_prompt: int | None
    threads: int | None
    tps: float
    expected: float
    low: float
    high: float
    source: str

    @property
    def label(self) -> str:
        """The model and its quantization."""
        return f"{self.model} {self.quantization}".strip()

    @property
    def is_inside(self) -> bool:
        return self.low <= self.tps <= self.high

    @property
    def off(self) -> float:
        """Logarithm of the predicted over the measured rate."""
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
                    n_prompt=int(line["n_prompt"]) if line["n_prompt"] else None,
                    threads=int(line["threads"]) if line["threads"] else None,
                    tps=float(line["tps"]),
                    expected=float(line["expected"]),
                    low=float(line["low"]),
                    high=float(line["high"]),
                    source=line["source"],
                )
            )
    return tuple(rates)


@dataclass(frozen=True)
class RateGroup:
    """Recorded rates of a phase: of one backend, or of all of a kind."""

    label: str
    rates: Sequence[RecordedRate]

    @property
    def inside(self) -> float:
        """The share inside the predicted ranges."""
        return sum(rate.is_inside for rate in self.rates) / len(self.rates)

    @property
    def error(self) -> float:
        return median_error([rate.off for rate in self.rates])

    @property
    def width(self) -> float:
        """How many times the lower end the upper one is, at the median."""
        return statistics.median(rate.high / rate.low for rate in self.rates)


def rate_groups() -> list[RateGroup]:
    """Each phase on GPUs and on processors, followed by its backends if there are several."""
    groups = []
    for phase in PHASES:
        for kind, is_processor in KINDS.items():
            rates = of_kind(phase, is_processor)
            groups.append(RateGroup(f"{phase}, {kind}", rates))
            by_backend = grouped(rates, lambda rate: rate.backend)
            if len(by_backend) > 1:
                for backend in sorted(by_backend):
                    groups.append(RateGroup(f"{phase}, {backend}", by_backend[backend]))
    return groups


def section() -> Section:
    """The record as a chapter of a report."""
    n_rates = len(recorded_rates())
    return Section(
        "How far off predictions of other devices are",
        name="record",
        words=[
            f"{n_rates} rates that others published, predicted from the rates of other publishers. "
            "The sliders' ranges of other devices were made in the same way, from all rates."
        ],
        **tabled(COLUMNS, rate_groups()),
    )


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


COLUMNS: Columns[RateGroup] = (
    Column("predicted", lambda group: group.label),
    Column("rates", lambda group: str(len(group.rates))),
    Column("inside\nthe range", lambda group: percent(group.inside)),
    Column("median\nerror", lambda group: percent(group.error)),
    Column("ends\napart", lambda group: f"{group.width:.1f}x"),
)
