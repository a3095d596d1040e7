"""What a streamed answer says: its events, text, counts and end, read after it has ended.

framing.py has its events as they were sent, deltas.py what a piece of an answer carries. An event
with empty data counts as a ping: servers send it to keep the connection open.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lab.core import request as kinds
from lab.core.lists import first_known
from lab.core.request import Events, ServerTimings, Usage
from lab.remote.deltas import content_of
from lab.remote.formats import (
    as_count,
    as_dict,
    as_list,
    as_ms,
    as_number,
    error_in,
    error_words,
    is_impossible,
    n_items,
)
from lab.remote.framing import DONE_DATA, ERROR_EVENT, Pieces, SentEvent, sent_events

TOKEN_IDS = "token ids"
USAGE = "usage"
TIMINGS = "timings"
_SOURCES = (TOKEN_IDS, USAGE, TIMINGS)  # of an event's token count, the best first
_RUNNING_TOTALS = (USAGE, TIMINGS)

REASONS = {
    *("stop", "length", "eos", "eos_token", "stop_sequence", "max_tokens", "limit"),
    *("tool_calls", "function_call", "tool_use", "content_filter", "end_turn", "model_length"),
    *("abort", "aborted", "cancelled", "error", "insufficient_system_resource", "safety"),
}
"""The finish reasons of servers, in small letters. Any other word could be a part of a key."""
BROKEN_OFF = {"abort", "aborted", "cancelled", "error", "insufficient_system_resource"}
"""Those of an answer that the server gave up."""

OTHER_REASON = "other"
MOST_WITHOUT_TEXT = 4
"""Tokens of an answer that may have no text: ends, marks of reasoning, a part of a letter."""


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
    wrong_counts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None
    error: str | None = None


class StreamReader:
    """Reads a stream event by event, so that the caller can do other work in between."""

    def __init__(self, pieces: Pieces, sent_ns: int) -> None:
        self._pieces = pieces
        self._sent_ns = sent_ns
        self._rows: list[EventRow] = []
        self._texts: list[str] = []
        self._usage: dict[str, object] = {}
        self._timings: dict[str, object] = {}
        self._totals = dict.fromkeys(_RUNNING_TOTALS, 0)
        self._is_whole_message = False
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
        rows = with_hidden_tokens(self._rows)
        usage = usage_of(self._usage, self._timings, {row.kind for row in rows})
        self._check_end(rows, usage)
        n_generated = None if usage is None else usage.completion_tokens
        n_tokens, tokens_by = _tokens_of_events(rows, n_generated)
        failure, error = self._failure or (None, None)
        return StreamedAnswer(
            events=Events(
                tuple(row.ns for row in rows),
                tuple(row.n_bytes for row in rows),
                tuple(row.kind for row in rows),
                n_tokens,
            ),
            text="".join(self._texts),
            tokens_by=tokens_by,
            usage=usage,
            timings=timings_of(self._timings),
            finish_reason=self._reason,
            wrong_counts=wrong_counts(self._usage),
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
        if data.strip('"').upper() == DONE_DATA:
            kind = kinds.DONE
            self._is_done = True
        elif event.name == ERROR_EVENT or (event.name != "ping" and data):
            kind, n_tokens = self._parse(event)
        self._rows.append(EventRow(event.ns - self._sent_ns, event.n_bytes, kind, n_tokens))

    def _parse(self, event: SentEvent) -> tuple[str, dict[str, int | None]]:
        """The kind of an event with data, and its numbers of tokens."""
        try:
            chunk = json.loads(event.data)
        except (ValueError, RecursionError):
            chunk = None
        error = error_in(as_dict(chunk))
        if error is None and event.name == ERROR_EVENT:
            error = error_words(as_dict(chunk).get("message", event.data))
        if error is None and not isinstance(chunk, dict):
            self._fail(kinds.WRONG_JSON, "an event is not a JSON object")
            return kinds.ERROR, {}
        if error is not None:
            self._fail(kinds.ERROR_INSIDE, error)
            return kinds.ERROR, {}
        usage = usage_in(chunk)
        counts = named_counts(usage)
        timings = as_dict(chunk.get("timings"))
        if is_impossible(usage) or is_impossible(timings):
            self._fail(kinds.IMPOSSIBLE, "the server counts more than is possible")
            return kinds.ERROR, {}
        choices = chunk.get("choices")
        choice = as_dict(choices[0]) if isinstance(choices, list) and choices else {}
        if any(as_number(counts[name]) for name in ("prompt_tokens", "completion_tokens")):
            # Ollama sends zeros in each chunk of a completion
            self._usage = merged_usage(self._usage, usage)
        self._timings = timings or self._timings
        is_last = self._keep_reason(choice.get("finish_reason"))
        n_tokens = {
            TOKEN_IDS: n_items(choice.get("token_ids")),
            USAGE: as_count(counts["completion_tokens"]),
            TIMINGS: as_count(timings.get("predicted_n")),
        }
        return self._kind_of(choice, n_tokens, is_last, bool(usage)), n_tokens

    def _kind_of(
        self,
        choice: dict[str, object],
        n_tokens: dict[str, int | None],
        is_last: bool,
        has_usage: bool,
    ) -> str:
        """The kind of a chunk; its text is kept."""
        content = content_of(choice)
        self._texts.append(content.text)
        if "message" in choice and "delta" not in choice:
            self._is_whole_message = True
        has_grown = self._has_grown(n_tokens)
        is_first = all(row.kind == kinds.PING for row in self._rows)
        has_role = bool(as_dict(choice.get("delta")).get("role"))
        if content.kind is not None:
            return content.kind
        if n_tokens[TOKEN_IDS] and not is_last:
            return kinds.TEXT
        if has_role and not is_last and (is_first or not has_grown):
            return kinds.ROLE
        if choice and has_grown and not is_last:
            return kinds.HIDDEN
        return kinds.USAGE if has_usage else kinds.OTHER

    def _has_grown(self, n_tokens: dict[str, int | None]) -> bool:
        """Whether a running total counts more tokens than before."""
        has_grown = False
        for source in _RUNNING_TOTALS:
            n = n_tokens[source]
            if n is not None and n > self._totals[source]:
                self._totals[source] = n
                has_grown = True
        return has_grown

    def _keep_reason(self, reason: object) -> bool:
        """Keep a reason of the end; returns whether there is one. Some servers send an empty one
        with every event."""
        if isinstance(reason, str) and reason:
            word = reason.lower()
            self._reason = word if word in REASONS else OTHER_REASON
        return bool(reason)

    def _check_end(self, rows: Sequence[EventRow], usage: Usage | None) -> None:
        """Note a stream that ended before its answer did, or has none of its tokens."""
        has_content = any(row.kind in kinds.GENERATED for row in rows)
        n_generated = (usage.completion_tokens if usage else None) or 0
        n_hidden = (usage.reasoning_tokens if usage else None) or 0
        if not has_content and self._is_whole_message:
            self._fail(kinds.NO_STREAM, "the answer is one whole message, not a stream")
        elif self._reason in BROKEN_OFF:
            reason = f"the server broke it off (finish reason {self._reason})"
            self._fail(kinds.ERROR_INSIDE, reason)
        elif self._reason is None and not self._is_done:
            self._fail(
                kinds.CUT_OFF,
                "the connection ended before the answer was complete: "
                "it has no finish_reason and no [DONE]",
            )
        elif self._reason is None and not self._usage and has_content:
            self._fail(
                kinds.CUT_OFF,
                "[DONE] came before the answer was complete: "
                "it has no finish_reason and no token count",
            )
        elif not has_content and n_generated - n_hidden > MOST_WITHOUT_TEXT:
            self._fail(
                kinds.NO_CONTENT,
                f"the server counts {n_generated:,} generated tokens, and none of them arrived",
            )


def with_hidden_tokens(rows: Sequence[EventRow]) -> list[EventRow]:
    """The events without tokens that the server counts after the last text: when they were
    generated is not known."""
    last = max((i for i, row in enumerate(rows) if row.kind in kinds.VISIBLE), default=-1)
    kept = list(rows)
    for index in range(last + 1, len(rows)):
        if rows[index].kind == kinds.HIDDEN:
            kept[index] = replace(rows[index], kind=kinds.OTHER)
    return kept


def usage_in(fields: Mapping[str, object]) -> dict[str, object]:
    """The token counts of a chunk: its own, or those in an object within it or in its choice."""
    choice = next(iter(as_list(fields.get("choices"))), None)
    for part in (fields, *fields.values(), choice):
        usage = as_dict(as_dict(part).get("usage"))
        if usage:
            return usage
    return {}


def merged_usage(before: dict[str, object], now: dict[str, object]) -> dict[str, object]:
    """The counts of two chunks: some servers leave out, or write as 0, what they have said."""
    parts = {name: value for name, value in now.items() if isinstance(value, dict)}
    details = {name: _known(as_dict(before.get(name)), parts[name]) for name in parts}
    return _known(before, {**now, **details})


def _known(before: dict[str, object], now: dict[str, object]) -> dict[str, object]:
    return before | {name: value for name, value in now.items() if value or name not in before}


def usage_of(
    usage: dict[str, object], timings: dict[str, object], event_kinds: set[str]
) -> Usage | None:
    """The token counts of an answer, from the fields of different servers.

    Reasoning that was streamed and not counted is added to the tokens of the answer.
    """
    counts = {name: as_count(value) for name, value in named_counts(usage).items()}
    n_reused = as_count(timings.get("cache_n"))
    n_computed = as_count(timings.get("prompt_n"))
    n_cached = first_known([counts["cached_tokens"], n_reused])
    n_prompt = counts["prompt_tokens"]
    if n_prompt is None and n_reused is not None and n_computed is not None:
        n_prompt = n_reused + n_computed
    n_timed = as_count(timings.get("predicted_n"))
    n_generated = first_known([counts["completion_tokens"], n_timed])
    n_reasoning = counts["reasoning_tokens"]
    if n_generated is not None and n_reasoning and kinds.REASONING in event_kinds:
        n_without = (n_prompt or 0) + n_generated
        total = as_count(usage.get("total_tokens"))
        if n_reasoning > n_generated or total == n_without + n_reasoning:
            n_generated += n_reasoning
    answer = Usage(
        prompt_tokens=n_prompt,
        completion_tokens=n_generated,
        cached_tokens=n_cached,
        reasoning_tokens=n_reasoning,
    )
    return None if answer == Usage() else answer


def named_counts(usage: dict[str, object]) -> dict[str, object]:
    """The values of a server's usage by the names of Usage, from the names of all interfaces; None
    where there is none."""
    of_prompt = as_dict(
        usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    )
    of_answer = as_dict(
        usage.get("completion_tokens_details") or usage.get("output_tokens_details")
    )
    names = ("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
    cached = (of_prompt.get("cached_tokens"), *map(usage.get, names))
    return {
        "prompt_tokens": first_known(map(usage.get, ("prompt_tokens", "input_tokens"))),
        "completion_tokens": first_known(
            map(usage.get, ("completion_tokens", "output_tokens"))
        ),
        "cached_tokens": first_known(cached),
        "reasoning_tokens": first_known(
            (of_answer.get("reasoning_tokens"), usage.get("reasoning_tokens"))
        ),
    }


def wrong_counts(usage: dict[str, object]) -> dict[str, float]:
    """The numbers in a server's usage that count nothing: less than 0, or broken."""
    wrong = {}
    for name, value in named_counts(usage).items():
        number = as_number(value)
        if number is not None and as_count(value) is None:
            wrong[name] = number
    return wrong


def timings_of(timings: dict[str, object]) -> ServerTimings | None:
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
    """Tokens per event by this source. Those that were counted since the last event with content
    came with the next one; after the last one they stay where they were counted."""
    column = [0] * len(rows)
    total = 0
    since_content: list[int] = []
    for index, row in enumerate(rows):
        n = row.n_tokens.get(source)
        if n is not None:
            column[index] = n - total
            total = n if source in _RUNNING_TOTALS else 0
        if row.kind in kinds.GENERATED:
            column[index] += sum(column[earlier] for earlier in since_content)
            for earlier in since_content:
                column[earlier] = 0
            since_content = []
        else:
            since_content.append(index)
    return column
