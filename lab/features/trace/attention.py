"""What a model looks at: the attention weights of a short prompt, layer by layer, in prefill and in decode.

A token asks (its query), and all tokens up to it answer (their keys): in prefill all tokens ask at once, so the weights
are a triangle; in decode only the new token asks, so they are one row. No step needs the query of an earlier token, so
the cache has keys and values only. K and V of a token depend on the tokens before it, except in the first layer.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from lab.core.asked_settings import SettingsKeywords
from lab.core.lists import plural
from lab.core.record import Record
from lab.core.traced import Attention
from lab.errors import LabError
from lab.features.trace import nodes
from lab.features.trace.token_trace import kept
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner.plan import make_plan
from lab.show.canvas import grid
from lab.show.section import Columns, Picture, Section, tabled
from lab.show.wording import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_TOKENS = 32
"""Tokens of a prompt whose matrices can still be drawn."""

N_COLUMNS = 6


def attention(
    text: str,
    model: str = catalog.DEFAULT,
    *,
    watch: obtain.ShowTransfer = obtain.silently,
    **settings: Unpack[SettingsKeywords],
) -> Attention:
    """The attention weights of a short text without flash attention, and how K and V depend on its first token.

        lab.attention("The cat sat on the mat").looks.changes

    The text's first token is replaced by its last other one. LabError for a text of fewer than 3 or over MOST_TOKENS
    tokens, or of equal ones.
    """
    seen = recorded(text, model, out=None, watch=watch, **settings).run.attention
    assert seen is not None
    return seen


def recorded(
    text: str,
    model: str = catalog.DEFAULT,
    *,
    out: str | Path | None = "results",
    watch: obtain.ShowTransfer = obtain.silently,
    **settings: Unpack[SettingsKeywords],
) -> Record:
    """The same as a run, in a results file in `out`, if that is given."""
    if settings.get("flash_attn", "off") == "on":
        raise LabError("Flash attention never writes the weights.", "Look at them with --flash-attn off.")
    settings["flash_attn"] = "off"
    with Worker() as worker:
        plan = make_plan(worker, [MOST_TOKENS], 1, 1, model, watch=watch, **settings)
        if plan.refused:
            raise LabError(" ".join(plan.refused.values()), "Use a smaller model.")
        sizes = {name: max(getattr(plan.settings, name), MOST_TOKENS) for name in ("n_ubatch", "n_batch")}
        asked = dataclasses.replace(plan.settings, **sizes)
        vocabulary = worker.load(plan.file.path, asked)
        own = worker.tokenize(text)
        tokens = own if vocabulary.bos is None else [vocabulary.bos, *own]
        if not 3 <= len(own) <= len(tokens) <= MOST_TOKENS:
            raise LabError(
                f"The text has {plural(len(own), 'token')} in {plan.model.name}.",
                f"Give one of 3 to {MOST_TOKENS - 1}: 'The cat sat'.",
            )
        chosen = worker.new_context(asked)
        others = [token for token in own if token != own[0]]
        if not others:
            raise LabError(f"All tokens of the text {text!r} are equal.", "Give another one: 'The cat sat'.")
        replaced = len(tokens) - len(own)
        looks, pieces = nodes.look(worker, tokens, replaced, others[-1]), worker.pieces()
        *texts, other = (pieces[token].decode(errors="replace") or f"<{token}>" for token in (*tokens, others[-1]))
    seen = Attention(text, tuple(texts), replaced, other, looks)
    return kept(plan, chosen, None if out is None else Path(out), len(tokens), 1, attention=seen)


def section(seen: Attention, model: str = "") -> Section:
    """What the last token attends to in each layer (of a model), and what K and V depend on."""
    of_model, looks, layers = f" in {model}" if model else "", seen.looks, list(range(len(seen.looks.decode)))
    most = [row.index(max(row)) for row in looks.decode]
    columns: Columns = (
        ("layer", str),
        ("most on", lambda layer: repr(seen.tokens[most[layer]])),
        ("weight", lambda layer: percent(looks.decode[layer][most[layer]])),
        ("on the\nfirst", lambda layer: percent(looks.decode[layer][0])),
        ("on\nitself", lambda layer: percent(looks.decode[layer][-1])),
        ("K of later\nmoves by", lambda layer: percent(looks.changes[layer][0])),
        ("V of later\nmoves by", lambda layer: percent(looks.changes[layer][1])),
    )
    same = ", ".join(str(layer) for layer in layers if not any(looks.changes[layer]))
    differs = f"at most {percent(seen.differs)}" if seen.differs >= 0.001 else "less than 0.1 %"
    words = [
        "In prefill every token attends to itself and to those before it: a triangle. In decode only the new token "
        f"asks: one row, which differs from the last row of prefill by {differs}. It needs the "
        "keys and values of earlier tokens, and none of their queries: so the cache has keys and values.",
        f"With {seen.tokens[seen.replaced]!r} replaced by {seen.replacement!r}, K and V of the later tokens stay "
        f"exactly the same in {f'layer {same}' if same else 'no layer'}: elsewhere they depend on the tokens "
        "before, so a cached prefix must match from its first token on.",
    ]
    size = 11, 1 + 1.9 * math.ceil(len(layers) / N_COLUMNS)
    draws = partial(draw, seen=seen, of_model=of_model)
    return Section(
        f"Attention of {seen.tokens[-1]!r}, the last of {plural(len(seen.tokens), 'token')}{of_model}",
        "means over the heads of each layer",
        name="attention",
        question=f"What does each token of {seen.text!r} attend to?",
        **tabled(columns, layers),
        sentences=words,
        pictures=[Picture("attention", "Attention weights, means over heads", draws, size)],
    )


def draw(figure: Figure, seen: Attention, of_model: str) -> None:
    """Draws a matrix for each layer: the tokens that ask from top to bottom, those that they attend to across."""
    axes = grid(figure, len(seen.looks.prefill), N_COLUMNS, sharex=True, sharey=True)
    texts = [text.replace("\n", "\\n") for text in seen.tokens]
    middles, size = [i + 0.5 for i in range(len(texts))], 7 if len(texts) <= 10 else 4
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
