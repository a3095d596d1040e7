"""Derive TTFT, TPOT and gaps from the events of a request; a figure that cannot be derived is None.

t_first is the first event with generated content (text, reasoning, a tool call), t_out the first
that is not reasoning, t_last the last one with generated content. n is the number of completion
tokens, k1 those in the first event.

An event is not a token: it may contain several, and a server may hold one back. So gaps between
tokens (ITL) exist only if the server says how many tokens each event has. If the whole answer
arrived at once, only E2E is known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from lab.core.request import GENERATED, REASONING, Asked, Request

AT_ONCE_EVENTS = 10
AT_ONCE_NS = 100_000
"""An answer came at once if it has at least AT_ONCE_EVENTS events, on average less than AT_ONCE_NS
apart: no model generates 10,000 tokens per second for one request. Fewer events may arrive
together by chance."""

MOST_TOKENS_PER_EVENT = 100
"""On average. Gaps of more tokens that come together say nothing, and could fill the memory."""

JOINED = 0.9
"""The server's tokenizer may join tokens of an answer: it counts at least this share of those that
were generated."""


def generated(request: Request) -> list[int]:
    """The indices of the events with generated content."""
    return [index for index, kind in enumerate(request.events.kind) if kind in GENERATED]


def n_generated(request: Request) -> int | None:
    """Completion tokens, with reasoning."""
    return request.usage.completion_tokens if request.usage else None


def arrivals_ns(request: Request) -> list[int]:
    """When each event with generated content arrived."""
    return [request.events.arrive_ns[index] for index in generated(request)]


def came_at_once(request: Request) -> bool:
    """Whether the whole answer arrived at once, because a server or proxy buffered it."""
    arrivals = arrivals_ns(request)
    if len(arrivals) < AT_ONCE_EVENTS:
        return False
    return arrivals[-1] - arrivals[0] < AT_ONCE_NS * (len(arrivals) - 1)


def chunk_gaps_ns(request: Request) -> list[int]:
    """Inter-chunk latencies: from each event with generated content to the next. Empty if all came
    at once."""
    if came_at_once(request):
        return []
    return _gaps(arrivals_ns(request))


def itl_ns(request: Request) -> list[int] | None:
    """The gap before each token except the first; 0 for tokens that came together. None if it
    cannot be known."""
    n_tokens = request.events.n_tokens
    if n_tokens is None or came_at_once(request):
        return None
    if sum(n_tokens) > MOST_TOKENS_PER_EVENT * len(n_tokens):
        return None
    arrivals: list[int] = []
    for index in generated(request):
        arrivals += [request.events.arrive_ns[index]] * n_tokens[index]
    return _gaps(arrivals)


def _gaps(arrivals: list[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(arrivals)]


@dataclass(frozen=True, kw_only=True)
class RequestFigures:
    """The figures of a request; None: not derivable. Times count from its sending."""

    request: Request
    ttft_ns: int | None = None
    first_output_ns: int | None = None  # t_out
    e2e_ns: int | None = None
    tpot_ns: float | None = None  # (t_last - t_first) / (n - k1)
    tpot_bounds_ns: tuple[float, float] | None = None
    """Equal if k1 is known, which otherwise is 1 to n - (later events)."""
    longest_stall_ns: int | None = None
    n_events: int  # with generated content
    came_at_once: bool = False  # only e2e_ns is known then

    @property
    def n_generated(self) -> int | None:
        return n_generated(self.request)

    @property
    def n_prompt(self) -> int | None:
        """Tokens of the prompt, as the server counts them."""
        return self.request.usage.prompt_tokens if self.request.usage else None

    @property
    def n_cached(self) -> int | None:
        return self.request.usage.cached_tokens if self.request.usage else None

    @property
    def asked(self) -> Asked:
        return self.request.asked

    @property
    def is_warm(self) -> bool | None:
        """Whether a part of the prompt came from a cache; None if the server does not say."""
        if self.n_cached is None:
            return None
        return self.n_cached > 0

    @property
    def is_short(self) -> bool | None:
        """Whether the answer has fewer tokens than requested; None if they are not counted."""
        if self.n_generated is None:
            return None
        return self.n_generated < self.asked.n_gen


def figures(request: Request) -> RequestFigures:
    """All figures of a request."""
    arrivals = arrivals_ns(request)
    times = RequestFigures(request=request, n_events=len(arrivals))
    if not arrivals:
        return times
    times = replace(times, e2e_ns=arrivals[-1])
    if came_at_once(request):
        return replace(times, came_at_once=True)
    times = replace(
        times,
        ttft_ns=arrivals[0],
        first_output_ns=_first_output_ns(request),
        longest_stall_ns=max(chunk_gaps_ns(request), default=None),
    )
    bounds_ns = tpot_bounds_ns(request)
    if bounds_ns is None:
        return times
    times = replace(times, tpot_bounds_ns=bounds_ns)
    if bounds_ns[0] == bounds_ns[1]:
        times = replace(times, tpot_ns=bounds_ns[0])
    return times


def _first_output_ns(request: Request) -> int | None:
    """When the first event came that is not reasoning."""
    for index in generated(request):
        if request.events.kind[index] != REASONING:
            return request.events.arrive_ns[index]
    return None


def tpot_bounds_ns(request: Request) -> tuple[float, float] | None:
    """The bounds of TPOT: equal if the tokens of the first event are known. None if there is no
    TPOT."""
    n = n_generated(request)
    arrivals = arrivals_ns(request)
    n_events = len(arrivals)
    if n is None or n_events < 2 or came_at_once(request):
        return None
    decode_ns = arrivals[-1] - arrivals[0]
    n_first = _n_first(request)
    if n_first is not None and n > n_first:
        tpot_ns = decode_ns / (n - n_first)
        return tpot_ns, tpot_ns
    if n_first is None and n >= n_events:
        return decode_ns / (n - 1), decode_ns / (n_events - 1)
    return None


def _n_first(request: Request) -> int | None:
    """k1, the tokens of the first event; None if the server does not say."""
    indices = generated(request)
    if request.events.n_tokens is not None:
        return request.events.n_tokens[indices[0]]
    if n_generated(request) == len(indices):
        return 1
    return None
