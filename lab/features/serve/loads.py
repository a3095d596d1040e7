"""Loads as arms: requests and tokens in the steady window of each round, attainment of limits, and capacity.

The steady window of a round is [warmup_s, warmup_s + duration_s] from the start of its plan. A request belongs to it
if it was due inside it (open loop: at its intended time; closed loop: when it was sent), no matter when it ended: the
load continues until it has. Rates count what arrived inside the window, from all requests that overlap it. Rounds are
the replicates: ranges are between rounds.

Attainment is the share of requests due in the steady window that meet every limit. Failures and unknown figures count
as missed. An arm holds if at least 90 % of its requests do. Slow requests come in bunches because they wait in the same
queue, so a plain binomial interval of attainment is far too narrow (tests/bench/load_truth.py). It is widened by how
much batches of successive requests differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from lab.core import request_times as times
from lab.core import stats
from lab.core.record import OK
from lab.core.request import CLOSED, CONSTANT, POISSON, REPLAY, STALLED, TIMEOUT, Load, Request, Slo
from lab.core.request_times import Figures, figures

NS = 1e9
PAUSE_S = 0.5
"""In a closed loop some user always waits for an answer, or pauses after a failure (0.25 s). A round was aborted if
nothing happened for longer than this before the end of its window."""

FAILED_S = 0.25
"""A user's pause after a failure (PAUSE_S of client_process.py)."""

MOST_GAPS = 6
"""In an open loop of random arrivals, a pause of MOST_GAPS mean gaps before the end has a probability of 0.2 %."""

ORDER = (CLOSED, POISSON, CONSTANT, REPLAY)


@dataclass(frozen=True)
class Sample:
    """A request of a load without its events: its figures, and the tokens that arrived inside the steady window.

    `n_in_window` is None if its tokens are not counted. `is_spread`: only their sum is known, so they were spread
    evenly over the events. `at_s`: when it was due, in seconds from the start of its plan; NaN if only the other
    requests of its round show that.
    """

    figures: Figures
    n_in_window: float | None
    is_spread: bool
    at_s: float

    @property
    def load(self) -> Load:
        load = self.figures.asked.load
        assert load is not None
        return load

    @property
    def is_ok(self) -> bool:
        return self.figures.status == OK

    @property
    def first_s(self) -> float:
        """When its first token arrived; infinity without one."""
        return self._at(self.figures.ttft_ns)

    @property
    def end_s(self) -> float:
        """When it ended or failed; infinity for a timeout or a stall whose end is unknown."""
        if self.figures.failure in (TIMEOUT, STALLED) and self.figures.ended_ns is None:
            return math.inf
        end_s = self._at(self.figures.e2e_ns if self.figures.ended_ns is None else self.figures.ended_ns)
        return self.at_s if end_s == math.inf else end_s  # refused at once

    @property
    def date_s(self) -> float:
        """When it was sent (wall-clock time); 0 if a damaged line does not say."""
        try:
            return datetime.fromisoformat(self.figures.started_at).timestamp()
        except ValueError:
            return 0.0

    def _at(self, ns: int | None) -> float:
        sent_ns = self.figures.sent_ns
        return math.inf if ns is None or sent_ns is None else (sent_ns + ns) / NS


def sample(request: Request) -> Sample:
    """A request of a load as a Sample. ValueError for other requests."""
    load = request.asked.load
    if load is None:
        raise ValueError("the request is not part of a load")
    due_ns = request.sent_ns if request.scheduled_ns is None else request.scheduled_ns
    return Sample(figures(request), *_tokens(request, load), math.nan if due_ns is None else due_ns / NS)


def _tokens(request: Request, load: Load) -> tuple[float | None, bool]:
    indices = times.generated(request)
    if request.sent_ns is None or not indices:
        return 0.0, False
    begin_ns = load.warmup_s * NS - request.sent_ns
    inside = [i for i in indices if begin_ns <= request.events.arrive_ns[i] < begin_ns + load.duration_s * NS]
    if request.events.n_tokens is not None:
        return float(sum(request.events.n_tokens[i] for i in inside)), False
    n = times.n_generated(request)
    return (None, False) if n is None else (n * len(inside) / len(indices), n != len(indices))


@dataclass(frozen=True)
class Round:
    """One arm in one round: all its requests in the order in which they were due, including the warm-up."""

    load: Load
    all: tuple[Sample, ...]
    is_cut_off: bool  # aborted before the end of its window, as far as that is visible

    @property
    def begin_s(self) -> float:
        """The start of the steady window."""
        return self.load.warmup_s

    @property
    def length_s(self) -> float:
        """The length of the steady window; for a round that was cut off, the part that was measured."""
        known_s = _reach_s(self.all) - self.begin_s if self.is_cut_off else self.load.duration_s
        return max(0.0, min(self.load.duration_s, known_s))

    @property
    def end_s(self) -> float:
        return self.begin_s + self.length_s

    @cached_property
    def inside(self) -> tuple[Sample, ...]:
        """The requests that were due inside the window."""
        return tuple(one for one in self.all if self.begin_s <= one.at_s < self.end_s)

    @property
    def busy_s(self) -> float:
        """Closed loop: the seconds that the users spent on the requests of the window, per user; infinity if unknown,
        as after a timeout. Then rates count what arrived inside the window, as in an open loop.

        Each user always waits for an answer or pauses after a failure. So N users get N answers per mean time of an
        answer (Little's law), and rates follow from the requests alone. To count what ends inside the window aliases
        with waves of users: who began together stays together, and the window cuts the waves at one phase.
        """
        spent_s = sum(one.end_s - one.at_s + (0 if one.is_ok else FAILED_S) for one in self.inside)
        return spent_s / (self.load.concurrency or 1)

    @property
    def is_by_users(self) -> bool:
        """Whether rates follow from the times of the users' requests."""
        return self.load.arrivals == CLOSED and 0 < self.busy_s < math.inf

    @property
    def tokens_tps(self) -> float | None:
        """Tokens per second: in an open loop those that arrived inside the window. None if an answer is not counted."""
        if not self.length_s:
            return None
        if self.is_by_users:
            counts = [one.figures.n_generated for one in self.inside if one.is_ok]
            known = [n for n in counts if n is not None]
            return sum(known) / self.busy_s if len(known) == len(counts) else None
        if any(one.n_in_window is None for one in self.all if one.is_ok):
            return None
        return sum(one.n_in_window or 0.0 for one in self.all) / self.length_s

    @property
    def requests_ps(self) -> float | None:
        """Whole answers per second: in an open loop those that ended inside the window."""
        if not self.length_s:
            return None
        if self.is_by_users:
            return sum(one.is_ok and not one.figures.is_truncated for one in self.inside) / self.busy_s
        whole = [one for one in self.all if one.is_ok and not one.figures.is_truncated]
        return sum(self.begin_s <= one.end_s < self.end_s for one in whole) / self.length_s

    def in_flight(self, at_s: float) -> int:
        """Requests that were due and had not ended at this time."""
        return sum(one.at_s <= at_s < one.end_s for one in self.all)

    def waiting(self, at_s: float) -> int:
        """Requests that were due and had no first token at this time."""
        return sum(one.at_s <= at_s < min(one.first_s, one.end_s) for one in self.all)


@dataclass(frozen=True)
class Arm:
    """A load in all its rounds. Rounds that were cut off count only if all were."""

    label: str
    load: Load  # of its first round
    rounds: tuple[Round, ...]
    n_cut_off: int

    @property
    def inside(self) -> tuple[Sample, ...]:
        """The requests that were due inside the steady window of a round."""
        return tuple(one for of_round in self.rounds for one in of_round.inside)

    @property
    def level(self) -> float | None:
        """Users, or requests per second; None for a replay."""
        return self.load.concurrency if self.load.arrivals == CLOSED else self.load.rate

    @property
    def is_overloaded(self) -> bool:
        """Whether requests of an open loop arrived faster than they ended, so it has no steady state.

        More are in flight at the end of the windows than at the start, by more than random arrivals explain: 2 standard
        deviations of a Poisson count of all arrivals, and at least 3.
        """
        growth = sum(one.in_flight(one.end_s) - one.in_flight(one.begin_s) for one in self.rounds)
        return self.load.arrivals != CLOSED and growth >= 3 and growth > 2 * math.sqrt(len(self.inside))


def arms(samples: Sequence[Sample]) -> tuple[Arm, ...]:
    """The arms of a session of loads: closed loops by users, then open loops by rate, then replays."""
    by_arm: dict[tuple[object, ...], dict[int, list[Sample]]] = {}
    for one in samples:
        load = one.load
        key = load.arrivals, load.concurrency, load.rate, load.lengths
        if not one.figures.asked.warmup:
            by_arm.setdefault(key, {}).setdefault(load.round, []).append(one)
    has_lengths = len({key[-1] for key in by_arm}) > 1
    last = max((one.date_s for one in samples), default=0.0)
    made = [_arm(by_round, has_lengths, last) for by_round in by_arm.values()]
    return tuple(sorted(made, key=lambda arm: (_place(arm.load), arm.level or 0, arm.load.lengths)))


def _place(load: Load) -> int:
    return ORDER.index(load.arrivals) if load.arrivals in ORDER else len(ORDER)


def _arm(by_round: dict[int, list[Sample]], has_lengths: bool, last: float) -> Arm:
    rounds = [_round(own, max(one.date_s for one in own) == last) for _, own in sorted(by_round.items())]
    whole = [one for one in rounds if not one.is_cut_off]
    load = rounds[0].load
    label = f"{load.label}, {load.lengths}" if has_lengths else load.label
    return Arm(label, load, tuple(whole or rounds), len(rounds) - len(whole))


def _round(samples: Sequence[Sample], is_last: bool) -> Round:
    """A round of an arm, its requests in the order in which they were due.

    A request of a closed loop that found no connection has no send time. Its date gives it, counted from the start of
    the plan, which follows from the dates of the others.
    """
    starts = [one.date_s - one.figures.sent_ns / NS for one in samples if one.figures.sent_ns is not None]
    start_s = min(starts or [one.date_s for one in samples])
    due = [dataclasses.replace(one, at_s=one.date_s - start_s) if math.isnan(one.at_s) else one for one in samples]
    in_order = tuple(sorted(due, key=lambda one: one.at_s))
    return Round(samples[0].load, in_order, _is_cut_off(samples[0].load, in_order, is_last))


def _is_cut_off(load: Load, requests: Sequence[Sample], is_last: bool) -> bool:
    """Whether nothing happened before the end of the window although something should have.

    In an open loop only the last round can have been aborted, and only a pause that chance does not explain shows it.
    False for a replay.
    """
    silent_s = load.warmup_s + load.duration_s - _reach_s(requests)
    if load.arrivals == CLOSED:
        return silent_s > PAUSE_S
    return is_last and silent_s * (load.rate or 0) > (MOST_GAPS if load.arrivals == POISSON else 1.5)


def _reach_s(requests: Sequence[Sample]) -> float:
    """The time of the last known event."""
    return max(at_s for one in requests for at_s in (one.at_s, one.end_s) if at_s < math.inf)


SHARE = 0.9
"""An arm holds from this attainment on."""

N_BATCHES = 5
FAR = 2
"""If all requests stay below half of their limits, or all exceed twice their limits, bunches of slow requests say
nothing about which requests exceed a limit."""

HOLDS, FAILS, UNSURE = "holds", "does not hold", "unclear"


@dataclass(frozen=True)
class Attainment:
    """The share of requests that met every limit, with its 95 % interval."""

    n_good: int
    n: int
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.n_good / self.n

    @property
    def verdict(self) -> str:
        return HOLDS if self.low >= SHARE else FAILS if self.high < SHARE else UNSURE


@dataclass(frozen=True)
class Capacity:
    """The highest load at which 90 % of requests meet their limits: `at_least` and `below`, None if no arm shows it.

    `best` is the highest arm whose measured share reaches 90 %, together with all lower arms.
    """

    unit: str  # users, requests/s
    at_least: float | None
    below: float | None
    best: float | None
    sentence: str


def attainment(arm: Arm, slo: Slo) -> Attainment | None:
    """Attainment of an arm; None if no request was due."""
    used = [[one.figures.used(slo) for one in of_round.inside] for of_round in arm.rounds]
    everything = sorted(value for own in used for value in own)
    if not everything:
        return None
    per_round = math.ceil(N_BATCHES / len(used))
    batches = [batch for own in used for batch in _split(own, per_round)]
    is_far = everything[-1] * FAR < 1 or everything[0] > FAR
    worst = everything[math.ceil(0.9 * len(everything)) - 1]
    met = [[value <= 1 for value in batch] for batch in batches]
    not_slow = [[value <= worst for value in batch] for batch in batches] if not is_far else []
    interval = stats.share_interval(met, not_slow)
    return Attainment(sum(map(sum, met)), len(everything), interval.low, interval.high)


def _split(values: Sequence[float], n: int) -> list[Sequence[float]]:
    """`values` in n parts of about equal size."""
    return [values[i * len(values) // n : (i + 1) * len(values) // n] for i in range(n)]


def capacity(arms: Sequence[Arm], slo: Slo | None = None) -> Capacity | None:
    """The highest load at which 90 % of requests meet every limit, as they do at all lower loads.

    In users for closed loops, otherwise in requests per second. `slo` replaces the limits of the loads. None without
    limits, and without closed or open loops.
    """
    known = [(arm, arm.level, arm.load.slo if slo is None else slo) for arm in arms]
    first = next((arm.load.arrivals for arm, level, limits in known if level is not None and limits), None)
    measured = [
        (level, of_arm, arm.is_overloaded)
        for arm, level, limits in known
        if arm.load.arrivals == first and level is not None and limits and (of_arm := attainment(arm, limits))
    ]
    if not measured:
        return None
    at_least, below, best, holding = None, None, None, True
    for level, of_arm, is_overloaded in measured:
        verdict = UNSURE if is_overloaded and of_arm.verdict == HOLDS else of_arm.verdict
        holding = holding and of_arm.share >= SHARE
        best = level if holding else best
        at_least = level if holding and verdict == HOLDS else at_least
        below = level if verdict == FAILS and below is None else below
    unit = "users" if first == CLOSED else "requests/s"
    ends = measured[0][0], measured[-1][0]
    return Capacity(unit, at_least, below, best, _words(unit, at_least, below, best, ends))


def _words(
    unit: str, at_least: float | None, below: float | None, best: float | None, ends: tuple[float, float]
) -> str:
    by_share = f"; {best:g} by the measured shares alone" if best not in (None, at_least) else ""
    if at_least is not None and below is not None:
        return f"between {at_least:g} and {_amount(below, unit)}{by_share}"
    if at_least is not None:
        why = "every load met the limits" if at_least == ends[1] else "no load clearly missed the limits"
        return f"at least {_amount(at_least, unit)} ({why}){by_share}"
    if below is not None:
        why = "no load met the limits" if below == ends[0] else "no load clearly met the limits"
        return f"below {_amount(below, unit)} ({why}){by_share}"
    return f"unknown, too few requests{by_share}"


def _amount(level: float, unit: str) -> str:
    return f"{level:g} {'user' if level == 1 and unit == 'users' else unit}"
