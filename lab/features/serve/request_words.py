"""Warnings on the figures of requests: warm and short requests, and what a server does not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lab.core import request_times as times
from lab.core.request import REASONING, RequestRecord
from lab.core.request_times import Figures, figures
from lab.show import wording

NEAR = 20
"""A warning names the figures that are less than NEAR times the client's own timing error, where a record has one."""


def doubts(chosen: Sequence[RequestRecord]) -> list[str]:
    """Warnings on requests of one setup that went well."""
    ones = [figures(record.request) for record in chosen]
    return [*wrong(ones), *_apart(ones), *_counts(chosen, ones), *_client(chosen, ones)]


def wrong(ones: Sequence[Figures]) -> Iterator[str]:
    """On answers that arrived in one piece, and on token counts that contradict each other."""
    if held := [one.n_events for one in ones if one.came_at_once]:
        yield (
            f"{len(held)} of {len(ones)} answers arrived in one piece ({_ends(held)} events): the server or a "
            "proxy held them back until they were complete. Their TTFT and TPOT are unknown."
        )
    if found := [one.contradiction for one in ones if one.contradiction]:
        yield (
            f"The server's token counts contradict each other in {len(found)} of {len(ones)} answers: {found[0]}. "
            "TPOT, tokens/s and the mark for short answers may be wrong."
        )


def _apart(ones: Sequence[Figures]) -> Iterator[str]:
    """On warm and short requests, and prompts of other lengths."""
    if cached := [one.n_cached or 0 for one in ones if one.is_warm]:
        yield (
            f"{len(cached)} of {len(ones)} requests had {_ends(cached)} prompt tokens in the server's cache. They are "
            "warm and have separate rows."
        )
    elif any(one.is_warm is None for one in ones):
        yield (
            "The server does not report cached prompt tokens. Each prompt began with a different nonce, so a prefix "
            "cache could not help."
        )
    if short := [one for one in ones if one.is_short]:
        reasons = " or ".join(sorted({one.finish_reason or "none given" for one in short}))
        yield (
            f"{len(short)} of {len(ones)} answers were shorter than requested "
            f"({_ends([one.n_generated or 0 for one in short])} tokens; finish reason: {reasons}). They have separate "
            "rows."
        )
    pairs = {(one.asked.n_prompt, one.n_prompt) for one in ones}
    other = sorted((asked, n) for asked, n in pairs if asked is not None and n is not None and asked != n)
    if other:
        named = ", ".join(f"{n:,} instead of {asked:,}" for asked, n in other[:4])
        more = f", and {len(other) - 4} more" if len(other) > 4 else ""
        yield f"The server counted other prompt lengths than requested: {named}{more}."


def _counts(chosen: Sequence[RequestRecord], ones: Sequence[Figures]) -> Iterator[str]:
    """On tokens that nobody counted, or that were counted otherwise."""
    if n := sum(one.n_generated is None for one in ones):
        yield f"{n} of {len(ones)} answers have no token count, so their TPOT is unknown."
    if n := sum(one.tpot_ns is None and one.tpot_bounds_ns is not None for one in ones):
        yield (
            f"In {n} of {len(ones)} requests the number of tokens in the first event is unknown: TPOT lies between the "
            "two figures."
        )
    ways = {record.request.usage.counted_by for record in chosen if record.request.usage}
    if "twin" in ways:
        yield "The stream did not count tokens; the same request without streaming did."
    if "tokenize" in ways:
        yield "The stream did not count tokens. Its text was tokenized afterwards, which may merge some tokens."
    requests = [record.request for record in chosen]
    unknown = [one for one in requests if not times.came_at_once(one) and times.itl_ns(one) is None]
    if unknown:
        pairs = ((len(times.generated(request)), times.n_generated(request)) for request in unknown)
        example = next((pair for pair in pairs if pair[1] is not None and pair[0] != pair[1]), None)
        yield (
            "The server does not say how many tokens are in an event, so gaps are between events (inter-chunk "
            "latency), not between tokens (ITL)."
        ) + (f" For example, {example[0]:,} events contained {example[1]:,} tokens." if example else "")
    if reasoned := [one for one in requests if REASONING in one.events.kind]:
        n = sum(times.first_output_ns(request) is None for request in reasoned)
        none = f" {n} ended during the reasoning." if n else ""
        yield f"{len(reasoned)} of {len(chosen)} answers began with reasoning, which counts as tokens.{none}"


def _client(chosen: Sequence[RequestRecord], ones: Sequence[Figures]) -> Iterator[str]:
    """On figures near the timing error of the client, which old records have."""
    errors = [record.client_error_ns[1] for record in chosen if record.client_error_ns is not None]
    decodes = [one.e2e_ns - one.ttft_ns for one in ones if one.e2e_ns is not None and one.ttft_ns is not None]
    spans = {
        "TTFT": [one.ttft_ns for one in ones if one.ttft_ns is not None],
        "all tokens after the first (TPOT)": [ns for ns in decodes if ns > 0],
        "gaps": [sorted(own)[len(own) // 2] for record in chosen if (own := times.chunk_gaps_ns(record.request))],
    }
    near = [
        f"{name} (shortest: {wording.seconds(max(min(known), 100_000) / 1e9)}{' or less' * (min(known) < 100_000)})"
        for name, known in spans.items()
        if known and min(known) < NEAR * max(errors, default=0)
    ]
    if near:
        yield (
            f"Some times are less than {NEAR}x the client's own timing error of {wording.seconds(max(errors) / 1e9)} "
            f"(99th percentile of its self-test), so part of them may be the client's: {', '.join(near)}."
        )


def _ends(numbers: Sequence[int]) -> str:
    """The smallest and the largest number."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
