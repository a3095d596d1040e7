"""Lines of numbers that are in their ranges but fit no measurement: each is refused with its
reason; and files that are small, and want much work."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from lab.core import request_times, results
from lab.core.lines import parse_line, to_json
from lab.core.record import DECODE, Ceilings
from lab.core.request import Events
from lab.errors import LabError
from lab.show import comparison
from tests.hostile.evil import changed
from tests.support.rates import FAST
from tests.support.records import MACHINE, make_record, make_run
from tests.support.requests import make_request, make_request_record

N_STEPS = len(make_run(20, 5).steps.kind)
ORDER = "not in the order of their times"
NO_TIME = "without tokens or without time"
REFUSED: list[tuple[str, Any, str]] = [
    # A field of a record, what it becomes, and what is said.
    ("run.steps.end_ns", [0] * N_STEPS, ORDER),
    ("run.steps.start_ns", [0] * N_STEPS, ORDER),
    ("run.steps.ready_ns", [0] * N_STEPS, ORDER),
    ("run.steps.start_ns", list(range(N_STEPS))[::-1], ORDER),
    ("run.steps.n_tokens", [0] * N_STEPS, NO_TIME),
    ("run.steps.kind", ["other"] * N_STEPS, "an unknown kind"),
    ("run.steps", {}, "no step of a run that succeeded"),
    ("run.n_prompt", 21, "20 tokens of the prompt, not run.n_prompt"),
    ("run.n_gen", 10_000_000, "4 tokens of the answer"),
    ("model.windows", [0] * 100, "100 layers, not 2"),
    ("model.heads", [4], "1 layers, not 2"),
]


def refusal(line: bytes) -> str:
    with pytest.raises(ValueError) as problem:
        parse_line(line)
    return str(problem.value)


@pytest.mark.parametrize(("field", "value", "expected"), REFUSED)
def test_numbers_that_do_not_fit_each_other_are_refused(
    field: str, value: Any, expected: str
) -> None:
    assert expected in refusal(changed(make_record(make_run(20, 5)), field, value))


@pytest.mark.parametrize("n_gen", [1, 2])
def test_an_answer_of_one_token_has_no_step_of_its_own(n_gen: int) -> None:
    record = make_record(make_run(20, n_gen))
    assert record.run.steps.kind.count(DECODE) == n_gen - 1
    assert parse_line(to_json(record).encode() + b"\n") == record


@pytest.mark.parametrize("column", ["n_past", "n_seq", "n_outputs", "kind", "start_ns"])
def test_a_missing_column_is_refused(column: str) -> None:
    line = json.loads(to_json(make_record()))
    del line["run"]["steps"][column]
    assert "differ in length" in refusal(json.dumps(line).encode() + b"\n")


def test_all_times_zero_are_refused() -> None:
    line = json.loads(to_json(make_record()))
    for name in ("start_ns", "ready_ns", "end_ns"):
        line["run"]["steps"][name] = [0] * len(line["run"]["steps"][name])
    assert NO_TIME in refusal(json.dumps(line).encode() + b"\n")


@pytest.mark.parametrize(
    ("field", "value"),
    [("flops", 0), ("n_tokens", 0), ("n_bytes", 0), ("n_threads", 0), ("times_ns", ())],
)
def test_a_kernel_without_work_is_refused(field: str, value: Any) -> None:
    rates = (dataclasses.replace(FAST.rates[0], **{field: value}), *FAST.rates[1:])
    line = to_json(dataclasses.replace(FAST, rates=rates)).encode() + b"\n"
    assert "kernel without work" in refusal(line)
    without_rates: Ceilings = dataclasses.replace(FAST, rates=())
    assert "no kernel" in refusal(to_json(without_rates).encode() + b"\n")


def test_an_imported_run_has_no_more_steps_than_a_real_one() -> None:
    record = make_record(make_run(20, 1, imported_from="llama-bench"))
    steps = {name: [column[0]] for name, column in vars(record.run.steps).items()}
    line = json.loads(to_json(record))
    line["run"]["steps"] = steps
    line["settings"]["n_ubatch"] = 1
    assert parse_line(json.dumps(line).encode() + b"\n")
    line["run"]["n_prompt"] = 10_000_000
    assert "10,000,001 steps" in refusal(json.dumps(line).encode() + b"\n")


def test_events_that_go_back_in_time_are_refused() -> None:
    request = make_request()
    events = dataclasses.replace(request.events, arrive_ns=request.events.arrive_ns[::-1])
    record = make_request_record(dataclasses.replace(request, events=events))
    assert ORDER in refusal(to_json(record).encode() + b"\n")


def test_counts_of_tokens_do_not_fill_the_memory() -> None:
    events = Events((1_000_000, 900_000_000), (9, 9), ("text", "text"), (1, 10_000_000))
    request = dataclasses.replace(make_request(), events=events)
    assert request_times.itl_ns(request) is None
    assert request_times.chunk_gaps_ns(request) == [899_000_000]


@pytest.mark.parametrize("changed_name", ["session", "cpu"])
def test_very_many_setups_are_not_compared(
    changed_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "MOST_GROUPS", 5)
    records = []
    for number in range(comparison.MOST_GROUPS + 1):
        machine = MACHINE
        if changed_name == "cpu":
            machine = dataclasses.replace(MACHINE, cpu=f"CPU {number}")
        records.append(make_record(make_run(20, 3), session=f"s{number}", machine=machine))
    assert len(comparison.groups(records[:-1])) == comparison.MOST_GROUPS
    with pytest.raises(LabError, match="6 setups or sessions are too many"):
        comparison.groups(records)


def page_of(text: bytes) -> bytes:
    packed = base64.b64encode(gzip.compress(text))
    return b'<script id="mini-lab-records">' + packed + b"</script>"


def test_a_small_page_makes_no_long_work(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_bytes(page_of(b"x\n" * 400_000 + to_json(make_record()).encode() + b"\n"))
    contents = results.read([path])
    assert contents.skipped[-1].endswith("10,000 lines were skipped")
    path.write_bytes(page_of(b"\n" * 30_000_000))
    with pytest.raises(LabError, match="too large"):
        results.read([path])


def test_reasons_are_counted_and_not_all_listed(tmp_path: Path) -> None:
    lines = [f'{{"schema": 4, "kind": "k{i}"}}\n' for i in range(5_000)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    skipped = results.read([tmp_path]).skipped
    assert len(skipped) == results.MOST_REASONS + 1
    assert "and 4,979 more skipped: for other reasons" in skipped[-1]
