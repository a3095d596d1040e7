"""What a model looks at: the attention weights of a short prompt, layer by layer, in prefill and in decode.

A token asks (its query), and all tokens up to it answer (their keys): in prefill all tokens ask at once, so the weights
are a triangle; in decode only the new token asks, so they are one row. No step needs the query of an earlier token, so
the cache has keys and values only. K and V of a token depend on the tokens before it, except in the first layer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Unpack

from lab.core.asked_settings import SettingsKeywords
from lab.core.lists import plural
from lab.core.record import Model
from lab.errors import LabError
from lab.models import catalog, obtain
from lab.process.wire import Looks
from lab.process.worker import Worker
from lab.runner.plan import make_plan

MOST_TOKENS = 64
"""Tokens of a prompt whose matrices can still be drawn."""


@dataclass(frozen=True)
class Attention:
    """The weights of every layer, the texts of the tokens, and which of them was replaced by which other one."""

    model: Model
    tokens: tuple[str, ...]
    replaced: int
    replacement: str
    looks: Looks

    @property
    def differs(self) -> float:
        """The largest difference between the row of decode and the last row of prefill."""
        pairs = zip(self.looks.decode, (rows[-1] for rows in self.looks.prefill), strict=True)
        return max(abs(one - other) for row, last in pairs for one, other in zip(row, last, strict=True))


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
    if settings.get("flash_attn", "off") == "on":
        raise LabError("Flash attention never writes the weights.", "Look at them with --flash-attn off.")
    settings["flash_attn"] = "off"
    with Worker() as worker:
        plan = make_plan(worker, [MOST_TOKENS], 1, 1, model, watch=watch, **settings)
        if plan.refused:
            raise LabError(" ".join(plan.refused.values()), "Use a smaller model.")
        asked = dataclasses.replace(plan.settings, n_ubatch=max(plan.settings.n_ubatch, MOST_TOKENS))
        asked = dataclasses.replace(asked, n_batch=max(asked.n_batch, MOST_TOKENS))
        vocabulary = worker.load(plan.file.path, asked)
        own = worker.tokenize(text)
        tokens = own if vocabulary.bos is None else [vocabulary.bos, *own]
        if not 3 <= len(own) <= len(tokens) <= MOST_TOKENS:
            raise LabError(
                f"The text has {plural(len(own), 'token')} in {model}.",
                f"Give one of 3 to {MOST_TOKENS - 1}: 'The cat sat'.",
            )
        worker.new_context(asked)
        others = [token for token in own if token != own[0]]
        if not others:
            raise LabError(f"All tokens of the text {text!r} are equal.", "Give another one: 'The cat sat'.")
        replaced = len(tokens) - len(own)
        looks, pieces = worker.look(tokens, replaced, others[-1]), worker.pieces()
    *texts, other = (pieces[token].decode(errors="replace") or f"<{token}>" for token in (*tokens, others[-1]))
    return Attention(plan.model, tuple(texts), replaced, other, looks)
