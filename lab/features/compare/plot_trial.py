"""The picture of `lab ab`: the ratio of two variants in each figure at each length, its interval and its blocks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.core.lists import grouped
from lab.core.record import Record
from lab.features.compare import comparison
from lab.features.compare.comparison import ComparedFigure, Comparison, Group
from lab.features.compare.spread import FIGURE_NAMES
from lab.show import canvas
from lab.show.canvas import COLOURS, GUIDE, points
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    groups = comparison.groups(records)
    compared = comparison.compare_groups(groups)
    n_columns = min(len(compared), 2)
    n_rows = math.ceil(len(compared) / n_columns)
    figure = figure or canvas.new_figure((11, 5))
    figure.set_figheight(n_rows * (1.2 + 0.4 * max(len(one.rows) for one in compared)) + 0.8)
    axes = canvas.grid(figure, len(compared), n_columns, sharex=True)
    for ax, one, other in zip(axes, compared, groups[1:], strict=True):
        _panel(ax, one, groups[0], other)
        ax.xaxis.set_tick_params(labelbottom=True)
    axes[0].set_xscale("log")
    low, high = axes[0].get_xlim()
    reach = max(1 / low, high, 1.05)
    axes[0].set_xlim(1 / reach, reach)
    blocks = {record.run.block for record in records}
    canvas.finish(axes, f"Which variant is faster, block by block\n{subject} ({len(blocks)} blocks)", is_apart=True)
    return figure


def _panel(ax: Axes, compared: Comparison, base: Group, other: Group) -> None:
    letters = [name.partition(":")[0] for name in (compared.other, compared.base)]
    for at, row in enumerate(compared.rows):
        ratios = _of_blocks(row, base, other)
        ys = [at + 0.24 * ((i % 5) - 2) / 2 for i in range(len(ratios))]
        points(ax, [ratio for ratio, _ in ratios], ys, [is_disturbed for _, is_disturbed in ratios],
               marker="o", color=COLOURS[5], ms=5, alpha=0.8, label="block")  # fmt: skip
        style: dict[str, Any] = {"marker": "D", "ms": 7, "color": COLOURS[0], "ls": "", "capsize": 4, "zorder": 3}
        label, reach, words = "median over blocks, no interval (too few blocks, or disturbed)", None, ""
        if row.ratio is not None:
            label = "median over blocks, 95 % interval (for all figures together)"
            reach = [[max(0, row.estimate - row.ratio.low)], [max(0, row.ratio.high - row.estimate)]]
            words = f" ({digits(row.ratio.low)}-{digits(row.ratio.high)})"
        ax.errorbar([row.estimate], [at], xerr=reach, label=label, mfc=None if reach else "none", **style)
        words = f"{digits(row.estimate)}{words}"
        ax.text(1.02, at, words, transform=ax.get_yaxis_transform(), va="center", fontsize=9)
    ax.axvline(1, color=GUIDE, lw=1.2)
    ax.set_yticks(range(len(compared.rows)), [_name(row) for row in compared.rows])
    ax.set_ylim(len(compared.rows) - 0.5, -0.5)
    ax.set_xlabel(
        f"time of {letters[0]} / time of {letters[1]}\n\u2190 {letters[0]} is faster | {letters[1]} is faster \u2192"
    )
    ax.set_title(f"{compared.other}\nagainst {compared.base}", fontsize=10)


def _name(row: ComparedFigure) -> str:
    """`prefill time, 1,000 tokens`."""
    figure = "prefill time" if row.figure == "prefill_s" else FIGURE_NAMES[row.figure]
    return f"{figure}, {row.n_prompt:,} tokens" + (f"\n{row.lever}" if row.lever else "")


def _of_blocks(row: ComparedFigure, base: Group, other: Group) -> list[tuple[float, bool]]:
    """For each block with both variants: the ratio of geometric means, and whether a run was disturbed."""
    sides = []
    for group in (base, other):
        rows = group.rows[(group.rows.n_prompt == row.n_prompt) & (group.rows[row.figure] > 0)]
        rows = rows if row.n_gen is None else rows[rows.n_gen == row.n_gen]
        sides.append((rows if row.lever is None else rows[rows.lever == row.lever]).groupby("block"))
    times = [side[row.figure].agg(statistics.geometric_mean) for side in sides]
    disturbed = [side.disturbed.any() for side in sides]
    ratios = (times[1] / times[0]).dropna()
    return [(float(ratio), any(bool(of[block]) for of in disturbed)) for block, ratio in ratios.items()]
