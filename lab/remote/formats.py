"""What crosses to a server and back: plans of requests, their bodies, and the events of streams.

A stream is parsed after the request has ended; an event's time is that of its last byte. Servers differ in their JSON,
so a field of an unexpected type counts as missing. A stream follows WHATWG HTML, 9.2 Server-sent events; a line ends
with LF or CR LF. An event with empty data counts as a ping: servers send it to keep the connection open.
"""

from __future__ import annotations

import dataclasses
import json
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lab.core import request as kinds
from lab.core.lists import first_known
from lab.core.request import CHAT, Asked, Events, Request, ServerTimings, Usage

MOST_AT_ONCE = 900  # maximum requests in flight: select() supports at most 1,024 files
TIMEOUT_S = 600.0
STALL_S = 60.0
MOST_REASON = 100  # letters of a finish reason that are kept

INCLUDE_USAGE = "stream_options.include_usage"
CONTINUOUS_USAGE = "stream_options.continuous_usage_stats"
IGNORE_EOS = "ignore_eos"
TOKEN_IDS = "return_token_ids"
TIMINGS = "timings_per_token"
NO_CACHE = "cache_prompt"
MAX_COMPLETION = "max_completion_tokens"
OPTIONS = (INCLUDE_USAGE, CONTINUOUS_USAGE, IGNORE_EOS, TOKEN_IDS, TIMINGS, NO_CACHE)
"""Options that only some servers have."""

OPENAI_OPTIONS = (INCLUDE_USAGE, MAX_COMPLETION)
"""The options of OpenAI's server, which rejects a request with any other."""

_COUNTS = {"token ids": False, "usage": True, "timings": True}
"""The sources of an event's token count, the best first, and whether each is a running total."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request to send, with the JSON text of its body.

    If `nonce`, the beginning of the prompt, is given, each sending gets another one, so that no cache contains it. With
    `path` it is a question there, without a body a GET, whose whole answer is the reply's text.
    """

    asked: Asked
    body: str
    nonce: str | None = None
    path: str | None = None

    def of_length(self, n_gen: int) -> Ask:
        """The same request for an answer of another length."""
        old, new = (
            f'_tokens": {n},' for n in (self.asked.n_gen, n_gen)
        )  # unique: JSON escapes quotes in texts
        asked = dataclasses.replace(self.asked, n_gen=n_gen)
        return dataclasses.replace(self, asked=asked, body=self.body.replace(old, new, 1))


@dataclass(frozen=True, kw_only=True)
class SendPlan:
    """What to send: `n_requests` requests (None: one for each of `times_ns`, or for each ask), cycling through `asks`.

    With `order` it cycles through that instead: the index of the ask, and the number of tokens of its answer. Without
    `times_ns`, `n_at_once` users send one request after the other. With it each request is sent at its time from the
    start of the plan, with at most `n_at_once` in flight. A request due after `stop_s` is sent only while one due
    before is in flight, so that those end under the same load. After `most_lost` requests in a row without a
    connection, or with a lost one, the plan sends no more.
    """

    asks: tuple[Ask, ...]
    api: str
    n_at_once: int = 1
    n_requests: int | None = None
    times_ns: tuple[int, ...] | None = None
    timeout_s: float = TIMEOUT_S  # for a whole request
    stall_s: float = STALL_S  # without a byte after the first one
    stop_s: float | None = None
    spread_s: float = 0.0  # without times: each user begins at a random time within it
    order: tuple[tuple[int, int], ...] = ()
    most_lost: int | None = None

    @property
    def n_all(self) -> int:
        """Maximum number of requests."""
        if self.n_requests is not None:
            return self.n_requests
        return len(self.asks if self.times_ns is None else self.times_ns)

    def ask(self, number: int) -> Ask:
        """The request with this number."""
        if not self.order:
            return self.asks[number % len(self.asks)]
        index, n_gen = self.order[number % len(self.order)]
        return self.asks[index].of_length(n_gen)


@dataclass(frozen=True)
class Reply:
    """A finished request of a plan, and the generated text with reasoning."""

    index: int
    request: Request
    text: str


def fresh_nonce() -> str:
    """Eight random letters; in nearly all vocabularies each is one token."""
    return " ".join(random.choice(string.ascii_letters) for _ in range(8))


def limits(options: tuple[str, ...]) -> dict[str, Any]:
    """Fields of Asked. OpenAI's reasoning models reject a temperature."""
    return {
        "temperature": None if MAX_COMPLETION in options else 0.0,
        "ignore_eos": True if IGNORE_EOS in options else None,
    }


def prompt_fields(api: str, prompt: str | Sequence[str]) -> dict[str, Any]:
    """The fields of a prompt for this interface; of a conversation: its system prompt, message, answer, message, ..."""
    said = ["", prompt] if isinstance(prompt, str) else prompt
    if api != CHAT:
        return {"prompt": "".join(said)}
    roles = ("system", *("user", "assistant") * len(said))
    chat = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return {"messages": chat if said[0] else chat[1:]}


def ask_for(
    api: str,
    model: str,
    prompt: str | Sequence[str],
    asked: Asked,
    options: tuple[str, ...],
    nonce: str | None = None,
) -> Ask:
    """A streamed request with the options that the server accepts. `prompt`: as in `prompt_fields`."""
    usage = [
        name.partition(".")[2] for name in (INCLUDE_USAGE, CONTINUOUS_USAGE) if name in options
    ]
    fields: dict[str, Any] = {
        "model": model,
        **prompt_fields(api, prompt),
        "max_completion_tokens" if MAX_COMPLETION in options else "max_tokens": asked.n_gen,
        "temperature": asked.temperature,
        "seed": asked.seed,
        "ignore_eos": asked.ignore_eos if IGNORE_EOS in options else None,
        "cache_prompt": False if NO_CACHE in options else None,
        "stream": True,
        "stream_options": dict.fromkeys(usage, True) or None,
        **{name: True for name in (TOKEN_IDS, TIMINGS) if name in options},
    }
    known = {name: value for name, value in fields.items() if value is not None}
    return Ask(asked=asked, body=json.dumps(known), nonce=nonce)


def error_in(parsed: dict[str, Any]) -> str | None:
    """The message of an error in the forms that servers have; None for an answer without one."""
    error = parsed.get("error") or (parsed if parsed.get("object") == "error" else None)
    if error is None and "choices" not in parsed:
        error = parsed.get("detail")
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    try:
        return message if isinstance(message, str) and message else json.dumps(error)
    except RecursionError:
        return "an error without a message"


def usage_of(usage: dict[str, Any], timings: dict[str, Any]) -> Usage | None:
    """The token counts of an answer, from the fields of different servers."""
    prompt = as_dict(usage.get("prompt_tokens_details"))
    cached = (
        prompt.get("cached_tokens"),
        usage.get("prompt_cache_hit_tokens"),
        timings.get("cache_n"),
    )
    counts = Usage(
        prompt_tokens=as_count(usage.get("prompt_tokens")),
        completion_tokens=as_count(usage.get("completion_tokens")),
        cached_tokens=first_known(map(as_count, cached)),
    )
    return None if counts == Usage() else counts


def timings_of(timings: dict[str, Any]) -> ServerTimings | None:
    """llama-server's `timings`."""
    counts = {"n_cached": "cache_n", "n_prompt": "prompt_n", "n_gen": "predicted_n"}
    known: dict[str, Any] = {name: as_count(timings.get(field)) for name, field in counts.items()}
    for name, field in (("prompt_ms", "prompt_ms"), ("gen_ms", "predicted_ms")):
        value: Any = timings.get(field)
        known[name] = float(value) if type(value) in (int, float) and 0 <= value < 1e18 else None
    return ServerTimings(**known) if timings else None


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def n_items(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def read_stream(
    pieces: Sequence[tuple[int, bytes | bytearray]], sent_ns: int
) -> Iterator[dict[str, Any] | None]:
    """Parse the body of an answer: pieces of bytes, each with its time. Stamps are relative to `sent_ns`.

    Yields None after each event, so that other tasks can run; last come the fields of a Request, and the `text`.
    """
    rows: list[
        tuple[int, int, str, dict[str, int | None]]
    ] = []  # stamp, bytes, kind, counts of tokens
    usage = dict[str, Any]()
    timings = dict[str, Any]()
    reason = None
    is_done = False
    texts = list[str]()
    failures = list[tuple[str, str]]()
    for ns, n_bytes, name, data in _events(pieces):
        kind = kinds.PING
        count = dict[str, int | None]()
        if name == kinds.HALF_LINE:
            failures.append((name, data))
            break
        if data.strip() == "[DONE]":
            kind = kinds.DONE
            is_done = True
        elif name == "error" or (name != "ping" and data.strip()):
            kind = kinds.ERROR
            try:
                chunk = json.loads(data)
            except (ValueError, RecursionError):
                chunk = None
            if not isinstance(chunk, dict):
                failures.append((kinds.WRONG_JSON, f"an event is not a JSON object: {data[:300]}"))
            elif (message := error_in(chunk)) is not None or name == "error":
                failures.append((kinds.ERROR_INSIDE, message or data))
            else:
                choices = chunk.get("choices")
                own_usage = as_dict(chunk.get("usage"))
                choice = as_dict(choices[0]) if isinstance(choices, list) and choices else {}
                if as_count(own_usage.get("prompt_tokens")) or as_count(
                    own_usage.get("completion_tokens")
                ):
                    usage = own_usage  # Ollama sends zeros in each chunk of a completion
                timings = as_dict(chunk.get("timings")) or timings
                if isinstance(choice.get("finish_reason"), str):
                    reason = choice["finish_reason"][:MOST_REASON]
                kind, count, text = _chunk(choice, own_usage, as_dict(chunk.get("timings")))
                texts.append(text)
        rows.append((ns - sent_ns, n_bytes, kind, count))
        yield None
    arrive_ns, sizes, names, counts = zip(*rows, strict=True) if rows else ((), (), (), ())
    missing = "before the answer was complete: it has no finish_reason and no"
    if reason is None and not is_done:
        failures.append((kinds.CUT_OFF, f"the connection ended {missing} [DONE]"))
    elif reason is None and not usage and any(kind in kinds.GENERATED for kind in names):
        failures.append((kinds.CUT_OFF, f"[DONE] came {missing} token count"))
    used = usage_of(usage, timings)
    n_tokens, tokens_by = _tokens(names, counts, used.completion_tokens if used else None)
    failure, error = failures[0] if failures else (None, None)
    yield {
        "events": Events(arrive_ns, sizes, names, n_tokens),
        "text": "".join(texts),
        "tokens_by": tokens_by,
        "usage": used,
        "timings": timings_of(timings),
        "finish_reason": reason,
        "failure": failure,
        "error": error,
    }


def _chunk(
    choice: dict[str, Any], usage: dict[str, Any], timings: dict[str, Any]
) -> tuple[str, dict[str, int | None], str]:
    """The kind of a chunk of the answer, its token count by each of _COUNTS, and its text with reasoning."""
    counts = {
        "token ids": n_items(choice.get("token_ids")),
        "usage": as_count(usage.get("completion_tokens")),
        "timings": as_count(timings.get("predicted_n")),
    }
    delta = as_dict(choice.get("delta"))
    goes_on = choice.get("finish_reason") is None

    def joined(*values: Any) -> str:
        return "".join(value for value in values if isinstance(value, str))

    text = joined(choice.get("text"), delta.get("content"), delta.get("refusal"))
    reasoning = joined(
        delta.get("reasoning_content"), delta.get("reasoning"), delta.get("thinking")
    )
    ways = (
        (kinds.TEXT, text),
        (kinds.TOOL, delta.get("tool_calls")),
        (kinds.REASONING, reasoning),
        (kinds.TEXT, goes_on and counts["token ids"]),
        (kinds.ROLE, goes_on and delta.get("role")),
        (kinds.USAGE, usage),
    )
    return next((kind for kind, has_it in ways if has_it), kinds.OTHER), counts, reasoning + text


def _tokens(
    names: Sequence[str], counts: Sequence[dict[str, int | None]], n_all: int | None
) -> tuple[tuple[int, ...] | None, str | None]:
    """Tokens per event and their source: the first of _COUNTS with a count for all content, at most `n_all`."""
    content = [i for i, kind in enumerate(names) if kind in kinds.GENERATED]
    for source, is_running_total in _COUNTS.items():
        column = list[int]()
        total = 0
        for count in counts:
            n = count.get(source)
            column.append(0 if n is None else n - total)
            total = n if is_running_total and n is not None else total
        is_known = bool(content) and all(counts[i].get(source) is not None for i in content)
        if (
            is_known
            and column[content[0]] > 0
            and min(column) >= 0
            and (n_all is None or sum(column) <= n_all)
        ):
            return tuple(column), source
    return None, None


def _events(pieces: Sequence[tuple[int, bytes | bytearray]]) -> Iterator[tuple[int, int, str, str]]:
    """When each event was complete, its bytes on the wire, its name (of half a line HALF_LINE), and its data."""
    name = ""
    data = list[str]()
    n_bytes = 0
    is_begun = False
    for ns, line in _lines(pieces):
        n_bytes += len(line)
        if line and not line.endswith(b"\n") and line.strip() not in (b"data: [DONE]", b""):
            yield (
                ns,
                len(line),
                kinds.HALF_LINE,
                f"the answer ends within a line, after {len(line):,} of its bytes",
            )
            return
        text = line.decode(errors="replace").rstrip("\r\n")
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if text.startswith(":"):
            yield ns, n_bytes, "", ""
            n_bytes = 0
        elif text:
            is_begun = True
            name = value if field == "event" else name
            data += [value] if field == "data" else []
        elif is_begun:
            yield ns, n_bytes, name, "\n".join(data)
            name = ""
            data = []
            n_bytes = 0
            is_begun = False


def _lines(pieces: Sequence[tuple[int, bytes | bytearray]]) -> Iterator[tuple[int, bytes]]:
    """When each line was complete, and the line with its end; last an empty one, which some servers omit."""
    begun = bytearray()
    ns = 0
    for ns, data in pieces:
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield ns, bytes(begun) + end + b"\n"
            begun.clear()
        begun += rest
    if begun:
        yield ns, bytes(begun)
    yield ns, b""
