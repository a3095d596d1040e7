"""What crosses between the lab and the client's process: a plan of requests, and each request as it went."""

from __future__ import annotations

import dataclasses
import random
import string
from dataclasses import dataclass

from lab.core.request import Asked, Request

MOST_AT_ONCE = 900
"""Requests in flight: select() knows no more than 1,024 files."""

SEPARATOR = "\t"
"""Between the number, the request and the text of a reply, which are one line: only a whole line is a reply."""

TIMEOUT_S = 600.0
STALL_S = 60.0
MOST_LINE_BYTES = 10_000_000
"""Bytes without the end of a line after which a stream counts as broken."""

MOST_ANSWER_BYTES = 64_000_000
"""Bytes of one answer that are kept."""


def fresh_nonce(rng: random.Random) -> str:
    """Eight letters: in nearly all vocabularies a token each, so as many tokens whichever they are."""
    return " ".join(rng.choice(string.ascii_letters) for _ in range(8))


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request to send: the JSON text of its body.

    `nonce` is how the prompt in it begins; where it is given, each sending gets another one (`fresh_nonce`), so that no
    cache knows the prompt though an ask is sent several times.
    """

    asked: Asked
    body: str
    nonce: str | None = None

    def of_length(self, n_gen: int) -> Ask:
        """The same request for an answer of another length."""
        old, new = (f'_tokens": {n},' for n in (self.asked.n_gen, n_gen))  # no text of JSON has a quote that is bare
        return dataclasses.replace(
            self, asked=dataclasses.replace(self.asked, n_gen=n_gen), body=self.body.replace(old, new, 1)
        )


@dataclass(frozen=True, kw_only=True)
class SendPlan:
    """What to send: `n_requests` requests (None: one for each time, else for each ask), round and round of the asks.

    With an `order` it is round and round of that: which ask, and how many tokens its answer is to have.

    Without `times_ns` they are sent one after the other by `n_at_once` users. With it each is sent at its time, counted
    from the start of the plan, with at most `n_at_once` in flight. A request that is due after `stop_s` is sent only
    while one that was due before is in flight: so those end under the load under which they began. After `most_lost`
    requests in a row that got no connection, or lost it, no further one is sent.
    """

    asks: tuple[Ask, ...]
    api: str
    n_at_once: int = 1
    n_requests: int | None = None
    times_ns: tuple[int, ...] | None = None
    timeout_s: float = TIMEOUT_S  # for a whole request
    stall_s: float = STALL_S  # without a byte after the first one, or with nothing but pings after the first event
    stop_s: float | None = None
    order: tuple[tuple[int, int], ...] = ()
    most_lost: int | None = None
    path: str | None = None  # what is asked instead of the interface, such as /tokenize; its answer is not a stream

    def __post_init__(self) -> None:
        if not 1 <= self.n_at_once <= MOST_AT_ONCE:
            raise ValueError(f"{self.n_at_once} requests at once, not 1 to {MOST_AT_ONCE}")
        if self.times_ns is not None and self.n_all > len(self.times_ns):
            raise ValueError(f"{self.n_all} requests, and times for {len(self.times_ns)}")
        if self.times_ns is not None and list(self.times_ns) != sorted(self.times_ns):
            raise ValueError("the times of a plan are not in order")

    @property
    def n_all(self) -> int:
        """Requests that are sent at most."""
        if self.n_requests is not None:
            return self.n_requests
        return len(self.asks if self.times_ns is None else self.times_ns)

    def ask(self, number: int) -> Ask:
        """What to send as request `number`."""
        if not self.order:
            return self.asks[number % len(self.asks)]
        index, n_gen = self.order[number % len(self.order)]
        return self.asks[index].of_length(n_gen)


@dataclass(frozen=True)
class Reply:
    """How a request of a plan went, and what it generated (reasoning included)."""

    index: int
    request: Request
    text: str
