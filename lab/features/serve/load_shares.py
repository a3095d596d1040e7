"""How a server under load spends its time: prefill, decode, idle, as far as a client can tell.

It is idle while no request is in progress. A client cannot see where the rest goes, because TTFT includes queueing. The
time of prefill comes from one of two sources:

- The server reports the time of each prompt (llama-server). That time ends with the first token. Prompts can be
  computed together, so the time with at least one prompt in progress counts.
- A load of one user in the same session has no queue, so TTFT there is the time of a prompt of that many uncached
  tokens. These times are added up over all requests. If the sum exceeds the busy time, prompts were computed faster
  together than alone, and the shares are unknown.

Decode is the rest. A step that computes a prompt together with tokens of other answers counts as prefill.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lab.core import stats
from lab.core.lists import grouped
from lab.core.request import CLOSED
from lab.features.serve.loads import NS, Arm, Round, Sample
from lab.show import request_table

BY_SERVER, BY_ONE_USER = "the server's prompt times", "TTFT with 1 user"
"""What the time of prefill is known from."""

LONGER = 1.05
"""TTFT of one user gives the prefill of prompts that are longer than its own by at most this factor."""

Span = tuple[float, float]
"""Begin and end, in seconds."""

Alone = Callable[[int], float | None]
"""Seconds of prefill for a number of uncached tokens, from a load of one user; None if it does not say."""


@dataclass(frozen=True)
class Shares:
    """Shares of the steady windows. `prefill` and `decode` are None if they cannot be told apart; `by`: the source."""

    prefill: float | None
    decode: float | None
    idle: float
    by: str | None = None


def shares(arm: Arm, alone: Alone | None = None) -> Shares | None:
    """The shares over all windows of an arm; None if they have no length."""
    whole_s = sum(one.length_s for one in arm.rounds)
    if not whole_s:
        return None
    busy_s = [_length(_clipped(_spans(one), one)) for one in arm.rounds]
    idle = 1 - sum(busy_s) / whole_s

    def of_server(one: Sample) -> float | None:
        timings = one.figures.timings
        return None if timings is None or timings.prompt_ms is None else timings.prompt_ms / 1e3

    def of_alone(one: Sample) -> float | None:
        n = _uncached(one)
        return None if alone is None or n is None else alone(n)

    for by, source in ((BY_SERVER, of_server), (BY_ONE_USER, of_alone)):
        prefill_s = [_prefill(one, source, by == BY_ONE_USER) for one in arm.rounds]
        if all(part is not None and part < busy + 1e-6 for part, busy in zip(prefill_s, busy_s, strict=True)):
            known = min(1 - idle, sum(part or 0.0 for part in prefill_s) / whole_s)
            return Shares(known, 1 - idle - known, idle, by)
    return Shares(None, None, idle)


def alone(arms: Iterable[Arm]) -> Alone | None:
    """Prefill by uncached tokens, from the arms of one user: medians of TTFT, and straight lines between them."""
    ones = [one for arm in arms if arm.load.arrivals == CLOSED and arm.load.concurrency == 1 for one in arm.inside]
    known = [one for one in ones if one.is_ok and one.figures.ttft_ns is not None and _uncached(one)]
    by_length = sorted(grouped(known, _uncached).items())
    if not by_length:
        return None
    medians = [(n, statistics.median((one.figures.ttft_ns or 0) / NS for one in own)) for n, own in by_length]
    return lambda n: stats.on_lines([(0, 0.0), *medians], n) if n <= LONGER * medians[-1][0] else None


def _prefill(of: Round, source: Callable[[Sample], float | None], is_sum: bool) -> float | None:
    """Seconds of the window in prefill; None if the prefill of a request that was in progress is unknown."""
    spans: list[Span] = []
    for one, (begin_s, end_s) in zip(of.all, _spans(of), strict=True):
        if end_s <= of.begin_s or begin_s >= min(of.end_s, end_s):
            continue  # refused at once, or outside the window
        prompt_s = source(one) if one.is_ok and one.first_s < math.inf else None
        if prompt_s is None:
            return None
        spans.append((max(begin_s, one.first_s - prompt_s), one.first_s))
    inside = _clipped(spans, of)
    return sum(end_s - begin_s for begin_s, end_s in inside) if is_sum else _length(inside)


def _uncached(one: Sample) -> int | None:
    """Prompt tokens that the server computed. Unless it reports a cache, all: prompts of the lab share no beginning."""
    n = request_table.n_prompt(one.figures)
    return None if n is None else n - (one.figures.n_cached or 0)


def _spans(of: Round) -> list[Span]:
    """When each request was in progress at the server."""
    return [(one.at_s + (one.figures.delay_ns or 0) / NS, one.end_s) for one in of.all]


def _clipped(spans: Sequence[Span], of: Round) -> list[Span]:
    """The parts inside the window."""
    inside = [(max(begin_s, of.begin_s), min(end_s, of.end_s)) for begin_s, end_s in spans]
    return [span for span in inside if span[0] < span[1]]


def _length(spans: Sequence[Span]) -> float:
    """The time in which at least one of the spans is in progress."""
    total_s, reached_s = 0.0, -math.inf
    for begin_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(begin_s, reached_s))
        reached_s = max(reached_s, end_s)
    return total_s
