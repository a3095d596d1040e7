"""The picture of both ways: TTFT and TPOT in process, and through a server, whose parts are stacked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis.wording import digits
from lab.core.record import Record
from lab.core.request import RequestRecord
from lab.experiments import door_parts
from lab.experiments.door_parts import ENGINE, ORDER, UNEXPLAINED, Phase, Row
from lab.runner import machine
from lab.show import text_doors
from lab.show.canvas import COLOURS, GRID, GUIDE, INK, plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADES = dict(zip(ORDER, (*COLOURS[:6], "#F0E442", GUIDE), strict=True))
"""The colour of each part, in all pictures the same."""

SIZE = (9.0, 2.2)
"""Inches: how wide, and how high for each length."""


def drawings(lines: Sequence[Record | RequestRecord]) -> dict[str, Callable[[Figure], Figure]]:
    """The picture of each session that has both sides, by its name."""
    made = {}
    records = [line for line in lines if isinstance(line, Record)]
    sessions = text_doors.sessions(records, [line for line in lines if isinstance(line, RequestRecord)])
    for number, (ours, theirs) in enumerate(sessions, 1):
        rows = door_parts.rows(ours, theirs)
        model, endpoint = ours[0].model, theirs[0].endpoint
        where = machine.label(ours[0].machine)
        title = (
            f"{model.name} {model.quantization or ''}, in process and through {endpoint.server or 'a server'}, {where}"
        )
        name = "ways" if len(sessions) == 1 else f"{number}-ways"
        made[name] = drawing(rows, title)
    return made


def drawing(rows: Sequence[Row], title: str) -> Callable[[Figure], Figure]:
    """What `canvas.write` takes."""
    return lambda figure: plot_parts(rows, title, figure)


def plot_parts(rows: Sequence[Row], title: str, figure: Figure) -> Figure:
    """A row of two axes for each length: TTFT, and TPOT. Above, in process; below, the parts through the server.

    What the server needs less time for makes the bar of its engine shorter; what is not explained is hatched.
    """
    figure.set_size_inches(SIZE[0], 1.4 + SIZE[1] * len(rows))
    axes = figure.subplots(len(rows), 2, squeeze=False)
    for row, pair in zip(rows, axes, strict=True):
        for ax in pair:
            ax.set_visible(False)
        for phase, ax in zip(row.phases, pair, strict=False):
            ax.set_visible(True)
            _bars(ax, row, phase)
    handles: dict[str, Any] = {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    names = [name for name in (*ORDER, UNEXPLAINED) if name in handles]
    figure.legend(
        [handles[name] for name in names], names, loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=11)
    return figure


def _bars(ax: Axes, row: Row, phase: Phase) -> None:
    ax.barh([1], [phase.in_process_ms], color=SHADES[ENGINE], height=0.6, label=ENGINE)
    less_ms = sum(part.ms for part in phase.parts if part.ms < 0)
    left = 0.0
    for part in phase.parts:
        ms = part.ms + less_ms if part.name == ENGINE else part.ms
        if ms > 0:
            ax.barh([0], [ms], left=[left], color=SHADES[part.name], height=0.6, label=part.name)
            left += ms
    low, high = sorted((left, phase.server_ms))
    ax.barh([0], [high - low], left=[low], color="none", ec=INK, hatch="////", height=0.6, lw=0.6, label=UNEXPLAINED)
    for y, end, ms in ((1, phase.in_process_ms, phase.in_process_ms), (0, high, phase.server_ms)):
        ax.annotate(f" {digits(ms)}", (end, y), va="center", fontsize=9, color=INK)
    ax.set_xlim(0, 1.15 * max(phase.in_process_ms, high))
    ax.set_yticks([1, 0], ["in process", "through\nthe server"], fontsize=9)
    plain_ticks(ax.xaxis)
    ax.set_xlabel(f"{phase.name} (ms)")
    ax.set_title(f"{row.n_prompt:,} prompt tokens, {row.n_gen:,} generated", fontsize=10)
    ax.grid(True, axis="x", color=GRID, lw=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
