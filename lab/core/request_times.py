"""Derive TTFT, TPOT and gaps from the events of a request; a figure that cannot be derived is None.

t_first is the first event with generated content (text, reasoning, a tool call), t_out the first that is not reasoning,
t_last the last one with generated content. n is the number of completion tokens, k1 those in the first event.

An event is not a token: it may contain several, and a server may hold one back. So gaps between tokens (ITL) exist only
if the server says how many tokens each event has. If the whole answer arrived at once, only E2E is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from lab.core.record import OK
from lab.core.request import GENERATED, REASONING, Asked, Request, ServerTimings

AT_ONCE_EVENTS = 10
AT_ONCE_NS = 100_000
"""An answer came at once if it has at least AT_ONCE_EVENTS events, on average less than AT_ONCE_NS apart: no model
generates 10,000 tokens per second for one request. Fewer events may arrive together by chance."""

JOINED = 0.9  # the server's tokenizer may join tokens of an answer, and then counts fewer than were generated

KEPT = (
    "asked",
    "status",
    "failure",
    "error",
    "started_at",
    "finish_reason",
    "sent_ns",
    "timings",
)
"""What figures keep of a request."""


def generated(request: Request) -> list[int]:
    """The indices of the events with generated content."""
    return [i for i, kind in enumerate(request.events.kind) if kind in GENERATED]


def n_generated(request: Request) -> int | None:
    """Completion tokens, with reasoning."""
    return request.usage.completion_tokens if request.usage else None


def came_at_once(request: Request) -> bool:
    """Whether the whole answer arrived at once, because a server or proxy buffered it."""
    at = [request.events.arrive_ns[i] for i in generated(request)]
    return len(at) >= AT_ONCE_EVENTS and at[-1] - at[0] < AT_ONCE_NS * (len(at) - 1)


def chunk_gaps_ns(request: Request) -> list[int]:
    """Inter-chunk latencies: from each event with generated content to the next. Empty if all came at once."""
    if came_at_once(request):
        return []
    return [b - a for a, b in pairwise(request.events.arrive_ns[i] for i in generated(request))]


def itl_ns(request: Request) -> list[int] | None:
    """The gap before each token except the first; 0 for tokens that came together. None if it cannot be known."""
    n_tokens = request.events.n_tokens
    if n_tokens is None or came_at_once(request):
        return None
    arrivals = [request.events.arrive_ns[i] for i in generated(request) for _ in range(n_tokens[i])]
    return [b - a for a, b in pairwise(arrivals)]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of a request without its events; None: not derivable.

    `sent_ns` counts from the start of its plan, all others from its sending.
    """

    asked: Asked
    status: str
    failure: str | None
    error: str | None
    started_at: str
    finish_reason: str | None
    sent_ns: int | None
    ended_ns: int | None
    ttft_ns: int | None
    first_output_ns: int | None  # t_out - its sending
    e2e_ns: int | None
    tpot_ns: float | None  # (t_last - t_first) / (n - k1)
    tpot_bounds_ns: (
        tuple[float, float] | None
    )  # equal if k1 is known, which otherwise is 1 to n - (later events)
    longest_stall_ns: int | None
    is_truncated: bool  # ended by a limit of the server before it had all requested tokens
    n_events: int  # with generated content
    n_generated: int | None
    n_prompt: int | None  # counted by the server
    n_cached: int | None
    came_at_once: bool  # only e2e_ns is known then
    timings: ServerTimings | None

    @property
    def is_warm(self) -> bool | None:
        """Whether a part of the prompt came from a cache; None if the server does not say."""
        return None if self.n_cached is None else self.n_cached > 0

    @property
    def is_short(self) -> bool | None:
        """Whether the answer has fewer tokens than requested; None if they are not counted."""
        return None if self.n_generated is None else self.n_generated < self.asked.n_gen


def figures(request: Request) -> Figures:
    usage = request.usage
    asked = request.asked
    events = request.events
    indices = generated(request)
    n = n_generated(request)
    at_once = came_at_once(request)
    n_events = len(indices)
    at = [events.arrive_ns[i] for i in indices]
    output = [events.arrive_ns[i] for i in indices if events.kind[i] != REASONING]
    n_first = 1 if n == n_events else None  # k1, if the server does not say
    if at and events.n_tokens:
        n_first = events.n_tokens[indices[0]]
    tpot_ns = bounds_ns = None
    if n is not None and n_events > 1 and not at_once:
        decode_ns = at[-1] - at[0]
        if n_first is not None and n > n_first:
            tpot_ns = decode_ns / (n - n_first)
            bounds_ns = tpot_ns, tpot_ns
        elif n >= n_events:
            bounds_ns = decode_ns / (n - 1), decode_ns / (n_events - 1)
    is_truncated = False
    if n is not None and usage is not None:
        is_joined = usage.counted_by == "tokenize"
        n_least, n_known = (
            (JOINED * asked.n_gen, max(n, n_events)) if is_joined else (asked.n_gen, n)
        )
        is_truncated = (request.status, request.finish_reason) == (
            OK,
            "length",
        ) and n_known < n_least
    return Figures(
        **{name: getattr(request, name) for name in KEPT},
        ended_ns=request.ended_ns if request.failed_ns is None else request.failed_ns,
        ttft_ns=at[0] if at and not at_once else None,
        first_output_ns=output[0] if output and not at_once else None,
        e2e_ns=at[-1] if at else None,
        tpot_ns=tpot_ns,
        tpot_bounds_ns=bounds_ns,
        longest_stall_ns=max(chunk_gaps_ns(request), default=None),
        is_truncated=is_truncated,
        n_events=n_events,
        n_generated=n,
        n_prompt=usage.prompt_tokens if usage else None,
        n_cached=usage.cached_tokens if usage else None,
        came_at_once=at_once,
    )
