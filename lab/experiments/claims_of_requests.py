"""Claims about whole requests: 500 tokens without a cache, where a long answer's time goes, a first token that is late.

Each is worked out from times that were measured at some lengths: between them on straight lines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from lab.core import phases
from lab.core.record import Record
from lab.experiments import claim_curves as curves
from lab.experiments import claim_rules as rules
from lab.experiments.claim import Evidence, Figure, Judgement
from lab.experiments.claim_curves import Point
from lab.experiments.claim_rules import claim


def without_a_cache(evidence: Evidence) -> Judgement:
    """Claim 20."""
    records = evidence.of("no_cache")
    repeats = set(rules.by_block(records, phases.prefill_ns))
    of_repeats = [
        sorted((float(r.run.n_prompt), taken / 1e9) for r in records if (taken := _taken(r, repeat)))
        for repeat in repeats
    ]
    total = rules.figure("500 tokens without a cache", [_sum_of_steps(curve, 500) for curve in of_repeats], "s")
    logs = [(math.log(n), math.log(s)) for curve in of_repeats for n, s in curve if n >= 64]
    exponent = curves.slope("exponent of a step's time by the length, from 64 tokens on", logs, "", 1.0)
    conditions = [
        rules.at_least("500 tokens take two minutes or more", total, 120),
        rules.at_least("a step's time grows with an exponent nearer to 2 than to 1", exponent, 1.5),
    ]
    return rules.decided(conditions, [total, exponent])


def _taken(record: Record, repeat: int) -> int | None:
    own = record.run.repeat if record.run.block is None else record.run.block
    taken = phases.prefill_ns(record.run)
    return taken if own == repeat and taken and taken > 0 else None


def _sum_of_steps(curve: Sequence[Point], n: int) -> float | None:
    """Seconds of steps of 1, 2, ... n tokens; None where far fewer were measured.

    Short ones take what the shortest measured took, those between what a straight line says.
    """
    return sum(curves.at(curve, length) for length in range(1, n + 1)) if curve and curve[-1][0] >= 0.9 * n else None


def reasoning_is_decoding(evidence: Evidence) -> Judgement:
    """Claim 25."""
    lengths = rules.by_length(evidence.of("lengths"))
    n = rules.nearest(lengths, 500)
    prefill = rules.by_block(lengths.get(n or 0, []), phases.prefill_ns)
    context, shares, farthest = curves.token_times(evidence.of("context")), [], 0.0
    for repeat, taken_ns in prefill.items():
        own = [r for r in evidence.of("lengths") if repeat in rules.by_block([r], phases.tpot_ns)]
        points = [*curves.token_times(own), *context]
        if len({place for place, _ in points}) < 2:
            continue
        farthest = max(farthest, *(place for place, _ in points))
        w, k = curves.line(points)
        decode_s = 4999 * (w + k * (500 + 4998 / 2)) / 1e3
        shares.append(decode_s / (decode_s + taken_ns / 1e9))
    known = rules.figure("decoding 5,000 tokens, of the whole after a prompt of 500", shares, "%", 100)
    remark = f"Beyond position {farthest:,.0f} the law of decode is continued." if shares and farthest < 5500 else ""
    return rules.decided([rules.at_least("decoding takes at least 90 % of the time", known, 90)], [known], remark)


def long_prompts_delay_the_first_token(evidence: Evidence) -> Judgement:
    """Claim 26."""
    runs = [*evidence.of("lengths"), *evidence.of("context")]
    by_repeat: dict[object, list[Point]] = {}
    for record in runs:
        for leg in phases.by_length(record.run):
            if (ttft := phases.ttft_ns(leg)) and ttft > 0:
                by_repeat.setdefault((record.run.repeat, record.run.every), []).append(
                    (float(leg.n_prompt), ttft / 1e9)
                )
    one, two = (_passing(list(map(sorted, by_repeat.values())), limit) for limit in (1.0, 2.0))
    longest = max((place for curve in by_repeat.values() for place, _ in curve), default=0.0)
    most = max(longest, float(runs[0].model.n_ctx_train or 0))
    words = f"within {most:,.0f} tokens (measured, or the model's context) the first token comes later than 1 s"
    remark = (
        f"Beyond {longest:,.0f} tokens the curve is continued as it rose last." if one and one.value > longest else ""
    )
    return rules.decided([rules.at_most(words, one, most)], [one, two], remark)


def _passing(measured: Sequence[Sequence[Point]], limit_s: float) -> Figure | None:
    """The length at which TTFT passes a limit, of the curves that reach it, else of all, continued."""
    reaching = [curve for curve in measured if curve[-1][1] >= limit_s] or measured
    return rules.figure(f"TTFT passes {limit_s:g} s at", [_length_at(curve, limit_s) for curve in reaching], "tokens")


def _length_at(curve: Sequence[Point], limit_s: float) -> float | None:
    """Where a rising curve passes a limit, on straight lines from 0 through its points, the last of them continued."""
    for (x0, y0), (x1, y1) in itertools.pairwise([(0.0, 0.0), *curve]):
        is_last = x1 == curve[-1][0]
        if y1 > y0 and (y0 <= limit_s <= y1 or is_last):
            return x0 + (x1 - x0) * (limit_s - y0) / (y1 - y0)
    return None


CLAIMS = (
    claim(
        20,
        "Without a KV cache 500 tokens take minutes, and the cost of a step grows with the square of the length",
        "The sum of the measured steps over whole texts of 1 to 500 tokens is two minutes or more, and from 64 tokens "
        "on the exponent of a step's time by length is at least 1.5.",
        ("no_cache",),
        without_a_cache,
    ),
    claim(
        25,
        "A reasoning model spends 90 % of its time decoding",
        "For 500 tokens in and 5,000 out, prefill as measured and decode by the line through all measured positions: "
        "decode is at least 90 % of both.",
        ("lengths",),
        reasoning_is_decoding,
        also=("context",),
    ),
    claim(
        26,
        "Long prompts push the first token beyond 1 to 2 seconds",
        "The length at which TTFT passes 1 s, between measured lengths or continued as it rose last, lies within what "
        "was measured or within the context that the model was trained for.",
        ("lengths",),
        long_prompts_delay_the_first_token,
        also=("context",),
    ),
)
