"""The events of a streamed answer, read from its bytes after it has ended; an event's time is that
of its last byte.

A stream follows WHATWG HTML, 9.2 Server-sent events; a line ends with LF or CR LF. An event with
empty data counts as a ping: servers send it to keep the connection open.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lab.core import request as kinds
from lab.core.lists import first_known
from lab.core.request import Events, ServerTimings, Usage
from lab.remote.formats import (
    as_count,
    as_dict,
    as_ms,
    error_in,
    error_words,
    is_impossible,
    n_items,
)

Pieces = Sequence[tuple[int, bytes | bytearray]]  # bytes that arrived together, and when

TOKEN_IDS = "token ids"
USAGE = "usage"
TIMINGS = "timings"
_SOURCES = (TOKEN_IDS, USAGE, TIMINGS)  # of an event's token count, the best first
_RUNNING_TOTALS = (USAGE, TIMINGS)

REASONS = {
    *("stop", "length", "eos", "eos_token", "stop_sequence", "max_tokens", "limit"),
    *("tool_calls", "function_call", "tool_use", "content_filter", "end_turn"),
    *("abort", "aborted", "cancelled", "error", "insufficient_system_resource"),
}
"""The finish reasons of servers. Any other word could be a part of a key."""
OTHER_REASON = "other"


class StreamLine(NamedTuple):
    """A line of a stream with its end, and when it was complete."""

    ns: int
    text: bytes


class SentEvent(NamedTuple):
    """An event as it was sent."""

    ns: int
    n_bytes: int
    name: str
    data: str
    is_whole: bool = True


@dataclass(frozen=True)
class EventRow:
    """What is kept of an event."""

    ns: int
    n_bytes: int
    kind: str
    n_tokens: dict[str, int | None]  # by source


@dataclass(frozen=True)
class StreamedAnswer:
    """What a stream said. `failure` is the first thing that was wrong with it."""

    events: Events = field(default_factory=Events)
    text: str = ""  # with reasoning
    tokens_by: str | None = None
    usage: Usage | None = None
    timings: ServerTimings | None = None
    finish_reason: str | None = None
    failure: str | None = None
    error: str | None = None


class StreamReader:
    """Reads a stream event by event, so that the caller can do other work in between."""

    def __init__(self, pieces: Pieces, sent_ns: int) -> None:
        self._pieces = pieces
        self._sent_ns = sent_ns
        self._rows: list[EventRow] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._timings: dict[str, Any] = {}
        self._reason: str | None = None
        self._is_done = False
        self._failure: tuple[str, str] | None = None

    def read(self) -> Iterator[None]:
        """Read all events; yields after each."""
        for event in sent_events(self._pieces):
            if not event.is_whole:
                self._fail(
                    kinds.HALF_LINE,
                    f"the answer ends within a line, after {event.n_bytes:,} of its bytes",
                )
                return
            self._add(event)
            yield

    def answer(self) -> StreamedAnswer:
        """What the events that were read say."""
        self._check_end()
        usage = usage_of(self._usage, self._timings)
        n_generated = None if usage is None else usage.completion_tokens
        n_tokens, tokens_by = _tokens_of_events(self._rows, n_generated)
        failure, error = self._failure or (None, None)
        return StreamedAnswer(
            events=Events(
                tuple(row.ns for row in self._rows),
                tuple(row.n_bytes for row in self._rows),
                tuple(row.kind for row in self._rows),
                n_tokens,
            ),
            text="".join(self._texts),
            tokens_by=tokens_by,
            usage=usage,
            timings=timings_of(self._timings),
            finish_reason=self._reason,
            failure=failure,
            error=error,
        )

    def _fail(self, failure: str, error: str) -> None:
        if self._failure is None:
            self._failure = (failure, error)

    def _add(self, event: SentEvent) -> None:
        """Keep an event, and what it says."""
        kind = kinds.PING
        n_tokens: dict[str, int | None] = {}
        data = event.data.strip()
        if data == "[DONE]":
            kind = kinds.DONE
            self._is_done = True
        elif event.name == "error" or (event.name != "ping" and data):
            kind, n_tokens = self._parse(event)
        self._rows.append(EventRow(event.ns - self._sent_ns, event.n_bytes, kind, n_tokens))

    def _parse(self, event: SentEvent) -> tuple[str, dict[str, int | None]]:
        """The kind of an event with data, and its numbers of tokens."""
        try:
            chunk = json.loads(event.data)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, dict):
            self._fail(kinds.WRONG_JSON, "an event is not a JSON object")
            return kinds.ERROR, {}
        error = error_in(chunk)
        if error is None and event.name == "error":
            error = error_words(chunk.get("message"))
        if error is not None:
            self._fail(kinds.ERROR_INSIDE, error)
            return kinds.ERROR, {}
        usage = as_dict(chunk.get("usage"))
        timings = as_dict(chunk.get("timings"))
        if is_impossible(usage) or is_impossible(timings):
            self._fail(kinds.IMPOSSIBLE, "the server counts more than is possible")
            return kinds.ERROR, {}
        choices = chunk.get("choices")
        choice = as_dict(choices[0]) if isinstance(choices, list) and choices else {}
        if as_count(usage.get("prompt_tokens")) or as_count(usage.get("completion_tokens")):
            self._usage = usage  # Ollama sends zeros in each chunk of a completion
        self._timings = timings or self._timings
        self._keep_reason(choice.get("finish_reason"))
        n_tokens = {
            TOKEN_IDS: n_items(choice.get("token_ids")),
            USAGE: as_count(usage.get("completion_tokens")),
            TIMINGS: as_count(timings.get("predicted_n")),
        }
        return self._keep_content(choice, bool(n_tokens[TOKEN_IDS]), bool(usage)), n_tokens

    def _keep_reason(self, reason: object) -> None:
        if isinstance(reason, str):
            self._reason = reason if reason in REASONS else OTHER_REASON

    def _keep_content(
        self, choice: dict[str, Any], has_token_ids: bool, has_usage: bool
    ) -> str:
        """Keep the text of a chunk with its reasoning; returns the kind of the event."""
        delta = as_dict(choice.get("delta"))
        text = _joined(choice.get("text"), delta.get("content"), delta.get("refusal"))
        reasoning = _joined(
            delta.get("reasoning_content"), delta.get("reasoning"), delta.get("thinking")
        )
        self._texts.append(reasoning + text)
        is_last = choice.get("finish_reason") is not None
        if text:
            return kinds.TEXT
        if delta.get("tool_calls"):
            return kinds.TOOL
        if reasoning:
            return kinds.REASONING
        if has_token_ids and not is_last:
            return kinds.TEXT
        if delta.get("role") and not is_last:
            return kinds.ROLE
        return kinds.USAGE if has_usage else kinds.OTHER

    def _check_end(self) -> None:
        """Note a stream that ended before its answer did."""
        has_content = any(row.kind in kinds.GENERATED for row in self._rows)
        if self._reason is not None:
            return
        if not self._is_done:
            self._fail(
                kinds.CUT_OFF,
                "the connection ended before the answer was complete: "
                "it has no finish_reason and no [DONE]",
            )
        elif not self._usage and has_content:
            self._fail(
                kinds.CUT_OFF,
                "[DONE] came before the answer was complete: "
                "it has no finish_reason and no token count",
            )


def _joined(*values: object) -> str:
    return "".join(value for value in values if isinstance(value, str))


def usage_of(usage: dict[str, Any], timings: dict[str, Any]) -> Usage | None:
    """The token counts of an answer, from the fields of different servers."""
    details = as_dict(usage.get("prompt_tokens_details"))
    cached = (
        details.get("cached_tokens"),
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
    if not timings:
        return None
    return ServerTimings(
        n_cached=as_count(timings.get("cache_n")),
        n_prompt=as_count(timings.get("prompt_n")),
        prompt_ms=as_ms(timings.get("prompt_ms")),
        n_gen=as_count(timings.get("predicted_n")),
        gen_ms=as_ms(timings.get("predicted_ms")),
    )


def _tokens_of_events(
    rows: Sequence[EventRow], n_generated: int | None
) -> tuple[tuple[int, ...] | None, str | None]:
    """Tokens per event and their source: the first with a count for all content, at most
    `n_generated`."""
    content = [index for index, row in enumerate(rows) if row.kind in kinds.GENERATED]
    for source in _SOURCES:
        if not content or any(rows[index].n_tokens.get(source) is None for index in content):
            continue
        column = _tokens_by(source, rows)
        is_possible = column[content[0]] > 0 and min(column) >= 0
        if is_possible and (n_generated is None or sum(column) <= n_generated):
            return tuple(column), source
    return None, None


def _tokens_by(source: str, rows: Sequence[EventRow]) -> list[int]:
    """Tokens per event by this source; 0 for an event without a count."""
    column = []
    total = 0
    for row in rows:
        n = row.n_tokens.get(source)
        column.append(0 if n is None else n - total)
        if n is not None and source in _RUNNING_TOTALS:
            total = n
    return column


def sent_events(pieces: Pieces) -> Iterator[SentEvent]:
    """The events of a stream; the last one is not whole if the stream ends within a line of it."""
    name = ""
    data: list[str] = []
    n_bytes = 0
    is_begun = False
    for line in _lines(pieces):
        n_bytes += len(line.text)
        is_half = line.text and not line.text.endswith(b"\n")
        if is_half and line.text.strip() not in (b"data: [DONE]", b""):
            yield SentEvent(line.ns, len(line.text), name, "", is_whole=False)
            return
        text = line.text.decode(errors="replace").rstrip("\r\n")
        field, _, value = text.partition(":")
        value = value.removeprefix(" ")
        if text.startswith(":"):
            yield SentEvent(line.ns, n_bytes, "", "")
            n_bytes = 0
        elif text:
            is_begun = True
            if field == "event":
                name = value
            elif field == "data":
                data.append(value)
        elif is_begun:
            yield SentEvent(line.ns, n_bytes, name, "\n".join(data))
            name = ""
            data = []
            n_bytes = 0
            is_begun = False


def _lines(pieces: Pieces) -> Iterator[StreamLine]:
    """The lines of a stream; last an empty one, which some servers omit."""
    begun = bytearray()
    ns = 0
    for ns, data in pieces:
        *ends, begin = data.split(b"\n")
        for end in ends:
            yield StreamLine(ns, bytes(begun) + end + b"\n")
            begun.clear()
        begun += begin
    if begun:
        yield StreamLine(ns, bytes(begun))
    yield StreamLine(ns, b"")
