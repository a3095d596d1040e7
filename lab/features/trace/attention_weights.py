"""What a model looks at: the attention weights of a short prompt, layer by layer, in prefill and in decode.

A token asks (its query), and all tokens up to it answer (their keys): in prefill all tokens ask at once, so the weights
are a triangle; in decode only the new token asks, so they are one row. No step needs the query of an earlier token, so
the cache has keys and values only. K and V of a token depend on the tokens before it, except in the first layer.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Unpack

from lab.core.asked_settings import SettingsKeywords
from lab.core.lists import plural
from lab.core.record import Record, Settings
from lab.core.traced import Attention
from lab.errors import LabError
from lab.features.trace import nodes
from lab.features.trace.token_trace import kept
from lab.models import catalog, obtain
from lab.process.worker import Worker
from lab.runner.cases import Plan
from lab.runner.plan import make_plan

MOST_TOKENS = 32
"""Tokens of a prompt whose matrices can still be drawn."""


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
    return _look(text, model, watch, settings)[1]


def recorded(
    text: str,
    model: str = catalog.DEFAULT,
    *,
    out: str | Path = "results",
    watch: obtain.ShowTransfer = obtain.silently,
    **settings: Unpack[SettingsKeywords],
) -> Record:
    """The same as a run in a results file in `out`."""
    plan, seen, chosen = _look(text, model, watch, settings)
    return kept(plan, chosen, Path(out), len(seen.tokens), 1, attention=seen)


def _look(
    text: str, model: str, watch: obtain.ShowTransfer, settings: SettingsKeywords
) -> tuple[Plan, Attention, Settings]:
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
        return plan, Attention(text, tuple(texts), replaced, other, looks), chosen
