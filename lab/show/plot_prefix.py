"""The picture of a cached prefix: time to first token over its length, cold and used again in three ways.

Where the cold line crosses another is the length from which that way pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.core import prefix_times
from lab.core.record import Record
from lab.experiments import crossing, prefix_cache
from lab.experiments.prefix_cache import Row
from lab.show.canvas import COLOURS, GUIDE, LINES, MARKERS, plain_ticks, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = (
    "cold (lines: medians, points: runs)",
    "prefix copied in the cache",
    "restored from RAM",
    "restored from disk",
)
NAMES = {"ram_s": "RAM", "disk_s": "disk"}
"""Of ways that have a break-even: its name."""


def plot_prefix(rows: Sequence[Row], records: Sequence[Record], subject: str, figure: Figure) -> Figure:
    """Time to first token over the length of the prefix, both logarithmic: points are runs, the lines their medians.

    Of rows and runs of one setup. The dashed grey line is what the prefill law promises for the cold way. A dotted
    upright line is a break-even between two measured lengths; of others the legend says where restoring pays.
    """
    ax = figure.subplots()
    n_suffix = rows[0].n_suffix
    alike = [row for row in rows if row.n_suffix == n_suffix]
    runs = [record.run for record in records if record.run.prefix and record.run.prefix.n_suffix == n_suffix]
    known = {one.name: one for one in prefix_cache.break_even(alike)}
    lengths = [row.n_prefix for row in alike]
    for way, label, colour, marker, line in zip(prefix_times.WAYS, LABELS, COLOURS, MARKERS, LINES, strict=False):
        pays = known.get(NAMES.get(way, ""))
        name = f"{label} (pays {crossing.words(pays)})" if pays else label
        style: dict[str, Any] = {"color": colour, "marker": marker, "mew": 0}
        ax.plot(lengths, [getattr(row, way) for row in alike], **style, ms=7, ls=line, lw=2, label=name)
        points = [(run.prefix.n_prefix, prefix_times.figures(run)) for run in runs if run.prefix]
        seconds = [(n, figures[way]) for n, figures in points if figures]
        ax.plot(*zip(*seconds, strict=True), **style, ls="", ms=5, alpha=0.5)
        if pays and pays.is_measured and pays.n_tokens is not None:
            ax.axvline(pays.n_tokens, color=colour, ls=":", lw=1.4)
    promised = [(row.n_prefix, row.promised_s + row.cold_s - row.prefix_s) for row in alike if row.promised_s]
    if promised:
        ax.plot(*zip(*promised, strict=True), color=GUIDE, ls="--", lw=1.2, label="cold, as the prefill law promises")
    _axes(ax, lengths)
    ax.set_title(f"First token of a prompt: a prefix, and {n_suffix:,} tokens of its own\n{subject}", fontsize=11)
    tidy(ax)
    return figure


def _axes(ax: Axes, lengths: Sequence[int]) -> None:
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(sorted(set(lengths)))
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.xaxis.minorticks_off()
    plain_ticks(ax.yaxis)
    ax.set_xlabel("length of the prefix (tokens)")
    ax.set_ylabel("time to first token (s)")
