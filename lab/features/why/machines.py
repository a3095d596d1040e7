"""The parts of two machines: hardware, system, build, and the state that each was in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from lab.core import phases
from lab.core.record import Machine, Record, Run
from lab.core.request import short_name
from lab.core.stats import mean_half_width
from lab.errors import LabError
from lab.features.why import facts
from lab.features.why.facts import Facts
from lab.features.why.figure import Figure
from lab.features.why.parts import (
    BUILD,
    EQUAL,
    FEWEST,
    FROM_RECORDS,
    MACHINE,
    PREDICTED,
    STATE,
    SYSTEM,
    GapPart,
    Pair,
    equal,
    unknown,
)
from lab.formats.llama_bench_rows import UNKNOWN_DEVICE
from lab.models import devices
from lab.roofline import prediction, probing
from lab.runner import disturbances, machine

HERE = "here"
HARDWARE = ("cpu", "n_cores_usable", "ram_bytes", "devices")
SAME_HERE = HARDWARE[:3]
FIELDS = {
    MACHINE: HARDWARE,
    SYSTEM: ("os", "cpu_quota"),
    BUILD: ("llama_cpp_python", "llama_cpp_commit", "lib", "system_info"),
}
NEEDED = {
    MACHINE: ("cpu",),
    SYSTEM: ("os",),
    BUILD: ("llama_cpp_commit", "llama_cpp_python"),
}
"""Of these a machine of a record must say one, so that two of them can be called equal."""

MOST_LETTERS = 200  # of a sentence on what differs


def of_machine(pair: Pair, spec: str | None, folder: Path, with_build: bool) -> list[GapPart]:
    """The parts of machine, system, build and state, as far as records say them.

    Predictions are of the model `spec`, and read the ceilings in `folder`.
    """
    if not (pair.fast.records and pair.slow.records):
        return [predicted(pair, spec, folder)]
    parts = list[GapPart]()
    for name, fields in FIELDS.items():
        if name == BUILD and not with_build:
            continue
        differences = differing(pair, fields)
        lacking = not_given(pair, NEEDED[name])
        if lacking and not (name == MACHINE and names_any_machine(pair)):
            reason = f"not given for {' and '.join(lacking)}"
            parts.append(unknown(name, reason, lacking=lacking))
        elif not differences:
            parts.append(equal(name))
        elif name == MACHINE:
            parts.append(predicted(pair, spec, folder))
        else:
            text = "; ".join(differences)[:MOST_LETTERS]
            parts.append(unknown(name, text, differs=True))
    return [*parts, of_state(pair)]


def differing(pair: Pair, fields: tuple[str, ...]) -> list[str]:
    """The fields in which the machines of two records differ, with both values."""
    fast = pair.fast.records[0].machine
    slow = pair.slow.records[0].machine
    differences = list[str]()
    for name in fields:
        values = getattr(fast, name), getattr(slow, name)
        if values[0] != values[1]:
            differences.append(f"{name.replace('_', ' ')}: {values[0]}, {values[1]}")
    return differences


def not_given(pair: Pair, fields: Sequence[str]) -> list[str]:
    """The letters of the sides whose record has none of some fields of the machine."""
    lacking = list[str]()
    for letter, figure in pair.in_order:
        if all(getattr(figure.records[0].machine, field) is None for field in fields):
            lacking.append(letter)
    return lacking


def place_of(figure: Figure) -> str | None:
    """The machine of a figure in words, without the folders of a file; None if it is not given."""
    if not figure.records:
        name = device_name(figure) or figure.device
        return None if name is None else short_name(name)
    machine = figure.records[0].machine
    named = device_name(figure) or machine.cpu
    names = [device.description for device in machine.devices]
    return named or ", ".join(name for name in names if name != UNKNOWN_DEVICE) or None


def names_any_machine(pair: Pair) -> bool:
    """Whether a side has a device, or records, which name their machine."""
    return any(place_of(figure) for _, figure in pair.sides)


def predicted(pair: Pair, spec: str | None, folder: Path) -> GapPart:
    """The part of two machines by predictions of the same request on both."""
    fast_name = device_name(pair.fast)
    slow_name = device_name(pair.slow)
    places = list[tuple[str, Facts]]()
    for letter, figure in pair.in_order:
        places.append((letter, facts.stated({MACHINE: place_of(figure)})))
    compared = facts.compare(places, MACHINE)
    reason = compared.words
    if compared.lacking:
        return unknown(MACHINE, f"{reason} (--device)", lacking=compared.lacking)
    if fast_name is None or slow_name is None:
        if compared.is_same:
            return equal(MACHINE, f"{EQUAL} by name")
        return unknown(MACHINE, reason, differs=True)
    if fast_name == slow_name:
        return equal(MACHINE, reason=reason)
    if spec is None:
        why = f"{reason}: not predicted, since no model is named (--model)"
        return unknown(MACHINE, why, differs=True)
    n_prompt = max(1, pair.fast.depth or pair.fast.n_prompt or 1)
    n_gen = max(2, pair.fast.n_gen or 2)
    try:
        requests = [
            prediction.request_on(name, spec, n_prompt, n_gen, folder)
            for name in (fast_name, slow_name)
        ]
    except LabError as problem:
        return unknown(MACHINE, f"{reason}: not predicted, {problem.what}", differs=True)
    return ratio_of_requests(requests, pair.fast.is_prefill, reason)


def ratio_of_requests(
    requests: list[prediction.Prediction], is_prefill: bool, reason: str
) -> GapPart:
    """The part from the predicted ranges of a request on the faster and the slower machine."""
    middles = list[float]()
    halves = list[float]()
    for request in requests:
        low, high = request.prefill_s if is_prefill else request.tpot_s
        if not 0 < low <= high:  # also for NaN
            why = "it does not fit or has no known peak"
            return unknown(MACHINE, f"{reason}: not predicted, {why}", differs=True)
        middles.append(math.log(low * high) / 2)
        halves.append(math.log(high / low) / 2)
    how = f"{PREDICTED}, {100 * prediction.WITHIN:.0f} % ranges"
    return GapPart(MACHINE, middles[1] - middles[0], math.hypot(*halves), how, reason)


def device_name(figure: Figure) -> str | None:
    """The device of a figure by its name in the list of devices, as the user named it, or "here";
    None if it is not known.
    """
    if figure.records:
        return name_of_recorded(figure.records[0])
    if figure.device is None or figure.device == HERE or figure.has_named_device:
        return figure.device
    device = devices.called(figure.device) or devices.recognise(figure.device)
    return device.name if device else None


def name_of_recorded(record: Record) -> str | None:
    """The same for the machine of a record."""
    if is_this_machine(record.machine):
        return HERE
    used = probing.device_of(record.machine, probing.place_of_record(record).devices[0])
    if used is None:
        return None
    device = devices.recognise(used.description, used.memory_bytes)
    return device.name if device else None


def is_this_machine(recorded: Machine) -> bool:
    """Whether a record is of this machine, by CPU, cores and memory."""
    here = machine.describe()
    return all(getattr(recorded, name) == getattr(here, name) for name in SAME_HERE)


def of_state(pair: Pair) -> GapPart:
    """The part of disturbed runs: the median of all runs against the median of the quiet ones.

    The range is that of the median if all runs were quiet: the quiet ones are a sample of them.
    """
    imported = [letter for letter, figure in pair.in_order if is_imported(figure)]
    if imported:
        reason = f"not given for {' and '.join(imported)}"
        return unknown(STATE, reason, lacking=imported)
    reasons = list[str]()
    logs = list[float]()
    squares = 0.0
    is_known = True
    for letter, figure in pair.sides:
        reasons += [f"{letter}: {sentence}" for sentence in state_in_words(figure)]
        times = log_times(figure.records, figure.is_prefill)
        undisturbed = [run for run in figure.records if not disturbances.disturbances(run)]
        quiet_times = log_times(undisturbed, figure.is_prefill)
        log = 0.0
        if len(quiet_times) < min(FEWEST, len(times)):
            is_known = False
        elif len(quiet_times) < len(times):
            log = statistics.median(times) - statistics.median(quiet_times)
            share_left_out = 1 - len(quiet_times) / len(times)
            squares += math.pi / 2 * mean_half_width(quiet_times) ** 2 * share_left_out
        logs.append(log)
    reason = "; ".join(reasons)
    if not is_known or is_on_battery(pair.fast) != is_on_battery(pair.slow):
        return unknown(STATE, reason)
    log = logs[1] - logs[0]
    if not log:
        return equal(STATE, reason=reason)
    return GapPart(
        STATE, log, math.sqrt(squares), f"{FROM_RECORDS}, quiet runs against all", reason
    )


def is_imported(figure: Figure) -> bool:
    """Whether another tool measured the runs, which nothing watched."""
    return figure.records[0].run.imported_from is not None


def is_on_battery(figure: Figure) -> bool:
    return figure.records[0].machine.power == "battery"


def state_in_words(figure: Figure) -> list[str]:
    """What disturbed the runs of a figure, how the machine drifted, and that it ran on battery."""
    sentences = [*disturbances.sentences(figure.records), *disturbances.drift(figure.records)]
    if is_on_battery(figure):
        sentences.append("it ran on battery")
    return sentences


def log_times(records: tuple[Record, ...] | list[Record], is_prefill: bool) -> list[float]:
    """The logarithms of the runs' times per token."""
    logs = list[float]()
    for record in records:
        ns = ns_per_token(record.run, is_prefill)
        if ns:
            logs.append(math.log(ns))
    return logs


def ns_per_token(run: Run, is_prefill: bool) -> float | None:
    """Nanoseconds per token of a run: of its prompt, or of its answer after the first token.

    Imported results have no TPOT, as their tools stamp no tokens: they have decode compute.
    """
    if not is_prefill:
        if run.imported_from is not None:
            return phases.decode_compute_mean_ns(run)
        return phases.tpot_ns(run)
    prefill_ns = phases.prefill_ns(run)
    if not prefill_ns or not run.n_prompt:
        return None
    return prefill_ns / run.n_prompt
