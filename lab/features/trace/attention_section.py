"""Attention weights, layer by layer: which tokens the tokens of a text attend to.

A token asks (its query), and all tokens up to it answer (their keys). In prefill all tokens ask at
once, so the weights are a triangle; in decode only the new token asks, so they are one row. No step
needs the query of an earlier token, so the cache has keys and values only. K and V of a token
depend on the tokens before it, except in the first layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial

from lab.core.lists import plural
from lab.features.trace import pictures
from lab.features.trace.lines import AttentionLine
from lab.show import text_setup
from lab.show.cells import Column
from lab.show.section import Columns, Picture, Section, tabled
from lab.show.wording import percent


def section(line: AttentionLine) -> Section:
    """What the last token attends to in each layer, and what K and V depend on."""
    layers = range(len(line.looks.decode))
    model = text_setup.model_label(line)
    last_token = line.tokens[-1]
    return Section(
        f"Attention of {last_token!r}, the last of {plural(line.n_tokens, 'token')} in {model}",
        "means over the heads of each layer",
        name="attention",
        question=f"What does each token of {line.text!r} attend to?",
        **tabled(columns(line), layers),
        sentences=[decode_sentence(line), changes_sentence(line)],
        pictures=[picture(line, layers)],
    )


def picture(line: AttentionLine, layers: Sequence[int]) -> Picture:
    """A matrix of attention weights for each of these layers."""
    n_rows = math.ceil(len(layers) / pictures.N_COLUMNS)
    model = text_setup.model_label(line)
    return Picture(
        "attention",
        "Attention weights, means over heads",
        partial(pictures.draw_attention, line=line, model=model, layers=layers),
        (11, 1 + 1.9 * n_rows),
    )


def columns(line: AttentionLine) -> Columns[int]:
    """The columns of the table; its rows are the numbers of the layers."""
    looks = line.looks

    def most_attended(layer: int) -> str:
        row = looks.decode[layer]
        return repr(line.tokens[row.index(max(row))])

    return (
        Column("layer", str),
        Column("most on", most_attended),
        Column("weight", lambda layer: percent(max(looks.decode[layer]))),
        Column("on the\nfirst", lambda layer: percent(looks.decode[layer][0])),
        Column("on\nitself", lambda layer: percent(looks.decode[layer][-1])),
        Column("K of later\nmoves by", lambda layer: percent(looks.changes[layer][0])),
        Column("V of later\nmoves by", lambda layer: percent(looks.changes[layer][1])),
    )


def decode_sentence(line: AttentionLine) -> str:
    difference = "less than 0.1 %"
    if line.differs >= 0.001:
        difference = f"at most {percent(line.differs)}"
    return (
        "In prefill every token attends to itself and to those before it: a triangle. In decode "
        "only the new token asks: one row, which differs from the last row of prefill by "
        f"{difference}. It needs the keys and values of earlier tokens, and none of their queries: "
        "so the cache has keys and values."
    )


def changes_sentence(line: AttentionLine) -> str:
    unchanged = [str(i) for i, changes in enumerate(line.looks.changes) if not any(changes)]
    where = "no layer"
    if unchanged:
        where = f"layer {', '.join(unchanged)}"
    return (
        f"With {line.tokens[line.replaced]!r} replaced by {line.replacement!r}, K and V of the "
        f"later tokens stay exactly the same in {where}: elsewhere they depend on the tokens "
        "before, so a cached prefix must match from its first token on."
    )


def document(line: AttentionLine) -> dict[str, object]:
    """What JSON has of attention weights."""
    return {
        "session": line.session,
        "model": line.model.name,
        "text": line.text,
        "tokens": line.tokens,
        "replaced": line.replaced,
        "replacement": line.replacement,
        "looks": dataclasses.asdict(line.looks),
        "differs": line.differs,
    }
