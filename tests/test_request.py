"""Requests as data, and what follows from planted events."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from lab.core import request_times as times, results
from lab.core.lines import parse_line, to_json
from lab.core.request import (
    DONE,
    OTHER,
    REASONING,
    ROLE,
    TOOL,
    USAGE,
    Events,
    Request,
    RequestRecord,
    ServerTimings,
    Usage,
)
from lab.core.request_times import figures
from tests.support.records import make_record
from tests.support.requests import (
    make_request,
    make_request_record,
)


def without_tokens(**changes: Any) -> Request:
    """The same, from a server that does not say how many tokens are in an event."""
    events = dataclasses.replace(make_request().events, n_tokens=None)
    return make_request(events=events, **changes)


def test_times_of_planted_events() -> None:
    request = make_request()
    assert figures(request).ttft_ns == 100  # not 5: the role is no token
    assert figures(request).first_output_ns == 100
    assert figures(request).e2e_ns == 190  # not 192: what follows is no content
    assert figures(request).tpot_ns == (190 - 100) / (6 - 2)
    assert figures(request).tpot_bounds_ns == (22.5, 22.5)
    assert times.chunk_gaps_ns(request) == [30, 60]
    assert figures(request).longest_stall_ns == 60
    assert times.itl_ns(request) == [0, 30, 60, 0, 0]
    assert sum(times.itl_ns(request) or ()) == 190 - 100


def test_reasoning_counts_as_tokens_but_is_not_output() -> None:
    kinds = (ROLE, REASONING, REASONING, TOOL, OTHER, USAGE, DONE)
    request = make_request(events=dataclasses.replace(make_request().events, kind=kinds))
    assert figures(request).ttft_ns == 100
    assert figures(request).first_output_ns == 190
    assert figures(request).tpot_ns == 22.5


def test_without_tokens_per_event_there_is_no_itl_and_tpot_is_between_bounds() -> None:
    request = without_tokens()
    assert times.itl_ns(request) is None
    assert figures(request).tpot_ns is None
    assert figures(request).tpot_bounds_ns == (90 / 5, 90 / 2)  # k1 is 1 to 4
    assert times.chunk_gaps_ns(request) == [30, 60]


@pytest.mark.parametrize("n", [None, 2])
def test_tpot_needs_a_count_that_can_be_true(n: int | None) -> None:
    request = without_tokens(usage=Usage(completion_tokens=n))
    assert figures(request).tpot_ns is None
    assert figures(request).tpot_bounds_ns is None


def test_nothing_generated_has_no_times() -> None:
    events = Events((5, 9), (1, 1), (ROLE, DONE))
    request = make_request(events=events, usage=Usage(completion_tokens=0))
    assert [
        figures(request).ttft_ns,
        figures(request).first_output_ns,
        figures(request).e2e_ns,
        figures(request).tpot_ns,
        figures(request).tpot_bounds_ns,
        figures(request).longest_stall_ns,
    ] == [None] * 6
    assert times.chunk_gaps_ns(request) == []


@pytest.mark.parametrize(
    ("cached", "warm"),
    [
        (0, False),
        (3, True),
        (None, None),
    ],
)
def test_a_request_is_warm_when_tokens_came_from_a_cache(
    cached: int | None, warm: bool | None
) -> None:
    assert figures(make_request(usage=Usage(cached_tokens=cached))).is_warm is warm
    assert figures(make_request(usage=None)).is_warm is None


def test_a_request_is_a_line_of_its_own_kind(tmp_path: Path) -> None:
    run = make_record()
    request = make_request_record(make_request(timings=ServerTimings(prompt_ms=1.5)))
    for line in (run, request, request):
        results.save(tmp_path / "a.jsonl", line)
    contents = results.read([tmp_path])
    assert contents.records == (run,)
    assert contents.requests == (request,)
    assert contents.skipped == ("a.jsonl line 3 skipped: it is a duplicate",)


def test_a_broken_request_is_named() -> None:
    line = json.loads(to_json(make_request_record()))
    del line["request"]["events"]
    with pytest.raises(ValueError, match=r"request\.request\.events is missing"):
        parse_line(json.dumps(line).encode() + b"\n")
    line["request"]["events"] = {
        "arrive_ns": [1],
        "n_bytes": [],
        "kind": [],
    }
    with pytest.raises(ValueError, match="differ in length"):
        parse_line(json.dumps(line).encode() + b"\n")


def test_strings_of_a_server_cannot_command_a_terminal() -> None:
    evil = make_request_record(make_request(error="\x1b[2Jx", finish_reason="stop\x07"))
    parsed = parse_line(to_json(evil).encode() + b"\n")
    assert isinstance(parsed, RequestRecord)
    assert parsed.request.error == "?[2Jx"
    assert parsed.request.finish_reason == "stop?"
