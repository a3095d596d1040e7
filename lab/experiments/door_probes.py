"""What is asked of a server besides the measured request, so that each part of its way has a time of its own.

llama-server's /tokenize reads a question whole before it looks for what to tokenise: a question without that is HTTP
and the client alone. /apply-template does for its question what a chat does first, /tokenize what follows (llama.cpp
tools/server/server-context.cpp). All are sent by the client that sends the measured requests, so its own cost is in
each of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

from lab.core.request import CHAT, Asked, Pieces, ServerTimings
from lab.endpoints.access import ask
from lab.endpoints.fields import as_dict, as_number, timings_of
from lab.endpoints.wire import Ask, Plan, fresh_nonce
from lab.runner.servers import Server

N_QUESTIONS = 5
"""Of each kind in a block."""

LLAMA_SERVER = "llama-server"

IDLE = {
    "top_n_sigma": -1.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "xtc_probability": 0.0,
    "mirostat": 0.0,
    "dynatemp_range": 0.0,
}
"""Samplers that the lab cannot time, at the values at which they do nothing."""


def token_ids(server: Server, text: str) -> list[int] | None:
    """The tokens that the server makes of a prompt, its template included. None where it does not give them."""
    if server.endpoint.server != LLAMA_SERVER:
        return None
    if server.endpoint.api == CHAT:
        chat = ask(server.access, f"{server.access.root}/apply-template", _messages(text))
        applied = as_dict(chat.parsed).get("prompt")
        if chat.status != 200 or not isinstance(applied, str):
            return None
        text = applied
    fields = {"content": text, "add_special": True, "parse_special": True}
    ids = as_dict(ask(server.access, f"{server.access.root}/tokenize", fields).parsed).get("tokens")
    return ids if isinstance(ids, list) and ids and all(type(one) is int for one in ids) else None


def pieces(server: Server, text: str, sent: Ask, sampling_ns: tuple[int, ...] | None) -> Pieces:
    """The pieces of the way of a request for the prompt `text`."""
    if server.endpoint.server != LLAMA_SERVER:
        return Pieces(http_ns=_times(server, {}, None) or (), sampling_ns=sampling_ns)
    tokenize = {"content": text, "add_special": True, "parse_special": True}
    is_chat = server.endpoint.api == CHAT
    return Pieces(
        http_ns=_times(server, {"unread": text}, "/tokenize") or (),
        template_ns=_times(server, _messages(text), "/apply-template") if is_chat else None,
        tokenize_ns=_times(server, tokenize, "/tokenize"),
        whole=_whole(server, sent),
        sampling_ns=sampling_ns,
    )


def samplers(server: Server) -> tuple[tuple[str, float], ...] | None:
    """The samplers that a measured request goes through, and their values; None where the lab cannot time them."""
    props = ask(server.access, f"{server.access.root}/props").parsed
    params = as_dict(as_dict(as_dict(props).get("default_generation_settings")).get("params"))
    names = params.get("samplers")
    if not isinstance(names, list) or any(params.get(name, idle) != idle for name, idle in IDLE.items()):
        return None
    values = {**_values(params), "temperature": server.temperature or 0.0}
    return tuple((name, values[name]) for name in names if name in values)


def _values(params: Mapping[str, Any]) -> dict[str, float]:
    named = {"top_k": "top_k", "typ_p": "typical_p", "top_p": "top_p", "min_p": "min_p"}
    known = {name: as_number(params.get(field)) for name, field in named.items()}
    return {name: value for name, value in known.items() if value is not None}


def _times(server: Server, fields: Mapping[str, Any], path: str | None) -> tuple[int, ...] | None:
    """From the sending of a question to the first byte of its answer, N_QUESTIONS times.

    Without `path` the interface itself is asked, for nothing: it refuses at once. None where no answer came.
    """
    question = Ask(asked=Asked(n_prompt=None, n_gen=0), body=json.dumps(fields))
    plan = Plan(asks=(question,), api=server.endpoint.api, n_requests=N_QUESTIONS, path=path, timeout_s=60.0)
    wanted = 200 if path else None
    replies = [reply.request for reply in server.client.run(plan)]
    answered = [request.headers_ns for request in replies if wanted in (None, request.http_status)]
    return tuple(ns for ns in answered if ns is not None) or None


def _whole(server: Server, sent: Ask) -> ServerTimings | None:
    """The server's times of the same request, not streamed, with another nonce."""
    fields = json.loads(sent.body)
    for name in ("stream", "stream_options", "timings_per_token"):
        fields.pop(name, None)
    text = json.dumps(fields)
    if sent.nonce is not None:
        text = text.replace(sent.nonce, fresh_nonce(random.Random()), 1)
    url = f"{server.access.url}/{'chat/completions' if server.endpoint.api == CHAT else 'completions'}"
    answer = ask(server.access, url, json.loads(text), 600.0)
    return timings_of(as_dict(as_dict(answer.parsed).get("timings"))) if answer.status == 200 else None


def _messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}
