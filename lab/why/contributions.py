"""Checks of results that somebody contributes to a board: are they records, new, and possible?

A rate is impossible where a step read its weights faster than the device's memory can, or multiplied faster than its
peak, by the makers' figures (datasheet.py). Of a device that is not in the list the fastest one that is sold counts.
A cache can serve a model that fits into it, so only weights above CACHED_BYTES are held against the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from lab.core import cost, phases, results
from lab.core.lists import plural
from lab.core.record import Record
from lab.errors import LabError
from lab.why import datasheet, where

CACHED_BYTES = 1e9
"""Larger than the last cache of any device in models/devices.toml, and of any CPU that is sold."""

MARGIN = 1.05
"""How far above the maker's figure a rate may lie: clocks and rounding."""

FEWEST_STEPS = 8
"""The time stamps of this number of steps do not repeat by chance."""


def refusals(paths: Iterable[str | Path]) -> list[str]:
    """Why these results files or folders are refused, a sentence for each reason; empty where nothing is wrong."""
    found, seen = list[str](), dict[tuple[int, ...], str]()
    for path in paths:
        files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
        for file in files:
            found += [f"{file.name}: {reason}" for reason in _of_file(file, seen)]
        if not files:
            found.append(f"{path}: there is no results file (*.jsonl) in this folder.")
    return found


def _of_file(file: Path, seen: dict[tuple[int, ...], str]) -> Iterator[str]:
    try:
        contents = results.read([file])
    except LabError as problem:
        yield problem.what
        return
    yield from contents.skipped
    timed = [record for record in contents.records if record.run.is_timed]
    if not timed and not contents.requests:
        yield "no run in this file went well."
    copies: dict[str, int] = {}
    for record in timed:
        ends = record.run.steps.end_ns
        if len(ends) >= FEWEST_STEPS:
            other = seen.setdefault(ends, file.name)
            if other != file.name:
                copies[other] = copies.get(other, 0) + 1
    for other, n in copies.items():
        yield f"{plural(n, 'run')} of it {'is' if n == 1 else 'are'} in {other} too, with the same time stamps."
    plain = [record for record in timed if record.run.lever is None]
    impossible = dict.fromkeys(reason for record in plain for reason in impossibilities(record))
    yield from impossible


def impossibilities(record: Record) -> Iterator[str]:
    """Why a run cannot have been as fast as its record says; nothing where it can, or where its model is not known."""
    names = where.of_record(record).devices
    described = where.device(record.machine, names[0]) if len(names) == 1 else None
    device = datasheet.recognise(described.description, described.memory_bytes) if described else None
    known = [device] if device else list(datasheet.devices().values())
    gbps, tflops = max(one.gbps for one in known), max((one.tflops or 0.0) for one in known)
    n_devices = max(1, len(names))
    of = device.name if device else "the fastest device that the lab knows"
    for run in phases.by_length(record.run):
        token = cost.step(record.model, 1, run.n_prompt, 1, record.settings.type_k, record.settings.type_v)
        prompt = cost.step(record.model, run.n_prompt, 0, 1, record.settings.type_k, record.settings.type_v)
        tpot, prefill = phases.decode_compute_mean_ns(run), phases.prefill_ns(run)
        if token and tpot and token.weight_bytes > CACHED_BYTES:
            reached = token.n_bytes / tpot
            if reached > MARGIN * n_devices * gbps:
                yield _above("decode read", reached, n_devices * gbps, "GB/s", of)
        if prompt and prefill and tflops:
            reached = prompt.flops / prefill / 1e3
            if reached > MARGIN * n_devices * tflops:
                yield _above("prefill computed", reached, n_devices * tflops, "TFLOP/s", of)


def _above(what: str, reached: float, most: float, unit: str, of: str) -> str:
    return f"{what} {reached:,.3g} {unit}, but {of} has {most:,.3g} {unit}."
