"""Results files: what is written comes back, and what is broken is named and passed over."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lab.core import results
from lab.core.lines import parse_line, to_json
from lab.core.record import Noise, NoiseReading, Steps
from lab.errors import LabError
from tests.support.records import make_record, make_run

SAMPLES = sorted((Path(__file__).parent.parent / "results").glob("*.jsonl"))

READING = NoiseReading(0.5, 3)


def test_a_record_comes_back_equal(tmp_path: Path) -> None:
    lines = [
        make_record(),
        make_record(make_run(noise=Noise(READING, READING))),
        make_record(make_run(status="failed")),
    ]
    for line in lines:
        results.save(tmp_path / "a.jsonl", line)
    assert results.read([tmp_path / "a.jsonl"]) == results.Contents(tuple(lines))


def test_the_names_of_a_line_are_the_contract(tmp_path: Path) -> None:
    results.save(tmp_path / "a.jsonl", make_record())
    line = json.loads((tmp_path / "a.jsonl").read_text())
    assert line["schema"] == 4
    assert {"session", "machine", "model", "settings", "run"} <= set(line)
    assert set(line["run"]["steps"]) == {
        *("kind", "n_tokens", "n_past", "start_ns", "ready_ns", "end_ns"),
        *("n_seq", "n_outputs"),
    }
    assert {
        "n_prompt",
        "n_gen",
        "repeat",
        "warmup",
        "started_at",
        "status",
        "error",
        "token_ids",
        "noise",
    } <= set(line["run"])


def test_concatenated_files_and_folders_are_results(tmp_path: Path) -> None:
    for name in "ab":
        results.save(tmp_path / f"{name}.jsonl", make_record(session=name))
    assert len(results.read([tmp_path]).records) == 2
    both = (tmp_path / "a.jsonl").read_bytes() + (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "c.jsonl").write_bytes(both)
    assert [r.session for r in results.read([tmp_path / "c.jsonl"]).records] == ["a", "b"]


def test_a_run_does_not_count_twice(tmp_path: Path) -> None:
    for name in "ab":
        results.save(tmp_path / f"{name}.jsonl", make_record())
    reading = results.read([tmp_path])
    assert len(reading.records) == 1
    assert "is a duplicate" in reading.skipped[0]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lambda line: line[:-20], "the line is truncated"),
        (lambda line: line[:-20] + b"\n", "not JSON"),
        (lambda line: b"[1]\n", "not a record of the lab"),
        (
            lambda line: line.replace(b'"schema":4', b'"schema":5'),
            "newer version of the lab (schema 5)",
        ),
        (
            lambda line: line.replace(b'"schema":4', b'"schema":3'),
            "older version of the lab (schema 3)",
        ),
        (
            lambda line: line.replace(b'"n_prompt":20', b'"n_prompt":"x"'),
            "record.run.n_prompt is text, not a whole number",
        ),
        (
            lambda line: line.replace(b'"n_prompt":20', b'"n_prompt":null'),
            "record.run.n_prompt is missing",
        ),
        (
            lambda line: line.replace(b'"n_prompt":20', b'"n_prompt":1.5'),
            "record.run.n_prompt is a number, not a whole",
        ),
        (
            lambda line: line.replace(b'"n_prompt":20', b'"n_prompt":true'),
            "is true or false, not a whole number",
        ),
        (
            lambda line: line.replace(b'"steps":{', b'"steps":[],"_":{'),
            "record.run.steps is a list, not an object",
        ),
        (
            lambda line: line.replace(b'"power":null', b'"power":5'),
            "record.machine.power is a whole number, not text",
        ),
        (
            lambda line: line.replace(b'"seed":1', b'"seed":1' + b"0" * 5000),
            "record.settings.seed: integer value out",
        ),
        (lambda line: line.replace(b',"schema":4', b""), "no schema number"),
        (lambda line: line.replace(b'"schema":4', b'"schema":true'), "no schema number"),
        (
            lambda line: line.replace(
                b'"session":', b'"x":' + b"[" * 10**5 + b"]" * 10**5 + b',"session":'
            ),
            "not JSON",
        ),
        (lambda line: line.replace(b'"tiny"', b'"\xff"'), "not JSON"),
        (lambda line: line.replace(b'"n_tokens":[8,', b'"n_tokens":['), "differ in length"),
        (
            lambda line: line.replace(b'"n_past":[0,', b'"n_past":["0",'),
            "record.run.steps.n_past[0] is text",
        ),
        (lambda line: line.replace(b'"run":', b'"ran":'), "record.run is missing"),
        (lambda line: line.replace(b'"n_prompt":20', b'"n_prompt":NaN'), "not JSON"),
        (lambda line: line.replace(b'"n_prompt":20', b'"n_prompt":-Infinity'), "not JSON"),
        (lambda line: line.replace(b'"name":"tiny"', b'"name":"\\ud800"'), "not JSON"),
    ],
)
def test_a_broken_line_is_named_and_the_others_are_read(
    tmp_path: Path, broken: object, why: str
) -> None:
    path = tmp_path / "a.jsonl"
    results.save(path, make_record())
    line = path.read_bytes()
    path.write_bytes(line + broken(line))  # type: ignore[operator]
    reading = results.read([path])
    assert len(reading.records) == 1
    assert len(reading.skipped) == 1
    assert why in reading.skipped[0]
    assert "a.jsonl line 2" in reading.skipped[0]


def test_a_run_of_an_experiment_that_is_gone_is_no_plain_run(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    results.save(path, make_record(make_run(experiment="prefix")))
    reading = results.read([path])
    assert not reading.records
    (sentence,) = reading.skipped
    assert "it is a run of lab prefix, which this version of the lab does not have" in sentence


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"n_seq": "2", "is_shared": False},
        {"n_seq": 2, "x": 1},
    ],
)
def test_a_case_that_its_experiment_does_not_know_is_refused(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    path = tmp_path / "a.jsonl"
    results.save(path, make_record(make_run(experiment="batch", case=case)))
    reading = results.read([path])
    assert not reading.records
    assert "its case" in reading.skipped[0]


def test_a_line_of_an_unknown_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = json.loads(to_json(make_record())) | {"kind": "dream"}
    path.write_text(json.dumps(line) + "\n")
    (sentence,) = results.read([path]).skipped
    assert "no lines of the kind 'dream'" in sentence


def test_a_key_that_is_missing_has_its_default(tmp_path: Path) -> None:
    record = make_record(make_run(noise=Noise(READING, READING)))
    lean = json.loads(
        to_json(record),
        object_hook=lambda d: {k: v for k, v in d.items() if v not in (None, 0.5)},
    )
    assert "power" not in lean["machine"]
    assert "memory_pressure_s" not in lean["run"]["noise"]["before"]
    quiet = dataclasses.replace(READING, memory_pressure_s=None)
    assert parse_line(json.dumps(lean).encode() + b"\n") == make_record(
        make_run(noise=Noise(quiet, quiet))
    )


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_samples_come_back_as_they_are(path: Path) -> None:
    lines = path.read_text().splitlines()
    contents = results.read([path])
    n_read = sum(
        map(len, (contents.records, contents.ceilings, contents.requests, contents.findings))
    )
    assert not contents.skipped
    assert n_read == len(lines)
    for line in lines:
        kept = json.loads(to_json(parse_line(line.encode() + b"\n")))
        whole = json.loads(line)
        assert _known(kept) == _known(whole)


FORMER = {
    *(
        "load_1min",
        "cpu_busy_s",
        "cpu_steal_s",
        "cpu_pressure_s",
        "cpu_mhz",
        "memory_available_bytes",
        "own_cpu_s",
    ),
    *("switches", "pressure_ms", "clock_mhz", "temperature_c", "power_w", "n_others"),
    *("prompt_sha256", "client_error_ns", "embedding_type", "device", "was_connected"),
}
"""What older lines have, and the sha256 of prompts."""


def _known(value: object) -> object:
    if isinstance(value, dict):
        return {
            key: _known(part)
            for key, part in value.items()
            if part not in (None, {}) and key not in FORMER
        }
    return [_known(part) for part in value] if isinstance(value, list) else value


def test_columns_of_steps_have_one_length() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Steps(kind=("prefill",))


def test_missing_results_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no results file"):
        results.read([tmp_path / "none.jsonl"])
    with pytest.raises(LabError, match="no results file"):
        results.read([tmp_path])


def test_a_write_that_fails_leaves_whole_lines() -> None:
    with pytest.raises(LabError, match="cannot be written"):
        results.save(Path("/dev/full"), make_record())


@pytest.mark.parametrize("steps", [{}, {"kind": []}], ids=["none", "one column"])
def test_a_line_without_columns_of_steps_has_none(steps: dict[str, Any]) -> None:
    frame = msgspec.convert(steps, Steps).frame()
    assert frame.empty
    assert {"kind", "start_ns", "start_s", "end_s"} <= set(frame.columns)
