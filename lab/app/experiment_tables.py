"""Cells, rows, sentences and lines of pictures that the tables of experiments share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict, TypeVar, Unpack

from lab.show import canvas
from lab.show.cells import Cell, stacked
from lab.show.wording import UNKNOWN, digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Point = tuple[float, float]
Row = TypeVar("Row")


class MeasuredPoint(NamedTuple):
    x: float
    y: float
    is_disturbed: bool  # a run from which it was derived


def cell(value: float | None, scale: float = 1.0) -> str:
    """A number in a table with three significant digits, `-` if unknown."""
    return UNKNOWN if value is None else digits(scale * value)


def ranged(value_s: float, low_s: float, high_s: float, n_runs: int) -> Cell:
    """Milliseconds in a table, with their range over several runs below."""
    value = digits(1e3 * value_s)
    if n_runs == 1:
        return Cell(value)
    low = digits(1e3 * low_s)
    high = digits(1e3 * high_s)
    return stacked(value, f"{low}-{high}")


def as_rows(table: pd.DataFrame, make: Callable[..., Row]) -> list[Row]:
    """The rows of a table, which `make` makes of its columns; None for an unknown figure."""
    rows = []
    for values in with_none(table).itertuples(index=False, name=None):
        rows.append(make(**dict(zip(table.columns, values, strict=True))))
    return rows


def with_none(table: pd.DataFrame) -> pd.DataFrame:
    """A table with None for an unknown figure."""
    cells = table.astype(object)
    return cells.where(cells.notna(), None)


def first_difference(ids: Sequence[object], reference: Sequence[object]) -> int | None:
    """The first position at which two answers to a prompt differ; None if they agree as far as both
    go.
    """
    for position, (token, expected) in enumerate(zip(ids, reference, strict=False)):
        if token != expected:
            return position
    return None


def prediction_errors(
    pairs: Iterable[tuple[float | None, float | None]], what: str, note: str = ""
) -> list[str]:
    """A sentence on the errors of predictions, from predicted and measured values; none if no pair
    is complete.
    """
    errors: list[float] = []
    for predicted, measured in pairs:
        if predicted and measured and measured > 0:
            errors.append(100 * abs(predicted / measured - 1))
    if not errors:
        return []
    median = statistics.median(errors)
    return [
        f"Prediction error of {what}: median {median:.0f} %, maximum {max(errors):.0f} %{note}."
    ]


def plot_series(
    ax: Axes,
    name: str,
    style: canvas.Style,
    measured: Iterable[MeasuredPoint],
    medians: Iterable[Point],
    predicted: Iterable[Point],
) -> None:
    """Draw measured points, hollow if disturbed; medians as a line; predictions dashed."""
    points = list(measured)
    if points:
        xs, ys, are_hollow = zip(*points, strict=True)
        canvas.points(
            ax, xs, ys, are_hollow, **style, ms=5, alpha=0.6, label=f"{name}: measured"
        )
    colour = style["color"]
    plot_line(ax, medians, color=colour, ls="-", marker="_", ms=14, label=f"{name}: median")
    plot_line(
        ax, predicted, color=colour, ls="--", marker="x", ms=5, label=f"{name}: predicted"
    )


class LineStyle(TypedDict):
    """How a line is drawn, and its name."""

    color: str
    ls: str
    marker: str
    ms: float
    label: str


def plot_line(ax: Axes, points: Iterable[Point], **style: Unpack[LineStyle]) -> None:
    """Draw a line through points, if there are any."""
    line = list(points)
    if line:
        xs, ys = zip(*line, strict=True)
        ax.plot(xs, ys, lw=1.8, **style)
