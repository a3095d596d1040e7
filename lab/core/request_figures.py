"""The figures of one request, without its events: what tables, rates and timelines of many requests are made of.

A request of 200 tokens has 200 events; its figures are a few numbers. So thousands of requests fit into memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import Asked, Request, ServerTimings, Slo


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What became of a request. Times are of request_times.py, in nanoseconds; None where not derivable.

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
    delay_ns: int | None  # how much later than intended it was sent; None in a closed loop
    ended_ns: int | None
    ttft_ns: int | None
    first_output_ns: int | None
    e2e_ns: int | None
    tpot_ns: float | None
    tpot_bounds_ns: tuple[float, float] | None
    longest_stall_ns: int | None
    n_events: int  # with generated content
    n_generated: int | None
    n_prompt: int | None  # as the server counted it
    n_cached: int | None
    came_at_once: bool  # so that of the times only e2e_ns is known
    contradiction: str | None  # between the server's counts and what it was asked for, or what it sent
    timings: ServerTimings | None

    @property
    def is_warm(self) -> bool | None:
        """Whether a part of the prompt came from a cache. None where the server does not say it."""
        return None if self.n_cached is None else self.n_cached > 0

    @property
    def is_short(self) -> bool | None:
        """Whether the answer has fewer tokens than were asked for. None where they are not counted."""
        return None if self.n_generated is None else self.n_generated < self.asked.n_gen

    @property
    def ttft_due_ns(self) -> int | None:
        """TTFT; in an open loop from the intended time: what a user waits who came then."""
        return None if self.ttft_ns is None else self.ttft_ns + (self.delay_ns or 0)

    @property
    def e2e_due_ns(self) -> int | None:
        """E2E; in an open loop from the intended time."""
        return None if self.e2e_ns is None else self.e2e_ns + (self.delay_ns or 0)

    def used(self, slo: Slo) -> float:
        """How much of its limits it used: 1 is all of the one that it came nearest to, above 1 it broke one.

        In an open loop TTFT and E2E count from the intended time. Failures, and requests whose figure is not known,
        used infinitely much. TPOT counts with its upper bound, where it is not exact.
        """
        if self.status != OK:
            return math.inf
        tpot_ns = None if self.tpot_bounds_ns is None else self.tpot_bounds_ns[1]
        tpot_limit_s = None if self.n_generated == 1 else slo.tpot_s  # there is no further token
        figures_ns = (slo.ttft_s, self.ttft_due_ns), (tpot_limit_s, tpot_ns), (slo.e2e_s, self.e2e_due_ns)
        return max(
            (math.inf if ns is None else ns / (limit * 1e9) for limit, ns in figures_ns if limit is not None),
            default=0.0,
        )

    def meets(self, slo: Slo) -> bool:
        """Whether it ended well and within every limit."""
        return self.used(slo) <= 1


def figures(request: Request) -> Figures:
    """The figures of a request."""
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
        delay_ns=times.dispatch_delay_ns(request),
        ended_ns=request.ended_ns if request.failed_ns is None else request.failed_ns,
        ttft_ns=times.ttft_ns(request),
        first_output_ns=times.first_output_ns(request),
        e2e_ns=times.e2e_ns(request),
        tpot_ns=times.tpot_ns(request),
        tpot_bounds_ns=times.tpot_bounds_ns(request),
        longest_stall_ns=times.longest_stall_ns(request),
        n_events=len(times.generated(request)),
        n_generated=times.n_generated(request),
        n_prompt=usage.prompt_tokens if usage else None,
        n_cached=usage.cached_tokens if usage else None,
        came_at_once=times.came_at_once(request),
        contradiction=_contradiction(request),
        timings=request.timings,
    )


def _contradiction(request: Request) -> str | None:
    """Where the server's own count of tokens cannot be right. A count by its tokenizer may join tokens."""
    n, n_events, n_asked = times.n_generated(request), len(times.generated(request)), request.asked.n_gen
    if n is None or request.usage is None or request.usage.counted_by != "usage":
        return None
    if n > n_asked:
        return f"{n:,} tokens where {n_asked:,} were asked for"
    return f"{n:,} tokens where {n_events:,} events had content" if n < n_events else None
