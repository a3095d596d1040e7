"""Results files of somebody else: a bad line is named and left out, and nothing takes long."""

import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, strategies as st

from lab.app import kinds
from lab.core import cost, memory, results
from lab.core.bounds import MOST_LETTERS
from lab.core.lines import parse_line, to_json
from lab.core.record import Record
from lab.errors import LabError, printable
from lab.formats import llama_bench_export, llama_bench_import, spreadsheet
from lab.models import catalog, synthetic
from lab.show import comparison, summaries, table
from tests.hostile.evil import EVIL, changed, evil_record, poisoned
from tests.support.command import run_lab
from tests.support.rates import FAST
from tests.support.records import make_record, make_run
from tests.support.requests import make_request, make_request_record

UNPRINTABLE = "evil\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\x00\x85\n\r\u202e\u2066\u2028\ufeff"
BOM = b"\xef\xbb\xbf"
CONTROLS = "\x1b[2J\u202e\n"
NUMBERS = (-1, 0, 10**9, 2**63, -(2**63), 10**30, 10**4000, 1e300)
REFUSED: list[tuple[str, Any, str]] = [
    # A field of a record, what it becomes, and what is said.
    (
        "model.n_layer",
        10**9,
        "record.model.n_layer is 1,000,000,000, and may be at most 2,000",
    ),
    ("settings.n_ubatch", 0, "record.settings.n_ubatch is 0, and may be at least 1"),
    ("run.n_prompt", -5, "record.run.n_prompt is -5"),
    ("run.n_prompt", 10**30, "record.run.n_prompt"),
    ("run.n_prompt", 10**4000, "record.run.n_prompt"),
    ("run.steps.end_ns", [-1] * 9, "record.run.steps"),
    (
        "run.steps.end_ns",
        [2**63] * 9,
        "record.run.steps.end_ns[0] is 9,223,372,036,854,775,808",
    ),
    (
        "model.name",
        "x" * 9_000_000,
        f"record.model.name has 9,000,000 letters, and may have {MOST_LETTERS:,}",
    ),
    ("run.token_ids", [1, -(10**12)], "record.run.token_ids[1] is -1,000,000,000,000"),
    ("machine.os", [[[]]] * 9, "record.machine.os is a list, not text"),
]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    REFUSED,
)
def test_a_line_outside_of_the_ranges_is_left_out(
    tmp_path: Path, field: str, value: Any, expected: str
) -> None:
    good = make_record(make_run(20, 7))
    (tmp_path / "a.jsonl").write_bytes(
        changed(good, field, value) + to_json(good).encode() + b"\n"
    )
    reading = results.read([tmp_path])
    assert reading.records == (good,)
    (sentence,) = reading.skipped
    assert expected in sentence
    assert len(sentence) < 300


def numbers_of(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every number of a JSON document with its place; columns at once."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from numbers_of(part, f"{place}.{key}" if place else key)
    elif isinstance(value, list):
        if value and isinstance(value[0], int | float):
            yield place, value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place, value


def test_every_model_of_the_catalog_is_within_the_ranges() -> None:
    for entry in catalog.entries().values():
        record = make_record(model=synthetic.model_of(entry, "Q4_K_M"))
        assert parse_line(to_json(record).encode() + b"\n") == record, entry.name


def test_whatever_number_a_field_has_the_tables_are_made(tmp_path: Path) -> None:
    sample = next(
        iter(results.read([Path("results/sample-smollm2-135m-amd-epyc.jsonl")]).records)
    )
    good = make_record()
    lines = []
    for place, value in numbers_of(json.loads(to_json(sample))):
        for number in NUMBERS:
            lines.append(
                changed(
                    sample, place, [number] * len(value) if isinstance(value, list) else number
                )
            )
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines) + to_json(good).encode() + b"\n")
    reading = results.read([tmp_path])
    assert good in reading.records
    assert reading.skipped
    assert len(reading.records) < len(lines) / 2
    summaries.summary(table.runs(reading.records))
    table.steps(reading.records)
    kinds.sections(reading.records)
    llama_bench_export.rows(reading.records)
    comparison.compare([*reading.records, make_record(session="another")])
    for record in reading.records:
        cost.step(record.model, 1, 0, 1)
        memory.kv_bytes_per_position(record.model)
    code, _, err = run_lab("explain", "--no-plot", "--ceilings", "results", tmp_path)
    assert code in (0, 1)
    assert "Traceback" not in err


def test_requests_have_ranges_too(tmp_path: Path) -> None:
    line = json.loads(to_json(make_request_record(make_request())))
    for name, value in {
        "finish_reason": "x" * 9_000_000,
        "sent_ns": 2**63,
    }.items():
        broken = {
            **line,
            "request": {
                **line["request"],
                name: value,
            },
        }
        (tmp_path / "a.jsonl").write_text(f"{json.dumps(broken)}\n{json.dumps(line)}\n")
        reading = results.read([tmp_path])
        assert len(reading.requests) == 1
        assert f"request.request.{name}" in reading.skipped[0]


@pytest.mark.parametrize("depth", [480, 985, 5_000, 100_000])
def test_nested_content_is_no_bug(tmp_path: Path, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    good = to_json(make_record())
    (tmp_path / "a.jsonl").write_text(f'{{"unknown":{nested},{good[1:]}\n{good}\n')
    assert results.read([tmp_path]).records[-1:] == (make_record(),)
    for text in (nested, f'{{"a":{nested}}}', f"[{{'build_commit': {nested}}}]"):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(LabError, match=r"b\.json"):
            llama_bench_import.read(str(tmp_path / "b.json"))


def texts(value: Any) -> Iterator[str]:
    """Every text of a JSON document, names of fields included."""
    if isinstance(value, dict | list):
        for part in value.items() if isinstance(value, dict) else value:
            yield from texts(list(part) if isinstance(part, tuple) else part)
    elif isinstance(value, str):
        yield value


def quoted(text: str) -> str:
    """A text as it is written within the quotes of JSON."""
    return json.dumps(text)[1:-1]


@pytest.mark.parametrize("as_ascii", [True, False])
def test_no_text_of_a_line_keeps_a_control_character(as_ascii: bool) -> None:
    ceilings = poisoned(FAST)
    rates = [dataclasses.replace(rate, op="mul_mat") for rate in ceilings.rates]
    ceilings = dataclasses.replace(ceilings, rates=tuple(rates))
    lines = evil_record(), ceilings, poisoned(make_request_record())
    for line in lines:
        document = to_json(line).replace(quoted(EVIL), quoted(UNPRINTABLE))
        if not as_ascii:
            document = json.dumps(json.loads(document), ensure_ascii=False)
        clean = list(texts(json.loads(to_json(parse_line(document.encode() + b"\n")))))
        assert sum(text.startswith("evil?]0;") for text in clean) > 5
        assert all(text.isprintable() for text in clean)


@given(text=st.text(max_size=50))
def test_a_text_stays_but_for_what_is_not_printable(text: str) -> None:
    line = parse_line(to_json(make_record(session=text)).encode() + b"\n")
    assert isinstance(line, Record)
    assert line.session == printable(text.encode(errors="replace").decode())


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=5,
    ),
    place=st.sampled_from(
        ["schema", "model", "settings.devices", "run.steps", "run.noise", "run.token_ids"]
    ),
)
def test_any_value_anywhere_is_a_line_or_a_sentence(value: Any, place: str) -> None:
    with suppress(ValueError):
        parse_line(changed(make_record(), place, value))


@pytest.mark.skipif(os.name == "nt", reason="has no pipes in folders")
def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    os.mkfifo(tmp_path / "ceilings-pipe.jsonl")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / f"folder{CONTROLS}.jsonl").mkdir()
    results.save(
        tmp_path / f"good{CONTROLS}.jsonl",
        make_record(),
        make_record(make_run(repeat=1)),
    )
    assert len(results.read([tmp_path]).records) == 2
    for name in ("show", "compare", "plot", "report", "explain", "export"):
        _, out, err = run_lab(name, tmp_path)
        assert "Traceback" not in err
        assert not {"\x1b", "\u202e"} & set(out + err)
    for name in ("pipe.jsonl", "zero.jsonl"):
        for command in (("show",), ("models", "info")):
            code, _, err = run_lab(*command, tmp_path / name)
            assert code == 1
            assert "is not a file" in err


def test_lines_have_a_length_and_a_byte_order_mark_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = to_json(make_record()).encode() + b"\n"
    monkeypatch.setattr(results, "MOST_LINE", len(good) + 8)
    (tmp_path / "a.jsonl").write_bytes(BOM + good + b"x" * 3 * len(good) + b"\n" + good)
    reading = results.read([tmp_path])
    assert len(reading.records) == 1
    assert [sentence.partition(" skipped: ")[2] for sentence in reading.skipped] == [
        f"it has over {len(good) + 8:,} bytes",
        "it is a duplicate",
    ]


def test_sessions_that_begin_at_once_have_files_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        paths = list(pool.map(lambda _: results.new_file(tmp_path, "a"), range(300)))
    assert len(set(paths)) == 300


def test_a_spreadsheet_runs_nothing(tmp_path: Path) -> None:
    for first in "=+-@\t\r":
        session = f"{first}cmd|calc"
        results.save(
            tmp_path / "a.jsonl", make_record(make_run(variant=session), session=session)
        )
    code, out, _ = run_lab("export", tmp_path, "--as", "csv")
    assert code == 0
    for row in csv.reader(io.StringIO(out)):
        for cell in row:
            assert cell[:1] not in set("=+@\t\r")
            assert cell[:1] != "-" or float(cell) < 0
    frame = spreadsheet.without_formulas(
        pd.DataFrame(
            {
                "a": [-1, 2],
                "b": [-2.5, None],
                "c": ["-x", "y"],
            }
        )
    )
    assert frame.to_csv(index=False) == "a,b,c\n-1,-2.5,'-x\n2,,y\n"


@pytest.mark.parametrize(
    "piece", ["|", "||\n", "| <", "&#", "Device 0: ", "| a ", "build: abcdef0\n", "[", "1,"]
)
def test_a_pasted_text_takes_no_longer_than_a_long_one(tmp_path: Path, piece: str) -> None:
    (tmp_path / "post.txt").write_text(piece * (3_000_000 // len(piece)))
    with pytest.raises(LabError, match=r"no result that the lab can read|is not JSON"):
        llama_bench_import.read(str(tmp_path / "post.txt"))
