"""The values of an answer as figures: prefill, decode, the whole, each checked by its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lab.features.why import facts
from lab.features.why.facts import Fact
from lab.features.why.figure import (
    BOTH,
    CACHED_TIMES,
    DECODE,
    FIRST_FREE,
    MAYBE_FIRST,
    PREFILL,
    SERVED,
    STEPS,
    UNKNOWN,
    WHOLE,
    Figure,
)
from lab.features.why.readers import meaning
from lab.features.why.readers.answers import PastedAnswer, Program
from lab.formats.numbers import number

AGREE = 0.02
"""Share by which a printed rate may differ from its tokens and time, besides rounding."""

ROUNDING = 0.006  # of a printed rate
NO_RATES = ("inf", "nan")
BY_NUMBERS = "by its own numbers"
"""What a rate counts, if tokens and time show whether the first token is one of them."""

OTHER_RATES = {
    "whole_tps": (BOTH, WHOLE, "n_gen"),
    "served_tps": (BOTH, SERVED, "n_served"),
    "unknown_tps": (UNKNOWN, UNKNOWN, ""),
}
"""Rates over the total time: the phase, what they count, and the value with their tokens."""

FACTS = (facts.MODEL, facts.QUANTIZATION, facts.BUILD, facts.HARDWARE, "n_gpu_layers")


def figures_of(answer: PastedAnswer, program: Program) -> list[Figure]:
    """The rates of an answer, as far as it has them.

    ValueError if its values contradict each other.
    """
    n_prompt = answer.count("n_prompt") or None
    n_gen = answer.count("n_gen")
    n_cached, n_context = contexts_of(answer, program, n_prompt, n_gen)
    if n_prompt is None and n_cached is not None and n_context is not None:
        n_prompt = n_context - n_cached
    prefill_s = answer.seconds("prefill")
    decode_s = answer.seconds("decode")
    printed = answer.values.get("prefill_tps")
    prefill_tps = plain_rate(printed, n_prompt, prefill_s, program.rounds_s)
    if program.is_exact:  # the printed rate has been checked
        prefill_tps = plain_rate(None, n_prompt, prefill_s) or prefill_tps
    decode_tps, counts = rate_of_decode(answer, program, n_gen, decode_s)
    was_cached = is_cached(answer, prefill_tps, decode_tps)
    if "n_whole" in answer.values and not was_cached:
        n_prompt = answer.count("n_whole")
        n_cached = 0
    prompt_s = None
    if prefill_tps and n_prompt and not was_cached:
        prompt_s = n_prompt / prefill_tps
    check_times(answer, program, prompt_s, decode_tps)
    if decode_s is None and decode_tps and n_gen and counts == FIRST_FREE:
        decode_s = n_gen / decode_tps
    shared: dict[str, Any] = {
        "source": program.source,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_streams": n_streams_of(answer, program),
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "total_s": answer.seconds("total"),
        "is_of_server": program.is_of_server,
        "about": program.about,
        "facts": facts_of(answer),
    }
    of_decode = {**drafts_of(answer, n_gen), "sampling_s": sampling_of(answer)}
    if n_gen and decode_s and not (of_decode["drafted"] or of_decode["tokens_per_step"]):
        of_decode["n_steps"] = n_gen - 1 or None
    rates: list[tuple[str, float | None, dict[str, Any]]] = [
        (
            "prefill_tps",
            prefill_tps,
            {
                "phase": PREFILL,
                "counts": program.counts_of_prefill,
                "depth": n_cached,
                "was_cached": was_cached,
            },
        ),
        (
            "decode_tps",
            decode_tps,
            {"phase": DECODE, "counts": counts, "depth": n_context, **of_decode},
        ),
        *other_rates(answer, program, n_context),
    ]
    figures = list[Figure]()
    for name, tps, fields in rates:
        if tps:
            line = answer.line_of(name, name.replace("_tps", "_ms"))
            figures.append(Figure(tps=tps, line=line, **{**shared, **fields}))
    return figures


def other_rates(
    answer: PastedAnswer, program: Program, n_context: int | None
) -> Iterator[tuple[str, float | None, dict[str, object]]]:
    """The rates over the total time, and those that a program does not explain."""
    total_s = answer.seconds("total")
    for name, (phase, counts, of_tokens) in OTHER_RATES.items():
        printed = answer.values.get(name)
        if printed:
            tps = plain_rate(printed, answer.count(of_tokens), total_s, program.rounds_s)
            fields: dict[str, object] = {"phase": phase, "counts": counts, "depth": n_context}
            yield name, tps, {**fields, **drafts_of(answer, answer.count("n_gen"))}


def n_streams_of(answer: PastedAnswer, program: Program) -> int | None:
    """Answers at once, as the text or its program says; None if neither does."""
    return answer.count("n_streams") or program.n_streams


def contexts_of(
    answer: PastedAnswer, program: Program, n_prompt: int | None, n_gen: int | None
) -> tuple[int | None, int | None]:
    """Tokens before the prompt that were cached, and tokens before the answer.

    ValueError for an answer that is longer than its context.
    """
    n_cached = answer.count("n_cached")
    n_context = answer.count("n_context")
    n_end = answer.count("n_end")
    if "is_cut" in answer.values:  # the program itself calls its context inaccurate
        return n_cached, None
    if "n_whole" in answer.values:
        return n_cached, answer.count("n_whole")
    if n_end is not None and n_gen is not None:
        n_context = n_end - n_gen
        if n_context < 0:
            raise ValueError("the answer is longer than the context")
    if program.starts_empty and n_prompt is not None:
        n_cached = 0
    if n_cached is not None and n_prompt is not None:
        n_context = n_cached + n_prompt
    elif n_context is not None and n_prompt is not None:
        n_cached = max(0, n_context - n_prompt)
    return n_cached, n_context


def rate_of_decode(
    answer: PastedAnswer, program: Program, n_gen: int | None, decode_s: float | None
) -> tuple[float | None, str]:
    """The rate of decode, and what it counts."""
    if program.counts_of_one and n_streams_of(answer, program) == 1:
        program = replace(program, counts=program.counts_of_one)
    printed = answer.values.get("decode_tps")
    if program.counts == STEPS and n_gen and decode_s:
        n_steps = n_gen - 1
        return plain_rate(printed, n_steps, decode_s) and n_steps / decode_s, STEPS
    if program.counts != BY_NUMBERS:
        return plain_rate(printed, n_gen, decode_s, program.rounds_s), program.counts
    if not (n_gen and n_gen > 1 and decode_s):
        return plain_rate(printed, n_gen, decode_s), MAYBE_FIRST
    if printed is None or printed in NO_RATES:
        return (n_gen - 1) / decode_s, STEPS
    is_first_counted = counts_first_token(printed, n_gen, decode_s)
    if is_first_counted is None:
        is_first_counted = by_time_per_token(answer.values.get("token_ms"), n_gen, decode_s)
    if is_first_counted is None:
        return n_gen / decode_s, MAYBE_FIRST
    if is_first_counted:
        return n_gen / decode_s, FIRST_FREE
    return (n_gen - 1) / decode_s, STEPS


def drafts_of(answer: PastedAnswer, n_gen: int | None) -> dict[str, object]:
    """Drafted and accepted tokens, and the tokens that a step brings with them."""
    drafted = answer.count("drafted")
    accepted = answer.count("accepted")
    each = answer.number("tokens_per_step")  # often of the steps with drafts alone
    if n_gen and accepted and n_gen - 1 > accepted:
        n_decoded = n_gen - 1  # prefill gives the first token
        each = n_decoded / (n_decoded - accepted)
    return {"drafted": drafted, "accepted": accepted, "tokens_per_step": each}


def sampling_of(answer: PastedAnswer) -> float | None:
    """Seconds of a token's choice, beside the rate; None if they are not printed."""
    sampling_s = answer.seconds("sampling")
    n_sampled = answer.count("n_sampled")
    return sampling_s / n_sampled if sampling_s and n_sampled else None


def facts_of(answer: PastedAnswer) -> Mapping[str, Fact]:
    """The facts of its setup that an answer states."""
    read = dict[str, Fact]()
    for name in FACTS:
        if answer.values.get(name):
            read |= meaning.facts_of(name, answer.values[name], answer.line)
    if answer.count("drafted") == 0:
        read |= facts.stated({facts.SPECULATION: facts.NO_DRAFTS}, answer.line)
    return read


def is_cached(
    answer: PastedAnswer, prefill_tps: float | None, decode_tps: float | None
) -> bool:
    """Whether a rate of a whole prompt is many times what the request's time allows."""
    n_whole = answer.count("n_whole")
    n_gen = answer.count("n_gen")
    total_s = answer.seconds("total")
    if not (n_whole and prefill_tps and decode_tps and n_gen and total_s):
        return False
    prefill_s = max(total_s - n_gen / decode_tps, 0.01 * total_s, 0.05)
    return prefill_tps * prefill_s > CACHED_TIMES * n_whole


def check_times(
    answer: PastedAnswer, program: Program, prompt_s: float | None, decode_tps: float | None
) -> None:
    """ValueError if prefill and decode took longer than everything."""
    total_s = answer.seconds("total")
    decode_s = answer.seconds("decode") or 0.0
    if decode_tps:
        decode_s = (answer.count("n_gen") or 0) / decode_tps
    spent_s = decode_s + (prompt_s or 0.0)
    if total_s and spent_s > total_s * (1 + AGREE) + program.rounds_s:
        raise ValueError("prefill and decode took longer than everything")


def check_rate(
    rate: float | None, tokens: float, seconds: float, rounding_s: float = 0.0
) -> None:
    """ValueError if a printed rate contradicts its tokens and time."""
    if not (rate and tokens and seconds):
        return
    computed = tokens / seconds
    rounding = ROUNDING + rounding_s * computed / seconds
    if abs(rate - computed) > AGREE * computed + rounding:
        raise ValueError(
            f"the rate is {rate:g} tokens/s, but its tokens and time give {computed:.4g}"
        )


def readings(printed: str) -> tuple[str, str, str]:
    """A number as it is printed, with a decimal comma, and with thousands separated by commas."""
    return printed, printed.replace(",", "."), printed.replace(",", "")


def plain_rate(
    printed: str | None, tokens: float | None, seconds: float | None, rounding_s: float = 0.0
) -> float | None:
    """The printed rate, checked by tokens and time; or theirs if none is printed.

    A comma that could mean a decimal or thousands is settled by tokens and time. ValueError if
    nothing settles it, or if the numbers contradict each other.
    """
    if printed is None:
        return tokens / seconds if tokens and seconds else None
    if printed in NO_RATES:
        return None
    if tokens and seconds:
        for text in readings(printed):
            try:
                rate = number(text)
                check_rate(rate, tokens, seconds, rounding_s)
            except ValueError:
                continue
            return rate
    rate = number(printed)
    check_rate(rate, tokens or 0, seconds or 0, rounding_s)
    return rate


def rounding_of(printed: str) -> float:
    """Half of the last printed digit, and a little more."""
    digits = re.split(r"[.,]", printed)
    n_decimals = len(digits[-1]) if len(digits) > 1 else 0
    return 0.51 * 10.0**-n_decimals


def counts_first_token(printed: str, n_tokens: int, seconds: float) -> bool | None:
    """Whether a rate divides all tokens by their time, or one less; None if both would print it.

    ValueError if the rate fits neither, with any meaning of its comma.
    """
    problem: ValueError | None = None
    for text in readings(printed):
        try:
            rate = number(text)
            fits = fits_of(
                rate, rounding_of(text), n_tokens / seconds, (n_tokens - 1) / seconds
            )
            if any(fits):
                return None if all(fits) else fits[0]
            is_nearer = abs(rate - n_tokens / seconds) < abs(rate - (n_tokens - 1) / seconds)
            check_rate(rate, n_tokens if is_nearer else n_tokens - 1, seconds)
        except ValueError as refused:
            problem = problem or refused
            continue
        return is_nearer
    raise problem or ValueError(printed)


def by_time_per_token(printed_ms: str | None, n: int, seconds: float) -> bool | None:
    """Whether the milliseconds per token count the first one; None if both would print them."""
    if printed_ms is None or printed_ms in NO_RATES:
        return None
    rounding_ms = rounding_of(printed_ms)
    each_ms = 1e3 * seconds
    fits = fits_of(number(printed_ms), rounding_ms, each_ms / n, each_ms / (n - 1))
    return None if fits[0] == fits[1] else fits[0]


def fits_of(printed: float, rounding: float, first: float, second: float) -> tuple[bool, bool]:
    """Whether each of two numbers would be printed so."""
    return abs(printed - first) <= rounding, abs(printed - second) <= rounding
