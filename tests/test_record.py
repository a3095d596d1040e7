"""Results files: what is written comes back, and what is broken is named and passed over."""

import json
from pathlib import Path

import pytest

from lab.core import results
from lab.core.noise import Noise, NoiseReading
from lab.core.record import Steps
from lab.errors import LabError
from tests.conftest import make_record, make_run

READING = NoiseReading(0.5, 12.0, None, 1.5, 2400.0, 10**9)


def test_a_record_comes_back_equal(tmp_path: Path) -> None:
    lines = [
        make_record(),
        make_record(make_run(noise=Noise(READING, READING))),
        make_record(make_run(status="failed")),
    ]
    for line in lines:
        results.append(tmp_path / "a.jsonl", line)
    assert results.read([tmp_path / "a.jsonl"]) == results.Contents(tuple(lines), (), ())


def test_the_names_of_a_line_are_the_contract(tmp_path: Path) -> None:
    results.append(tmp_path / "a.jsonl", make_record())
    line = json.loads((tmp_path / "a.jsonl").read_text())
    assert line["schema"] == 1
    assert {"session", "machine", "model", "settings", "run"} <= set(line)
    assert set(line["run"]["steps"]) == {"kind", "n_tokens", "n_past", "start_ns", "ready_ns", "end_ns"}
    assert {"n_prompt", "n_gen", "repeat", "warmup", "started_at", "status", "error", "token_ids", "noise"} <= set(
        line["run"]
    )


def test_concatenated_files_and_folders_are_results(tmp_path: Path) -> None:
    for name in "ab":
        results.append(tmp_path / f"{name}.jsonl", make_record(session=name))
    assert len(results.read([tmp_path]).records) == 2
    both = (tmp_path / "a.jsonl").read_bytes() + (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "c.jsonl").write_bytes(both)
    assert [r.session for r in results.read([tmp_path / "c.jsonl"]).records] == ["a", "b"]


def test_a_run_does_not_count_twice(tmp_path: Path) -> None:
    for name in "ab":
        results.append(tmp_path / f"{name}.jsonl", make_record())
    reading = results.read([tmp_path])
    assert len(reading.records) == 1 and "was read before" in reading.skipped[0]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda line: line[:-20], "not whole"),
        (lambda line: line[:-20] + b"\n", "not JSON"),
        (lambda line: b"[1]\n", "not a record of the lab"),
        (lambda line: line.replace(b'"schema":1', b'"schema":2'), "schema 2"),
        (lambda line: line.replace(b'"n_prompt":20', b'"n_prompt":"x"'), "record.run.n_prompt"),
        (lambda line: line.replace(b'"n_tokens":[8,', b'"n_tokens":['), "differ in length"),
        (lambda line: line.replace(b'"n_past":[0,', b'"n_past":["0",'), "record.run.steps.n_past"),
        (lambda line: line.replace(b'"run":', b'"ran":'), "record.run is not an object"),
        (lambda line: line.replace(b'"n_prompt":20', b'"n_prompt":NaN'), "not JSON"),
        (lambda line: line.replace(b'"name":"tiny"', b'"name":"\\ud800"'), "not JSON"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(tmp_path: Path, broken: object, why: str) -> None:
    path = tmp_path / "a.jsonl"
    results.append(path, make_record())
    line = path.read_bytes()
    path.write_bytes(line + broken(line))  # type: ignore[operator]
    reading = results.read([path])
    assert len(reading.records) == 1
    assert len(reading.skipped) == 1
    assert why in reading.skipped[0]
    assert "a.jsonl line 2" in reading.skipped[0]


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    results.append(path, make_record())
    path.write_bytes(path.read_bytes().replace(b'"session":', b'"colour":"red","session":'))
    assert results.read([path]).records == (make_record(),)


def test_columns_of_steps_have_one_length() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Steps(kind=("prefill",))


def test_missing_results_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no results file"):
        results.read([tmp_path / "none.jsonl"])
    with pytest.raises(LabError, match="no results file"):
        results.read([tmp_path])


def test_a_write_that_fails_leaves_whole_lines() -> None:
    with pytest.raises(OSError):
        results.append(Path("/dev/full"), make_record())
