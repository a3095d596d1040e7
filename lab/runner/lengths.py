"""Prompt lengths as users write them, and what cannot be one."""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence

from lab.errors import LabError


def parse_lengths(text: str, option: str = "--prompt-len") -> tuple[int, ...]:
    """Lengths as llama-bench writes them: `10,1000`, `100-500+100`, `512-4096*2`."""
    lengths: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,12})(?:-(\d{1,12})(?:([+*])(\d{1,12}))?)?\s*", part)
        if not match:
            raise LabError(
                f"{part!r} is not a {'prompt' if option == '--prompt-len' else 'draft'} length (in {option} {text}).",
                "Write whole numbers: 10,1000,10000, or ranges: 100-500+100, 512-4096*2.",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        sign, step = match[3] or "+", int(match[4] or 1)
        if step < (2 if sign == "*" else 1) or last < first or (sign == "*" and first == 0):
            raise LabError(f"The range {part!r} does not grow.", "Write it as first-last+step or first-last*factor.")
        while first <= last and len(lengths) <= 1000:
            lengths.append(first)
            first = first * step if sign == "*" else first + step
    return tuple(lengths)


def check_lengths(lengths: Sequence[int]) -> None:
    """LabError for what cannot be a list of prompt lengths."""
    if not lengths:
        raise LabError("No prompt length is given.", "For example: --prompt-len 10,1000")
    if len(lengths) > 1000:
        raise LabError("More than 1,000 prompt lengths are given.", "Use a larger step: 100-10000+100.")
    for n in lengths:
        if n < 1:
            raise LabError(f"A prompt length of {n} cannot be measured.", "A prompt has at least 1 token.")
    for n, times in collections.Counter(lengths).items():
        if times > 1:
            raise LabError(
                f"Prompt length {n} is given {times} times.", "Give it once; --repeat measures it more often."
            )
