"""Which device suits a request? The same request on many devices: whether it fits, how long it takes, what it costs.

A candidate is one model on one device. Where this machine has measured the request, its medians count; every other time
is a prediction (prediction.py) with a 90 % range. Several users decode together in one step, which reads the weights
once and each user's cache: its time is that of a single user's step times the ratio of their predicted times (by steps
where the kernels were measured, elsewhere by the law of published rates). Where users send requests at random times, a
simulation (serving.py) says how many devices they need.
"""

from __future__ import annotations

import csv
import dataclasses
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from lab.analysis import table
from lab.core import cost
from lab.core.lists import grouped
from lab.core.record import DECODE, Ceilings, Model, Record, Settings
from lab.core.request import Slo
from lab.errors import LabError
from lab.models import catalog, shapes
from lab.runner import machine
from lab.runner.cases import Plan
from lab.runner.plan_needs import memory_for
from lab.why import datasheet, learning, prediction, probing, published, serving, where
from lab.why.datasheet import Device, Own
from lab.why.learning import Learned
from lab.why.prediction import Prediction
from lab.why.serving import Demand, Law, Need
from lab.why.step_prediction import StepPrediction

HERE = "this machine"
MEASURED, PREDICTED = "measured", "predicted"
NEAR = 0.05
"""Runs whose prompt length differs by at most this share of the wanted one count as the same request."""

MOST_SLOTS = 256
"""The most answers that a device decodes together where its memory would hold more."""

WITHIN = 0.90
"""The share of requests that a range is to hold."""

Span = tuple[float, float]
"""The ends of a range."""

Kept = tuple[list[Record], list[Ceilings]]
"""What was measured: runs, and ceilings."""


@dataclass(frozen=True)
class Price:
    """What a device costs, and its power in watts where that is known."""

    price: float
    watts: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A model on a device under a load: ranges of TTFT and TPOT in seconds (NaN: not known), the memory in bytes.

    `problem` says why it cannot run there. `chance`: the probability that it keeps the limits, where some were given.
    """

    name: str
    kind: str
    model: Model
    n_prompt: int
    n_gen: int
    users: int
    ttft_s: Span
    tpot_s: Span
    needed_bytes: int
    device: Device | None = None
    memory_bytes: float | None = None
    problem: str = ""
    doubts: tuple[str, ...] = ()
    rests_on: str | None = None  # what was measured on this device of the datasheets
    chance: float | None = None
    price: Price | None = None
    demand: Demand | None = None  # of users at random times; then TTFT and TPOT are those of one request alone
    n_slots: int | None = None  # answers that its memory holds together, where there is a demand
    needs: tuple[Need | None, Need | None] | None = None  # at both ends of the ranges; in it None: no number suffices

    @property
    def e2e_s(self) -> Span:
        """Seconds of the whole request."""
        low, high = (a + (self.n_gen - 1) * b for a, b in zip(self.ttft_s, self.tpot_s, strict=True))
        return low, high

    @property
    def tps(self) -> Span:
        """Tokens per second of each user."""
        return 1 / self.tpot_s[1], 1 / self.tpot_s[0]

    def joules_per_token(self, watts: float | None) -> Span | None:
        """Energy of a decoded token at the device's power, shared by all users; None where no power is known."""
        power = self.price.watts if self.price and self.price.watts else watts
        return None if power is None else (power * self.tpot_s[0] / self.users, power * self.tpot_s[1] / self.users)


def board(
    models: Sequence[str],
    n_prompt: int,
    n_gen: int,
    *,
    devices: Sequence[str] = (),
    users: int = 1,
    every_s: float | None = None,
    slo: Slo | None = None,
    prices: Mapping[str, Price] | None = None,
    results: str | Path = "results",
    **settings: Any,
) -> list[Candidate]:
    """Every model on every device (all known ones where none is named) and on this machine: what fits comes first, by
    the time of the whole request.

        lab.board(["llama-3.1-8b"], 8000, 300, devices=["rtx-4090", "laptop"])[0].e2e_s

    `users` answers are decoded together. With `every_s` each user instead sends a request every so many seconds, at
    random, and `needs` of a candidate says how many such devices keep the limits `slo`.
    `models` are names of the catalog with their quantization, such as "llama-3.1-8b:Q4_K_M". LabError for an unknown
    model or device.
    """
    demand = Demand(users, every_s, n_prompt, n_gen, slo) if every_s else None
    names = [name for group in devices for name in datasheet.names_of(group) or [datasheet.find_device(group).name]]
    kept, found = prediction.kept(Path(results)), list[Candidate]()
    for text in models:
        plan = prediction.plan_for(text, settings)
        found += _on_devices(plan.model, plan.settings, n_prompt, n_gen, demand or users, names, kept)
        if not devices:
            found += _here(plan, n_prompt, n_gen, demand or users, kept)
    rated = [dataclasses.replace(one, chance=chance(one, slo) if slo and not demand else None) for one in found]
    priced = [dataclasses.replace(one, price=(prices or {}).get(one.name)) for one in rated]
    return sorted(priced, key=_order)


def _order(one: Candidate) -> tuple[bool, float, float]:
    middle = math.sqrt(one.e2e_s[0] * one.e2e_s[1])
    most = one.needs and one.needs[1]
    n_devices = most.n_devices if most else math.inf if one.demand else 1
    return bool(one.problem), n_devices, math.inf if middle != middle else middle


def _on_devices(
    model: Model, settings: Settings, n_prompt: int, n_gen: int, users: int | Demand, names: Sequence[str], kept: Kept
) -> list[Candidate]:
    found = []
    for device, row in prediction.on_devices(model, settings, n_prompt, n_gen, names, *kept):
        own = datasheet.find(device, *kept, model, settings) if row.rests_on else None
        found.append(_on_device(model, settings, device, row, users, own))
    return found


def _on_device(
    model: Model, settings: Settings, device: Device, row: Prediction, asked: int | Demand, own: Own | None = None
) -> Candidate:
    users = 1 if isinstance(asked, Demand) else asked
    needed = prediction.memory_bytes(model, settings, row.n_prompt + row.n_gen, users)
    problem = row.misfit or ""
    if not problem and device.memory_bytes is not None and needed > device.memory_bytes:
        problem = f"needs {needed / 1e9:,.1f} GB of {device.memory_bytes / 1e9:,.1f} for {users} users"

    def by_datasheet(n: int) -> float:
        return _slower(model, settings, device, row, n)

    slower = _by_steps(model, own.settings, own.ceilings, own.learned, row) if own and own.ceilings else by_datasheet
    one = Candidate(
        device.name,
        PREDICTED,
        model,
        row.n_prompt,
        row.n_gen,
        users,
        row.prefill_s,
        (slower(users) * row.tpot_s[0], slower(users) * row.tpot_s[1]),
        needed,
        device,
        device.memory_bytes,
        problem,
        row.doubts,
        row.rests_on,
    )
    return _with_needs(one, asked, settings, slower) if isinstance(asked, Demand) else one


def _with_needs(one: Candidate, demand: Demand, settings: Settings, slower: Callable[[int], float]) -> Candidate:
    """The candidate with how many such devices the demand needs. `slower`: a step of n answers over that of one."""
    asked = dataclasses.replace(one, users=demand.users, demand=demand)
    if one.problem or any(end != end for end in (*one.ttft_s, *one.tpot_s)):
        return asked
    n_ctx, available = demand.n_prompt + demand.n_gen, one.memory_bytes

    def needed(n: int) -> float:
        return prediction.memory_bytes(one.model, settings, n_ctx, n)

    n_slots = MOST_SLOTS if available is None else bisect_right(range(1, MOST_SLOTS + 1), available, key=needed)
    factors = [(n, slower(n)) for n in (*(2**i for i in range(9) if 2**i < n_slots), n_slots)]
    if any(factor != factor for _, factor in factors):
        return asked
    fast, slow = (
        serving.need(Law(((demand.n_prompt, ttft),), tuple((n, tpot * by) for n, by in factors), n_slots), demand)
        for ttft, tpot in zip(one.ttft_s, one.tpot_s, strict=True)
    )
    return dataclasses.replace(asked, n_slots=n_slots, needs=(fast, slow))


def _by_steps(
    model: Model, settings: Settings, ceilings: Ceilings, learned: Learned | None, row: Prediction
) -> Callable[[int], float]:
    """How many times as long a step of n users takes as one of a single user, where its kernels were measured."""
    fit, n_runs = (learned.fit, learned.n_runs) if learned else (learning.fit([]), 0)
    steps = StepPrediction(model, settings, ceilings, fit, n_runs)
    past = row.n_prompt + max(0, row.n_gen - 2) // 2

    def slower(n: int) -> float:
        one, many = steps.seconds(1, past, 1), steps.seconds(1, past, n, [(1, past)] * (n - 1))
        return many / one if one and many else math.nan

    return slower


def _slower(model: Model, settings: Settings, device: Device, row: Prediction, users: int) -> float:
    """How many times as long a step of several users takes as one of a single user, by the law of the prediction.

    That is the law of published rates, or where runs gave shares of the datasheet's figures, the limits.
    """
    past = row.n_prompt + max(0, row.n_gen - 2) // 2
    kinds, peak = (settings.type_k, settings.type_v), device.peak_tflops
    steps = [cost.step(model, 1, past, n, *kinds, others=[(1, past)] * (n - 1)) for n in (1, users)]
    case = published.case_for(model, settings, device, DECODE, past)
    works = [
        published.Work(step.n_bytes, step.flops if peak else 0.0, model.n_layer or 0, 0.0) for step in steps if step
    ]
    if case is None or len(works) < 2:
        return math.nan
    known, by_limits = published.learned()[DECODE], row.tpot_expected_s is None
    one, many = (
        work.least_s(device) if by_limits else known.expected_s(dataclasses.replace(case, work=work)) for work in works
    )
    return many / one if one and many else math.nan


def _here(plan: Plan, n_prompt: int, n_gen: int, asked: int | Demand, kept: Kept) -> list[Candidate]:
    """This machine: what it measured of such a request, else what it predicts from its ceilings; nothing without."""
    users = 1 if isinstance(asked, Demand) else asked
    label = machine.label(plan.machine, plan.settings)
    needed = prediction.memory_bytes(plan.model, plan.settings, n_prompt + n_gen, users)
    if asked == 1 and (row := _measured(kept[0], plan.model, label, n_prompt)) is not None:
        ttft, tpot = (_span(row, figure, scale) for figure, scale in (("ttft_s", 1.0), ("tpot_ms", 1e-3)))
        return [Candidate(HERE, MEASURED, plan.model, n_prompt, n_gen, 1, ttft, tpot, needed, doubts=row["doubts"])]
    place = where.of(plan.machine, plan.model, plan.settings)
    try:
        ceilings = probing.need(kept[1], place, False, HERE)
        learned = learning.learn(kept[0], ceilings, learning.offload_of(plan.model, plan.settings))
        predicted = prediction.here(plan.model, plan.settings, ceilings, learned, n_prompt, n_gen)
    except LabError:  # no ceilings of these weight types, or no runs: the table says how to get them
        return []
    available = memory_for(plan)
    predicted = prediction.with_misfit(predicted, plan.model, plan.settings, available)
    slower = _by_steps(plan.model, plan.settings, ceilings, learned, predicted)
    tpot = slower(users) * predicted.tpot_s[0], slower(users) * predicted.tpot_s[1]
    parts = (plan.model, n_prompt, n_gen, users, predicted.prefill_s, tpot, needed, None, available)
    found = Candidate(HERE, PREDICTED, *parts, predicted.misfit or "", predicted.doubts)
    return [_with_needs(found, asked, plan.settings, slower) if isinstance(asked, Demand) else found]


def _measured(records: Sequence[Record], model: Model, label: str, n_prompt: int) -> Any:
    """The row of a summary that measured such a request here, the one of most runs; None where there is none."""
    same = [
        record
        for record in records
        if record.run.is_timed
        and record.run.lever is None
        and record.run.tuning is None  # settings that were tried
        and record.run.totals is None  # imported: measured on somebody else's machine
        and (record.model.name, record.model.quantization) == (model.name, model.quantization)
        and machine.label(record.machine, record.settings) == label
        and abs(record.run.n_prompt - n_prompt) <= NEAR * n_prompt
    ]
    if not same:
        return None
    summary = table.summary(table.runs(same))
    return summary.loc[summary.repeats.idxmax()].to_dict() if len(summary) else None


def _span(row: Mapping[str, Any], figure: str, scale: float) -> Span:
    """The interval of a measured figure, or the range of fewer runs."""
    one = table.shown_in(row, figure, scale)
    return (one.value, one.value) if one.low is None or one.high is None else (one.low, one.high)


def chance(one: Candidate, slo: Slo) -> float:
    """The probability that a candidate keeps all limits, taking its ranges for those of logarithms of normal errors."""
    if one.problem:
        return 0.0
    limits = ((one.ttft_s, slo.ttft_s), (one.tpot_s, slo.tpot_s), (one.e2e_s, slo.e2e_s))
    return min((_below(span, limit) for span, limit in limits if limit is not None), default=1.0)


def _below(span: Span, limit: float) -> float:
    low, high = span
    if low != low:
        return math.nan
    if low >= high:
        return float(low <= limit)
    middle = (math.log(low) + math.log(high)) / 2
    deviation = (math.log(high) - math.log(low)) / 2 / NormalDist().inv_cdf((1 + WITHIN) / 2)
    return NormalDist(middle, deviation).cdf(math.log(limit))


def largest(
    device: str, at_least_tps: float, n_prompt: int, n_gen: int, results: str | Path = "results", **settings: Any
) -> list[Candidate]:
    """The models of the catalog that a device decodes at this rate or faster, each in its largest quantization."""
    name, kept = datasheet.find_device(device).name, prediction.kept(Path(results))
    usual = prediction.plan_for(catalog.DEFAULT, settings).settings
    found = [
        one
        for entry in catalog.entries().values()
        for model in shapes.by_quantization(entry).values()
        for one in _on_devices(model, usual, n_prompt, n_gen, 1, [name], kept)
    ]
    fast = [one for one in found if not one.problem and one.tps[0] >= at_least_tps]
    by_size = sorted(fast, key=lambda one: -(one.model.n_bytes or 0))
    return [own[0] for own in grouped(by_size, lambda one: one.model.name).values()]


def read_prices(path: str | Path) -> dict[str, Price]:
    """Prices of devices from a CSV file with the columns device, price and, where known, watts.

    LabError for a file that cannot be read, a missing column, an unknown device, or a price that is not a number.
    """
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, skipinitialspace=True))
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise LabError(f"The prices in {path} cannot be read: {problem}.", "Give a CSV file.") from None
    columns = set(rows[0]) if rows else set()
    if not {"device", "price"} <= columns:
        found = ", ".join(sorted(filter(None, columns))) or "none"
        raise LabError(
            f"{path} needs the columns device and price; it has {found}.", "The first line: device,price,watts"
        )
    return dict(_prices(path, rows))


def _prices(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Price]]:
    for number, row in enumerate(rows, 2):
        name = (row["device"] or "").strip()
        device = name if name == HERE else datasheet.find_device(name).name
        values = []
        for column in ("price", "watts"):
            text = (row.get(column) or "").strip()
            try:
                values.append(float(text) if text else None)
            except ValueError:
                raise LabError(
                    f"Line {number} of {path}: the {column} {text!r} is not a number.", "Write it as 1599 or 1599.00."
                ) from None
        if values[0] is None or not values[0] >= 0:
            raise LabError(f"Line {number} of {path}: {name} has no price.", "Write a number, or leave the line out.")
        yield device, Price(values[0], values[1])
