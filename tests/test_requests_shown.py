"""Requests to servers in the tables, words, pictures and pages of the main job."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.app import kinds
from lab.core import results
from lab.core.record import FAILED, Record
from lab.core.request import (
    REASONING,
    STALLED,
    TEXT,
    RequestRecord,
    Usage,
)
from lab.errors import LabError
from lab.show import comparison, console, table, text_comparison, text_requests
from lab.show.comparison import SLOWER
from tests.support.command import run_lab
from tests.support.records import make_record, make_run
from tests.support.requests import (
    noise_of,
    request_session,
    served,
)


def shown(records: list[RequestRecord], capsys: pytest.CaptureFixture[str]) -> str:
    kinds.print_results(records, console.console())
    return capsys.readouterr().out


def test_a_request_is_a_row_of_the_table_of_runs() -> None:
    run, request = (row for _, row in lab.runs([make_record(), served()]).iterrows())
    assert run.prefill_s > 0
    assert not isinstance(run.server, str)
    assert request.prefill_s != request.prefill_s  # not visible
    assert (request.ttft_s, request.tpot_ms, request.e2e_s) == pytest.approx((0.05, 10, 0.09))
    assert request.model == "tiny"
    assert request.server == "llama-server at http://127.0.0.1:1/v1"
    assert request.n_slots == 4
    assert request.slot_ctx == 4096
    assert request.warm is False
    assert request.short is False
    assert len(lab.steps([make_record(), served()])) == len(lab.steps([make_record()]))


def test_warm_and_short_ones_are_no_repeats_of_cold_ones() -> None:
    cold = [served(repeat=i, first_ms=50) for i in range(3)]
    warm = served(repeat=3, first_ms=5, cached=90)
    short = served(
        repeat=4, first_ms=500, n_gen=8, usage=Usage(completion_tokens=5, cached_tokens=0)
    )
    rows = lab.summary(lab.runs([*cold, warm, short]))
    assert list(
        zip(rows.n_gen, rows.warm, rows.short, rows.repeats, rows.ttft_s, strict=True)
    ) == [
        (5, False, False, 3, 0.05),
        (5, True, False, 1, 0.005),
        (8, False, True, 1, 0.5),
    ]
    assert [table.is_measured(record) for record in (cold[0], warm, short)] == [
        True,
        False,
        False,
    ]
    assert len(table.measured(lab.runs([*cold, warm, short]))) == 3


def test_the_table_has_medians_ranges_and_what_they_show(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown(request_session(), capsys)
    assert "TTFT" in out
    assert "prefill alone is not visible" in out
    assert "prefill\n" not in out
    assert "0.0610" in out
    assert "0.0600-0.0620" in out  # 50 + 10 + repeat ms
    assert "10.0" in out
    assert "100" in out
    assert "!" not in out  # everything is known


def test_tpot_is_between_bounds_where_k1_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = shown([served(n_tokens=None, n_gen=10)], capsys)
    assert "4.44 to 10.0" in out  # 40 ms of 9 tokens, or of 4
    assert "100 to 225" in out
    assert "In 1 of 1 requests the number of tokens in the first event is unknown" in out
    assert "gaps are between events" in out


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (served(cached=90), "1 of 1 requests had 90 prompt tokens in the server's cache"),
        (served(cached=None), "does not report cached prompt tokens"),
        (
            served(usage=Usage(completion_tokens=4, cached_tokens=0)),
            "answers were shorter than requested (4 tokens",
        ),
        (
            served(usage=Usage(completion_tokens=5, counted_by="tokenize")),
            "tokenized afterwards",
        ),
        (served(kinds=(REASONING, TEXT, TEXT, TEXT, TEXT)), "answers began with reasoning"),
    ],
)
def test_what_is_not_known_is_said(record: RequestRecord, expected: str) -> None:
    assert any(expected in sentence for sentence in text_requests.warnings([record]))


def test_failures_are_classes_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [
        served(
            repeat=i,
            status=FAILED,
            failure=STALLED,
            error="nothing for 60 s",
        )
        for i in (1, 2)
    ]
    assert "No request went well.\n" in shown(failed, capsys)
    warmup = dataclasses.replace(failed[0].request.asked, warmup=True)
    out = shown(
        [
            served(),
            served(
                asked=warmup,
                status=FAILED,
                failure=STALLED,
            ),
            *failed,
        ],
        capsys,
    )
    assert (
        "failed 2 of 3 requests (stalled), for example 100 prompt tokens, repeat 2: "
        "nothing for 60 s" in out
    )
    assert "failed 1 of 1 warm-up request (stalled)" in out


# Pictures


def labels_of(ax: Any) -> list[str]:
    return [text.get_text().replace("\n", " ") for text in ax.get_legend().get_texts()]


def y_of(line: Any) -> list[float]:
    return list(line.get_ydata())


def test_the_picture_of_ttft_has_points_medians_and_a_guide_in_proportion() -> None:
    ax = lab.plot_prefill(request_session())
    assert ax.get_ylabel() == "TTFT (s)"
    assert ax.get_xscale() == "log"
    assert ax.get_yscale() == "log"
    assert labels_of(ax) == [
        "median over requests",
        "requests",
        "1.51 ms per token, as at 100 tokens (proportional)",
    ]
    median, points, _ = ax.get_lines()
    assert y_of(median) == pytest.approx([0.061, 0.151])
    assert len(y_of(points)) == 6
    assert ax.get_title().split("\n") == [
        "TTFT: 61.0 ms for 10 prompt tokens, 151 ms for 100",
        "tiny through llama-server at http://127.0.0.1:1/v1",
        "client Test CPU, 4 cores; 3 repeats",
    ]


def test_an_engine_and_a_server_share_pictures_of_ttft_and_decode() -> None:
    both: list[Record | RequestRecord] = [
        make_record(make_run(20, 5, decode_ms=10)),
        *request_session(),
    ]
    ax = lab.plot_prefill(both)
    assert labels_of(ax)[:2] == [
        "tiny Q4_0, in process: median",
        "tiny, llama-server at http://127.0.0.1:1/v1: median",
    ]
    assert y_of(ax.get_lines()[0]) == pytest.approx(
        [0.021]
    )  # TTFT: 20 ms of prefill, 1 ms to choose
    decode = lab.plot_decode(both)
    assert decode.get_ylabel() == "time since the previous token (ms)"
    assert len(labels_of(decode)) == 3
    assert "in process and through" in decode.get_title()


# Comparisons


def compared(*groups: list[Any]) -> comparison.Comparison:
    (pair,) = comparison.compare([record for group in groups for record in group])
    return pair


def other_server(records: list[RequestRecord], **changes: Any) -> list[RequestRecord]:
    changed = {"url": "http://127.0.0.1:2/v1", **changes}
    return [
        dataclasses.replace(r, endpoint=dataclasses.replace(r.endpoint, **changed))
        for r in records
    ]


def test_servers_are_compared_by_ttft_and_tpot() -> None:
    rows = compared(
        request_session(),
        other_server(request_session(first_ms=50, gap_ms=30)),
    ).rows
    assert [(row.n_prompt, row.figure) for row in rows] == [
        *(
            (10, "ttft_s"),
            (10, "tpot_ms"),
            (100, "ttft_s"),
            (100, "tpot_ms"),
        )
    ]
    assert (rows[0].estimate, rows[1].estimate) == pytest.approx((1, 3))
    assert rows[1].verdict == SLOWER
    assert rows[0].n_gen is None
    assert rows[1].n_gen == 5


def test_warm_and_short_requests_are_not_compared() -> None:
    apart = [
        served(first_ms=1, cached=50),
        served(first_ms=1, usage=Usage(completion_tokens=2, cached_tokens=0)),
    ]
    rows = compared([*request_session(), *apart], other_server(request_session())).rows
    assert {row.n_base for row in rows} == {3}
    assert rows[2].estimate == pytest.approx(1)
    with pytest.raises(LabError, match="nothing to compare"):
        comparison.groups(apart)


def test_an_engine_and_a_server_are_compared_ttft_with_ttft(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = [make_record(make_run(100, 5, i, decode_ms=10)) for i in range(3)]
    groups = comparison.groups([*engine, *request_session(first_ms=2)])
    comparisons = comparison.compare_groups(groups)
    assert [(row.n_prompt, row.figure) for row in comparisons[0].rows] == [
        (100, "ttft_s"),
        (100, "tpot_ms"),
    ]
    assert comparisons[0].rows[0].base == pytest.approx(0.101)
    assert comparisons[0].rows[0].other == pytest.approx(0.103)
    text_comparison.print_comparisons(groups, comparisons, 0.01, console.console())
    out = capsys.readouterr().out
    assert "Only in the base: prefill at 100." in out
    assert "In process, TTFT is prefill plus sampling one token." in out
    assert "server: in process | llama-server at http://127.0.0.1:1/v1" in out
    assert "n_threads" not in out
    assert "n_slots" not in out


# Files, commands and pages


def write(path: Path, records: list[Any]) -> str:
    for record in records:
        results.save(path, record)
    return str(path)


def numbered(records: list[RequestRecord]) -> list[RequestRecord]:
    """The same, each sent at a time of its own."""
    return [
        dataclasses.replace(record, request=dataclasses.replace(record.request, sent_ns=i))
        for i, record in enumerate(records)
    ]


def test_the_commands_read_files_with_requests_only(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", numbered(request_session()))
    status, out, _ = run_lab("show", file, "--details")
    assert status == 0
    assert "prefill alone is not visible" in out
    rows = json.loads(run_lab("show", file, "--json")[1])["rows"]
    assert [row["n_prompt"] for row in rows] == [10, 100]
    drawn = run_lab("plot", file)[1].split()
    assert [Path(picture).name for picture in drawn] == [
        "a-prefill.png",
        "a-prefill.svg",
        "a-decode.png",
        "a-decode.svg",
    ]
    table_of_runs = run_lab("export", "--as", "csv", file)[1].splitlines()
    assert len(table_of_runs) == 7
    assert "ttft_s" in table_of_runs[0]
    for wrong, message in (
        (("explain", file), "only requests to servers"),
        (("export", file), "no rows for requests to servers"),
        (("export", "--as", "csv", "--table", "steps", file), "have no steps"),
        (("compare", file), "nothing to compare"),
    ):
        status, _, err = run_lab(*wrong)
        assert status == 1, wrong
        assert message in err, wrong


def test_a_page_of_requests_says_who_answered_and_gives_them_back(tmp_path: Path) -> None:
    failed = served(
        repeat=7,
        status=FAILED,
        failure=STALLED,
        error="<script>alert(1)</script>",
    )
    command = ("measure", "--url", "http://127.0.0.1:1/v1", "--prompt-len", "10,100")
    records = [
        dataclasses.replace(record, command=command)
        for record in numbered([*request_session(), failed])
    ]
    path = lab.report(tmp_path / "page.html", records)
    text = path.read_text()
    assert "<h1>How fast does tiny answer through llama-server?</h1>" in text
    assert (
        "After a prompt of 100 tokens the first token arrives after 151 ms, "
        "each further token takes 10.0 ms" in text
    )
    assert "what the server can do" in text
    assert "streaming" in text
    assert "failed: 1 of 7 requests (stalled)" in text
    assert text.count("<svg") == 2
    assert "prefill s" not in text
    assert "<script>alert" not in text
    assert "lab measure --url http://127.0.0.1:1/v1 --prompt-len 10,100" in text
    assert results.read([path]).requests == tuple(records)
    assert run_lab("show", path)[0] == 0


def test_a_page_has_runs_and_requests_and_compares_them(tmp_path: Path) -> None:
    text = lab.report(
        tmp_path / "page.html", [make_record(make_run(100)), *numbered(request_session())]
    ).read_text()
    assert "<h2>Runs</h2>" in text
    assert "<h2>Through a server</h2>" in text
    assert "Which is faster: tiny Q4_0, Test CPU, 4 cores or tiny, llama-server" in text
    assert "In process, TTFT is prefill plus sampling one token." in text
    assert text.count("<svg") == 2  # one picture of TTFT, one of decode


def test_a_request_on_a_busy_machine_is_marked() -> None:
    quiet = dataclasses.replace(served(), noise=noise_of(10))
    busy = dataclasses.replace(served(), noise=noise_of(400))
    elsewhere = served()

    rows = table.runs([quiet, busy, elsewhere])
    warnings = text_requests.warnings([quiet, busy, elsewhere])

    assert rows.disturbed.tolist() == [False, True, False]
    assert "Other processes used 0.8 cores during 1 of 3 requests." in warnings
    assert text_requests.finished(busy).endswith("(disturbed)")
    assert not text_requests.finished(quiet).endswith("(disturbed)")
