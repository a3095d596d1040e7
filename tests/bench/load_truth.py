"""Do the figures of loads hold what a queue with a known answer says?

    python3 -m uv run python -m tests.bench.load_truth [TRIALS]

No server: requests are planted as a queue of 4 slots serves them, with answers of random length (exponential, 0.5 s on
average). In an open loop that is M/M/c, in a closed one all waits are sums of exponential times, so attainment,
capacity, percentiles and rates are known exactly (Erlang C; Allen, Probability, Statistics, and Queueing Theory, 5.2).
TRIALS (100) sessions of each kind: 3 rounds, windows of 30 s after 10 s of warm-up. Of 95 % intervals at least 93 % are
wanted to hold the truth; what a plain binomial interval would do is printed for comparison.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from scipy.optimize import brentq
from scipy.special import gammainc
from scipy.stats import binomtest

from lab.core.record import FAILED, OK
from lab.core.request import (
    CLOSED,
    POISSON,
    RATE_LIMITED,
    TEXT,
    Asked,
    Events,
    Load,
    Request,
    Slo,
    Usage,
)
from lab.features.serve import load_figures

N_SLOTS = 4
MEAN_S = 0.5
LIMIT_S = 0.5
N_TOKENS = 20
N_ROUNDS = 3
FULL = N_SLOTS / MEAN_S
"""Requests per second that end while all slots work."""

RATES = (2.0, 4.0, 5.0, 6.0, 7.0)
USERS = (1, 2, 4, 6, 8, 12)
REFUSES = 0.07
"""Share of requests that are refused, where that is what goes wrong."""

EXACT = 1e-6


def load(level: float, is_open: bool, round_: int) -> Load:
    arm: dict[str, Any] = {"rate": level} if is_open else {"concurrency": int(level)}
    window: dict[str, Any] = {"warmup_s": 10, "duration_s": 30, "lengths": "planted", "seed": 1}
    return Load(
        arrivals=POISSON if is_open else CLOSED,
        round=round_,
        slo=Slo(ttft_s=LIMIT_S),
        **arm,
        **window,
    )


def request(
    of: Load, at_s: float, wait_s: float, service_s: float, is_refused: bool = False
) -> Request:
    """Five events of equal distance; the first as soon as a slot is free."""
    n = 5
    arrive_ns = tuple(round(1e9 * (wait_s + service_s * i / (n - 1))) + 1000 for i in range(n))
    events = (
        Events() if is_refused else Events(arrive_ns, (1,) * n, (TEXT,) * n, (N_TOKENS // n,) * n)
    )
    return Request(
        asked=Asked(n_prompt=10, n_gen=N_TOKENS, load=of),
        started_at=f"2026-01-01T00:{of.round:02}:00Z",
        scheduled_ns=round(1e9 * at_s) if of.arrivals == POISSON else None,
        sent_ns=round(1e9 * at_s),
        ended_ns=1000 if is_refused else arrive_ns[-1],
        status=FAILED if is_refused else OK,
        failure=RATE_LIMITED if is_refused else None,
        events=events,
        usage=None if is_refused else Usage(completion_tokens=N_TOKENS),
    )


def planted(of: Load, rng: random.Random, refuses: float = 0.0) -> list[Request]:
    """All requests of one arm in one round."""
    free = [0.0] * N_SLOTS
    end_s = of.warmup_s + of.duration_s
    users = [rng.expovariate(10) for _ in range(of.concurrency or 0)]
    heapq.heapify(users)
    requests: list[Request] = []
    at_s = 0.0
    while True:
        at_s = at_s + rng.expovariate(of.rate) if of.rate else heapq.heappop(users)
        if at_s > end_s + 1:
            return requests
        is_refused = rng.random() < refuses
        start_s = at_s if is_refused else max(heapq.heappop(free), at_s)
        service_s = 0.001 if is_refused else rng.expovariate(1 / MEAN_S)
        requests.append(request(of, at_s, start_s - at_s, service_s, is_refused))
        if not is_refused:
            heapq.heappush(free, start_s + service_s)
        if not of.rate:
            heapq.heappush(users, start_s + service_s)


def session(
    levels: tuple[float, ...], is_open: bool, rng: random.Random, refuses: float = 0.0
) -> list[Request]:
    loads = (load(level, is_open, round_) for level in levels for round_ in range(N_ROUNDS))
    return [one for of in loads for one in planted(of, rng, refuses)]


def has_to_wait(rate: float) -> float:
    """Erlang C: the share of requests that find all slots taken."""
    a = rate * MEAN_S
    terms = [a**k / math.factorial(k) for k in range(N_SLOTS)]
    last = a**N_SLOTS / math.factorial(N_SLOTS) * N_SLOTS / (N_SLOTS - a)
    return last / (sum(terms) + last)


def open_truth(rate: float) -> float:
    """The share of requests that wait for at most LIMIT_S."""
    return 1 - has_to_wait(rate) * math.exp(-(FULL - rate) * LIMIT_S)


def closed_truth(users: float) -> float:
    """The same of so many users: who sends the next request waits until users - slots others have ended."""
    return float(gammainc(users - N_SLOTS, FULL * LIMIT_S)) if users > N_SLOTS else 1.0


def open_percentile(rate: float, share: float) -> float:
    return math.log(has_to_wait(rate) / (1 - share)) / (FULL - rate)


class Seen(NamedTuple):
    """What a session of loads showed, without its requests."""

    arms: list[dict[str, Any]]
    capacity: dict[str, Any] | None
    ttft_s: list[list[float]]  # of each arm


def seen(requests: list[Request]) -> Seen:
    rows = load_figures.frame(requests)
    arms = load_figures.arm_rows(rows)
    inside = rows[rows.kept & rows.inside]
    return Seen(
        arms,
        load_figures.capacity(arms),
        [list(own.ttft_s.dropna()) for _, own in inside.groupby("arm")],
    )


def attainment(
    name: str, levels: tuple[float, ...], sessions: list[Seen], truth: Callable[[float], float]
) -> None:
    for i, level in enumerate(levels):
        true = truth(level)
        known = [one.arms[i] for one in sessions if one.arms[i]["n"]]
        plain = [
            binomtest(round(of["attainment"] * of["n"]), of["n"]).proportion_ci(0.95, "exact")
            for of in known
        ]
        ends = [(of["attainment_low"], of["attainment_high"]) for of in known]
        covers, naive = (
            share([low - EXACT <= true <= high + EXACT for low, high in of]) for of in (ends, plain)
        )
        width = statistics.median(high - low for low, high in ends)
        n = statistics.median(of["n"] for of in known)
        print(
            f"{name} {level:4g}: attainment {true:6.1%} of {n:4.0f} requests, interval {100 * width:4.1f} points wide "
            f"holds it in {covers:.1%} (plain binomial: {naive:.1%})",
            flush=True,
        )


def capacity(name: str, sessions: list[Seen], true: float) -> None:
    known = [one.capacity for one in sessions if one.capacity]
    holds = share([(of["at_least"] or 0) <= true <= (of["below"] or math.inf) for of in known])
    both = [of for of in known if of["at_least"] is not None and of["below"] is not None]
    words = max((of["sentence"] for of in known), key=[of["sentence"] for of in known].count)
    print(
        f"{name}: capacity {true:.2f} is where it was said to be in {holds:.1%} of {len(known)} sessions (at least "
        f"93 % wanted); both ends known in {len(both)}; most often: {words}",
        flush=True,
    )


def share(values: list[bool]) -> float:
    return sum(values) / len(values)


def figures(sessions: list[Seen]) -> None:
    """Rates and percentiles of an open loop over the truth: the mean of sessions, and of all their requests together.

    A session is short: it seldom sees the rare long queues, so its own percentiles of a full server are mostly too low.
    """
    for i, rate in enumerate(RATES):
        rates = [one.arms[i]["tokens_tps"] for one in sessions]
        parts = [f"tokens/s {statistics.fmean(rates) / (rate * N_TOKENS):.3f}"]
        together = sorted(value for one in sessions for value in one.ttft_s[i])
        for percentile in (0.95, 0.99):
            true = open_percentile(rate, percentile)
            tail = load_figures.tail(together, percentile)
            known = [one.arms[i][f"ttft_p{100 * percentile:.0f}_s"] for one in sessions]
            own = [value for value in known if value == value]
            if true > 0 and own:
                median = statistics.median(own) / true
                parts.append(
                    f"{percentile:.0%} of TTFT {tail[0] / true:.3f} (median of sessions {median:.2f})"
                )
        print(f"rate {rate:g}, measured / true: {'; '.join(parts)}", flush=True)


def overload(n_trials: int, rng: random.Random) -> None:
    for rate in (0.5 * FULL, 0.75 * FULL, 0.9 * FULL, 1.1 * FULL, 1.25 * FULL, 1.5 * FULL):
        called = share(
            [seen(session((rate,), True, rng)).arms[0]["is_overloaded"] for _ in range(n_trials)]
        )
        print(f"rate {rate:g} of {FULL:g} that end: called overloaded in {called:.1%}", flush=True)


def main() -> None:
    n_trials = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    rng = random.Random(1)
    opened = [seen(session(RATES, True, rng)) for _ in range(n_trials)]
    attainment("rate", RATES, opened, open_truth)
    capacity("open loop", opened, brentq(lambda rate: open_truth(rate) - 0.9, 0.1, FULL - 0.1))
    figures(opened)
    closed = [seen(session(USERS, False, rng)) for _ in range(n_trials)]
    attainment("users", USERS, closed, closed_truth)
    capacity(
        "closed loop", closed, brentq(lambda users: closed_truth(users) - 0.9, N_SLOTS + 0.1, 20)
    )
    refusing = [seen(session((1.0, 3.0), True, rng, REFUSES)) for _ in range(n_trials)]
    attainment(
        "refused at",
        (1.0, 3.0),
        refusing,
        lambda rate: (1 - REFUSES) * open_truth(rate * (1 - REFUSES)),
    )
    overload(n_trials // 4, rng)


if __name__ == "__main__":
    main()
