"""The two laws fitted to a sweep: prefill time over the prompt's length, and time per token over its position.

    prefill   T(P) = a + b P + c P^2    b: each token passes through the weights; c: it attends to all tokens before it
    decode    t(p) = w + k p            w: each step reads the weights; k: and the KV cache of every position

The terms follow from the transformer's arithmetic (attention over P tokens is P x P). The fitted coefficients are at
least zero. Prompts shorter than one full ubatch underuse the hardware and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.core import stats
from lab.show.wording import percent, seconds

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
        law = f"T(P) = {seconds(self.a)} + {seconds(self.b)} * P + {seconds(self.c)} * P^2"
        return f"Prefill time: {law} {_in_words('A prompt token', self.b, 2 * self.c, self.rms)}"


@dataclass(frozen=True)
class DecodeLaw:
    """t(p) = w + k p in ms; `rms` as for prefill."""

    w: float
    k: float
    rms: float

    def ms(self, position: float) -> float:
        return self.w + self.k * position

    def __str__(self) -> str:
        w, k = self.w / 1e3, self.k / 1e3
        return f"Time per token: t(p) = {seconds(w)} + {seconds(k)} * p {_in_words('A token', w, k, self.rms)}"


def _in_words(what: str, first_s: float, more_s: float, rms: float) -> str:
    """What the next token takes, and by how much each token before it adds to that."""
    doubled = f"; after {first_s / more_s:,.0f} tokens it takes {seconds(2 * first_s)}, twice as long" if more_s else ""
    each = f"{seconds(first_s)}, plus {seconds(1e3 * more_s)} per 1,000 tokens before it"
    return f"(typical fit error {percent(rms)}). {what} takes {each}{doubled}."


def request(prefill: PrefillLaw, decode: DecodeLaw, n_prompt: int, n_gen: int) -> tuple[float, float]:
    """Seconds of prefill and of decode: T(P), and t(p) over the positions of n_gen - 1 decode steps."""
    return prefill.seconds(n_prompt), (n_gen - 1) * decode.ms(n_prompt + (n_gen - 2) / 2) / 1e3


def prefill_law(rows: pd.DataFrame) -> PrefillLaw | None:
    """Fitted to the medians of one setup (rows of `table.summary`); None for fewer than 4 lengths."""
    rows = rows[(rows.n_prompt >= rows.n_ubatch) & rows.prefill_s.notna()]
    n, times = rows.n_prompt, rows.prefill_s
    if n.nunique() < MIN_PREFILL:
        return None
    a, b, c = stats.fit([[1] * len(n), n.tolist(), (n * n).tolist()], times.tolist())
    return PrefillLaw(a, b, c, float((((a + b * n + c * n * n) / times - 1) ** 2).mean() ** 0.5))


def decode_law(rows: pd.DataFrame) -> DecodeLaw | None:
    """Fitted over the mean positions of the decode steps; None for fewer than 3."""
    rows = rows[rows.tpot_ms.notna()]
    p, times = positions_of(rows), rows.tpot_ms
    if p.nunique() < MIN_DECODE:
        return None
    w, k = stats.fit([[1] * len(p), p.tolist()], times.tolist())
    return DecodeLaw(w, k, float((((w + k * p) / times - 1) ** 2).mean() ** 0.5))


def positions_of(rows: pd.DataFrame) -> pd.Series:
    """The mean position of a run's decode steps: the first is at n_prompt, n_gen - 1 follow each other."""
    return rows.n_prompt + (rows.n_gen - 2) / 2
