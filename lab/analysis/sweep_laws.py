"""The two laws that a sweep shows: what a prompt costs by its length, and a token by its position.

    prefill   T(P) = a + b P + c P^2    b: every token goes through the weights; c: it looks back at those before
    decode    t(p) = w + k p            w: the weights are read; k: so is the cache of every position

The terms follow from the transformer's arithmetic (attention of P tokens is P x P); the coefficients are
fitted, none below zero. Prompts shorter than one full ubatch use the machine less well and stay out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.analysis.wording import seconds
from lab.core import stats

if TYPE_CHECKING:
    import pandas as pd

MIN_PREFILL, MIN_DECODE = 4, 3
"""Lengths that a law with three, or two, coefficients must have before it says anything."""


@dataclass(frozen=True)
class PrefillLaw:
    """T(P) = a + b P + c P^2 in seconds; `rms` is the root mean square of the relative errors."""

    a: float
    b: float
    c: float
    rms: float

    def seconds(self, n_prompt: float) -> float:
        return self.a + self.b * n_prompt + self.c * n_prompt**2

    def n_tokens(self, seconds: float) -> float:
        """The prompt length that takes this many seconds: the inverse of `seconds`. NaN where none does."""
        rest = seconds - self.a
        if rest < 0 or not (self.b or self.c):
            return float("nan")
        return float(2 * rest / (self.b + (self.b**2 + 4 * self.c * rest) ** 0.5))

    def __str__(self) -> str:
        doubled = f", twice as much from {self.b / (2 * self.c):,.0f} on" if self.c else ""
        return (
            f"Prefill: T(P) = {seconds(self.a)} + {seconds(self.b)} x P + {seconds(self.c)} x P^2 "
            f"(off by {self.rms:.1%}). A prompt token costs {seconds(self.b)}, and "
            f"{seconds(2e3 * self.c)} more for every 1,000 tokens before it{doubled}."
        )


@dataclass(frozen=True)
class DecodeLaw:
    """t(p) = w + k p in ms; `rms` as for prefill."""

    w: float
    k: float
    rms: float

    def ms(self, position: float) -> float:
        return self.w + self.k * position

    def __str__(self) -> str:
        doubled = f", twice as much from position {self.w / self.k:,.0f} on" if self.k else ""
        w, k = self.w / 1e3, self.k / 1e3
        return (
            f"Decode: t(p) = {seconds(w)} + {seconds(k)} x p (off by {self.rms:.1%}). A token costs "
            f"{seconds(w)}, and {seconds(1e3 * k)} more for every 1,000 positions before it{doubled}."
        )


@dataclass(frozen=True)
class Request:
    """What a whole request takes by the two laws."""

    n_prompt: int
    n_gen: int
    prefill_s: float
    decode_s: float

    @property
    def e2e_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def prefill_share(self) -> float:
        return self.prefill_s / self.e2e_s


def request(prefill: PrefillLaw, decode: DecodeLaw, n_prompt: int, n_gen: int) -> Request:
    """Reading n_prompt tokens and writing n_gen: T(P), and t(p) over the positions of n_gen - 1 decode steps."""
    decode_ms = (n_gen - 1) * decode.ms(n_prompt + (n_gen - 2) / 2)
    return Request(n_prompt, n_gen, prefill.seconds(n_prompt), decode_ms / 1e3)


def prefill_law(rows: pd.DataFrame) -> PrefillLaw | None:
    """Fitted to the medians of one setup (rows of `table.summary`); None for fewer than 4 lengths."""
    rows = rows[(rows.n_prompt >= rows.n_ubatch) & rows.prefill_s.notna()]
    lengths, times = rows.n_prompt.tolist(), rows.prefill_s.tolist()
    if len(set(lengths)) < MIN_PREFILL:
        return None
    a, b, c = stats.fit([[1] * len(lengths), lengths, [n * n for n in lengths]], times)
    return PrefillLaw(a, b, c, _rms([a + b * n + c * n * n for n in lengths], times))


def decode_law(rows: pd.DataFrame) -> DecodeLaw | None:
    """Fitted over the mean positions of the decode steps; None for fewer than 3."""
    rows = rows[rows.tpot_ms.notna()]
    positions, times = positions_of(rows).tolist(), rows.tpot_ms.tolist()
    if len(set(positions)) < MIN_DECODE:
        return None
    w, k = stats.fit([[1] * len(positions), positions], times)
    return DecodeLaw(w, k, _rms([w + k * p for p in positions], times))


def positions_of(rows: pd.DataFrame) -> pd.Series:
    """The mean position of a run's decode steps: the first is at n_prompt, n_gen - 1 follow each other."""
    return rows.n_prompt + (rows.n_gen - 2) / 2


def _rms(fitted: list[float], times: list[float]) -> float:
    errors = [(fit / time - 1) ** 2 for fit, time in zip(fitted, times, strict=True)]
    return float((sum(errors) / len(errors)) ** 0.5)
