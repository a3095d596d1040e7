"""The prefill picture: time until the prompt is processed, over its length; both logarithmic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from lab.core.figures import PREFILL as PREFILL_TIME, TTFT, FigureKind
from lab.core.record import PREFILL
from lab.core.results import Readable
from lab.core.shown import is_unreliable
from lab.errors import LabError
from lab.show import canvas, selection, table
from lab.show.canvas import GUIDE
from lab.show.wording import digits, seconds, times

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_PROGRESS = 100  # runs of a setup whose steps are drawn
FEWEST_STEPS = 3  # of a run whose progress is a line
MOST_GROWTHS = 4  # lengths of a single setup up to which the picture says how the time grows


NAMES = {PREFILL_TIME: "Prefill", TTFT: "TTFT"}
MEANINGS = {
    PREFILL_TIME: "time until the prompt is processed",
    TTFT: "time until the first token arrives",
}


class Curve(NamedTuple):
    """The runs of a setup, and how they are drawn."""

    setup: str
    runs: pd.DataFrame
    ax: Axes
    style: canvas.Style


def plot_prefill(records: Readable, ax: Axes | None = None) -> Axes:
    """Draw prefill time against prompt length; TTFT if there are requests to servers.

        lab.plot_prefill(records)

    Points are runs (hollow: disturbed). The thick line is the progress of the longest prompt's
    median run, thin lines that of other runs; where no run has three steps, the thick line connects
    medians. The dashed grey line is proportional to the length, at the lowest measured time per
    token. For a single setup the picture says by how much the time grows. More than six setups
    have a panel each. LabError if no run has a prefill time.
    """
    timed, rows = selection.timed_rows(records)
    figure = TTFT if table.alone(timed) else PREFILL_TIME
    rows = rows[rows[figure.name].gt(0) & rows.n_prompt.notna()]
    if rows.empty:
        raise LabError(
            "There is nothing to draw: no run has a prefill time.", "Measure some: lab measure"
        )
    setups = table.setups(rows)
    axes = canvas.panels(ax or canvas.new_axes(), [name for name, _ in setups])
    shares_axes = len(setups) > 1 and axes[0] is axes[-1]
    curves = _curves(setups, axes, shares_axes)
    drawn_setups: set[str] = set()
    if figure is PREFILL_TIME:
        drawn_setups = _draw_progress(table.steps(timed), curves, shares_axes)
    replicate = "run" if table.of_engine(timed) else "request"
    for curve in curves:
        name = f"{curve.setup}: median run"
        if curve.setup not in drawn_setups:
            name = f"{curve.setup}: median"
            _draw_medians(curve, figure.name, shares_axes, replicate)
        if shares_axes:  # the legend shows the shape of the points
            curve.ax.plot([], [], lw=2, ms=6, **curve.style, label=name)
        _draw_runs(curve, figure.name, "" if shares_axes else f"{replicate}s")
    if len(setups) == 1:
        _write_growth(axes[0], rows, figure.name)
    _draw_proportion(curves, rows, figure.name, shares_axes)
    canvas.name_axes(axes, "prompt length (tokens)", figure.axis)
    canvas.finish(axes, f"{_finding(rows, figure)}\n{selection.subject(timed, rows)}")
    return axes[0]


def _finding(rows: pd.DataFrame, figure: FigureKind) -> str:
    """The times of the shortest and the longest prompt, or what the picture shows."""
    stated = selection.stated_at_ends(rows, figure.name, seconds, "for")
    return f"{NAMES[figure]}: {stated or MEANINGS[figure]}"


def _curves(
    setups: Sequence[tuple[str, pd.DataFrame]], axes: Sequence[Axes], shares_axes: bool
) -> list[Curve]:
    """Setups that share axes differ in colour; those with a panel each look alike."""
    n_styles = len(setups) if shares_axes else 1
    styles = itertools.cycle(canvas.styles(n_styles))
    return [
        Curve(name, runs, ax, style)
        for (name, runs), ax, style in zip(setups, axes, styles, strict=False)
    ]


def _draw_progress(
    steps: pd.DataFrame, curves: Sequence[Curve], shares_axes: bool
) -> set[str]:
    """Draw when each prefill step of a run was done, for runs of several steps: thick for the
    longest prompt's median run.

    Returns the setups with a thick line.
    """
    drawn_setups: set[str] = set()
    if steps.empty:  # imported runs have no steps
        return drawn_setups
    steps = steps[(steps.kind == PREFILL) & steps.compute_ms.notna()]
    label = "progress of other runs"
    for curve in curves:
        median_run = _median_run(curve.runs)
        drawn_runs = [*curve.runs.run.unique()[-MOST_PROGRESS:], median_run]
        for number, run in steps[steps.run.isin(drawn_runs)].groupby("run"):
            ends = run.n_past + run.n_tokens
            color = curve.style["color"]
            if number == median_run and len(run) >= FEWEST_STEPS:
                name = (
                    "_"
                    if shares_axes
                    else f"progress of the median run of {ends.max():,} tokens"
                )
                curve.ax.plot(ends, run.ready_s, color=color, lw=2, label=name)
                drawn_setups.add(curve.setup)
            elif len(run) > 1:
                curve.ax.plot(ends, run.ready_s, color=color, lw=0.7, alpha=0.5, label=label)
                label = "_"  # it is in the legend
    return drawn_setups


def _median_run(runs: pd.DataFrame) -> int:
    """The number of the run in the middle of those with the longest prompt, by prefill time."""
    longest = runs[runs.n_prompt == runs.n_prompt.max()].sort_values(PREFILL_TIME.name)
    return int(longest.run.iloc[(len(longest) - 1) // 2])


class PointMark(TypedDict, total=False):
    """The marker of a line with a single point."""

    marker: str
    ms: float


def _draw_medians(curve: Curve, column: str, shares_axes: bool, replicate: str) -> None:
    """Draw the medians of the runs by length as a line."""
    medians = curve.runs.groupby("n_prompt")[column].median()
    mark: PointMark = {"marker": "_", "ms": 16} if len(medians) == 1 else {}
    label = "_" if shares_axes else f"median over {replicate}s"
    curve.ax.plot(medians, lw=2, color=curve.style["color"], label=label, **mark)


def _draw_runs(curve: Curve, column: str, label: str) -> None:
    """Draw the runs of a setup as points; without a label the legend does not have them."""
    canvas.points(
        curve.ax,
        curve.runs.n_prompt,
        curve.runs[column],
        curve.runs.disturbed,
        ms=6,
        alpha=0.6,
        **curve.style,
        label=label or None,
    )


def _write_growth(ax: Axes, rows: pd.DataFrame, column: str) -> None:
    """Write between neighbouring lengths by how much tokens and time grow.

    Nothing is written for many lengths, or if half of the runs of a length were disturbed.
    """
    by_length = rows.groupby("n_prompt")
    medians = by_length[column].median()
    if len(medians) > MOST_GROWTHS:
        return
    for _, repeats in by_length:
        if is_unreliable(len(repeats), int(repeats.disturbed.sum())):
            return
    for (length, time_s), (next_length, next_time_s) in itertools.pairwise(medians.items()):
        tokens = times(next_length / length)
        growth = f"{tokens} the tokens:\n{times(next_time_s / time_s)} the time"
        middle = (math.sqrt(length * next_length), math.sqrt(time_s * next_time_s))
        ax.annotate(
            growth,
            middle,
            (-9, 6),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=canvas.LABEL_SIZE,
        )


def _draw_proportion(
    curves: Sequence[Curve], rows: pd.DataFrame, column: str, shares_axes: bool
) -> None:
    """Draw the line that is proportional to the length; a single length needs none."""
    token_s, place = _lowest_per_token(curves, column, shares_axes)
    label = f"{digits(1e3 * token_s)} ms per token, as at {place} (proportional)"
    lengths = [rows.n_prompt.min(), rows.n_prompt.max()]
    for ax in dict.fromkeys(curve.ax for curve in curves):
        if lengths[0] == lengths[1]:
            ax.set_ylim(0, 1.2 * rows[column].max())
        else:
            times_s = [length * token_s for length in lengths]
            ax.plot(lengths, times_s, color=GUIDE, ls="--", lw=1.2, label=label)
            ax.set_yscale("log")
        canvas.over_lengths(ax, rows.n_prompt)


def _lowest_per_token(
    curves: Sequence[Curve], column: str, shares_axes: bool
) -> tuple[float, str]:
    """The lowest median time per prompt token in seconds, and where it was measured."""
    lowest_s = math.inf
    place = ""
    for curve in curves:
        medians = curve.runs.groupby("n_prompt")[column].median()
        per_token = medians / medians.index
        if per_token.min() < lowest_s:
            lowest_s = float(per_token.min())
            place = f"{per_token.idxmin():,.0f} tokens"
            if shares_axes:
                place = f"{place} of {curve.setup}"
    return lowest_s, place
