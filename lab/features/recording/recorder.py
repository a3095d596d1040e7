"""From what passed through the proxy to lines: in a thread of its own, so that streams do not wait
for it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import queue
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.core import results
from lab.core.record import Machine
from lab.core.request import ERROR_INSIDE, short_name
from lab.errors import LabError, printable
from lab.features.recording.answers import Answer, read_answer
from lab.features.recording.causes import Finding, ServerState, find_cause
from lab.features.recording.conversations import CallHistory, Conversations, Prompt
from lab.features.recording.lines import BlockColumns, RecordedCall
from lab.features.recording.prompts import Blocks, blocks_of
from lab.features.recording.proxy import PassedCall
from lab.features.recording.server_side import ServerQuestions, Slot
from lab.remote.access import Access
from lab.remote.formats import as_dict

N_HASHED = 16  # hexadecimal digits of a hash
OK = 200
NOT_FOUND = 404
MOST_DEPTH = 200  # of a body; what reads results files ends at some hundreds of levels
MOST_SHOWN = 80  # characters of a stranger's text

Show = Callable[[RecordedCall], None]


@dataclass(frozen=True)
class RecordingSetup:
    """What all lines of a recording share, and what the user asked for."""

    path: Path
    machine: Machine
    access: Access
    keeps_text: bool
    show: Show
    command: tuple[str, ...] | None = None
    log: Path | None = None  # of the server


@dataclass(frozen=True)
class SeenCall:
    """A call, and the server's slots when it had ended."""

    exchange: PassedCall
    slots: Sequence[Slot]


class CallRecorder:
    """Takes exchanges, and makes a line of each: `calls`, with excerpts of changed texts, which are
    saved only if prompts are."""

    def __init__(self, recording: RecordingSetup) -> None:
        self.recording = recording
        self.calls: list[RecordedCall] = []
        self.problem: LabError | None = None
        self._conversations = Conversations()
        self._began_ns = time.perf_counter_ns()
        self._secret = secrets.token_bytes(32)
        self._ends: dict[int, int] = {}  # of each slot's latest call
        self._server = ServerQuestions(recording.access, recording.log)
        self._ended: queue.SimpleQueue[PassedCall | None] = queue.SimpleQueue()
        self._seen: queue.SimpleQueue[SeenCall | None] = queue.SimpleQueue()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> CallRecorder:
        self._watching.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.put(None)
        self._watching.join()
        self._thread.join()
        self._server.close()

    def keep(self, exchange: PassedCall) -> None:
        """Record an exchange soon; returns at once."""
        self._ended.put(exchange)

    def _watch(self) -> None:
        """Look at the server's slots as soon as a call has ended: the next call may change them
        before this one is recorded."""
        exchange = self._ended.get()
        while exchange is not None:
            slots: Sequence[Slot] = ()
            with self._going_on():
                slots = self._server.slots()
            self._seen.put(SeenCall(exchange, slots))
            exchange = self._ended.get()
        self._seen.put(None)

    def _run(self) -> None:
        seen = self._seen.get()
        while seen is not None:
            with self._going_on():
                self._record(seen.exchange, seen.slots)
            seen = self._seen.get()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Keep what fails as `problem`. Requests and answers are strangers' text: a call that the
        lab does not understand must not end the thread that reads all later ones."""
        try:
            yield
        except LabError as problem:
            self.problem = problem
        except Exception as problem:
            reason = printable(str(problem))[:MOST_SHOWN] or type(problem).__name__
            self.problem = LabError(
                f"A call could not be recorded: {reason}.", "All other calls are recorded."
            )

    def _record(self, exchange: PassedCall, slots: Sequence[Slot]) -> None:
        body = body_of(exchange)
        if depth(body) > MOST_DEPTH:
            raise ValueError(f"its body has more than {MOST_DEPTH} levels")
        blocks = blocks_of(body)
        if not blocks:
            return
        answer = read_answer(exchange.pieces(), exchange.encoding, exchange.content_type)
        self._server.look_at(exchange, answer)
        conversation = self._conversations.of(blocks)
        prompt = self._prompt(exchange, body, blocks, answer, slots)
        finding = Finding()
        if conversation.prompts and exchange.status == OK and answer.error is None:
            state = self._state(conversation, exchange)
            count = self._server.count
            finding = find_cause(prompt, answer.n_cached, conversation, state, count)
        call = self._line(exchange, body, prompt, answer, conversation, finding)
        self._remember(conversation, prompt, exchange, answer)
        self.calls.append(call)
        self._save(call)
        self.recording.show(call)

    def _prompt(
        self,
        exchange: PassedCall,
        body: dict[str, Any],
        blocks: Blocks,
        answer: Answer,
        slots: Sequence[Slot],
    ) -> Prompt:
        prompt = Prompt(
            call=len(self.calls) + 1,
            blocks=blocks,
            n_prompt=answer.n_prompt,
            n_gen=answer.n_gen,
            served=self._server.served(answer, slots) if exchange.status == OK else None,
            asks_for_cache=body.get("cache_prompt") is not False,
        )
        if exchange.status != OK:
            return prompt
        rendered = self._server.rendered(body)
        if rendered is None:
            return prompt
        tokens = self._server.tokens(rendered)
        if answer.n_prompt is not None and len(tokens) != answer.n_prompt:
            return prompt  # the server made something else of this request
        return replace(prompt, rendered=rendered, tokens=tokens)

    def _state(self, conversation: CallHistory, exchange: PassedCall) -> ServerState:
        """What the server has been asked since the conversation's latest call."""
        latest: Prompt | None = None
        number = None
        for candidate in self._conversations.conversations:
            if candidate is conversation or not candidate.prompts:
                continue
            if not may_share_slot(candidate.latest, conversation.latest):
                continue
            if latest is None or candidate.latest.call > latest.call:
                latest = candidate.latest
                number = candidate.number
        busy = {slot for slot, ended in self._ends.items() if ended > exchange.received_ns}
        return ServerState(
            n_ctx=self._server.n_ctx,
            n_slots=self._server.n_slots,
            latest_other=latest,
            other_number=number,
            was_refused=conversation.was_refused,
            held=self._server.held,
            busy=busy,
            changed=self._server.changed,
        )

    def _remember(
        self,
        conversation: CallHistory,
        prompt: Prompt,
        exchange: PassedCall,
        answer: Answer,
    ) -> None:
        """Remember a prompt that the server has read; of a refused one, that it was refused."""
        conversation.was_refused = answer.is_context_full
        if prompt.served is not None and prompt.served.slot is not None:
            self._ends[prompt.served.slot] = exchange.ended_ns
        if was_read(exchange, answer):
            conversation.add(prompt)
            self._conversations.forget_oldest()

    def _line(
        self,
        exchange: PassedCall,
        body: dict[str, Any],
        prompt: Prompt,
        answer: Answer,
        conversation: CallHistory,
        finding: Finding,
    ) -> RecordedCall:
        timings = answer.timings
        return RecordedCall(
            session=self.recording.path.stem,
            machine=self.recording.machine,
            endpoint=self._server.endpoint(exchange),
            model=short_name(printable(str(body.get("model") or answer.model or "a model"))),
            started_at=exchange.started_at,
            call=prompt.call,
            conversation=conversation.number,
            turn=conversation.n_turns,
            http_status=exchange.status,
            failure=failure_of(exchange, answer),
            unread=None if answer.is_readable else exchange.encoding[:20],
            begin_ns=max(0, exchange.received_ns - self._began_ns),
            ttft_ns=ttft_of(exchange, answer),
            ended_ns=exchange.ended_ns - exchange.received_ns,
            n_prompt=answer.n_prompt,
            n_cached=answer.n_cached,
            n_gen=answer.n_gen,
            prefill_ns=nanoseconds(timings.prompt_ms if timings else None),
            decode_ns=nanoseconds(timings.gen_ms if timings else None),
            follows=finding.follows,
            n_new=finding.n_new,
            is_exact=finding.is_exact,
            slot=prompt.served.slot if prompt.served else None,
            cause=finding.cause,
            blocks=self._columns(prompt.blocks),
            body=body if self.recording.keeps_text else None,
            command=self.recording.command,
        )

    def _columns(self, blocks: Blocks) -> BlockColumns:
        hashes = []
        for block in blocks:
            text = block.text.encode(errors="replace")
            digest = hashlib.blake2b(text, key=self._secret, digest_size=N_HASHED // 2)
            hashes.append(digest.hexdigest())
        return BlockColumns(
            part=tuple(block.kind for block in blocks),
            role=tuple(block.role for block in blocks),
            n_characters=tuple(len(block.text) for block in blocks),
            hashed=tuple(hashes),
        )

    def _save(self, call: RecordedCall) -> None:
        results.save(
            self.recording.path, call if self.recording.keeps_text else without_text(call)
        )


def may_share_slot(first: Prompt, second: Prompt) -> bool:
    """Whether a server may have served both in one slot."""
    if first.served is None or second.served is None:
        return True
    return first.served.slot == second.served.slot or None in (
        first.served.slot,
        second.served.slot,
    )


def without_text(call: RecordedCall) -> RecordedCall:
    """A call without the excerpt of a changed text."""
    if call.cause is None:
        return call
    return replace(call, cause=replace(call.cause, excerpt=""))


def body_of(exchange: PassedCall) -> dict[str, Any]:
    """The JSON object of a request; empty for anything else."""
    data = bytes(exchange.request)
    with suppress(OSError, EOFError, zlib.error, ValueError, RecursionError):
        if exchange.request_encoding == "gzip":
            data = gzip.decompress(data)
        return as_dict(
            json.loads(data, parse_float=finite_number, parse_constant=finite_number)
        )
    return {}


def depth(value: Any) -> int:
    """The levels of lists and objects in a JSON value."""
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0)
    return 0


def finite_number(text: str) -> float | None:
    """A number; None for NaN, Infinity and 1e999, which no JSON can hold. JavaScript writes null
    for them too."""
    number = float(text)
    return number if math.isfinite(number) else None


def was_read(exchange: PassedCall, answer: Answer) -> bool:
    """Whether the server has read the prompt of a call, as far as its answer shows."""
    has_begun = answer.first_ns is not None or answer.n_prompt is not None
    return exchange.status == OK and (answer.error is None or has_begun)


def failure_of(exchange: PassedCall, answer: Answer) -> str | None:
    if exchange.failure is not None:
        return exchange.failure
    if exchange.status == NOT_FOUND:
        path = printable(exchange.path.partition("?")[0])[:MOST_SHOWN]
        return f"HTTP 404: the server has no {path}"
    if exchange.status != OK:
        reason = f": {answer.error}" if answer.error else ""
        return f"HTTP {exchange.status}{reason}"
    if answer.error is not None:
        return f"{ERROR_INSIDE}: {answer.error}"
    return None


def ttft_of(exchange: PassedCall, answer: Answer) -> int | None:
    """When the first generated content came; None for an answer that was not streamed."""
    return None if answer.first_ns is None else answer.first_ns - exchange.received_ns


def nanoseconds(ms: float | None) -> int | None:
    return None if ms is None else round(ms * 1e6)
