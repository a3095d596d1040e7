"""The data that the lab and the client's process exchange: a plan of requests, and each reply."""

from __future__ import annotations

import dataclasses
import random
import string
from dataclasses import dataclass

from lab.core.request import Asked, Request

MOST_AT_ONCE = 900
"""Maximum requests in flight: select() supports at most 1,024 files."""

SEPARATOR = "\t"
"""Separates the number, the request and the text of a reply in its line."""

TIMEOUT_S = 600.0
STALL_S = 60.0
MOST_LINE_BYTES = 1_000_000
"""Maximum bytes of a line of a stream. Its JSON takes up to 30 times the memory."""

MOST_ANSWER_BYTES = 64_000_000
"""Maximum bytes of all answers in flight together."""

LINES_PER_TOKEN, SPARE_LINES = 20, 20_000
"""Maximum ends of lines in a stream for each requested token, and the spare ones: for pings during a long prefill."""

PIECE_BYTES = 300
"""What the parts of an answer that arrived together take in memory, besides their bytes."""


def fresh_nonce(rng: random.Random) -> str:
    """Eight random letters; in nearly all vocabularies each is one token."""
    return " ".join(rng.choice(string.ascii_letters) for _ in range(8))


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request to send, with the JSON text of its body.

    If `nonce`, the beginning of the prompt, is given, each sending gets another one, so that no cache contains it.
    """

    asked: Asked
    body: str
    nonce: str | None = None

    def of_length(self, n_gen: int) -> Ask:
        """The same request for an answer of another length."""
        old, new = (f'_tokens": {n},' for n in (self.asked.n_gen, n_gen))  # unique: JSON escapes quotes in texts
        return dataclasses.replace(
            self, asked=dataclasses.replace(self.asked, n_gen=n_gen), body=self.body.replace(old, new, 1)
        )


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
    stall_s: float = STALL_S  # without a byte after the first one, or with only pings after the first event
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
