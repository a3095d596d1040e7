"""Derive TTFT, TPOT and gaps from the events of a request; a figure that cannot be derived is None.

t_first is the first event with generated content (text, reasoning, a tool call), t_out the first that is not reasoning,
t_last the last one with generated content. n is the number of completion tokens, k1 those in the first event.

An event is not a token: it may contain several, and a server may hold one back. So gaps between tokens (ITL) exist only
if the server says how many tokens each event has. If the whole answer arrived at once, only E2E is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from lab.core.record import OK
from lab.core.request import GENERATED, REASONING, Asked, Request, ServerTimings, Slo

AT_ONCE_EVENTS, AT_ONCE_NS = 10, 100_000
"""An answer came at once if it has at least AT_ONCE_EVENTS events, on average less than AT_ONCE_NS apart: no model
generates 10,000 tokens per second for one request. Fewer events may arrive together by chance."""

JOINED = 0.9
"""The server's tokenizer may join tokens of an answer, so its count can be lower than that of the generated tokens."""


def generated(request: Request) -> list[int]:
    """The indices of the events with generated content."""
    return [i for i, kind in enumerate(request.events.kind) if kind in GENERATED]


def n_generated(request: Request) -> int | None:
    """Completion tokens, with reasoning."""
    return request.usage.completion_tokens if request.usage else None


def came_at_once(request: Request) -> bool:
    """Whether the whole answer arrived at once, because a server or proxy buffered it."""
    n = len(generated(request))
    return n >= AT_ONCE_EVENTS and _decode_ns(request) < AT_ONCE_NS * (n - 1)


def ttft_ns(request: Request) -> int | None:
    """t_first - the sending of the request. None if the answer came at once."""
    indices = generated(request)
    return request.events.arrive_ns[indices[0]] if indices and not came_at_once(request) else None


def first_output_ns(request: Request) -> int | None:
    """Time to first output: t_out - the sending of the request. None if the answer came at once."""
    if came_at_once(request):
        return None
    indices = (i for i in generated(request) if request.events.kind[i] != REASONING)
    return next((request.events.arrive_ns[i] for i in indices), None)


def e2e_ns(request: Request) -> int | None:
    """t_last - the sending of the request."""
    indices = generated(request)
    return request.events.arrive_ns[indices[-1]] if indices else None


def is_truncated(request: Request) -> bool:
    """Whether the answer ended by length (not by the model) with fewer tokens than requested: the context was full.

    False if the tokens are not counted.
    """
    n = n_generated(request)
    if n is None or request.usage is None or (request.status, request.finish_reason) != (OK, "length"):
        return False
    if request.usage.counted_by == "tokenize":
        return max(n, len(generated(request))) < JOINED * request.asked.n_gen
    return n < request.asked.n_gen


def dispatch_delay_ns(request: Request) -> int | None:
    """How much later than planned the request was sent. None in a closed loop."""
    if request.sent_ns is None or request.scheduled_ns is None:
        return None
    return request.sent_ns - request.scheduled_ns


def chunk_gaps_ns(request: Request) -> list[int]:
    """Inter-chunk latencies: from each event with generated content to the next. Empty if all came at once."""
    if came_at_once(request):
        return []
    return [b - a for a, b in pairwise(request.events.arrive_ns[i] for i in generated(request))]


def longest_stall_ns(request: Request) -> int | None:
    """The longest inter-chunk latency. None with fewer than two events."""
    return max(chunk_gaps_ns(request), default=None)


def itl_ns(request: Request) -> list[int] | None:
    """The gap before each token except the first; 0 for tokens that came together.

    None if the number of tokens in each event is unknown, or the answer came at once.
    """
    n_tokens = request.events.n_tokens
    if n_tokens is None or came_at_once(request):
        return None
    arrivals = [request.events.arrive_ns[i] for i in generated(request) for _ in range(n_tokens[i])]
    return [b - a for a, b in pairwise(arrivals)]


def n_first(request: Request) -> int | None:
    """k1: tokens in the first event with generated content.

    If the server does not say, k1 is 1 if there are as many such events as tokens, otherwise None.
    """
    indices = generated(request)
    if not indices:
        return None
    if request.events.n_tokens is not None:
        return request.events.n_tokens[indices[0]]
    return 1 if n_generated(request) == len(indices) else None


def tpot_ns(request: Request) -> float | None:
    """(t_last - t_first) / (n - k1). None if n or k1 is unknown, there is only one event, or all came at once."""
    indices, n, k1 = generated(request), n_generated(request), n_first(request)
    if n is None or k1 is None or len(indices) < 2 or n <= k1 or came_at_once(request):
        return None
    return _decode_ns(request) / (n - k1)


def tpot_bounds_ns(request: Request) -> tuple[float, float] | None:
    """The lower and upper bound of TPOT; equal if k1 is known, which otherwise is between 1 and n - (later events).

    None if n is unknown or smaller than the number of events, or all came at once.
    """
    indices, n = generated(request), n_generated(request)
    exact = tpot_ns(request)
    if exact is not None:
        return exact, exact
    if n is None or len(indices) < 2 or n < len(indices) or came_at_once(request):
        return None
    return _decode_ns(request) / (n - 1), _decode_ns(request) / (len(indices) - 1)


def _decode_ns(request: Request) -> int:
    indices = generated(request)
    return request.events.arrive_ns[indices[-1]] - request.events.arrive_ns[indices[0]]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of a request without its events, as tables and rates of many requests need them; None: not derivable.

    `sent_ns` and `scheduled_ns` count from the start of its plan, all others from its sending.
    """

    asked: Asked
    status: str
    failure: str | None
    error: str | None
    started_at: str
    finish_reason: str | None
    scheduled_ns: int | None
    sent_ns: int | None
    delay_ns: int | None  # how much later than planned it was sent; None in a closed loop
    ended_ns: int | None
    ttft_ns: int | None
    first_output_ns: int | None
    e2e_ns: int | None
    tpot_ns: float | None
    tpot_bounds_ns: tuple[float, float] | None
    longest_stall_ns: int | None
    is_truncated: bool  # ended by a limit of the server before it had all requested tokens
    n_events: int  # with generated content
    n_generated: int | None
    n_prompt: int | None  # counted by the server
    n_cached: int | None
    came_at_once: bool  # only e2e_ns is known then
    contradiction: str | None  # between the server's counts and the request, or the events
    timings: ServerTimings | None

    @property
    def is_warm(self) -> bool | None:
        """Whether a part of the prompt came from a cache; None if the server does not say."""
        return None if self.n_cached is None else self.n_cached > 0

    @property
    def is_short(self) -> bool | None:
        """Whether the answer has fewer tokens than requested; None if they are not counted."""
        return None if self.n_generated is None else self.n_generated < self.asked.n_gen

    @property
    def ttft_due_ns(self) -> int | None:
        """TTFT; in an open loop from the planned time, as a user would wait who arrived then."""
        return None if self.ttft_ns is None else self.ttft_ns + (self.delay_ns or 0)

    @property
    def e2e_due_ns(self) -> int | None:
        """E2E; in an open loop from the planned time."""
        return None if self.e2e_ns is None else self.e2e_ns + (self.delay_ns or 0)

    def used(self, slo: Slo) -> float:
        """The largest ratio of a figure to its limit; above 1 the request broke a limit.

        In an open loop TTFT and E2E count from the planned time. Infinite for failures, truncated answers and unknown
        figures. An inexact TPOT counts with its upper bound.
        """
        if self.status != OK or self.is_truncated:
            return math.inf
        tpot_ns = None if self.tpot_bounds_ns is None else self.tpot_bounds_ns[1]
        tpot_limit_s = None if self.n_generated == 1 else slo.tpot_s
        figures_ns = (slo.ttft_s, self.ttft_due_ns), (tpot_limit_s, tpot_ns), (slo.e2e_s, self.e2e_due_ns)
        return max(
            (math.inf if ns is None else ns / (limit * 1e9) for limit, ns in figures_ns if limit is not None),
            default=0.0,
        )

    def meets(self, slo: Slo) -> bool:
        """Whether the request got its whole answer within every limit."""
        return self.used(slo) <= 1


def figures(request: Request) -> Figures:
    usage = request.usage
    return Figures(
        asked=request.asked,
        status=request.status,
        failure=request.failure,
        error=request.error,
        started_at=request.started_at,
        finish_reason=request.finish_reason,
        scheduled_ns=request.scheduled_ns,
        sent_ns=request.sent_ns,
        delay_ns=dispatch_delay_ns(request),
        ended_ns=request.ended_ns if request.failed_ns is None else request.failed_ns,
        ttft_ns=ttft_ns(request),
        first_output_ns=first_output_ns(request),
        e2e_ns=e2e_ns(request),
        tpot_ns=tpot_ns(request),
        tpot_bounds_ns=tpot_bounds_ns(request),
        longest_stall_ns=longest_stall_ns(request),
        is_truncated=is_truncated(request),
        n_events=len(generated(request)),
        n_generated=n_generated(request),
        n_prompt=usage.prompt_tokens if usage else None,
        n_cached=usage.cached_tokens if usage else None,
        came_at_once=came_at_once(request),
        contradiction=_contradiction(request),
        timings=request.timings,
    )


def _contradiction(request: Request) -> str | None:
    """Why the server's token count is wrong, if it is. Counts by its tokenizer are not judged: it may join tokens."""
    n, n_events, n_asked = n_generated(request), len(generated(request)), request.asked.n_gen
    if n is None or request.usage is None or request.usage.counted_by != "usage":
        return None
    if n > n_asked:
        return f"{n:,} tokens, but only {n_asked:,} were requested"
    return f"{n:,} tokens, but {n_events:,} events had content" if n < n_events else None
