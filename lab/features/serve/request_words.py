"""Warnings on the figures of requests: warm and short requests, and what a server does not show."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import request_times as times
from lab.core.request import REASONING, RequestRecord
from lab.core.request_times import Figures, figures


def wrong(ones: Sequence[Figures]) -> list[str]:
    """On answers that arrived in one piece, and on token counts that contradict each other."""
    held = [one.n_events for one in ones if one.came_at_once]
    found = [one.contradiction for one in ones if one.contradiction]
    words = []
    if held:
        words += [
            f"{len(held)} of {len(ones)} answers arrived in one piece ({_ends(held)} events): the server or a "
            "proxy held them back until they were complete. Their TTFT and TPOT are unknown."
        ]
    if found:
        words += [
            f"The server's token counts contradict each other in {len(found)} of {len(ones)} answers: {found[0]}. "
            "TPOT, tokens/s and the mark for short answers may be wrong."
        ]
    return words


def doubts(chosen: Sequence[RequestRecord]) -> list[str]:
    """Warnings on requests of one setup that went well."""
    requests = [record.request for record in chosen]
    ones = [figures(request) for request in requests]
    cached = [one.n_cached or 0 for one in ones if one.is_warm]
    short = [one for one in ones if one.is_short]
    reasons = " or ".join(sorted({one.finish_reason or "none given" for one in short}))
    pairs = {(one.asked.n_prompt, one.n_prompt) for one in ones}
    other = sorted((asked, n) for asked, n in pairs if asked is not None and n is not None and asked != n)
    named = ", ".join(f"{n:,} instead of {asked:,}" for asked, n in other[:4])
    more = f", and {len(other) - 4} more" if len(other) > 4 else ""
    n_uncounted = sum(one.n_generated is None for one in ones)
    n_bounds = sum(one.tpot_ns is None and one.tpot_bounds_ns is not None for one in ones)
    ways = {request.usage.counted_by for request in requests if request.usage}
    bundled = [request for request in requests if not times.came_at_once(request) and times.itl_ns(request) is None]
    counts = [(one.n_events, one.n_generated) for one in map(figures, bundled)]
    differ = [
        f" For example, {n_events:,} events contained {n:,} tokens."
        for n_events, n in counts
        if n not in (None, n_events)
    ]
    reasoned = [request for request in requests if REASONING in request.events.kind]
    n_inside = sum(times.first_output_ns(request) is None for request in reasoned)
    said = (
        (
            cached,
            f"{len(cached)} of {len(ones)} requests had {_ends(cached)} prompt tokens in the server's cache. They are "
            "warm and have separate rows.",
        ),
        (
            not cached and any(one.is_warm is None for one in ones),
            "The server does not report cached prompt tokens. Each prompt began with a different nonce, so a prefix "
            "cache could not help.",
        ),
        (
            short,
            f"{len(short)} of {len(ones)} answers were shorter than requested "
            f"({_ends([one.n_generated or 0 for one in short])} tokens; finish reason: {reasons}). They have separate "
            "rows.",
        ),
        (other, f"The server counted other prompt lengths than requested: {named}{more}."),
        (n_uncounted, f"{n_uncounted} of {len(ones)} answers have no token count, so their TPOT is unknown."),
        (
            n_bounds,
            f"In {n_bounds} of {len(ones)} requests the number of tokens in the first event is unknown: TPOT lies "
            "between the two figures.",
        ),
        ("twin" in ways, "The stream did not count tokens; the same request without streaming did."),
        (
            "tokenize" in ways,
            "The stream did not count tokens. Its text was tokenized afterwards, which may merge some tokens.",
        ),
        (
            bundled,
            "The server does not say how many tokens are in an event, so gaps are between events (inter-chunk "
            f"latency), not between tokens (ITL).{''.join(differ[:1])}",
        ),
        (
            reasoned,
            f"{len(reasoned)} of {len(ones)} answers began with reasoning, which counts as tokens."
            f"{f' {n_inside} ended during the reasoning.' * (n_inside > 0)}",
        ),
    )
    return [*wrong(ones), *(line for holds, line in said if holds)]


def _ends(numbers: Sequence[int]) -> str:
    """The smallest and the largest number."""
    low, high = min(numbers, default=0), max(numbers, default=0)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
