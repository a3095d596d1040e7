"""What is sent to a server: plans of requests, and the JSON of their bodies; and the errors that
servers answer.

Servers differ in their JSON, so a field of an unexpected type counts as missing.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypedDict

from lab.core.request import CHAT, Asked, Request
from lab.remote.access import TIMEOUT_S

MOST_AT_ONCE = 256  # requests in flight
STALL_S = 60.0
STALL_SHARE = 0.1  # of the time limit, if that is longer
MOST_TOKENS = 10**7
MOST_CTX = 2**24
MOST_MS = 10**9
"""Larger numbers of tokens of a request, of a context and of milliseconds are impossible: a line
with one could not be read again."""

INCLUDE_USAGE = "stream_options.include_usage"
CONTINUOUS_USAGE = "stream_options.continuous_usage_stats"
IGNORE_EOS = "ignore_eos"
TOKEN_IDS = "return_token_ids"
TIMINGS = "timings_per_token"
NO_CACHE = "cache_prompt"
MAX_COMPLETION = "max_completion_tokens"
SEED = "seed"
OPTIONS = (INCLUDE_USAGE, CONTINUOUS_USAGE, IGNORE_EOS, TOKEN_IDS, TIMINGS, NO_CACHE, SEED)
"""Options that only some servers have."""

OPTION_LETTERS = ("stream_options", *(option.rpartition(".")[2] for option in OPTIONS))

OPENAI_OPTIONS = (INCLUDE_USAGE, MAX_COMPLETION)
"""The options of OpenAI's server, which rejects a request with any other."""

LOADING = "the model is being loaded"
NO_CREDIT = "no credit is left"
NO_MODEL = "no such model"
FIELD_ERROR = "it does not accept a field of the request"
_NOT_TAKEN = (
    "unsupported|unrecogni[sz]ed|unknown|unexpected|invalid|extra|additional|"
    r"not (permit|allow|support|accept|valid|recogni[sz]e|available)\w*|forbidden"
)
_FIELDS = (
    "fields?|param(eter)?s?|arguments?|keywords?|propert(y|ies)|inputs?|options?|attributes?|"
    "keys?|requests?|values?|body|" + "|".join(OPTION_LETTERS)
)

_ERRORS = (
    (
        r"request \((\d{1,9}) tokens\) exceeds the available context size \((\d{1,9}) tokens\)",
        "request ({} tokens) exceeds the available context size ({} tokens)",
    ),
    (r"context size has been exceeded", "Context size has been exceeded"),
    (
        r"context (length|window|size)|maximum context|too many tokens|max_(seq|model|input)_len|"
        r"\b(prompt|inputs?|tokens)\b[^.:]{0,60}\b(too (long|large)|exceeds?|must be <=|"
        r"(longer|greater|more) than)",
        "too long for its context",
    ),
    (r"out of memory|allocat|(more|insufficient|not enough) (\w+ )?memory", "out of memory"),
    (r"insufficient (balance|credit|fund)|\bcredits?\b|billing|payment", NO_CREDIT),
    (r"not support (chat|generat\w*|completions?)\b", "this model does not answer there"),
    (r"no free slot|slot unavailable|overloaded|busy|queue", "too many requests at once"),
    (r"rate.?limit|slow down|quota", "too many requests in this time"),
    (r"model.*(not found|not exist|not loaded)|no such model", NO_MODEL),
    (r"https port", "it expects https://"),
    (r"api.?key|unauthori[sz]ed|credential", "a wrong key"),
    (r"template|jinja", "a problem with the chat template"),
    (r"loading", LOADING),
    (
        r"unexpected (token|end|eof|character|byte|symbol)|pars(e|er|ing)\b",
        "its parser failed",
    ),
    (
        rf"({_NOT_TAKEN})\W.{{0,80}}({_FIELDS})|({_FIELDS})\b.{{0,80}}({_NOT_TAKEN})|cannot read",
        FIELD_ERROR,
    ),
)
"""Words of servers' errors, and what the lab says instead: a server's own text may quote a key."""

_FIELD_STATUSES = (400, 422)
OTHER_ERROR = "an error that its log may explain"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request to send, with the JSON text of its body.

    If `nonce`, the beginning of the prompt, is given, each sending gets another one, so that no
    cache contains it. With `path` it is a question there, without a body a GET, whose whole answer
    is the reply's text.
    """

    asked: Asked
    body: str
    nonce: str | None = None
    path: str | None = None

    def of_length(self, n_gen: int) -> Ask:
        """The same request for an answer of another length."""
        before = f'_tokens": {self.asked.n_gen},'  # unique: JSON escapes quotes in texts
        after = f'_tokens": {n_gen},'
        asked = dataclasses.replace(self.asked, n_gen=n_gen)
        return dataclasses.replace(self, asked=asked, body=self.body.replace(before, after, 1))

    def with_fresh_nonce(self) -> Ask:
        """The same request with other first letters, if it begins with a nonce."""
        if self.nonce is None:
            return self
        nonce = fresh_nonce()
        body = self.body.replace(self.nonce, nonce, 1)
        return dataclasses.replace(self, nonce=nonce, body=body)


@dataclass(frozen=True, kw_only=True)
class SendPlan:
    """Requests to send: at most `n_at_once` at a time, the next one when an answer has ended."""

    asks: tuple[Ask, ...]
    api: str
    n_at_once: int = 1
    timeout_s: float = TIMEOUT_S  # for a whole request
    stall_s: float | None = None  # without a byte after the first content

    @property
    def longest_stall_s(self) -> float:
        """The time without a byte after which an answer that has begun is abandoned."""
        if self.stall_s is not None:
            return self.stall_s
        return max(STALL_S, STALL_SHARE * self.timeout_s)


@dataclass(frozen=True)
class Reply:
    """A finished request of a plan, and the generated text with reasoning. The text is not kept."""

    index: int
    request: Request
    text: str
    retry_after_s: float | None = None  # which the server asks for


@dataclass(frozen=True)
class JsonReply:
    """A server's answer that is not streamed. The texts in `parsed` may contain secrets."""

    status: int | None  # None: no answer
    parsed: dict[str, Any] | None  # None: it is not a JSON object
    error: str | None  # in the lab's own words


def fresh_nonce() -> str:
    """Eight random letters; in nearly all vocabularies each is one token."""
    return " ".join(random.choice(string.ascii_letters) for _ in range(8))


class Limits(TypedDict):
    """Fields of Asked."""

    temperature: float | None
    ignore_eos: bool | None


def limits(options: tuple[str, ...]) -> Limits:
    """OpenAI's reasoning models reject a temperature."""
    return {
        "temperature": None if MAX_COMPLETION in options else 0.0,
        "ignore_eos": True if IGNORE_EOS in options else None,
    }


def prompt_fields(api: str, prompt: str | Sequence[str]) -> dict[str, object]:
    """The fields of a prompt for this interface.

    A conversation is a sequence: its system prompt (may be empty), message, answer, message, ...
    """
    texts = ["", prompt] if isinstance(prompt, str) else list(prompt)
    if api != CHAT:
        return {"prompt": "".join(texts)}
    roles = ["system"] + ["user", "assistant"] * len(texts)
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
    ]
    if not texts[0]:
        messages = messages[1:]
    return {"messages": messages}


def ask_for(
    api: str,
    model: str,
    prompt: str | Sequence[str],
    asked: Asked,
    options: tuple[str, ...],
    nonce: str | None = None,
) -> Ask:
    """A streamed request with the options that the server accepts. `prompt`: as in
    `prompt_fields`.
    """
    return ask_of_fields(model, prompt_fields(api, prompt), asked, options, nonce)


def ask_of_fields(
    model: str,
    prompt: Mapping[str, object],
    asked: Asked,
    options: tuple[str, ...],
    nonce: str | None = None,
) -> Ask:
    """A streamed request; `prompt` has the fields of its body that the prompt depends on."""
    fields: dict[str, object] = {"model": model, **prompt}
    length = MAX_COMPLETION if MAX_COMPLETION in options else "max_tokens"
    fields |= {length: asked.n_gen, "temperature": asked.temperature}
    if SEED in options:
        fields[SEED] = asked.seed
    if IGNORE_EOS in options:
        fields["ignore_eos"] = asked.ignore_eos
    if NO_CACHE in options:
        fields["cache_prompt"] = False
    fields["stream"] = True
    counts = [name for name in (INCLUDE_USAGE, CONTINUOUS_USAGE) if name in options]
    if counts:
        fields["stream_options"] = {name.partition(".")[2]: True for name in counts}
    for name in (TOKEN_IDS, TIMINGS):
        if name in options:
            fields[name] = True
    for name in [name for name, value in fields.items() if value is None]:
        del fields[name]
    return Ask(asked=asked, body=json.dumps(fields), nonce=nonce)


def error_in(parsed: dict[str, object]) -> str | None:
    """What is wrong, in the lab's words, if an answer is an error in a form that servers have;
    otherwise None."""
    choices = parsed.get("choices")
    error = parsed.get("error")
    if isinstance(choices, list) and choices and not error:
        error = as_dict(choices[0]).get("error")
    if not error and parsed.get("object") == "error":
        error = parsed
    if not error and choices is None:
        error = parsed.get("detail") or parsed.get("errors")
        if "code" in parsed and "message" in parsed:
            error = error or parsed
    if not error:
        return None
    if isinstance(error, dict):
        error = error.get("message")
    return error_words(error)


def error_words(message: object) -> str:
    """What a server's message means, without its own text. A list has one for each problem."""
    if isinstance(message, list):
        parts = list(map(as_dict, message))
        message = " ".join(
            f"{part.get('message')} {part.get('msg')} {part.get('loc')}" for part in parts
        )
    if isinstance(message, str):
        for pattern, meaning in _ERRORS:
            match = re.search(pattern, message[:2000], re.IGNORECASE)
            if match and meaning == FIELD_ERROR:
                return _with_names(message)
            if match:
                return meaning.format(*match.groups())
    return OTHER_ERROR


def _with_names(message: str) -> str:
    """The error about a field, with those of the lab's options that the message names."""
    words = set(re.findall(r"[a-z_]+", message))
    named = [option for option in OPTIONS if option.rpartition(".")[2] in words]
    if "stream_options" in words and not {INCLUDE_USAGE, CONTINUOUS_USAGE} & {*named}:
        named += [INCLUDE_USAGE, CONTINUOUS_USAGE]
    return f"{FIELD_ERROR} ({', '.join(named)})" if named else FIELD_ERROR


def named_options(error: str | None) -> set[str]:
    """The options that an error, in the lab's words, says the server does not accept."""
    if error is None or FIELD_ERROR not in error:
        return set()
    return {option for option in OPTIONS if option in re.findall(r"[a-z_.]+", error)}


def is_about_a_field(request: Request) -> bool:
    """Whether a request failed because of a field of its body, as far as the server says.

    A 400 for a reason that the lab does not know may be about one; an error within an answer says
    so.
    """
    error = request.error or ""
    if FIELD_ERROR in error:
        return request.http_status in (200, *_FIELD_STATUSES)
    has_other_cause = any(meaning in error for _, meaning in _ERRORS if "{" not in meaning)
    is_too_long = "exceeds the available context" in error
    return request.http_status in _FIELD_STATUSES and not (has_other_cause or is_too_long)


def status_words(status: int) -> str:
    """Such as "404 Not Found"."""
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def as_dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def as_count(value: object, most: int = MOST_TOKENS) -> int | None:
    """A number of tokens, also one written as 12.0; None for anything else, and for impossible
    numbers."""
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is int and 0 <= value <= most:
        return value
    return None


def as_number(value: object) -> float | None:
    """A number; None for anything else, such as true and NaN."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) <= MOST_MS else None


def as_ms(value: object) -> float | None:
    number = as_number(value)
    return number if number is not None and number >= 0 else None


def is_impossible(fields: dict[str, object]) -> bool:
    """Whether a count or a time is larger than any can be, or no number (NaN)."""
    for name, value in fields.items():
        most = MOST_TOKENS if name.endswith(("_tokens", "_n")) else MOST_MS
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not value <= most:
            return True
    return False


def n_items(value: object) -> int | None:
    return len(value) if isinstance(value, list) else None
