"""What the lessons conclude: figures in, a sentence out.

A conclusion names its subject and its verdict, so that a test can hold the lessons against each
other. Each question has one function, which all lessons call: two figures differ if NEAR and the
runs say so, attention is judged by `lab.core.growth`, and a phase by `lab.roofline.explanation`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.core import growth
from lab.core.growth import KERNEL, SLOPE, Growth
from lab.core.lists import join_and, plural
from lab.core.record import DECODE, Placement
from lab.core.stats import Ratio
from lab.features.claims.judging import CLAIMS
from lab.roofline import explanation
from lab.roofline.explanation import OF_ATTENTION, CostedPhase
from lab.show.sweep_laws import Law
from lab.show.wording import digits, percent, seconds, times

SAME = "the same"
MORE = "more"
LESS = "less"
UNCLEAR = "unclear"
"""Verdicts on the ratio of two figures."""

HOLDS = "holds"
FAILS = "does not hold"
CLEAR = 5  # in logarithms: the nearest ends differ by a quarter of the rest of the range
NEAR = 1.1  # a ratio within this factor of 1 counts as none
NEAR_PERCENT = f"{100 * (NEAR - 1):.0f} %"
CONSTANT: float = CLAIMS[3]["conditions"][0]["most"]
"""The tokens of an answer take the same time up to this factor: lesson 8 tests it as a claim."""
NAMED = 0.25  # of a phase: attention or other work is named, although it is not the limit
BATCH_SHARED = 0.7  # of the ideal gain: from here on users share nearly all of a step
EXPLAINED = 0.5
OVEREXPLAINED = 1.5
"""Shares of a clear difference, in logarithms, between which a prediction explains it."""
AGREE = 1.25  # a prediction within this factor of the measured figure explains it
WEIGHTS = "the kernels of the weights"
WORK_OUTSIDE = "the work outside the kernels"
"""Parts of a generated token, besides attention."""

FEWEST_RUNS = 2  # of each side, to conclude from
UNSURE_FACTOR = 2  # between the ends of an overhead: from here on its size is not told
NOISY = "Here the runs differ too much to tell. Measure again while no other program runs."


@dataclass(frozen=True)
class Judgement:
    """A conclusion: about what, which one, and in words."""

    subject: str
    verdict: str
    sentence: str


@dataclass(frozen=True)
class RunsRatio(Ratio):
    """A ratio of a few runs: its ends are the lowest and the highest, and no interval."""


def ratio(base: Sequence[float], candidate: Sequence[float]) -> Ratio | None:
    """Other over base: of their medians, and from the lowest to the highest of any two runs.

    None where a side has no run, or a time that is not positive.
    """
    usable = [value for value in (*base, *candidate) if value > 0]  # drops NaN, too
    if not base or not candidate or len(usable) < len(base) + len(candidate):
        return None
    middle = statistics.median(candidate) / statistics.median(base)
    return RunsRatio(middle, min(candidate) / max(base), max(candidate) / min(base))


def judged(measured: Ratio | None, near: float = NEAR) -> str:
    """Whether the other figure is clearly larger or smaller, or the same as far as it matters.

    Clear is an interval on one side of 1. Of the ends of runs it is a difference above a quarter of
    what the runs differ by: equal figures with two runs each would look different in a third of all
    cases without this, with three in a tenth. With it those with three do so in 3 of 100.
    """
    if measured is None:
        return UNCLEAR
    if measured.low > 1 / near and measured.high < near:
        return SAME
    power = CLEAR if isinstance(measured, RunsRatio) else math.inf
    if measured.low > 1 and measured.low**power > measured.high:
        return MORE
    if measured.high < 1 and measured.high**power < measured.low:
        return LESS
    return UNCLEAR


def within_runs(early: Sequence[float], late: Sequence[float]) -> Ratio | None:
    """Late over early, of two figures of the same runs: the median run, the lowest, the highest.

    What makes a whole run slow cancels. None where a run lacks one of them.
    """
    usable = [value for value in (*early, *late) if value > 0]
    if not early or len(early) != len(late) or len(usable) < 2 * len(early):
        return None
    factors = [after / before for before, after in zip(early, late, strict=True)]
    return RunsRatio(statistics.median(factors), min(factors), max(factors))


def as_printed(measured: Ratio | None) -> Ratio | None:
    """A ratio of three digits, as it is printed: so that a verdict does not turn on the fourth."""
    if measured is None:
        return None
    estimate, low, high = (
        float(f"{value:.3g}") for value in (measured.estimate, measured.low, measured.high)
    )
    return dataclasses.replace(measured, estimate=estimate, low=low, high=high)


def shown(measured: Ratio | None) -> str:
    """A ratio and what its ends are, such as `1.86 times (1.80 to 1.90 in the runs)`; `an unknown
    factor` for None."""
    if measured is None:
        return "an unknown factor"
    ends = f"{digits(measured.low)} to {digits(measured.high)}"
    source = " in the runs" if isinstance(measured, RunsRatio) else ", 95 % interval"
    return f"{digits(measured.estimate)} times ({ends}{source})"


def along_answer(
    n_prompt: int, early_ms: Sequence[float], late_ms: Sequence[float]
) -> Judgement:
    """Whether the last tokens of an answer take longer than its first ones, run by run."""
    measured = as_printed(within_runs(early_ms, late_ms))
    verdict = judged(measured, CONSTANT)
    least = 1 / CONSTANT
    shows_nothing = measured is not None and measured.high > least and measured.low < CONSTANT
    if shows_nothing and verdict in (MORE, LESS):  # one of the few runs
        verdict = UNCLEAR
    limit = percent(CONSTANT - 1)
    ends = {
        SAME: f"all tokens of the answer take the same time within {limit}",
        MORE: f"the last tokens of the answer take over {limit} longer than its first ones",
        LESS: "the last tokens of the answer take less time than its first ones, which the length "
        "of the text cannot explain: something disturbed the first ones",
        UNCLEAR: _in_every_run(measured),
    }
    sentence = f"After {n_prompt:,} prompt tokens {ends[verdict]}"
    if measured is not None:
        early = digits(statistics.median(early_ms))
        sentence += (
            f" ({early} ms at the beginning; the last ones take {shown(measured)} as long)"
        )
    return Judgement(f"decode along an answer after {n_prompt}", verdict, f"{sentence}.")


def _in_every_run(measured: Ratio | None) -> str:
    """What an unclear ratio of an answer's ends still shows."""
    limit = percent(CONSTANT - 1)
    if measured is None:
        return "the runs do not tell whether later tokens take longer"
    if measured.high < CONSTANT:
        return f"the last tokens of the answer take over {limit} longer in no run"
    if measured.low <= 1:
        return "the runs do not agree whether later tokens take longer"
    return (
        f"the last tokens of the answer take longer in every run, but not in every run by over "
        f"{limit}"
    )


def longer_prompt(
    lengths: tuple[int, int], prefill: Ratio | None, token: Ratio | None
) -> Judgement:
    """What a longer prompt does to both phases."""
    short, long = lengths
    verdict = judged(token)
    costs = {
        SAME: f"and each token of the answer takes as long as before within {NEAR_PERCENT}",
        MORE: "and each token of the answer takes longer, too",
        LESS: "and the tokens of the answer were even faster, so something disturbed the short "
        "prompt",
        UNCLEAR: "and the runs differ too much to tell what it does to the tokens of the answer",
    }
    sentence = (
        f"A prompt of {long:,} tokens has {digits(long / short)} times as many as one of "
        f"{short:,}. Its prefill takes {shown(prefill)} as long, {costs[verdict]}: {shown(token)}."
    )
    return Judgement("decode after a longer prompt", verdict, sentence)


def law_holds(
    name: str, law: Law, measured: Sequence[tuple[float, Sequence[float]]]
) -> Judgement:
    """Whether a fitted law holds at (tokens, seconds of runs) that were measured apart from it."""
    lengths = join_and([f"{n:,.0f}" for n, _ in sorted(measured)])
    subject = f"law of {name} at {lengths} tokens"
    shown_pairs = []
    misses = []
    unsure = []
    off = []
    for n, runs_s in sorted(measured):
        by_law_s = law.seconds(n)
        measured_s = statistics.median(runs_s)
        error = 100 * (by_law_s / measured_s - 1)
        shown_pairs.append(
            f"at {n:,.0f} tokens it says {seconds(by_law_s)}, and {seconds(measured_s)} were "
            f"measured ({error:+.0f} %)"
        )
        if by_law_s > AGREE * max(runs_s) or AGREE * by_law_s < min(runs_s):
            misses.append(f"{n:,.0f}")
        elif not 1 / AGREE < by_law_s / measured_s < AGREE:
            unsure.append(f"{n:,.0f}")
        elif abs(by_law_s / measured_s - 1) > NEAR - 1:
            off.append(f"{abs(error):.0f} % at {n:,.0f} tokens")
    sentence = f"The law of {name}: {'; '.join(shown_pairs)}."
    if unsure and not misses:
        sentence += f" The runs at {join_and(unsure)} tokens differ too much to tell."
        return Judgement(subject, UNCLEAR, sentence)
    if off and not misses:
        return Judgement(subject, HOLDS, f"{sentence} It is off by {join_and(off)}.")
    if not misses:
        return Judgement(subject, HOLDS, f"{sentence} It holds there within {NEAR_PERCENT}.")
    sentence += f" It does not hold at {join_and(misses)} tokens: do not use it there."
    if off:
        sentence += f" It is off by {join_and(off)}, too."
    if unsure:
        sentence += f" The runs at {join_and(unsure)} tokens differ too much to tell."
    return Judgement(subject, FAILS, sentence)


def limit(row: CostedPhase, name: str) -> Judgement:
    """What limits a phase, from a row of `lab.explain`: memory, arithmetic, a kernel, or work
    outside the kernels."""
    verdict = explanation.limit_of(row)
    memory = allowed("memory", row.measured_s / row.traffic_s)
    arithmetic = allowed("arithmetic", row.measured_s / row.arithmetic_s)
    attention_share = row.attention_s / row.measured_s
    ends = {
        explanation.TRAFFIC: "memory is the limit",
        explanation.ARITHMETIC: "arithmetic is the limit",
        explanation.KERNEL: "neither is the limit; the kernel of the weights is",
        explanation.OVERHEAD: "neither is the limit; the work outside the large kernels is",
        OF_ATTENTION[explanation.TRAFFIC]: "attention is the limit, and it waits for memory",
        OF_ATTENTION[explanation.ARITHMETIC]: "attention is the limit, by its arithmetic",
        OF_ATTENTION[explanation.KERNEL]: "neither is the limit; the kernel of attention is",
    }
    end = ends[verdict]
    is_of_attention = verdict == OF_ATTENTION[explanation.KERNEL]
    if is_of_attention and attention_of_row(row).verdict == SLOPE:
        end = "neither is the limit; attention is, with a kernel of the usual speed"
    elif verdict not in OF_ATTENTION.values() and attention_share > NAMED:
        end += f", and attention takes {percent(attention_share)} of the time"
    outside_share = 1 - row.least_s / row.measured_s
    if verdict != explanation.OVERHEAD and outside_share > NAMED:
        end += f"; {WORK_OUTSIDE} takes {percent(outside_share)} of the time"
    return Judgement(
        f"limit of {name}", verdict, f"In {name}, {memory}, and {arithmetic}: {end}."
    )


def limit_in_runs(rows: Sequence[CostedPhase], name: str) -> Judgement:
    """What limits a phase, from rows of its fastest run, the median one and the slowest.

    Unclear where they do not agree: then the time is near the rule's limit.
    """
    by_run = [limit(row, name) for row in rows]
    verdicts = list(dict.fromkeys(judgement.verdict for judgement in by_run))
    if len(verdicts) == 1:
        return by_run[len(by_run) // 2]
    factors = [row.measured_s / row.traffic_s for row in rows]
    sentence = (
        f"In {name}, memory would allow {times(min(factors))} to {times(max(factors))} the speed "
        f"in the runs: by the fastest run the limit is {verdicts[0]}, and by the slowest "
        f"{verdicts[-1]}. So these runs do not tell which."
    )
    return Judgement(f"limit of {name}", UNCLEAR, sentence)


def allowed(resource: str, factor: float) -> str:
    """How many times as fast a step would be with nothing but this resource."""
    if factor < 1:
        return f"{resource} delivers more than the best rate that was measured alone"
    return f"{resource} would allow {times(factor)} the speed"


def attention_of_row(row: CostedPhase) -> Judgement:
    """Whether attention has a slow kernel, from a row of `lab.explain`: by its rate and that of the
    layers' weights, both at their ceilings."""
    attention_s = row.parts.get(explanation.ATTENTION, 0.0)
    layers_s = row.parts.get(explanation.LAYERS, 0.0)
    if not attention_s or not layers_s:
        return slow_attention(None, row.phase)
    work = row.attention_flops
    weights = row.flops - work
    if row.phase == DECODE:
        work = row.attention_bytes
        weights = row.n_bytes - work
    weight_rate = weights / (row.least_s - attention_s)
    best_rate = row.flops / row.arithmetic_s
    if row.phase == DECODE:
        best_rate = row.n_bytes / row.traffic_s
    rate = work / attention_s
    reads = row.attention_flops / attention_s
    verdict = growth.verdict(row.phase, rate / weight_rate, reads / weight_rate)
    why = growth.BETWEEN if verdict == growth.UNKNOWN else ""
    law = Growth(row.phase, verdict, why, 0.0, rate, weight_rate, reads)
    return slow_attention(law, row.phase, "Alone, at its ceiling,", best_rate)


def slow_attention(
    law: Growth | None,
    phase: str,
    where: str = "By the median steps at both ends,",
    best_rate: float = 0.0,
) -> Judgement:
    """Whether attention is as fast as sound kernels are, or its kernel is slower.

    `where` begins the sentence: which steps the rates are of. `best_rate`: the best of the machine,
    in bytes/s for decode and FLOP/s for prefill; 0 where it is not known.
    """
    subject = f"attention in {phase}"
    if law is None or not law.rate:
        why = law.why if law is not None else "no two lengths were timed"
        sentence = f"What {subject} waits for cannot be told from these runs: {why}."
        return Judgement(subject, UNCLEAR, sentence)
    resource, unit = ("memory", "GB/s") if phase == DECODE else ("arithmetic", "GFLOP/s")
    rates = (
        f"{where} attention works at {digits(law.rate / 1e9)} {unit} in {phase}, and all weights "
        f"at {digits(law.weight_rate / 1e9)} {unit}"
    )
    if law.verdict == KERNEL:
        factor = times(law.weight_rate / law.rate)
        sentence = (
            f"{rates}: {resource} would allow {factor} as much. Neither memory nor arithmetic "
            "limits attention here: llama.cpp's kernel for it does."
        )
        return Judgement(subject, KERNEL, sentence)
    if law.verdict == SLOPE:
        sentence = f"{rates}. {why_usual(law)} {limit_of_usual(law, best_rate)}"
        return Judgement(subject, SLOPE, sentence)
    sentence = f"{rates}. That is {law.why}, so these runs do not show which."
    return Judgement(subject, UNCLEAR, sentence)


def limit_of_usual(law: Growth, best_rate: float) -> str:
    """What limits attention with a kernel of a usual speed, as far as the rates of the weights and
    the machine's best one show it: what a machine does for them, it could do for attention."""
    resource = "memory" if law.phase == DECODE else "arithmetic"
    limited = (
        f"as much, so {resource} does not limit attention: the kernel does, at a usual speed."
    )
    far_rate = explanation.KERNEL_FACTOR * law.rate
    if law.weight_rate > far_rate:
        factor = times(law.weight_rate / law.rate)
        return f"For the weights {resource} does {factor} {limited}"
    if best_rate > far_rate:
        return f"At best {resource} does {times(best_rate / law.rate)} {limited}"
    return "That does not say what limits it."


def why_usual(law: Growth) -> str:
    """Why a rate of attention is that of a sound kernel; the limits are those of `growth`."""
    least = growth.PLAUSIBLE_BYTES if law.phase == DECODE else growth.PLAUSIBLE_FLOPS
    share = law.rate / law.weight_rate
    if share >= 1:
        return "Attention is no slower."
    if share >= least:
        return (
            "Attention is no slower than sound kernels usually are (at least "
            f"{100 * least:.0f} % of the rate of the weights)."
        )
    return (
        "But it computes with each number of the cache once for each query head: counted so, and "
        f"in F16, it works at {digits(law.rate_of_reads / 1e9)} GB/s, as sound kernels do."
    )


def cheaper_prompt_token(
    token_ms: float,
    prompt_token_ms: float,
    reading_ms: float,
    saved_ms: dict[str, float],
    limit: str,
) -> Judgement:
    """Why a prompt token is cheaper than a generated one.

    `saved_ms`: by how much each part of a generated token takes longer than that part of a prompt
    token. `limit`: that of decode.
    """
    subject = "why a prompt token is cheaper"
    figures = (
        f"A generated token takes {digits(token_ms)} ms and a prompt token "
        f"{digits(prompt_token_ms)} ms. Reading all weights takes {digits(reading_ms)} ms at the "
        "machine's best rate"
    )
    difference_ms = token_ms - prompt_token_ms
    if difference_ms < (1 - 1 / NEAR) * token_ms:
        sentence = f"{figures}. A prompt token is hardly cheaper here: sharing gains little."
        return Judgement(subject, SAME, sentence)
    share = f"{figures}, {percent(reading_ms / difference_ms)} of the difference"
    if limit == explanation.TRAFFIC and reading_ms > difference_ms / 2:
        sentence = f"{share}. So sharing it can be the reason, as the textbook says."
        return Judgement(subject, "reading", sentence)
    if reading_ms > difference_ms / 2:
        share += ". But decode does not wait for memory here"
    largest = max(saved_ms, key=lambda name: saved_ms[name])
    largest_share = percent(saved_ms[largest] / difference_ms)
    part = (
        f"Divided into {WEIGHTS}, attention and {WORK_OUTSIDE}, the largest part of the "
        f"difference is {largest}: {largest_share}"
    )
    if largest == WEIGHTS:
        part += ". They read the weights and unpack them"
    sentence = f"{share}. So sharing that does not explain most of the difference. {part}."
    return Judgement(subject, largest, sentence)


def by_length(subject: str, measured: Mapping[int, Ratio | None]) -> Judgement:
    """How two settings compare at each measured length, which needs no fitted line."""
    lengths = sorted(measured)
    pairs = [f"{shown(measured[n])} after {n:,} tokens" for n in lengths]
    verdict = judged(measured[lengths[-1]])
    differing = {
        n: judged(measured[n]) for n in lengths if judged(measured[n]) in (MORE, LESS)
    }
    where = "At the longest"
    doubt = ""
    if verdict == UNCLEAR and len(differing) > 1 and len(set(differing.values())) == 1:
        verdict = differing[min(differing)]
        where = f"After {join_and([f'{n:,}' for n in differing])} tokens"
        doubt = " At the longest the runs differ too much to tell."
    ends = {
        SAME: f"{where} the difference is below {NEAR_PERCENT}.",
        MORE: f"{where} it clearly takes longer.{doubt}",
        LESS: f"{where} it clearly takes less time.{doubt}",
        UNCLEAR: NOISY,
    }
    name = subject[:1].upper() + subject[1:]
    return Judgement(subject, verdict, f"{name}: {'; '.join(pairs)}. {ends[verdict]}")


def same_weights(larger: Law, smaller: Law, bytes_ratio: float) -> Judgement:
    """Whether two fitted laws of decode agree on w, for weights with this
    ratio of bytes, the larger over the smaller."""
    subject = "w of similar weights"
    figures = (
        f"The weights have {digits(bytes_ratio)} times the bytes, and the lines say "
        f"{seconds(larger.a)} and {seconds(smaller.a)} for w"
    )
    if larger.a > 0 and smaller.a > 0 and 1 / NEAR < larger.a / smaller.a / bytes_ratio < NEAR:
        return Judgement(subject, SAME, f"{figures}, as the bytes do within {NEAR_PERCENT}.")
    sentence = (
        f"{figures}, which the bytes do not explain: these points do not separate w from k, or "
        "more than the bytes differs. So do not rely on either, and compare the measured steps."
    )
    return Judgement(subject, UNCLEAR, sentence)


def smaller_cache(token: Judgement, share: float) -> Judgement:
    """What a token's time with a cache of this share of the bytes says of memory's part in it."""
    subject = "attention to the smaller cache waits for memory"
    figures = f"The smaller cache has {percent(share)} of the bytes"
    if token.verdict == MORE:
        sentence = (
            f"{figures}, and a token takes longer: attention to it does not wait for memory."
        )
        return Judgement(subject, FAILS, sentence)
    if token.verdict == LESS:
        sentence = f"{figures}, and a token takes less time: fewer bytes or a faster kernel."
        return Judgement(subject, UNCLEAR, sentence)
    sentence = f"{figures}. These times do not show whether attention to it waits for memory."
    return Judgement(subject, UNCLEAR, sentence)


def shared_heads(
    steps: tuple[Ratio | None, Ratio | None], bytes_ratio: float, attention: Judgement | None
) -> Judgement:
    """What fewer heads for keys and values change in the shortest and the longest measured step.

    `attention`: what limits it; None where the runs do not tell its rate.
    """
    shortest, longest = steps
    verdict = judged(longest)
    ends = {
        SAME: "Sharing heads saves memory here, and no time that matters",
        MORE: "The step without sharing clearly takes longer",
        LESS: "The step without sharing is faster, which the bytes cannot explain",
        UNCLEAR: "The runs differ too much to tell whether sharing saves time",
    }
    sentence = (
        f"Without sharing, the longest measured step takes {shown(longest)} as long, with "
        f"{bytes_ratio:.0f} times the bytes of cache, and the shortest one {shown(shortest)}. "
        f"{ends[verdict]}."
    )
    if attention is not None:
        sentence += f" {attention.sentence}"
    return Judgement("heads that share a cache, in time", verdict, sentence)


def explains(
    what: str, base: str, predicted: float, measured: Ratio | None, attention: Judgement
) -> Judgement:
    """Whether the ceilings explain the ratio of two times, such as those of two machines.

    An interval that is wider than what counts as agreement would agree with anything. Ceilings that
    predict no difference do not explain a clear one.
    """
    subject = f"ceilings explain {what}"
    name = what[:1].upper() + what[1:]
    if measured is None:
        return Judgement(subject, UNCLEAR, f"{name}: {NOISY}")
    figures = (
        f"{name} takes {shown(measured)} as long as {base}, and {digits(predicted)} times by the "
        "ceilings"
    )
    is_clear = judged(measured) in (MORE, LESS)
    explained = math.log(predicted) / math.log(measured.estimate) if is_clear else 1.0
    off = measured.estimate / predicted
    is_within = measured.low / NEAR <= predicted <= measured.high * NEAR
    is_near = 1 / AGREE < off < AGREE
    most = OVEREXPLAINED if is_near else 1.0
    if explained > most and not is_within:
        sentence = f"{figures}: in the same direction, but more than was measured."
        return Judgement(subject, UNCLEAR if is_near else FAILS, sentence)
    agrees = explained >= EXPLAINED and (is_within or is_near)
    reach = max(measured.high / measured.estimate, measured.estimate / measured.low)
    if agrees and reach > AGREE:
        sentence = (
            f"{figures}. Both agree, but the interval is wide: these runs cannot tell more closely "
            "how much of the difference the kernels explain."
        )
        return Judgement(subject, UNCLEAR, sentence)
    if agrees:
        sentence = f"{figures}: they agree, so the kernels explain it"
        if attention.verdict == KERNEL:
            sentence += ", and the slow kernel of attention is one of them"
        return Judgement(subject, HOLDS, f"{sentence}.")
    reason = "work outside of the kernels, or other programs"
    if attention.verdict == KERNEL:
        reason = "the slow kernel of attention, too"
    effect = "explain only a part of" if EXPLAINED <= explained < 1 else "do not explain"
    sentence = f"{figures}. The kernels {effect} the difference: the rest can be {reason}."
    return Judgement(subject, FAILS, sentence)


def threads_gain(
    prefill: Ratio | None, decode: Ratio | None, n_threads: int, by_block: Ratio | None = None
) -> Judgement:
    """What more threads do for both phases, from times with all threads over those with one.

    `by_block`: decode's ratio over prefill's in each block; without it their ends are compared.
    """
    subject = "threads help prefill more than decode"
    gains = []
    for phase, measured in (("prefill", prefill), ("decode", decode)):
        faster = inverse(measured)
        sizes = {
            MORE: f"{shown(faster)} as fast",
            SAME: f"as fast as with one within {NEAR_PERCENT} ({shown(faster)})",
            LESS: f"slower than with one ({shown(faster)} as fast)",
            UNCLEAR: f"not clearly faster or slower ({shown(faster)} as fast)",
        }
        gains.append(f"{phase} is {sizes[judged(faster)]}")
    sentence = f"With {n_threads} threads {' and '.join(gains)}."
    if prefill is None or decode is None:
        return Judgement(subject, UNCLEAR, sentence)
    gain = by_block or Ratio(
        decode.estimate / prefill.estimate,
        decode.low / prefill.high,
        decode.high / prefill.low,
    )
    if by_block is not None:
        sentence += f" Block by block prefill gains {shown(by_block)} as much as decode."
    ends = {
        MORE: "Prefill clearly gains more.",
        LESS: "Decode clearly gains more.",
        SAME: f"Both gain the same within {NEAR_PERCENT}.",
        UNCLEAR: "These runs do not show clearly which phase gains more.",
    }
    return Judgement(subject, judged(gain), f"{sentence} {ends[judged(gain)]}")


def inverse(measured: Ratio | None) -> Ratio | None:
    """How many times as fast, from how many times as long."""
    if measured is None:
        return None
    ends = (1 / measured.high, 1 / measured.low)
    return dataclasses.replace(
        measured, estimate=1 / measured.estimate, low=ends[0], high=ends[1]
    )


def textbook(what: str, predicted: float, measured: Ratio | None) -> Judgement:
    """Whether a ratio that the textbook predicts was measured."""
    subject = f"the textbook on {what}"
    figures = (
        f"{what} takes {shown(measured)} as long; by the textbook {digits(predicted)} times"
    )
    if measured is None:
        return Judgement(subject, UNCLEAR, f"{figures}. {NOISY}")
    if predicted / NEAR <= measured.low and measured.high <= predicted * NEAR:
        return Judgement(subject, HOLDS, f"{figures}. Here it is right.")
    if measured.low <= predicted <= measured.high:
        return Judgement(subject, UNCLEAR, f"{figures}, which these runs do not refute.")
    return Judgement(subject, FAILS, f"{figures}. Here the kernels make the difference.")


def repacked(kind: str, placement: Placement | None) -> Judgement:
    """Whether llama.cpp keeps weights of a type in an order of its own, by its buffers."""
    subject = f"{kind} is repacked"
    buffers = placement.buffers if placement is not None else ()
    names = sorted({buffer.name for buffer in buffers if buffer.part == "model"})
    if not names:
        return Judgement(
            subject, UNCLEAR, f"{kind}: llama.cpp did not say where its weights lie."
        )
    orders = [name for name in names if name == "AMX" or name.endswith("REPACK")]
    if orders:
        sentence = f"{kind}: llama.cpp repacked weights here (buffer {join_and(orders)})."
        return Judgement(subject, HOLDS, sentence)
    sentence = f"{kind}: llama.cpp repacked no weights (buffer {join_and(names)})."
    return Judgement(subject, FAILS, sentence)


def batched(
    kind: str, n: int, alone_ms: Sequence[float], token_ms: Sequence[float]
) -> Judgement:
    """Whether a token is cheaper in a step of `n` tokens than alone, by times of runs."""
    measured = ratio(alone_ms, token_ms)
    ends = {
        SAME: f"a token costs as much as alone within {NEAR_PERCENT}: little or nothing is gained",
        MORE: "a token costs even more than alone: nothing is gained",
        LESS: "a token is cheaper: a part of the step is shared",
        UNCLEAR: "these runs do not show whether a token is cheaper",
    }
    verdict = judged(measured)
    if measured is not None and verdict == LESS and measured.estimate * n < 1 / BATCH_SHARED:
        ends[LESS] = "a token is cheaper: nearly all of the step is shared, as in the textbook"
    sentence = f"{kind}: in a step of {n} tokens {ends[verdict]} ({shown(measured)} the time)."
    return Judgement(f"a token in a step of {n} ({kind})", verdict, sentence)


def drafts(
    text: str, n_tokens: float, speed_up: float, interval: tuple[float, float] | None
) -> Judgement:
    """Whether drafts pay; None for too few blocks for an interval."""
    figures = (
        f"In the {text} a step with drafts gives {n_tokens:.2f} tokens, and decode is "
        f"{speed_up:.2f} times as fast"
    )
    subject = f"drafts in the {text}"
    verdict = UNCLEAR
    if interval is not None:
        low, high = interval
        if low > 1:
            verdict = MORE
        elif high < 1:
            verdict = LESS
        figures += f" ({digits(low)} to {digits(high)})"
    cost = n_tokens / speed_up
    ends = {
        MORE: f"Such a step takes {digits(cost)} times as long as a plain one: drafts pay.",
        LESS: f"Such a step takes {digits(cost)} times as long as a plain one: drafts do not pay.",
        UNCLEAR: "These runs do not show whether drafts pay.",
    }
    return Judgement(subject, verdict, f"{figures}. {ends[verdict]}")


def present(values: Sequence[float]) -> list[float]:
    """The values that were measured: without NaN."""
    return [value for value in values if value == value]


def middle(values: Sequence[float]) -> float:
    """The median of what was measured; NaN without any."""
    measured = present(values)
    return statistics.median(measured) if measured else math.nan


def overhead(what: str, added_ms: Sequence[float]) -> Judgement:
    """What a server adds, from the differences of the turns that both completed."""
    usable = present(added_ms)
    subject = f"the server's overhead, {what}"
    if not usable:
        return Judgement(subject, UNCLEAR, f"{what}: no turn has both times. Measure again.")
    low = min(usable)
    high = max(usable)
    n_turns = plural(len(usable), "turn")
    sentence = (
        f"The server adds {middle(added_ms):.1f} ms to {what} ({low:.1f} to {high:.1f} ms in "
        f"{n_turns})."
    )
    if low > 0 and is_settled(usable):
        return Judgement(subject, MORE, f"{sentence} It does so in every turn.")
    if low > 0:
        sentence += " It adds time in every turn, but how much these turns do not tell."
        return Judgement(subject, MORE, sentence)
    if high < 0:
        return Judgement(
            subject, LESS, f"{sentence} It was faster in every turn: its settings differ."
        )
    sentence += " The turns do not agree on the sign, so the machine's own changes hide it."
    return Judgement(subject, UNCLEAR, sentence)


def is_settled(added_ms: Sequence[float]) -> bool:
    """Whether the turns agree on the size of an overhead, and not only on its sign."""
    usable = present(added_ms)
    if not usable or min(usable) <= 0:
        return False
    return max(usable) <= UNSURE_FACTOR * min(usable)


def chunks_cost(
    chunk: int, at_once_s: Sequence[float], in_chunks_s: Sequence[float]
) -> Judgement:
    """What a prompt in chunks costs the new request: its time to the first token, in each run."""
    subject = f"the new request with chunks of {chunk}"
    measured = ratio(at_once_s, in_chunks_s)
    has_runs = min(len(at_once_s), len(in_chunks_s)) >= FEWEST_RUNS
    verdict = judged(measured) if has_runs else UNCLEAR
    ends = {
        SAME: f"It waits as long as all at once within {NEAR_PERCENT}.",
        MORE: "It clearly waits longer.",
        LESS: "It clearly waits less, which no chunk explains: something disturbed the runs.",
        UNCLEAR: "These runs do not show how much longer it waits.",
    }
    sentence = (
        f"With chunks of {chunk} tokens the new request waits {shown(measured)} as long for its "
        f"first token as all at once. {ends[verdict]}"
    )
    return Judgement(subject, verdict, sentence)
