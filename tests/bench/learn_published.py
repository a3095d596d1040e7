"""Learn models/learned.toml from models/published.csv: python -m tests.bench.learn_published

Fits, for decode and for prefill, the factors of lab/roofline/datasheet.py by partial pooling: each
factor (as logarithm) is drawn to 0 as strongly as the levels of its kind differ little; those
variances come from the rows too, starting from PRIOR. Rows that lie far off count less (Student's
t), and so do devices. Then leaves out each device in turn."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.core import cost
from lab.core.record import DECODE, PREFILL, Model
from lab.errors import LabError
from lab.models import catalog, devices, synthetic
from lab.roofline import datasheet
from lab.roofline.datasheet import FACTORS, LONG, PARTS, DatasheetCase, LearnedRates

OUT = Path(__file__).parents[2] / "models" / "learned.toml"
PUBLISHED = OUT.with_name("published.csv")
PHASES = DECODE, PREFILL
PRIOR = {
    "backend": (0.3, 2),
    "runtime": (0.3, 4),
    "architecture": (0.2, 4),
    "family": (0.2, 4),
    "quantization": (0.07, 4),
    "device": (0.1, 4),
    "flash": (0.1, 3),
    "experts": (0.3, 3),
    "layers": (0.5, 3),
    "weights": (0.2, 10),
    "cache": (0.4, 10),
    "attention": (0.3, 10),
    "attention family": (0.25, 10),
    "attention flash": (0.4, 8),
    "other runtime": (2.0, 1000),
}
"""Standard deviation of a factor's levels (of logarithms) before any row was seen, and the levels
it counts as."""

USUAL_LENGTH = 1024
"""Tokens of a prompt whose length is not published."""

START = {
    PREFILL: {
        "arithmetic": (2.0, 2),
        "weights": (1.3, 0.4),
        "attention": (1.4, 0.7),
        "cache": (1, 1),
        "layers": (50, 2),
    },
    DECODE: {
        "weights": (1.7, 2),
        "cache": (1.3, 0.3),
        "layers": (50, 2),
    },
}
"""A part's figure before any row was seen, and its standard deviation; of attention relative to
arithmetic."""

FLASH = {PREFILL: 0.6, DECODE: 1.0}
"""Seconds of attention with flash attention over those without, before any row was seen: it writes
no scores."""

MOST_ALIKE = 2
"""Rows of one model on one device from one source count as no more than this number."""

HEAVY = 3
"""Degrees of freedom of the t distribution of rows and of devices."""

ROUNDS = 12
POOLED = 20
"""Rows of other runtimes that a runtime's range leans on."""

OUTSIDE = {(PREFILL, True): 0.01}
"""At each end of a range, else 0.03: 94 % inside, because 90 % are promised for rows that were not
seen. Long prompts, which few devices have, lie further out. """


class Row(NamedTuple):
    """A published measurement. `gpu_share`: the part of the chip's GPU cores that this variant
    has.

    A prompt of n_prompt tokens after n_depth others; or a token of an answer after n_prompt
    others, n_depth included. `marks` are the rules of clean_published.py that the row breaks;
    without marks it is clean."""

    source: str
    device: str
    gpu_share: float
    backend: str
    model: str
    quantization: str
    phase: str
    n_prompt: int | None
    flash_attn: bool | None
    tps: float
    marks: tuple[str, ...] = ()
    n_depth: int = 0
    n_ubatch: int = 512


Errors = list[tuple[Row, float]]


def row_of(line: dict[str, str]) -> Row:
    return Row(
        source=line["source"],
        device=line["device"],
        backend=line["backend"],
        model=line["model"],
        quantization=line["quantization"],
        phase=line["phase"],
        gpu_share=float(line["gpu_share"] or 1),
        n_prompt=int(line["n_prompt"]) if line["n_prompt"] else None,
        flash_attn={"1": True, "0": False}.get(line["flash_attn"]),
        tps=float(line["tps"]),
        marks=tuple(line["marks"].split()),
        n_depth=int(line["n_depth"] or 0),
        n_ubatch=int(line["n_ubatch"] or 512),
    )


@cache
def published(path: Path = PUBLISHED) -> tuple[Row, ...]:
    """The rows of models/published.csv, or of a file like it; those with marks too."""
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(map(row_of, csv.DictReader(file)))


def clean(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if not row.marks]


def seconds(row: Row) -> float:
    """Of a token in decode, of the whole prompt in prefill."""
    return (1 if row.phase == DECODE else row.n_prompt or USUAL_LENGTH) / row.tps


@cache
def model_of(name: str, quantization: str) -> Model | None:
    """A model of the catalog; None where it, or its quantization, is unknown."""
    try:
        return synthetic.model_of(catalog.find(name), quantization)
    except LabError:
        return None


@cache
def case_for(row: Row) -> DatasheetCase | None:
    """None for a model that is unknown or cannot be counted."""
    model = model_of(row.model, row.quantization)
    n = row.n_prompt or USUAL_LENGTH
    device = devices.find_device(row.device)
    if row.gpu_share != 1:
        peak = device.peak_tflops and device.peak_tflops * row.gpu_share
        device = replace(device, name=f"{device.name} x {row.gpu_share:g}", tflops=peak)
    n_past = row.n_depth if row.phase == PREFILL else 0
    if model is None or cost.step(model, 1, 0, 1) is None:
        return None
    parts = datasheet.parts_of(
        model, device, row.phase, n, row.n_ubatch, ("f16", "f16"), n_past
    )
    what = (
        row.backend,
        datasheet.runtime_of(row.source),
        row.model,
        row.quantization,
        row.flash_attn,
    )
    return DatasheetCase(row.phase, device, *what, n + n_past, bool(model.n_expert), parts)


def case_of(row: Row) -> DatasheetCase:
    case = case_for(row)
    assert case, row
    return case


def slopes_of(
    cases: Sequence[DatasheetCase],
    phase: str,
    at: dict[tuple[str, str], int],
) -> np.ndarray:
    """By part, case and unknown: by how much the unknown changes the part's logarithm."""
    parts = list(START[phase])
    slopes = np.zeros(
        (
            len(parts),
            len(cases),
            len(at),
        )
    )
    for i, case in enumerate(cases):
        levels = case.levels
        half = 0.5 if case.flash_attn else -0.5
        for k, part in enumerate(parts):
            slopes[k, i, at["", part]] = 1
            for name in FACTORS[phase][part]:
                if name in levels:
                    slopes[k, i, at[name, levels[name]]] = half if "flash" in name else 1
            if part == "attention":
                slopes[k, i, at["", "arithmetic"]] = 1
    return slopes


def fit(rows: Sequence[Row], phase: str) -> LearnedRates:
    """The factors; without ranges. All unknowns are logarithms: a part takes its base times
    exp(slopes @ unknowns)."""
    cases = [case_of(row) for row in rows]
    parts = [*START[phase]]
    base = (
        np.array([[case.parts[PARTS.index(part)] for case in cases] for part in parts]) + 1e-15
    )
    times = np.log([seconds(row) for row in rows])
    at: dict[tuple[str, str], int] = {("", part): i for i, part in enumerate(parts)}
    for case in cases:
        for column in case.levels.items():
            at.setdefault(column, len(at))
    slopes = slopes_of(cases, phase, at)
    setups = Counter(map(_setup, rows))
    counts = np.array([min(1.0, MOST_ALIKE / setups[_setup(row)]) for row in rows])
    members = {name: np.array([column[0] == name for column in at]) for name in PRIOR}
    spread = {name: sd**2 for name, (sd, _) in PRIOR.items()}
    start = np.zeros(len(at))
    precision = np.zeros(len(at))
    for i, (value, sd) in enumerate(START[phase].values()):
        start[i] = math.log(value)
        precision[i] = sd**-2
    start[members["attention flash"]] = math.log(FLASH[phase])
    now = start.copy()
    noise = 0.01
    weights = np.ones(len(rows))
    column_weights = np.ones(len(at))
    for _ in range(ROUNDS):
        each = base * np.exp(slopes @ now)
        slope = np.einsum("kn,knp->np", each / each.sum(axis=0), slopes)
        for name, columns in members.items():
            precision[columns] = column_weights[columns] / spread[name]
        weighted = slope * (weights * counts / noise)[:, None]
        covariance = np.linalg.inv(weighted.T @ slope + np.diag(precision))
        step = (
            start
            + covariance
            @ (weighted.T @ (times - np.log(each.sum(axis=0)) + slope @ (now - start)))
            - now
        )
        now = now + np.clip(step, -0.7, 0.7)
        off = times - np.log((base * np.exp(slopes @ now)).sum(axis=0))
        squares = off**2 + ((slope @ covariance) * slope).sum(axis=1)
        weights = (HEAVY + 1) / (HEAVY + squares / noise)
        noise = float((weights * counts * squares).sum() / counts.sum())
        for name, columns in members.items():
            sd, n = PRIOR[name]
            levels_squared = (now[columns] - start[columns]) ** 2 + np.diag(covariance)[
                columns
            ]
            spread[name] = float(
                ((column_weights[columns] * levels_squared).sum() + n * sd**2)
                / (columns.sum() + n)
            )
            if name == "device":
                column_weights[columns] = (HEAVY + 1) / (HEAVY + levels_squared / spread[name])
    return _learned(phase, rows, dict(zip(at, now, strict=True)), spread)


def _setup(row: Row) -> tuple[object, ...]:
    return row.source, row.device, row.backend, row.model, row.quantization


def _learned(
    phase: str,
    rows: Sequence[Row],
    values_at: dict[tuple[str, str], float],
    spread: dict[str, float],
) -> LearnedRates:
    factors: dict[str, dict[str, float]] = {name: {} for name in PRIOR}
    for (name, level), value in values_at.items():
        if name:
            factors[name][level] = math.exp(value)
    factors["model"] = {
        model: float(n) for model, n in sorted(Counter(row.model for row in rows).items())
    }
    figures = {part: math.exp(values_at["", part]) for part in START[phase]}
    if phase == PREFILL:
        figures["attention"] *= figures["arithmetic"]
    else:
        figures["arithmetic"] = figures[
            "weights"
        ]  # of several users: a token of one is bounded by its bytes
    sds = {name: math.sqrt(value) for name, value in spread.items()} | {"model": 0.1}
    return LearnedRates(phase, figures, factors, sds, {})


def error(learned: LearnedRates, row: Row) -> float:
    """Logarithm of the measured over the predicted time."""
    expected = learned.expected_s(case_of(row))
    assert expected is not None
    return math.log(seconds(row) / expected)


def left_out(
    rows: Sequence[Row],
    phase: str,
    key: Callable[[Row], str],
) -> Errors:
    """The errors of all rows, each predicted without the rows that share its key."""
    errors: Errors = []
    for group in sorted({key(row) for row in rows}):
        learned = fit([row for row in rows if key(row) != group], phase)
        errors += [(row, error(learned, row)) for row in rows if key(row) == group]
    return errors


def ranges(errors: Errors) -> dict[str, dict[str, float]]:
    """By runtime and for all: the ratios at both ends. A runtime's errors lean on POOLED of the
    others'."""
    by_group = {}
    for long in ("", LONG_ONES):
        every = [off for row, off in errors if _group(row).endswith(LONG_ONES) == bool(long)]
        every = every or [off for _, off in errors]
        outside = OUTSIDE.get((errors[0][0].phase, bool(long)), 0.03)
        by_group[f"all{long}"] = _range(every, np.ones(len(every)), outside)
        for group in dict.fromkeys(_group(row) for row, _ in errors):
            if group.endswith(LONG_ONES) == bool(long):
                of_group = [off for row, off in errors if _group(row) == group]
                weights = np.concatenate(
                    [
                        np.ones(len(of_group)),
                        np.full(len(every), POOLED / len(every)),
                    ]
                )
                by_group[group] = {
                    **_range([*of_group, *every], weights, outside),
                    "n_rows": len(of_group),
                }
    return by_group


LONG_ONES = ", long"


@cache
def _group(row: Row) -> str:
    case = case_of(row)
    return case.levels["runtime"] + (LONG_ONES if case.n_prompt > LONG else "")


def _ranges_of(row: Row) -> tuple[str, str]:
    """The range of a row's runtime, and the range of all rows, of long prompts or of short ones."""
    group = _group(row)
    if group.endswith(LONG_ONES):
        return group, f"all{LONG_ONES}"
    return group, "all"


def _range(
    errors: Sequence[float],
    weights: np.ndarray,
    outside: float,
) -> dict[str, float]:
    order = np.argsort(errors)
    below = np.cumsum(weights[order]) / weights.sum()
    low, high = np.asarray(errors)[order][np.searchsorted(below, [outside, 1 - outside])]
    return {
        "fast": math.exp(min(low, -0.02)),
        "slow": math.exp(max(high, 0.02)),
        "n_rows": len(errors),
    }


def is_inside(
    learned: LearnedRates,
    row: Row,
    off: float,
) -> bool:
    case = case_of(row)
    (low, high) = learned.range(case)
    least = case.least_s or 0.0
    expected = seconds(row) / math.exp(off)
    return (
        max(least, low * expected) <= seconds(row) * (1 + 1e-9)
        and seconds(row) <= high * expected
    )


def learn(rows: Sequence[Row], phase: str) -> tuple[LearnedRates, Errors]:
    """Factors and ranges of a phase, and the errors for left-out devices that the ranges come
    from."""
    rows_of_phase = [row for row in clean(rows) if row.phase == phase]
    errors = left_out(rows_of_phase, phase, lambda row: row.device)
    learned = replace(fit(rows_of_phase, phase), ranges=ranges(errors))
    inside = set()
    for device in {row.device for row in rows_of_phase}:
        elsewhere = [pair for pair in errors if pair[0].device != device]
        of_other_devices = replace(learned, ranges=ranges(elsewhere))
        for row, off in errors:
            if row.device == device and is_inside(of_other_devices, row, off):
                inside.add(row)
    for name, values in learned.ranges.items():
        rows_of_range = [row for row in rows_of_phase if name in _ranges_of(row)]
        values["inside"] = sum(row in inside for row in rows_of_range)
        values["n_devices"] = len({row.device for row in rows_of_range})
    return learned, errors


def main() -> None:
    text = (
        "# Made by python -m tests.bench.learn_published;"
        " lab/roofline/datasheet.py explains the figures.\n"
    )
    for phase in PHASES:
        learned, _ = learn(published(), phase)
        text += f"\n[{phase}]\n"
        text += _table(f"{phase}.parts", learned.parts)
        text += _table(f"{phase}.spread", learned.spread)
        for name, values in learned.factors.items():
            text += _table(f'{phase}.factors."{name}"', values)
        for name, values in sorted(learned.ranges.items()):
            text += _table(f'{phase}.ranges."{name}"', values)
    OUT.write_text(text)


def _table(name: str, values: dict[str, float]) -> str:
    text = f"\n[{name}]\n"
    for key, value in values.items():
        text += f'"{key}" = {value:.4g}\n'
    return text


if __name__ == "__main__":
    main()
