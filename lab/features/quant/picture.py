"""The picture of `lab quant`: divergence over speed, in decode and in prefill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core import shown
from lab.features.quant.figures import PHASES, QuantFigures, QuantRow
from lab.show import canvas
from lab.show.point_labels import label_points
from lab.show.wording import digits, percent, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNBEATEN = "not beaten in both"
BEATEN = "beaten in quality and decode speed"
UNCLEAR = "speed unclear (disturbed runs)"
MOST_BELOW = 0.01  # of the axis's end: a noise floor further below is not drawn


def draw(summary: QuantFigures, subject: str, figure: Figure) -> None:
    """Draw speed against divergence: decode on the left, prefill on the right."""
    reference = summary.rows.label.iloc[0]
    axes = list(figure.subplots(1, 2, sharey=True))
    for ax, phase in zip(axes, PHASES, strict=True):
        ax.set_yscale("log")
        ax.set_xlabel(f"{phase}: times as fast as {reference}")
        ax.axvline(1, color=canvas.GUIDE, lw=1, ls=":")
        for row in drawn_rows(summary, phase):
            draw_file(ax, row, phase)
    draw_bandwidth(axes[0], summary)
    draw_front(axes[0], summary)
    draw_floor(axes, summary)
    axes[0].set_ylabel("mean divergence (nats)")
    canvas.finish(axes, f"{finding(summary)}\n{subject}", is_apart=True)
    crosses = [(row.bandwidth, row.kl) for row in with_bandwidth(summary)]
    for ax, phase, avoid in zip(axes, PHASES, (crosses, []), strict=True):
        labels = []
        for row in drawn_rows(summary, phase):
            labels.append((getattr(row, phase), row.kl, label_of(row)))
            avoid += points_of_interval(row, phase)
        label_points(ax, labels, avoid)


def finding(summary: QuantFigures) -> str:
    """The speed and the quality of the fastest file that is not beaten in both."""
    reference, *files = summary.rows.itertuples()
    unbeaten = [row for row in files if row.on_front and row.decode > 1]
    if not unbeaten:
        return f"Quality against speed, over {reference.label}"
    best = max(unbeaten, key=lambda row: row.decode)
    return (
        f"{best.label} decodes {times(best.decode)} as fast as {reference.label}, with the same "
        f"most likely token at {percent(best.same)}"
    )


def points_of_interval(row: QuantRow, phase: str) -> list[tuple[float, float]]:
    """Points along the interval of a speed, which no label may cover."""
    low = getattr(row, f"{phase}_low")
    high = getattr(row, f"{phase}_high")
    if math.isnan(low) or math.isnan(high):
        return []
    return [(low + (high - low) * part / 10, row.kl) for part in range(11)]


def drawn_rows(summary: QuantFigures, phase: str) -> list[QuantRow]:
    """The files with a divergence and a speed; the reference has no divergence."""
    rows = summary.rows
    return list(rows[(rows.kl > 0) & rows[phase].notna()].itertuples())


def with_bandwidth(summary: QuantFigures) -> list[QuantRow]:
    decoded = drawn_rows(summary, "decode")
    return [row for row in decoded if not math.isnan(row.bandwidth)]


def draw_file(ax: Axes, row: QuantRow, phase: str) -> None:
    """Draw a file as a point with its intervals; hollow if its runs were disturbed."""
    speed = getattr(row, phase)
    label = BEATEN
    colour = canvas.COLOURS[1]
    if row.on_front:
        label = UNBEATEN
        colour = canvas.COLOURS[0]
    fill = colour
    if shown.DISTURBED in getattr(row, f"{phase}_doubts"):
        label = UNCLEAR
        fill = "none"
    ax.plot([speed], [row.kl], "o", color=colour, mfc=fill, label=label)
    ends_of_speed = [getattr(row, f"{phase}_low"), getattr(row, f"{phase}_high")]
    # Nothing where an end is NaN
    ax.plot(ends_of_speed, [row.kl, row.kl], color=colour, lw=1.4)
    ax.plot([speed, speed], [row.kl_low, row.kl_high], color=colour, lw=1.4)


def draw_bandwidth(ax: Axes, summary: QuantFigures) -> None:
    for row in with_bandwidth(summary):
        label = "by bytes read alone"
        ax.plot([row.bandwidth], [row.kl], "x", color=canvas.GUIDE, label=label)


def draw_front(ax: Axes, summary: QuantFigures) -> None:
    rows = [row for row in drawn_rows(summary, "decode") if row.on_front]
    rows.sort(key=lambda row: row.kl)
    speeds = [row.decode for row in rows]
    divergences = [row.kl for row in rows]
    ax.plot(speeds, divergences, color=canvas.COLOURS[0], lw=1, ls="--", label="front")


def draw_floor(axes: Sequence[Axes], summary: QuantFigures) -> None:
    """Shade the noise floor in panels that share their y axis, if it is near the points."""
    if not summary.floor or summary.floor <= 0:
        return
    low, high = axes[0].get_ylim()
    bottom = min(low, summary.floor / 3)
    if bottom < MOST_BELOW * low:
        return
    axes[0].set_ylim(bottom, high)
    for ax in axes:
        ax.axhspan(bottom, summary.floor, color=canvas.GRID, label="noise floor")


def label_of(row: QuantRow) -> str:
    if math.isnan(row.n_bytes):
        return str(row.label)
    return f"{row.label}, {digits(row.n_bytes / 1e6)} MB"
