"""Learn models/learned.toml from models/published.csv: python -m tests.bench.learn_published

Fits, for decode and for prefill, the factors of lab/roofline/datasheet.py by partial pooling: each
factor (as logarithm) is drawn to 0 as strongly as the levels of its kind differ little; those
variances come from the rows too, starting from PRIOR. Rows that lie far off count less (Student's
t), and so do devices. Then leaves out each device in turn."""

from __future__ import annotations

import csv
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # threads of small products only wait

import numpy as np

from lab.core import cost
from lab.core.memory import CPU
from lab.core.record import DECODE, PREFILL, Model
from lab.errors import LabError
from lab.models import catalog, described, devices, synthetic
from lab.models.devices import DeviceSheet
from lab.roofline import conditioning, datasheet
from lab.roofline.datasheet import (
    DECODE_CPU,
    FACTORS,
    LONG,
    LONG_ONES,
    PARTS,
    PREFILL_CPU,
    DatasheetCase,
    LearnedRates,
)

OUT = Path(__file__).parents[2] / "models" / "learned.toml"
PUBLISHED = OUT.with_name("published.csv")
PHASES = DECODE, PREFILL
LAWS = DECODE, PREFILL, DECODE_CPU, PREFILL_CPU
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
    "kernel": (0.2, 10),
    "repacked": (0.5, 4),
    "products": (0.5, 4),
    "reading": (0.2, 4),
    "core": (0.2, 4),
}
PRIOR_CPU = {
    "architecture": (0.4, 4),
    "quantization": (0.3, 6),
    "kernel": (0.4, 4),
    "device": (0.2, 6),
}
"""The same of processors, where it differs: each type of weights has kernels of its own."""

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
    PREFILL_CPU: {
        "arithmetic": (7.0, 1),
        "weights": (1.0, 0.3),
        "attention": (2.0, 0.7),
        "cache": (1, 1),
        "layers": (50, 2),
    },
    DECODE_CPU: {
        "arithmetic": (12.0, 1),
        "weights": (1.35, 0.3),
        "cache": (2.0, 0.5),
        "layers": (50, 2),
    },
}
"""A part's figure before any row was seen, and its standard deviation; of attention relative to
arithmetic."""

FLASH = {PREFILL: 0.6, DECODE: 1.0, PREFILL_CPU: 1.0, DECODE_CPU: 1.0}
"""Seconds of attention with flash attention over those without, before any row was seen: it writes
no scores."""

MOST_ALIKE = 2
"""Rows of one model on one device from one source count as no more than this number."""

HEAVY = 3
"""Degrees of freedom of the t distribution of rows and of devices."""

ROUNDS = 10
FOLDS = 10
TAIL = 0.8
"""A group's end is this quantile of its errors to that side, before ranges are scaled to hold
PROMISED: a few rows cannot tell more of the tail."""

LEANS = 4
"""Publishers of the larger group that a group's end leans on, in logarithms."""

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
    threads: int | None = None
    month: str = ""


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
        threads=int(line["threads"]) if line.get("threads") else None,
        month=line["collected"][: len("2026-05")],
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
        return synthetic.model_like(catalog.find(name), quantization)
    except LabError:
        return None


def sheet_of(row: Row) -> DeviceSheet | None:
    """The device of a row, with the threads that were used; None for an unknown one."""
    if row.backend != CPU:
        return devices.called(row.device)
    try:
        device = described.find(f"{row.device.removesuffix('-cpu')}:cpu")
    except LabError:
        return None
    if row.threads and device.cores:
        return replace(device, cores=min(device.cores, row.threads))
    return device


@cache
def case_for(row: Row) -> DatasheetCase | None:
    """None for a model that is unknown or cannot be counted."""
    model = model_of(row.model, row.quantization)
    n = row.n_prompt or USUAL_LENGTH
    device = sheet_of(row)
    if model is None or device is None or cost.step(model, 1, 0, 1) is None:
        return None
    if row.gpu_share != 1:
        peak = device.peak_tflops and device.peak_tflops * row.gpu_share
        device = replace(device, name=f"{device.name} x {row.gpu_share:g}", tflops=peak)
    n_past = row.n_depth if row.phase == PREFILL else 0
    parts = datasheet.parts_of(
        model, device, row.phase, n, row.n_ubatch, ("f16", "f16"), n_past
    )
    like = synthetic.like_quantization(row.quantization)
    what = (
        row.backend,
        datasheet.runtime_of(row.source),
        row.model,
        like.name if like else row.quantization,
        row.flash_attn,
    )
    doubts = datasheet.doubts_of(model, device, row.phase)
    has_experts = bool(model.n_expert)
    return DatasheetCase(
        row.phase, device, *what, n + n_past, has_experts, parts, doubts, row.month
    )


def law_of(row: Row) -> str:
    """The key of what is learned from a row."""
    if row.backend != CPU:
        return row.phase
    return PREFILL_CPU if row.phase == PREFILL else DECODE_CPU


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
    slopes = np.zeros((len(parts), len(cases), len(at)))
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


def part_seconds(part: str, cases: Sequence[DatasheetCase]) -> list[float]:
    """The seconds of a part of each case at the datasheet's rates, slower where few cores read."""
    return [case.parts[PARTS.index(part)] * case.slowdown(part) for case in cases]


def fit(rows: Sequence[Row], phase: str) -> LearnedRates:
    """The factors; without ranges. All unknowns are logarithms: a part takes its base times
    exp(slopes @ unknowns)."""
    cases = [case_of(row) for row in rows]
    parts = [*START[phase]]
    base = np.array([part_seconds(part, cases) for part in parts]) + 1e-15
    times = np.log([seconds(row) for row in rows])
    at: dict[tuple[str, str], int] = {("", part): i for i, part in enumerate(parts)}
    used = {name for names in FACTORS[phase].values() for name in names}
    for case in cases:
        for name, level in case.levels.items():
            if name in used:
                at.setdefault((name, level), len(at))
    slopes = slopes_of(cases, phase, at)
    setups = Counter(map(_setup, rows))
    counts = np.array([min(1.0, MOST_ALIKE / setups[_setup(row)]) for row in rows])
    prior = prior_of(phase)
    members = {name: np.array([column[0] == name for column in at]) for name in prior}
    spread = {name: sd**2 for name, (sd, _) in prior.items()}
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
        each = times_of_parts(base * np.exp(slopes @ now), parts, phase)
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
        each = times_of_parts(base * np.exp(slopes @ now), parts, phase)
        off = times - np.log(each.sum(axis=0))
        squares = off**2 + ((slope @ covariance) * slope).sum(axis=1)
        weights = (HEAVY + 1) / (HEAVY + squares / noise)
        noise = float((weights * counts * squares).sum() / counts.sum())
        for name, columns in members.items():
            sd, n = prior[name]
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


def prior_of(law: str) -> dict[str, tuple[float, int]]:
    """PRIOR of a law."""
    return {**PRIOR, **PRIOR_CPU} if law in (DECODE_CPU, PREFILL_CPU) else PRIOR


def times_of_parts(times: np.ndarray, parts: Sequence[str], law: str) -> np.ndarray:
    """The parts of each row's time, which add up: as lab/roofline/datasheet.py overlaps them."""
    if law != DECODE_CPU:
        return times
    both = [parts.index("arithmetic"), parts.index("weights")]
    powers = times[both] ** datasheet.OVERLAP
    total = powers.sum(axis=0)
    overlapped = times.copy()
    overlapped[both] = powers / total * total ** (1 / datasheet.OVERLAP)
    return overlapped


def _sd(
    cases: Sequence[DatasheetCase],
    phase: str,
    at: dict[tuple[str, str], int],
    covariance: np.ndarray,
) -> dict[str, dict[str, float]]:
    """The standard deviations of the sums of the factors that describe a device, and less."""
    main_part = "weights" if phase == DECODE else "arithmetic"
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
                for name in factors[kind]:
                    if (name, levels[name]) in at:
                        columns.append(at[name, levels[name]])
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
    factors: dict[str, dict[str, float]] = {name: {} for name in prior_of(phase)}
    for (name, level), value in values_at.items():
        if name:
            factors[name][level] = math.exp(value)
    factors["model"] = {
        model: float(n) for model, n in sorted(Counter(row.model for row in rows).items())
    }
    figures = {part: math.exp(values_at["", part]) for part in START[phase]}
    if "attention" in figures:
        figures["attention"] *= figures["arithmetic"]
    elif phase == DECODE:
        figures["arithmetic"] = figures[
            "weights"
        ]  # of several users: a token of one is bounded by its bytes
    sds = {name: math.sqrt(value) for name, value in spread.items()} | {"model": 0.1}
    return LearnedRates(phase.partition(" on ")[0], figures, factors, sds, {})


def error(
    learned: LearnedRates, row: Row, condition: datasheet.Condition | None = None
) -> float:
    """Logarithm of the measured over the predicted time."""
    expected = learned.expected_s(case_of(row), condition)
    assert expected is not None
    return math.log(seconds(row) / expected)


def fits_without(
    rows: Sequence[Row],
    phase: str,
    key: Callable[[Row], str],
    all_rows: Sequence[Row] | None = None,
) -> dict[str, LearnedRates]:
    """For each group what all rows teach without it, and without the others of its fold."""
    groups = sorted({key(row) for row in rows})
    fits = {}
    for number in range(FOLDS):
        fold = set(groups[number::FOLDS])
        if fold:
            fitted = fit([row for row in all_rows or rows if key(row) not in fold], phase)
            fits.update(dict.fromkeys(fold, fitted))
    return fits


def held_out(rows: Sequence[Row], law: str) -> list[tuple[Row, LearnedRates]]:
    """Each row with what rows of other publishers teach; of collections, of other devices."""
    of_others = [row for row in rows if by_publisher(row) not in COLLECTIONS]
    of_collections = [row for row in rows if by_publisher(row) in COLLECTIONS]
    by_publishers = fits_without(of_others, law, by_publisher, rows)
    by_devices = fits_without(of_collections, law, by_device, rows)
    held = [(row, by_publishers[by_publisher(row)]) for row in of_others]
    return held + [(row, by_devices[by_device(row)]) for row in of_collections]


def beside_own(
    held: Sequence[tuple[Row, LearnedRates]],
) -> list[tuple[Row, LearnedRates, datasheet.Condition]]:
    """Rows that have another row of the same device and publisher, as if a user had measured it.

    A row is there twice if there is one of the same quantization and one of another one.
    """
    rows = [row for row, _ in held]
    beside = []
    for row, learned in held:
        for condition in own_conditions(rows, row, learned):
            beside.append((row, learned, condition))
    return beside


def own_conditions(
    rows: Sequence[Row], row: Row, learned: LearnedRates
) -> list[datasheet.Condition]:
    """What one of the device's rows of another model says, and one of another quantization."""
    of_type = []
    of_others = []
    for candidate in rows:
        is_same_device = candidate.device == row.device
        is_same_build = (candidate.backend, candidate.source) == (row.backend, row.source)
        if not (is_same_device and is_same_build):
            continue
        if candidate.quantization != row.quantization:
            of_others.append(candidate)
        elif candidate.model != row.model:
            of_type.append(candidate)
    conditions = []
    for candidates in (of_type, of_others):
        if candidates:
            chosen = candidates[zlib.crc32(repr(row).encode()) % len(candidates)]
            measured = [(case_of(chosen), seconds(chosen))]
            conditions.append(conditioning.condition(learned, case_of(row), measured))
    return conditions


def error_of(
    learned: LearnedRates,
    row: Row,
    knowledge: str,
    condition: datasheet.Condition | None = None,
) -> Error:
    """The error of a row, in standard deviations without what unpublished factors explain."""
    case = case_of(row)
    off = error(learned, row, condition)
    unexplained = max(0.0, off**2 - learned.wide(case) ** 2)
    score = math.copysign(math.sqrt(unexplained) / learned.deviation(case, condition), off)
    ending = LONG_ONES if case.n_prompt > LONG else ""
    groups = [*datasheet.range_groups(case, knowledge), "all"]
    return Error(row, off, score, tuple(f"{group}{ending}" for group in groups))


def ranges(errors: Errors) -> dict[str, dict[str, float]]:
    """By group of rows: the ratios at both ends. A group leans on the one that it is a part of."""
    members: dict[str, Errors] = {}
    wider: dict[str, str | None] = {}
    for e in errors:
        for group, larger in zip(e.groups, [*e.groups[1:], None], strict=True):
            members.setdefault(group, []).append(e)
            wider[group] = larger
    sizes: dict[str, tuple[float, float]] = {}
    for group in sorted(members, key=lambda name: len(chain_of(name, wider))):
        larger = wider[group]
        of_larger = None if larger is None else sizes[larger]
        sizes[group] = ends_of(members[group], of_larger)
    for group in ("all", f"all{LONG_ONES}"):
        sizes.setdefault(group, ends_of(errors, None))
    return {
        group: {"fast": math.exp(-fast), "slow": math.exp(slow)}
        for group, (fast, slow) in sizes.items()
    }


def chain_of(group: str, wider: dict[str, str | None]) -> list[str]:
    """The groups that a group is a part of, itself included."""
    larger = wider[group]
    return [group, *(chain_of(larger, wider) if larger else [])]


def ends_of(errors: Errors, larger: tuple[float, float] | None) -> tuple[float, float]:
    """The fast and the slow end of a group, in standard deviations."""
    rows = [e.row for e in errors]
    weights = weights_of(rows)
    n = len(set(map(measurer, rows)))
    ends = []
    for side, sign in enumerate((-1, 1)):
        scores = np.array([sign * e.score for e in errors])
        end = max(LEAST_SCORE, quantile(scores, weights, TAIL))
        if larger is not None:
            end = math.exp((n * math.log(end) + LEANS * math.log(larger[side])) / (n + LEANS))
        ends.append(end)
    return ends[0], ends[1]


def is_inside(
    learned: LearnedRates,
    row: Row,
    off: float,
    condition: datasheet.Condition | None = None,
) -> bool:
    case = case_of(row)
    (low, high) = learned.range(case, condition)
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


# Three parts of the rows, by who published them


LEARN = "learn"
CALIBRATE = "calibrate"
TEST = "test"
"""The rows of each publisher in the first two parts, and of each device in COLLECTIONS, are
predicted from the other rows, and these errors make the ranges (cross-conformal prediction). The
third part tests this: no width is chosen on it. What ships was made so from all three parts."""

COLLECTIONS = (
    "localscore",
    "llama.cpp CUDA Scoreboard",
    "llama.cpp ROCm Scoreboard",
    "llama.cpp Vulkan Scoreboard",
    "llama.cpp Apple Silicon Scoreboard",
    "ik_llama.cpp",
)
"""Large collections, all of them from before May 2026: the others depend on them."""

PROMISED = 0.90
MOST_HELD = 0.98
"""The share of rows that ranges are to hold. Publishers are drawn, and then rows of each, so the
quantile is that of all rows where each publisher has the same weight, at the level PROMISED
(n + 1) / n of n publishers (hierarchical conformal prediction: Dunn, Wasserman, Ramdas,
"Distribution-free prediction sets for two-layer hierarchical models", 2023). The scores are errors
over the size of the range, which differs by group (locally weighted: Lei, G'Sell, Rinaldo,
Tibshirani, Wasserman, "Distribution-free predictive inference for regression", 2018)."""

SCALES = 0.5, 4.0  # the ends of a scale

LEAST_MEASURERS = LEANS
"""Fewer cannot tell what holds PROMISED of the next one: (n + 1) PROMISED would be above n.

A group that has as many takes a scale of its own (Mondrian conformal prediction: Vovk, Gammerman,
Shafer, "Algorithmic learning in a random world", 2005)."""


def publisher(source: str) -> str:
    """Who published a source: the owner of a repository, a collection, or one pull request."""
    name = source.removeprefix("ikawrakow/").removeprefix("ggml-org/")
    if name.startswith("ik_llama.cpp"):
        return "ik_llama.cpp"
    if re.match("llama.cpp (PR|issue|docs|benches)", name):
        return name.partition(" (")[0]
    return name if "Scoreboard" in name else re.split("[/ ]", name)[0]


def part_of(row: Row) -> str:
    """The part of a row: chosen once, by a checksum of its publisher; never by its figures."""
    name = publisher(row.source)
    digit = zlib.crc32(name.encode()) % 10
    if name in COLLECTIONS or digit < 4:
        return LEARN
    return CALIBRATE if digit < 7 else TEST


def by_publisher(row: Row) -> str:
    return publisher(row.source)


def measurer(row: Row) -> tuple[str, ...]:
    """Who measured a row: its publisher; in a collection everybody sends another device."""
    name = publisher(row.source)
    return (name, row.device) if name in COLLECTIONS else (name,)


def weights_of(rows: Sequence[Row]) -> np.ndarray:
    """Weights of rows: all measurers alike, and all collections together like all others."""
    counts = Counter(map(measurer, rows))
    n_others = sum(len(name) == 1 for name in counts)
    n_collected = len(counts) - n_others
    of_collected = min(1.0, max(1, n_others) / max(1, n_collected))
    weights = []
    for row in rows:
        name = measurer(row)
        weights.append((1.0 if len(name) == 1 else of_collected) / counts[name])
    return np.array(weights)


def learn_in_parts(rows: Sequence[Row], law: str) -> tuple[LearnedRates, list[Row]]:
    """What the first two parts teach, with ranges of their errors; and the third part's rows."""
    of_law = [row for row in clean(rows) if law_of(row) == law]
    first_parts = [row for row in of_law if part_of(row) != TEST]
    third = [row for row in of_law if part_of(row) == TEST]
    return learn_with_ranges(first_parts, law), third


def learn_with_ranges(rows: Sequence[Row], law: str) -> LearnedRates:
    """What rows teach, with ranges that hold the rows of a publisher who is left out."""
    held_without = held_out(rows, law)
    files = noise_of_files(held_without)
    held = [(row, with_noise_of_files(learned, files)) for row, learned in held_without]
    beside = beside_own(held)
    errors = []
    for row, learned in held:
        errors.append(error_of(learned, row, learned.knowledge(case_of(row))))
    errors_beside = []
    for row, learned, condition in beside:
        errors_beside.append(error_of(learned, row, condition.knowledge, condition))
    of_ranges = {**ranges(errors_beside), **ranges(errors)}
    stretches = []
    for (row, learned), e in zip(held, errors, strict=True):
        factor = stretch(replace(learned, ranges=of_ranges), row)
        stretches.append(Stretch(row, factor, e.groups))
    stretches_beside = []
    for (row, learned, condition), e in zip(beside, errors_beside, strict=True):
        factor = stretch(replace(learned, ranges=of_ranges), row, condition)
        stretches_beside.append(Stretch(row, factor, e.groups[:-1]))
    scale = scales(stretches) | scales(stretches_beside)
    learned = with_noise_of_files(fit(rows, law), files)
    return replace(learned, ranges=of_ranges, scale=scale)


def with_noise_of_files(learned: LearnedRates, noise: dict[str, float]) -> LearnedRates:
    """What was learned with the figures of `noise_of_files`."""
    return replace(learned, sd={**learned.sd, "noise": {**learned.sd["noise"], **noise}})


def noise_of_files(held: Sequence[tuple[Row, LearnedRates]]) -> dict[str, float]:
    """Standard deviations of errors between files of one device and publisher, pooled.

    "files": of any files; "models": of those with one quantization.
    """
    by_file: dict[tuple[str, ...], list[float]] = {}
    for row, learned in held:
        key = row.source, row.device, row.backend, row.quantization, row.model
        by_file.setdefault(key, []).append(error(learned, row))
    medians = {key: float(np.median(errors)) for key, errors in by_file.items()}
    of_device = len(("source", "device", "backend"))
    return {
        "files": pooled_deviation(medians, of_device),
        "models": pooled_deviation(medians, of_device + 1),
    }


def pooled_deviation(values: dict[tuple[str, ...], float], n_shared: int) -> float:
    """The standard deviation of values whose keys share the first parts."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for key, value in values.items():
        groups.setdefault(key[:n_shared], []).append(value)
    variances = [np.var(group, ddof=1) for group in groups.values() if len(group) > 1]
    return math.sqrt(float(np.mean(variances)))


class Stretch(NamedTuple):
    """The factor by which a row's range has to grow to hold it, and the row's groups (`Error`)."""

    row: Row
    factor: float
    groups: tuple[str, ...]


def scales(stretches: Sequence[Stretch]) -> dict[str, float]:
    """By group: how much wider its ranges must be to hold enough of its rows.

    A group of too few measurers has none: its rows take the scale of the next larger group, on
    which the others lean.
    """
    members: dict[str, list[Stretch]] = {}
    wider: dict[str, str | None] = {}
    for tried in stretches:
        for group, larger in zip(tried.groups, [*tried.groups[1:], None], strict=True):
            members.setdefault(group, []).append(tried)
            wider[group] = larger
    by_group: dict[str, float] = {}
    for group in sorted(members, key=lambda name: len(chain_of(name, wider))):
        *_, larger_one = [
            None,
            *(name for name in chain_of(group, wider) if name in by_group),
        ][:2]
        rows = [tried.row for tried in members[group]]
        if larger_one is None:
            by_group[group] = scale_of(members[group])
        elif len(set(map(measurer, rows))) >= LEAST_MEASURERS:
            n = len(set(map(by_publisher, rows)))
            total = n * math.log(scale_of(members[group])) + LEANS * math.log(
                by_group[larger_one]
            )
            by_group[group] = math.exp(total / (n + LEANS))
    return by_group


def scale_of(tries: Sequence[Stretch]) -> float:
    """The scale that holds enough of a group's rows."""
    rows = [tried.row for tried in tries]
    n = len(set(map(measurer, rows)))
    share = min(MOST_HELD, PROMISED * (n + 1) / n)
    factors = np.array([tried.factor for tried in tries])
    return float(np.clip(quantile(factors, weights_of(rows), share), *SCALES))


def stretch(
    learned: LearnedRates, row: Row, condition: datasheet.Condition | None = None
) -> float:
    """The factor by which the logarithm of a row's range has to grow to hold the row."""
    off = error(learned, row, condition)
    low, high = learned.range(case_of(row), condition)
    return off / math.log(high if off > 0 else low)


def quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values)
    below = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(len(order) - 1, int(np.searchsorted(below, share)))])


def learn(rows: Sequence[Row], law: str) -> LearnedRates:
    """Factors and ranges of all rows; and the test of what the first two parts taught."""
    in_parts, third = learn_in_parts(rows, law)
    of_law = [row for row in clean(rows) if law_of(row) == law]
    learned = learn_with_ranges(of_law, law)
    for backend in ("all", *sorted({row.backend for row in third})):
        tested = [row for row in third if backend in ("all", row.backend)]
        learned.evaluation[backend] = evaluation(in_parts, tested)
    return learned


def evaluation(learned: LearnedRates, rows: Sequence[Row]) -> dict[str, float]:
    """Rows, devices, those inside, the median error and the median width of the ranges."""
    errors = [error(learned, row) for row in rows]
    widths = []
    n_inside = 0
    for row, off in zip(rows, errors, strict=True):
        low, high = learned.range(case_of(row))
        widths.append(high / low)
        n_inside += is_inside(learned, row, off)
    return {
        "n_rows": len(rows),
        "n_devices": len({row.device for row in rows}),
        "inside": n_inside,
        "error": math.expm1(float(np.median(np.abs(errors)))),
        "width": float(np.median(widths)),
    }


def main() -> None:
    text = (
        "# Made by python -m tests.bench.learn_published;"
        " lab/roofline/datasheet.py explains the figures.\n"
    )
    for law in LAWS:
        learned = learn(published(), law)
        text += f'\n["{law}"]\n'
        tables = {"parts": learned.parts, "spread": learned.spread, "scale": learned.scale}
        for name, values in tables.items():
            text += _table(f'"{law}".{name}', values)
        for name, values in learned.sd.items():
            text += _table(f'"{law}".sd."{name}"', values)
        for name, values in learned.factors.items():
            text += _table(f'"{law}".factors."{name}"', values)
        for name, values in sorted(learned.ranges.items()):
            text += _table(f'"{law}".ranges."{name}"', values)
        for name, values in learned.evaluation.items():
            text += _table(f'"{law}".evaluation."{name}"', values)
            print(law, name, values)
    OUT.write_text(text)


def _table(name: str, values: dict[str, float]) -> str:
    text = f"\n[{name}]\n"
    for key, value in values.items():
        text += f'"{key}" = {value:.4g}\n'
    return text


if __name__ == "__main__":
    main()
