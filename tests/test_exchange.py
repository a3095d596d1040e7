"""To llama-bench's columns and back, and tables for everybody."""

import csv
import dataclasses
import io
import json
import sqlite3
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from lab.analysis import llama_bench_format, table
from lab.core import phases, results
from lab.core.record import FAILED, Record
from lab.errors import LabError
from tests.conftest import MS, make_record, make_run, run_lab, run_process

LLAMA_BENCH = {  # a row as llama-bench b-0c1e570 printed it, shortened to what is read
    "build_commit": "0c1e570",
    "cpu_info": "AMD EPYC",
    "gpu_info": "",
    "model_filename": "/models/SmolLM2.Q4_1.gguf",
    "model_type": "llama 256M Q4_1",
    "model_n_params": 134515008,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 2,
    "type_k": "f16",
    "type_v": "f16",
    "n_gpu_layers": -1,
    "flash_attn": -1,
    "n_prompt": 100,
    "n_gen": 0,
    "n_depth": 0,
    "test_time": "2026-11-21T05:34:01Z",
    "avg_ns": 229353002,
    "samples_ns": [216956890, 244102294],
}


@pytest.fixture
def records() -> list[Record]:
    runs = [make_run(20, 5, i, decode_ms=10 + i) for i in range(2)]
    return [make_record(run) for run in [make_run(warmup=True), *runs, make_run(status=FAILED)]]


def test_a_run_is_a_test_of_prefill_and_one_of_decode_at_its_depth(records: list[Record]) -> None:
    prefill, decode = llama_bench_format.llama_bench_rows(records)
    assert list(prefill) == [*llama_bench_format.COLUMNS, "samples_ns", "samples_ts"]
    assert (prefill["n_prompt"], prefill["n_gen"], prefill["n_depth"]) == (20, 0, 0)
    assert prefill["samples_ns"] == [20 * MS, 20 * MS] and prefill["avg_ts"] == 1000
    assert (decode["n_prompt"], decode["n_gen"], decode["n_depth"]) == (0, 4, 20)
    assert decode["samples_ns"] == [40 * MS, 44 * MS]  # choosing tokens is not in it
    assert decode["avg_ts"] == pytest.approx((100 + 1000 / 11) / 2)
    assert decode["stddev_ns"] == pytest.approx(2 * 2**0.5 * MS, rel=1e-6)
    assert (decode["cpu_info"], decode["n_threads"], decode["flash_attn"]) == ("Test CPU", 2, -1)
    assert decode["model_n_params"] is None and decode["build_number"] is None


def test_what_differs_is_not_pooled(records: list[Record]) -> None:
    assert len(llama_bench_format.llama_bench_rows([*records, make_record(make_run(21, 5))])) == 4
    other = dataclasses.replace(records[1].settings, n_threads_batch=1)
    assert len(llama_bench_format.llama_bench_rows([*records, make_record(make_run(20, 5), settings=other)])) == 4


def test_formats(records: list[Record]) -> None:
    rows = llama_bench_format.llama_bench_rows(records)
    assert json.loads(llama_bench_format.write(rows, "json")) == rows
    assert [json.loads(line) for line in llama_bench_format.write(rows, "jsonl").splitlines()] == rows
    read = list(csv.DictReader(io.StringIO(llama_bench_format.write(rows, "csv"))))
    assert [row["avg_ns"] for row in read] == ["20000000", "42000000"] and read[0]["embeddings"] == "0"
    database = sqlite3.connect(":memory:")
    database.executescript(llama_bench_format.write(rows, "sql"))
    found = database.execute("SELECT n_depth, avg_ts, build_number FROM llama_bench").fetchall()
    assert found == [(0, 1000.0, None), (20, pytest.approx(95.454545), None)]
    assert "| tg4 @ d20 | 95.45 ± 6.43 |" in llama_bench_format.write(rows, "md")


def imported(tmp_path: Path, *rows: dict[str, Any]) -> tuple[list[Record], list[str]]:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps([{**LLAMA_BENCH, **row} for row in rows]))
    return llama_bench_format.read_llama_bench(path)


def test_import_of_prefill(tmp_path: Path) -> None:
    records, skipped = imported(tmp_path, {})
    assert not skipped
    assert [phases.prefill_ns(record.run) for record in records] == [216956890, 244102294]
    first = records[0]
    assert (first.run.n_prompt, first.run.n_gen, phases.tpot_ns(first.run)) == (100, 1, None)
    assert (first.machine.cpu, first.machine.ram_bytes, first.machine.os) == ("AMD EPYC", None, None)
    assert (first.model.name, first.model.file, first.model.sha256) == ("SmolLM2.Q4_1", "SmolLM2.Q4_1.gguf", None)
    assert (first.settings.n_gpu_layers, first.settings.flash_attn, first.settings.seed) == (0, "auto", None)


def test_repacking_is_exported_and_imported(records: list[Record], tmp_path: Path) -> None:
    plain = [dataclasses.replace(r, settings=dataclasses.replace(r.settings, repack=False)) for r in records]
    rows = llama_bench_format.llama_bench_rows([*records, *plain])
    assert [row["repack"] for row in rows] == [True, True, False, False]
    asked = [record.settings.repack for record in imported(tmp_path, {"repack": False}, {"repack": True})[0]]
    assert asked == [False, False, None, None]


def test_import_of_decode_at_a_depth_and_at_none(tmp_path: Path) -> None:
    deep, flat = imported(
        tmp_path, *({"n_prompt": 0, "n_gen": 10, "n_depth": n, "samples_ns": [10**8]} for n in (50, 0))
    )[0]
    assert (deep.run.n_prompt, deep.run.n_gen) == (50, 11)
    assert flat.run.n_prompt == 1  # llama-bench begins with the BOS
    assert phases.decode_compute_mean_ns(deep.run) == 10**7
    assert phases.prefill_ns(deep.run) is None and phases.e2e_ns(deep.run) is None


def test_what_has_no_place_is_told(tmp_path: Path) -> None:
    records, skipped = imported(tmp_path, {}, {"n_gen": 5}, {"n_depth": 7}, {"n_threads": None}, {"samples_ns": [0]})
    assert len(records) == 2
    assert len(skipped) == 4 and "as one" in skipped[0] and "test 4 skipped" in skipped[2]


@pytest.mark.parametrize("text", ["", "nonsense", "[]", "[1, 2]", "{", '{"a": 1}', "[{}]"])
def test_what_is_not_llama_bench_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(LabError, match=r"x\.json"):
        llama_bench_format.read_llama_bench(path)


def test_gpu_rows_name_the_gpu(tmp_path: Path) -> None:
    (record, _), _ = imported(tmp_path, {"gpu_info": "NVIDIA H200", "n_gpu_layers": 99})
    assert record.machine.devices[0].description == "NVIDIA H200" and record.settings.n_gpu_layers == 99
    assert table.runs([record]).machine[0] == "NVIDIA H200 (imported)"


def test_own_export_comes_back_as_what_it_was(records: list[Record], tmp_path: Path) -> None:
    for kind in ("json", "jsonl", "csv"):
        path = tmp_path / f"own.{kind}"
        path.write_text(llama_bench_format.write(llama_bench_format.llama_bench_rows(records), kind))
        if kind == "csv":  # it has no samples and no parameters are known of the test model
            continue
        with pytest.raises(LabError):
            llama_bench_format.read_llama_bench(path)  # n_params is unknown here
    known = [make_record(record.run, model=_with_params(record)) for record in records]
    path.write_text(llama_bench_format.write(llama_bench_format.llama_bench_rows(known), "jsonl"))
    back, _ = llama_bench_format.read_llama_bench(path)
    assert [phases.prefill_ns(r.run) or phases.decode_compute_mean_ns(r.run) for r in back] == [
        *[20 * MS] * 2,
        *[10 * MS, 11 * MS],
    ]


def _with_params(record: Record) -> Any:
    return dataclasses.replace(record.model, n_params=7)


def test_commands(records: list[Record], tmp_path: Path) -> None:
    for record in records:
        results.append(tmp_path / "mine.jsonl", record)
    code, out, _ = run_process("export", tmp_path / "mine.jsonl", "--format", "csv", "--table", "steps")
    assert code == 0 and len(pd.read_csv(io.StringIO(out))) == 4 * 7
    parquet = tmp_path / "new" / "runs.parquet"
    assert run_lab("export", tmp_path / "mine.jsonl", "-f", "parquet", "-o", parquet)[0] == 0
    assert list(pd.read_parquet(parquet).tpot_ms)[1:3] == [11, 12]
    assert "Name a file" in run_lab("export", tmp_path / "mine.jsonl", "-f", "parquet")[2]
    (tmp_path / "bench.json").write_text(json.dumps([LLAMA_BENCH]))
    code, out, _ = run_process("import", tmp_path / "bench.json", "-o", tmp_path / "in")
    assert code == 0 and "imported-bench.jsonl  2 samples" in out
    assert "imported-bench-2.jsonl" in run_lab("import", tmp_path / "bench.json", "-o", tmp_path / "in")[1]
    (tmp_path / "in" / "imported-bench-2.jsonl").unlink()
    code, out, _ = run_lab("show", tmp_path / "in")
    assert code == 0 and "SmolLM2.Q4_1, AMD EPYC" in out and "nan" not in out
    assert run_lab("plot", tmp_path / "in")[0] == 0
    assert "Error" in run_lab("import", tmp_path / "none.json")[2]
