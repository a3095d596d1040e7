"""Do the rates of closed loops, and their intervals, hold on servers whose rate is known?

    python3 -m uv run python -m tests.bench.closed_loop [SERVERS]

No server: each of SERVERS (60) is simulated, event by event. It has 1 to 8 slots, slows down by a share of its own for
each request beside another, and needs a constant, a slightly different or an exponentially distributed time for an
answer. Its true rate is that of 20,000 s. A session has 3 rounds with a window of 15 s after 5 s of warm-up, as `lab
load` has, and its users begin together (lockstep) or apart, as the lab starts them.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass
from typing import Any

from lab.core.request import CLOSED, Load, Request
from lab.features.serve import load_figures
from lab.features.serve.loads import LIMITS, spread_s
from tests.bench.load_truth import request

WARMUP_S = LIMITS["warmup"][0]
DURATION_S = LIMITS["duration"][0]
N_ROUNDS = 3
N_SESSIONS = 10
LONG_S = 20_000.0


@dataclass(frozen=True)
class Simulated:
    """A server: each of `n_active` requests advances by 1 / (1 + slows * (n_active - 1)) per second."""

    n_users: int
    n_slots: int
    slows: float
    mean_s: float
    kind: str

    def work_s(self, rng: random.Random) -> float:
        """Seconds that an answer needs alone."""
        spread = {
            "constant": 1.0,
            "about": rng.uniform(0.9, 1.1),
            "exponential": rng.expovariate(1),
        }
        return self.mean_s * spread[self.kind]

    def answers(
        self, end_s: float, rng: random.Random, starts_s: list[float]
    ) -> list[tuple[float, float, float]]:
        """When each request was sent, began and ended, until all that were sent before `end_s` have ended."""
        arriving = sorted(starts_s)
        waiting = list[float]()
        done = list[tuple[float, float, float]]()
        active: list[list[float]] = []  # work left, sent, began
        now = 0.0
        while active or waiting or arriving:
            share = 1 + self.slows * max(0, len(active) - 1)
            next_end = now + share * min((one[0] for one in active), default=float("inf"))
            next_start = arriving[0] if arriving else float("inf")
            then = min(next_end, next_start)
            for one in active:
                one[0] -= (then - now) / share
            now = then
            if next_start <= next_end:
                waiting.append(arriving.pop(0))
            else:
                ended = min(active)
                active.remove(ended)
                done.append((ended[1], ended[2], now))
                if now < end_s:
                    waiting.append(now)
            while waiting and len(active) < self.n_slots:
                active.append([self.work_s(rng), waiting.pop(0), now])
        return done

    def true_ps(self, rng: random.Random) -> float:
        """Answers per second over a long time."""
        ends = [
            end
            for *_, end in self.answers(
                LONG_S, rng, [rng.uniform(0, 10) for _ in range(self.n_users)]
            )
        ]
        return sum(LONG_S / 10 <= end < LONG_S for end in ends) / (0.9 * LONG_S)


def drawn(rng: random.Random) -> Simulated:
    """A server whose users wait up to 5 s for an answer: as long as the warm-up."""
    kind = rng.choice(("constant", "about", "exponential"))
    n_users = rng.choice((2, 3, 4, 6, 8, 12))
    n_slots = rng.choice((1, 2, 4, 8))
    slows = rng.choice((0, 0.1, 0.5))
    at_once = min(n_users, n_slots)
    answers_per_wait = max(1, n_users / n_slots) * (1 + slows * (at_once - 1))
    return Simulated(n_users, n_slots, slows, rng.uniform(0.2, 5) / answers_per_wait, kind)


def session(server: Simulated, rng: random.Random, is_apart: bool) -> list[Request]:
    requests = []
    for round_ in range(N_ROUNDS):
        window: dict[str, Any] = {
            "warmup_s": WARMUP_S,
            "duration_s": DURATION_S,
            "lengths": "planted",
            "seed": 1,
        }
        load = Load(arrivals=CLOSED, concurrency=server.n_users, round=round_, **window)
        starts = [
            rng.uniform(0, spread_s(load)) if is_apart else 0.0 for _ in range(server.n_users)
        ]
        answers = server.answers(WARMUP_S + DURATION_S, rng, starts)
        requests += [
            request(load, sent, began - sent, ended - began) for sent, began, ended in answers
        ]
    return requests


def main() -> None:
    rng = random.Random(1)
    servers = [drawn(rng) for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 60)]
    for is_apart in (False, True):
        off = []
        before = []
        inside = []
        widths = []
        for server in servers:
            true = server.true_ps(rng)
            for _ in range(N_SESSIONS):
                rows = load_figures.frame(session(server, rng, is_apart))
                (arm,) = load_figures.arm_rows(rows)
                rate, low, high = (arm[f"requests_ps{end}"] for end in ("", "_low", "_high"))
                counted = rows[
                    (rows.begin_s <= rows.end_s) & (rows.end_s < rows.over_s)
                ]  # ended inside the windows
                off.append(rate / true - 1)
                before.append(len(counted) / sum(arm["window_s"]) / true - 1)
                inside.append(low <= true * 1.0001 and true <= high * 1.0001)
                widths.append((high - low) / rate)
        words = "apart" if is_apart else "together"
        for name, values in (("counted in the window", before), ("by Little's law", off)):
            beyond = [
                sum(abs(value) > share for value in values) / len(values)
                for share in (0.03, 0.05, 0.1)
            ]
            print(
                f"users begin {words}, {name}: off by over 3, 5, 10 % in {', '.join(f'{one:.1%}' for one in beyond)}"
            )
            print(f"    from {min(values):+.0%} to {max(values):+.0%}")
        held = sum(inside) / len(inside)
        width = statistics.median(widths)
        print(
            f"users begin {words}: the interval holds the truth in {held:.1%}; median width {width:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
