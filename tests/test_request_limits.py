"""When an answer came at once or together, and which counts of a server can be, at every border."""

from typing import Any

import pytest

from lab.core import request_times as times
from lab.core.request import (
    HIDDEN,
    REASONING,
    TEXT,
    Asked,
    Events,
    Request,
    ServerTimings,
    Usage,
)
from tests.support.requests import make_request


def answer(
    *stamps: int, n_tokens: tuple[int, ...] | None = None, kind: str = TEXT, **changes: Any
) -> Request:
    n = len(stamps)
    events = Events(stamps, (9,) * n, (kind,) * n, n_tokens)
    return make_request(events=events, **changes)


@pytest.mark.parametrize(
    ("n", "last_ns", "at_once"),
    [(10, 899_999, True), (10, 900_000, False), (9, 8, False), (11, 999_999, True)],
)
def test_ten_events_less_than_a_tenth_of_a_millisecond_apart_came_at_once(
    n: int, last_ns: int, at_once: bool
) -> None:
    request = answer(*range(n - 1), last_ns)
    assert times.came_at_once(request) == at_once
    figures = times.figures(request)
    assert figures.came_at_once == at_once
    assert figures.e2e_ns == last_ns
    assert (figures.ttft_ns is None) == at_once
    if at_once:
        assert times.chunk_gaps_ns(request) == []
        assert times.itl_ns(answer(*range(n - 1), last_ns, n_tokens=(1,) * n)) is None


def test_events_within_a_twentieth_of_the_mean_gap_came_together() -> None:
    """Means of 200 ns."""
    assert times.arrivals(answer(0, 10, 400)) == [[0, 1], [2]]
    assert times.arrivals(answer(0, 11, 400)) == [[0], [1], [2]]
    assert times.arrivals(answer(7)) == [[0]]
    assert times.arrivals(answer()) == []
    assert times.arrivals(answer(5, 5)) == [[0, 1]]
    assert times.chunk_gaps_ns(answer(5, 5)) == []
    assert times.chunk_gaps_ns(answer(0, 10, 400)) == [10, 390]


def test_a_server_may_count_one_token_more_than_was_asked_for() -> None:
    def n(n_completion: int, n_reasoning: int | None = None) -> int | None:
        usage = Usage(completion_tokens=n_completion, reasoning_tokens=n_reasoning)
        return times.n_generated(make_request(usage=usage))

    assert n(7) == 7
    assert n(8) is None
    assert n(100, 93) == 100
    assert n(100, 92) is None
    assert times.n_generated(make_request(usage=None)) is None
    assert not times.has_too_many(make_request(usage=None))


def test_at_most_the_prompt_came_from_a_cache() -> None:
    def n(n_cached: int | None, n_prompt: int | None) -> int | None:
        usage = Usage(cached_tokens=n_cached, prompt_tokens=n_prompt)
        return times.n_cached(make_request(usage=usage))

    assert n(10, 10) == 10
    assert n(11, 10) is None
    assert n(11, None) == 11
    assert n(None, 10) is None


def test_one_cached_token_makes_a_request_warm() -> None:
    def is_warm(n_cached: int) -> bool | None:
        usage = Usage(cached_tokens=n_cached, prompt_tokens=10)
        return times.figures(make_request(usage=usage)).is_warm

    assert [is_warm(n) for n in (0, 1)] == [False, True]


def test_times_of_a_server_exceed_those_of_the_client_by_a_millisecond_at_most() -> None:
    timings = ServerTimings(prompt_ms=2.0, gen_ms=3.0)
    assert times.fits(timings, 4_000_000)
    assert not times.fits(timings, 3_999_999)
    assert times.fits(timings, None)
    assert times.fits(ServerTimings(prompt_ms=2.0), 1_000_000)
    assert times.fits(ServerTimings(gen_ms=2.0), 1_000_000)
    assert times.fits(ServerTimings(), 0)


def test_the_prompt_of_a_server_ends_before_the_first_token() -> None:
    timings = ServerTimings(prompt_ms=2.0, gen_ms=1.0)

    def known(first_ns: int, ended_ns: int) -> bool:
        request = answer(first_ns, 3_000_000, timings=timings, ended_ns=ended_ns)
        contradicts = "reports times of its own that are longer than the request"
        is_known = times.server_timings(request) is not None
        assert (contradicts not in times.contradictions(request)) == is_known
        return is_known

    assert known(1_000_000, 3_000_000)
    assert not known(999_999, 3_000_000)
    assert not known(1_000_000, 1_999_999)


def test_what_cannot_be_is_named() -> None:
    usage = Usage(prompt_tokens=1000, cached_tokens=1001, completion_tokens=2000)
    request = make_request(usage=usage, wrong_counts={"prompt_tokens": -3.0})
    assert times.contradictions(request) == [
        "counts -3 prompt tokens",
        "counts 2,000 tokens of an answer of at most 6",
        "counts 1,001 cached tokens of a prompt of 1,000",
    ]
    assert times.contradictions(make_request()) == []


def test_an_event_has_100_tokens_on_average_at_most() -> None:
    asked = Asked(n_prompt=10, n_gen=200)
    usage = Usage(completion_tokens=200)
    gaps = times.itl_ns(answer(0, 50, n_tokens=(1, 199), asked=asked, usage=usage))
    assert gaps is not None
    assert len(gaps) == 199
    assert times.itl_ns(answer(0, 50, n_tokens=(2, 199), asked=asked, usage=usage)) is None


def test_the_bounds_of_tpot_are_of_the_tokens_that_came_first() -> None:
    """Three events over 100 ns; the first of six tokens came with one to four of them."""
    usage = Usage(completion_tokens=6)
    assert times.tpot_bounds_ns(answer(0, 40, 100, usage=usage)) == (20, 50)
    exact = answer(0, 40, 100, usage=Usage(completion_tokens=3))
    assert times.tpot_bounds_ns(exact) == (50, 50)
    assert times.figures(exact).tpot_ns == 50
    few = answer(0, 40, 100, usage=Usage(completion_tokens=2))
    assert times.tpot_bounds_ns(few) is None
    together = answer(0, 1, 100, usage=usage)
    assert times.tpot_bounds_ns(together) == (25, 100)
    assert times.tpot_bounds_ns(answer(0, usage=usage)) is None
    counted = answer(0, 40, 100, n_tokens=(2, 1, 4), usage=Usage(completion_tokens=7))
    assert times.tpot_bounds_ns(counted) == (20, 20)
    nothing_later = answer(0, 40, 100, n_tokens=(2, 0, 0), usage=usage)
    assert times.tpot_bounds_ns(nothing_later) is None


def test_tokens_of_an_arrival() -> None:
    counted = times.figures(answer(0, 40, 100, n_tokens=(2, 1, 3)))
    assert counted.tokens_per_arrival == 2
    uncounted = times.figures(answer(0, 100, usage=Usage(completion_tokens=6)))
    assert uncounted.tokens_per_arrival == 3
    assert times.figures(answer(0, n_tokens=(6,))).tokens_per_arrival is None
    assert times.figures(answer(0, 100, usage=None)).tokens_per_arrival is None


def test_an_answer_is_short_with_fewer_tokens_than_asked_for() -> None:
    def is_short(n: int | None) -> bool | None:
        return times.figures(make_request(usage=Usage(completion_tokens=n))).is_short

    assert [is_short(n) for n in (5, 6, 7, None)] == [True, False, False, None]


def test_reasoning_that_did_not_come_is_not_shown() -> None:
    usage = Usage(completion_tokens=6, reasoning_tokens=4)
    assert times.n_shown(answer(0, 100, usage=usage)) == 2
    assert times.n_shown(answer(0, 100, kind=REASONING, usage=usage)) == 6
    assert times.n_shown(answer(0, 100, kind=HIDDEN, usage=usage)) == 6
    more = Usage(completion_tokens=6, reasoning_tokens=9)
    assert times.n_shown(answer(0, 100, usage=more)) == 0
    assert times.figures(answer(3, 9, kind=HIDDEN)).first_output_ns is None
