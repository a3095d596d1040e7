"""What a server makes of a request's body before its model reads it: the prompt as text, and as
tokens.

    prompt = apply_template(client, body)
    tokens = tokenize(client, prompt)

Only llama-server can be asked for it; llama.cpp tools/server/README.md has /apply-template and
/tokenize. The template of the model puts tools, tool calls, tool results and reasoning into the
prompt, or leaves them out. A prompt never goes into a message or a file from here.
"""

from __future__ import annotations

from collections.abc import Mapping

from lab.errors import LabError
from lab.remote.chat_bodies import as_chat
from lab.remote.client import Client
from lab.remote.formats import JsonReply, as_count

MOST_TOKENS = 2_000_000  # of a prompt
MISSING = (404, 405, 501)  # statuses of a server without such a path
NOT_ASKED = ("stream", "stream_options")
"""Fields of a body that say how an answer is sent: a question about its prompt has none."""


def apply_template(client: Client, body: Mapping[str, object]) -> str | None:
    """The prompt that the server renders from a request's body, with all that its template adds;
    None if the server cannot say.

    The prompt of a body without messages is its `prompt`. LabError if the server refuses the body.
    """
    chat = as_chat(body)
    if "messages" not in chat:
        prompt = body.get("prompt")
        return prompt if isinstance(prompt, str) else None
    question = {name: value for name, value in chat.items() if name not in NOT_ASKED}
    answer = _answer(client, "/apply-template", question)
    if answer is None:
        return None
    prompt = answer.get("prompt")
    return prompt if isinstance(prompt, str) else None


def tokenize(client: Client, prompt: str) -> tuple[int, ...] | None:
    """The tokens of a rendered prompt, with those that the server adds in front; None if the
    server cannot say. LabError if it refuses.
    """
    fields = {"content": prompt, "add_special": True, "parse_special": True}
    answer = _answer(client, "/tokenize", fields)
    if answer is None:
        return None
    tokens = answer.get("tokens")
    if not isinstance(tokens, list) or len(tokens) > MOST_TOKENS:
        return None
    if any(as_count(token) is None for token in tokens):
        return None
    return tuple(tokens)


def _answer(client: Client, path: str, body: Mapping[str, object]) -> dict[str, object] | None:
    """The server's JSON object at a path; None if there is no such path. LabError if it refuses or
    does not answer.
    """
    reply = client.ask(client.access.root + path, dict(body))
    if reply.status == 200:
        return reply.parsed
    if reply.status in MISSING:
        return None
    raise _refused(reply, path)


def _refused(reply: JsonReply, path: str) -> LabError:
    if reply.status is None:
        return LabError(
            f"The server does not answer {path}: {reply.error}.",
            "Check that it still runs (its log may say why), then try again.",
        )
    return LabError(
        f"The server cannot render a request ({path}: {reply.error}).",
        "Its log may say why. Its chat template may not know tools or a role of the request.",
    )
