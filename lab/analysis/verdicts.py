"""What may be said of a ratio of times, or of energies, in a word and in a sentence.

A difference is claimed where the whole interval lies beyond 1 by at least a given share. Everything else says how large
a difference could still be, or how large it seems and why it is not claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.core.stats import Ratio

FASTER, SLOWER, ALIKE, TOO_FEW, DISTURBED = "faster", "slower", "no difference", "too few runs", "disturbed"
LESS, MORE = "less energy", "more energy"

WIDEST = 0.5
"""Where a difference of more than this cannot be excluded, "no difference" would say too much."""


@dataclass(frozen=True)
class Quantity:
    """The words for a ratio of what two sides took: {ratio} stands for it, {inverse} for 1 / it."""

    less_verdict: str
    more_verdict: str
    less: str
    more: str
    about_less: str
    about_equal: str
    about_more: str
    apart: str  # {larger} and {smaller} are the runs of the side that took more, and how many the other has


TIME = Quantity(
    FASTER,
    SLOWER,
    "faster: {inverse}x as fast",
    "slower: {ratio}x the time",
    "about {inverse} times as fast",
    "about as fast",
    "about {ratio} times as slow",
    "; {larger} of the slower took longer than all {smaller} of the other",
)
ENERGY = Quantity(
    LESS,
    MORE,
    "less energy: {ratio}x as much",
    "more energy: {ratio}x as much",
    "about {ratio} times the energy",
    "about the same energy",
    "about {ratio} times the energy",
    "; {larger} of one side took more than all {smaller} of the other",
)


def about(estimate: float, quantity: Quantity = TIME) -> str:
    """A ratio in words, without a claim."""
    if _times(max(estimate, 1 / estimate), 2) == "1":
        return quantity.about_equal
    words = quantity.about_more if estimate > 1 else quantity.about_less
    return words.format(ratio=_times(estimate, 2), inverse=_times(1 / estimate, 2))


def _times(factor: float, n_digits: int) -> str:
    """A factor with so many digits, and thousands separated."""
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.{n_digits}g}"


def apart(base: Sequence[float], other: Sequence[float], quantity: Quantity = TIME) -> str:
    """That no run of one side reached those of the other, where that is so."""
    if max(base) < min(other) or max(other) < min(base):
        smaller, larger = (base, other) if max(base) < min(other) else (other, base)
        runs = f"all {len(larger)} runs" if len(larger) > 1 else "the run"
        return quantity.apart.format(larger=runs, smaller=len(smaller))
    return ""


def verdict(ratio: Ratio, at_least: float, quantity: Quantity = TIME) -> tuple[str, str]:
    """What the interval of a ratio allows to say: the verdict and its words."""
    if ratio.low > 1 + at_least:
        return quantity.more_verdict, quantity.more.format(ratio=_times(ratio.estimate, 3))
    if ratio.high < 1 / (1 + at_least):
        factors = {"ratio": _times(ratio.estimate, 3), "inverse": _times(1 / ratio.estimate, 3)}
        return quantity.less_verdict, quantity.less.format(**factors)
    largest = max(ratio.high, 1 / ratio.low) - 1
    if largest > WIDEST:
        return TOO_FEW, f"too few or too uneven runs to be sure: {about(ratio.estimate, quantity)}"
    if ratio.high < 1 or ratio.low > 1:
        ends = sorted((ratio.low, ratio.high) if ratio.low > 1 else (1 / ratio.high, 1 / ratio.low))
        word = quantity.more_verdict if ratio.low > 1 else quantity.less_verdict
        return (
            ALIKE,
            f"{word} by {100 * (ends[0] - 1):.2g} to {100 * (ends[1] - 1):.2g} %: too near to none to be claimed",
        )
    return ALIKE, f"no difference larger than {100 * largest:.2g} %"
