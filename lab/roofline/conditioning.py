"""A measured rate of the user's own narrows all predictions for its device.

What is not known of a device (memory channels filled, threads, power, the build) is a factor that
all its times share. One rate tells a part of this factor: the rest of its uncertainty, and what
files on one device differ by, stay in the range. Files with the same quantization differ less.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lab.core.record import DECODE, PREFILL, Model, Settings
from lab.errors import LabError
from lab.models import own_sheet
from lab.models.devices import DeviceSheet
from lab.roofline import datasheet
from lab.roofline.datasheet import Condition, DatasheetCase, LearnedRates

N_PROMPT = {PREFILL: 512, DECODE: 64}
"""The length that a rate without one is of: llama-bench's."""

EXAMPLE = "For example: --measured llama-3.1-8b:Q4_0=12.4, or for a prompt =pp:150"


@dataclass(frozen=True)
class OwnRate:
    """A rate that the user measured on the device: tokens/s of a phase."""

    spec: str
    phase: str
    tps: float


@dataclass(frozen=True)
class ComparedRate:
    """A user's rate beside the range that was predicted without it, in tokens/s."""

    rate: OwnRate
    model: Model
    low_tps: float
    high_tps: float

    @property
    def is_inside(self) -> bool:
        return self.low_tps <= self.rate.tps <= self.high_tps


def parse_rate(text: str) -> OwnRate:
    """A rate such as llama-3.1-8b:Q4_0=12.4 (decode) or =pp:150 (prefill). LabError for others."""
    match = re.fullmatch(r"\s*(.+?)\s*=\s*(?:(pp|tg):)?\s*([0-9]+(?:\.[0-9]+)?)\s*", text)
    tps = float(match[3]) if match else 0.0
    if match is None or not 0 < tps < 1e7:
        raise LabError(f"--measured {text!r} is not MODEL=TOKENS_PER_SECOND.", EXAMPLE)
    phase = PREFILL if match[2] == "pp" else DECODE
    return OwnRate(match[1], phase, tps)


def rates_of_sheet(device: DeviceSheet) -> list[OwnRate]:
    """The rates that a datasheet of the lessons has; none of another device."""
    if not own_sheet.is_sheet(device.name):
        return []
    rates = own_sheet.read(device.name).rates(N_PROMPT[DECODE])
    return [parse_rate(text) for text in rates]


def compare(
    rates: Sequence[OwnRate],
    find: Callable[[str], Model],
    settings: Settings,
    device: DeviceSheet,
) -> list[tuple[ComparedRate, DatasheetCase]]:
    """The user's rates of a device beside their predictions. LabError without a peak."""
    compared = []
    for rate in rates:
        model = find(rate.spec)
        length = N_PROMPT[rate.phase]
        case = datasheet.case_for(model, settings, device, rate.phase, length)
        learned = datasheet.learned_for(case)
        expected_s = learned.expected_s(case)
        if expected_s is None:
            what = f"A prefill rate says nothing about {device.name}: its peak is not known."
            raise LabError(what, "Give a decode rate: --measured MODEL=TOKENS_PER_SECOND")
        fast, slow = learned.range(case)
        n_tokens = length if rate.phase == PREFILL else 1
        high = n_tokens / (fast * expected_s)
        low = n_tokens / (slow * expected_s)
        compared.append((ComparedRate(rate, model, low, high), case))
    return compared


def condition_for(
    predicted: DatasheetCase, compared: Sequence[tuple[ComparedRate, DatasheetCase]]
) -> Condition | None:
    """What the user's rates of the predicted phase say about the device; None without one."""
    measured = []
    for of_rate, case in compared:
        if case.phase == predicted.phase:
            n_tokens = case.n_prompt if case.phase == PREFILL else 1
            measured.append((case, n_tokens / of_rate.rate.tps))
    if not measured:
        return None
    return condition(datasheet.learned_for(predicted), predicted, measured)


def condition(
    learned: LearnedRates,
    predicted: DatasheetCase,
    measured: Sequence[tuple[DatasheetCase, float]],
) -> Condition:
    """The shift of the device's logarithm of time, and its standard deviation, from its rates.

    The mean of the prior (0, with the uncertainty of the device) and of the rates, each weighted
    with the inverse of its variance: files with the predicted quantization tell more.
    """
    prior = learned.uncertainty(predicted)
    precision = prior**-2
    total = 0.0
    is_of_type = False
    for case, seconds in measured:
        expected_s = learned.expected_s(case)
        assert expected_s is not None
        noise_of_file = learned.noise_of_files
        if case.quantization == predicted.quantization:
            noise_of_file = learned.noise_of_models
            is_of_type = True
        noise = math.hypot(noise_of_file, learned.wide(case) / datasheet.SURE)
        total += math.log(seconds / expected_s) / noise**2
        precision += noise**-2
    return Condition(total / precision, precision**-0.5, is_of_type)
