"""The figures of an arm of a load: latencies with percentiles, rates with their range over rounds, and failures.

Latencies are of the successful requests that were due inside the steady window. In an open loop TTFT and E2E count from
the intended time, so that a late client or server does not shorten the wait. A percentile is a measured value (nearest
rank) and is given only if some request was slower.

Requests of one round wait in the same queue, so they are not replicates of each other. Sessions are therefore compared
by the medians of rounds, with one row per round, as if each were a run.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lab.core import stats
from lab.core.lists import grouped
from lab.core.record import OK, Machine, Record
from lab.core.request import Endpoint, RequestRecord, Slo
from lab.core.request_times import Figures
from lab.features.serve import load_shares, loads
from lab.features.serve.load_shares import Alone, Shares
from lab.features.serve.loads import NS, Arm, Attainment, Round, Sample, attainment
from lab.show import request_table, table

if TYPE_CHECKING:
    import pandas as pd

FEWEST = 8
"""Requests that each half of the windows needs for a comparison of the halves."""


@dataclass(frozen=True)
class Tail:
    """A percentile in seconds, and how many requests were slower."""

    value_s: float
    n_beyond: int


@dataclass(frozen=True)
class Latency:
    """One latency of `n` requests, in seconds. A percentile is None if no request exceeds it: n is too small."""

    n: int
    median_s: float
    p95: Tail | None
    p99: Tail | None
    most_s: float
    by_round_s: tuple[float, ...]  # medians of the rounds that have any


@dataclass(frozen=True)
class Rate:
    """Something per second over all windows, and in the window of each round, with its 90 % interval.

    The interval is Student's t over rounds, and half a request of a window on either side, because the window cuts
    answers at both ends. It held the truth in over 90 % of simulated closed loops (tests/bench/closed_loop.py).
    """

    value: float
    by_round: tuple[float, ...]
    n_per_round: float  # requests

    @property
    def low(self) -> float:
        return max(0.0, self.value - self._half)

    @property
    def high(self) -> float:
        return self.value + self._half

    @cached_property
    def _half(self) -> float:
        """Half the interval; 0 for one round."""
        cut = self.value / (2 * max(1.0, self.n_per_round)) if len(self.by_round) > 1 else 0.0
        return stats.mean_half_width(self.by_round, 0.9) + cut


@dataclass(frozen=True, kw_only=True)
class ArmFigures:
    """The figures of an arm; None if unknown."""

    arm: Arm
    n: int  # requests that were due inside the steady windows
    n_ok: int
    failures: dict[str, int]  # by class
    errors: dict[str, str]  # the most frequent error text of each class
    n_failed_outside: int  # in the warm-up, and after the window
    n_truncated: int  # answers that a limit of the server ended: its context was full
    n_short: int  # other answers with fewer tokens than requested
    n_warm: int  # requests with cached prompt tokens
    tokens_tps: Rate | None
    is_spread: bool  # whether tokens were spread evenly over events
    requests_ps: Rate | None
    user_tps: float | None  # 1 / median TPOT (as AIPerf's output token throughput per user)
    ttft: Latency | None
    tpot: Latency | None
    tpot_is_bound: bool  # tokens per event are unknown, so TPOT is an upper bound
    e2e: Latency | None
    stall_s: float | None  # the longest pause inside an answer
    late_median_s: float | None  # of sending, in an open loop
    late_most_s: float | None
    wait_s: float | None  # median of TTFT - the server's own prompt_ms: waiting for a slot, and HTTP
    attainment: Attainment | None
    goodput_ps: Rate | None
    in_flight_begin: float  # means over rounds
    in_flight_end: float
    waiting_end: float
    drift: float | None  # median TTFT of the second half of the windows over that of the first
    shares: Shares | None  # of the time: prefill, decode, idle


def all_figures(samples: Sequence[Sample]) -> list[ArmFigures]:
    """The figures of each arm of a session. A load of one user says how long prefill takes in the others."""
    arms = loads.arms(samples)
    alone = load_shares.alone(arms)
    return [figures_of(arm, alone) for arm in arms]


def figures_of(arm: Arm, alone: Alone | None = None) -> ArmFigures:
    """The figures of an arm. `alone`: the time of prefill without a queue, for servers that do not report it."""
    inside, slo = arm.inside, arm.load.slo
    went_well = [one.figures for one in inside if one.is_ok]
    late_s = [one.delay_ns / NS for one in (due.figures for due in inside) if one.delay_ns is not None]
    wait_s = [s for s in map(_wait_s, went_well) if s is not None]
    is_bound = any(one.tpot_bounds_ns and one.tpot_ns is None for one in went_well)
    tpot = latency(arm, tpot_bound_s if is_bound else tpot_s)
    n_failed = sum(not one.is_ok for of_round in arm.rounds for one in of_round.all)
    failed = [(one.figures.failure or "failed", one.figures.error) for one in inside if not one.is_ok]
    failures, words = Counter(name for name, _ in failed), Counter(failed)
    return ArmFigures(
        arm=arm,
        n=len(inside),
        n_ok=len(went_well),
        failures=dict(failures.most_common()),
        errors={name: error for (name, error), _ in reversed(words.most_common()) if error},
        n_failed_outside=n_failed - failures.total(),
        n_truncated=sum(one.is_truncated for one in went_well),
        n_short=sum(one.is_short is True and not one.is_truncated for one in went_well),
        n_warm=sum(one.is_warm is True for one in went_well),
        tokens_tps=rate(arm.rounds, lambda one: one.tokens_tps),
        is_spread=any(one.is_spread for of_round in arm.rounds for one in of_round.all),
        requests_ps=rate(arm.rounds, lambda one: one.requests_ps),
        user_tps=1 / tpot.median_s if tpot and not is_bound and tpot.median_s else None,
        ttft=latency(arm, ttft_s),
        tpot=tpot,
        tpot_is_bound=is_bound,
        e2e=latency(arm, e2e_s),
        stall_s=max((one.longest_stall_ns / NS for one in went_well if one.longest_stall_ns is not None), default=None),
        late_median_s=statistics.median(late_s) if late_s else None,
        late_most_s=max(late_s, default=None),
        wait_s=statistics.median(wait_s) if wait_s else None,
        attainment=attainment(arm, slo) if slo else None,
        goodput_ps=_goodput(arm, slo) if slo else None,
        in_flight_begin=statistics.fmean(one.in_flight(one.begin_s) for one in arm.rounds),
        in_flight_end=statistics.fmean(one.in_flight(one.end_s) for one in arm.rounds),
        waiting_end=statistics.fmean(one.waiting(one.end_s) for one in arm.rounds),
        drift=_drift(arm),
        shares=load_shares.shares(arm, alone),
    )


def ttft_s(figures: Figures) -> float | None:
    return _seconds(figures.ttft_due_ns)


def tpot_s(figures: Figures) -> float | None:
    return _seconds(figures.tpot_ns)


def tpot_bound_s(figures: Figures) -> float | None:
    """The upper bound of TPOT."""
    return _seconds(figures.tpot_bounds_ns[1] if figures.tpot_bounds_ns else None)


def e2e_s(figures: Figures) -> float | None:
    """None for a truncated answer: the whole one would have taken longer."""
    return None if figures.is_truncated else _seconds(figures.e2e_due_ns)


def latency(arm: Arm, of: Callable[[Figures], float | None]) -> Latency | None:
    """One latency of the arm's requests; None if no request has it."""
    by_round = [sorted(values(one.inside, of)) for one in arm.rounds]
    ordered = sorted(value for own in by_round for value in own)
    if not ordered:
        return None
    return Latency(
        n=len(ordered),
        median_s=statistics.median(ordered),
        p95=tail(ordered, 0.95),
        p99=tail(ordered, 0.99),
        most_s=ordered[-1],
        by_round_s=tuple(statistics.median(own) for own in by_round if own),
    )


def values(requests: Sequence[Sample], of: Callable[[Figures], float | None]) -> list[float]:
    """One figure of the successful requests that have it."""
    return [value for one in requests if one.is_ok and (value := of(one.figures)) is not None]


def tail(ordered: Sequence[float], share: float) -> Tail | None:
    """The percentile of ordered values by the nearest rank; None if no value exceeds it."""
    rank = math.ceil(round(share * len(ordered), 9))
    return Tail(ordered[rank - 1], len(ordered) - rank) if 0 < rank < len(ordered) else None


def rate(rounds: Sequence[Round], of: Callable[[Round], float | None]) -> Rate | None:
    """A rate over the windows of rounds; None if a round has none."""
    known = [one for one in rounds if one.length_s]
    by_round = [of(one) for one in known]
    rates = [value for value in by_round if value is not None]
    if not rates or len(rates) < len(by_round):
        return None
    whole = sum(value * one.length_s for value, one in zip(rates, known, strict=True))
    n_per_round = statistics.fmean(len(one.inside) for one in known)
    return Rate(whole / sum(one.length_s for one in known), tuple(rates), n_per_round)


def _goodput(arm: Arm, slo: Slo) -> Rate | None:
    """Requests per second that were due in the windows and met every limit."""

    def met_ps(one: Round) -> float | None:
        return sum(due.figures.meets(slo) for due in one.inside) / (one.busy_s if one.is_by_users else one.length_s)

    return rate(arm.rounds, met_ps)


def _drift(arm: Arm) -> float | None:
    halves: tuple[list[float], list[float]] = ([], [])
    for one in arm.rounds:
        middle_s = (one.begin_s + one.end_s) / 2
        halves[0].extend(values([due for due in one.inside if due.at_s < middle_s], ttft_s))
        halves[1].extend(values([due for due in one.inside if due.at_s >= middle_s], ttft_s))
    if min(map(len, halves)) < FEWEST or not statistics.median(halves[0]):
        return None
    return statistics.median(halves[1]) / statistics.median(halves[0])


def _wait_s(figures: Figures) -> float | None:
    if figures.ttft_ns is None or figures.timings is None or figures.timings.prompt_ms is None:
        return None
    return figures.ttft_ns / NS - figures.timings.prompt_ms / 1e3


def _seconds(ns: float | None) -> float | None:
    return None if ns is None else ns / NS


@dataclass(frozen=True)
class LoadSession:
    """The requests of one session of loads, and their endpoint."""

    name: str
    endpoint: Endpoint
    model: str
    machine: Machine  # of the client
    samples: tuple[Sample, ...]


def sessions(records: Sequence[Record | RequestRecord]) -> list[LoadSession]:
    """The sessions of loads among records, in order of appearance."""
    return [
        LoadSession(
            name, own[0].endpoint, own[0].model, own[0].machine, tuple(loads.sample(one.request) for one in own)
        )
        for name, own in _by_session(records).items()
    ]


def rows(records: Sequence[Record | RequestRecord]) -> pd.DataFrame:
    """The compared rows: of runs and of requests that ran alone, and one row per round of a load."""
    import pandas as pd

    plain = [one for one in records if isinstance(one, Record) or one.request.asked.load is None]
    counted = request_table.measured(table.runs(plain)) if plain else pd.DataFrame()
    of_rounds = [row for own in _by_session(records).values() for row in _round_rows(own)]
    if not of_rounds:
        return counted
    rounds = pd.DataFrame(of_rounds)
    return rounds if counted.empty else pd.concat([counted, rounds], ignore_index=True)


def _by_session(records: Sequence[Record | RequestRecord]) -> dict[str, list[RequestRecord]]:
    return grouped(request_table.loads_of(records), lambda record: record.session)


def _round_rows(records: Sequence[RequestRecord]) -> Iterator[dict[str, Any]]:
    """A row per round. `n_prompt` and `n_gen` are 0 if requests of an arm differ in them; see the lever."""
    (first,) = table.runs(records[:1]).to_dict("records")
    for arm in loads.arms([loads.sample(record.request) for record in records]):
        asked = [one.figures for of_round in arm.rounds for one in of_round.all]
        prompts, answers = {request_table.n_prompt(one) or 0 for one in asked}, {one.asked.n_gen for one in asked}
        is_mixed = len(prompts) > 1 or len(answers) > 1
        nothing = dict.fromkeys(("decode_tps", "warm", "short", "error", "failure", *request_table.FIGURES))
        same = {
            "n_prompt": 0 if is_mixed else prompts.pop(),
            "n_gen": 0 if is_mixed else answers.pop(),
            "lever": f"{arm.load.label}, {arm.load.lengths}" if is_mixed else arm.load.label,
            "status": OK,
            "warmup": False,
        }
        for of_round in (one for one in arm.rounds if not one.is_cut_off):
            row: dict[str, Any] = {**first, **nothing, **same, "repeat": of_round.load.round}
            for name, of, factor in (("ttft_s", ttft_s, 1), ("tpot_ms", tpot_s, 1e3), ("e2e_s", e2e_s, 1)):
                known = values(of_round.inside, of)
                row[name] = factor * statistics.median(known) if known else float("nan")
            yield row


def arms(records: Sequence[Record | RequestRecord]) -> pd.DataFrame:
    """One row per arm of each session of loads: rates, latencies, attainment (NaN or None if unknown).

        lab.arms(lab.load(url, concurrency="1,4"))[["load", "tokens_tps", "ttft_median_s", "ttft_p95_s"]]

    features/serve/loads.py defines the figures.
    """
    import pandas as pd

    return pd.DataFrame(
        [
            {"session": one.name, "url": one.endpoint.url, "model": one.model} | as_row(shown)
            for one in sessions(records)
            for shown in all_figures(one.samples)
        ]
    )


def as_row(shown: ArmFigures) -> dict[str, Any]:
    """The figures of an arm by name and unit. `_beyond`: the number of requests that exceed a percentile."""
    arm = shown.arm
    row: dict[str, Any] = {"load": arm.label, "n_rounds": len(arm.rounds), "n_cut_off": arm.n_cut_off}
    row |= {"window_s": [one.length_s for one in arm.rounds], "is_overloaded": arm.is_overloaded}
    row |= {f"load_{name}": value for name, value in dataclasses.asdict(arm.load).items() if name != "round"}
    for field in dataclasses.fields(shown):
        value, name = getattr(shown, field.name), field.name
        if name in ("ttft", "tpot", "e2e"):
            row |= _of_latency(name, value)
        elif name == "attainment":
            ends = (("", "share"), ("_low", "low"), ("_high", "high"))
            row |= {f"attainment{end}": getattr(value, of, None) for end, of in ends}
        elif name == "shares":
            row |= {f"share_{part.name}": getattr(value, part.name, None) for part in dataclasses.fields(Shares)}
        elif name.endswith(("tokens_tps", "_ps")):
            row |= {name: value and value.value, f"{name}_by_round": list(value.by_round) if value else []}
        elif name != "arm":
            row[name] = value
    return row


def _of_latency(name: str, latency: Latency | None) -> dict[str, Any]:
    row: dict[str, Any] = {f"{name}_n": latency.n if latency else 0}
    row[f"{name}_median_s"] = latency.median_s if latency else None
    for percentile in ("p95", "p99"):
        tail = getattr(latency, percentile, None)
        row |= {f"{name}_{percentile}_s": tail and tail.value_s, f"{name}_{percentile}_beyond": tail and tail.n_beyond}
    row[f"{name}_most_s"] = latency.most_s if latency else None
    return row | {f"{name}_by_round_s": list(latency.by_round_s) if latency else []}
