"""What two rates count, and of how many answers and tokens a step: arithmetic, or unknown."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lab.features.why import facts
from lab.features.why.figure import (
    FIRST_FREE,
    MAYBE_FIRST,
    MIXED,
    MIXED_WINDOW,
    SERVED,
    SEVERAL_LENGTHS,
    STEPS,
    UNKNOWN,
    WHOLE,
    Figure,
)
from lab.features.why.parts import (
    ARITHMETIC,
    CONCURRENCY,
    COUNTED,
    NO_RANGE,
    SAMPLING,
    SPECULATION,
    GapPart,
    Pair,
    equal,
    unknown,
)
from lab.show.wording import digits, percent, seconds

SMALL = 0.001
UNKNOWN_COUNTS = {
    UNKNOWN: (
        "does not say what it counts: look up tokens, context, and whether prefill is included"
    ),
    MIXED_WINDOW: "is an average over a logging window with prefill, not the rate of decode",
    MIXED: "counts prompt and generated tokens together",
    SERVED: "sums up all answers over the whole duration, with prefill and waiting",
    SEVERAL_LENGTHS: "is an average over several lengths",
}
LARGE_SAMPLING = 0.1  # share of a token's time


@dataclass(frozen=True)
class Correction:
    """What makes the plain rate of decode steps (or of prefill) of a printed rate.

    `log` is the logarithm of plain over printed; None if it cannot be computed. `half` is half of
    its range, None where that is unknown. `reason` completes a sentence that begins with the
    letter.
    """

    log: float | None = 0.0
    half: float | None = 0.0
    reason: str = ""
    is_by_other: bool = False  # it takes the prefill rate of the opposite side


def correction_of(figure: Figure, opposite: Figure) -> Correction:
    """The correction of a figure that is compared with another."""
    if figure.counts in UNKNOWN_COUNTS:
        return Correction(None, None, UNKNOWN_COUNTS[figure.counts])
    if figure.counts == WHOLE:
        return of_whole_answer(figure, opposite)
    if figure.counts in (FIRST_FREE, MAYBE_FIRST):
        return of_first_token(figure)
    is_without_sampling = opposite.tps == opposite.compute_tps
    if figure.counts == STEPS and figure.compute_tps and is_without_sampling:
        log = math.log(figure.compute_tps / figure.tps)
        if log > SMALL:
            return Correction(log, 0.0, "includes choosing each token")
    return Correction()


def of_first_token(figure: Figure) -> Correction:
    """The first token comes out of the prompt's last step; a rate that counts it looks faster."""
    is_certain = figure.counts == FIRST_FREE
    if figure.is_prefill:
        return Correction()
    if figure.n_gen is None:
        reason = "does not say how many tokens it counts, nor whether the first is one of them"
        return Correction(None, None, reason)
    if figure.n_gen < 2:
        return Correction(None, None, "is of a single token")
    log = math.log((figure.n_gen - 1) / figure.n_gen)
    if abs(log) < SMALL:
        return Correction()
    if is_certain:
        return Correction(log, 0.0, "counts the first token, but not its time")
    at_most = percent(1 / figure.n_gen)
    reason = f"does not say whether its rate counts the first token ({at_most} at most)"
    return Correction(log / 2, abs(log) / 2, reason)


def of_whole_answer(figure: Figure, opposite: Figure) -> Correction:
    """The time of prefill is subtracted, if a side says what it was."""
    decode_s = figure.decode_s
    total_s = figure.total_s
    is_by_other = False
    if decode_s is None and total_s:
        prefill_s = figure.prefill_s
        if prefill_s is None:
            prefill_s = prefill_as_fast_as(opposite, figure)
            is_by_other = prefill_s is not None
        if prefill_s is not None and prefill_s < total_s:
            decode_s = total_s - prefill_s
    if not decode_s or not total_s or not figure.n_gen:
        return Correction(None, None, "divides by prefill too, whose time is not known")
    plain_tps = max(1, figure.n_gen - 1) / decode_s
    prefill = seconds(max(0.0, total_s - decode_s))
    reason = f"divides by prefill too: {prefill} of {seconds(total_s)}"
    if is_by_other:
        reason = (
            f"divides by prefill too: about {prefill} of {seconds(total_s)}, if it read its prompt"
            " as fast as the other and nothing was cached"
        )
    half = None if is_by_other else 0.0
    return Correction(
        math.log(plain_tps / figure.tps),
        half,
        f"{reason} (decode {digits(plain_tps)} tokens/s)",
        is_by_other,
    )


def prefill_as_fast_as(opposite: Figure, figure: Figure) -> float | None:
    """Seconds of a figure's prompt at the opposite side's rate of prefill."""
    if not (figure.depth and opposite.n_prompt and opposite.prefill_s):
        return None
    return figure.depth * opposite.prefill_s / opposite.n_prompt


def corrections(pair: Pair) -> dict[str, Correction]:
    """The corrections of both sides by letter, the faster first."""
    (letter_of_fast, fast), (letter_of_slow, slow) = pair.sides
    return {
        letter_of_fast: correction_of(fast, slow),
        letter_of_slow: correction_of(slow, fast),
    }


def counted(pair: Pair) -> GapPart:
    """The part of what the two rates count."""
    by_letter = corrections(pair)
    reasons = [f"{letter} {each.reason}" for letter, each in by_letter.items() if each.reason]
    reason = "; ".join(reasons)
    of_fast, of_slow = by_letter.values()
    if of_fast.log is None or of_slow.log is None:
        lacking = [letter for letter, figure in pair.in_order if figure.counts == UNKNOWN]
        return unknown(COUNTED, reason, lacking=lacking)
    if not reasons:
        return equal(COUNTED)
    how = ARITHMETIC
    if of_fast.is_by_other or of_slow.is_by_other:
        how = f"{ARITHMETIC}, with the other's prefill rate: {NO_RANGE}"
    half = None
    if of_fast.half is not None and of_slow.half is not None:
        half = math.hypot(of_fast.half, of_slow.half)
    return GapPart(COUNTED, of_slow.log - of_fast.log, half, how, reason)


def concurrency(pair: Pair) -> GapPart:
    """The part of how many answers were decoded at once; the rates of one are compared."""
    n_streams = {pair.fast.n_streams, pair.slow.n_streams}
    if len(n_streams) == 1 and None not in n_streams:
        return equal(CONCURRENCY)
    sentences = sums(pair)
    lacking = [letter for letter, figure in pair.in_order if figure.n_streams is None]
    if lacking:
        names = " and ".join(lacking)
        sentences.append(f"{names} may have been one of several answers at once")
    return unknown(CONCURRENCY, "; ".join(sentences), differs=not lacking, lacking=lacking)


def sums(pair: Pair) -> list[str]:
    """Which sides are the sum of several answers."""
    sentences = list[str]()
    for letter, figure in pair.in_order:
        if figure.n_streams is not None and figure.n_streams > 1:
            sentences.append(
                f"{letter} sums up {figure.n_streams} answers, {digits(figure.each_tps)} tokens/s "
                f"each ({digits(figure.tps)} together)"
            )
    return sentences


def of_serving(pair: Pair) -> list[GapPart]:
    """The parts of decode that a command or a log may leave open: speculation and sampling."""
    if pair.fast.is_prefill:
        return []
    return [speculation(pair), *sampling(pair)]


def speculation(pair: Pair) -> GapPart:
    """The part of drafted tokens: tokens of a step on both sides, where they are known."""
    if not (pair.fast.is_speculative or pair.slow.is_speculative):
        comparison = facts.compare(pair.facts_in_order, facts.SPECULATION)
        if not comparison.lacking:
            return equal(SPECULATION, reason="" if comparison.is_equal else comparison.words)
        return unknown(SPECULATION, comparison.words, lacking=comparison.lacking)
    reasons = list[str]()
    for letter, figure in pair.in_order:
        reasons.append(drafts_in_words(letter, figure))
    fast = tokens_of_step(pair.fast)
    slow = tokens_of_step(pair.slow)
    if not fast or not slow:
        lacking = [letter for letter, each in pair.in_order if each.is_speculative is None]
        reason = "; ".join(reasons)
        return unknown(SPECULATION, reason, differs=not lacking, lacking=lacking)
    return GapPart(SPECULATION, math.log(fast / slow), 0.0, ARITHMETIC, "; ".join(reasons))


def tokens_of_step(figure: Figure) -> float | None:
    """Tokens that a step brings: 1 without drafts; None if it is not known."""
    if figure.is_speculative is False:
        return 1.0
    return figure.tokens_per_step


def drafts_in_words(letter: str, figure: Figure) -> str:
    """What a side says of drafted tokens, and how long a step takes."""
    if figure.is_speculative is None:
        return f"not given for {letter}"
    text = f"{letter} drafts tokens" if figure.is_speculative else f"{letter} drafts none"
    if figure.drafted and figure.accepted is not None:
        share = percent(figure.accepted / figure.drafted)
        text += f", {share} of {figure.drafted:,} were accepted"
    each = tokens_of_step(figure)
    if each:
        step_s = each / figure.each_tps
        tokens = "1 token" if each == 1 else f"{each:.3g} tokens"
        text += f", {tokens} a step of {seconds(step_s)}"
        text += "" if each == 1 else " over all steps"
    return text


def sampling(pair: Pair) -> list[GapPart]:
    """The part of how tokens are chosen; two records have one of their own."""
    if pair.has_records:
        return []
    comparison = facts.compare(pair.facts_in_order, facts.SAMPLING)
    reason = comparison.words
    times = [
        f"{seconds(figure.sampling_s)} a token in {letter}, beside the rate"
        for letter, figure in pair.in_order
        if figure.sampling_s is not None
    ]
    reason = "; ".join([reason, *times])
    if comparison.is_same:
        return [equal(SAMPLING, reason=reason if times else "")]
    differs = comparison.is_different
    return [unknown(SAMPLING, reason, differs=differs, lacking=comparison.lacking)]


def slow_samplers(pair: Pair) -> list[str]:
    """Sentences on sides whose answers took longer than their rates say."""
    sentences = list[str]()
    for letter, figure in pair.in_order:
        if figure.sampling_s and figure.sampling_s * figure.tps > LARGE_SAMPLING:
            whole_tps = 1 / (1 / figure.tps + figure.sampling_s)
            sentences.append(
                f"{letter} spent {seconds(figure.sampling_s)} more on choosing each token, which "
                f"its rate leaves out: its reader saw {digits(whole_tps)} tokens/s"
            )
    return sentences
