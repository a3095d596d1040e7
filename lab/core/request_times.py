"""What the events of a request say: TTFT, TPOT, gaps. Known definitions, by arithmetic; None where not derivable.

t_first is the first event with generated content (text, reasoning, a tool call), t_out the first that is not reasoning,
t_last the last one with generated content. n is the number of completion tokens, k1 those in the first event.

An event is not a token: several tokens may come together, and a server may hold one back. So gaps between tokens (ITL)
exist only where the server says how many tokens are in each event. Where all came at once, only E2E is known.
"""

from __future__ import annotations

from itertools import pairwise

from lab.core.request import GENERATED, REASONING, Request

AT_ONCE_EVENTS, AT_ONCE_NS = 10, 100_000
"""From so many events on, with less than so many nanoseconds from one to the next on average, an answer came at once:
10,000 events a second are more than any model generates for one request. Fewer events may arrive together by chance."""


def generated(request: Request) -> list[int]:
    """The indices of the events with generated content."""
    return [i for i, kind in enumerate(request.events.kind) if kind in GENERATED]


def n_generated(request: Request) -> int | None:
    """Completion tokens, reasoning included."""
    return request.usage.completion_tokens if request.usage else None


def came_at_once(request: Request) -> bool:
    """Whether the whole answer arrived at once: a server or a proxy held it back, and no stamp is that of a token."""
    n = len(generated(request))
    return n >= AT_ONCE_EVENTS and _decode_ns(request) < AT_ONCE_NS * (n - 1)


def ttft_ns(request: Request) -> int | None:
    """t_first - the sending of the request. None where the answer came at once."""
    indices = generated(request)
    return request.events.arrive_ns[indices[0]] if indices and not came_at_once(request) else None


def first_output_ns(request: Request) -> int | None:
    """Time to first output: t_out - the sending of the request. None where the answer came at once."""
    if came_at_once(request):
        return None
    indices = (i for i in generated(request) if request.events.kind[i] != REASONING)
    return next((request.events.arrive_ns[i] for i in indices), None)


def e2e_ns(request: Request) -> int | None:
    """t_last - the sending of the request."""
    indices = generated(request)
    return request.events.arrive_ns[indices[-1]] if indices else None


def dispatch_delay_ns(request: Request) -> int | None:
    """How much later than intended the request was sent. None in a closed loop."""
    if request.sent_ns is None or request.scheduled_ns is None:
        return None
    return request.sent_ns - request.scheduled_ns


def chunk_gaps_ns(request: Request) -> list[int]:
    """Inter-chunk latencies: from each event with generated content to the next. Empty where all came at once."""
    if came_at_once(request):
        return []
    return [b - a for a, b in pairwise(request.events.arrive_ns[i] for i in generated(request))]


def longest_stall_ns(request: Request) -> int | None:
    """The longest inter-chunk latency. None with fewer than two events."""
    return max(chunk_gaps_ns(request), default=None)


def itl_ns(request: Request) -> list[int] | None:
    """The gap before each token but the first one; tokens that came together get 0.

    None where it is not known how many tokens are in each event, or the answer came at once.
    """
    n_tokens = request.events.n_tokens
    if n_tokens is None or came_at_once(request):
        return None
    arrivals = [request.events.arrive_ns[i] for i in generated(request) for _ in range(n_tokens[i])]
    return [b - a for a, b in pairwise(arrivals)]


def n_first(request: Request) -> int | None:
    """k1: tokens in the first event with generated content.

    Where the server does not say it, it is 1 if there are as many such events as tokens. Else None.
    """
    indices = generated(request)
    if not indices:
        return None
    if request.events.n_tokens is not None:
        return request.events.n_tokens[indices[0]]
    return 1 if n_generated(request) == len(indices) else None


def tpot_ns(request: Request) -> float | None:
    """(t_last - t_first) / (n - k1). None where n or k1 is not known, nothing came after the first event, or all came
    at once."""
    indices, n, k1 = generated(request), n_generated(request), n_first(request)
    if n is None or k1 is None or len(indices) < 2 or n <= k1 or came_at_once(request):
        return None
    return _decode_ns(request) / (n - k1)


def tpot_bounds_ns(request: Request) -> tuple[float, float] | None:
    """TPOT at least and at most, where only n is known: k1 lies between 1 and n - (events after the first).

    Equal where k1 is known. None where n is not known, or smaller than the number of events, or all came at once.
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
