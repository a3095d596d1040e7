"""The record of errors: predictions of rates that nothing was chosen on.

    python -m tests.bench.published --plot results/published-predicted.png
    python -m tests.bench.published --rows FILE  # rows of clean_published, by what was learned

Rows of models/published.csv are in three parts, by their publishers
(tests/bench/learn_published.py). The third is predicted from the first two, which also made the
ranges. Wanted: 90 to 95 % inside, off by 20 % at the median on GPUs and 30 % on processors, with
ends 2.0 (decode), 2.5 (prefill) and 3.0 (processors) apart.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.core.memory import CPU
from lab.roofline import datasheet
from lab.roofline.datasheet import LONG, LearnedRates
from tests.bench.learn_published import (
    LAWS,
    Row,
    case_of,
    clean,
    error,
    is_inside,
    law_of,
    learn_in_parts,
    published,
)

STYLES = {
    "CUDA": ("#0072B2", "o"),
    "Metal": ("#E69F00", "s"),
    "ROCm": ("#D55E00", "^"),
    "Vulkan": ("#009E73", "D"),
    "CPU": ("#CC79A7", "v"),
    "SYCL": ("#56B4E9", "P"),
}
"""Colours of Okabe and Ito, which colour-blind people can tell apart; the shape says the same."""


def tried(learned: LearnedRates, row: Row) -> dict[str, Any]:
    """A row with the logarithm of its measured over its predicted time, and its range."""
    off = error(learned, row)
    case = case_of(row)
    low, high = learned.range(case)
    return {
        **row._asdict(),
        "off": off,
        "inside": is_inside(learned, row, off),
        "width": high / low,
        "on": "processors" if row.backend == CPU else "GPUs",
        "length": "long" if case.n_prompt > LONG else "short",
        "experts": "mixtures" if case.has_experts else "dense",
    }


def third_part() -> pd.DataFrame:
    """The rows of the third part, predicted."""
    rows = []
    for law in LAWS:
        learned, third = learn_in_parts(published(), law)
        rows += [tried(learned, row) for row in third]
    return pd.DataFrame(rows)


def of_file(path: Path) -> pd.DataFrame:
    """The rows of a file, predicted by models/learned.toml."""
    rows = []
    for row in clean(published(path)):
        rows.append(tried(datasheet.learned()[law_of(row)], row))
    return pd.DataFrame(rows)


def table(rows: pd.DataFrame, groups: Sequence[Sequence[str]]) -> str:
    """A line for each group: rows, publishers, inside, median error, median width."""
    lines = ["| group | rows | sources | inside | median error | ends apart |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for names in groups:
        for key, group in rows.groupby(list(names)):
            label = ", ".join(key) if isinstance(key, tuple) else str(key)
            inside = 100 * group.inside.mean()
            off = 100 * math.expm1(group.off.abs().median())
            width = group.width.median()
            lines.append(
                f"| {label} | {len(group)} | {group.source.nunique()} | {inside:.0f} %"
                f" | {off:.0f} % | {width:.1f} |"
            )
    return "\n".join(lines)


GROUPS = (
    ("phase", "on"),
    ("phase", "backend"),
    ("phase", "on", "experts"),
    ("phase", "on", "length"),
)


def draw(rows: pd.DataFrame, path: Path) -> None:
    """Predicted over published rates; those outside of their ranges are filled."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    for axis, (phase, of_phase) in zip(axes, rows.groupby("phase"), strict=True):
        for backend, (colour, marker) in STYLES.items():
            for is_in, face in ((True, "none"), (False, colour)):
                group = of_phase[(of_phase.backend == backend) & (of_phase.inside == is_in)]
                axis.scatter(
                    group.tps,
                    group.tps * group.off.map(math.exp),
                    s=22,
                    marker=marker,
                    facecolors=face,
                    edgecolors=colour,
                    label=backend
                    if is_in and len(of_phase[of_phase.backend == backend])
                    else None,
                )
        ends = [of_phase.tps.min() / 1.5, of_phase.tps.max() * 1.5]
        for factor, dashes in ((1, "-"), (1.25, ":"), (0.8, ":")):
            values = [factor * end for end in ends]
            axis.plot(ends, values, dashes, color="0.4", linewidth=0.9, zorder=0)
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="published, tokens/s",
            ylabel="predicted, tokens/s (above the line: too fast)",
        )
        n_inside = int(of_phase.inside.sum())
        axis.set_title(
            f"{phase}: {n_inside} of {len(of_phase)} inside (filled: outside)", fontsize=10
        )
        axis.legend(fontsize=8)
    figure.suptitle(
        "Rates that nothing was learned from or chosen on (dotted: 25 % off)", fontsize=11
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    rows = of_file(asked.rows) if asked.rows else third_part()
    print(table(rows, GROUPS))
    if asked.plot:
        draw(rows, asked.plot)


if __name__ == "__main__":
    main()
