"""The record of errors: predictions of rates that nothing was learned from.

    python -m tests.bench.published --write      # models/record.csv, and the picture of it
    python -m tests.bench.published              # the table, and rates of the user's own
    python -m tests.bench.published --rows FILE  # rows of clean_published, by what was learned

Rows of models/published.csv are in three parts, by their publishers
(tests/bench/learn_published.py). The third is predicted from the first two, which also made the
ranges. Wanted: 90 to 95 % inside, off by 20 % at the median on GPUs and 30 % on processors, with
ends 2.0 (decode), 2.5 (prefill) and 3.0 (processors) apart.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lab.core.memory import CPU
from lab.core.record import PREFILL
from lab.features.predict.published_record import KINDS, RecordedRate, rate_groups
from lab.roofline import datasheet
from lab.roofline.datasheet import LONG, Condition, LearnedRates
from tests.bench.learn_published import (
    LAWS,
    PUBLISHED,
    USUAL_LENGTH,
    Row,
    beside_own,
    case_of,
    clean,
    error,
    is_inside,
    law_of,
    learn_in_parts,
    published,
    seconds,
)

RECORD = PUBLISHED.with_name("record.csv")
PICTURE = PUBLISHED.parents[1] / "results" / "published-predicted.png"
STYLES = {
    "CUDA": ("#0072B2", "o"),
    "Metal": ("#E69F00", "s"),
    "ROCm": ("#D55E00", "^"),
    "Vulkan": ("#009E73", "D"),
    "CPU": ("#CC79A7", "v"),
    "SYCL": ("#56B4E9", "P"),
}
"""Colours of Okabe and Ito, which colour-blind people can tell apart; the shape says the same."""


def tried(learned: LearnedRates, row: Row, own: Condition | None = None) -> dict[str, Any]:
    """A row with the logarithm of its measured over its predicted time, and its range."""
    off = error(learned, row, own)
    case = case_of(row)
    low, high = learned.range(case, own)
    n_tokens = (row.n_prompt or USUAL_LENGTH) if row.phase == PREFILL else 1
    expected = n_tokens * math.exp(off) / seconds(row)
    return {
        **row._asdict(),
        "off": off,
        "expected": expected,
        "low": expected / high,
        "high": min(expected / low, n_tokens / (case.least_s or math.inf)),
        "inside": is_inside(learned, row, off, own),
        "width": high / low,
        "on": "processors" if row.backend == CPU else "GPUs",
        "length": "long" if case.n_prompt > LONG else "short",
        "experts": "mixtures" if case.has_experts else "dense",
    }


def third_part() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the third part, predicted; and those beside one rate of their publisher."""
    rows = []
    beside = []
    for law in LAWS:
        learned, third = learn_in_parts(published(), law)
        rows += [tried(learned, row) for row in third]
        for row, _, own in beside_own([(row, learned) for row in third]):
            beside.append(tried(learned, row, own))
    return pd.DataFrame(rows), pd.DataFrame(beside)


def write(rows: pd.DataFrame) -> None:
    """models/record.csv: every row of the third part with its prediction, in tokens/s."""
    ordered = rows.sort_values(["phase", "backend", "device", "model", "quantization", "tps"])
    with RECORD.open("w", encoding="utf-8", newline="") as file:
        names = [field.name for field in dataclasses.fields(RecordedRate)]
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        for row in ordered[names].astype(object).fillna("").itertuples(index=False):
            writer.writerow(map(cell, row))


def cell(value: object) -> str:
    """A number with four digits, whole where it is a count."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def page_table() -> str:
    """The table of docs/machines.md, from models/record.csv."""
    lines = ["| predicted from others' rows | rates | inside | median error | ends apart |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for group in rate_groups():
        label = group.label
        if label.endswith(tuple(KINDS)):
            label = f"**{label}**"
        lines.append(
            f"| {label} | {len(group.rates)} | {100 * group.inside:.0f} % |"
            f" {100 * group.error:.0f} % | {group.width:.1f} |"
        )
    return "\n".join(lines)


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
    figure.suptitle("Rates of publishers that were kept aside (dotted: 25 % off)", fontsize=11)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    if asked.rows:
        print(table(of_file(asked.rows), GROUPS))
        return
    rows, beside = third_part()
    print(table(rows, GROUPS))
    print("\nBeside one rate of the same publisher and device (lab predict --measured):\n")
    print(table(beside, GROUPS[:2]))
    if asked.write:
        write(rows)
        draw(rows, PICTURE)


if __name__ == "__main__":
    main()
