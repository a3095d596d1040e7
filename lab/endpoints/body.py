"""The body of a request: the prompt, what is asked, and options that this server was seen to take."""

from __future__ import annotations

import json
from typing import Any

from lab.core.request import CHAT, Asked
from lab.endpoints.wire import Ask

INCLUDE_USAGE = "stream_options.include_usage"
CONTINUOUS_USAGE = "stream_options.continuous_usage_stats"
IGNORE_EOS = "ignore_eos"
TOKEN_IDS = "return_token_ids"
TIMINGS = "timings_per_token"
NO_CACHE = "cache_prompt"
MAX_COMPLETION = "max_completion_tokens"
OPTIONS = (INCLUDE_USAGE, CONTINUOUS_USAGE, IGNORE_EOS, TOKEN_IDS, TIMINGS, NO_CACHE)
"""Options that are not in every server."""

OPENAI_OPTIONS = (INCLUDE_USAGE, MAX_COMPLETION)
"""Those that OpenAI's own server takes; it refuses a request with any other."""


def body(
    api: str, model: str, prompt: str, asked: Asked, options: tuple[str, ...], is_streamed: bool = True
) -> dict[str, Any]:
    """The JSON object to send."""
    fields: dict[str, Any] = {"model": model}
    fields |= {"messages": [{"role": "user", "content": prompt}]} if api == CHAT else {"prompt": prompt}
    fields["max_completion_tokens" if MAX_COMPLETION in options else "max_tokens"] = asked.n_gen
    fields |= {} if asked.temperature is None else {"temperature": asked.temperature}
    fields |= {} if asked.seed is None else {"seed": asked.seed}
    if IGNORE_EOS in options and asked.ignore_eos is not None:
        fields["ignore_eos"] = asked.ignore_eos
    if NO_CACHE in options:
        fields["cache_prompt"] = False
    if is_streamed:
        fields["stream"] = True
        usage = {"include_usage": INCLUDE_USAGE in options, "continuous_usage_stats": CONTINUOUS_USAGE in options}
        fields |= (
            {"stream_options": {name: True for name, is_on in usage.items() if is_on}} if any(usage.values()) else {}
        )
        fields |= {name: True for name in (TOKEN_IDS, TIMINGS) if name in options}
    return fields


def ask_for(api: str, model: str, prompt: str, asked: Asked, options: tuple[str, ...], nonce: str | None = None) -> Ask:
    """A streamed request of a plan. `nonce`: as in Ask."""
    return Ask(asked=asked, body=json.dumps(body(api, model, prompt, asked, options)), nonce=nonce)
