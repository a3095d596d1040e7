"""The pictures of `lab choose`: cost over the vocabulary, and a step's parts by sequences."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from lab.core.record import Model
from lab.core.sampling import GREEDY
from lab.features.choose.chains import JSON
from lab.features.choose.figures import ChainRow, ChoosingFigures
from lab.roofline.choosing import DEFAULT
from lab.show import canvas
from lab.show.canvas import GRID, GUIDE, OF_DECODE
from lab.show.wording import percent, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = (GREEDY, DEFAULT, "no top-k", "penalties 64", "penalties 1024", "mirostat")
"""Chains with a line over the vocabulary, as far as they were measured."""

BARS = (DEFAULT, JSON)
N_POINTS = 40  # of a law's line
WIDTH = 0.8  # of a bar
NAME_LETTERS = 8  # of a chain below its bar, in a line


class Diamond(TypedDict):
    """The style of the model itself."""

    marker: str
    ms: float
    mfc: str
    color: str


def draw_sizes(figures: ChoosingFigures, model: Model, subject: str, figure: Figure) -> None:
    """The time of a token over the size of the vocabulary: a point for each run with random
    weights, a line for each chain's law, and a diamond for the model itself."""
    ax = figure.subplots()
    drawn = [name for name in figures.laws if name in DRAWN] or list(figures.laws)[:6]
    alone = figures.chains[figures.chains.n_seq == 1].set_index("name").choose_s
    largest = figures.sizes.n_vocab.max()
    for name, style in zip(drawn, canvas.styles(len(drawn)), strict=True):
        runs = figures.sizes[figures.sizes.name == name]
        law = figures.laws[name]
        sizes = line_sizes(runs.n_vocab.min(), runs.n_vocab.max())
        times_ms = [1e3 * law.seconds(size) for size in sizes]
        ax.plot(sizes, times_ms, color=style["color"], lw=1.6)
        ax.plot(runs.n_vocab, 1e3 * runs.choose_s, ls="", mew=0, ms=4, alpha=0.6, **style)
        ax.plot([], [], lw=1.6, ms=5, mew=0, **style, label=name)
        if model.n_vocab and name in alone:
            marker = Diamond(marker="D", ms=8, mfc="none", color=style["color"])
            ax.plot([model.n_vocab], [1e3 * alone[name]], ls="", **marker)
    if model.n_vocab:
        marker = Diamond(marker="D", ms=8, mfc="none", color=GUIDE)
        label = f"{model.name} itself ({model.n_vocab:,} tokens)"
        ax.plot([], [], ls="", **marker, label=label)
    ax.set(xscale="log", yscale="log")
    ax.set(
        xlabel="tokens in the vocabulary\n(points: models with random weights; lines: their law)",
        ylabel="time to choose a token (ms)",
    )
    by_time = sorted((figures.laws[name].seconds(largest), name) for name in drawn)
    (least_s, cheapest), (most_s, dearest) = by_time[0], by_time[-1]
    times = f"{seconds(least_s)} ({cheapest}) to {seconds(most_s)} ({dearest})"
    title = f"Choosing one of {largest:,} tokens takes {times}"
    canvas.finish([ax], f"{title}\n{subject}")


def line_sizes(smallest: int, largest: int) -> list[int]:
    """Sizes of a vocabulary at equal distances in logarithms."""
    growth = math.log(largest / smallest)
    return [
        round(smallest * math.exp(growth * number / (N_POINTS - 1)))
        for number in range(N_POINTS)
    ]


def draw_steps(rows: Sequence[ChainRow], subject: str, figure: Figure) -> None:
    """A bar for each number of sequences and chain: compute, then choose."""
    ax = figure.subplots()
    bars = [row for row in rows if row.name in BARS]
    bars = bars or [row for row in rows if row.name == rows[0].name]
    bars.sort(key=lambda row: row.n_seq)
    places = range(len(bars))
    compute_ms = [1e3 * row.compute_s for row in bars]
    choose_ms = [1e3 * row.step_choose_s for row in bars]
    ax.bar(places, compute_ms, WIDTH, color=GRID, label="compute")
    choosing = ax.bar(
        places,
        choose_ms,
        WIDTH,
        bottom=compute_ms,
        color=OF_DECODE,
        label="choose (its share)",
    )
    shares = [f"{100 * row.share:.0f} %" for row in bars]
    ax.bar_label(choosing, shares, padding=2, fontsize=canvas.SMALL_SIZE)
    longest_ms = max(map(sum, zip(compute_ms, choose_ms, strict=True)))
    ax.set_ylim(0, 1.1 * longest_ms)  # room for the share above the bar
    ax.set_xticks(places, [bar_name(row) for row in bars], fontsize=canvas.SMALL_SIZE)
    ax.set(xlabel="sequences in a step, and how they choose", ylabel="time of a step (ms)")
    most = max(bars, key=lambda row: row.share)
    title = f"Choosing takes up to {percent(most.share)} of a step ({most.name})"
    canvas.finish([ax], f"{title}\n{subject}")
    ax.grid(visible=False, axis="x")


def bar_name(row: ChainRow) -> str:
    return "\n".join([f"{row.n_seq:,}", *textwrap.wrap(row.name, NAME_LETTERS)])
