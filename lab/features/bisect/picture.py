"""The picture of `lab bisect`: the builds in order, and their times over those of the good end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lab.features.bisect.figures import Bisected, pairs
from lab.features.bisect.lines import DECODE, PREFILL
from lab.features.bisect.search import GOOD
from lab.features.bisect.sentences import finding
from lab.show import canvas, text_setup
from lab.show.section import WIDE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {PREFILL: canvas.OF_PREFILL, DECODE: canvas.OF_DECODE}
MARKERS = {PREFILL: "o", DECODE: "s"}
MOST_TICKS = 24
APART = 0.12  # by which two figures of a build are drawn side by side


def plot_bisected(result: Bisected) -> Figure:
    """Draw the builds of a search in order, with their times over those of the good end.

        lab.plot_bisected(lab.bisect("0.3.20", "0.3.36"))

    `result` is what `lab.bisect` returned.
    """
    return draw(result, canvas.new_figure(WIDE))


def draw(result: Bisected, figure: Figure) -> Figure:
    """Draw a point with its interval for each figure of each build that was measured."""
    ax = figure.subplots()
    places = sorted(result.records)
    for pair in pairs(result):
        ax.axvspan(
            pair.fast, pair.slow, color=canvas.GRID, alpha=0.6, label="became slower here"
        )
    for number, name in enumerate(result.search.figures):
        shift = APART * (number - (len(result.search.figures) - 1) / 2)
        draw_figure(ax, result, name, shift)
    ax.axhline(1, color=canvas.GUIDE, lw=1.2)
    bound = 1 + result.asked.at_least
    ax.axhline(bound, color=canvas.GUIDE, lw=1, ls=":", label="slowdown looked for")
    draw_left_out(ax, result)
    every = max(1, -(-len(places) // MOST_TICKS))
    ticks = places[::every]
    ax.set_xticks(ticks, [result.label(place) for place in ticks], rotation=40, ha="right")
    ax.set_xlim(-0.5, result.search.bad + 0.5)
    ax.set_xlabel("build, from the good end to the bad one")
    ax.set_ylabel(f"times as long as in {result.label(GOOD)}\nslower \u2192")
    canvas.finish([ax], title_of(result), is_apart=True)
    ax.set_xticks(ticks, [result.label(place) for place in ticks], rotation=40, ha="right")
    return figure


def draw_figure(ax: Axes, result: Bisected, name: str, shift: float) -> None:
    """Draw the ratios of one figure, and their intervals as bars."""
    xs = [GOOD + shift]
    ratios = [1.0]
    below = [0.0]
    above = [0.0]
    for place in sorted(result.records):
        ratio = result.search.ratio_to_good(place, name)
        if place == GOOD or ratio is None:
            continue
        xs.append(place + shift)
        ratios.append(ratio.estimate)
        below.append(ratio.estimate - ratio.low)
        above.append(ratio.high - ratio.estimate)
    ax.errorbar(
        xs,
        ratios,
        yerr=[below, above],
        color=COLOURS[name],
        marker=MARKERS[name],
        capsize=3,
        ms=6,
        ls=":",
        lw=1,
        label=name,
    )


def draw_left_out(ax: Axes, result: Bisected) -> None:
    """Mark the builds that do not run."""
    dropped = sorted(result.search.dropped)
    if dropped:
        label = "does not run"
        ax.plot(dropped, [1.0] * len(dropped), "x", color=canvas.GUIDE, label=label)


def title_of(result: Bisected) -> str:
    record = result.records[GOOD]
    lengths = f"{record.run.n_prompt:,} prompt tokens, {record.run.n_gen:,} generated"
    return f"{finding(result)}\n{text_setup.where([record])}: {lengths}"
