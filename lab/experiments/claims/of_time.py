"""Claims about times: of prefill by prompt length, of a token by its position, of whole requests.

A law is judged where it was measured. Prefill is compared with prefill of half the length. Its quadratic part is
measured directly: a step of equally many tokens takes longer with more tokens before it. Times of whole requests are
computed from measured ones, interpolated linearly between lengths; a law is extrapolated only if the criterion says so.
The queue of a server is judged by requests to a real one.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence

from lab.core import phases, stats
from lab.core.lists import grouped, plural
from lab.core.record import PREFILL, Record, Run
from lab.experiments.claims import claim as rules
from lab.experiments.claims.claim import ABOVE_0, Condition, Evidence, Figure, Measured, Point, claim


@claim(
    3,
    "Prefill time is about proportional to the length of the prompt; attention adds a quadratic part",
    Condition("The time of prefill over that of half as many tokens, at 1,000 and 2,000 tokens,", 1.9, 2.2),
    Condition("The growth of a prefill step with the number of tokens before it", ABOVE_0),
    needs=("lengths",),
    also=("context",),
)
def prefill_by_length(evidence: Evidence) -> Measured:
    lengths = evidence.lengths()
    doubled = [
        rules.compared(f"prefill of {2 * n:,} tokens over that of {n:,}", lengths[n], lengths[2 * n], phases.prefill_ns)
        for n in lengths
        if 500 <= n <= 1000 and 2 * n in lengths
    ]
    return Measured((doubled, [growth_of_steps([*evidence.of("context"), *evidence.of("lengths")])]))


def growth_of_steps(records: Sequence[Record]) -> Figure | None:
    """The growth of a prefill step of the commonest size over 1,000 positions, in % of the usual step.

    Several steps at one position count as their median.
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
    return rules.slope("growth of a prefill step over 1,000 positions", points, "%", 1e5 / usual if usual > 0 else 0.0)


@claim(
    4,
    "The time to the first token is mostly prefill",
    Condition("Prefill's share of TTFT, at every measured length from 100 tokens,", 95, unit="%"),
    needs=("lengths",),
    note="Neither includes tokenising and queueing, which servers add.",
)
def prefill_of_ttft(evidence: Evidence) -> Measured:
    lengths = {n: records for n, records in evidence.lengths().items() if n >= 100}
    return Measured((rules.each(lengths, "prefill's share of TTFT at {:,} tokens", _of_ttft, "%", 100),))


def _of_ttft(run: Run) -> float | None:
    prefill, ttft = phases.prefill_ns(run), phases.ttft_ns(run)
    return prefill / ttft if prefill and ttft else None


@claim(
    5,
    "The time per generated token is mostly constant",
    Condition("The time of the 200th token over that of the first, after each measured prompt,", most=1.05),
    needs=("lengths",),
)
def growth_of_tokens(evidence: Evidence) -> Measured:
    n_gen = max(record.run.n_gen for record in evidence.of("lengths"))
    remark = f"{n_gen:,} tokens were generated; their slope is extrapolated to 200." if n_gen < 200 else ""
    name = "200th token over the first, prompt of {:,}"
    return Measured((rules.each(evidence.lengths(), name, _growth, "times"),), remark=remark)


def _growth(run: Run) -> float | None:
    """The growth over 200 tokens, from the slope of a run's times between tokens."""
    times = phases.itl_ns(run)
    rise = stats.slope(range(len(times)), times)
    if rise is None:
        return None
    first = statistics.median(times) - rise.estimate * (len(times) - 1) / 2
    return 1 + 200 * rise.estimate / first if first > 0 else None


@claim(
    6,
    "Decode slows down linearly with the context",
    Condition("The error (root mean square) of a line w + k p over the measured contexts", most=5, unit="%"),
    Condition("The slope of a token's time over its position", ABOVE_0),
    needs=("context",),
    note="A larger error refutes the claim only if the slopes of both halves differ.",
)
def token_by_position(evidence: Evidence) -> Measured:
    """The line of a token's time over its position: its slope and its error."""
    points = rules.token_times(evidence.of("context"))
    slope = rules.slope("growth of a token's time per 1,000 positions", points, "ms", 1e3)
    if slope is None:
        return Measured(())
    w, k = rules.line(points)
    mean_square = statistics.fmean(((w + k * place) / time - 1) ** 2 for place, time in points)
    error = Figure("error of the line", 100 * math.sqrt(mean_square), "%", n=len(points))
    least = error.value if _bends(points) else 0.0  # without a bend the error can be noise
    longest = Figure("longest context", max(place for place, _ in points), "tokens")
    return Measured(([dataclasses.replace(error, low=least)], [slope]), [slope, error, longest])


def _bends(points: Sequence[Point]) -> bool:
    """Whether the intervals of both halves' slopes do not overlap, so that a line does not fit."""
    middle = statistics.median(place for place, _ in points)
    halves = [[point for point in points if (point[0] <= middle) == is_first] for is_first in (True, False)]
    first, second = (stats.slope(*zip(*half, strict=True)) if half else None for half in halves)
    if first is None or second is None:
        return False
    return first.high < second.low or second.high < first.low


@claim(
    7,
    "Prefill handles tokens over 100 times faster than decode",
    Condition("The rate of prefill over that of decode, at a prompt of 1,000 tokens,", 100),
    needs=("lengths",),
)
def prefill_over_decode(evidence: Evidence) -> Measured:
    name = "prefill rate over decode rate at {:,} tokens"
    return Measured((rules.each(dict([evidence.near(1000)]), name, _rate_ratio, "times"),))


def _rate_ratio(run: Run) -> float | None:
    prefill, tpot = phases.prefill_ns(run), phases.tpot_ns(run)
    return run.n_prompt * tpot / prefill if prefill and tpot else None


@claim(
    20,
    "Without a KV cache 500 tokens take minutes, and the cost of a step grows with the square of the length",
    Condition("The sum of the measured steps over whole texts of 1 to 500 tokens", 120, unit="s"),
    Condition("The exponent of a step's time over its length, from 64 tokens,", 1.5),
    needs=("no_cache",),
)
def without_a_cache(evidence: Evidence) -> Measured:
    """The time of 500 tokens if each needs a step over the whole text before it."""
    curves = [
        sorted((float(run.n_prompt), taken / 1e9) for run in own if (taken := phases.prefill_ns(run) or 0) > 0)
        for own in grouped((record.run for record in evidence.of("no_cache")), rules.block).values()
    ]
    total = rules.figure("500 tokens without a cache", [_sum_of_steps(curve, 500) for curve in curves], "s")
    logs = [(math.log(n), math.log(s)) for curve in curves for n, s in curve if n >= 64]
    return Measured(
        ([total], [rules.slope("exponent of a step's time over its length, from 64 tokens", logs, "", 1.0)])
    )


def _sum_of_steps(curve: Sequence[Point], n: int) -> float | None:
    """Seconds of steps of 1, 2, ... n tokens, interpolated between measured lengths; None if far fewer were measured.

    Shorter steps than the shortest measured one take its time.
    """
    return sum(rules.at(curve, length) for length in range(1, n + 1)) if curve and curve[-1][0] >= 0.9 * n else None


@claim(
    25,
    "A reasoning model spends 90 % of its time decoding",
    Condition("Decode's share of the time for 500 tokens in and 5,000 out", 90, unit="%"),
    needs=("lengths",),
    note="Prefill is measured; decode follows the line through all measured positions.",
    also=("context",),
)
def decode_of_reasoning(evidence: Evidence) -> Measured:
    answers, remark = _answers(evidence, 5000)
    share = rules.share("decode's share of 500 prompt and 5,000 generated tokens", _shares(answers))
    return Measured(([share],), remark=remark)


def _answers(evidence: Evidence, n: int) -> tuple[list[Point], str]:
    """Seconds of prefill of 500 tokens and of decode of n, in each repeat, and a remark if decode is extrapolated."""
    prefill = rules.by_block(evidence.near(500)[1], phases.prefill_ns)
    context, answers, farthest = rules.token_times(evidence.of("context")), [], 0.0
    for repeat, taken_ns in prefill.items():
        own = [r for r in evidence.of("lengths") if repeat in rules.by_block([r], phases.tpot_ns)]
        points = [*rules.token_times(own), *context]
        if len({place for place, _ in points}) < 2:
            continue
        farthest = max(farthest, *(place for place, _ in points))
        w, k = rules.line(points)
        answers.append((taken_ns / 1e9, (n - 1) * (w + k * (500 + (n - 2) / 2)) / 1e3))
    is_far = answers and farthest < 500 + n
    return answers, f"Beyond position {farthest:,.0f} decode is extrapolated." if is_far else ""


def _shares(answers: Sequence[Point]) -> list[float]:
    return [decode_s / (prefill_s + decode_s) for prefill_s, decode_s in answers]


@claim(
    35,
    "A reasoning answer of 5,000 tokens costs 10 times one of 500",
    Condition("The time for 500 tokens in and 5,000 out, over that for 500 in and 500 out,", 8, 12.5),
    needs=("lengths",),
    note="Prefill is measured; decode follows the line through all measured positions.",
    also=("context",),
    source="computetape.com/learn/why-reasoning-models-cost-more-to-serve",
)
def cost_of_reasoning(evidence: Evidence) -> Measured:
    """Time and decode's share of a long answer, and its time over that of a short one."""
    (long, remark), (short, _) = _answers(evidence, 5000), _answers(evidence, 500)
    ratio = rules.figure("5,000 tokens over 500", [sum(a) / sum(b) for a, b in zip(long, short, strict=True)], "times")
    taken = rules.figure("time of 500 + 5,000 tokens", map(sum, long), "s")
    return Measured(([ratio],), [ratio, taken, rules.share("decode's share", _shares(long))], remark)


@claim(
    34,
    "A local model feels good: the first token comes within 1 s, then 15 to 50 tokens/s",
    Condition("TTFT of a prompt of 500 tokens", most=1, unit="s"),
    Condition("The rate of decode after it", 15, unit="tokens/s"),
    needs=("lengths",),
    note="More than 50 tokens/s are good too.",
    source="mljourney.com, How many tokens per second is good for local LLMs; appliedllms.org, LLM latency budgets",
)
def good_values(evidence: Evidence) -> Measured:
    """TTFT and decode rate of the model at a usual length."""
    n, records = evidence.near(500)
    ttft = rules.figure(f"TTFT at {n:,} tokens", [phases.ttft_ns(record.run) for record in records], "s", 1e-9)
    rate = rules.figure(f"decode after {n:,} tokens", [rules.decode_tps(one.run) for one in records], "tokens/s")
    where = "below" if rate and rate.value < 15 else "above" if rate and rate.value > 50 else "within"
    return Measured(([ttft], [rate]), remark=f"The rate is {where} 15 to 50 tokens/s." if rate else "")


@claim(
    26,
    "Long prompts push the first token beyond 1 to 2 seconds",
    Condition("The length at which TTFT passes 1 s, over the longest that counts,", most=1),
    needs=("lengths",),
    note="The longest is the longest measured length or, if longer, the context that the model was trained for. "
    "Between measured lengths TTFT is interpolated, beyond the last it is extrapolated.",
    also=("context",),
)
def late_first_token(evidence: Evidence) -> Measured:
    runs = [*evidence.of("lengths"), *evidence.of("context")]
    legs = [(leg, (record.run.repeat, record.run.every)) for record in runs for leg in phases.by_length(record.run)]
    curves = [
        sorted((float(leg.n_prompt), (phases.ttft_ns(leg) or 0) / 1e9) for leg, _ in own)
        for own in grouped(legs, lambda pair: pair[1] if (phases.ttft_ns(pair[0]) or 0) > 0 else None).values()
    ]
    one, two = (_passing(curves, limit) for limit in (1.0, 2.0))
    longest = max((place for curve in curves for place, _ in curve), default=0.0)
    most = max(longest, float(runs[0].model.n_ctx_train or 0))
    is_continued = one is not None and one.value > longest
    remark = f"Beyond {longest:,.0f} tokens the curve is extrapolated." if is_continued else ""
    of_most = rules.scaled(one, 1 / most, f"length at which TTFT passes 1 s, over {most:,.0f} tokens") if most else None
    return Measured(([of_most],), [one, two], remark)


def _passing(measured: Sequence[Sequence[Point]], limit_s: float) -> Figure | None:
    """The length at which TTFT passes a limit, from the curves that reach it, else from all, extrapolated."""
    reaching = [curve for curve in measured if curve[-1][1] >= limit_s] or measured
    return rules.figure(f"TTFT passes {limit_s:g} s at", [_length_at(curve, limit_s) for curve in reaching], "tokens")


def _length_at(curve: Sequence[Point], limit_s: float) -> float | None:
    """Where a rising curve passes a limit, linear from 0 through its points and extrapolated beyond the last."""
    for (x0, y0), (x1, y1) in itertools.pairwise([(0.0, 0.0), *curve]):
        is_last = x1 == curve[-1][0]
        if y1 > y0 and (y0 <= limit_s <= y1 or is_last):
            return x0 + (x1 - x0) * (limit_s - y0) / (y1 - y0)
    return None


@claim(
    36,
    "Above its capacity a server's queue grows without bound",
    Condition("The growth of TTFT per second of load, with requests at twice the capacity,", 500, unit="ms"),
    Condition("The same at half the capacity", most=50, unit="ms"),
    needs=("queue",),
    note="The capacity is the rate of one user of llama_cpp.server, which answers one request after the other. At "
    "twice the capacity a growth of 1,000 ms is expected, for as long as the load lasts.",
    source="ttsugriy.github.io/performance-book, Queueing theory for serving",
)
def growth_of_the_queue(evidence: Evidence) -> Measured:
    """The slope of TTFT over the time at which a request was due, above and below the capacity."""
    loads = [one for record in evidence.of("queue") if (one := record.run.arrivals)]
    above, below = ([one for one in loads if (one.rate > one.capacity) == is_above] for is_above in (True, False))
    figures = []
    for one in [*above[:1], *below[:1]]:
        points = [(due / 1e9, ttft / 1e6) for due, ttft in zip(one.due_ns, one.ttft_ns, strict=True)]
        name = f"growth of TTFT per second at {one.rate / one.capacity:.2g} times the capacity"
        figures.append(rules.slope(name, points, "ms", 1.0))
    capacity = Figure("capacity", loads[0].capacity, "requests/s") if loads else None
    n_failed = sum(one.n_failed for one in above)
    remark = f"{plural(n_failed, 'request')} failed above the capacity." if n_failed else ""
    tested = [[figure] for figure in figures] if above and below else []
    return Measured(tested, [*figures, capacity], remark)


CLAIMS = (
    prefill_by_length,
    prefill_of_ttft,
    growth_of_tokens,
    token_by_position,
    prefill_over_decode,
    without_a_cache,
    decode_of_reasoning,
    late_first_token,
    good_values,
    cost_of_reasoning,
    growth_of_the_queue,
)
