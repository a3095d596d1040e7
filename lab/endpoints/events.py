"""The bytes of a stream as events, after the request has ended.

Which event was complete at which byte, and so when, and what the JSON of OpenAI-compatible servers means. Servers
differ in it, so nothing is taken for granted: what is not of the expected type is not there.

Source of the lines and fields: WHATWG HTML, 9.2 Server-sent events (a line ends with LF, CR LF or CR alone; a byte
order mark at the beginning is skipped). Differently from there, an event whose data is empty counts as a ping: servers
send it to keep the connection open.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.core.request import (
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
    Events,
    ServerTimings,
    Usage,
)
from lab.endpoints.fields import (
    as_count,
    as_dict,
    as_text,
    error_in,
    first,
    n_items,
    n_logprobs,
    reasoning_of,
    timings_of,
    usage_of,
)

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
