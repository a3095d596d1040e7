"""Learn models/learned.toml from models/published.csv: python -m tests.bench.learn_published

Fits, for decode and for prefill, the factors of lab/why/published.py by partial pooling: each factor (the logarithm) is
drawn to 0 as strongly as the levels of its kind differ little; those variances come from the rows too, starting from
PRIOR. Rows that lie far off count less (Student's t), and so do devices. Then leaves out each device in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from lab.core.record import DECODE, PREFILL
from lab.errors import LabError
from lab.models import catalog, shapes
from lab.why import datasheet, published
from lab.why.published import Case, Learned, Row, Work

OUT = Path(__file__).parents[2] / "models" / "learned.toml"
PHASES = DECODE, PREFILL
FACTORS = "backend", "runtime", "architecture", "family", "quantization", "device"
PRIOR = {
    "backend": (0.3, 2),
    "runtime": (0.3, 4),
    "architecture": (0.2, 4),
    "family": (0.1, 4),
    "quantization": (0.07, 4),
    "device": (0.1, 4),
    "flash": (0.1, 3),
    "constant": (0.5, 3),
}
"""Standard deviation of a factor's levels (of logarithms) before any row was seen, and the levels it counts as."""

USUAL_LENGTH, UBATCH = 1024, 512
"""Tokens of a prompt whose length is not published, and of a step."""

START = {DECODE: (0.6, 20.0), PREFILL: (0.6, 1.0)}
HEAVY = 3
"""Degrees of freedom of the t distribution of rows and of devices."""

ROUNDS = 12
POOLED = 20
"""Rows of other runtimes that a runtime's range leans on."""

OUTSIDE = 0.03
"""At each end of a range: 94 % inside, because 90 % are promised for rows that were not seen."""

Errors = list[tuple[Row, float]]


def clean(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if not row.marks]


def seconds(row: Row) -> float:
    """Of a token in decode, of the whole prompt in prefill."""
    return (1 if row.phase == DECODE else row.n_prompt or USUAL_LENGTH) / row.tps


@cache
def work(name: str, quantization: str, phase: str, n_prompt: int) -> Work | None:
    """The work on a model of the catalog; None where it, or its quantization, is unknown."""
    try:
        model = shapes.model_of(catalog.find(name), quantization)
    except LabError:
        return None
    return published.work_of(model, phase, n_prompt, UBATCH, ("f16", "f16"))


@cache
def case_of(row: Row) -> Case:
    n_prompt = row.n_prompt or USUAL_LENGTH
    done = work(row.model, row.quantization, row.phase, n_prompt)
    assert done is not None, row
    what = row.backend, row.runtime, row.model, row.quantization, row.flash_attn
    return Case(row.phase, datasheet.find_device(row.device), row.gpu_share, *what, done, n_prompt)


def fit(rows: Sequence[Row], phase: str) -> Learned:
    """The factors; without ranges."""
    cases = [case_of(row) for row in rows]
    base = np.array([case.base_s for case in cases], dtype=float)
    extra = np.array([case.extra for case in cases])
    times = np.log([seconds(row) for row in rows])
    columns: list[tuple[str, str]] = [("", "share"), ("", "constant")]
    for name in FACTORS:
        columns += [(name, level) for level in sorted({case.levels[name] for case in cases})]
    columns += [("flash", level) for level in sorted({case.backend for case in cases})]
    columns += [("constant", level) for level in sorted({case.levels["runtime"] for case in cases})]
    at = {column: i for i, column in enumerate(columns)}
    of_share, of_constant = np.zeros((len(rows), len(columns))), np.zeros((len(rows), len(columns)))
    of_share[:, 0], of_constant[:, 1] = 1, 1
    for i, case in enumerate(cases):
        for name in FACTORS:
            of_share[i, at[name, case.levels[name]]] = 1
        if case.flash_attn is not None:
            of_share[i, at["flash", case.backend]] = 0.5 if case.flash_attn else -0.5
        of_constant[i, at["constant", case.levels["runtime"]]] = 1
    members = {name: np.array([column[0] == name for column in columns]) for name in PRIOR}
    spread = {name: sd**2 for name, (sd, _) in PRIOR.items()}
    start = np.zeros(len(columns))
    start[:2] = np.log(START[phase])
    now, noise = start.copy(), 0.01
    weights, column_weights = np.ones(len(rows)), np.ones(len(columns))
    precision = np.full(len(columns), 0.25)
    for _ in range(ROUNDS):
        shared = base / np.exp(of_share @ now)
        total = shared + np.exp(of_constant @ now) * extra
        part = (shared / total)[:, None]
        slopes = (1 - part) * of_constant - part * of_share
        for name, own in members.items():
            precision[own] = column_weights[own] / spread[name]
        weighted = slopes * (weights / noise)[:, None]
        covariance = np.linalg.inv(weighted.T @ slopes + np.diag(precision))
        step = start + covariance @ (weighted.T @ (times - np.log(total) + slopes @ (now - start))) - now
        now = now + np.clip(step, -0.7, 0.7)
        off = times - np.log(base / np.exp(of_share @ now) + np.exp(of_constant @ now) * extra)
        squares = off**2 + ((slopes @ covariance) * slopes).sum(axis=1)
        weights = (HEAVY + 1) / (HEAVY + squares / noise)
        noise = float((weights * squares).mean())
        for name, own in members.items():
            sd, n = PRIOR[name]
            levels = now[own] ** 2 + np.diag(covariance)[own]
            spread[name] = float(((column_weights[own] * levels).sum() + n * sd**2) / (own.sum() + n))
            if name == "device":
                column_weights[own] = (HEAVY + 1) / (HEAVY + levels / spread[name])
    factors: dict[str, dict[str, float]] = {name: {} for name in PRIOR}
    for (name, level), value in zip(columns[2:], now[2:], strict=True):
        factors[name][level] = math.exp(value)
    counts = {model: float(sum(row.model == model for row in rows)) for model in sorted({row.model for row in rows})}
    sds = {name: math.sqrt(value) for name, value in spread.items()}
    return Learned(math.exp(now[0]), math.exp(now[1]), {**factors, "model": counts}, {**sds, "model": 0.1}, {})


def error(learned: Learned, row: Row) -> float:
    """Logarithm of the measured over the predicted time."""
    expected = learned.expected_s(case_of(row))
    assert expected is not None
    return math.log(seconds(row) / expected)


def left_out(rows: Sequence[Row], phase: str, key: Callable[[Row], str]) -> Errors:
    """The errors of all rows, each predicted without the rows that share its key."""
    found: Errors = []
    for group in sorted({key(row) for row in rows}):
        known = fit([row for row in rows if key(row) != group], phase)
        found += [(row, error(known, row)) for row in rows if key(row) == group]
    return found


def ranges(errors: Errors) -> dict[str, dict[str, float]]:
    """By runtime and for all: the ratios at both ends. A runtime's errors lean on POOLED of the others'."""
    by_runtime: dict[str, list[float]] = {}
    for row, off in errors:
        by_runtime.setdefault(case_of(row).levels["runtime"], []).append(off)
    everything = [off for _, off in errors]
    found = {"all": _range(everything, np.ones(len(everything)))}
    for name, own in by_runtime.items():
        weights = np.concatenate([np.ones(len(own)), np.full(len(everything), POOLED / len(everything))])
        found[name] = {**_range([*own, *everything], weights), "n_rows": len(own)}
    return found


def _range(errors: Sequence[float], weights: np.ndarray) -> dict[str, float]:
    order = np.argsort(errors)
    below = np.cumsum(weights[order]) / weights.sum()
    low, high = (float(np.asarray(errors)[order][np.searchsorted(below, p)]) for p in (OUTSIDE, 1 - OUTSIDE))
    return {"fast": math.exp(min(low, -0.02)), "slow": math.exp(max(high, 0.02)), "n_rows": len(errors)}


def is_inside(learned: Learned, row: Row, off: float) -> bool:
    low, high = learned.range(case_of(row))
    case = case_of(row)
    least = case.work.least_s(case.device, case.gpu_share) or 0.0
    expected = seconds(row) / math.exp(off)
    return max(least, low * expected) <= seconds(row) * (1 + 1e-9) and seconds(row) <= high * expected


def learn(rows: Sequence[Row], phase: str) -> tuple[Learned, Errors]:
    """Factors and ranges of a phase, and the errors for left-out devices that the ranges come from."""
    own = [row for row in clean(rows) if row.phase == phase]
    errors = left_out(own, phase, lambda row: row.device)
    known = replace(fit(own, phase), ranges=ranges(errors))
    inside = set()
    for device in {row.device for row in own}:
        others = replace(known, ranges=ranges([one for one in errors if one[0].device != device]))
        inside |= {row for row, off in errors if row.device == device and is_inside(others, row, off)}
    for name, values in known.ranges.items():
        mine = [row for row in own if name in ("all", case_of(row).levels["runtime"])]
        values["inside"] = sum(row in inside for row in mine)
        values["n_devices"] = len({row.device for row in mine})
    return known, errors


def main() -> None:
    text = "# Made by python -m tests.bench.learn_published; lab/why/published.py explains the figures.\n"
    for phase in PHASES:
        known, _ = learn(published.rows(), phase)
        text += f"\n[{phase}]\nshare = {known.share:.4g}\nconstant = {known.constant:.4g}\n"
        text += _table(f"{phase}.spread", known.spread)
        text += "".join(_table(f"{phase}.factors.{name}", values) for name, values in known.factors.items())
        text += "".join(_table(f'{phase}.ranges."{name}"', values) for name, values in sorted(known.ranges.items()))
    OUT.write_text(text)


def _table(name: str, values: dict[str, float]) -> str:
    return f"\n[{name}]\n" + "".join(f'"{key}" = {value:.4g}\n' for key, value in values.items())


if __name__ == "__main__":
    main()
