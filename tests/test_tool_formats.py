"""Requests by the definitions of other tools, from planted events."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lab.analysis import tool_formats
from lab.cli.comparing import TOOLS
from lab.core import results
from lab.core.record import FAILED
from lab.core.request import (
    CHAT,
    CLOSED,
    COMPLETIONS,
    DONE,
    LOST,
    OTHER,
    POISSON,
    REASONING,
    ROLE,
    TEXT,
    USAGE,
    Asked,
    Events,
    Load,
    Request,
    RequestRecord,
    Usage,
)
from lab.errors import LabError
from tests.conftest import make_record, run_lab
from tests.test_request import make_request, make_request_record

MS = 1_000_000
KINDS = (ROLE, TEXT, TEXT, TEXT, OTHER, USAGE, DONE)
ARRIVE_MS = (5, 100, 140, 180, 190, 190, 191)
CHUNKED = Load(arrivals=CLOSED, concurrency=2, round=0, warmup_s=0.0, duration_s=1.0, lengths="10 + 4", seed=1)


def planted(kinds: tuple[str, ...] = KINDS, ms: tuple[int, ...] = ARRIVE_MS, n: int | None = 9) -> Request:
    """9 tokens in three events at 100, 140 and 180 ms; the end at 191 ms."""
    usage = None if n is None else Usage(prompt_tokens=10, completion_tokens=n, cached_tokens=0)
    events = Events(tuple(at * MS for at in ms), (9,) * len(ms), kinds)
    return make_request(events=events, usage=usage, ended_ns=ms[-1] * MS)


def test_the_command_knows_the_formats() -> None:
    assert TOOLS == tool_formats.FORMATS


def record(request: Request, api: str = CHAT, **changes: Any) -> RequestRecord:
    made = make_request_record(request)
    return dataclasses.replace(made, endpoint=dataclasses.replace(made.endpoint, api=api), **changes)


def in_load(request: Request, sent_ms: int, load: Load = CHUNKED) -> RequestRecord:
    return record(dataclasses.replace(request, asked=Asked(n_prompt=10, n_gen=4, load=load), sent_ns=sent_ms * MS))


def as_lines(form: str, *records: RequestRecord) -> list[dict[str, Any]]:
    return [json.loads(line) for line in tool_formats.written(records, form).splitlines()]


def as_report(*records: RequestRecord) -> list[dict[str, Any]]:
    benchmarks: list[dict[str, Any]] = json.loads(tool_formats.written(records, "guidellm"))["benchmarks"]
    return benchmarks


def test_vllm_begins_at_the_first_chunk_with_content() -> None:
    (run,) = as_lines("vllm", record(planted()))
    assert run["backend"] == "openai-chat"
    assert run["mean_ttft_ms"] == 100
    assert run["ttfts"] == [0.1]
    assert run["itls"] == [[0.04, 0.04]]
    assert run["median_itl_ms"] == 40
    assert run["mean_tpot_ms"] == (180 - 100) / 8  # not / (9 - 3): it takes the first chunk for one token
    assert run["median_e2el_ms"] == 180
    assert run["duration"] == 0.191
    assert run["output_throughput"] == pytest.approx(9 / 0.191)
    assert run["total_token_throughput"] == pytest.approx(19 / 0.191)


def test_vllm_takes_an_empty_chunk_without_a_role_for_a_token() -> None:
    """Unless it is the last, which has the reason of the end and no content at all."""
    (run,) = as_lines("vllm", record(planted((OTHER, *KINDS[1:]))))
    assert run["median_ttft_ms"] == 5
    assert run["itls"] == [[0.095, 0.04, 0.04]]


def test_in_completions_vllm_takes_every_chunk_with_a_choice_for_a_token() -> None:
    request = planted((OTHER, TEXT, TEXT, TEXT, OTHER, USAGE, DONE))
    (run,) = as_lines("vllm", record(request, COMPLETIONS))
    assert run["backend"] == "openai"
    assert run["median_ttft_ms"] == 5
    assert run["median_e2el_ms"] == 190
    assert run["mean_tpot_ms"] == (190 - 5) / 8


def test_percentiles_of_vllm_lie_between_ranks() -> None:
    requests = [planted(ms=(5, first, 140, 180, 190, 190, 191)) for first in (100, 110, 130)]
    (run,) = as_lines("vllm", *map(record, requests))
    assert run["p99_ttft_ms"] == pytest.approx(110 + 0.98 * 20)
    assert run["std_ttft_ms"] == pytest.approx(((40 / 3) ** 2 + (10 / 3) ** 2 + (50 / 3) ** 2) ** 0.5 / 3**0.5)


def test_aiperf_divides_by_all_tokens_but_one() -> None:
    (run,) = as_lines("aiperf", record(planted()))
    assert run["time_to_first_token"]["avg"] == 100
    assert run["time_to_second_token"]["p50"] == 40  # a gap between chunks, whatever is in them
    assert run["request_latency"]["p99"] == 180
    assert run["inter_token_latency"]["avg"] == (180 - 100) / 8
    assert run["inter_chunk_latency"]["count"] == 2
    assert run["output_token_throughput_per_user"]["avg"] == 100
    assert run["e2e_output_token_throughput"]["avg"] == pytest.approx(9 / 0.18)
    assert run["prefill_throughput_per_user"]["avg"] == pytest.approx(10 / 0.1)
    assert run["benchmark_duration"]["avg"] == 0.18  # to the last content
    assert run["usage_prompt_cache_read_tokens"]["avg"] == 0
    assert "error_request_count" in run


def test_reasoning_is_a_token_but_no_output() -> None:
    request = planted((ROLE, REASONING, TEXT, TEXT, OTHER, USAGE, DONE))
    (run,) = as_lines("aiperf", record(request))
    (benchmark,) = as_report(record(request))
    metrics = benchmark["metrics"]
    assert run["time_to_first_token"]["avg"] == metrics["time_to_first_token_ms"]["successful"]["mean"] == 100
    assert run["time_to_first_output_token"]["avg"] == 140
    assert metrics["time_to_first_output_token_ms"]["successful"]["mean"] == 140


def test_the_tpot_of_guidellm_has_ttft_in_it() -> None:
    (benchmark,) = as_report(record(planted()))
    metrics = benchmark["metrics"]
    assert metrics["time_per_output_token_ms"]["successful"]["mean"] == 180 / 9
    assert metrics["inter_token_latency_ms"]["successful"]["mean"] == (180 - 100) / 8
    assert metrics["inter_token_latency_ms"]["successful"]["count"] == 8  # weighted by tokens
    assert metrics["request_latency"]["successful"]["median"] == 0.191  # to the end of the stream
    assert metrics["output_tokens_per_second"]["successful"]["mean"] == pytest.approx(9 / 0.191)
    assert benchmark["config"]["strategy"] == {"type_": "concurrent", "streams": 1}


def test_guidellm_counts_events_where_nobody_counted_tokens() -> None:
    """The others know no tokens then, and give no figure of them."""
    (benchmark,) = as_report(record(planted(n=None)))
    (aiperf,) = as_lines("aiperf", record(planted(n=None)))
    (vllm,) = as_lines("vllm", record(planted(n=None)))
    assert benchmark["metrics"]["output_token_count"]["successful"]["mean"] == 3
    assert benchmark["metrics"]["tokens_per_second"]["successful"]["mean"] is None
    assert "inter_token_latency" not in aiperf
    assert "total_osl" not in aiperf
    assert vllm["mean_tpot_ms"] is vllm["output_throughput"] is None
    assert vllm["mean_ttft_ms"] == 100


def test_percentiles_of_guidellm_are_values_by_their_weights() -> None:
    summary = tool_formats.distribution(pd.Series([3.0, 1.0, 2.0]), pd.Series([1.0, 2.0, 1.0]))
    assert summary is not None
    assert (summary["median"], summary["percentiles"]["p75"], summary["percentiles"]["p90"]) == (1.0, 2.0, 3.0)
    assert summary["mean"] == 7 / 4
    assert summary["count"] == 4
    assert list(summary["percentiles"])[:3] == ["p001", "p01", "p05"]
    assert tool_formats.distribution(pd.Series(dtype=float), 1.0) is None


def test_the_rounds_of_a_load_are_one_run_whose_times_add_up() -> None:
    other = dataclasses.replace(CHUNKED, round=1)
    lines = [in_load(planted(), 0), in_load(planted(), 100), in_load(planted(), 700, other)]
    (run,) = as_lines("vllm", *lines)
    assert run["duration"] == pytest.approx(0.291 + 0.191)  # the pause between the rounds is no load
    assert run["max_concurrency"] == 2
    assert run["request_throughput"] == pytest.approx(3 / 0.482)


def test_of_a_load_the_steady_window_counts() -> None:
    load = dataclasses.replace(CHUNKED, warmup_s=0.5)
    late = dataclasses.replace(in_load(planted(), 1600, load).request, scheduled_ns=1400 * MS)
    lines = [in_load(planted(), sent_ms, load) for sent_ms in (499, 500, 1499, 1500)]
    (run,) = as_lines("vllm", *lines, record(late))
    assert run["completed"] == 3  # by when it was due, not sent
    assert run["duration"] == pytest.approx(1.6 + 0.191 - 0.5)


def test_each_load_is_a_run() -> None:
    opened = dataclasses.replace(CHUNKED, arrivals=POISSON, concurrency=None, rate=0.5)
    runs = as_lines("vllm", in_load(planted(), 0), in_load(planted(), 0, opened))
    assert [(run["max_concurrency"], run["request_rate"]) for run in runs] == [(2, "inf"), (None, 0.5)]
    assert as_report(in_load(planted(), 0, opened))[0]["config"]["strategy"] == {"type_": "poisson", "rate": 0.5}


def test_warm_ups_are_left_out_and_failures_counted() -> None:
    warm_up = dataclasses.replace(planted(), asked=Asked(n_prompt=10, n_gen=6, warmup=True))
    lost = make_request(status=FAILED, failure=LOST, error="gone", events=Events(), usage=None)
    lines = [record(warm_up), record(planted()), record(lost)]
    (vllm,), (aiperf,), (guidellm,) = as_lines("vllm", *lines), as_lines("aiperf", *lines), as_report(*lines)
    assert (vllm["completed"], vllm["failed"], vllm["errors"]) == (1, 1, ["", "gone"])
    assert (aiperf["request_count"]["avg"], aiperf["error_request_count"]["avg"]) == (1, 1)
    assert guidellm["metrics"]["request_totals"] == {"successful": 1, "errored": 1, "incomplete": 0, "total": 2}


@pytest.mark.parametrize("form", tool_formats.FORMATS)
def test_only_failures_have_no_figures(form: str) -> None:
    lost = record(make_request(status=FAILED, failure=LOST, events=Events(), usage=None))
    text = tool_formats.written([lost], form)
    assert "NaN" not in text
    assert " 0.0" not in text


@pytest.mark.parametrize("form", tool_formats.FORMATS)
def test_requests_are_exported_from_a_file(form: str, tmp_path: Path) -> None:
    results.append(tmp_path / "results.jsonl", record(planted()))
    status, out, _ = run_lab("export", tmp_path, "--format", form)
    assert status == 0
    assert out == tool_formats.written([record(planted())], form)


def test_a_file_of_engine_runs_has_no_requests(tmp_path: Path) -> None:
    results.append(tmp_path / "results.jsonl", make_record())
    status, _, error = run_lab("export", tmp_path, "--format", "vllm")
    assert status != 0
    assert "no requests to a server" in error


@pytest.mark.parametrize("form", tool_formats.FORMATS)
def test_without_requests_it_is_said(form: str) -> None:
    with pytest.raises(LabError, match="no requests to a server"):
        tool_formats.written([], form)
