"""Derive TTFT, TPOT and gaps from the events of a request; a figure that cannot be derived is None.

t_first is the first event with generated content (text, reasoning, a tool call, or tokens that the
server counts and whose text comes later), t_out the first with text that is not reasoning, t_last
the last one with generated content. n is the number of tokens up to t_last, k1 those of the first
arrival: the events that came with the first one.

An event is not a token: it may contain several, and a server may hold one back. So gaps between
tokens (ITL) exist only if the server says how many tokens each event has. If the whole answer
arrived at once, only E2E is known. Counts and times of the server that contradict the request are
no figures; `contradictions` names them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from lab.core.request import (
    GENERATED,
    HIDDEN,
    REASONING,
    Asked,
    Request,
    ServerTimings,
    Usage,
)

AT_ONCE_EVENTS = 10
AT_ONCE_NS = 100_000
"""An answer came at once if it has at least AT_ONCE_EVENTS events, on average less than AT_ONCE_NS
apart: no model generates 10,000 tokens per second for one request. Fewer events may arrive
together by chance."""

MOST_TOKENS_PER_EVENT = 100
"""On average. Gaps of more tokens that come together say nothing, and could fill the memory."""

SAME_ARRIVAL = 0.05
"""Events that are this share of the mean gap apart came together."""

SPARE_TOKENS = 1
"""Tokens that a server may count beyond those requested: some count the end of the answer."""

SPARE_MS = 1.0
"""A server's times may exceed the client's by this, because both are rounded."""

JOINED = 0.9
"""The server's tokenizer may join tokens of an answer: it counts at least this share of those that
were generated."""


def generated(request: Request) -> list[int]:
    """The indices of the events with generated content."""
    return [index for index, kind in enumerate(request.events.kind) if kind in GENERATED]


def n_generated(request: Request) -> int | None:
    """Completion tokens, with reasoning; None if the server's count contradicts the request."""
    if request.usage is None or has_too_many(request):
        return None
    return request.usage.completion_tokens


def n_cached(request: Request) -> int | None:
    """Prompt tokens from the server's cache; None if they are more than the prompt."""
    usage = request.usage or Usage()
    if usage.cached_tokens is None or has_too_many_cached(request):
        return None
    return usage.cached_tokens


def has_too_many(request: Request) -> bool:
    """Whether the server counts more tokens of an answer than were requested. Some do not limit
    reasoning."""
    usage = request.usage or Usage()
    n_text = (usage.completion_tokens or 0) - (usage.reasoning_tokens or 0)
    return n_text > request.asked.n_gen + SPARE_TOKENS


def exceeds_limit(request: Request) -> bool:
    """Whether more tokens came than were requested, not only in the server's count."""
    n_came = len(generated(request))
    return has_too_many(request) and n_came > request.asked.n_gen + SPARE_TOKENS


def has_too_many_cached(request: Request) -> bool:
    usage = request.usage or Usage()
    if usage.cached_tokens is None or usage.prompt_tokens is None:
        return False
    return usage.cached_tokens > usage.prompt_tokens


def server_timings(request: Request) -> ServerTimings | None:
    """The server's own times; None if they do not fit into the request."""
    if request.timings is None or not fits(request.timings, request.ended_ns):
        return None
    prompt = ServerTimings(prompt_ms=request.timings.prompt_ms)
    if not fits(prompt, next(iter(arrivals_ns(request)), None)):
        return None
    return request.timings


def fits(timings: ServerTimings, call_ns: int | None) -> bool:
    """Whether a server's own times are possible within a call that took `call_ns`."""
    if call_ns is None:
        return True
    sum_ms = (timings.prompt_ms or 0.0) + (timings.gen_ms or 0.0)
    return sum_ms <= call_ns / 1e6 + SPARE_MS


def contradictions(request: Request) -> list[str]:
    """What the server's numbers say that cannot be, in sentences without a subject."""
    usage = request.usage or Usage()
    doubts = [
        f"counts {value:,g} {name.replace('_', ' ')}"
        for name, value in request.wrong_counts.items()
    ]
    if has_too_many(request) and not exceeds_limit(request):
        doubts.append(
            f"counts {usage.completion_tokens:,} tokens of an answer of at most"
            f" {request.asked.n_gen:,}"
        )
    if has_too_many_cached(request):
        doubts.append(
            f"counts {usage.cached_tokens:,} cached tokens of a prompt of"
            f" {usage.prompt_tokens:,}"
        )
    if request.timings is not None and server_timings(request) is None:
        doubts.append("reports times of its own that are longer than the request")
    return doubts


def arrivals_ns(request: Request) -> list[int]:
    """When each event with generated content arrived."""
    return [request.events.arrive_ns[index] for index in generated(request)]


def came_at_once(request: Request) -> bool:
    """Whether the whole answer arrived at once, because a server or proxy buffered it."""
    arrivals = arrivals_ns(request)
    if len(arrivals) < AT_ONCE_EVENTS:
        return False
    return arrivals[-1] - arrivals[0] < AT_ONCE_NS * (len(arrivals) - 1)


def arrivals(request: Request) -> list[list[int]]:
    """The events with generated content that came together, as lists of their indices."""
    indices = generated(request)
    if not indices:
        return []
    stamps = request.events.arrive_ns
    mean_gap_ns = (stamps[indices[-1]] - stamps[indices[0]]) / max(1, len(indices) - 1)
    groups = [[indices[0]]]
    for earlier, later in pairwise(indices):
        if stamps[later] - stamps[earlier] > SAME_ARRIVAL * mean_gap_ns:
            groups.append([])
        groups[-1].append(later)
    return groups


def chunk_gaps_ns(request: Request) -> list[int]:
    """Inter-chunk latencies: from each event with generated content to the next. Empty if all came
    at once."""
    if came_at_once(request) or len(arrivals(request)) < 2:
        return []
    return _gaps(arrivals_ns(request))


def itl_ns(request: Request) -> list[int] | None:
    """The gap before each token except the first; 0 for tokens that came together. None if it
    cannot be known."""
    n_tokens = request.events.n_tokens
    if n_tokens is None or came_at_once(request) or has_too_many(request):
        return None
    if sum(n_tokens) > MOST_TOKENS_PER_EVENT * len(n_tokens):
        return None
    stamps: list[int] = []
    for index in generated(request):
        stamps += [request.events.arrive_ns[index]] * n_tokens[index]
    return _gaps(stamps)


def _gaps(stamps: list[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(stamps)]


@dataclass(frozen=True, kw_only=True)
class RequestFigures:
    """The figures of a request; None: not derivable. Times count from its sending."""

    request: Request
    ttft_ns: int | None = None
    first_output_ns: int | None = None  # t_out
    e2e_ns: int | None = None
    tpot_ns: float | None = None  # (t_last - t_first) / (n - k1)
    tpot_bounds_ns: tuple[float, float] | None = None
    """Equal if k1 is known, which otherwise is from the events of the first arrival to n - (later
    events)."""
    longest_stall_ns: int | None = None
    n_events: int  # with generated content
    n_arrivals: int = 0  # of those events
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
        return n_cached(self.request)

    @property
    def tokens_per_arrival(self) -> float | None:
        """Tokens that came together, on average; None if that is not known."""
        n_tokens = n_timed(self.request)
        if n_tokens is None:
            n_tokens = n_shown(self.request)
        if n_tokens is None or self.n_arrivals < 2:
            return None
        return n_tokens / self.n_arrivals

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
    stamps = arrivals_ns(request)
    times = RequestFigures(
        request=request, n_events=len(stamps), n_arrivals=len(arrivals(request))
    )
    if not stamps:
        return times
    times = replace(times, e2e_ns=stamps[-1])
    if came_at_once(request):
        return replace(times, came_at_once=True)
    times = replace(
        times,
        ttft_ns=stamps[0],
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
    """When the first event came with text that is not reasoning."""
    for index in generated(request):
        if request.events.kind[index] not in (REASONING, HIDDEN):
            return request.events.arrive_ns[index]
    return None


def tpot_bounds_ns(request: Request) -> tuple[float, float] | None:
    """The bounds of TPOT: equal if the tokens of the first arrival are known. None if there is no
    TPOT."""
    groups = arrivals(request)
    if len(groups) < 2 or came_at_once(request) or has_too_many(request):
        return None
    stamps = request.events.arrive_ns
    decode_ns = stamps[groups[-1][0]] - stamps[groups[0][0]]
    n_counted = n_timed(request)
    if n_counted is not None:
        n_tokens = request.events.n_tokens or ()
        n_later = n_counted - sum(n_tokens[index] for index in groups[0])
        return (decode_ns / n_later, decode_ns / n_later) if n_later > 0 else None
    n = n_shown(request)
    n_events = len(generated(request))
    n_first = len(groups[0])
    if n is None or n < n_events:
        return None
    return decode_ns / (n - n_first), decode_ns / (n_events - n_first)


def n_timed(request: Request) -> int | None:
    """The tokens of the events with generated content; None if the server does not say. Tokens
    that it counts after the last one have no time."""
    if request.events.n_tokens is None:
        return None
    return sum(request.events.n_tokens[index] for index in generated(request))


def n_shown(request: Request) -> int | None:
    """Completion tokens without reasoning that did not come."""
    n = n_generated(request)
    usage = request.usage or Usage()
    if n is None or {REASONING, HIDDEN} & set(request.events.kind):
        return n
    return n - min(n, usage.reasoning_tokens or 0)
