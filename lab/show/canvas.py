"""What all pictures share: colours, axes, legends, and how a picture is written to files.

Colours are Okabe and Ito's, which colour-blind readers can tell apart, and markers differ as well.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.analysis.wording import digits
from lab.core import results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
INK, GUIDE, GRID, PAPER = "#1a1a1a", "#666666", "#d9d9d9", "#ffffff"
"""Text and roofs, dashed guides, the grid, the background. A page replaces them by colours of its own (svg.py)."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HOLLOW = "disturbed runs (hollow)"
LINES = ("-", "--", ":", "-.")
LABEL_HEIGHT = 0.45
"""Height of the numbers and the label below an axis, in inches."""

LEGEND_LINE = 0.2
"""Height of a line of a legend, in inches."""

LEGEND_WIDTH = 9
"""Letters that fit into a line of a legend, per inch of the picture. A legend with longer lines goes below it."""


def drawn(draw: Callable[[Figure], Any], size: tuple[float, float]) -> Figure:
    """A figure of `size` inches that `draw` has drawn into. Dollar signs in names are no formulas."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
    return figure


def write(draw: Callable[[Figure], Any], folder: Path, stem: str, size: tuple[float, float] = (8, 5)) -> list[Path]:
    """Draw a figure and write it as `<stem>.png` and `.svg`. LabError where they cannot be written."""
    figure = drawn(draw, size)
    paths = [folder / f"{stem}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        image = io.BytesIO()
        figure.savefig(image, format=path.suffix[1:], dpi=150)
        results.write_whole(path, image.getvalue(), "The plot")
    return paths


def new_axes() -> Axes:
    """Axes of a figure of their own, for notebooks."""
    import matplotlib
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(8, 5), layout="constrained")
    with matplotlib.rc_context({"text.parse_math": False}):
        return figure.subplots()


def points(ax: Axes, x: Iterable[float], y: Iterable[float], disturbed: Iterable[bool], **style: Any) -> None:
    """Draws runs as points without lines; those of disturbed runs are hollow, and the legend says so."""
    rows = list(zip(x, y, disturbed, strict=True))
    for is_hollow in (False, True):
        chosen = [(a, b) for a, b, is_disturbed in rows if is_disturbed == is_hollow]
        if not chosen:
            continue
        if is_hollow:
            is_named = HOLLOW in ax.get_legend_handles_labels()[1]
            style |= {"mfc": "none", "mew": 0.8, "label": None if is_named else HOLLOW}
        ax.plot(*zip(*chosen, strict=True), **{"ls": "", "mew": 0, **style})


def over_prompt_lengths(ax: Axes, lengths: Sequence[float], per_token: Mapping[float, float]) -> None:
    """Both axes logarithmic, over prompt lengths, with a guide from the shortest to the longest of `lengths`.

    The guide is proportional to the length. `per_token` has the seconds per token that were measured, and at which
    length; the fewest count.
    """
    cheapest = min(per_token)
    guide = f"in proportion: {digits(1e3 * cheapest)} ms a token, as at {per_token[cheapest]:,.0f}"
    ax.plot(lengths, [n * cheapest for n in lengths], color=GUIDE, ls="--", lw=1.2, label=guide)
    ax.set_xscale("log")
    ax.set_yscale("log")
    plain_ticks(ax.xaxis)
    plain_ticks(ax.yaxis)
    ax.set_xlabel("prompt length (tokens)")


def plot_lines(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    title: str,
    log: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draws a line with points for every name in `lines`: (x values, y values). For a reader's own figures.

        lab.plot_lines({"read": ([1, 2, 4], [3, 5, 9])}, "tokens", "ms", "Steps")

    Both axes begin at zero, or are logarithmic (`log`).
    """
    ax = ax or new_axes()
    for number, (name, (x, y)) in enumerate(lines.items()):
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        ax.plot(x, y, color=colour, marker=marker, ms=5, lw=1.8, label=name)
    if log:
        ax.set_xscale("log")
        ax.set_yscale("log")
        plain_ticks(ax.yaxis)
    else:
        ax.set_xlim(left=0)
        ax.set_ylim(bottom=0)
    plain_ticks(ax.xaxis)
    ax.set_xlabel(x_label)
    ax.set_ylabel(y_label)
    ax.set_title(title, fontsize=11)
    return tidy(ax)


def plain_ticks(axis: Any) -> None:
    """Labels ticks 1,000, not 10^3. A short logarithmic axis also has labels between the powers of ten."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    low, high = axis.get_view_interval()
    if axis.get_scale() != "log":
        return
    if high / low < 4:
        axis.set_major_locator(MaxNLocator(6))
        axis.set_minor_locator(NullLocator())
        return
    few = FuncFormatter(lambda value, _: f"{value:,.10g}" if f"{value:e}"[0] in "25" else "")
    axis.set_minor_formatter(few if high / low < 300 else NullFormatter())


def unbroken(text: str) -> str:
    """`text` with spaces at which a legend does not break its line."""
    return text.replace(" ", "\u00a0")


def tidy(ax: Axes, legend_below: bool = False) -> Axes:
    """Adds a light grid and a legend without a frame, removes the box. A large legend goes below the picture."""
    from matplotlib.transforms import ScaledTranslation

    ax.grid(True, which="major", color=GRID, lw=0.6)
    ax.set_axisbelow(True)
    figure, place = ax.get_figure(root=True), ax.get_subplotspec()
    assert figure is not None
    width = figure.get_figwidth() / (place.get_gridspec().ncols if place else 1)
    handles, labels = ax.get_legend_handles_labels()
    wrapped = ["\n".join(textwrap.wrap(label, int(LEGEND_WIDTH * width))) for label in labels]
    below: dict[str, Any] = {}
    if legend_below or any("\n" in label for label in wrapped) or len(labels) > width:
        under_the_label = ax.transAxes + ScaledTranslation(0, -LABEL_HEIGHT, figure.dpi_scale_trans)
        columns = 2 if legend_below and width > 7 else 1
        n_lines = sum(1 + label.count("\n") for label in wrapped) / columns
        if not place or place.get_gridspec().ncols == 1:  # the legend takes no height from the axes
            figure.set_figheight(figure.get_figheight() + LEGEND_LINE * max(0, n_lines - 3))
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": under_the_label, "ncols": columns}
    ax.legend(handles, wrapped, frameon=False, fontsize=9, **below)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax
