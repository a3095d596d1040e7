"""The bytes of a stream as events, after the request has ended.

Server-sent events are decoded by httpx2; what is here is which event was complete at which byte, and so when, and what
the JSON of OpenAI-compatible servers means. Servers differ in it, so nothing is taken for granted: what is not of the
expected type is not there.
"""

from __future__ import annotations

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


def parse(pieces: Sequence[Piece], sent_ns: int = 0) -> Stream:
    """The events of a stream, whose stamps count from `sent_ns`."""
    steps = parsing(pieces, sent_ns)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            stream: Stream = end.value
            return stream


def parsing(pieces: Sequence[Piece], sent_ns: int) -> Generator[None, None, Stream]:
    """`parse`, event by event, so that others can work in between."""
    import httpx2

    rows = _Rows(sent_ns)
    lines = _Lines(pieces, rows)
    response = httpx2.Response(
        200,
        headers={"content-type": "text/event-stream; charset=utf-8"},
        content=iter(lines),
        request=httpx2.Request("GET", "http://localhost"),
    )
    for event in httpx2.EventSource(response, max_event_size=None):
        rows.add(event.event, event.data, lines.ns, lines.take_bytes())
        yield
    if lines.half:
        rows.fail(HALF_LINE, f"the answer ends in the middle of a line of {len(lines.half):,} bytes")
    elif rows.finish_reason is None and not rows.is_done:
        rows.fail(CUT_OFF, "the stream ended without a reason of the end and without [DONE]")
    elif rows.finish_reason is None and rows.is_begun and not rows.is_counted:
        rows.fail(CUT_OFF, "the stream ended with [DONE] in mid-answer: no reason of the end, no count of its tokens")
    return rows.stream()


class _Lines:
    """The lines of pieces, which the decoder asks for one by one; `ns` is when the last one was complete."""

    def __init__(self, pieces: Sequence[Piece], rows: _Rows) -> None:
        self._pieces, self._rows = pieces, rows
        self._n_bytes = 0
        self.ns = 0
        self.half = b""

    def __iter__(self) -> Iterator[bytes]:
        begun: list[bytes] = []
        for ns, data in self._pieces:
            self.ns = ns
            for line in data.splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    begun.append(line)
                    continue
                whole = b"".join((*begun, line))
                begun.clear()
                self._n_bytes += len(whole)
                if whole.startswith(b":"):
                    self._rows.add_ping(ns, self.take_bytes())
                yield whole
        rest = b"".join(begun)
        if rest.strip() == b"data: [DONE]":
            self._n_bytes += len(rest)
            yield rest
        elif rest.strip():
            self.half = rest
        yield b"\n\n"  # some servers leave out the last empty line

    def take_bytes(self) -> int:
        """Bytes since the last call."""
        n_bytes, self._n_bytes = self._n_bytes, 0
        return n_bytes


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
        if event == "ping":
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
