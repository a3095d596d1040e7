"""What may be said of a ratio of times, in a word and in a sentence.

A difference is claimed where the whole interval lies beyond 1 by at least a given share. Everything else says how large
a difference could still be, or how large it seems and why it is not claimed.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.core.stats import Ratio

FASTER, SLOWER, ALIKE, TOO_FEW, DISTURBED = "faster", "slower", "no difference", "too few runs", "disturbed"

WIDEST = 0.5
"""Where a difference of more than this cannot be excluded, "no difference" would say too much."""


def about(estimate: float) -> str:
    """A ratio of times in words, without a claim."""
    factor = _times(max(estimate, 1 / estimate), 2)
    return "about as fast" if factor == "1" else f"about {factor} times as {'slow' if estimate > 1 else 'fast'}"


def _times(factor: float, n_digits: int) -> str:
    """A factor with so many digits, and thousands separated."""
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.{n_digits}g}"


def apart(base: Sequence[float], other: Sequence[float]) -> str:
    """That no run of one side reached those of the other, where that is so."""
    if max(base) < min(other) or max(other) < min(base):
        fast, slow = (base, other) if max(base) < min(other) else (other, base)
        runs = f"all {len(slow)} runs" if len(slow) > 1 else "the run"
        return f"; {runs} of the slower took longer than all {len(fast)} of the other"
    return ""


def verdict(ratio: Ratio, at_least: float) -> tuple[str, str]:
    """What the interval of a ratio of times allows to say: the verdict and its words."""
    if ratio.low > 1 + at_least:
        return SLOWER, f"slower: {_times(ratio.estimate, 3)}x the time"
    if ratio.high < 1 / (1 + at_least):
        return FASTER, f"faster: {_times(1 / ratio.estimate, 3)}x as fast"
    largest = max(ratio.high, 1 / ratio.low) - 1
    if largest > WIDEST:
        return TOO_FEW, f"too few or too uneven runs to be sure: {about(ratio.estimate)}"
    if ratio.high < 1 or ratio.low > 1:
        ends = sorted((ratio.low, ratio.high) if ratio.low > 1 else (1 / ratio.high, 1 / ratio.low))
        word = SLOWER if ratio.low > 1 else FASTER
        return (
            ALIKE,
            f"{word} by {100 * (ends[0] - 1):.2g} to {100 * (ends[1] - 1):.2g} %: too near to none to be claimed",
        )
    return ALIKE, f"no difference larger than {100 * largest:.2g} %"
