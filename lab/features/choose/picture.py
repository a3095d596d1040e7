"""The picture of `lab choose`: cost over the vocabulary, and a step's parts by sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lab.core.sampling import GREEDY
from lab.features.choose.chains import JSON
from lab.features.choose.figures import ChoosingFigures
from lab.roofline.choosing import DEFAULT
from lab.show import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAWN = (GREEDY, DEFAULT, "no top-k", "penalties 64", "penalties 1024", "mirostat")
"""Chains with a line over the vocabulary, as far as they were measured."""

BARS = (DEFAULT, JSON)
N_POINTS = 40  # of a law's line
WIDTH = 0.38


def draw(figures: ChoosingFigures, n_vocab: int | None, subject: str, figure: Figure) -> None:
    """Left: the time of a token over the size of the vocabulary, a line for each chain's law and a
    diamond for the model itself. Right: the parts of a step with each number of sequences."""
    if figures.laws:
        left, right = figure.subplots(1, 2)
        draw_sizes(left, figures, n_vocab)
        draw_steps(right, figures.rows())
        axes = [left, right]
    else:
        axes = [figure.subplots()]
        draw_steps(axes[0], figures.rows())
    canvas.finish(axes, f"What choosing a token costs\n{subject}", is_apart=len(axes) > 1)


def draw_sizes(ax: Axes, figures: ChoosingFigures, n_vocab: int | None) -> None:
    drawn = [name for name in figures.laws if name in DRAWN] or list(figures.laws)[:6]
    alone = figures.chains[figures.chains.n_seq == 1].set_index("name").choose_s
    for name, style in zip(drawn, canvas.styles(len(drawn)), strict=True):
        runs = figures.sizes[figures.sizes.name == name]
        law = figures.laws[name]
        sizes = line_sizes(runs.n_vocab.min(), runs.n_vocab.max())
        times_ms = [1e3 * law.seconds(size) for size in sizes]
        ax.plot(sizes, times_ms, color=style["color"], lw=1.6, label=name)
        ax.plot(runs.n_vocab, 1e3 * runs.choose_s, ls="", mew=0, ms=4, alpha=0.6, **style)
        if n_vocab and name in alone:
            marker = {"marker": "D", "ms": 8, "mfc": "none", "color": style["color"]}
            ax.plot([n_vocab], [1e3 * alone[name]], ls="", **marker)
    if n_vocab:
        marker = {"marker": "D", "ms": 8, "mfc": "none", "color": canvas.GUIDE}
        ax.plot([], [], ls="", **marker, label="the model itself")
    ax.set(xscale="log", yscale="log")
    ax.set(xlabel="tokens in the vocabulary", ylabel="time to choose a token (ms)")
    ax.set_title("random weights, one sequence", fontsize=10)
    canvas.plain_ticks(ax.xaxis)
    canvas.plain_ticks(ax.yaxis)


def line_sizes(smallest: int, largest: int) -> list[int]:
    """Sizes of a vocabulary at equal distances in logarithms."""
    growth = math.log(largest / smallest)
    return [
        round(smallest * math.exp(growth * number / (N_POINTS - 1)))
        for number in range(N_POINTS)
    ]


def draw_steps(ax: Axes, rows: Sequence[Any]) -> None:
    """A bar for each number of sequences and chain: compute, then choose."""
    n_seqs = sorted({row.n_seq for row in rows})
    drawn = [name for name in BARS if any(row.name == name for row in rows)]
    if not drawn:
        drawn = [rows[0].name]
    by_key = {(row.name, row.n_seq): row for row in rows}
    colours = canvas.styles(len(drawn) + 1)
    for number, name in enumerate(drawn):
        for place, n_seq in enumerate(n_seqs):
            row = by_key.get((name, n_seq))
            if row is None:
                continue
            x = place + (number - (len(drawn) - 1) / 2) * WIDTH
            compute_ms = 1e3 * row.compute_s
            choose_ms = 1e3 * row.step_choose_s
            is_first = place == 0
            compute_label = "compute" if is_first and number == 0 else "_"
            choose_label = f"choose: {name}" if is_first else "_"
            ax.bar(x, compute_ms, WIDTH * 0.95, color=colours[0]["color"], label=compute_label)
            ax.bar(
                x,
                choose_ms,
                WIDTH * 0.95,
                bottom=compute_ms,
                color=colours[number + 1]["color"],
                label=choose_label,
            )
            ax.annotate(
                f"{100 * row.share:.0f} %",
                (x, compute_ms + choose_ms),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    ax.set_xticks(range(len(n_seqs)), [f"{n_seq:,}" for n_seq in n_seqs])
    ax.set(xlabel="sequences in a step", ylabel="time of a step (ms)")
    ax.set_title("time of a step; above a bar: the share of choosing", fontsize=10)
