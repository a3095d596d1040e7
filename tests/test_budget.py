"""The budget of a token: its parts add up, in the engine and through llama-server."""

import json
from pathlib import Path

import pytest

from lab.core.results import read
from lab.features.explain import budget, server_budget
from lab.roofline import probing
from lab.roofline.explanation import explain
from tests.support.command import run_lab
from tests.support.tables import lines_of

RESULTS = Path(__file__).parent.parent / "results"
ENGINE = RESULTS / "sample-smollm2-135m-amd-epyc.jsonl"
SERVER = RESULTS / "sample-server-smollm2-135m-llama-server.jsonl"


def test_the_parts_of_a_token_add_up_in_the_engine() -> None:
    contents = read([ENGINE])
    records = [record for record in contents.records if record.run.is_timed]
    where = probing.place_of_record(records[0])
    rows = explain(records, probing.need(contents.ceilings, where, ""))
    section = budget.section(rows, records[0])
    assert section is not None
    assert [cells[0] for cells in lines_of(section)] == ["10", "1,000", "10,000"]
    decodes = rows[rows.phase == "decode"]
    for row in decodes.itertuples():
        assert budget.sum_of_parts(row) == pytest.approx(row.tpot_s, rel=0.02)
    assert "to choose it (greedy)" in section.sentences[0]


def test_the_parts_of_a_token_add_up_through_llama_server() -> None:
    requests = read([SERVER]).requests
    rows = server_budget.rows(requests)
    assert list(rows.n_prompt) == [10, 100, 1000]
    for row in rows.itertuples():
        assert row.step_s == pytest.approx(row.tpot_s, rel=0.02)
        assert row.prompt_s < row.ttft_s


def test_requests_without_the_times_of_a_server_have_no_budget() -> None:
    assert server_budget.section([]) is None


def test_the_command_explains_requests_to_llama_server() -> None:
    code, out, _ = run_lab("explain", SERVER)
    assert code == 0
    assert "template, tokenizing, HTTP, queue" in out
    code, out, _ = run_lab("explain", SERVER, "--json")
    assert len(json.loads(out)[0]["server_budget"]) == 3
