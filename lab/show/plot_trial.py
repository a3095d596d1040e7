"""The picture of `lab ab`: the time of each variant over that of the base, block by block."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from lab.core import figures, shell
from lab.core.lists import grouped, plural
from lab.core.record import Record
from lab.show import canvas, comparison, text_comparison
from lab.show.canvas import COLOURS, GUIDE
from lab.show.comparison import ComparedFigure, Comparison, Group, Key
from lab.show.wording import digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_REACH = 1.05  # of the axis on both sides of 1
N_LINES = 5  # heights of the points of a row, so that they do not hide each other


class MedianStyle(TypedDict):
    """The style of a variant's median."""

    marker: str
    ms: float
    color: str
    ls: str
    capsize: float
    zorder: float


MEDIAN_STYLE: MedianStyle = {
    "marker": "D",
    "ms": 7,
    "color": COLOURS[0],
    "ls": "",
    "capsize": 4,
    "zorder": 3,
}


def trials(records: Sequence[Record]) -> list[list[Record]]:
    """The timed runs of each trial with at least two variants."""
    timed = []
    for record in records:
        run = record.run
        if run.is_timed and run.block is not None and not run.is_apart:
            timed.append(record)
    sessions = grouped(timed, lambda record: record.session).values()
    return [
        list(session)
        for session in sessions
        if len({record.run.variant for record in session}) > 1
    ]


def plot_trial(records: Sequence[Record], subject: str, figure: Figure) -> Figure:
    """Draw a panel for each variant: a point for each block (hollow: disturbed), and their
    median."""
    base, *others = comparison.groups(records)
    comparisons = comparison.compare_groups([base, *others])
    n_columns = min(len(comparisons), 2)
    n_rows = math.ceil(len(comparisons) / n_columns)
    n_figures = max(len(compared.rows) for compared in comparisons)
    figure.set_figheight(n_rows * (1.2 + 0.4 * n_figures) + 0.8)
    axes = canvas.grid(figure, len(comparisons), n_columns, sharex=True)
    for ax, compared, other in zip(axes, comparisons, others, strict=True):
        _draw_variant(ax, compared, base, other)
    _centre_on_one(axes[0])
    blocks = {record.run.block for record in records}
    title = f"{finding(comparisons)}\n{subject} ({len(blocks)} blocks)"
    canvas.finish(axes, title, is_apart=True)
    return figure


def finding(comparisons: Sequence[Comparison]) -> str:
    """The answer of the comparison, by the letters of the variants; of several the fastest."""
    lettered = [
        dataclasses.replace(compared, base=letter(compared.base), other=letter(compared.other))
        for compared in comparisons
    ]
    if len(lettered) == 1:
        return text_comparison.overall(lettered[0]).rstrip(".")
    return " ".join(text_comparison.fastest(lettered)).rstrip(".")


def letter(label: str) -> str:
    """The letter of a variant: A of `A: --threads 2`."""
    return label.partition(":")[0]


def _draw_variant(ax: Axes, compared: Comparison, base: Group, other: Group) -> None:
    names_of_figures = [row.figure for row in compared.rows]
    of_base = comparison.cases(base.rows, names_of_figures)
    of_other = comparison.cases(other.rows, names_of_figures)
    names = []
    for place, row in enumerate(compared.rows):
        _draw_blocks(ax, place, row, of_base, of_other)
        _draw_median(ax, place, row)
        case = f"\n{row.case}" if row.case else ""
        names.append(f"{figures.labels()[row.figure]}, {plural(row.n_prompt, 'token')}{case}")
    ax.axvline(1, color=GUIDE, lw=1.2)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    variant = letter(compared.other)
    baseline = letter(compared.base)
    ax.set_xlabel(
        f"time of {variant} / time of {baseline}\n"
        f"\u2190 {variant} is faster | {baseline} is faster \u2192"
    )
    sides = [shell.without_folders(label) for label in (compared.other, compared.base)]
    ax.set_title("\nagainst ".join(sides), fontsize=canvas.PANEL_SIZE)
    ax.xaxis.set_tick_params(labelbottom=True)


def _draw_blocks(
    ax: Axes,
    place: int,
    row: ComparedFigure,
    of_base: Mapping[Key, pd.DataFrame],
    of_other: Mapping[Key, pd.DataFrame],
) -> None:
    """A point for the ratio of each block."""
    base_blocks = of_base[row.key].groupby("block")
    other_blocks = of_other[row.key].groupby("block")
    base_means = base_blocks.value.agg(statistics.geometric_mean)
    other_means = other_blocks.value.agg(statistics.geometric_mean)
    ratios = (other_means / base_means).dropna()
    is_disturbed = base_blocks.disturbed.any() | other_blocks.disturbed.any()
    heights = [place + 0.12 * (number % N_LINES - 2) for number in range(len(ratios))]
    canvas.points(
        ax,
        ratios,
        heights,
        is_disturbed[ratios.index],
        marker="o",
        color=COLOURS[5],
        ms=5,
        alpha=0.8,
        label="block",
    )


def _draw_median(ax: Axes, place: int, row: ComparedFigure) -> None:
    text = digits(row.estimate)
    if row.ratio is None:
        label = "median over blocks, no interval (too few blocks, or disturbed)"
        ax.errorbar([row.estimate], [place], label=label, mfc="none", **MEDIAN_STYLE)
    else:
        label = "median over blocks, 95 % interval (for all figures together)"
        below = max(0, row.estimate - row.ratio.low)
        above = max(0, row.ratio.high - row.estimate)
        ax.errorbar(
            [row.estimate], [place], xerr=[[below], [above]], label=label, **MEDIAN_STYLE
        )
        text += f" ({digits(row.ratio.low)}-{digits(row.ratio.high)})"
    canvas.write_beside(ax, place, text)


def _centre_on_one(ax: Axes) -> None:
    """A logarithmic axis that reaches as far below 1 as above it."""
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    end = max(1 / low, high, LEAST_REACH)
    ax.set_xlim(1 / end, end)
