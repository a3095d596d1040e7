"""The tokens of an answer whose stream did not count them: by the server's tokenizer, or by the same request again.

llama_cpp.server streams no usage at all. The same request with the same seed, not streamed, says how many tokens it
had, and costs one more generation. Or its text is tokenised afterwards, which may join what was generated apart.
"""

from __future__ import annotations

import dataclasses
import json

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import CHAT, COMPLETIONS, Request, Usage
from lab.endpoints import prompts
from lab.endpoints.access import Access, ask
from lab.endpoints.fields import as_dict, usage_of
from lab.endpoints.wire import Ask, Reply

TWIN = "twin"


def counted(access: Access, api: str, model: str, sent: Ask, reply: Reply) -> Request:
    """The request with a count of its tokens, where it had none. `usage.counted_by` says how; unchanged where none can.

    The twin is tried first where a seed fixes what is generated, else the tokenizer.
    """
    request = reply.request
    if request.status != OK or times.n_generated(request) is not None:
        return request
    usage = twin(access, api, sent) if request.asked.seed is not None else None
    usage = usage or tokenized(access, model, reply.text)
    return request if usage is None else dataclasses.replace(request, usage=usage)


def twin(access: Access, api: str, sent: Ask) -> Usage | None:
    """The counts of the same request, not streamed."""
    fields = json.loads(sent.body)
    for name in ("stream", "stream_options"):
        fields.pop(name, None)
    url = f"{access.url}/{'chat/completions' if api == CHAT else 'completions'}"
    answer = ask(access, url, fields, 600.0)
    usage = usage_of(as_dict(as_dict(answer.parsed).get("usage")))
    if answer.status != 200 or usage is None or usage.completion_tokens is None:
        return None
    return dataclasses.replace(usage, cached_tokens=None, counted_by=TWIN)  # the twin finds the prompt of the first one


def tokenized(access: Access, model: str, text: str) -> Usage | None:
    """The tokens of a text by the server's tokenizer."""
    n_tokens = prompts.by_text(access, text)
    if n_tokens is None:
        n_tokens = prompts.by_messages(access, COMPLETIONS, model, text)
    if n_tokens is None:
        n_tokens = prompts.by_extras(access, COMPLETIONS, model, text)
    return None if n_tokens is None else Usage(completion_tokens=n_tokens, counted_by=prompts.TOKENIZE)
