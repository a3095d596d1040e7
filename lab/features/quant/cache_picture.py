"""The picture of `lab quant --cache`: harm and decode speed over depth."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lab.features.quant.figures import QuantFigures
from lab.show import canvas
from lab.show.wording import digits, times

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(summary: QuantFigures, by_depth: pd.DataFrame, subject: str, figure: Figure) -> None:
    """Draw the divergence on the left and the decode speed on the right, a line for each type."""
    has_speeds = bool(by_depth.decode.notna().any())
    axes = list(figure.subplots(1, 2 if has_speeds else 1, squeeze=False).flat)
    groups = list(by_depth.groupby("label", sort=False))
    spans = list(groups[0][1].span)
    for (label, rows), style in zip(groups, canvas.styles(len(groups)), strict=True):
        draw_harm(axes[0], rows, str(label), style)
        if has_speeds:
            draw_speed(axes[1], rows, style)
    axes[0].set_yscale("log")
    axes[0].set_xticks(range(len(spans)), spans)
    axes[0].set(xlabel="position (tokens before)", ylabel="mean divergence (nats)")
    if summary.floor and summary.floor > axes[0].get_ylim()[0]:
        axes[0].axhspan(
            axes[0].get_ylim()[0], summary.floor, color=canvas.GRID, label="noise floor"
        )
    if has_speeds:
        axes[1].axhline(1, color=canvas.GUIDE, lw=1, ls=":")
        lengths = [f"{row.end:,}" for row in groups[0][1].itertuples()]
        axes[1].set_xticks(range(len(lengths)), lengths)
        reference = summary.rows.label.iloc[0]
        axes[1].set(
            xlabel="tokens in the cache", ylabel=f"decode: times as fast as {reference}"
        )
        axes[1].set_ylim(bottom=0)
    canvas.finish(axes, f"{finding(groups)}\n{subject}", is_apart=True)


def draw_harm(ax: Axes, rows: pd.DataFrame, label: str, style: canvas.Style) -> None:
    places = range(len(rows))
    ax.plot(places, rows.kl.where(rows.kl > 0), label=label, **style)
    for place, row in zip(places, rows.itertuples(), strict=True):
        if row.kl_low > 0:  # False for NaN
            ax.plot([place, place], [row.kl_low, row.kl_high], color=style["color"], lw=1.4)


def draw_speed(ax: Axes, rows: pd.DataFrame, style: canvas.Style) -> None:
    places = range(len(rows))
    ax.plot(places, rows.decode, **style)
    for place, row in zip(places, rows.itertuples(), strict=True):
        ax.plot(
            [place, place], [row.decode_low, row.decode_high], color=style["color"], lw=1.4
        )


def finding(groups: list[tuple[object, pd.DataFrame]]) -> str:
    """The type that harms most in the deepest bin, and how it compares with the first one."""
    label, rows = max(groups, key=lambda group: group[1].kl.iloc[-1])
    last = rows.iloc[-1]
    first = rows.iloc[0]
    text = f"{label}: divergence {digits(last.kl)} at {last.span} tokens"
    if first.kl > 0 and len(rows) > 1 and not math.isnan(last.kl):
        text = f"{text}, {times(last.kl / first.kl)} that at the beginning"
    return text
