"""The picture of requests over time: when each came, waited, was answered, or failed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.analysis.loads import Arm, Due, Round
from lab.core.server_load import CLOSED
from lab.show.canvas import COLOURS, GRID, MARKERS, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS, MOST_BARS = 6, 150
FEWEST_ROWS = 10
WAITING, ANSWERED = COLOURS[4], COLOURS[0]
FAILED = (COLOURS[1], COLOURS[3], COLOURS[6], COLOURS[2], COLOURS[5])
"""Colours of classes of failure, by their number."""


def plot_timeline(arms: Sequence[Arm], figure: Figure) -> None:
    """A bar a request of the first round of each arm: waiting for the first token, then being answered.

    The steady window is shaded. A failure is a mark where the request was due. Of more than 6
    arms the smallest, the largest and some between are drawn; of more than 150 requests, evenly spread ones.
    """
    chosen = list(arms)
    if len(arms) > MOST_PANELS:
        chosen = [arms[round(i * (len(arms) - 1) / (MOST_PANELS - 1))] for i in range(MOST_PANELS)]
    n_columns = 1 if len(chosen) == 1 else 2 if len(chosen) in (2, 4) else 3
    n_rows = math.ceil(len(chosen) / n_columns)
    axes = figure.subplots(n_rows, n_columns, sharex=True, squeeze=False).flatten()
    rounds = [arm.rounds[0] for arm in chosen]
    classes = list(dict.fromkeys(name for of in rounds for one in of.all if (name := _failure(one))))
    last_s = max(_last_s(of) for of in rounds)
    for number, (ax, arm, of_round) in enumerate(zip(axes, chosen, rounds, strict=False)):
        _panel(ax, arm, of_round, classes, last_s)
        if number + n_columns >= len(chosen):
            ax.set_xlabel("since the start (s)")
            ax.xaxis.set_tick_params(labelbottom=True)
        if number % n_columns == 0:
            ax.set_ylabel("requests, in order")
    for ax in axes[len(chosen) :]:
        ax.set_visible(False)
    _legend(axes[0], figure, classes, arms[0].load.arrivals != CLOSED)


def _last_s(of_round: Round) -> float:
    """Where the time axis ends: with the last answer, but at most half as far again as the window."""
    end_s = of_round.begin_s + of_round.load.duration_s
    return min(1.5 * end_s, max([end_s, *(one.end_s for one in of_round.all if one.is_ok)]))


def _panel(ax: Axes, arm: Arm, of_round: Round, classes: Sequence[str], last_s: float) -> None:
    ax.axvspan(of_round.begin_s, of_round.begin_s + of_round.load.duration_s, color=GRID, alpha=0.5, lw=0)
    step = math.ceil(len(of_round.all) / MOST_BARS)
    drawn = of_round.all[::step]
    for row, one in enumerate(drawn):
        if one.end_s < math.inf:
            first_s = min(one.first_s, one.end_s)
            ax.barh(row, first_s - one.at_s, left=one.at_s, height=0.9, color=WAITING, lw=0)
            ax.barh(row, one.end_s - first_s, left=first_s, height=0.9, color=ANSWERED, lw=0)
    for number, name in enumerate(classes):
        failed = [(one.at_s, row) for row, one in enumerate(drawn) if _failure(one) == name]
        colour, marker = _style(number)
        ax.plot(*zip(*failed, strict=True), ls="", ms=5, mew=0, color=colour, marker=marker) if failed else None
    n = len(of_round.all)
    words = f"{arm.label}: {n} request{'s' * (n != 1)}" + (f", 1 of {step} drawn" if step > 1 else "")
    ax.set_title(words, fontsize=10)
    ax.set_xlim(0, last_s)
    ax.set_ylim(max(len(drawn), FEWEST_ROWS) - 0.5, -0.5)
    ax.set_yticks([])
    tidy(ax)


def _failure(one: Due) -> str | None:
    return None if one.is_ok else one.figures.failure or "failed"


def _style(number: int) -> tuple[str, str]:
    return FAILED[number % len(FAILED)], MARKERS[number % len(MARKERS)]


def _legend(ax: Axes, figure: Figure, classes: Sequence[str], is_open: bool) -> None:
    from matplotlib.patches import Patch

    wait = "waiting for its first token" + (", from its intended time" if is_open else "")
    handles: list[Any] = [Patch(color=WAITING, label=wait), Patch(color=ANSWERED, label="being answered")]
    handles += [Patch(color=GRID, alpha=0.5, label="the steady window")]
    for number, name in enumerate(classes):
        colour, marker = _style(number)
        handles += ax.plot([], [], ls="", ms=6, mew=0, color=colour, marker=marker, label=f"failed: {name}")
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
