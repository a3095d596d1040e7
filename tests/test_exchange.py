"""To llama-bench's columns and back, and tables for everybody."""

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from lab.core import phases, results
from lab.core.record import FAILED, UNKNOWN_THREADS, Record
from lab.errors import LabError
from lab.show import comparison
from lab.formats import llama_bench_format
from lab.show import table
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

POST = """\
I tried both caches, this is a 12 GB card:

```
$ ./llama-bench -m models/llama-2-7b.Q4_0.gguf -fa 0,1 -d 0,4096 | tee log.txt
ggml_cuda_init: found 1 CUDA devices:
  Device 0: NVIDIA GeForce RTX 1234, compute capability 8.6, VMM: yes
| model                          |       size |     params | backend    | ngl | fa |            test |         t/s |
| ------------------------------ | ---------: | ---------: | ---------- | --: | -: | --------------: | ----------: |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  0 |           pp512 | 2345.67 ± 8.90 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  0 |           tg128 |   78.90 ± 0.12 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  1 |   pp512 @ d4096 | 1234.56 ± 7.89 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  1 |   tg128 @ d4096 |   61.20 ± 0.34 |
| llama 7B Q4_0                  |   3.56 GiB |     6.74 B | CUDA       |  99 |  1 |     pp512+tg128 |  320.00 ± 1.00 |

build: 0abc123 (5678)
```
"""
HEAD = "| model | test | t/s |\n| - | - | - |\n"


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


def test_formats(records: list[Record]) -> None:
    rows = llama_bench_format.llama_bench_rows(records)
    assert json.loads(llama_bench_format.write(rows, "json")) == rows
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
    assert (first.machine.cpu, first.machine.ram_bytes, first.machine.os) == (
        "AMD EPYC",
        None,
        None,
    )
    assert (first.model.name, first.model.file, first.model.sha256) == (
        "SmolLM2.Q4_1",
        "SmolLM2.Q4_1.gguf",
        None,
    )
    assert (first.settings.n_gpu_layers, first.settings.flash_attn, first.settings.seed) == (
        0,
        "auto",
        None,
    )


def test_import_of_decode_at_a_depth_and_at_none(tmp_path: Path) -> None:
    deep, flat = imported(
        tmp_path,
        *({"n_prompt": 0, "n_gen": 10, "n_depth": n, "samples_ns": [10**8]} for n in (50, 0)),
    )[0]
    assert (deep.run.n_prompt, deep.run.n_gen) == (50, 11)
    assert flat.run.n_prompt == 1  # llama-bench begins with the BOS
    assert phases.decode_compute_mean_ns(deep.run) == 10**7
    assert phases.prefill_ns(deep.run) is None and phases.e2e_ns(deep.run) is None


def test_what_has_no_place_is_told(tmp_path: Path) -> None:
    records, skipped = imported(
        tmp_path, {}, {"n_gen": 5}, {"n_depth": 7}, {"n_threads": None}, {"samples_ns": [0]}
    )
    assert len(records) == 2
    assert len(skipped) == 4 and "as one" in skipped[0] and "test 4 skipped" in skipped[2]


def pasted(
    tmp_path: Path, text: str | bytes, device: str | None = None
) -> tuple[list[Record], list[str]]:
    path = tmp_path / "post.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return llama_bench_format.read_llama_bench(path, device)


def figures_of(records: list[Record]) -> list[tuple[int, int, float]]:
    """Of each record the prompt, the decoded tokens, and tokens per second."""
    made = []
    for run in (record.run for record in records):
        prefill = phases.prefill_ns(run)
        rate = (
            1e9 * run.n_prompt / prefill
            if prefill
            else 1e9 / (phases.decode_compute_mean_ns(run) or 0)
        )
        made.append((run.n_prompt, run.n_gen - 1, round(rate, 2)))
    return made


AS_PASTED: dict[str, Callable[[str], str | bytes]] = {
    "plain": str,
    "windows": lambda text: text.replace("\n", "\r\n"),
    "powershell": lambda text: text.encode("utf-16"),
    "mojibake": lambda text: text.replace("±", "Â±"),
    "quoted": lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
    "twice": lambda text: text.replace("RTX 1234", "RTX 9999").replace("0abc", "9def") + text,
}


@pytest.mark.parametrize("how", AS_PASTED)
def test_markdown_in_a_post(tmp_path: Path, how: str) -> None:
    records, skipped = pasted(tmp_path, AS_PASTED[how](POST))
    if how == "twice":
        others = records[:3]
        records = records[3:]
        assert {record.machine.llama_cpp_commit for record in others} == {"9def123"}
        assert {record.machine.devices[0].description for record in others} == {
            "NVIDIA GeForce RTX 9999"
        }
    else:
        assert [sentence.split(":")[0] for sentence in skipped] == [
            "line 11 skipped",
            "line 13 skipped",
        ]
    assert figures_of(records) == [(512, 0, 2345.67), (1, 128, 78.9), (4096, 128, 61.2)]
    assert {record.machine.llama_cpp_commit for record in records} == {"0abc123"}
    assert {record.machine.devices[0].description for record in records} == {
        "NVIDIA GeForce RTX 1234"
    }
    assert [record.settings.flash_attn for record in records] == ["off", "off", "on"]
    one = records[0]
    assert (one.model.name, one.model.quantization, one.model.n_params) == (
        "llama 7B",
        "Q4_0",
        6_740_000_000,
    )
    assert (one.settings.n_gpu_layers, one.settings.n_batch, one.settings.n_threads) == (
        99,
        2048,
        UNKNOWN_THREADS,
    )


def test_other_settings_keep_results_apart(tmp_path: Path) -> None:
    text = (
        "| model | backend | threads | mmap | test | t/s |\n| - | - | - | - | - | - |\n"
        + "".join(
            f"| llama 7B all F32 | CPU | 4 | {mmap} | tg128 | 5.{mmap} ± 0.0 |\n" for mmap in (0, 1)
        )
    )
    records, skipped = pasted(tmp_path, text, device="Test CPU")
    assert not skipped and [record.run.variant for record in records] == ["mmap 0", "mmap 1"]
    assert (records[0].machine.cpu, records[0].machine.devices) == ("Test CPU", ())
    assert (records[0].settings.n_threads, records[0].settings.n_gpu_layers) == (4, 0)
    assert comparison.differences(comparison.groups(records)) == {"variant": ["mmap 0", "mmap 1"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "") for text in ("nonsense", "[]", "[1, 2]", "{", '{"a": 1}', "[{}]")),
        (" \n\n", "is empty"),
        ("What is the fastest card? a | b, or c?", "no result that the lab can read"),
        (
            "| name | price |\n| --- | --- |\n| RTX 1234 | 500 |",
            "Line 1 skipped: it is not below the head",
        ),
        (f"{HEAD}| llama 7B Q4_0 | pp512 | fast |", "Line 3 skipped: 'fast' is not a rate"),
        (f"{HEAD}| llama 7B Q4_0 | reads | 12.0 |", "Line 3 skipped: 'reads' is not a test"),
        (f"{HEAD}| llama 7B Q4_0 | pp512 | 0.00 |", "Line 3 skipped: '0.00' is not a rate above"),
        (f"{HEAD}| llama 7B Q4_0 | 12.0 |", "Line 3 skipped: it has 2 columns"),
        (f"{HEAD}| {'a' * 10_000} | pp512 | 12.0 |", "Line 3 skipped: it has over 10,000 letters"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_what_cannot_be_read_gets_its_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LabError, match=r"post\.txt") as problem:
        pasted(tmp_path, text)
    assert said in str(problem.value)


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "md"])
def test_own_export_comes_back_as_what_it_was(
    records: list[Record], tmp_path: Path, kind: str
) -> None:
    known = [
        make_record(one.run, model=dataclasses.replace(one.model, n_params=1_234_567_890))
        for one in records
    ]
    rows = llama_bench_format.llama_bench_rows(known)
    table = pd.DataFrame(rows)[llama_bench_format.COLUMNS]
    others = {
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "csv": table.to_csv(index=False),
    }
    back, skipped = pasted(
        tmp_path, others.get(kind) or llama_bench_format.write(rows, kind), "Test CPU"
    )
    rates = [(20, 0, 1000.0)] * 2 + [(20, 4, 100.0), (20, 4, 90.91)]
    means = [(20, 0, 1000.0), (20, 4, 95.45 if kind == "md" else 95.24)]  # of rates; of times
    assert not skipped and figures_of(back) == (rates if kind in ("json", "jsonl") else means)
    assert {one.model.n_params for one in back} == {
        1_234_567_890 if kind != "md" else 1_234_570_000
    }


def test_imported_results_are_shown_as_someone_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(POST.encode())))
    code, out, err = run_lab("import", "-", "-o", tmp_path)
    assert code == 0 and "imported-pasted.jsonl  3 samples" in out and "line 11 skipped" in err
    for command in ("show", "compare", "plot"):
        code, out, err = run_lab(command, tmp_path)
        assert code == 0 and "All results were imported" in " ".join((out + err).split())
    assert run_lab("report", tmp_path)[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert (
        "unknown date" in page
        and "--n-gpu-layers 99" in page
        and not re.search(r"--threads(-batch)? -1", page)
    )
    rows = table.runs(results.read([tmp_path]).records)
    assert rows.n_threads.isna().all() and set(rows.n_gpu_layers) == {99}


def test_commands(records: list[Record], tmp_path: Path) -> None:
    for record in records:
        results.save(tmp_path / "mine.jsonl", record)
    code, out, _ = run_process(
        "export", tmp_path / "mine.jsonl", "--format", "csv", "--table", "steps"
    )
    assert code == 0 and len(pd.read_csv(io.StringIO(out))) == 4 * 7
    parquet = tmp_path / "new" / "runs.parquet"
    assert run_lab("export", tmp_path / "mine.jsonl", "-f", "parquet", "-o", parquet)[0] == 0
    assert list(pd.read_parquet(parquet).tpot_ms)[1:3] == [11, 12]
    assert "Name a file" in run_lab("export", tmp_path / "mine.jsonl", "-f", "parquet")[2]
    (tmp_path / "bench.json").write_text(json.dumps([LLAMA_BENCH]))
    code, out, _ = run_process("import", tmp_path / "bench.json", "-o", tmp_path / "in")
    assert code == 0 and "imported-bench.jsonl  2 samples" in out
    assert (
        "imported-bench-2.jsonl"
        in run_lab("import", tmp_path / "bench.json", "-o", tmp_path / "in")[1]
    )
    (tmp_path / "in" / "imported-bench-2.jsonl").unlink()
    code, out, _ = run_lab("show", tmp_path / "in")
    assert code == 0 and "SmolLM2.Q4_1, AMD EPYC" in out and "nan" not in out
    assert run_lab("plot", tmp_path / "in")[0] == 0
    assert "Error" in run_lab("import", tmp_path / "none.json")[2]
