"""How often predictions from datasheets are right: python -m tests.bench.published

Leaves out one device, one source, one model at a time, learns from the other rows of
models/published.csv, and compares the predictions with the rows that were left out. Wanted: at
least 90 % of them in their 90 % range each time, and a median error of at most 12 % in decode and
20 % in prefill when a device is left out.

    python -m tests.bench.published --plot results/published-predicted.png
    python -m tests.bench.published --rows FILE  # rows of clean_published: learns from none
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from lab.roofline import datasheet
from lab.roofline.datasheet import LearnedRates
from tests.bench.learn_published import (
    PHASES,
    Errors,
    Row,
    beside_own,
    by_device,
    by_source,
    case_of,
    clean,
    error,
    fits_without,
    is_inside,
    left_out,
    own_condition,
    published,
    ranges,
)

STYLES = {
    "CUDA": ("#0072B2", "o"),
    "Metal": ("#E69F00", "s"),
    "ROCm": ("#D55E00", "^"),
    "Vulkan": ("#009E73", "D"),
    "tinyBLAS": ("#CC79A7", "v"),
    "SYCL": ("#56B4E9", "P"),
}
"""Colours of Okabe and Ito, which colour-blind people can tell apart; the shape says the same."""


def tried(
    learned: LearnedRates, row: Row, own: datasheet.Condition | None = None
) -> dict[str, Any]:
    """A row with the logarithm of its measured over its predicted time, whether its range holds
    it, and the width."""
    off = error(learned, row, own)
    case = case_of(row)
    (low, high) = learned.range(case, own)
    length = length_of(case.n_prompt)
    outcome = {
        "off": off,
        "inside": is_inside(learned, row, off, own),
        "width": high / low,
        "length": length,
        "knowledge": learned.knowledge(case),
    }
    return {**row._asdict(), **outcome, "runtime": f"{length}, {case.levels['runtime']}"}


def by_model(row: Row) -> str:
    return row.model


def length_of(n_prompt: int) -> str:
    """The group of a prompt length."""
    if n_prompt <= datasheet.LONG:
        return "1. short"
    return "2. 3k to 36k" if n_prompt <= 36_000 else "3. longer"


def without(
    rows: Sequence[Row], errors: Errors, fits: dict[str, LearnedRates], key: str
) -> Iterator[dict[str, Any]]:
    """Every row, predicted without the rows that share its key; their errors do not make its range
    either."""
    for group, fitted in fits.items():
        elsewhere = [e for e in errors if getattr(e.row, key) != group]
        learned = replace(fitted, ranges=ranges(elsewhere))
        yield from (tried(learned, row) for row in rows if getattr(row, key) == group)


def with_one_row(
    rows: Sequence[Row], errors: Errors, fits: dict[str, LearnedRates]
) -> Iterator[dict[str, Any]]:
    """The rows of devices with several models, predicted without the device's rows but for one."""
    for device, fitted in fits.items():
        elsewhere = [e for e in errors if e.row.device != device]
        learned = replace(fitted, ranges=ranges(elsewhere))
        for row in rows:
            own = own_condition(rows, row, learned) if row.device == device else None
            if own is not None:
                yield tried(learned, row, own)


def compare(name: str, t: pd.DataFrame, *by: str) -> None:
    """Print all rows' line, then those of each length and backend, or of each model."""
    for group, rows in [
        (f"**{name}**", t),
        *sorted((g, rows) for column in by for g, rows in t.groupby(column)),
    ]:
        median = 100 * math.expm1(rows.off.abs().median())
        inside = 100 * rows.inside.mean()
        width = rows.width.median()
        print(f"| {group} | {len(rows)} | {median:.0f} % | {inside:.0f} % | {width:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    print(
        "| left out | rows | median error | inside the 90 % range | width of the range (times) |"
    )
    print("| --- | --- | --- | --- | --- |")
    frames: dict[str, pd.DataFrame] = {}
    for phase in PHASES:
        rows = [
            row
            for row in clean(published(asked.rows) if asked.rows else published())
            if row.phase == phase
        ]
        if asked.rows:
            learned = datasheet.learned()[phase]
            compare(
                phase, pd.DataFrame(tried(learned, row) for row in rows), "length", "runtime"
            )
            continue
        fits = {
            "device": fits_without(rows, phase, by_device),
            "source": fits_without(rows, phase, by_source),
            "model": fits_without(rows, phase, by_model),
        }
        errors = left_out(rows, fits["device"], by_device)
        errors += left_out(rows, fits["source"], by_source)
        errors += beside_own(rows, fits["device"])
        tables = {}
        for key, by in (
            ("device", ("length", "knowledge", "runtime")),
            ("source", ("length", "knowledge", "runtime")),
            ("model", ("model",)),
        ):
            tables[key] = pd.DataFrame(without(rows, errors, fits[key], key))
            compare(f"{phase}: {key}", tables[key], *by)
        frames[phase] = tables["device"]
        both = pd.concat([tables["device"], tables["source"]])
        known = both[both.knowledge != datasheet.NOTHING_KNOWN]
        compare(f"{phase}: device or source, its family known", known)
        own = pd.DataFrame(with_one_row(rows, errors, fits["device"]))
        without_own = pd.DataFrame(without(rows, errors, fits["device"], "device"))
        compare(f"{phase}: device, but for one row", own, "runtime")
        same_rows = without_own[without_own.device.isin(own.device)]
        compare(f"{phase}: the same devices without it", same_rows, "runtime")
    if asked.plot:
        draw(frames, asked.plot)


def draw(by_phase: dict[str, pd.DataFrame], path: Path) -> None:
    """Predicted over measured rates, each device predicted without its own rows."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1,
        len(by_phase),
        figsize=(11, 5.2),
        layout="constrained",
    )
    for axis, (phase, t) in zip(axes, by_phase.items(), strict=True):
        for backend, (colour, marker) in STYLES.items():
            rows = t[t.backend == backend]
            style: dict[str, Any] = {
                "s": 16,
                "alpha": 0.7,
                "color": colour,
                "marker": marker,
                "label": backend,
            }
            axis.scatter(rows.tps, rows.tps * rows.off.map(math.exp), **style)
        ends = [t.tps.min() / 1.3, t.tps.max() * 1.3]
        for factor, dashes in (
            (1, "-"),
            (1.25, ":"),
            (0.8, ":"),
        ):
            axis.plot(
                ends,
                [factor * end for end in ends],
                dashes,
                color="0.4",
                linewidth=0.9,
                zorder=0,
            )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="published, tokens/s",
            ylabel="predicted, tokens/s",
        )
        axis.set_title(f"{phase}: each device predicted without its own rows", fontsize=10)
    axes[0].legend(
        fontsize=8,
        title="backend",
        title_fontsize=8,
    )
    figure.suptitle("Predictions from datasheets (dotted: 25 % off)", fontsize=11)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
