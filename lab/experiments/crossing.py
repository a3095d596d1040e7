"""From which length restoring a cache beats prefilling it: where two curves over length cross.

Between two measured lengths a crossing is on the straight line between them. Outside, the curves are continued: towards
shorter prefixes, prefilling in proportion to length (a short one costs rather more a token), restoring as a fixed cost
and so much a token, both fitted; towards longer ones both as they grew last (prefilling grows rather faster). So both
continuations err on one side: the true length is rather shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import stats

NETWORKS_GBIT = (1, 10, 100)
"""Lines over which a cache could be moved, in 10^9 bits per second."""

FARTHEST = 10
"""How many times the longest measured length is still guessed at."""


@dataclass(frozen=True)
class BreakEven:
    """From `n_tokens` on restoring from `name` wins: 1 is always, None is at no length that is known of.

    `is_measured`: it lies between two measured lengths, of which `n_longest` is the last. `wins_at` are the measured
    lengths at which restoring was faster. It takes `fixed_s`, and `per_token_s` for each token of the prefix.
    """

    name: str
    n_tokens: float | None
    is_measured: bool
    n_longest: int
    wins_at: tuple[int, ...]
    fixed_s: float
    per_token_s: float


def find(name: str, lengths: Sequence[int], prefill_s: Sequence[float], restore_s: Sequence[float]) -> BreakEven:
    """The crossing of two measured curves over ascending lengths. ValueError for none."""
    fixed, per_token = _line(lengths, restore_s)
    gaps = [prefill - restore for prefill, restore in zip(prefill_s, restore_s, strict=True)]

    wins_at = tuple(n for n, gap in zip(lengths, gaps, strict=True) if gap > 0)

    def crossed(n_tokens: float | None, is_measured: bool) -> BreakEven:
        return BreakEven(name, n_tokens, is_measured, lengths[-1], wins_at, fixed, per_token)

    if gaps[-1] <= 0:
        return crossed(None if wins_at else _beyond(lengths, prefill_s, gaps[-1], per_token), False)
    points = list(zip(lengths, gaps, strict=True))
    for (n, gap), (n_next, gap_next) in reversed(list(itertools.pairwise(points))):
        if gap <= 0 < gap_next:
            return crossed(n - gap * (n_next - n) / (gap_next - gap), True)
    gain = prefill_s[0] / lengths[0] - per_token
    return crossed(min(lengths[0], max(1.0, fixed / gain)), False) if gain > 0 else crossed(lengths[0], True)


def over_networks(load_s: Sequence[float], n_bytes: Sequence[int | None]) -> dict[str, list[float]]:
    """What restoring takes over each network: the bytes on the line, then the load from memory. Empty without bytes.

    What the line's delay adds is not counted, nor what sending and loading at once would save.
    """
    known = [n for n in n_bytes if n]
    if len(known) < len(load_s):
        return {}
    return {
        f"{gbit} Gbit/s": [load + 8 * n / (gbit * 1e9) for load, n in zip(load_s, known, strict=True)]
        for gbit in NETWORKS_GBIT
    }


def sentence(known: Sequence[BreakEven]) -> str:
    """All of them in one sentence."""
    by_words: dict[str, list[str]] = {}
    for one in known:
        by_words.setdefault(words(one), []).append(f"{'over' if 'bit' in one.name else 'from'} {one.name}")
    parts = [f"{words} ({', '.join(names)})" for words, names in by_words.items()]
    return f"Restoring a prefix beats prefilling it {'; '.join(parts)}."


def words(one: BreakEven) -> str:
    if one.n_tokens is None:
        lengths = ", ".join(f"{n:,}" for n in one.wins_at)
        return (
            f"only at {lengths}, not at {one.n_longest:,} tokens"
            if lengths
            else f"never up to {one.n_longest:,} tokens"
        )
    if one.n_tokens <= 1:
        return "at every measured length"
    about = f"from about {one.n_tokens:,.0f} tokens on"
    return about if one.is_measured else f"{about}, which is beyond what was measured"


def _line(lengths: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """A fixed cost and one for each token; of a single length everything is fixed, which is the most it can be."""
    if len(lengths) < 2 or min(seconds) <= 0:
        return seconds[0], 0.0
    fixed, per_token = stats.fit([[1.0] * len(lengths), [float(n) for n in lengths]], seconds)
    return fixed, per_token


def _beyond(lengths: Sequence[int], prefill_s: Sequence[float], gap: float, per_token: float) -> float | None:
    """Where the curves cross beyond the longest length; None where they do not, or far away."""
    if len(lengths) < 2:
        return None
    gain = (prefill_s[-1] - prefill_s[-2]) / (lengths[-1] - lengths[-2]) - per_token
    n_tokens = lengths[-1] - gap / gain if gain > 0 else None
    return n_tokens if n_tokens is not None and n_tokens <= FARTHEST * lengths[-1] else None
