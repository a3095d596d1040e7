"""What loads showed: arms of planted requests, their figures, text and pictures."""

import dataclasses
from typing import Any

import pytest

from lab.analysis import loads
from lab.analysis.loads import Arm, Sample
from lab.core.load import CLOSED, POISSON, Load, Slo
from lab.core.record import FAILED, OK
from lab.core.request import REFUSED, TEXT, TIMEOUT, Asked, Events, Request, Usage

SLO = Slo(ttft_s=0.5, tpot_s=0.1)
LOAD = Load(
    arrivals=CLOSED, concurrency=1, round=0, warmup_s=1, duration_s=4, lengths="10 prompt tokens", seed=1, slo=SLO
)
OPEN = dataclasses.replace(LOAD, arrivals=POISSON, concurrency=None, rate=2.0)


def planted(
    at_s: float, load: Load = LOAD, ttft_s: float = 0.1, gap_s: float = 0.05, n: int = 5, **changes: Any
) -> Request:
    """A request with n tokens, an event each: the first after `ttft_s`, the others in steps of `gap_s`."""
    arrive_ns = tuple(round(1e9 * (ttft_s + gap_s * i)) for i in range(n))
    request = Request(
        asked=Asked(n_prompt=10, n_gen=n, load=load),
        started_at=f"2026-01-01T00:{load.round:02}:{at_s:09.6f}Z",
        scheduled_ns=None if load.arrivals == CLOSED else round(1e9 * at_s),
        sent_ns=round(1e9 * at_s),
        ended_ns=arrive_ns[-1],
        status=OK,
        events=Events(arrive_ns, (9,) * n, (TEXT,) * n, (1,) * n),
        usage=Usage(prompt_tokens=10, completion_tokens=n, cached_tokens=0),
    )
    return dataclasses.replace(request, **changes)


def failed(at_s: float, load: Load = LOAD, failure: str = TIMEOUT, **changes: Any) -> Request:
    return planted(at_s, load, status=FAILED, failure=failure, events=Events(), usage=None, ended_ns=None, **changes)


def arm(*requests: Request) -> Arm:
    (only,) = loads.arms([loads.sample(request) for request in requests])
    return only


def n_in_window(request: Request) -> float | None:
    return loads.sample(request).n_in_window


def test_tokens_count_that_arrived_inside_the_window() -> None:
    assert n_in_window(planted(2)) == 5
    assert n_in_window(planted(0.8)) == 3  # 0.9, 0.95 are of the warm-up; 1.0 is in the window
    assert n_in_window(planted(4.85)) == 1  # 4.95; 5.0 is behind it
    assert n_in_window(planted(0)) == n_in_window(planted(5)) == 0
    assert n_in_window(failed(2)) == 0


def test_tokens_are_spread_over_events_only_where_each_is_not_counted() -> None:
    uncounted = dataclasses.replace(planted(0.8).events, n_tokens=None)
    assert loads.sample(planted(0.8, events=uncounted)) == loads.sample(planted(0.8))
    bundled = loads.sample(planted(0.8, events=uncounted, usage=Usage(completion_tokens=20)))
    assert (bundled.n_in_window, bundled.is_spread) == (12, True)
    unknown: Sample = loads.sample(planted(0.8, events=uncounted, usage=None))
    assert (unknown.n_in_window, unknown.is_spread) == (None, False)


def test_a_request_that_ran_alone_is_of_no_load() -> None:
    with pytest.raises(ValueError, match="no load"):
        loads.sample(planted(1, asked=Asked(n_prompt=1, n_gen=1)))


def test_a_request_belongs_to_the_window_in_which_it_was_due() -> None:
    requests = [planted(at_s) for at_s in (0.9, 1.0, 4.9, 5.0)]
    assert [due.at_s for due in arm(*requests).inside] == [1.0, 4.9]
    late = planted(1.5, OPEN, scheduled_ns=900_000_000)  # intended in the warm-up
    assert [due.at_s for due in arm(late, planted(5.1, OPEN)).inside] == []


def test_rates_are_of_all_that_arrived_inside_the_window() -> None:
    (only,) = arm(planted(0.8), planted(2), planted(4.85)).rounds
    assert only.tokens_tps == (3 + 5 + 1) / 4
    assert only.requests_ps == 2 / 4  # the last one ends at 5.15 s
    uncounted = dataclasses.replace(planted(2).events, n_tokens=None)
    assert arm(planted(2, events=uncounted, usage=None), planted(5)).rounds[0].tokens_tps is None


def test_arms_are_in_order_of_their_load() -> None:
    several = [
        dataclasses.replace(LOAD, concurrency=16),
        dataclasses.replace(LOAD, concurrency=2),
        dataclasses.replace(OPEN, rate=0.5),
        OPEN,
    ]
    shown = loads.arms([loads.sample(planted(4.9, load)) for load in reversed(several)])
    assert [one.label for one in shown] == ["2 users", "16 users", "0.5 requests/s", "2 requests/s"]


def test_a_round_that_was_given_up_counts_only_where_there_is_no_other() -> None:
    cut = [planted(at_s) for at_s in (0.0, 1.5, 2.0)]
    only = arm(*cut)
    assert only.n_cut_off == 1
    assert only.rounds[0].length_s == pytest.approx(2.3 - 1)
    again = dataclasses.replace(LOAD, round=1)
    both = arm(*cut, planted(1.5, again), planted(4.9, again))
    assert (both.n_cut_off, len(both.rounds), both.rounds[0].load.round) == (1, 1, 1)


def test_an_open_loop_was_given_up_where_chance_does_not_explain_the_pause() -> None:
    busy = dataclasses.replace(OPEN, rate=10.0)
    assert arm(planted(1, busy), planted(4.3, busy)).n_cut_off == 0
    assert arm(planted(1, busy), planted(3, busy)).n_cut_off == 1
    assert arm(planted(1, OPEN), planted(3, OPEN)).n_cut_off == 0
    later = dataclasses.replace(busy, round=1)  # the first round ended, or there would be no second
    assert arm(planted(1, busy), planted(3, busy), planted(4.9, later)).n_cut_off == 0


def test_a_request_without_a_connection_was_due_at_its_date() -> None:
    refused = failed(2, failure=REFUSED, sent_ns=None)
    (only,) = arm(planted(0.5), refused, planted(4.8)).rounds
    assert [due.at_s for due in only.inside] == [pytest.approx(2), 4.8]
    alone = arm(*(failed(at_s, failure=REFUSED, sent_ns=None) for at_s in (0, 2, 4.8)))
    assert [due.at_s for due in alone.inside] == [pytest.approx(2), pytest.approx(4.8)]


def test_requests_in_flight_and_waiting() -> None:
    (only,) = arm(planted(1), planted(1.2), failed(1.25), failed(4, failure=REFUSED), planted(4.9)).rounds
    assert (only.in_flight(1.22), only.waiting(1.22)) == (2, 1)
    assert (only.in_flight(3), only.waiting(3)) == (1, 1)  # nobody knows how long the timeout was
    assert only.in_flight(4) == 1
