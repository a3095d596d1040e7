"""Claims about how long the two phases take: prefill by the length of the prompt, a decoded token by its position.

A law is judged where it was measured. Prefill is compared with itself at twice the length, and its quadratic part is
seen directly: a step of equally many tokens takes longer the more tokens lie before it. A law of decode is continued
beyond what was measured only where the criterion says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from lab.core import phases, stats
from lab.core.record import PREFILL, Record, Run
from lab.experiments import claim_curves as curves
from lab.experiments import claim_rules as rules
from lab.experiments.claim import Evidence, Figure, Judgement
from lab.experiments.claim_curves import Point
from lab.experiments.claim_rules import Condition, claim

MOST_ERROR = 0.05
"""The root mean square of relative errors up to which a law counts as one that fits."""


def prefill_grows_with_length(evidence: Evidence) -> Judgement:
    """Claim 3."""
    lengths = rules.by_length(evidence.of("lengths"))
    figures = [
        rules.compared(f"prefill of {2 * n:,} tokens over that of {n:,}", lengths[n], lengths[2 * n], phases.prefill_ns)
        for n in lengths
        if 500 <= n <= 1000 and 2 * n in lengths
    ]
    grows = _growth_of_steps([*evidence.of("context"), *evidence.of("lengths")])
    conditions = [
        rules.between("twice the tokens take 1.9 to 2.2 times as long", known, 1.9, 2.2) for known in figures
    ] or [Condition("a length and its double", None, is_missing=True)]
    conditions.append(curves.rises("an equal step takes longer, the more tokens lie before it", grows))
    return rules.decided(conditions, [*figures, grows])


def _growth_of_steps(records: Sequence[Record]) -> Figure | None:
    """By how much a prefill step of the commonest size grows over 1,000 positions, in % of the usual one.

    Of several steps at one position their median counts.
    """
    sizes: dict[int, dict[float, list[float]]] = {}
    for record in filter(lambda record: phases.times_prefill_steps(record.settings), records):
        steps = record.run.steps
        for kind, n, past, start, ready in zip(
            steps.kind, steps.n_tokens, steps.n_past, steps.start_ns, steps.ready_ns, strict=True
        ):
            if kind == PREFILL:
                sizes.setdefault(n, {}).setdefault(float(past), []).append(float(ready - start))
    commonest = max(sizes.values(), key=len, default={})
    points = [(past, statistics.median(times)) for past, times in commonest.items()]
    usual = statistics.median(time for _, time in points) if points else 0.0
    return curves.slope("growth of a prefill step over 1,000 positions", points, "%", 1e5 / usual if usual > 0 else 0.0)


def first_token_is_prefill(evidence: Evidence) -> Judgement:
    """Claim 4."""
    figures = {
        n: rules.figure(f"prefill of TTFT at {n:,} tokens", [_of_ttft(record.run) for record in records], "%", 100)
        for n, records in rules.by_length(evidence.of("lengths")).items()
        if n >= 100
    }
    conditions = [rules.at_least(f"at {n:,} tokens at least 95 %", known, 95) for n, known in figures.items()]
    return rules.decided(conditions, list(figures.values()))


def _of_ttft(run: Run) -> float | None:
    prefill, ttft = phases.prefill_ns(run), phases.ttft_ns(run)
    return prefill / ttft if prefill and ttft else None


def token_time_is_constant(evidence: Evidence) -> Judgement:
    """Claim 5."""
    figures = {
        n: rules.figure(f"token after 200 over the first, after {n:,}", [_growth(r.run) for r in records], "times")
        for n, records in rules.by_length(evidence.of("lengths")).items()
    }
    conditions = [
        rules.at_most(f"after a prompt of {n:,} the 200th token takes at most 1.05 times as long", known, 1.05)
        for n, known in figures.items()
    ]
    n_gen = max(record.run.n_gen for record in evidence.of("lengths"))
    remark = f"{n_gen:,} tokens were generated; their slope is continued to 200." if n_gen < 200 else ""
    return rules.decided(conditions, list(figures.values()), remark)


def _growth(run: Run) -> float | None:
    """How many times the first token's time the 200th takes, by the slope of a run."""
    times = phases.itl_ns(run)
    rise = stats.slope(range(len(times)), times)
    if rise is None:
        return None
    first = statistics.median(times) - rise.estimate * (len(times) - 1) / 2
    return 1 + 200 * rise.estimate / first if first > 0 else None


def decode_slows_linearly(evidence: Evidence) -> Judgement:
    """Claim 6."""
    points = curves.token_times(evidence.of("context"))
    slope = curves.slope("a token takes longer, per 1,000 positions", points, "ms", 1e3)
    if slope is None:
        return rules.decided([Condition("four context lengths", None, is_missing=True)], [])
    error = _error_of_line(points)
    longest = Figure("longest context", max(place for place, _ in points), "tokens")
    words = f"up to {longest.value:,.0f} positions a line fits to within 5 %"
    linear = Condition(f"{words} ({rules.shown(error)})", error.value <= 100 * MOST_ERROR or _bends(points))
    return rules.decided([linear, curves.rises("it rises", slope)], [slope, error, longest])


def _error_of_line(points: Sequence[Point]) -> Figure:
    w, k = curves.line(points)
    errors = [(w + k * place) / time - 1 for place, time in points]
    return Figure("the line is off by", 100 * math.sqrt(statistics.fmean(e * e for e in errors)), "%", n=len(points))


def _bends(points: Sequence[Point]) -> bool | None:
    """False where the slopes of both halves differ for sure, so that it is no line; else None: it may be noise."""
    middle = statistics.median(place for place, _ in points)
    halves = [[point for point in points if (point[0] <= middle) == is_first] for is_first in (True, False)]
    first, second = (stats.slope(*zip(*half, strict=True)) if half else None for half in halves)
    if first is None or second is None:
        return None
    return False if first.high < second.low or second.high < first.low else None


def prefill_is_hundred_times_faster(evidence: Evidence) -> Judgement:
    """Claim 7."""
    lengths = rules.by_length(evidence.of("lengths"))
    n = rules.nearest(lengths, 1000)
    known = rules.figure(
        f"prefill rate over decode rate at {n or 1000:,} tokens",
        [_rate_ratio(record.run) for record in lengths.get(n or 0, [])],
        "times",
    )
    return rules.decided(
        [rules.at_least("prefill handles over 100 times as many tokens a second", known, 100)], [known]
    )


def _rate_ratio(run: Run) -> float | None:
    prefill, tpot = phases.prefill_ns(run), phases.tpot_ns(run)
    return run.n_prompt * tpot / prefill if prefill and tpot else None


CLAIMS = (
    claim(
        3,
        "Prefill time is about proportional to the length of the prompt; attention adds a quadratic part",
        "From 500 to 1,000 and to 2,000 tokens the time grows 1.9 to 2.2 times with each doubling, and a step of "
        "equally many tokens takes longer the more tokens lie before it (its slope above 0 beyond the interval).",
        ("lengths",),
        prefill_grows_with_length,
        also=("context",),
    ),
    claim(
        4,
        "The time to the first token is mostly prefill",
        "At every measured length from 100 tokens on prefill is at least 95 % of TTFT. Tokenising and waiting for "
        "other requests, which servers add, are in neither.",
        ("lengths",),
        first_token_is_prefill,
    ),
    claim(
        5,
        "The time per generated token is mostly constant",
        "Over 200 tokens after each measured prompt the slope of the times between tokens makes the 200th take at most "
        "1.05 times as long as the first.",
        ("lengths",),
        token_time_is_constant,
    ),
    claim(
        6,
        "Decode slows down linearly with the context",
        "Over the measured contexts a straight line w + k p is off by at most 5 % (root mean square), and the slope is "
        "above 0 beyond its interval. Where it is off by more, both halves must have different slopes to refute it.",
        ("context",),
        decode_slows_linearly,
    ),
    claim(
        7,
        "Prefill handles tokens over 100 times faster than decode",
        "At a prompt of 1,000 tokens the rate of prefill is at least 100 times that of decode.",
        ("lengths",),
        prefill_is_hundred_times_faster,
    ),
)
