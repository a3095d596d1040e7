"""The picture of `lab ab`: the ratio of two variants in each figure at each length, its interval and its blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.core.lists import grouped
from lab.core.record import Record
from lab.features.compare import comparison
from lab.features.compare.comparison import FIGURE_NAMES
from lab.show import canvas
from lab.show.canvas import COLOURS, GUIDE, points
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def sessions(records: Sequence[Record]) -> list[list[Record]]:
    """The timed runs of each trial with at least two variants."""
    timed = [one for one in records if one.run.is_timed and one.run.block is not None and not one.run.is_apart]
    of_sessions = grouped(timed, lambda record: record.session).values()
    return [list(own) for own in of_sessions if len({record.run.variant for record in own}) > 1]


def plot_trial(records: Sequence[Record], subject: str, figure: Figure | None = None) -> Figure:
    """Time of each variant over that of the base, a panel for each variant: left of 1 the variant is faster.

    A point is a block, hollow if one of its runs was disturbed; the diamond is their median, with its interval if there
    are enough blocks.
    """
    base, *others = comparison.groups(records)
    compared = comparison.compare_groups([base, *others])
    n_columns = min(len(compared), 2)
    figure = figure or canvas.new_figure((11, 5))
    n_rows, n_figures = math.ceil(len(compared) / n_columns), max(len(one.rows) for one in compared)
    figure.set_figheight(n_rows * (1.2 + 0.4 * n_figures) + 0.8)
    axes = canvas.grid(figure, len(compared), n_columns, sharex=True)
    for ax, one, other in zip(axes, compared, others, strict=True):
        names = []
        for at, row in enumerate(one.rows):
            sides = []
            for rows in (base.rows, other.rows):
                own = rows[(rows.n_prompt == row.n_prompt) & (rows[row.figure] > 0)]
                own = own if row.n_gen is None else own[own.n_gen == row.n_gen]
                sides.append((own if row.lever is None else own[own.lever == row.lever]).groupby("block"))
            times = [side[row.figure].agg(statistics.geometric_mean) for side in sides]
            ratios = (times[1] / times[0]).dropna()
            disturbed = [side.disturbed.any() for side in sides]
            hollow = [bool(disturbed[0][block] or disturbed[1][block]) for block in ratios.index]
            ys = [at + 0.24 * ((i % 5) - 2) / 2 for i in range(len(ratios))]
            points(ax, ratios, ys, hollow, marker="o", color=COLOURS[5], ms=5, alpha=0.8, label="block")
            label, reach, words = "median over blocks, no interval (too few blocks, or disturbed)", None, ""
            if row.ratio is not None:
                label = "median over blocks, 95 % interval (for all figures together)"
                reach = [[max(0, row.estimate - row.ratio.low)], [max(0, row.ratio.high - row.estimate)]]
                words = f" ({digits(row.ratio.low)}-{digits(row.ratio.high)})"
            style: dict[str, Any] = {"marker": "D", "ms": 7, "color": COLOURS[0], "ls": "", "capsize": 4, "zorder": 3}
            ax.errorbar([row.estimate], [at], xerr=reach, label=label, mfc=None if reach else "none", **style)
            place: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": 9}
            ax.text(1.02, at, f"{digits(row.estimate)}{words}", **place)
            figure_name = "prefill time" if row.figure == "prefill_s" else FIGURE_NAMES[row.figure]
            lever = f"\n{row.lever}" if row.lever else ""
            names.append(f"{figure_name}, {row.n_prompt:,} tokens{lever}")
        ax.axvline(1, color=GUIDE, lw=1.2)
        ax.set_yticks(range(len(names)), names)
        ax.set_ylim(len(names) - 0.5, -0.5)
        a, b = (name.partition(":")[0] for name in (one.other, one.base))
        ax.set_xlabel(f"time of {a} / time of {b}\n\u2190 {a} is faster | {b} is faster \u2192")
        ax.set_title(f"{one.other}\nagainst {one.base}", fontsize=10)
        ax.xaxis.set_tick_params(labelbottom=True)
    axes[0].set_xscale("log")
    low, high = axes[0].get_xlim()
    end = max(1 / low, high, 1.05)
    axes[0].set_xlim(1 / end, end)
    blocks = {record.run.block for record in records}
    canvas.finish(axes, f"Which variant is faster, block by block\n{subject} ({len(blocks)} blocks)", is_apart=True)
    return figure
