"""The values of answers: collected from a text by the patterns of a program, made into figures.

Every program has the same vocabulary of values (`n_prompt`, `decode_s` ...). An answer ends where
one of its values comes again, or one that is printed earlier. Every pattern has bounds, so that
reading takes time in proportion to the text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.features.why import facts
from lab.features.why.figure import (
    BOTH,
    CACHED_TIMES,
    DECODE,
    FIRST_FREE,
    MAYBE_FIRST,
    PREFILL,
    PROMPT,
    STEPS,
    WHOLE,
    Figure,
)
from lab.formats.numbers import count, go_seconds, number

AGREE = 0.02
"""Share by which a printed rate may differ from its tokens and time, besides rounding."""

ROUNDING = 0.006  # of a printed rate
VALUE = (
    r'(?:"([^"\n]{0,200})"|\'([^\'\n]{0,200})\''
    r"|([-+]?\d[\d.,]{0,40}(?:[eE][-+]?\d{1,3})?|[tT]rue|[fF]alse))"
)
NAME_OF_OBJECT = re.compile(r"[\"']\s{0,9}:\s{0,9}$")
LONGEST_NAME_END = 20  # letters that NAME_OF_OBJECT may look back
UNITS = {"_s": 1.0, "_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9}
COUNTED_BY_NUMBERS = "by its own numbers"
"""What a rate counts, if tokens and time show whether the first token is one of them."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """How a program counts, and the patterns of its values, in the order in which it prints them.

    Named groups are values. `anywhere`: patterns whose place among the others says nothing.
    """

    source: str
    patterns: Sequence[re.Pattern[str]] = ()
    anywhere: Sequence[re.Pattern[str]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)  # JSON-like names of values
    first: str = ""  # a label that only begins an answer
    sign: re.Pattern[str] | None = None  # a text without it is of another program
    counts: str = MAYBE_FIRST
    is_of_server: bool = True
    n_streams: int | None = None
    starts_empty: bool = False  # the prompt is processed from position 0
    rounds_s: float = 0.0  # rounding of printed times
    carried: Sequence[str] = ()  # values of a head that hold for all answers below it
    reach: int = 4_000  # letters from the first to the last value of an answer


@dataclass
class PastedAnswer:
    """The values of an answer, as texts, and the line of the first one."""

    line: int
    values: dict[str, str] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def number(self, label: str) -> float | None:
        """A value as a number; None if it is missing. ValueError if it is ambiguous."""
        text = self.values.get(label)
        return number(text) if text else None

    def count(self, label: str) -> int | None:
        """A value as a number of tokens; None if it is missing."""
        text = self.values.get(label)
        return count(text) if text else None

    def seconds(self, label: str) -> float | None:
        """A time in seconds, in whatever unit it is printed; None if it is missing or 0."""
        for unit, factor in UNITS.items():
            text = self.values.get(label + unit)
            if text:
                return factor * number(text) or None
        return go_seconds(self.values.get(label + "_go", "")) or None


def lines_of(text: str) -> list[int]:
    """Where the lines of a text begin."""
    return [0, *(match.end() for match in re.finditer("\n", text))]


def collected(text: str, program: Program) -> list[PastedAnswer]:
    """The answers of a program in a text, by its patterns."""
    if program.sign and not program.sign.search(text):
        return []
    if program.labels:
        answered = answers(text, list(program.labels), program.first)
        for answer in answered:
            answer.values = {
                program.labels[label]: value for label, value in answer.values.items()
            }
        return answered
    matches = list[tuple[int, int, re.Match[str]]]()
    for rank, pattern in enumerate(program.patterns):
        matches += [(match.start(), rank, match) for match in pattern.finditer(text)]
    for pattern in program.anywhere:
        matches += [(match.start(), -1, match) for match in pattern.finditer(text)]
    begins = lines_of(text)
    collected_answers = list[PastedAnswer]()
    last_rank = 0
    start = 0
    for place, rank, match in sorted(matches, key=lambda each: each[:2]):
        values = {name: value for name, value in match.groupdict().items() if value}
        is_new = not collected_answers or place > start + program.reach
        if rank >= 0 and collected_answers:
            is_again = not values.keys().isdisjoint(collected_answers[-1].values)
            is_new = is_new or is_again or rank < last_rank
        if is_new:
            earlier = collected_answers[-1].values if collected_answers else {}
            carried = {name: earlier[name] for name in program.carried if name in earlier}
            collected_answers.append(PastedAnswer(bisect_right(begins, place), carried))
            start = place
        last_rank = max(rank, 0 if is_new else last_rank)
        collected_answers[-1].values |= values
        collected_answers[-1].lines |= dict.fromkeys(values, bisect_right(begins, place))
    return collected_answers


def figures_of(answer: PastedAnswer, program: Program, **more: Any) -> list[Figure]:
    """Prefill, decode and the whole of an answer, as far as it has them.

    ValueError if its values contradict each other.
    """
    n_prompt = answer.count("n_prompt")
    n_gen = answer.count("n_gen")
    n_cached, n_context = contexts_of(answer, program, n_prompt, n_gen)
    if n_prompt is None and n_cached is not None and n_context is not None:
        n_prompt = n_context - n_cached
    prefill_s = answer.seconds("prefill")
    decode_s = answer.seconds("decode")
    total_s = answer.seconds("total")
    tps = plain_rate(answer.values.get("prefill_tps"), n_prompt, prefill_s, program.rounds_s)
    rated = rate_of_decode(answer, program, n_gen, decode_s)
    n_whole = answer.count("n_whole")
    was_cached = is_cached(n_whole, tps, rated[0], n_gen, total_s)
    if n_whole is not None:
        n_context = n_whole
        if not was_cached:
            n_prompt = n_whole
            n_cached = 0
    if decode_s is None and rated[0] and n_gen and program.counts == FIRST_FREE:
        decode_s = n_gen / rated[0]
    shared: dict[str, Any] = {
        "source": program.source,
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "n_streams": answer.count("n_streams") or program.n_streams,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "total_s": total_s,
        "is_of_server": program.is_of_server,
        "line": answer.line,
        **drafts_of(answer, n_gen),
        "facts": facts_of(answer),
        **more,
    }
    if n_gen and decode_s and not shared["drafted"] and not shared["tokens_per_step"]:
        shared["n_steps"] = n_gen - 1 or None
    figures = list[Figure]()
    if tps:
        line = answer.lines.get("prefill_tps", answer.line)
        values = {**shared, "counts": PROMPT, "line": line}
        figures.append(
            Figure(tps=tps, phase=PREFILL, depth=n_cached, was_cached=was_cached, **values)
        )
    if rated[0]:
        line = answer.lines.get("decode_tps", answer.line)
        values = {**shared, "counts": rated[1], "line": line}
        figures.append(Figure(tps=rated[0], phase=DECODE, depth=n_context, **values))
    whole_tps = plain_rate(answer.values.get("whole_tps"), n_gen, total_s, program.rounds_s)
    if whole_tps and "whole_tps" in answer.values:
        line = answer.lines.get("whole_tps", answer.line)
        values = {**shared, "counts": WHOLE, "line": line}
        figures.append(Figure(tps=whole_tps, phase=BOTH, depth=n_context, **values))
    check_times(decode_s, total_s, program.rounds_s)
    return figures


def contexts_of(
    answer: PastedAnswer, program: Program, n_prompt: int | None, n_gen: int | None
) -> tuple[int | None, int | None]:
    """Tokens before the prompt that were cached, and tokens before the answer.

    ValueError for an answer that is longer than its context.
    """
    n_cached = answer.count("n_cached")
    n_context = answer.count("n_context")
    n_end = answer.count("n_end")
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
    printed = answer.values.get("decode_tps")
    if program.counts != COUNTED_BY_NUMBERS:
        return plain_rate(printed, n_gen, decode_s, program.rounds_s), program.counts
    if not (n_gen and n_gen > 1 and decode_s):
        return plain_rate(printed, n_gen, decode_s), MAYBE_FIRST
    if printed is None:
        return (n_gen - 1) / decode_s, STEPS
    is_first_counted = counts_first_token(printed, n_gen, decode_s)
    if is_first_counted is None:
        return n_gen / decode_s, MAYBE_FIRST
    if is_first_counted:
        return n_gen / decode_s, FIRST_FREE
    return (n_gen - 1) / decode_s, STEPS


def drafts_of(answer: PastedAnswer, n_gen: int | None) -> dict[str, Any]:
    """Drafted and accepted tokens, and the tokens that a step brings with them."""
    drafted = answer.count("drafted")
    accepted = answer.count("accepted")
    each = answer.number("tokens_per_step")
    if not each and n_gen and accepted and n_gen > accepted:
        each = n_gen / (n_gen - accepted)
    return {"drafted": drafted, "accepted": accepted, "tokens_per_step": each}


def facts_of(answer: PastedAnswer) -> dict[str, facts.Fact]:
    """The facts of its setup that an answer states."""
    names = (facts.MODEL, facts.QUANTIZATION, facts.BUILD, facts.HARDWARE)
    read = facts.stated({name: answer.values.get(name) for name in names}, answer.line)
    if answer.count("drafted") == 0:
        read |= facts.stated({facts.SPECULATION: facts.NO_DRAFTS}, answer.line)
    return read


def is_cached(
    n_whole: int | None,
    prefill_tps: float | None,
    decode_tps: float | None,
    n_gen: int | None,
    total_s: float | None,
) -> bool:
    """Whether a rate of a whole prompt is many times what the request's time allows."""
    if not (n_whole and prefill_tps and decode_tps and n_gen and total_s):
        return False
    prefill_s = max(total_s - n_gen / decode_tps, 0.01 * total_s, 0.05)
    return prefill_tps * prefill_s > CACHED_TIMES * n_whole


def check_times(decode_s: float | None, total_s: float | None, rounds_s: float) -> None:
    """ValueError if decode took longer than everything."""
    if decode_s and total_s and decode_s > total_s * (1 + AGREE) + rounds_s:
        raise ValueError("decode took longer than everything")


def matched(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, re.Match[str]]]:
    """The matches of a pattern with the numbers of their lines."""
    line = 1
    last = 0
    for match in pattern.finditer(text):
        line += text.count("\n", last, match.start())
        last = match.start()
        yield line, match


def answers(text: str, labels: Sequence[str], first: str = "") -> list[PastedAnswer]:
    """The values of JSON-like fields, by answer: `"label": 1.5`, `label: "text"`, `label=1.5`.

    `first`: a label that only begins an answer.
    """
    names = "|".join(sorted(labels, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.])[\"']?({names})[\"']?\s{{0,9}}[:=]\s{{0,9}}{VALUE}")
    begins = beginnings(text)
    collected = list[PastedAnswer]()
    for line, match in matched(text, pattern):
        label = match[1]
        is_new = not collected or label == first or label in collected[-1].values
        while begins and begins[-1] < match.start():
            begins.pop()
            is_new = True
        if is_new:
            collected.append(PastedAnswer(line))
        value = match[2] or match[3] or match[4] or ""
        collected[-1].values[label] = value.rstrip(".,")
    return collected


def beginnings(text: str) -> list[int]:
    """Where objects without a name open that are in no other object, from the last to the first.

    A fragment may lack its outer brackets: `"usage": {...}, "stats": {...}` is one object.
    """
    places = list[int]()
    n_open = 0
    for match in re.finditer("[{}]", text):
        if match[0] == "}":
            n_open = max(0, n_open - 1)
            continue
        before = text[max(0, match.start() - LONGEST_NAME_END) : match.start()]
        if n_open == 0 and not NAME_OF_OBJECT.search(before):
            places.append(match.start())
        n_open += 1
    return places[::-1]


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
    computed = tokens / seconds if tokens and seconds else None
    if printed is None:
        return computed
    if printed in ("inf", "nan"):
        return None
    if computed is not None:
        for text in readings(printed):
            try:
                rate = number(text)
                check_rate(rate, tokens or 0, seconds or 0, rounding_s)
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
    for text in readings(printed):
        try:
            return _counts_first_token(text, n_tokens, seconds)
        except ValueError:
            continue
    return _counts_first_token(printed, n_tokens, seconds)


def _counts_first_token(printed: str, n_tokens: int, seconds: float) -> bool | None:
    with_first = n_tokens / seconds
    without_first = (n_tokens - 1) / seconds
    rate = number(printed)
    rounding = rounding_of(printed)
    fits_with = abs(rate - with_first) <= rounding
    fits_without = abs(rate - without_first) <= rounding
    if fits_with and fits_without:
        return None
    if fits_with or fits_without:
        return fits_with
    is_nearer_with = abs(rate - with_first) < abs(rate - without_first)
    check_rate(rate, n_tokens if is_nearer_with else n_tokens - 1, seconds)
    return is_nearer_with
