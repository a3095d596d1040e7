"""The record of errors: predictions of rates that nothing was learned from.

    python -m tests.bench.published --write      # models/record.csv, and the picture of it
    python -m tests.bench.published              # the table, and rates of the user's own
    python -m tests.bench.published --draw       # the picture of models/record.csv
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
from typing import TYPE_CHECKING, Any

import pandas as pd

from lab.core.memory import CPU
from lab.core.record import PREFILL
from lab.features.predict.published_record import (
    KINDS,
    PHASES,
    RecordedRate,
    median_error,
    rate_groups,
    recorded_rates,
)
from lab.roofline import datasheet
from lab.roofline.datasheet import LONG, Condition, LearnedRates
from lab.show import canvas
from lab.show.canvas import GUIDE, LABEL_SIZE
from lab.show.point_labels import label_points
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RECORD = PUBLISHED.with_name("record.csv")
PICTURE = PUBLISHED.parents[1] / "results" / "published-predicted.png"
N_NAMED = 3  # points of a panel that are named, the furthest off
STYLES = {
    "CUDA": ("#0072B2", "o"),
    "Metal": ("#E69F00", "s"),
    "ROCm": ("#D55E00", "^"),
    "Vulkan": ("#009E73", "D"),
    "CPU": ("#CC79A7", "v"),
    "SYCL": ("#56B4E9", "P"),
}
"""Colours of Okabe and Ito, which colour-blind people can tell apart; the shape says the same."""


def tried(
    learned: LearnedRates, row: Row, condition: Condition | None = None
) -> dict[str, Any]:
    """A row with the logarithm of its measured over its predicted time, and its range."""
    off = error(learned, row, condition)
    case = case_of(row)
    low, high = learned.range(case, condition)
    n_tokens = (row.n_prompt or USUAL_LENGTH) if row.phase == PREFILL else 1
    expected = n_tokens * math.exp(off) / seconds(row)
    return {
        **row._asdict(),
        "off": off,
        "expected": expected,
        "low": expected / high,
        "high": min(expected / low, n_tokens / (case.least_s or math.inf)),
        "inside": is_inside(learned, row, off, condition),
        "width": high / low,
        "on": "processors" if row.backend == CPU else "GPUs",
        "length": "long" if case.n_prompt > LONG else "short",
        "experts": "mixtures" if case.has_experts else "dense",
        "beside": "" if condition is None else condition.knowledge,
    }


def third_part() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of the third part, predicted; and those beside one rate of their publisher."""
    rows = []
    beside = []
    for law in LAWS:
        learned, third = learn_in_parts(published(), law)
        rows += [tried(learned, row) for row in third]
        for row, _, condition in beside_own([(row, learned) for row in third]):
            beside.append(tried(learned, row, condition))
    return pd.DataFrame(rows), pd.DataFrame(beside)


def write(rows: pd.DataFrame) -> None:
    """models/record.csv: every row of the third part with its prediction, in tokens/s."""
    ordered = rows.sort_values(["phase", "backend", "device", "model", "quantization", "tps"])
    ordered = ordered.astype({"n_prompt": "Int64"})  # a length may be unknown
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


def draw_record() -> None:
    """results/published-predicted.png, from models/record.csv."""
    with canvas.own_style():
        canvas.drawn(draw, (11, 5.6)).savefig(PICTURE, dpi=110)


def draw(figure: Figure) -> None:
    """Predicted over published rates of the record, a panel for each phase."""
    rates = recorded_rates()
    panels = figure.subplots(1, len(PHASES))
    for ax, phase in zip(panels, PHASES, strict=True):
        draw_phase(ax, [rate for rate in rates if rate.phase == phase])
    n_sources = len({rate.source for rate in rates})
    title = f"{len(rates)} rates of {n_sources} publishers, predicted from the rates of others"
    n_inside = sum(rate.is_inside for rate in rates)
    canvas.finish(panels, f"{title}\n{n_inside} lie in their predicted range", is_apart=True)
    for ax, phase in zip(panels, PHASES, strict=True):
        name_outliers(ax, [rate for rate in rates if rate.phase == phase])


def draw_phase(ax: Axes, rates: Sequence[RecordedRate]) -> None:
    """Draw rates by backend, filled outside of their ranges, and the line of equality."""
    for backend, (colour, marker) in STYLES.items():
        of_backend = [rate for rate in rates if rate.backend == backend]
        style: dict[str, Any] = {
            "ls": "",
            "ms": 5,
            "mew": 1,
            "color": colour,
            "marker": marker,
        }
        for lies_inside, face in ((True, "none"), (False, colour)):
            group = [rate for rate in of_backend if rate.is_inside == lies_inside]
            published_tps = [rate.tps for rate in group]
            ax.plot(published_tps, [rate.expected for rate in group], mfc=face, **style)
        if of_backend:
            ax.plot([], [], mfc="none", **style, label=backend)
    ax.plot(
        [], [], ls="", marker="o", ms=5, color=GUIDE, label="outside of its range (filled)"
    )
    ends = [min(rate.tps for rate in rates) / 2, max(rate.tps for rate in rates) * 2]
    ax.plot(ends, ends, color=GUIDE, lw=0.9, zorder=0, label="predicted = published")
    for label, factor in (("25 % off", 1.25), ("_", 0.8)):
        values = [factor * end for end in ends]
        ax.plot(ends, values, ":", color=GUIDE, lw=0.9, zorder=0, label=label)
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="published (tokens/s)", ylabel="predicted (tokens/s)")
    corner: dict[str, Any] = {
        "transform": ax.transAxes,
        "fontsize": LABEL_SIZE,
        "color": GUIDE,
    }
    ax.text(0.03, 0.95, "above the line: predicted too fast", **corner)
    ax.text(0.97, 0.03, "below: predicted too slow", ha="right", **corner)
    n_inside = sum(rate.is_inside for rate in rates)
    error = 100 * median_error([rate.off for rate in rates])
    title = f"{rates[0].phase}: {n_inside} of {len(rates)} inside, median error {error:.0f} %"
    ax.set_title(title, fontsize=canvas.PANEL_SIZE)


def name_outliers(ax: Axes, rates: Sequence[RecordedRate]) -> None:
    """Name the models that are furthest off, at the worst rate of each."""
    worst: dict[str, RecordedRate] = {}
    for rate in sorted(rates, key=lambda rate: -abs(rate.off)):
        worst.setdefault(rate.model, rate)
    labels = []
    for rate in list(worst.values())[:N_NAMED]:
        name = f"{rate.model}, {rate.device}: {math.exp(abs(rate.off)):.1f}x"
        labels.append((rate.tps, rate.expected, name))
    label_points(ax, labels, [(rate.tps, rate.expected) for rate in rates])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--draw", action="store_true")
    asked = parser.parse_args()
    if asked.draw:
        draw_record()
        return
    if asked.rows:
        print(table(of_file(asked.rows), GROUPS))
        return
    rows, beside = third_part()
    print(table(rows, GROUPS))
    print("\nBeside one rate of the same publisher and device (lab predict --measured):\n")
    print(table(beside, [*GROUPS[:2], ("phase", "on", "beside")]))
    if asked.write:
        write(rows)
        draw_record()


if __name__ == "__main__":
    main()
