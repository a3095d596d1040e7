"""The two laws fitted to a sweep: prefill time over the prompt's length, and time per token over
its position.

    prefill   T(P) = a + b P + c P^2    b: each token passes through the weights; c: it attends to all tokens before it
    decode    t(p) = w + k p            w: each step reads the weights; k: and the KV cache of every position

The terms follow from the transformer's arithmetic (attention over P tokens is P x P). The fitted
coefficients are at least zero. Prompts shorter than one full ubatch underuse the hardware and are
left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.core import stats
from lab.show import wording
from lab.show.wording import percent

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Law:
    """Seconds as a + b n + c n^2 (decode: w + k n); `rms` is the root mean square of the relative
    errors."""

    a: float
    b: float
    c: float | None
    rms: float

    def seconds(self, n: float) -> float:
        return self.a + self.b * n + (self.c or 0) * n**2

    def n_tokens(self, seconds: float) -> float:
        """The length that takes this many seconds: the inverse of `seconds`. NaN where none
        does."""
        rest = seconds - self.a
        c = self.c or 0
        if rest < 0 or not (self.b or c):
            return float("nan")
        return float(2 * rest / (self.b + (self.b**2 + 4 * c * rest) ** 0.5))

    @property
    def formula(self) -> str:
        a = wording.seconds(self.a)
        b = wording.seconds(self.b)
        return (
            f"t(p) = {a} + {b} * p"
            if self.c is None
            else f"T(P) = {a} + {b} * P + {wording.seconds(self.c)} * P^2"
        )

    def __str__(self) -> str:
        """The formula, what the next token takes, and by how much each token before it adds to
        that."""
        first, more = (self.a, self.b) if self.c is None else (self.b, 2 * self.c)
        what, whose = (
            ("Time per token", "A token") if self.c is None else ("Prefill time", "A prompt token")
        )
        each = f"{wording.seconds(first)}, plus {wording.seconds(1e3 * more)} per 1,000 tokens before it"
        if more:
            each += f"; after {first / more:,.0f} tokens it takes {wording.seconds(2 * first)}, twice as long"
        return (
            f"{what}: {self.formula} (typical fit error {percent(self.rms)}). {whose} takes {each}."
        )


def request(prefill: Law, decode: Law, n_prompt: int, n_gen: int) -> tuple[float, float]:
    """Seconds of prefill and of decode: T(P), and t(p) over the positions of n_gen - 1 decode
    steps."""
    return prefill.seconds(n_prompt), (n_gen - 1) * decode.seconds(n_prompt + (n_gen - 2) / 2)


def prefill_law(rows: pd.DataFrame) -> Law | None:
    """Fitted to the medians of one setup (rows of `table.summary`); None for fewer than 4
    lengths."""
    rows = rows[(rows.n_prompt >= rows.n_ubatch) & rows.prefill_s.notna()]
    return _fitted(rows.n_prompt, rows.prefill_s, 2)


def decode_law(rows: pd.DataFrame) -> Law | None:
    """Fitted over the mean positions of the decode steps; None for fewer than 3."""
    rows = rows[rows.tpot_ms.notna()]
    return _fitted(positions_of(rows), rows.tpot_ms / 1e3, 1)


def positions_of(rows: pd.DataFrame) -> pd.Series:
    """The mean position of a run's decode steps: the first is at n_prompt, n_gen - 1 follow each
    other."""
    return rows.n_prompt + (rows.n_gen - 2) / 2


def _fitted(n: pd.Series, took_s: pd.Series, degree: int) -> Law | None:
    if n.nunique() < degree + 2:
        return None
    found = stats.fit([(n**power).tolist() for power in range(degree + 1)], took_s.tolist())
    errors = sum(c * n**power for power, c in enumerate(found)) / took_s - 1
    return Law(
        found[0], found[1], found[2] if degree > 1 else None, float((errors**2).mean() ** 0.5)
    )
