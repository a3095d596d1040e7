"""The roofline picture: each phase as a point under the machine's two roofs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from lab.core import shown
from lab.core.lists import join_and
from lab.core.record import Ceilings
from lab.roofline import kernel_rates
from lab.roofline.kernel_rates import Roof
from lab.show import canvas
from lab.show.canvas import COLOURS, GUIDE, INK, MARKERS
from lab.show.point_labels import label_points
from lab.show.wording import digits, percent

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MOST_LABELS = 5  # lengths of a phase that are all named; of more the first and the last
POINT = 5  # size of the marker


class Dash(TypedDict):
    """The style of a line beside a point."""

    marker: list[tuple[float, float]]
    ms: float
    mew: float
    ls: str


DASH: Dash = {"marker": [(-1, 0), (-0.4, 0)], "ms": 28, "mew": 1.8, "ls": ""}
LABEL_SPACE = 1.5  # the factor by which the axis is extended below, for labels

Point = tuple[float, float]


def plot_roofline(
    rows: pd.DataFrame, roof: Roof | Ceilings, subject: str, ax: Axes | None = None
) -> Axes:
    """GFLOP/s over FLOPs per byte: each phase at each length as a point under the machine's two
    roofs, with the ceiling of its kernels as a dash at its left.

        best = lab.ceilings()
        lab.plot_roofline(lab.explain(records, best), best, "my machine")
    """
    if isinstance(roof, Ceilings):
        roof = kernel_rates.roof(roof)
    ax = ax or canvas.new_axes()
    draw_roof(ax, rows, roof)
    labels: list[tuple[float, float, str]] = []
    marked: list[Point] = []
    for number, (phase, of_phase) in enumerate(rows.groupby("phase", sort=False)):
        marked += draw_phase(ax, str(phase), of_phase, COLOURS[number], MARKERS[number])
        if len(of_phase) > MOST_LABELS:
            of_phase = of_phase.iloc[[0, -1]]
        for row in of_phase.itertuples():
            labels.append((row.intensity, row.gflops, f"{row.n_prompt:,}"))
    ax.plot([], [], color=GUIDE, label="ceiling of its kernels, left of the point", **DASH)
    ax.set(xscale="log", yscale="log")
    ax.set_ylim(bottom=ax.get_ylim()[0] / LABEL_SPACE)
    ax.set(
        xlabel="operations per byte read from memory (FLOPs per byte)",
        ylabel="rate of arithmetic (GFLOP/s)",
    )
    canvas.finish([ax], f"Roofline: {finding(rows, roof)}\n{subject}")
    label_points(ax, labels, marked)
    return ax


def finding(rows: pd.DataFrame, roof: Roof) -> str:
    """How much of the roof the best point of each phase reaches."""
    firm = rows[rows.doubts.map(shown.is_firm)]
    allowed = (firm.intensity * roof.gbps).clip(upper=roof.gflops)
    parts = []
    for phase, share in (firm.gflops / allowed).groupby(firm.phase, sort=False).max().items():
        parts.append(f"{percent(share)} in {phase}")
    if not parts:
        return "the rate of each phase"
    return f"at most {join_and(parts)} of the machine's best"


def draw_roof(ax: Axes, rows: pd.DataFrame, roof: Roof) -> None:
    """Draw the slope of memory traffic and the flat part of arithmetic, beyond all points."""
    lowest = min(1, rows.intensity.min()) / 2
    highest = max(roof.ridge, rows.intensity.max()) * 3
    intensities = [lowest, roof.ridge, highest]
    gflops = [min(roof.gbps * intensity, roof.gflops) for intensity in intensities]
    memory = f"{digits(roof.gbps)} GB/s (slope)"
    arithmetic = f"{digits(roof.gflops)} GFLOP/s (flat)"
    label = f"machine's best: {memory}, {arithmetic}"
    ax.plot(intensities, gflops, color=INK, lw=2, label=label)


def draw_phase(
    ax: Axes, phase: str, rows: pd.DataFrame, colour: str, marker: str
) -> list[Point]:
    """Draw what a phase reached, and at the left of each point the ceiling of its kernels, which
    would hide other points above it; returns all points, which labels avoid.
    """
    intensities = rows.intensity.tolist()
    reached = rows.gflops.tolist()
    ceilings = (rows.flops / rows.least_s / 1e9).tolist()
    is_disturbed = [shown.DISTURBED in doubts for doubts in rows.doubts]
    label = f"{phase} (numbers: prompt tokens)"
    style = {"ms": POINT, "color": colour, "marker": marker, "label": label}
    canvas.points(ax, intensities, reached, is_disturbed, **style)
    ax.plot(intensities, ceilings, color=colour, **DASH)
    return [
        *zip(intensities, ceilings, strict=True),
        *zip(intensities, reached, strict=True),
    ]
