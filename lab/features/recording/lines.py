"""A recorded request: a line of a results file. It holds lengths, hashes and times, and no text
unless the user asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from lab.core.bounds import Count, Nanoseconds, Number, Text, Whole
from lab.core.lines import KEPT_AS_SENT
from lab.core.record import SCHEMA, Machine
from lab.core.request import Endpoint
from lab.features.recording import breaks

CLIENT = "client"
TEMPLATE = "template"
SERVER = "server"
CAUSED_BY = (CLIENT, TEMPLATE, SERVER)
SPARE = 1.05
SPARE_NS = 5_000_000
"""By how much a server's time may exceed the client's: clocks and buffers differ."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """What broke the cache, and the first place of the prompt that differs from the earlier one."""

    kind: Text
    by: Text
    part: Text | None = None  # message, tool, prompt, option; None: the prompt did not differ
    index: Whole | None = None  # of the part among its kind, from 0
    role: Text = ""  # of a message
    text_field: Text = ""  # of a message: content, reasoning, tool calls
    character: Whole | None = None  # of that text, from 0
    what: Text = ""  # such as "a time of day"
    conversation: Whole | None = None  # that used the cache in between
    slot: Whole | None = None  # of the server, that served the call
    held_by: Whole | None = None  # the slot with the earlier prompt
    similarity: Number | None = None  # of both prompts, as a share of the new one
    excerpt: Text = ""  # kept only with the prompts

    def __post_init__(self) -> None:
        if self.kind not in breaks.KINDS or self.by not in CAUSED_BY:
            raise ValueError("a recorded cause is of a kind that this version does not know")


@dataclass(frozen=True)
class BlockColumns:
    """The blocks of a prompt as columns: what each is, its characters, and a hash of its text with
    a secret of the session."""

    part: tuple[Text, ...] = ()
    role: tuple[Text, ...] = ()
    n_characters: tuple[Count, ...] = ()
    hashed: tuple[Text, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """A request with a prompt, and its answer. None: not known."""

    session: Text
    machine: Machine  # of the client
    endpoint: Endpoint
    model: Text  # as the server calls it
    started_at: Text
    call: Whole  # from 1, in the order in which answers ended
    conversation: Whole  # from 1
    turn: Whole  # from 1
    http_status: Whole | None = None
    failure: Text | None = None
    unread: Text | None = None  # the compression of an answer that could not be read
    begin_ns: Nanoseconds  # since the recording began
    ttft_ns: Nanoseconds | None = None  # None: the answer was not streamed
    ended_ns: Nanoseconds  # since the request came
    n_prompt: Count | None = None
    n_cached: Count | None = None
    n_gen: Count | None = None
    prefill_ns: Nanoseconds | None = None  # by the server
    decode_ns: Nanoseconds | None = None  # by the server
    follows: Whole | None = None  # the call that this prompt goes on from
    n_new: Count | None = None  # tokens that no cache could have had
    is_exact: bool = False  # compared as tokens
    slot: Whole | None = None  # of a llama-server
    cause: Cause | None = None
    blocks: BlockColumns = BlockColumns()
    body: Any = field(default=None, metadata={KEPT_AS_SENT: True})
    command: tuple[Text, ...] | None = None
    schema: Whole = SCHEMA
    kind: Text = "recorded"
    is_warmup: ClassVar[bool] = False

    @property
    def is_good(self) -> bool:
        return self.failure is None

    @property
    def has_impossible_times(self) -> bool:
        """Whether the server's times are longer than what they are a part of."""
        prefill_ns = self.prefill_ns or 0
        decode_ns = self.decode_ns or 0
        is_longer = prefill_ns + decode_ns > SPARE * self.ended_ns + SPARE_NS
        is_later = self.ttft_ns is not None and prefill_ns > SPARE * self.ttft_ns + SPARE_NS
        return is_longer or is_later

    @property
    def model_name(self) -> str:
        return self.model
