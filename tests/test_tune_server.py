"""`lab tune --serve`: what planted loads say about a server's options, and servers that are started and end."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lab.analysis import tuning, tuning_loads
from lab.analysis.tuning import CONFIRM, DEFAULT, GOODPUT, REQUEST, SEARCH, THROUGHPUT, TPOT, TTFT
from lab.analysis.tuning_loads import choice_of, options_of
from lab.core import results
from lab.core.record import FAILED, Tuning
from lab.core.request import COMPLETIONS, NOT_SENT, Endpoint, Events, Request, RequestRecord
from tests.conftest import MACHINE, make_record
from tests.test_load_shown import LOAD, failed, planted

SLOTS = "--parallel 4"


def as_record(request: Request) -> RequestRecord:
    endpoint = Endpoint(url="http://127.0.0.1:1/v1", api=COMPLETIONS)
    return RequestRecord(session="a-session", machine=MACHINE, endpoint=endpoint, model="a-model", request=request)


def window(variant: str, block: int, gap_s: float, goal: str = REQUEST, stage: str = SEARCH) -> list[RequestRecord]:
    """A window of one user whose answers have five tokens, the first after 0.1 s."""
    load = dataclasses.replace(LOAD, round=block, variant=variant, tuning=Tuning(goal=goal, stage=stage, n_gen=5))
    each_s = 0.1 + 4 * gap_s
    return [as_record(planted(i * each_s, load, gap_s=gap_s)) for i in range(round(5 / each_s) + 1)]


def test_options_and_choices_are_each_other() -> None:
    choice = (("cache_type_k", "q8_0"), ("cont_batching", False), ("kv_unified", True), ("parallel", 1))
    options = "--cache-type-k q8_0 --no-cont-batching --kv-unified --parallel 1"
    assert options_of(choice) == options
    assert choice_of(options) == choice
    assert type(dict(choice_of(options))["parallel"]) is int
    assert (options_of(()), choice_of(DEFAULT)) == (DEFAULT, ())


@pytest.mark.parametrize(
    ("goal", "seconds"),
    [(TTFT, 0.1), (TPOT, 0.05), (REQUEST, 0.3), (THROUGHPUT, 0.06), (GOODPUT, 0.3)],
)
def test_the_figure_of_each_goal_is_in_seconds(goal: str, seconds: float) -> None:
    measured = tuning_loads.measured(window(SLOTS, 2, 0.05, goal))
    assert measured is not None
    assert measured.timing is not None
    assert (measured.timing.block, measured.choice) == (2, (("parallel", 4),))
    assert measured.timing.seconds == {goal: pytest.approx(seconds, rel=0.08)}


def test_no_answer_within_the_limits_is_a_bad_choice_and_no_error() -> None:
    measured = tuning_loads.measured(window(SLOTS, 1, 0.2, GOODPUT))  # the limit of TPOT is 0.1 s
    assert measured is not None
    assert measured.timing is not None
    assert measured.timing.seconds == {GOODPUT: LOAD.duration_s / tuning_loads.NONE_GOOD}


def test_a_window_with_failures_has_no_figure_except_a_goodput() -> None:
    def with_failure(goal: str) -> list[RequestRecord]:
        own = window(SLOTS, 1, 0.05, goal)
        load = own[0].request.asked.load
        assert load
        return [*own, as_record(failed(2.0, load, error="no space in the context"))]

    measured = tuning_loads.measured(with_failure(REQUEST))
    assert measured is not None
    assert measured.timing is None
    assert measured.error is not None
    assert measured.error.startswith("1 of ")
    assert measured.error.endswith(" requests failed: no space in the context")
    of_goodput = tuning_loads.measured(with_failure(GOODPUT))
    assert of_goodput is not None
    assert of_goodput.timing is not None


def not_started(variant: str, block: int) -> RequestRecord:
    (first, *_) = window(variant, block, 0.05)
    request = dataclasses.replace(
        first.request, status=FAILED, failure=NOT_SENT, error="it ended", sent_ns=None, events=Events(), usage=None
    )
    return as_record(request)


def test_a_session_of_requests_becomes_the_same_result_as_one_of_runs(tmp_path: Path) -> None:
    def session(n_blocks: int) -> list[RequestRecord]:
        lines = [*window(DEFAULT, 1, 0.05), *window(SLOTS, 1, 0.025), not_started("--ubatch-size 9", 1)]
        for block in range(2, n_blocks + 2):
            lines += [*window(DEFAULT, block, 0.05, stage=CONFIRM), *window(SLOTS, block, 0.025, stage=CONFIRM)]
        return lines

    path = tmp_path / "a-session.jsonl"
    results.append(path, *session(4))
    (found,) = tuning_loads.of_sessions(results.read([path]).measured)
    assert (found.goal, found.n_prompt, found.n_gen, found.n_users) == (REQUEST, 10, 5, 1)
    assert (found.choice, found.n_confirmed) == ((("parallel", 4),), 4)
    assert found.gain is not None
    assert found.gain.estimate == pytest.approx(1.5)
    assert found.is_recommended
    assert found.seconds[REQUEST] == pytest.approx((0.3, 0.2))
    assert [(one.variant, one.n_runs, one.error) for one in found.tried] == [
        (SLOTS, 1, None),
        (DEFAULT, 1, None),
        ("--ubatch-size 9", 0, "it ended"),
    ]
    assert found.tried[2].seconds is None
    (few,) = tuning_loads.of_sessions(session(3))
    assert (few.gain, few.n_confirmed) == (None, 3)


def test_without_the_default_there_is_no_result_and_other_records_are_told_apart() -> None:
    assert tuning_loads.of_sessions(window(SLOTS, 1, 0.05)) == []
    others: list[Any] = [make_record(), as_record(planted(0))]
    assert tuning.without([*others, *window(SLOTS, 1, 0.05)]) == others
    assert tuning_loads.of_sessions(others) == []
