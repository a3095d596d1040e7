"""The picture of `lab tune`: the time of each tried choice over the default's, with its interval and its runs."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lab.core.lists import grouped
from lab.core.stats import Ratio
from lab.features.tune import result as tuning
from lab.features.tune.result import CONFIRM, SEARCH, Tried, Tuned
from lab.features.tune.search import Timing
from lab.show import canvas
from lab.show.canvas import COLOURS, GUIDE, points
from lab.show.wording import digits

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DRAWN = 40
"""Choices in the picture, the fastest ones."""

LABEL_LETTERS = 34


def draw_tried(
    one: Tuned,
    rows: Sequence[Tried],
    label: Callable[[Tried], str],
    winner: str | None,
    subject: str,
    figure: Figure,
) -> Figure:
    """Draws the rows with a ratio into `figure`: the search as diamonds and points, the confirmation as squares.

    `label` names a row. A point is a run: its time over that of the default's runs in its block, hollow if disturbed.
    """
    known = [row for row in rows if row.ratio]
    drawn = known[:MOST_DRAWN]
    labels = ["\n".join(line for part in label(row).split("\n") for line in _wrapped(part)) for row in drawn]
    n_lines = sum(max(2, 1 + text.count("\n")) for text in labels)
    figure.set_figheight(1.9 + 0.19 * n_lines)
    ax = figure.subplots()
    searched, confirmed = (_ratios(one, stage) for stage in (SEARCH, CONFIRM))
    for at, row in enumerate(drawn):
        words = digits(1.0)
        if row.ratio and row.variant != tuning.DEFAULT:
            runs = searched.get(row.variant, [])
            _mark(ax, at, row.ratio, runs, at + 0.25, "search", COLOURS[0], COLOURS[5], "D")
            words = f"{digits(row.ratio.estimate)} ({digits(row.ratio.low)}-{digits(row.ratio.high)})"
        ax.text(1.02, at, words, transform=ax.get_yaxis_transform(), va="center", fontsize=8)
        if one.gain and row.variant == winner:
            gain, runs = Ratio(1 / one.gain.estimate, 1 / one.gain.high, 1 / one.gain.low), confirmed[row.variant]
            _mark(ax, at - 0.3, gain, runs, at - 0.3, "confirmation", COLOURS[1], COLOURS[4], "s")
    ax.axvline(1, color=GUIDE, lw=1.2)
    ax.set_yticks(range(len(drawn)), labels, fontsize=8)
    ax.set_ylim(len(drawn) - 0.4, -0.6)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.set_xlim(min(low, 0.95), max(high, 1.05))
    ax.set_xlabel("time / time with the default\n\u2190 faster | slower \u2192")
    some = f" (the {len(drawn)} fastest of {len(known)})" if len(drawn) < len(known) else ""
    title = f"What was tried for {one.n_prompt:,} + {one.n_gen:,} tokens{some}\n{subject}"
    canvas.finish([ax], title, is_apart=True)
    return figure


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LABEL_LETTERS, break_on_hyphens=False) or [""]


def _mark(
    ax: Axes,
    at: float,
    ratio: Ratio,
    runs: Sequence[tuple[float, bool]],
    of_runs: float,
    name: str,
    colour: str,
    light: str,
    marker: str,
) -> None:
    """A ratio with its interval at the height `at`, and its runs at the height `of_runs`."""
    known = ax.get_legend_handles_labels()[1]
    labels = [None if label in known else label for label in (f"run of the {name}", f"{name}, 95 % interval")]
    points(ax, [one for one, _ in runs], [of_runs] * len(runs), [is_disturbed for _, is_disturbed in runs],
           marker="o", color=light, ms=4.5, alpha=0.8, label=labels[0])  # fmt: skip
    reach = [[max(0, ratio.estimate - ratio.low)], [max(0, ratio.high - ratio.estimate)]]
    style: dict[str, Any] = {"ms": 6, "capsize": 3, "ls": "", "zorder": 3}
    ax.errorbar([ratio.estimate], [at], xerr=reach, marker=marker, color=colour, label=labels[1], **style)


def _ratios(one: Tuned, stage: str) -> dict[str, list[tuple[float, bool]]]:
    """By variant, for each run of a stage: its time over that of the default's runs in its block, and if disturbed."""
    of = tuning.phases_of(one.goal, one.n_gen, one.default.run.batch is not None)

    def total(timing: Timing) -> float:
        return sum(phase.n * timing.seconds.get(phase.name, math.nan) for phase in of)

    own = [(each.variant, each.timing) for each in one.measured if each.stage == stage and each.timing]
    found: dict[str, list[tuple[float, bool]]] = {}
    for same in grouped(own, lambda pair: pair[1].block).values():
        base = [total(timing) for variant, timing in same if variant == tuning.DEFAULT]
        for variant, timing in same if base else ():
            ratio = total(timing) / statistics.geometric_mean(base)
            found.setdefault(variant, []).append((ratio, timing.is_disturbed))
    return found
