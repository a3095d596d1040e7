"""What OpenAI-compatible servers take and write: bodies of requests, fields of answers, events of streams.

The body has options that this server was seen to take. A stream is read after the request has ended: which event was
complete at which byte, and so when. Servers differ in their JSON, so nothing is taken for granted: what is not of the
expected type is not there.

Source of a stream's lines and fields: WHATWG HTML, 9.2 Server-sent events (a line ends with LF, CR LF or CR alone; a
byte order mark at the beginning is skipped). Differently from there, an event whose data is empty counts as a ping:
servers send it to keep the connection open.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.core.request import (
    CHAT,
    CUT_OFF,
    DONE,
    ERROR,
    ERROR_INSIDE,
    GENERATED,
    HALF_LINE,
    OTHER,
    PING,
    REASONING,
    ROLE,
    TEXT,
    TOOL,
    USAGE,
    WRONG_JSON,
    Asked,
    Events,
    ServerTimings,
    Usage,
)
from lab.endpoints.send_plan import Ask

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


def temperature(options: tuple[str, ...]) -> float | None:
    """0, or None where the server's models may refuse any (OpenAI's that reason)."""
    return None if MAX_COMPLETION in options else 0.0


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


def error_in(parsed: dict[str, Any]) -> str | None:
    """The message of an error; None where there is none.

    Servers write {"error": {"message": ...}}, {"error": ...}, {"object": "error", "message": ...} or {"detail": ...}.
    """
    error = parsed.get("error")
    if error is None and parsed.get("object") == "error":
        error = parsed
    if error is None and "detail" in parsed and "choices" not in parsed:
        error = parsed["detail"]
    if not error:
        return None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else json.dumps(error)


def usage_of(usage: dict[str, Any] | None, timings: dict[str, Any] | None = None) -> Usage | None:
    """The counts of tokens of an answer, as servers write them."""
    usage, timings = usage or {}, timings or {}
    prompt, completion = as_dict(usage.get("prompt_tokens_details")), as_dict(usage.get("completion_tokens_details"))
    cached = (prompt.get("cached_tokens"), usage.get("prompt_cache_hit_tokens"), timings.get("cache_n"))
    reasoning = (completion.get("reasoning_tokens"), usage.get("reasoning_tokens"))
    counts = Usage(
        prompt_tokens=as_count(usage.get("prompt_tokens")),
        completion_tokens=as_count(usage.get("completion_tokens")),
        cached_tokens=next((n for n in map(as_count, cached) if n is not None), None),
        reasoning_tokens=next((n for n in map(as_count, reasoning) if n is not None), None),
    )
    return None if counts == Usage() else counts


def timings_of(timings: dict[str, Any] | None) -> ServerTimings | None:
    """llama-server's `timings`."""
    if not timings:
        return None
    return ServerTimings(
        n_cached=as_count(timings.get("cache_n")),
        n_prompt=as_count(timings.get("prompt_n")),
        prompt_ms=as_number(timings.get("prompt_ms")),
        n_gen=as_count(timings.get("predicted_n")),
        gen_ms=as_number(timings.get("predicted_ms")),
        n_draft=as_count(timings.get("draft_n")),
        n_draft_accepted=as_count(timings.get("draft_n_accepted")),
    )


def first(value: Any) -> dict[str, Any]:
    return as_dict(value[0]) if isinstance(value, list) and value else {}


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def as_count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def as_number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e18 else None


def n_items(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None


def as_text(value: Any) -> str:
    """Content: text, or a list of parts with text."""
    if isinstance(value, list):
        return "".join(as_text(as_dict(part).get("text")) for part in value)
    return value if isinstance(value, str) else ""


def thoughts(value: Any) -> str:
    """The reasoning in content that is a list of parts (Mistral's)."""
    return "".join(as_text(as_dict(part).get("thinking")) for part in value) if isinstance(value, list) else ""


def reasoning_of(message: dict[str, Any]) -> str:
    """The reasoning in a message, or in the delta of a stream."""
    fields = "".join(as_text(message.get(name)) for name in ("reasoning_content", "reasoning", "thinking"))
    return fields + thoughts(message.get("content"))


def text_of(choice: dict[str, Any]) -> str:
    """All that was generated in an answer that was not streamed, reasoning included."""
    message = as_dict(choice.get("message"))
    return reasoning_of(message) + as_text(message.get("content")) + as_text(choice.get("text"))


def n_logprobs(value: Any) -> int | None:
    """Tokens in the log-probabilities of a chunk: of chat {"content": [...]}, of completions {"tokens": [...]}."""
    content = n_items(as_dict(value).get("content"))
    return n_items(as_dict(value).get("tokens")) if content is None else content


Piece = tuple[int, bytes]
"""Bytes of the body of an answer, and when they arrived."""

_TOKEN_IDS, _USAGE, _TIMINGS, _LOGPROBS = "token ids", "usage", "timings", "logprobs"
_DONE = "[DONE]"
_FIELDS = ("event", "data", "id", "retry")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What a stream was."""

    events: Events
    text: str
    tokens_by: str | None
    usage: Usage | None
    timings: ServerTimings | None
    finish_reason: str | None
    failure: str | None
    error: str | None


def parsing(pieces: Sequence[Piece], sent_ns: int) -> Generator[None, None, Stream]:
    """The events of a stream, whose stamps count from `sent_ns`, one by one, so that others can work in between."""
    rows = _Rows(sent_ns)
    name, n_bytes, is_begun = "", 0, False
    data: list[str] = []
    half = b""
    for ns, line, n in _lines(pieces):
        n_bytes += n
        if n and not line.endswith((b"\n", b"\r")) and line.strip() not in (b"data: [DONE]", b""):
            half = line
            break
        text = line.decode(errors="replace").rstrip("\r\n")
        field_name, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if text.startswith(":"):
            rows.add_ping(ns, n_bytes)
        elif not text and is_begun:
            rows.add(name, "\n".join(data), ns, n_bytes)
            name, data, is_begun = "", [], False
        else:
            is_begun = is_begun or field_name in _FIELDS
            name = value if field_name == "event" else name
            data += [value] if field_name == "data" else []
            continue
        n_bytes = 0
        yield
    if half:
        rows.fail(HALF_LINE, f"the answer ends in the middle of a line of {len(half):,} bytes")
    elif rows.finish_reason is None and not rows.is_done:
        rows.fail(CUT_OFF, "the connection ended before the answer was complete: no finish_reason and no [DONE] came")
    elif rows.finish_reason is None and rows.is_begun and not rows.is_counted:
        rows.fail(CUT_OFF, "[DONE] came before the answer was complete: no finish_reason and no count of tokens came")
    return rows.stream()


def _lines(pieces: Sequence[Piece]) -> Iterator[tuple[int, bytes, int]]:
    """Each line with its end (the last one may lack it), when it was complete, and its bytes on the wire.

    In the end comes an empty line of 0 bytes, since some servers leave out the last one.
    """
    begun: list[bytes] = []
    n_before = 0  # bytes that belong to the next line and are not in it: a mark, or the LF of a CR LF in two pieces
    ns, last = 0, b""
    for i, (ns, data) in enumerate(pieces):
        skipped = codecs.BOM_UTF8 if i == 0 else b"\n" if last == b"\r" else b""
        kept = data.removeprefix(skipped)
        n_before += len(data) - len(kept)
        for line in kept.splitlines(keepends=True):
            begun.append(line)
            if line.endswith((b"\n", b"\r")):
                whole = b"".join(begun)
                yield ns, whole, n_before + len(whole)
                begun.clear()
                n_before = 0
        last = data[-1:] or last
    if rest := b"".join(begun):
        yield ns, rest, len(rest)
    yield ns, b"", 0


@dataclass
class _Rows:
    """Collects events."""

    sent_ns: int
    finish_reason: str | None = None
    is_done: bool = False
    _failure: tuple[str, str] | None = None
    _usage: dict[str, Any] | None = None
    _timings: dict[str, Any] | None = None
    _text: list[str] = field(default_factory=list)
    _arrive_ns: list[int] = field(default_factory=list)
    _n_bytes: list[int] = field(default_factory=list)
    _kind: list[str] = field(default_factory=list)
    _counts: dict[str, list[int | None]] = field(
        default_factory=lambda: {_TOKEN_IDS: [], _USAGE: [], _TIMINGS: [], _LOGPROBS: []}
    )

    @property
    def is_begun(self) -> bool:
        """Whether there is generated content."""
        return any(kind in GENERATED for kind in self._kind)

    @property
    def is_counted(self) -> bool:
        """Whether the server counted the tokens of the answer."""
        return self._usage is not None

    def fail(self, failure: str, error: str) -> None:
        """Note a failure; the first one counts."""
        self._failure = self._failure or (failure, error)

    def add_ping(self, ns: int, n_bytes: int) -> None:
        self._append(PING, ns, n_bytes, {})

    def add(self, event: str, data: str, ns: int, n_bytes: int) -> None:
        """One event: its name, its data, when it was complete, and its bytes."""
        if data.strip() == _DONE:
            self.is_done = True
            return self._append(DONE, ns, n_bytes, {})
        if event == "ping" or (not data.strip() and event != "error"):
            return self._append(PING, ns, n_bytes, {})
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            self.fail(WRONG_JSON, f"an event is no JSON object: {data}")
            return self._append(ERROR, ns, n_bytes, {})
        message = error_in(chunk)
        if message is not None or event == "error":
            self.fail(ERROR_INSIDE, message or data)
            return self._append(ERROR, ns, n_bytes, {})
        self._append(*self._read(chunk, ns, n_bytes))

    def _read(self, chunk: dict[str, Any], ns: int, n_bytes: int) -> tuple[str, int, int, dict[str, int | None]]:
        choice = first(chunk.get("choices"))
        delta = as_dict(choice.get("delta"))
        usage, timings = as_dict(chunk.get("usage")), as_dict(chunk.get("timings"))
        if as_count(usage.get("prompt_tokens")) or as_count(usage.get("completion_tokens")):
            self._usage = usage  # Ollama has one of zeros in each chunk of a completion
        self._timings = timings or self._timings
        if isinstance(choice.get("finish_reason"), str):
            self.finish_reason = choice["finish_reason"]
        counts = {
            _TOKEN_IDS: n_items(choice.get("token_ids")),
            _USAGE: as_count(usage.get("completion_tokens")),
            _TIMINGS: as_count(timings.get("predicted_n")),
            _LOGPROBS: n_logprobs(choice.get("logprobs")),
        }
        return self._kind_of(choice, delta, bool(counts[_TOKEN_IDS]), bool(usage)), ns, n_bytes, counts

    def _kind_of(self, choice: dict[str, Any], delta: dict[str, Any], has_ids: bool, has_usage: bool) -> str:
        text = as_text(choice.get("text")) + as_text(delta.get("content")) + as_text(delta.get("refusal"))
        reasoning = reasoning_of(delta)
        calls = delta.get("tool_calls") or delta.get("function_call")
        self._text += [reasoning, text]
        if text:
            return TEXT
        if calls:
            return TOOL
        if reasoning:
            return REASONING
        if has_ids and choice.get("finish_reason") is None:
            return TEXT
        if delta.get("role") and choice.get("finish_reason") is None:
            return ROLE
        return USAGE if has_usage else OTHER

    def _append(self, kind: str, ns: int, n_bytes: int, counts: dict[str, int | None]) -> None:
        self._kind.append(kind)
        self._arrive_ns.append(ns - self.sent_ns)
        self._n_bytes.append(n_bytes)
        for name, column in self._counts.items():
            column.append(counts.get(name))

    def stream(self) -> Stream:
        """All that came."""
        usage = usage_of(self._usage, self._timings)
        n_tokens, tokens_by = self._tokens(usage.completion_tokens if usage else None)
        failure, error = self._failure or (None, None)
        return Stream(
            events=Events(tuple(self._arrive_ns), tuple(self._n_bytes), tuple(self._kind), n_tokens),
            text="".join(self._text),
            tokens_by=tokens_by,
            usage=usage,
            timings=timings_of(self._timings),
            finish_reason=self.finish_reason,
            failure=failure,
            error=error,
        )

    def _tokens(self, n_all: int | None) -> tuple[tuple[int, ...] | None, str | None]:
        """Tokens per event, from the first source that counts all events with content, and does not count too many."""
        ways = ((_TOKEN_IDS, False), (_USAGE, True), (_TIMINGS, True), (_LOGPROBS, False))
        for name, is_running_total in ways:
            column = _counted(self._kind, self._counts[name], is_running_total)
            if column is not None and (n_all is None or sum(column) <= n_all):
                return column, name
        return None, None


def _counted(kinds: Sequence[str], counts: Sequence[int | None], is_running_total: bool) -> tuple[int, ...] | None:
    """Tokens per event; None where an event with content has no count, or the first of them has 0 tokens."""
    column: list[int] = []
    total = 0
    for kind, count in zip(kinds, counts, strict=True):
        if count is None and kind in GENERATED:
            return None
        if is_running_total:
            n, total = (0, total) if count is None else (count - total, count)
        else:
            n = count or 0
        column.append(n)
    n_first = next((n for kind, n in zip(kinds, column, strict=True) if kind in GENERATED), 0)
    return tuple(column) if n_first > 0 and min(column) >= 0 else None
