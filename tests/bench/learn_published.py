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
from lab.roofline import conditioning, datasheet
from lab.roofline.datasheet import (
    FACTORS,
    LONG,
    LONG_ONES,
    PARTS,
    DatasheetCase,
    LearnedRates,
)

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

OUTSIDE = 0.03
"""At each end of a range: 94 % of the rows that it comes from are inside, because 90 % are promised
for rows of other devices and sources."""

LEAST_SCORE = 0.5
"""An end is at least so many standard deviations off."""


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


class Error(NamedTuple):
    """A row that was left out: the logarithm of its measured over its predicted time.

    `score`: the same in standard deviations of the prediction, without what unpublished factors
    explain. `groups`: the groups of rows that it belongs to, the narrowest first.
    """

    row: Row
    off: float
    score: float
    groups: tuple[str, ...]


Errors = list[Error]


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
    deviations = _sd(cases, phase, at, covariance)
    deviations["noise"] = {"all": math.sqrt(noise)}
    return replace(
        _learned(phase, rows, dict(zip(at, now, strict=True)), spread), sd=deviations
    )


def _sd(
    cases: Sequence[DatasheetCase],
    phase: str,
    at: dict[tuple[str, str], int],
    covariance: np.ndarray,
) -> dict[str, dict[str, float]]:
    """The standard deviations of the sums of the factors that describe a device, and less."""
    main_part = "arithmetic" if phase == PREFILL else "weights"
    sd: dict[str, dict[str, float]] = {"device": {}, "family": {}, "runtime": {}}
    factors = {
        "device": datasheet.SHARED,
        "family": ("backend", "runtime", "architecture", "family"),
        "runtime": ("backend", "runtime"),
    }
    for case in cases:
        levels = case.levels
        keys = {
            "device": datasheet.device_on(levels),
            "family": levels["family"],
            "runtime": levels["runtime"],
        }
        for kind, key in keys.items():
            if key not in sd[kind]:
                columns = [at["", main_part]]
                columns += [at[name, levels[name]] for name in factors[kind]]
                sd[kind][key] = math.sqrt(float(covariance[np.ix_(columns, columns)].sum()))
    return sd


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


def error(learned: LearnedRates, row: Row, own: datasheet.Condition | None = None) -> float:
    """Logarithm of the measured over the predicted time."""
    expected = learned.expected_s(case_of(row), own)
    assert expected is not None
    return math.log(seconds(row) / expected)


def fits_without(
    rows: Sequence[Row], phase: str, key: Callable[[Row], str]
) -> dict[str, LearnedRates]:
    """What the rows teach without the rows of each group."""
    fits = {}
    for group in sorted({key(row) for row in rows}):
        fits[group] = fit([row for row in rows if key(row) != group], phase)
    return fits


def left_out(
    rows: Sequence[Row], fits: dict[str, LearnedRates], key: Callable[[Row], str]
) -> Errors:
    """The errors of all rows, each predicted without the rows that share its key."""
    errors = []
    for row in rows:
        learned = fits[key(row)]
        errors.append(error_of(learned, row, learned.knowledge(case_of(row))))
    return errors


def beside_own(rows: Sequence[Row], fits: dict[str, LearnedRates]) -> Errors:
    """The errors of rows of left-out devices, predicted with one row of the device.

    As if a user had measured it: of another model, with the same build. `fits` are without each
    device.
    """
    errors = []
    for row in rows:
        learned = fits[row.device]
        own = own_condition(rows, row, learned)
        if own is not None:
            errors.append(error_of(learned, row, datasheet.OWN_RATE, own))
    return errors


def own_condition(
    rows: Sequence[Row], row: Row, learned: LearnedRates
) -> datasheet.Condition | None:
    """What the first row of the device says that is of another model; None without one."""
    for candidate in rows:
        is_same_device = candidate.device == row.device
        is_same_build = (candidate.backend, candidate.source) == (row.backend, row.source)
        if is_same_device and is_same_build and candidate.model != row.model:
            return conditioning.condition(learned, [(case_of(candidate), seconds(candidate))])
    return None


def error_of(
    learned: LearnedRates,
    row: Row,
    knowledge: str,
    own: datasheet.Condition | None = None,
) -> Error:
    """The error of a row, in standard deviations without what unpublished factors explain."""
    case = case_of(row)
    off = error(learned, row, own)
    unexplained = max(0.0, off**2 - learned.wide(case) ** 2)
    score = math.copysign(math.sqrt(unexplained) / learned.deviation(case, own), off)
    ending = LONG_ONES if case.n_prompt > LONG else ""
    groups = [*datasheet.range_groups(case, knowledge), "all"]
    return Error(row, off, score, tuple(f"{group}{ending}" for group in groups))


def ranges(errors: Errors) -> dict[str, dict[str, float]]:
    """By group of rows: the ratios at both ends. A group leans on POOLED rows of the group that it
    is a part of."""
    members: dict[str, list[float]] = {}
    wider: dict[str, str | None] = {}
    for e in errors:
        for group, larger in zip(e.groups, [*e.groups[1:], None], strict=True):
            members.setdefault(group, []).append(e.score)
            wider[group] = larger
    for group in ("all", f"all{LONG_ONES}"):
        members.setdefault(group, [e.score for e in errors])
        wider.setdefault(group, None)
    by_group = {}
    for group, scores in members.items():
        larger = wider[group]
        leaning = scores if larger is None else members[larger]
        weights = np.concatenate(
            [np.ones(len(scores)), np.full(len(leaning), POOLED / len(leaning))]
        )
        by_group[group] = _range([*scores, *leaning], weights)
    return by_group


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
    scores: Sequence[float],
    weights: np.ndarray,
) -> dict[str, float]:
    order = np.argsort(scores)
    below = np.cumsum(weights[order]) / weights.sum()
    low, high = np.asarray(scores)[order][np.searchsorted(below, [OUTSIDE, 1 - OUTSIDE])]
    return {
        "fast": math.exp(min(low, -LEAST_SCORE)),
        "slow": math.exp(max(high, LEAST_SCORE)),
    }


def is_inside(
    learned: LearnedRates,
    row: Row,
    off: float,
    own: datasheet.Condition | None = None,
) -> bool:
    case = case_of(row)
    (low, high) = learned.range(case, own)
    least = case.least_s or 0.0
    expected = seconds(row) / math.exp(off)
    return (
        max(least, low * expected) <= seconds(row) * (1 + 1e-9)
        and seconds(row) <= high * expected
    )


def by_device(row: Row) -> str:
    return row.device


def by_source(row: Row) -> str:
    return row.source


def learn(rows: Sequence[Row], phase: str) -> LearnedRates:
    """Factors and ranges of a phase. The ranges come from rows left out by device and by source;
    the figures of the evaluation from those left out by device.
    """
    rows_of_phase = [row for row in clean(rows) if row.phase == phase]
    fits = fits_without(rows_of_phase, phase, by_device)
    of_devices = left_out(rows_of_phase, fits, by_device)
    of_sources = left_out(
        rows_of_phase, fits_without(rows_of_phase, phase, by_source), by_source
    )
    errors = [*of_devices, *of_sources, *beside_own(rows_of_phase, fits)]
    learned = replace(fit(rows_of_phase, phase), ranges=ranges(errors))
    inside = set()
    for device, fitted in fits.items():
        elsewhere = [e for e in errors if e.row.device != device]
        of_other_devices = replace(fitted, ranges=ranges(elsewhere))
        for e in of_devices:
            if e.row.device == device and is_inside(of_other_devices, e.row, e.off):
                inside.add(e.row)
    names = dict.fromkeys(name for row in rows_of_phase for name in _ranges_of(row))
    for name in names:
        rows_of_range = [row for row in rows_of_phase if name in _ranges_of(row)]
        values = learned.evaluation.setdefault(name, {})
        values["n_rows"] = len(rows_of_range)
        values["inside"] = sum(row in inside for row in rows_of_range)
        values["n_devices"] = len({row.device for row in rows_of_range})
    return learned


def main() -> None:
    text = (
        "# Made by python -m tests.bench.learn_published;"
        " lab/roofline/datasheet.py explains the figures.\n"
    )
    for phase in PHASES:
        learned = learn(published(), phase)
        text += f"\n[{phase}]\n"
        text += _table(f"{phase}.parts", learned.parts)
        text += _table(f"{phase}.spread", learned.spread)
        for name, values in learned.sd.items():
            text += _table(f'{phase}.sd."{name}"', values)
        for name, values in learned.factors.items():
            text += _table(f'{phase}.factors."{name}"', values)
        for name, values in sorted(learned.ranges.items()):
            text += _table(f'{phase}.ranges."{name}"', values)
        for name, values in sorted(learned.evaluation.items()):
            text += _table(f'{phase}.evaluation."{name}"', values)
    OUT.write_text(text)


def _table(name: str, values: dict[str, float]) -> str:
    text = f"\n[{name}]\n"
    for key, value in values.items():
        text += f'"{key}" = {value:.4g}\n'
    return text


if __name__ == "__main__":
    main()
