"""How often equal setups are called different between sessions.

    python3 -m uv run python -m tests.bench.session_spread [TRIALS]

Draws sessions of one machine whose medians differ by a planted standard deviation, five runs each
with 3 % between them, and compares n against n of equal setups. The spread between sessions is
known as `lab compare` knows it: from the compared sessions (n - 1 degrees of freedom of each side)
and from `n_others` sessions of another setup. Wanted: at most 5.5 % of comparisons say that there
is a difference (a 95 % interval without 1).
"""

import math
import sys

import numpy as np
from scipy.special import stdtrit

from lab.core import stats
from lab.show import session_spread

N_RUNS = 5
WITHIN = 0.03  # standard deviation of the logarithms of a session's runs
BETWEEN = (0.02, 0.08, 0.12)  # of sessions
MOST_SESSIONS = 6
LEAST_FREEDOM = 3  # with less, the assumed spread is used
N_CHECKED = 20


def main(n_trials: int = 100_000) -> None:
    chance = np.random.default_rng(1)
    error = 100 * math.sqrt(0.05 * 0.95 / n_trials)
    print(f"of equal setups called different, %; standard error {error:.2f}")
    for n_others in (6, 0):
        print(f"{n_others} sessions of another setup")
        for between in BETWEEN:
            shares = []
            for n in range(1, MOST_SESSIONS + 1):
                if freedom(n, n_others) >= LEAST_FREEDOM:
                    share = false_share(chance, n_trials, n, n_others, between)
                    shares.append(f"{n}:{n} {100 * share:4.1f}")
            print(f"  {100 * between:2.0f} % between sessions: {'  '.join(shares)}")


def freedom(n: int, n_others: int) -> int:
    """Degrees of freedom of the spread between sessions."""
    return 2 * (n - 1) + max(0, n_others - 1)


def draw(chance: np.random.Generator, between: float, *shape: int) -> np.ndarray:
    """Logarithms of runs: the last axis are the runs of a session."""
    of_sessions = chance.normal(0, between, (*shape, 1))
    return of_sessions + chance.normal(0, WITHIN, (*shape, N_RUNS))


def false_share(
    chance: np.random.Generator, n_trials: int, n: int, n_others: int, between: float
) -> float:
    """The share of comparisons of equal setups whose interval leaves out 1."""
    logs = draw(chance, between, n_trials, 2, n)
    medians = np.median(logs, axis=-1)
    squares = n * medians.var(axis=-1).sum(axis=-1)
    if n_others:
        medians_of_others = np.median(draw(chance, between, n_trials, n_others), axis=-1)
        squares = squares + n_others * medians_of_others.var(axis=-1)
    df = freedom(n, n_others)
    between_sessions = squares / df  # a variance, as spread.py estimates it
    within = np.pi / 2 * logs.var(axis=-1, ddof=1) / N_RUNS
    is_wider = within > between_sessions[:, None, None]
    shared = np.where(is_wider, 0.0, between_sessions[:, None, None]).sum(axis=(1, 2)) / n**2
    apart = np.where(is_wider, within, 0.0) / n**2
    variance = shared + apart.sum(axis=(1, 2))
    of_runs = (apart**2).sum(axis=(1, 2)) / (N_RUNS - 1)
    half = stdtrit(variance**2 / (shared**2 / df + of_runs), (1 + stats.CONFIDENCE) / 2)
    half = half * np.sqrt(variance)
    centres = medians.mean(axis=-1)
    difference = centres[:, 1] - centres[:, 0]
    for trial in range(N_CHECKED):
        sd = float(np.sqrt(between_sessions[trial]))
        spread = session_spread.Spread(sd, float(df), "planted")
        check(logs[trial], spread, difference[trial], half[trial])
    return float(np.mean(np.abs(difference) > half))


def check(
    logs: np.ndarray,
    spread: session_spread.Spread,
    difference: float,
    half: float,
) -> None:
    """The lab computes the same interval."""
    sides = (np.exp(logs[0]), np.exp(logs[1]))
    ratio = session_spread.between_sessions(sides, (spread, spread))
    assert np.allclose(
        np.log([ratio.low, ratio.high]),
        [difference - half, difference + half],
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
