"""The tokens of an answer whose stream did not count them: by the server's tokenizer, or by the same request again.

llama_cpp.server streams no usage at all. The same request with the same seed, not streamed, says how many tokens it
had, and costs one more generation. It counts only where its answer is the same too: a cache or another batch changes
the last bits of a sum, and with them the text. Else the text is tokenised, which may join what was generated apart.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import CHAT, COMPLETIONS, Request, Usage
from lab.endpoints import prompts
from lab.endpoints.access import Access, ask
from lab.endpoints.fields import as_dict, as_text, first, reasoning_of, usage_of
from lab.endpoints.wire import Ask, Reply

TWIN = "twin"


def counted(access: Access, api: str, model: str, sent: Ask, reply: Reply) -> Request:
    """The request with a count of its tokens, where it had none. `usage.counted_by` says how; unchanged where none can.

    The twin is tried first where a seed fixes what is generated and the prompt that was sent is known, else the
    tokenizer.
    """
    request = reply.request
    if request.status != OK or times.n_generated(request) is not None:
        return request
    has_twin = request.asked.seed is not None and sent.nonce is None  # with a nonce, another prompt was sent
    usage = twin(access, api, sent, reply) if has_twin else None
    usage = usage or tokenized(access, model, reply.text)
    return request if usage is None else dataclasses.replace(request, usage=usage)


def twin(access: Access, api: str, sent: Ask, reply: Reply) -> Usage | None:
    """The counts of the same request, not streamed. None where its answer is not the same."""
    fields = json.loads(sent.body)
    for name in ("stream", "stream_options"):
        fields.pop(name, None)
    url = f"{access.url}/{'chat/completions' if api == CHAT else 'completions'}"
    answer = ask(access, url, fields, access.timeout_s)
    usage = usage_of(as_dict(as_dict(answer.parsed).get("usage")))
    if answer.status != 200 or usage is None or usage.completion_tokens is None:
        return None
    if not _is_same(first(as_dict(answer.parsed).get("choices")), reply):
        return None
    return dataclasses.replace(usage, cached_tokens=None, counted_by=TWIN)  # the twin finds the prompt of the first one


def _is_same(choice: dict[str, Any], reply: Reply) -> bool:
    """Whether an answer is the one that was streamed, or both went on to the same limit of tokens."""
    if choice.get("finish_reason") == reply.request.finish_reason == "length":
        return True
    message = as_dict(choice.get("message"))
    text = reasoning_of(message) + as_text(message.get("content")) + as_text(choice.get("text"))
    return bool(text) and text == reply.text


def tokenized(access: Access, model: str, text: str) -> Usage | None:
    """The tokens of a text by the server's tokenizer."""
    n_tokens = prompts.by_text(access, text)
    if n_tokens is None:
        n_tokens = prompts.by_messages(access, COMPLETIONS, model, text)
    if n_tokens is None:
        n_tokens = prompts.by_extras(access, COMPLETIONS, model, text)
    return None if n_tokens is None else Usage(completion_tokens=n_tokens, counted_by=prompts.TOKENIZE)
