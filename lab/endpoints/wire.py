"""What crosses between the lab and the client's process: a plan of requests, and each request as it went."""

from __future__ import annotations

from dataclasses import dataclass

from lab.core.request import Asked, Request

MOST_AT_ONCE = 900
"""Requests in flight: select() knows no more than 1,024 files."""

TIMEOUT_S = 600.0
STALL_S = 60.0
MOST_LINE_BYTES = 10_000_000
"""Bytes without the end of a line after which a stream is none."""

MOST_ANSWER_BYTES = 64_000_000
"""Bytes of one answer that are kept."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request to send: the JSON text of its body, and when, counted from the start of the plan (None: at once)."""

    asked: Asked
    body: str
    scheduled_ns: int | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Requests in their order. Each is sent once.

    Those without a time are sent one after the other by `n_at_once` users. Those with a time are sent then, with
    at most `n_at_once` in flight. What is due after `stop_s` is not sent; what was due before goes on to its end.
    """

    asks: tuple[Ask, ...]
    api: str
    n_at_once: int = 1
    timeout_s: float = TIMEOUT_S  # for a whole request
    stall_s: float = STALL_S  # without a byte after the first one
    stop_s: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.n_at_once <= MOST_AT_ONCE:
            raise ValueError(f"{self.n_at_once} requests at once, not 1 to {MOST_AT_ONCE}")


@dataclass(frozen=True)
class Reply:
    """How a request of a plan went, and what it generated (reasoning included)."""

    index: int
    request: Request
    text: str
