"""Warnings on the figures of requests: warm and short requests, and what a server does not show."""

from __future__ import annotations

from collections.abc import Sequence

from lab.core import request_times as times
from lab.core.request import REASONING, RequestRecord
from lab.core.request_times import Figures, figures
from lab.show import wording

NEAR = 20
"""A warning names the figures that are less than NEAR times the client's own timing error."""


def doubts(chosen: Sequence[RequestRecord]) -> list[str]:
    """Warnings on requests of one setup that went well."""
    ones = [figures(record.request) for record in chosen]
    makers = (at_once, _warm, _short, _lengths, contradictions, _counts, _bounds)
    words = [maker(ones) for maker in makers] + [_gaps(chosen), _reasoning(chosen), _client(chosen)]
    return [sentence for sentence in words if sentence]


def at_once(ones: Sequence[Figures]) -> str:
    """On answers that arrived in one piece; empty without any."""
    held = [one.n_events for one in ones if one.came_at_once]
    if not held:
        return ""
    return (
        f"{len(held)} of {len(ones)} answers arrived in one piece ({_ends(sorted(held))} events): the server or a "
        "proxy held them back until they were complete. Their TTFT and TPOT are unknown."
    )


def contradictions(ones: Sequence[Figures]) -> str:
    """On token counts that contradict each other; empty without any."""
    found = [one.contradiction for one in ones if one.contradiction]
    if not found:
        return ""
    return (
        f"The server's token counts contradict each other in {len(found)} of {len(ones)} answers: {found[0]}. TPOT, "
        "tokens/s and the mark for short answers may be wrong."
    )


def _warm(ones: Sequence[Figures]) -> str:
    warm = [one for one in ones if one.is_warm]
    if warm:
        cached = sorted(one.n_cached or 0 for one in warm)
        return (
            f"{len(warm)} of {len(ones)} requests had {_ends(cached)} prompt tokens in the server's cache. They are "
            "warm and have separate rows."
        )
    if any(one.is_warm is None for one in ones):
        return (
            "The server does not report cached prompt tokens. Each prompt began with a different nonce, so a prefix "
            "cache could not help."
        )
    return ""


def _short(ones: Sequence[Figures]) -> str:
    short = [one for one in ones if one.is_short]
    if not short:
        return ""
    got = sorted(one.n_generated or 0 for one in short)
    reasons = " or ".join(sorted({one.finish_reason or "none given" for one in short}))
    return (
        f"{len(short)} of {len(ones)} answers were shorter than requested ({_ends(got)} tokens; finish reason: "
        f"{reasons}). They have separate rows."
    )


def _lengths(ones: Sequence[Figures]) -> str:
    pairs = [(one.asked.n_prompt, one.n_prompt) for one in ones]
    other = sorted({(asked, n) for asked, n in pairs if asked is not None and n is not None and asked != n})
    if not other:
        return ""
    named = [f"{n:,} instead of {asked:,}" for asked, n in other]
    more = f", and {len(named) - 4} more" if len(named) > 4 else ""
    return f"The server counted other prompt lengths than requested: {', '.join(named[:4])}{more}."


def _counts(ones: Sequence[Figures]) -> str:
    n_unknown = sum(one.n_generated is None for one in ones)
    if n_unknown:
        return f"{n_unknown} of {len(ones)} answers have no token count, so their TPOT is unknown."
    return ""


def _bounds(ones: Sequence[Figures]) -> str:
    n = sum(one.tpot_ns is None and one.tpot_bounds_ns is not None for one in ones)
    if not n:
        return ""
    return (
        f"In {n} of {len(ones)} requests the number of tokens in the first event is unknown: TPOT lies between the two "
        "figures."
    )


def _gaps(chosen: Sequence[RequestRecord]) -> str:
    """On tokens per event, and on how the answers' tokens were counted."""
    words = []
    ways = {record.request.usage.counted_by for record in chosen if record.request.usage}
    if "twin" in ways:
        words.append("The stream did not count tokens; the same request without streaming did.")
    if "tokenize" in ways:
        words.append("The stream did not count tokens. Its text was tokenized afterwards, which may merge some tokens.")
    streamed = [record.request for record in chosen if not times.came_at_once(record.request)]
    unknown = [request for request in streamed if times.itl_ns(request) is None]
    if unknown:
        words.append(
            "The server does not say how many tokens are in an event, so gaps are between events (inter-chunk "
            "latency), not between tokens (ITL)."
        )
        pairs = [(len(times.generated(request)), times.n_generated(request)) for request in unknown]
        if differ := [(n_events, n) for n_events, n in pairs if n is not None and n != n_events]:
            words.append(f"For example, {differ[0][0]:,} events contained {differ[0][1]:,} tokens.")
    return " ".join(words)


def _reasoning(chosen: Sequence[RequestRecord]) -> str:
    with_some = [record.request for record in chosen if REASONING in record.request.events.kind]
    if not with_some:
        return ""
    n_none = sum(times.first_output_ns(request) is None for request in with_some)
    none = f" {n_none} ended during the reasoning." if n_none else ""
    return f"{len(with_some)} of {len(chosen)} answers began with reasoning, which counts as tokens.{none}"


def _client(chosen: Sequence[RequestRecord]) -> str:
    """On figures near the timing error of the client."""
    errors = [record.client_error_ns for record in chosen if record.client_error_ns is not None]
    if not errors:
        return ""
    error = max(p99 for _, p99 in errors)
    ones = [figures(record.request) for record in chosen]
    decodes = [one.e2e_ns - one.ttft_ns for one in ones if one.e2e_ns is not None and one.ttft_ns is not None]
    gaps = [sorted(own)[len(own) // 2] for record in chosen if (own := times.chunk_gaps_ns(record.request))]
    spans = {
        "TTFT": [one.ttft_ns for one in ones if one.ttft_ns is not None],
        "all tokens after the first (TPOT)": [ns for ns in decodes if ns > 0],
        "gaps": gaps,
    }
    near = [
        f"{name} (shortest: {wording.seconds(max(min(known), 100_000) / 1e9)}{' or less' * (min(known) < 100_000)})"
        for name, known in spans.items()
        if known and min(known) < NEAR * error
    ]
    if not near:
        return ""
    return (
        f"Some times are less than {NEAR}x the client's own timing error of {wording.seconds(error / 1e9)} (99th "
        f"percentile of its self-test), so part of them may be the client's: {', '.join(near)}."
    )


def _ends(numbers: Sequence[int]) -> str:
    """The smallest and the largest of sorted numbers."""
    return f"{numbers[0]:,}" if numbers[0] == numbers[-1] else f"{numbers[0]:,} to {numbers[-1]:,}"
