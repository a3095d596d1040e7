"""From calls that passed through the proxy to lines, in threads of their own, so that streams do
not wait for them.
"""

from __future__ import annotations

import hashlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lab.core import results
from lab.core.record import Machine
from lab.core.request import short_name
from lab.errors import LabError, printable
from lab.features.recording.causes import Finding, ServerState, find_cause
from lab.features.recording.conversations import Conversations, Prompt, RecordedConversation
from lab.features.recording.lines import BlockColumns, RecordedCall
from lab.features.recording.parsed_calls import MOST_SHOWN, ParsedCall, parsed
from lab.features.recording.prompts import Blocks
from lab.features.recording.proxy import ProxiedCall
from lab.features.recording.server_side import ServerQuestions, Slot
from lab.remote.access import Access

N_HASHED = 16  # hexadecimal digits of a hash

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
class CallWithSlots:
    """A call, and the server's slots when it had ended."""

    call: ProxiedCall
    slots: Sequence[Slot]


class CallRecorder:
    """Takes calls that passed through the proxy, and makes a line of each: `calls`, with excerpts
    of changed texts, which are saved only if prompts are."""

    def __init__(self, recording: RecordingSetup) -> None:
        self.recording = recording
        self.calls: list[RecordedCall] = []
        self.problem: LabError | None = None
        self._conversations = Conversations()
        self._began_ns = time.perf_counter_ns()
        self._secret = secrets.token_bytes(32)
        self._ends: dict[int, int] = {}  # of each slot's latest call
        self._server = ServerQuestions(recording.access, recording.log)
        self._ended: queue.SimpleQueue[ProxiedCall | None] = queue.SimpleQueue()
        self._to_record: queue.SimpleQueue[CallWithSlots | None] = queue.SimpleQueue()
        self._slot_thread = threading.Thread(target=self._add_slots, daemon=True)
        self._record_thread = threading.Thread(target=self._record_all, daemon=True)

    def __enter__(self) -> CallRecorder:
        self._slot_thread.start()
        self._record_thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.put(None)
        self._slot_thread.join()
        self._record_thread.join()
        self._server.close()

    def keep(self, call: ProxiedCall) -> None:
        """Record a call soon; returns at once."""
        self._ended.put(call)

    def _add_slots(self) -> None:
        """Look at the server's slots as soon as a call has ended: the next call may change them
        before this one is recorded."""
        call = self._ended.get()
        while call is not None:
            slots: Sequence[Slot] = ()
            with self._going_on():
                slots = self._server.slots()
            self._to_record.put(CallWithSlots(call, slots))
            call = self._ended.get()
        self._to_record.put(None)

    def _record_all(self) -> None:
        ended = self._to_record.get()
        while ended is not None:
            with self._going_on():
                self._record(ended.call, ended.slots)
            ended = self._to_record.get()

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

    def _record(self, proxied: ProxiedCall, slots: Sequence[Slot]) -> None:
        call = parsed(proxied)
        if call is None:
            return
        self._server.look_at(proxied, call.answer)
        conversation = self._conversations.of(call.blocks)
        prompt = self._prompt(call, slots)
        finding = self._finding(call, prompt, conversation)
        line = self._line(call, prompt, conversation, finding)
        self._remember(call, prompt, conversation)
        self.calls.append(line)
        self._save(line)
        self.recording.show(line)

    def _prompt(self, call: ParsedCall, slots: Sequence[Slot]) -> Prompt:
        answer = call.answer
        prompt = Prompt(
            call=len(self.calls) + 1,
            blocks=call.blocks,
            n_prompt=answer.n_prompt,
            n_gen=answer.n_gen,
            served=self._server.served(answer, slots) if call.proxied.is_accepted else None,
            asks_for_cache=call.body.get("cache_prompt") is not False,
        )
        if not call.proxied.is_accepted:
            return prompt
        rendered = self._server.rendered(call.body)
        if rendered is None:
            return prompt
        tokens = self._server.tokens(rendered)
        if answer.n_prompt is not None and len(tokens) != answer.n_prompt:
            return prompt  # the server made something else of this request
        return replace(prompt, rendered=rendered, tokens=tokens)

    def _finding(
        self, call: ParsedCall, prompt: Prompt, conversation: RecordedConversation
    ) -> Finding:
        """What broke the cache; nothing for a conversation's first call, and for a failed one."""
        if (
            not conversation.prompts
            or not call.proxied.is_accepted
            or call.answer.error is not None
        ):
            return Finding()
        state = self._state(call, conversation)
        n_cached = call.answer.n_cached
        return find_cause(prompt, n_cached, conversation, state, self._server.count)

    def _state(self, call: ParsedCall, conversation: RecordedConversation) -> ServerState:
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
        received_ns = call.proxied.received_ns
        busy = {slot for slot, ended_ns in self._ends.items() if ended_ns > received_ns}
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
        self, call: ParsedCall, prompt: Prompt, conversation: RecordedConversation
    ) -> None:
        """Remember a prompt that the server has read; of a refused one, that it was refused."""
        conversation.was_refused = call.answer.is_context_full
        if prompt.served is not None and prompt.served.slot is not None:
            self._ends[prompt.served.slot] = call.proxied.ended_ns
        if call.was_read:
            conversation.add(prompt)
            self._conversations.forget_oldest()

    def _line(
        self,
        call: ParsedCall,
        prompt: Prompt,
        conversation: RecordedConversation,
        finding: Finding,
    ) -> RecordedCall:
        proxied = call.proxied
        answer = call.answer
        timings = answer.timings
        model = str(call.body.get("model") or answer.model or "a model")
        return RecordedCall(
            session=self.recording.path.stem,
            machine=self.recording.machine,
            endpoint=self._server.endpoint(proxied),
            model=short_name(printable(model)),
            started_at=proxied.started_at,
            call=prompt.call,
            conversation=conversation.number,
            turn=conversation.n_turns,
            http_status=proxied.status,
            failure=call.failure,
            unread=None if answer.is_readable else proxied.encoding[:20],
            begin_ns=max(0, proxied.received_ns - self._began_ns),
            ttft_ns=call.ttft_ns,
            ended_ns=proxied.ended_ns - proxied.received_ns,
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
            blocks=self._columns(call.blocks),
            body=call.body if self.recording.keeps_text else None,
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

    def _save(self, line: RecordedCall) -> None:
        saved = line if self.recording.keeps_text else without_text(line)
        results.save(self.recording.path, saved)


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


def nanoseconds(ms: float | None) -> int | None:
    return None if ms is None else round(ms * 1e6)
