"""The two laws fitted to a sweep: prefill time over length, and time per token over position.

    prefill   T(P) = a + b P + c P^2    b: each token passes through the weights; c: it attends to
                                        all tokens before it
    decode    t(p) = w + k p            w: each step reads the weights; k: and the KV cache of every
                                        position

The terms follow from the transformer's arithmetic (attention over P tokens is P x P). The fitted
coefficients are at least zero. Prompts shorter than one full ubatch underuse the hardware and are
left out.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.core import stats
from lab.show import wording
from lab.show.wording import percent

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Law:
    """Seconds as a + b n + c n^2 of prefill; a + b n (`c` is None) of a token of decode.

    `rms` is the root mean square of the relative errors.
    """

    a: float
    b: float
    c: float | None
    rms: float

    def seconds(self, n: float) -> float:
        return self.a + self.b * n + (self.c or 0) * n**2

    def n_tokens(self, seconds: float) -> float:
        """The length that takes this many seconds: the inverse of `seconds`. NaN without one."""
        growth_s = seconds - self.a
        c = self.c or 0
        if growth_s < 0 or not (self.b or c):
            return math.nan
        return float(2 * growth_s / (self.b + (self.b**2 + 4 * c * growth_s) ** 0.5))

    @property
    def formula(self) -> str:
        fixed = wording.seconds(self.a)
        slope = wording.seconds(self.b)
        if self.c is None:
            return f"t(p) = {fixed} + {slope} * p"
        return f"T(P) = {fixed} + {slope} * P + {wording.seconds(self.c)} * P^2"

    def __str__(self) -> str:
        """The formula, what the next token takes, and what each token before it adds to that."""
        fit = f"{self.formula} (typical fit error {percent(self.rms)})"
        if self.c is None:
            return f"Time per token: {fit}. A token takes {_token_time(self.a, self.b)}."
        token_time = _token_time(self.b, 2 * self.c)
        return f"Prefill time: {fit}. A prompt token takes {token_time}."


def _token_time(first_s: float, growth_s: float) -> str:
    """The time of the first token, its growth per token before it, and where it has doubled."""
    first = wording.seconds(first_s)
    growth = wording.seconds(1e3 * growth_s)
    time = f"{first}, plus {growth} per 1,000 tokens before it"
    if not growth_s:
        return time
    n_doubled = first_s / growth_s
    twice = wording.seconds(2 * first_s)
    return f"{time}; after {n_doubled:,.0f} tokens it takes {twice}, twice as long"


def request(prefill: Law, decode: Law, n_prompt: int, n_gen: int) -> tuple[float, float]:
    """Seconds of prefill and of decode: T(P), and t(p) over the positions of the decode steps."""
    n_steps = n_gen - 1
    mean_position = n_prompt + (n_gen - 2) / 2
    return prefill.seconds(n_prompt), n_steps * decode.seconds(mean_position)


def prefill_law(rows: pd.DataFrame) -> Law | None:
    """Fitted to medians of one setup (rows of `lab.summary`); None for fewer than 4 lengths."""
    rows = rows[(rows.n_prompt >= rows.n_ubatch) & rows.prefill_s.notna()]
    return _fitted(rows.n_prompt, rows.prefill_s, degree=2)


def decode_law(rows: pd.DataFrame) -> Law | None:
    """Fitted over the mean positions of the decode steps; None for fewer than 3."""
    rows = rows[rows.tpot_ms.notna()]
    return _fitted(positions_of(rows), rows.tpot_ms / 1e3, degree=1)


def positions_of(rows: pd.DataFrame) -> pd.Series:
    """The mean position of a run's n_gen - 1 decode steps; the first step is at n_prompt."""
    return rows.n_prompt + (rows.n_gen - 2) / 2


def _fitted(n: pd.Series, times_s: pd.Series, degree: int) -> Law | None:
    """A polynomial of this degree, 1 or 2."""
    if n.nunique() < degree + 2:
        return None
    powers = [(n**power).tolist() for power in range(degree + 1)]
    coefficients = stats.fit(powers, times_s.tolist())
    c = coefficients[2] if degree == 2 else None
    law = Law(coefficients[0], coefficients[1], c, math.nan)
    errors = n.map(law.seconds) / times_s - 1
    return dataclasses.replace(law, rms=float((errors**2).mean() ** 0.5))
