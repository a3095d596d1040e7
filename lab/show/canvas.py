"""Shared by all pictures: colours (Okabe and Ito's), markers, axes, ticks, titles, legends, labels, and writing files.

What was measured is drawn solid; dashes are predictions and fitted laws.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.core import results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D46")
OF_PREFILL, OF_DECODE = COLOURS[:2]
"""What is of one phase has its colour; setups have the other colours, and lengths are shades of their phase's."""

INK = "#1a1a1a"
GUIDE = "#666666"
GRID = "#d9d9d9"
PAPER = "#ffffff"
"""Text and roofs, dashed guides, the grid, the background. A page replaces them by colours of its own (page.py)."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HOLLOW = "disturbed runs (hollow)"
MOST_SERIES = 6  # series that share axes; more get small multiples
LABEL_HEIGHT = 0.45
LINE_HEIGHT = 0.2
"""Height of the numbers and the label below an axis, and of a line of a legend, in inches."""

LETTERS = 13
TITLE_LETTERS = 11
HANDLE = 8
"""Letters per inch in a legend and in a title; what the handle of a legend's entry takes, in letters."""


def drawn(draw: Callable[[Figure], Any], size: tuple[float, float]) -> Figure:
    """A figure of `size` inches that `draw` has drawn into. Dollar signs in names do not start formulas."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
    return figure


def write(
    draw: Callable[[Figure], Any], folder: Path, stem: str, size: tuple[float, float] = (8, 5)
) -> list[Path]:
    """Draw a figure and write it as `<stem>.png` and `.svg`. LabError if they cannot be written."""
    figure = drawn(draw, size)
    paths = [folder / f"{stem}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        image = io.BytesIO()
        figure.savefig(image, format=path.suffix[1:], dpi=150)
        results.write_whole(path, image.getvalue(), "The plot")
    return paths


def new_figure(size: tuple[float, float] = (8, 5)) -> Figure:
    """A figure for notebooks."""
    import matplotlib.pyplot as plt

    return plt.figure(figsize=size, layout="constrained")


def new_axes() -> Axes:
    """Axes of a new figure, for notebooks."""
    import matplotlib

    figure = (
        new_figure()
    )  # outside: the first one makes pyplot interactive, which the context would take back
    with matplotlib.rc_context({"text.parse_math": False}):
        return figure.subplots()


def figure_of(ax: Axes) -> Figure:
    """The figure that axes are in."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def styles(n: int, own: str = OF_PREFILL, is_shaded: bool = False) -> list[dict[str, Any]]:
    """Colour and marker of each of n series; a single one has its `own`, and so have all in shades (`is_shaded`)."""
    import matplotlib

    colours: list[Any] = [own] if n == 1 else [COLOURS[i] for i in (2, 3, 6, 5, 4, 7)]
    if is_shaded and n > 1:  # mixed with white, then with black
        mixes = [0.45 - 0.85 * i / (n - 1) for i in range(n)]
        rgb = bytes.fromhex(own[1:])
        mixed = [
            [round(255 * max(0, mix) + part * (1 - abs(mix))) for part in rgb] for mix in mixes
        ]
        colours = [f"#{bytes(parts).hex()}" for parts in mixed]
    elif n > len(colours):
        colours = [matplotlib.colormaps["viridis"](0.9 * i / (n - 1)) for i in range(n)]
    return [{"color": colours[i], "marker": MARKERS[i % len(MARKERS)]} for i in range(n)]


def panels(ax: Axes, names: Sequence[str]) -> list[Axes]:
    """The axes of each series: `ax`, or in its place small multiples where there are more than six."""
    figure = figure_of(ax)
    distinct = list(dict.fromkeys(names))
    if len(names) <= MOST_SERIES or len(distinct) == 1 or figure.axes != [ax]:
        return [ax] * len(names)
    ax.remove()
    n_columns = min(len(distinct), 3 if figure.get_figwidth() > 7 else 2)
    letters = int(1.2 * TITLE_LETTERS * figure.get_figwidth() / n_columns)
    titles = {name: "\n".join(textwrap.wrap(name, letters)) for name in distinct}
    of_titles = 0.14 * max(title.count("\n") for title in titles.values())
    n_rows = math.ceil(len(distinct) / n_columns)
    figure.set_figheight(max(figure.get_figheight(), 1.2 + (1.8 + of_titles) * n_rows))
    made = dict(
        zip(distinct, grid(figure, len(distinct), n_columns, sharex=True, sharey=True), strict=True)
    )
    for name, one in made.items():
        one.set_title(titles[name], fontsize=8)
    return [made[name] for name in names]


def grid(figure: Figure, n: int, n_columns: int, **shared: Any) -> list[Axes]:
    """n axes in rows; the last of each column has numbers below."""
    made = list(figure.subplots(math.ceil(n / n_columns), n_columns, squeeze=False, **shared).flat)
    for spare in made[n:]:
        spare.remove()
    for last in made[max(0, n - n_columns) : n]:
        last.xaxis.set_tick_params(labelbottom=True)
    return made[:n]


def name_axes(axes: Sequence[Axes], x: str, y: str) -> None:
    """Labels of the axes; of small multiples those at the left, and those with nothing below."""
    distinct = list(dict.fromkeys(axes))
    if len(distinct) == 1:
        distinct[0].set(xlabel=x, ylabel=y)
        return
    for ax in distinct:
        if ax.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            ax.set_ylabel("\n".join(textwrap.wrap(y, 20)), fontsize=8)
        if ax.xaxis.get_tick_params()["labelbottom"]:
            ax.set_xlabel(x, fontsize=8)


def points(
    ax: Axes, x: Iterable[float], y: Iterable[float], disturbed: Iterable[bool], **style: Any
) -> None:
    """Draws runs as points without lines; those of disturbed runs are hollow, and the legend says so."""
    rows = list(zip(x, y, disturbed, strict=True))
    style = {"ls": "", "mew": 0, **style}
    full, hollow = (
        [(a, b) for a, b, is_disturbed in rows if is_disturbed == kind] for kind in (False, True)
    )
    if full or (hollow and style.get("label")):  # at least for the legend
        ax.plot([a for a, _ in full], [b for _, b in full], **style)
    if hollow:
        style |= {
            "mfc": "none",
            "mew": 0.8,
            "alpha": min(0.9, 2 * style.get("alpha", 1)),
            "label": None,
        }
        if HOLLOW not in ax.get_legend_handles_labels()[1]:
            ax.plot([], [], ls="", marker="o", mfc="none", color=GUIDE, label=HOLLOW)
        ax.plot(*zip(*hollow, strict=True), **style)


def over_lengths(ax: Axes, lengths: Iterable[float]) -> None:
    """A logarithmic x axis of lengths, with ticks at the measured lengths that have room for their numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    known = sorted(set(lengths))
    low, high = (known[0], known[-1]) if len(known) > 1 else (known[0] / 2, known[0] * 2)
    ax.set_xscale("log")
    ax.set_xlim(low / (high / low) ** 0.05, high * (high / low) ** 0.05)
    room = math.log(high / low) * 0.65 / _width(ax)
    ticks = [known[-1]]
    for n in reversed(known):
        if math.log(ticks[-1] / n) >= room:
            ticks.append(n)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())


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
    for (name, (x, y)), style in zip(lines.items(), styles(len(lines)), strict=True):
        ax.plot(x, y, ms=5, lw=1.8, label=name, **style)
    limits: dict[str, Any] = (
        {"xscale": "log", "yscale": "log"} if log else {"xlim": (0, None), "ylim": (0, None)}
    )
    ax.set(xlabel=x_label, ylabel=y_label, **limits)
    finish([ax], title)
    return ax


def plain_ticks(axis: Any) -> None:
    """Labels ticks 1,000, not 10^3. A short logarithmic axis also has labels between the powers of ten."""
    from matplotlib import ticker

    if not isinstance(
        axis.get_major_formatter(), ticker.ScalarFormatter | ticker.LogFormatter
    ):  # ticks with names
        return
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.10g}"))
    low, high = axis.get_view_interval()
    if axis.get_scale() != "log" or isinstance(axis.get_major_locator(), ticker.FixedLocator):
        return
    if high / low < 4:
        axis.set_major_locator(ticker.MaxNLocator(6))
        axis.set_minor_locator(ticker.NullLocator())
    else:
        few = ticker.FuncFormatter(
            lambda value, _: f"{value:,.10g}" if f"{value:e}"[0] in "25" else ""
        )
        axis.set_minor_formatter(few if high / low < 300 else ticker.NullFormatter())


def finish(axes: Sequence[Axes], title: str, is_apart: bool = False) -> None:
    """Gives axes a light grid, ticks that are read as words, a title above and one legend below.

    The legend has as many columns as fit, and the figure grows by its lines. Long lines of a title are broken. Title
    and legend are those of the figure where there are several axes, or where these have titles too (`is_apart`).
    """
    from matplotlib.transforms import ScaledTranslation

    axes = list(dict.fromkeys(axes))
    entries = dict[str, Any]()
    for ax in axes:
        ax.grid(True, which="major", color=GRID, lw=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        for axis in (ax.xaxis, ax.yaxis):
            plain_ticks(axis)
        entries |= {
            label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
    first = axes[0]
    figure = figure_of(axes[0])
    is_alone = len(axes) == 1 and not is_apart
    width = _width(first) if is_alone else figure.get_figwidth()
    title = "\n".join(
        "\n".join(textwrap.wrap(line, int(TITLE_LETTERS * width))) for line in title.split("\n")
    )
    if is_alone:
        first.set_title(title, fontsize=11, pad=9)
    else:
        figure.suptitle(title, fontsize=11)
    if not entries:
        return
    names = sorted(entries, key=lambda name: name == HOLLOW)
    letters = int(LETTERS * width)
    handles = [entries[name] for name in names]
    labels = ["\n".join(textwrap.wrap(x, letters - HANDLE)) for x in names]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    n_rows = math.ceil(len(labels) / max(1, min(len(labels), letters // (longest + HANDLE))))
    style: dict[str, Any] = {
        "frameon": False,
        "fontsize": 9,
        "ncols": math.ceil(len(labels) / n_rows),
    }
    if is_alone:
        labels_end = LABEL_HEIGHT + LINE_HEIGHT * first.get_xlabel().count("\n")
        below = first.transAxes + ScaledTranslation(0, -labels_end, figure.dpi_scale_trans)
        first.legend(
            handles,
            labels,
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            bbox_transform=below,
            **style,
        )
    else:
        figure.legend(handles, labels, loc="outside lower center", **style)
    if figure.axes == axes:
        n_lines = n_rows * max(1 + label.count("\n") for label in labels)
        figure.set_figheight(figure.get_figheight() + LINE_HEIGHT * max(0, n_lines - 2))


def _width(ax: Axes) -> float:
    """Inches that axes have, of the figure's."""
    place = ax.get_subplotspec()
    return float(figure_of(ax).get_figwidth()) / (place.get_gridspec().ncols if place else 1)


def label_points(
    ax: Axes, labels: Sequence[tuple[float, float, str]], avoid: Sequence[tuple[float, float]] = ()
) -> None:
    """Writes each text beside its point, clear of others and of `avoid`; call it last."""
    from matplotlib.transforms import Bbox

    figure_of(ax).draw_without_rendering()  # so that the layout is known
    inch = figure_of(ax).dpi
    frame = ax.get_window_extent()
    marks = [ax.transData.transform(point) for point in (*avoid, *((x, y) for x, y, _ in labels))]
    taken = [Bbox.from_bounds(x - inch / 16, y - inch / 16, inch / 8, inch / 8) for x, y in marks]
    for x, y, text in sorted(labels, key=lambda one: -one[1]):
        at_x, at_y = ax.transData.transform((x, y))
        wide = (0.075 * len(text) + 0.05) * inch
        tall = 0.15 * inch
        is_right = at_x + 0.12 * inch + wide > frame.x1
        left = at_x - 0.12 * inch - wide if is_right else at_x + 0.12 * inch
        tries = [at_y - tall / 2 + sign * step * tall / 4 for step in range(80) for sign in (1, -1)]
        boxes = [
            Bbox.from_bounds(left, low, wide, tall)
            for low in tries
            if frame.y0 <= low <= frame.y1 - tall
        ]
        free = (one for one in boxes if not one.count_overlaps(taken))
        box = next(free, Bbox.from_bounds(left, at_y, wide, tall))
        taken.append(box)
        across, up = ax.transAxes.inverted().transform(
            (box.x1 if is_right else box.x0, (box.y0 + box.y1) / 2)
        )
        style: dict[str, Any] = {
            "ha": "right" if is_right else "left",
            "va": "center",
            "fontsize": 8,
        }
        style["arrowprops"] = {
            "arrowstyle": "-",
            "lw": 0.5,
            "color": GUIDE,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        ax.annotate(text, (x, y), (across, up), textcoords="axes fraction", **style)
