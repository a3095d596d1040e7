"""Requests to servers in the tables, words, pictures and pages of the main job."""

import dataclasses
from typing import Any

import pytest

import lab
from lab.analysis import request_table, table
from lab.core.record import FAILED
from lab.core.request import (
    REASONING,
    STALLED,
    TEXT,
    USAGE,
    Asked,
    Events,
    RequestRecord,
    ServerSettings,
    ServerTimings,
    Usage,
)
from lab.core.server_load import CLOSED, Load
from lab.show import console, text_requests
from tests.conftest import make_record, make_run
from tests.test_request import make_request, make_request_record

MS = 1_000_000


def served(
    n_prompt: int = 100,
    repeat: int = 0,
    first_ms: float = 50,
    gap_ms: float = 10,
    n_gen: int = 5,
    n_tokens: tuple[int, ...] | None = (1, 1, 1, 1, 1),
    session: str = "s",
    cached: int | None = 0,
    kinds: tuple[str, ...] = (TEXT,) * 5,
    **changes: Any,
) -> RequestRecord:
    """A request whose five events come at first_ms and then after every gap_ms, and its counts at the end."""
    arrive = [round((first_ms + i * gap_ms) * MS) for i in range(5)]
    counted = None if n_tokens is None else (*n_tokens, 0)
    request = make_request(
        asked=Asked(n_prompt=n_prompt, n_prompt_counted=n_prompt, n_gen=n_gen, repeat=repeat),
        events=Events((*arrive, arrive[-1]), (9,) * 6, (*kinds, USAGE), counted),
        usage=Usage(prompt_tokens=n_prompt, completion_tokens=n_gen, cached_tokens=cached),
    )
    request = dataclasses.replace(request, **changes)
    return dataclasses.replace(make_request_record(request), session=session)


def session(first_ms: float = 50, gap_ms: float = 10, name: str = "s", n: int = 3) -> list[RequestRecord]:
    """Requests of 10 and 100 tokens; TTFT is 10 ms more for each 10 tokens."""
    return [
        served(n_prompt, repeat, first_ms + n_prompt + repeat, gap_ms, session=name)
        for repeat in range(n)
        for n_prompt in (10, 100)
    ]


def shown(records: list[RequestRecord], capsys: pytest.CaptureFixture[str]) -> str:
    text_requests.print_requests(records, console.console())
    return capsys.readouterr().out


def test_a_request_is_a_row_of_the_table_of_runs() -> None:
    rows = lab.runs([make_record(), served()])
    run, request = rows.iloc[0], rows.iloc[1]
    assert run.prefill_s > 0 and not isinstance(run.server, str)
    assert request.prefill_s != request.prefill_s  # not visible
    assert (request.ttft_s, request.tpot_ms, request.e2e_s) == pytest.approx((0.05, 10, 0.09))
    assert (request.model, request.server) == ("tiny", "llama-server at http://127.0.0.1:1/v1")
    assert (request.n_slots, request.slot_ctx, request.warm, request.short) == (4, 4096, False, False)
    assert len(lab.steps([make_record(), served()])) == len(lab.steps([make_record()]))


def test_runs_alone_have_the_columns_that_they_always_had() -> None:
    rows = lab.runs([make_record()])
    assert not {"server", "warm", "url"} & set(rows)
    assert not {"server", "warm", "n_bounds"} & set(lab.summary(rows))


def test_warm_and_short_ones_are_no_repeats_of_cold_ones() -> None:
    cold = [served(repeat=i, first_ms=50) for i in range(3)]
    warm = served(repeat=3, first_ms=5, cached=90)
    short = served(repeat=4, first_ms=500, n_gen=8, usage=Usage(completion_tokens=5, cached_tokens=0))
    rows = lab.summary(lab.runs([*cold, warm, short]))
    assert list(zip(rows.n_gen, rows.warm, rows.short, rows.repeats, rows.ttft_s, strict=True)) == [
        (5, False, False, 3, 0.05),
        (5, True, False, 1, 0.005),
        (8, False, True, 1, 0.5),
    ]
    assert [request_table.is_measured(one) for one in (cold[0], warm, short)] == [True, False, False]
    assert len(request_table.measured(lab.runs([*cold, warm, short]))) == 3


def test_requests_of_a_load_are_no_rows_of_the_summary() -> None:
    load = Load(arrivals=CLOSED, concurrency=8, round=0, warmup_s=1, duration_s=10, lengths="100", seed=1)
    busy = served(asked=Asked(n_prompt=100, n_gen=5, load=load))
    assert lab.runs([busy]).lever.tolist() == ["8 users"]
    assert lab.summary(lab.runs([busy, served()])).repeats.tolist() == [1]
    assert request_table.loads_of([busy, served(), make_record()]) == [busy]
    assert request_table.alone([busy, served(), make_record()]) == [served()]


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"url": "http://127.0.0.1:2/v1"}, "tiny, llama-server at http://127.0.0.1:2/v1"),
        ({"version": "b2"}, "tiny, llama-server b2 at http://127.0.0.1:1/v1"),
        ({"api": "completions"}, "tiny, api completions"),
        ({"settings": ServerSettings(n_slots=1, n_ctx=4096)}, "tiny, n_slots 1"),
        ({"settings": ServerSettings(n_slots=4, n_ctx=4096, quantization="Q8_0")}, "tiny, quantization Q8_0"),
    ],
)
def test_what_a_server_says_of_itself_is_part_of_the_setup(changes: dict[str, Any], label: str) -> None:
    one = served()
    other = dataclasses.replace(one, endpoint=dataclasses.replace(one.endpoint, **changes))
    assert [name for name, _ in table.setups(lab.runs([one, one, other]))][1] == label


def test_a_single_setup_is_named_by_model_server_and_client() -> None:
    ((label, _),) = table.setups(lab.runs([served()]))
    assert label == "tiny, llama-server at http://127.0.0.1:1/v1, client Test CPU, 4 cores"


def test_an_engine_and_a_server_are_named_apart() -> None:
    labels = [label for label, _ in table.setups(lab.runs([make_record(), served()]))]
    assert labels == ["tiny Q4_0, in process", "tiny, llama-server at http://127.0.0.1:1/v1"]


def test_the_table_has_medians_ranges_and_what_they_show(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(session(), capsys)
    assert "TTFT" in out and "prefill alone is not visible" in out and "prefill\n" not in out
    assert "0.0610" in out and "0.0600-0.0620" in out  # 50 + 10 + repeat ms
    assert "10.0" in out and "100" in out
    assert "TTFT of a prompt of 100 tokens was 2.48x that of 10, for 10x the tokens." in out
    assert "!" not in out  # everything is known


def test_six_requests_have_an_interval(capsys: pytest.CaptureFixture[str]) -> None:
    assert "95 % interval below it" in shown(session(n=6), capsys)


def test_tpot_is_between_bounds_where_k1_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown([served(n_tokens=None, n_gen=10)], capsys)
    assert "4.44 to 10.0" in out  # 40 ms of 9 tokens, or of 4
    assert "100 to 225" in out
    assert "How many tokens came with the first event is not known of 1 of 1 requests" in out
    assert "inter-chunk latency" in out and "5 events brought 10 tokens" in out


def test_exact_and_bounded_requests_of_a_row_are_shown_as_bounds() -> None:
    few = served(repeat=1, n_tokens=None, usage=Usage(completion_tokens=5, cached_tokens=0))
    bounded = served(repeat=2, n_tokens=None, usage=Usage(completion_tokens=6, cached_tokens=0))
    rows = lab.summary(lab.runs([few, bounded]))
    assert rows.n_bounds.tolist() == [1]
    headings, ((_, _, tpot, _, _, _),) = text_requests.request_cells(rows)
    assert headings[2].startswith("TPOT") and tpot == ("9.00 to 10.0", "")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (served(cached=90), "1 of 1 requests had 90 tokens of their prompts from the server's cache"),
        (served(cached=None), "does not say whether tokens of a prompt came from its cache"),
        (served(usage=Usage(completion_tokens=4, cached_tokens=0)), "answers were shorter than asked for (4 tokens"),
        (served(usage=Usage(prompt_tokens=103, completion_tokens=5, cached_tokens=0)), "103 instead of 100"),
        (served(usage=None), "How many tokens the answer had is not known of 1 of 1 requests"),
        (served(usage=Usage(completion_tokens=5, counted_by="twin")), "the same request, not streamed, did"),
        (served(usage=Usage(completion_tokens=5, counted_by="tokenize")), "tokenised afterwards"),
        (served(kinds=(REASONING, TEXT, TEXT, TEXT, TEXT)), "answers began with reasoning"),
    ],
)
def test_what_is_not_known_is_said(record: RequestRecord, words: str) -> None:
    assert any(words in sentence for sentence in text_requests.warnings([record]))


def test_figures_near_the_error_of_the_client_are_named() -> None:
    def of_error(ns: int) -> list[str]:
        return text_requests.warnings([dataclasses.replace(served(), client_error_ns=(ns // 2, ns))])

    assert of_error(MS // 100) == []
    assert "TPOT (from 10.0 ms on) is near the error of the client" in of_error(MS)[0]
    assert "TTFT (from 50.0 ms on) and TPOT" in of_error(4 * MS)[0]


def test_reasoning_has_a_time_to_first_output_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown([served(kinds=(REASONING, REASONING, TEXT, TEXT, TEXT))], capsys)
    assert "output s" in out and "0.0700" in out
    assert "output s" not in shown([served()], capsys)


def test_the_servers_own_times_are_named_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown([served(timings=ServerTimings(prompt_ms=42.0, gen_ms=39.0))], capsys)
    assert "What the server says of its own times" in out and "0.0420" in out and "8.00" in out
    assert "own times" not in shown([served()], capsys)


def test_failures_are_classes_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [served(repeat=i, status=FAILED, failure=STALLED, error="nothing for 60 s") for i in (1, 2)]
    out = shown([served(), *failed], capsys)
    assert "failed 2 of 3 requests, stalled; such as 100 prompt tokens, repeat 2: nothing for 60 s" in out
    assert "No request went well." in shown(failed, capsys)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (served(), "100 prompt tokens, repeat 1: TTFT 0.0500 s, TPOT 10.0 ms"),
        (served(n_tokens=None, n_gen=10), "100 prompt tokens, repeat 1: TTFT 0.0500 s, TPOT 4.44 to 10.0 ms"),
        (served(cached=3), "100 prompt tokens, repeat 1: TTFT 0.0500 s, TPOT 10.0 ms (warm)"),
        (served(usage=None), "100 prompt tokens, repeat 1: TTFT 0.0500 s"),
        (served(events=Events()), "100 prompt tokens, repeat 1: no token came"),
        (served(status=FAILED, failure=STALLED), "100 prompt tokens, repeat 1: stalled"),
    ],
)
def test_a_line_on_a_finished_request(record: RequestRecord, line: str) -> None:
    assert text_requests.finished(record) == line


def test_rows_as_json_have_the_figures() -> None:
    (row,) = text_requests.as_rows([served()])
    assert (row["server"], row["ttft_s"], row["repeats"]) == ("llama-server at http://127.0.0.1:1/v1", 0.05, 1)


def test_a_run_of_the_engine_still_has_a_label_of_model_and_machine() -> None:
    ((label, _),) = table.setups(lab.runs([make_record(make_run())]))
    assert label == "tiny Q4_0, Test CPU, 4 cores"
