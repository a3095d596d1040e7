"""Labelled values in a text: collected in one pass, and put together by answer.

An answer ends where one of its labels comes again, and where a new object opens beside it. Every
pattern has bounds, so that reading takes time in proportion to the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lab.features.why.figure import DECODE, PREFILL, PROMPT, Figure
from lab.formats.numbers import count, number

AGREE = 0.02
"""Share by which a printed rate may differ from its tokens and time, besides rounding."""

ROUNDING = 0.006  # of a printed rate
VALUE = (
    r'(?:"([^"\n]{0,200})"|\'([^\'\n]{0,200})\''
    r"|([-+]?\d[\d.,]{0,40}(?:[eE][-+]?\d{1,3})?|[tT]rue|[fF]alse))"
)
NAME_OF_OBJECT = re.compile(r"[\"']\s{0,9}:\s{0,9}$")
LONGEST_NAME_END = 20  # letters that NAME_OF_OBJECT may look back


def number_if_given(text: str | None) -> float | None:
    """The number in a text; None without a text."""
    if not text:
        return None
    return number(text)


def count_if_given(text: str | None) -> int | None:
    """The number of tokens in a text; None without a text."""
    if not text:
        return None
    return count(text)


def share(part: int | None, total: int | None) -> float | None:
    """The share of a part in the total; None if either is missing, or there is none."""
    if part is None or not total:
        return None
    return part / total


@dataclass
class PastedAnswer:
    """The labelled values of an answer, as texts, and the line of the first one."""

    line: int
    values: dict[str, str] = field(default_factory=dict)

    def number(self, label: str) -> float | None:
        """A value as a number; None if it is missing. ValueError if it is ambiguous."""
        return number_if_given(self.values.get(label))

    def count(self, label: str) -> int | None:
        """A value as a number of tokens; None if it is missing."""
        return count_if_given(self.values.get(label))


def phases(
    prefill_tps: float | None,
    decode_tps: float | None,
    counts: str,
    depths: tuple[int | None, int | None],
    **shared: Any,
) -> list[Figure]:
    """Prefill and decode of an answer; a rate that is missing or 0 has no figure.

    `counts` is of decode, `depths` are the tokens before the prompt and before the answer, and
    `shared` is of both figures.
    """
    figures = list[Figure]()
    if prefill_tps:
        figures.append(
            Figure(tps=prefill_tps, phase=PREFILL, counts=PROMPT, depth=depths[0], **shared)
        )
    if decode_tps:
        figures.append(
            Figure(tps=decode_tps, phase=DECODE, counts=counts, depth=depths[1], **shared)
        )
    return figures


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
