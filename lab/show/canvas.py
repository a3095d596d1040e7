"""What all pictures share: colours, sizes of text, panels, axes, titles, legends, and files.

The colours are Okabe and Ito's. What was measured is drawn solid; dashes are predictions and fitted
laws.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import logging
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypedDict

from lab.core import results
from lab.errors import LabError

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
    from matplotlib.figure import Figure

COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C6D46",
)
OF_PREFILL, OF_DECODE = COLOURS[:2]
"""The colours of the phases; setups have the other colours, and lengths shades of their phase's."""

OF_SERIES = tuple(COLOURS[i] for i in (2, 3, 6, 5, 4, 7))
"""The colours of several series, in their order."""

INK = "#1a1a1a"
GUIDE = "#666666"
GRID = "#d9d9d9"
PAPER = "#ffffff"
"""Text and roofs, dashed guides, the grid, the background. A page replaces them by colours of its
own (page.py)."""

TITLE_SIZE = 11
PANEL_SIZE = 10  # titles of panels
LABEL_SIZE = 9  # legends, and labels beside and in marks
SMALL_SIZE = 8  # labels that stand close together
TINY_SIZE = 5  # labels of a matrix with dozens of rows
"""The sizes of text in points; other text has matplotlib's default, 10.

They are passed to each text: a notebook draws into axes that were made with settings of its own.
"""

PALEST = 0.25
SHADES = 0.7
"""White in the palest of several shades, and how much less, or rather black, is in the darkest."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HOLLOW = "disturbed runs (hollow)"
MOST_SERIES = 6  # series that share axes; more get small multiples
BETWEEN_POWERS = {"25": 0.30, "3": 0.47}
"""First digits of ticks that may have labels between powers of ten, and the shortest distance of
such labels, in powers."""

TICK_LETTER = 0.075
TICK_HEIGHT = 0.24
TICK_WIDTH = 0.65
"""Room for a letter of a number below an axis, for a number beside it, and for a whole number below
it, in inches."""

BESIDE_AXES = {"x": 1.0, "y": 1.5}
"""Inches of a figure beside its axes (labels, title, legend), roughly."""

LABEL_HEIGHT = 0.45
LINE_HEIGHT = 0.2
"""Height of the numbers and the label below an axis, and of a line of a legend, in inches."""

LETTERS = 13
TITLE_LETTERS = 11
HANDLE = 8
"""Letters per inch in a legend and in a title; what the handle of a legend's entry takes, in
letters."""


class LegendStyle(TypedDict):
    frameon: bool
    fontsize: float
    ncols: int


class Style(TypedDict):
    """Colour and marker of a series."""

    color: str
    marker: str


# Figures and files


def own_matplotlib() -> ModuleType:
    """matplotlib, imported without a file of settings: it would read one of the current folder,
    which could hang, or make names the source of TeX."""
    if "matplotlib" not in sys.modules:
        package = importlib.util.find_spec("matplotlib")
        assert package is not None and package.origin is not None
        own_folder = Path(package.origin).parent / "mpl-data"
        with contextlib.chdir(own_folder) if _can_return() else contextlib.nullcontext():
            importlib.import_module("matplotlib")
        logging.getLogger("matplotlib").setLevel(logging.ERROR)  # not a word about its cache
    return sys.modules["matplotlib"]


def _can_return() -> bool:
    """Whether the current folder can be left and entered again.

    Otherwise it was deleted or may not be entered, and no file in it can be read.
    """
    try:
        os.chdir(Path.cwd())
    except OSError:
        return False
    return True


@contextlib.contextmanager
def own_style(changes: Mapping[str, object] | None = None) -> Iterator[None]:
    """matplotlib's defaults with `changes`, whatever files of settings say.

    Dollar signs in names do not start formulas.
    """
    matplotlib = own_matplotlib()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({"text.parse_math": False, **(changes or {})})
        yield


def drawn(
    draw: Callable[[Figure], object],
    size: tuple[float, float],
    style: Mapping[str, object] | None = None,
) -> Figure:
    """A figure of `size` inches that `draw` has drawn into."""
    with own_style(style):
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
    return figure


def write(
    draw: Callable[[Figure], object],
    folder: Path,
    stem: str,
    size: tuple[float, float] = (8, 5),
) -> Iterator[Path]:
    """Draw a figure and write it as `<stem>.png` and `.svg`; yields the path of each as soon as it
    is written. LabError if one cannot be written.
    """
    figure = drawn(draw, size)
    for kind in ("png", "svg"):
        path = folder / f"{stem}.{kind}"
        image = io.BytesIO()
        with own_style():
            figure.savefig(image, format=kind, dpi=150)
        results.write_whole(path, image.getvalue(), "The plot")
        yield path


def new_figure(size: tuple[float, float] = (8, 5)) -> Figure:
    """A figure for notebooks."""
    own_matplotlib()
    import matplotlib.pyplot as plt

    return plt.figure(figsize=size, layout="constrained")


def new_axes() -> Axes:
    """Axes of a new figure, for notebooks."""
    # Outside the context, which would take back that the first figure makes pyplot interactive.
    figure = new_figure()
    with own_matplotlib().rc_context({"text.parse_math": False}):
        return figure.subplots()


def figure_of(ax: Axes) -> Figure:
    """The figure that axes are in."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


# Colours and markers


def styles(n: int, single: str = OF_PREFILL) -> list[Style]:
    """Colour and marker of each of n series; a single one has the colour `single`."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if n == 1:
        colours = [single]
    elif n <= len(OF_SERIES):
        colours = list(OF_SERIES[:n])
    else:
        colours = [to_hex(colormaps["viridis"](0.9 * i / (n - 1))) for i in range(n)]
    return _with_markers(colours)


def shades(n: int, colour: str) -> list[Style]:
    """Colour and marker of each of n series: shades of a colour (#rrggbb), from light to dark."""
    if n == 1:
        return _with_markers([colour])
    return _with_markers([_mixed(colour, PALEST - SHADES * i / (n - 1)) for i in range(n)])


def _mixed(colour: str, share: float) -> str:
    """A colour with a share of white, or of black (a negative share)."""
    white = 255 * max(0, share)
    parts = [round(white + part * (1 - abs(share))) for part in bytes.fromhex(colour[1:])]
    return f"#{bytes(parts).hex()}"


def _with_markers(colours: Sequence[str]) -> list[Style]:
    return [
        {"color": colour, "marker": MARKERS[i % len(MARKERS)]}
        for i, colour in enumerate(colours)
    ]


# Panels and axes


def panels(ax: Axes, names: Sequence[str]) -> list[Axes]:
    """The axes of each series: `ax`, or in its place a panel for each name if there are many."""
    figure = figure_of(ax)
    distinct = list(dict.fromkeys(names))
    has_room = len(names) <= MOST_SERIES
    has_one_name = len(distinct) == 1
    is_beside_others = figure.axes != [ax]
    if has_room or has_one_name or is_beside_others:
        return [ax] * len(names)
    ax.remove()
    n_columns = min(len(distinct), 3 if figure.get_figwidth() > 7 else 2)
    n_rows = math.ceil(len(distinct) / n_columns)
    letters = int(1.2 * TITLE_LETTERS * figure.get_figwidth() / n_columns)
    titles = ["\n".join(textwrap.wrap(name, letters)) for name in distinct]
    title_height = 0.14 * max(title.count("\n") for title in titles)
    figure.set_figheight(max(figure.get_figheight(), 1.2 + (1.8 + title_height) * n_rows))
    axes = grid(figure, len(distinct), n_columns, sharex=True, sharey=True)
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title, fontsize=SMALL_SIZE)
    return [axes[distinct.index(name)] for name in names]


def grid(
    figure: Figure, n: int, n_columns: int, sharex: bool = False, sharey: bool = False
) -> list[Axes]:
    """n axes in rows; the last of each column has numbers below."""
    n_rows = math.ceil(n / n_columns)
    axes = list(
        figure.subplots(n_rows, n_columns, squeeze=False, sharex=sharex, sharey=sharey).flat
    )
    for spare in axes[n:]:
        spare.remove()
    for lowest in axes[max(0, n - n_columns) : n]:
        lowest.xaxis.set_tick_params(labelbottom=True)
    return axes[:n]


def name_axes(axes: Sequence[Axes], x: str, y: str) -> None:
    """Label the axes; of panels those at the left, and those with nothing below."""
    distinct = list(dict.fromkeys(axes))
    if len(distinct) == 1:
        distinct[0].set(xlabel=x, ylabel=y)
        return
    for ax in distinct:
        if ax.get_subplotspec().is_first_col():  # type: ignore[union-attr]
            ax.set_ylabel("\n".join(textwrap.wrap(y, 20)), fontsize=SMALL_SIZE)
        if ax.xaxis.get_tick_params()["labelbottom"]:
            ax.set_xlabel(x, fontsize=SMALL_SIZE)


def over_lengths(ax: Axes, lengths: Iterable[float]) -> None:
    """A logarithmic x axis, with ticks at the lengths that have room for their numbers."""
    from matplotlib.ticker import FixedLocator, NullLocator

    in_order = sorted(set(lengths))
    low = in_order[0]
    high = in_order[-1]
    if low == high:
        low /= 2
        high *= 2
    margin = (high / low) ** 0.05
    ax.set_xscale("log")
    ax.set_xlim(low / margin, high * margin)
    room = math.log(high / low) * TICK_WIDTH / column_width(ax)
    ticks = [in_order[-1]]
    for length in reversed(in_order):
        if math.log(ticks[-1] / length) >= room:
            ticks.append(length)
    ax.xaxis.set_major_locator(FixedLocator(ticks))
    ax.xaxis.set_minor_locator(NullLocator())


def plain_ticks(axis: XAxis | YAxis) -> None:
    """Label ticks 1,000, not 10^3.

    A short logarithmic axis also has labels between the powers of ten.
    """
    from matplotlib import ticker

    has_numbers = isinstance(
        axis.get_major_formatter(), ticker.ScalarFormatter | ticker.LogFormatter
    )
    if not has_numbers:
        return
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: _number(value)))
    low, high = axis.get_view_interval()
    if axis.get_scale() != "log" or isinstance(axis.get_major_locator(), ticker.FixedLocator):
        return
    if high / low < 10:
        axis.set_major_locator(ticker.MaxNLocator(6))
        axis.set_minor_locator(ticker.NullLocator())
        return
    axis.set_tick_params(which="minor", pad=5)  # on one line with the labels of powers
    first_digits = _digits_between_powers(axis, math.log10(high / low))
    axis.set_minor_formatter(
        ticker.FuncFormatter(
            lambda value, _: _number(value) if f"{value:e}"[0] in first_digits else ""
        )
    )


def _number(value: float) -> str:
    """A number without an exponent: 0.00005, 20, 1,000."""
    text = f"{value:,.10g}"
    return f"{value:,.12f}".rstrip("0").rstrip(".") if "e" in text else text


def _digits_between_powers(axis: XAxis | YAxis, n_powers: float) -> str:
    """The first digits of ticks that have room for labels between powers of ten."""
    if axis.axis_name == "x":
        inches = column_width(axis.axes)
        needed = TICK_LETTER * (1 + len(f"{axis.get_view_interval()[1]:,.0f}"))
    else:
        inches = _height(axis.axes)
        needed = TICK_HEIGHT
    of_a_power = (inches - BESIDE_AXES[axis.axis_name]) / n_powers
    for first_digits, distance in BETWEEN_POWERS.items():
        if distance * of_a_power >= needed:
            return first_digits
    return ""


def column_width(ax: Axes) -> float:
    """The inches of the figure's width that axes have."""
    width = float(figure_of(ax).get_figwidth())
    place = ax.get_subplotspec()
    return width / place.get_gridspec().ncols if place else width


def _height(ax: Axes) -> float:
    """The inches of the figure's height that axes have."""
    height = float(figure_of(ax).get_figheight())
    place = ax.get_subplotspec()
    return height / place.get_gridspec().nrows if place else height


# Series


def points(
    ax: Axes, x: Iterable[float], y: Iterable[float], disturbed: Iterable[bool], **style: Any
) -> None:
    """Draw runs as points without lines; disturbed ones are hollow, and the legend says so."""
    good: list[tuple[float, float]] = []
    hollow: list[tuple[float, float]] = []
    for at_x, at_y, is_disturbed in zip(x, y, disturbed, strict=True):
        runs = hollow if is_disturbed else good
        runs.append((at_x, at_y))
    style = {"ls": "", "mew": 0, **style}
    if good or (hollow and style.get("label")):  # at least for the legend
        ax.plot([at_x for at_x, _ in good], [at_y for _, at_y in good], **style)
    if hollow:
        alpha = min(0.9, 2 * style.get("alpha", 1))
        style |= {"mfc": "none", "mew": 0.8, "alpha": alpha, "label": None}
        if HOLLOW not in ax.get_legend_handles_labels()[1]:
            ax.plot([], [], ls="", marker="o", mfc="none", color=GUIDE, label=HOLLOW)
        ax.plot(*zip(*hollow, strict=True), **style)


def plot_lines(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    title: str,
    log: bool = False,
    ax: Axes | None = None,
) -> Axes:
    """Draw a line with points for every name in `lines`: (x values, y values).

        lab.plot_lines({"read": ([1, 2, 4], [3, 5, 9])}, "tokens", "ms", "Steps")

    For figures of the reader. Both axes begin at zero, or are logarithmic (`log`). A logarithmic x
    axis has its ticks at the values of x where all of them are whole numbers. LabError for a
    logarithmic axis with a value that is not above zero.
    """
    if not isinstance(lines, Mapping) or not lines:
        raise LabError(
            "plot_lines needs a name, x values and y values for each line.",
            'For example: {"read": ([1, 2, 4], [3, 5, 9])}',
        )
    if log:
        _check_positive(lines)
    ax = ax or new_axes()
    for (name, (x, y)), style in zip(lines.items(), styles(len(lines)), strict=True):
        ax.plot(x, y, ms=5, lw=1.8, label=name, **style)
    ax.set(xlabel=x_label, ylabel=y_label)
    if log:
        ax.set_yscale("log")
        values = list(itertools.chain.from_iterable(x for x, _ in lines.values()))
        if all(float(value).is_integer() for value in values):
            over_lengths(ax, values)
        else:
            ax.set_xscale("log")
    else:
        ax.set(xlim=(0, None), ylim=(0, None))
    finish([ax], title)
    return ax


def _check_positive(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> None:
    """LabError for the first value that a logarithmic axis cannot show."""
    for name, (x, y) in lines.items():
        for value in (*x, *y):
            if value <= 0:
                raise LabError(
                    f"A logarithmic axis cannot show {value:g} (in {name!r}).",
                    "Leave out the points at and below zero, or use log=False.",
                )


# Titles and legends


def finish(axes: Sequence[Axes], title: str, is_apart: bool = False) -> None:
    """Give axes a light grid, ticks that are read as words, a title above and one legend below.

    The legend has as many columns as fit, and the figure grows by its lines. Long lines of a title
    are broken. Title and legend are those of the figure where there are several axes, or where
    these have titles too (`is_apart`).
    """
    axes = list(dict.fromkeys(axes))
    entries: dict[str, Artist] = {}
    for ax in axes:
        ax.grid(True, which="major", color=GRID, lw=0.6)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        plain_ticks(ax.xaxis)
        plain_ticks(ax.yaxis)
        handles, names = ax.get_legend_handles_labels()
        entries |= dict(zip(names, handles, strict=True))
    figure = figure_of(axes[0])
    is_single = len(axes) == 1 and not is_apart
    width = column_width(axes[0]) if is_single else figure.get_figwidth()
    title_letters = int(TITLE_LETTERS * width)
    if is_single and max(map(len, title.split("\n"))) > title_letters / 2:
        title_letters = int(TITLE_LETTERS * _width_around(axes[0], width))
    lines = [_wrapped(line, title_letters) for line in title.split("\n")]
    if is_single:
        axes[0].set_title("\n".join(lines), fontsize=TITLE_SIZE, pad=9)
    else:
        figure.suptitle("\n".join(lines), fontsize=TITLE_SIZE)
    if entries:
        n_lines = _add_legend(axes[0], entries, width, is_single)
        if figure.axes == axes:
            growth = LINE_HEIGHT * max(0, n_lines - 2)
            figure.set_figheight(figure.get_figheight() + growth)


def _width_around(ax: Axes, width: float) -> float:
    """The inches that a title has which stands in the middle of axes, of those of their column."""
    figure = figure_of(ax)
    figure.draw_without_rendering()  # so that the layout is known
    frame = ax.get_window_extent()
    middle = float(frame.x0 + frame.x1) / 2 / figure.dpi % width
    return 2 * min(middle, width - middle)


def _wrapped(text: str, letters: int) -> str:
    return "\n".join(textwrap.wrap(text, letters))


def _add_legend(ax: Axes, entries: Mapping[str, Artist], width: float, is_single: bool) -> int:
    """Add a legend below the axes, or below the figure; returns its height in lines.

    `entries` are the handles by name; the one of hollow points comes last.
    """
    from matplotlib.transforms import ScaledTranslation

    names = sorted(entries, key=lambda name: name == HOLLOW)
    handles = [entries[name] for name in names]
    letters = int(LETTERS * width)
    labels = [_wrapped(name, letters - HANDLE) for name in names]
    longest = max(len(line) for line in "\n".join(labels).split("\n"))
    most_columns = max(1, min(len(labels), letters // (longest + HANDLE)))
    n_rows = math.ceil(len(labels) / most_columns)
    style: LegendStyle = {
        "frameon": False,
        "fontsize": LABEL_SIZE,
        "ncols": math.ceil(len(labels) / n_rows),
    }
    figure = figure_of(ax)
    if is_single:
        ticks = [tick.get_text() for tick in ax.get_xticklabels()]
        n_breaks = ax.get_xlabel().count("\n") + max(text.count("\n") for text in ["", *ticks])
        labels_end = LABEL_HEIGHT + LINE_HEIGHT * n_breaks
        below = ax.transAxes + ScaledTranslation(0, -labels_end, figure.dpi_scale_trans)
        ax.legend(
            handles,
            labels,
            loc="upper center",
            bbox_to_anchor=(0.5, 0),
            bbox_transform=below,
            **style,
        )
    else:
        figure.legend(handles, labels, loc="outside lower center", **style)
    return n_rows * max(1 + label.count("\n") for label in labels)


def write_beside(ax: Axes, place: float, text: str, size: int = LABEL_SIZE) -> None:
    """Write the figure of a row at the right of the axes; `place` is on the y axis."""
    beside = ax.get_yaxis_transform()
    ax.text(1.02, place, text, transform=beside, va="center", fontsize=size)
