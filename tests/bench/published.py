"""How often predictions from datasheets are right: python -m tests.bench.published

Leaves out one device, one source, one model at a time, learns from the other rows of models/published.csv, and compares
the predictions with the rows that were left out. Wanted: at least 90 % of them in their 90 % range each time, and a
median error of at most 12 % in decode and 20 % in prefill when a device is left out.

    python -m tests.bench.published --plot results/published-predicted.png
    python -m tests.bench.published --rows FILE     # rows of another file that clean_published made: learns from none
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lab.core.record import DECODE
from lab.features.predict import datasheet
from lab.features.predict.datasheet import Learned
from tests.bench.learn_published import (
    PHASES,
    Errors,
    Row,
    case_of,
    clean,
    error,
    fit,
    is_inside,
    left_out,
    published,
    ranges,
)

WANTED = {DECODE: 0.12, "prefill": 0.20}
STYLES = {
    "CUDA": ("#0072B2", "o"),
    "Metal": ("#E69F00", "s"),
    "ROCm": ("#D55E00", "^"),
    "Vulkan": ("#009E73", "D"),
    "tinyBLAS": ("#CC79A7", "v"),
    "SYCL": ("#56B4E9", "P"),
}
"""Colours of Okabe and Ito, which colour-blind people can tell apart; the shape says the same."""

KEYS: dict[str, Callable[[Row], str]] = {
    "device": lambda row: row.device,
    "source": lambda row: row.source,
    "model": lambda row: row.model,
}
LENGTHS = "short", "3k to 36k", "longer"
Tried = list[tuple[Row, float, bool, float]]
"""A row, the logarithm of its measured over its predicted time, whether the range holds it, and the range's width."""


def tried(rows: Sequence[Row], errors: Errors, key: Callable[[Row], str], phase: str) -> Tried:
    """Every row, predicted without the rows that share its key; their errors do not make its range either."""
    found: Tried = []
    for group in sorted({key(row) for row in rows}):
        known = fit([row for row in rows if key(row) != group], phase)
        known = replace(known, ranges=ranges([one for one in errors if key(one[0]) != group]))
        found += [_tried(known, row) for row in rows if key(row) == group]
    return found


def _tried(known: Learned, row: Row) -> tuple[Row, float, bool, float]:
    off = error(known, row)
    low, high = known.range(case_of(row))
    return row, off, is_inside(known, row, off), high / low


def line(name: str, found: Tried) -> str:
    median = math.expm1(statistics.median(abs(one[1]) for one in found))
    inside = sum(one[2] for one in found)
    width = statistics.median(one[3] for one in found)
    return f"| {name} | {len(found)} | {100 * median:.0f} % | {100 * inside / len(found):.0f} % | {width:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    every = clean(published())
    print("| left out | rows | median error | inside the 90 % range | width of the range (times) |")
    print("| --- | --- | --- | --- | --- |")
    by_device: dict[str, Tried] = {}
    for phase in PHASES:
        rows = [row for row in every if row.phase == phase]
        if asked.rows:
            others = [row for row in clean(published(asked.rows)) if row.phase == phase]
            compare(phase, [_tried(datasheet.learned()[phase], row) for row in others])
            continue
        errors = left_out(rows, phase, KEYS["device"])
        for name, key in KEYS.items():
            if len({key(row) for row in rows}) > 1:
                compare(f"{phase}: {name}", found := tried(rows, errors, key, phase), by_length=name != "model")
                by_device |= {phase: found} if name == "device" else {}
    if asked.plot:
        draw(by_device, asked.plot)


def compare(name: str, found: Tried, by_length: bool = True) -> None:
    """Print all rows' line, then those of each length and backend, or of each model."""
    print(line(f"**{name}**", found))
    groups: dict[str, Tried] = {}
    for one in found:
        case = case_of(one[0])
        length = 1 + sum(case.n_prompt > end for end in (datasheet.LONG, 36_000))
        names = [f"{length}. {LENGTHS[length - 1]}", f"{length}. {LENGTHS[length - 1]}, {case.levels['runtime']}"]
        for group in names if by_length else [one[0].model]:
            groups.setdefault(group, []).append(one)
    for group, own in sorted(groups.items()):
        print(line(group, own))


def draw(by_phase: dict[str, Tried], path: Path) -> None:
    """Predicted over measured rates, each device predicted without its own rows."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(by_phase), figsize=(11, 5.2), layout="constrained")
    for axis, (phase, found) in zip(axes, by_phase.items(), strict=True):
        for backend, (colour, marker) in STYLES.items():
            own = [(row.tps, row.tps * math.exp(off)) for row, off, *_ in found if row.backend == backend]
            if own:
                style = {"s": 16, "alpha": 0.7, "color": colour, "marker": marker, "label": backend}
                axis.scatter(*zip(*own, strict=True), **style)
        ends = [min(row.tps for row, *_ in found) / 1.3, max(row.tps for row, *_ in found) * 1.3]
        for factor, dashes in ((1, "-"), (1.25, ":"), (0.8, ":")):
            axis.plot(ends, [factor * end for end in ends], dashes, color="0.4", linewidth=0.9, zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="published, tokens/s", ylabel="predicted, tokens/s")
        axis.set_title(f"{phase}: each device predicted without its own rows", fontsize=10)
    axes[0].legend(fontsize=8, title="backend", title_fontsize=8)
    figure.suptitle("Predictions from datasheets (dotted: 25 % off)", fontsize=11)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
