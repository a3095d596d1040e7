"""The picture of starts: a bar for each setup, made of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lab.core.lists import join_and
from lab.features.start.figures import StartSetup
from lab.features.start.lines import STAGES
from lab.show import canvas
from lab.show.wording import seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ON_COLOUR = "#111111"  # can be read on all colours with room for it, on dark pages too
NUMBERED_FROM = 0.06  # share of the longest bar from which a stage has room for its time


def setup_label(setup: StartSetup) -> str:
    mapping = "mmap" if setup.is_mapped else "no mmap"
    return f"{place_of(setup)},\n{mapping}"


def place_of(setup: StartSetup) -> str:
    return "from the disk" if setup.cache == "cold" else "from the page cache"


def draw_starts(figure: Figure, setups: Sequence[StartSetup], subject: str) -> None:
    """Draw the median start of each setup as a bar of its stages, and all starts as points."""
    ax = figure.subplots()
    bars = list(reversed(setups))  # the first setup is the highest bar
    labels = [setup_label(setup) for setup in bars]
    longest_s = max(setup.starts.first_token_s.max() for setup in setups)
    left = [0.0] * len(bars)
    for stage, style in zip(STAGES, canvas.styles(len(STAGES)), strict=True):
        times = [float(setup.median_start[stage]) for setup in bars]
        drawn = ax.barh(labels, times, 0.6, left=left, color=style["color"], label=stage)
        numbers = [time_label(time_s, longest_s) for time_s in times]
        ax.bar_label(
            drawn, numbers, label_type="center", color=ON_COLOUR, fontsize=canvas.LABEL_SIZE
        )
        left = [start + time_s for start, time_s in zip(left, times, strict=True)]
    for row, setup in enumerate(bars):
        times_of_starts = setup.starts.first_token_s
        heights = [row + 0.4] * len(times_of_starts)
        label = "each start" if row == 0 else None
        ax.plot(times_of_starts, heights, "k.", ms=4, label=label)
    ax.set(xlim=(0, 1.05 * longest_s), xlabel="time since the start of the process (s)")
    canvas.finish([ax], f"{finding(setups)}\n{subject}")
    ax.grid(visible=False, axis="y")


def finding(setups: Sequence[StartSetup]) -> str:
    """When the first token comes in the median start, with mmap if that was measured."""
    is_mapped = any(setup.is_mapped for setup in setups)
    times = []
    for setup in setups:
        if setup.is_mapped == is_mapped:
            first_token = seconds(float(setup.starts.first_token_s.median()))
            times.append(f"{first_token} {place_of(setup)}")
    return f"The first token comes after {join_and(times)}"


def time_label(time_s: float, longest_s: float) -> str:
    return f"{time_s:.2f}" if time_s >= NUMBERED_FROM * longest_s else ""
