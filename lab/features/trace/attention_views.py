"""Attention weights as small matrices, one for each layer, and in sentences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lab.core.lists import plural
from lab.core.traced import Attention
from lab.show.canvas import grid
from lab.show.section import Columns, Picture, Section, tabled
from lab.show.wording import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_COLUMNS = 6


def section(seen: Attention, model: str = "") -> Section:
    """What the last token attends to in each layer (of a model), and what K and V depend on."""
    of_model = f" in {model}" if model else ""
    layers, last = list(range(len(seen.looks.decode))), seen.tokens[-1]
    columns: Columns = (
        ("layer", str),
        ("most on", lambda layer: repr(seen.tokens[_most(seen, layer)])),
        ("weight", lambda layer: percent(seen.looks.decode[layer][_most(seen, layer)])),
        ("on the\nfirst", lambda layer: percent(seen.looks.decode[layer][0])),
        ("on\nitself", lambda layer: percent(seen.looks.decode[layer][-1])),
        ("K of later\nmoves by", lambda layer: percent(seen.looks.changes[layer][0])),
        ("V of later\nmoves by", lambda layer: percent(seen.looks.changes[layer][1])),
    )
    same = [layer for layer in layers if not any(seen.looks.changes[layer])]
    names = ", ".join(map(str, same)) or "no layer"
    differs = f"at most {percent(seen.differs)}" if seen.differs >= 0.001 else "less than 0.1 %"
    words = [
        "In prefill every token attends to itself and to those before it: a triangle. In decode only the new token "
        f"asks: one row, which differs from the last row of prefill by {differs}. It needs the "
        "keys and values of earlier tokens, and none of their queries: so the cache has keys and values.",
        f"With {seen.tokens[seen.replaced]!r} replaced by {seen.replacement!r}, K and V of the later tokens stay "
        f"exactly the same in {'layer ' if same else ''}{names}: elsewhere they depend on the tokens "
        "before, so a cached prefix must match from its first token on.",
    ]
    n_rows = math.ceil(len(layers) / N_COLUMNS)
    picture = Picture(
        "attention",
        "Attention weights, means over heads",
        lambda one: draw(one, seen, of_model),
        (11, 1 + 1.9 * n_rows),
    )
    return Section(
        f"Attention of {last!r}, the last of {plural(len(seen.tokens), 'token')}{of_model}",
        "means over the heads of each layer",
        name="attention",
        question=f"What does each token of {seen.text!r} attend to?",
        **tabled(columns, layers),
        sentences=words,
        pictures=[picture],
    )


def _most(seen: Attention, layer: int) -> int:
    row = seen.looks.decode[layer]
    return row.index(max(row))


def draw(figure: Figure, seen: Attention, of_model: str) -> None:
    """Draws a matrix for each layer: the tokens that ask from top to bottom, those that they attend to across."""
    axes = grid(figure, len(seen.looks.prefill), N_COLUMNS, sharex=True, sharey=True)
    texts = [text.replace("\n", "\\n") for text in seen.tokens]
    middles = [i + 0.5 for i in range(len(texts))]
    size = 7 if len(texts) <= 10 else 4
    for layer, (ax, rows) in enumerate(zip(axes, seen.looks.prefill, strict=True)):
        until_now = [
            [weight if i <= asks else math.nan for i, weight in enumerate(row)] for asks, row in enumerate(rows)
        ]
        image = ax.pcolormesh(until_now, vmin=0, vmax=1, cmap="viridis")  # shapes: a page shows no embedded images
        ax.set_title(f"layer {layer}", fontsize=8)
        ax.set_xticks(middles, texts, rotation=90, fontsize=size)
        ax.set_yticks(middles, texts, fontsize=size)
        ax.set_aspect("equal")
    axes[0].invert_yaxis()  # shared by all
    bar = figure.colorbar(image, ax=axes, shrink=0.3, label="weight")
    if bar.solids is not None:
        bar.solids.set_rasterized(False)
    figure.suptitle(f"What each token attends to{of_model} (the last row is that of decode)", fontsize=11)
