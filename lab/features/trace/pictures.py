"""The pictures of a trace: operations as wide as they take time, and attention weights by layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

from lab.core.lists import grouped, plural
from lab.features.trace.lines import AttentionLine, TracedPart, TracedPhase, TraceLine
from lab.features.trace.operations import FAMILIES, FEED_FORWARD, SMALL, family_of
from lab.features.trace.phases import summed
from lab.show import canvas
from lab.show.canvas import COLOURS, GRID, GUIDE, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTER = 0.0065  # share of a row's width that a letter of an operation's name needs
LAYERS_AT = 1.0
OPERATIONS_AT = 0.35


class AtCentre(TypedDict):
    """How a text is written around a place."""

    ha: Literal["center"]
    va: Literal["center"]
    fontsize: float


AT_CENTRE = AtCentre(ha="center", va="center", fontsize=canvas.SMALL_SIZE)
N_COLUMNS = 6  # of the layers in the picture of attention weights
ROW_COLOURS = dict(
    zip((FEED_FORWARD, *dict.fromkeys(FAMILIES.values()), SMALL), COLOURS, strict=False)
)


@dataclass(frozen=True)
class Strip:
    """Operations in the order in which they run."""

    title: str
    parts: Sequence[TracedPart]

    @property
    def is_one_layer(self) -> bool:
        return len({part.layer for part in self.parts}) == 1

    @property
    def total_ms(self) -> float:
        return sum(duration_ms(part) for part in self.parts)


def duration_ms(part: TracedPart) -> float:
    """The width of an operation; none for one that was faster than its stop."""
    return 1e3 * max(0.0, part.seconds)


def draw_trace(figure: Figure, subject: str, traced: TraceLine) -> None:
    """Draw prefill, decode and a layer of decode: layers, and below them their operations."""
    strips = [strip_of_phase(phase) for phase in traced.phases]
    strips += middle_layer(traced.decode)
    axes = list(figure.subplots(len(strips), 1, squeeze=False)[:, 0])
    for ax, strip in zip(axes, strips, strict=True):
        draw_strip(ax, strip)
    families: dict[str, None] = {}
    for phase in traced.phases:
        for part in phase.parts:
            families[family_of(part.operation)] = None
    for family in families:  # the legend
        axes[-1].barh([0], [0], color=ROW_COLOURS[family], label=family)
    title = f"One token's way: layers above, their operations below\n{subject}"
    canvas.finish(axes, title, is_apart=True)
    for ax in axes:
        ax.grid(False)


def strip_of_phase(phase: TracedPhase) -> Strip:
    return Strip(f"{phase.name} of {plural(phase.n_tokens, 'token')}", phase.parts)


def middle_layer(decode: TracedPhase) -> list[Strip]:
    """The layer that takes the median time; nothing for a step without layers."""
    layers = list(grouped(decode.parts, lambda part: part.layer).values())
    if not layers:
        return []
    layers.sort(key=lambda parts: sum(part.seconds for part in parts))
    parts = layers[len(layers) // 2]
    return [Strip(f"layer {parts[0].layer} of that decode step", parts)]


def draw_strip(ax: Axes, strip: Strip) -> None:
    at = 0.0
    in_order = summed(strip.parts, lambda part: (part.layer, part.operation))
    by_layer = itertools.groupby(in_order, key=lambda part: part.layer)
    for number, (layer, parts) in enumerate(by_layer):
        start = at
        for part in parts:
            draw_operation(ax, part, at, strip)
            at += duration_ms(part)
        is_numbered = layer is not None and (layer % 5 == 0 or strip.is_one_layer)
        draw_layer(ax, start, at, number, str(layer) if is_numbered else "")
    ax.set_yticks([OPERATIONS_AT, LAYERS_AT], ["operations", "layers"])
    ax.set(ylim=(0, 1.3), xlim=(0, at), xlabel="time (ms)")
    ax.set_title(strip.title, fontsize=canvas.LABEL_SIZE)


def draw_operation(ax: Axes, part: TracedPart, at: float, strip: Strip) -> None:
    """Draw an operation, with its name if that has room."""
    width = duration_ms(part)
    edge_width = 0.6 if strip.is_one_layer else 0.0
    colour = ROW_COLOURS[family_of(part.operation)]
    ax.barh(
        [OPERATIONS_AT], [width], left=at, height=0.7, color=colour, ec=PAPER, lw=edge_width
    )
    if width > LETTER * len(part.operation) * strip.total_ms:
        middle = at + width / 2
        ax.text(middle, OPERATIONS_AT, part.operation, color=PAPER, **AT_CENTRE)


def draw_layer(ax: Axes, start: float, end: float, number: int, label: str) -> None:
    """Draw a layer above its operations; neighbours differ in colour."""
    is_light = number % 2 == 1
    fill = GRID if is_light else GUIDE
    ink = GUIDE if is_light else PAPER
    ax.barh([LAYERS_AT], [end - start], left=start, color=fill, height=0.5, ec=PAPER, lw=0.4)
    middle = (start + end) / 2
    ax.text(middle, LAYERS_AT, label, color=ink, **AT_CENTRE)


def draw_attention(
    figure: Figure, line: AttentionLine, model: str, layers: Sequence[int]
) -> None:
    """Draw a matrix for each of these layers: the tokens that ask downwards, what they attend to
    across."""
    axes = canvas.grid(figure, len(layers), N_COLUMNS, sharex=True, sharey=True)
    texts = [text.replace("\n", "\\n") for text in line.tokens]
    middles = [i + 0.5 for i in range(len(texts))]
    size = canvas.SMALL_SIZE if len(texts) <= 10 else canvas.TINY_SIZE
    for layer, ax in zip(layers, axes, strict=True):
        rows = line.looks.prefill[layer]
        lower = [hide_later(row, asks) for asks, row in enumerate(rows)]
        # shapes: a page shows no embedded images
        image = ax.pcolormesh(lower, vmin=0, vmax=1, cmap="viridis")
        ax.set_title(f"layer {layer}", fontsize=canvas.SMALL_SIZE)
        ax.set_xticks(middles, texts, rotation=90, fontsize=size)
        ax.set_yticks(middles, texts, fontsize=size)
        ax.set_aspect("equal")
    axes[0].invert_yaxis()  # shared by all
    bar = figure.colorbar(image, ax=axes, shrink=0.3, label="weight")
    if bar.solids is not None:
        bar.solids.set_rasterized(False)
    figure.supxlabel("token that answers (key)", fontsize=canvas.SMALL_SIZE)
    figure.supylabel("token that asks (query)", fontsize=canvas.SMALL_SIZE)
    title = f"What each token attends to in {model} (decode computes the last row only)"
    figure.suptitle(title, fontsize=canvas.TITLE_SIZE)


def hide_later(row: Sequence[float], asks: int) -> list[float]:
    """The weights of a token on itself and those before it; NaN for later ones."""
    return [*row[: asks + 1], *[math.nan] * (len(row) - asks - 1)]
