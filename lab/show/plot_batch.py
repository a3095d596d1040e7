"""The picture of `lab batch`: tokens per second in all and per user, over how many sequences share a step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core import lever_figures
from lab.core.record import Record
from lab.experiments import batching
from lab.experiments.batching import Row
from lab.show.canvas import COLOURS, MARKERS, plain_ticks, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_batch(
    rows: Sequence[Row], records: Sequence[Record], subject: str, ridge: float | None, figure: Figure
) -> Figure:
    """Left the total rate, right that of each user: points are runs, the line their medians, dashes the prediction.

    Of rows and runs of one setup. The grey lines are what would be without any cost of sharing.
    """
    left, right = figure.subplots(1, 2)
    for ax, name, scale in ((left, "in all", 1), (right, "per user", 0)):
        styles = zip(itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False)
        groups = batching.alike(rows)
        for group, (colour, marker) in zip(groups, styles, strict=False):
            prompts = f"{group[0].n_prompt:,} prompt tokens{', shared' if group[0].is_shared else ''}"
            _rates(ax, group, records, scale, colour, marker, prompts)
        first = groups[0][0]
        if first.n_seq == 1:
            numbers = [row.n_seq for row in groups[0]]
            rates = [first.user_tps * (n if scale else 1) for n in numbers]
            ax.plot(numbers, rates, color="#666666", ls=":", lw=1.2, label="if sharing cost nothing")
        if ridge is not None and 1 <= ridge <= rows[-1].n_seq:
            ax.axvline(ridge, color="#666666", ls="-.", lw=1, label=f"ridge: {ridge:.2g} sequences")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(sorted({row.n_seq for row in rows}))
        plain_ticks(ax.yaxis)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.xaxis.minorticks_off()
        ax.set_xlabel("sequences in a step")
        ax.set_ylabel(f"tokens per second {name}")
        ax.set_title("In all" if scale else "Each user", fontsize=11)
        tidy(ax)
    figure.suptitle(f"Decoding together: {subject}", fontsize=11)
    return figure


def _rates(
    ax: Axes, rows: Sequence[Row], records: Sequence[Record], scale: int, colour: str, marker: str, name: str
) -> None:
    """The rates of one prompt length; `scale` 1: of all sequences together, 0: of each."""
    numbers = [row.n_seq for row in rows]
    ax.plot(numbers, [row.n_seq**scale / row.step_s for row in rows], color=colour, lw=2, label=f"{name}: median")
    points = [
        (run.batch.n_seq, run.batch.n_seq**scale / lever_figures.step_s(run))
        for run in (record.run for record in records)
        if run.batch is not None
        and (run.n_prompt, run.n_gen, run.batch.is_shared) == (rows[0].n_prompt, rows[0].n_gen, rows[0].is_shared)
        and lever_figures.figures(run)
    ]
    ax.plot(*zip(*points, strict=True), ls="", marker=marker, color=colour, ms=5, alpha=0.6, mew=0, label="runs")
    expected = [(row.n_seq, row.n_seq**scale / row.expected_s) for row in rows if row.expected_s]
    if expected:
        ax.plot(*zip(*expected, strict=True), color=colour, ls="--", lw=1.4, label="predicted")
