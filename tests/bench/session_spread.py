"""How often equal setups are called different between sessions: python -m tests.bench.session_spread [TRIALS]

Draws sessions of one machine whose medians differ by a planted standard deviation, five runs each with 3 % between
them, and compares n against n of equal setups. The spread between sessions is known as `lab compare` knows it: from the
compared sessions (n - 1 degrees of freedom of each side) and from `n_others` sessions of another setup. Wanted: at most
5.5 % of comparisons say that there is a difference (a 95 % interval without 1).
"""

import math
import sys

import numpy as np
from scipy.special import stdtrit

from lab.core import stats
from lab.show import comparison

N_RUNS = 5
WITHIN = 0.03


def false_share(
    chance: np.random.Generator, n_trials: int, n: int, n_others: int, between: float
) -> float:
    """The share of comparisons of equal setups whose interval leaves out 1."""
    logs = chance.normal(0, between, (n_trials, 2, n, 1)) + chance.normal(
        0, WITHIN, (n_trials, 2, n, N_RUNS)
    )
    more = chance.normal(0, between, (n_trials, n_others, 1)) + chance.normal(
        0, WITHIN, (n_trials, n_others, N_RUNS)
    )
    centres = np.median(logs, axis=-1)
    others = np.median(more, axis=-1)
    squares = n * centres.var(axis=-1).sum(axis=-1) + (
        n_others * others.var(axis=-1) if n_others else 0.0
    )
    df = 2 * (n - 1) + max(0, n_others - 1)
    known = squares / df  # the variance between sessions, as spread.py estimates it
    own = np.pi / 2 * logs.var(axis=-1, ddof=1) / N_RUNS
    is_own = own > known[:, None, None]
    shared = np.where(is_own, 0.0, known[:, None, None]).sum(axis=(1, 2)) / n**2
    apart = np.where(is_own, own, 0.0) / n**2
    variance = shared + apart.sum(axis=(1, 2))
    freedom = variance**2 / (shared**2 / df + (apart**2).sum(axis=(1, 2)) / (N_RUNS - 1))
    half = stdtrit(freedom, (1 + stats.CONFIDENCE) / 2) * np.sqrt(variance)
    difference = centres[:, 1].mean(axis=-1) - centres[:, 0].mean(axis=-1)
    for trial in range(20):  # the same as the lab computes
        spread = float(np.sqrt(known[trial])), float(df)
        ratio = comparison.between_sessions(
            (np.exp(logs[trial, 0]), np.exp(logs[trial, 1])), (spread, spread)
        )
        assert np.allclose(
            np.log([ratio.low, ratio.high]), difference[trial] + half[trial] * np.array([-1, 1])
        )
    return float(np.mean(np.abs(difference) > half))


def main(n_trials: int = 100_000) -> None:
    chance = np.random.default_rng(1)
    print(
        "of equal setups called different, %; standard error",
        f"{100 * math.sqrt(0.05 * 0.95 / n_trials):.2f}",
    )
    for n_others in (6, 0):
        print(f"{n_others} sessions of another setup")
        for between in (0.02, 0.08, 0.12):
            shares = [
                f"{n}:{n} {100 * false_share(chance, n_trials, n, n_others, between):4.1f}"
                for n in range(1, 7)
                if 2 * (n - 1) + max(0, n_others - 1)
                >= 3  # fewer do not replace the assumed spread
            ]
            print(f"  {100 * between:2.0f} % between sessions: {'  '.join(shares)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
