"""To llama-bench's columns and back, and tables for everybody."""

import dataclasses
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from lab.core import phases, results
from lab.core.record import FAILED, UNKNOWN_THREADS, Record
from lab.errors import LabError
from lab.formats import llama_bench_export, llama_bench_import
from lab.show import comparison, table
from tests.support.command import run_lab, run_process
from tests.support.records import MS, make_record, make_run

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
| model         | size     | params | backend | ngl | fa | test          | t/s            |
| ------------- | -------: | -----: | ------- | --: | -: | ------------: | -------------: |
| llama 7B Q4_0 | 3.56 GiB | 6.74 B | CUDA    |  99 |  0 |         pp512 | 2345.67 ± 8.90 |
| llama 7B Q4_0 | 3.56 GiB | 6.74 B | CUDA    |  99 |  0 |         tg128 |   78.90 ± 0.12 |
| llama 7B Q4_0 | 3.56 GiB | 6.74 B | CUDA    |  99 |  1 | pp512 @ d4096 | 1234.56 ± 7.89 |
| llama 7B Q4_0 | 3.56 GiB | 6.74 B | CUDA    |  99 |  1 | tg128 @ d4096 |   61.20 ± 0.34 |
| llama 7B Q4_0 | 3.56 GiB | 6.74 B | CUDA    |  99 |  1 |   pp512+tg128 |  320.00 ± 1.00 |

build: 0abc123 (5678)
```
"""
HEAD = "| model | test | t/s |\n| - | - | - |\n"
RATES_OF_POST = [
    (512, 0, 2345.67),
    (1, 128, 78.9),
    (4096, 128, 61.2),
]


@pytest.fixture
def records() -> list[Record]:
    timed = [make_run(20, 5, repeat, decode_ms=10 + repeat) for repeat in range(2)]
    runs = [
        make_run(warmup=True),
        *timed,
        make_run(status=FAILED),
    ]
    return [make_record(run) for run in runs]


def import_text(
    folder: Path, content: str | bytes, device: str | None = None
) -> tuple[list[Record], list[str]]:
    """The records of a text, and the sentences on what is not read."""
    path = folder / "post.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return llama_bench_import.read(str(path), device)


def import_rows(folder: Path, *changes: dict[str, Any]) -> tuple[list[Record], list[str]]:
    """The records of LLAMA_BENCH with changes, a row each."""
    rows = [{**LLAMA_BENCH, **changed} for changed in changes]
    return import_text(folder, json.dumps(rows))


def rates(records: list[Record]) -> list[tuple[int, int, float]]:
    """Of each record the prompt, the decoded tokens, and tokens per second."""
    figures = []
    for record in records:
        run = record.run
        prefill_ns = phases.prefill_ns(run)
        if prefill_ns:
            tps = 1e9 * run.n_prompt / prefill_ns
        else:
            tps = 1e9 / (phases.decode_compute_mean_ns(run) or 0)
        figures.append((run.n_prompt, run.n_gen - 1, round(tps, 2)))
    return figures


def test_a_run_is_a_test_of_prefill_and_one_of_decode_at_its_depth(
    records: list[Record],
) -> None:
    prefill, decode = llama_bench_export.rows(records)
    assert list(prefill) == [*llama_bench_export.COLUMNS, "samples_ns", "samples_ts"]
    assert prefill["n_prompt"] == 20
    assert prefill["n_gen"] == 0
    assert prefill["n_depth"] == 0
    assert prefill["samples_ns"] == [20 * MS, 20 * MS]
    assert prefill["avg_ts"] == 1000
    assert decode["n_prompt"] == 0
    assert decode["n_gen"] == 4
    assert decode["n_depth"] == 20
    assert decode["samples_ns"] == [40 * MS, 44 * MS]  # choosing tokens is not in it
    assert decode["avg_ts"] == pytest.approx((100 + 1000 / 11) / 2)
    assert decode["stddev_ns"] == pytest.approx(2 * 2**0.5 * MS, rel=1e-6)
    assert decode["cpu_info"] == "Test CPU"
    assert decode["n_threads"] == 2
    assert decode["flash_attn"] == -1
    assert decode["model_n_params"] is None
    assert decode["build_number"] is None


def test_json_has_the_rows(records: list[Record]) -> None:
    rows = llama_bench_export.rows(records)
    assert json.loads(llama_bench_export.as_json(rows)) == rows


def test_import_of_prefill(tmp_path: Path) -> None:
    records, skipped = import_rows(tmp_path, {})
    assert not skipped
    assert [phases.prefill_ns(record.run) for record in records] == [216956890, 244102294]
    first = records[0]
    assert first.run.n_prompt == 100
    assert first.run.n_gen == 1
    assert phases.tpot_ns(first.run) is None
    assert first.machine.cpu == "AMD EPYC"
    assert first.machine.ram_bytes is None
    assert first.model.name == "SmolLM2.Q4_1"
    assert first.model.file == "SmolLM2.Q4_1.gguf"
    assert first.model.sha256 is None
    assert first.settings.seed is None
    assert first.settings.n_gpu_layers == 0
    assert first.settings.flash_attn == "auto"


def test_import_of_decode_at_a_depth_and_at_none(tmp_path: Path) -> None:
    decode = {
        "n_prompt": 0,
        "n_gen": 10,
        "samples_ns": [10**8],
    }
    (deep, flat), _ = import_rows(
        tmp_path,
        {**decode, "n_depth": 50},
        {**decode, "n_depth": 0},
    )
    assert deep.run.n_prompt == 50
    assert deep.run.n_gen == 11
    assert flat.run.n_prompt == 1  # llama-bench begins with the BOS
    assert phases.decode_compute_mean_ns(deep.run) == 10**7
    assert phases.prefill_ns(deep.run) is None


def test_what_has_no_place_is_told(tmp_path: Path) -> None:
    records, skipped = import_rows(
        tmp_path, {}, {"n_gen": 5}, {"n_depth": 7}, {"n_batch": None}, {"samples_ns": [0]}
    )
    assert len(records) == 2
    assert len(skipped) == 4
    assert "as one" in skipped[0]
    assert "test 4 skipped: it lacks or garbles n_batch" in skipped[2]


@pytest.mark.parametrize(
    "pasted",
    [
        POST,
        POST.replace("\n", "\r\n"),
        POST.encode("utf-16"),
        POST.replace("±", "Â±"),
        "".join(f"> {line}\n" for line in POST.splitlines()),
        POST.replace("| llama", "\x1b[32m| llama"),
    ],
    ids=["plain", "windows", "powershell", "mojibake", "quoted", "colours"],
)
def test_markdown_in_a_post(tmp_path: Path, pasted: str | bytes) -> None:
    records, skipped = import_text(tmp_path, pasted)
    places = [sentence.split(":")[0] for sentence in skipped]
    assert places == ["line 11 skipped", "line 13 skipped"]
    assert rates(records) == RATES_OF_POST
    assert {record.machine.llama_cpp_commit for record in records} == {"0abc123"}
    devices = {record.machine.devices[0].description for record in records}
    assert devices == {"NVIDIA GeForce RTX 1234"}
    assert [record.settings.flash_attn for record in records] == ["off", "off", "on"]
    model = records[0].model
    assert model.name == "llama 7B"
    assert model.quantization == "Q4_0"
    assert model.n_params == 6_740_000_000
    settings = records[0].settings
    assert settings.n_gpu_layers == 99
    assert settings.n_batch == 2048
    assert settings.n_threads == UNKNOWN_THREADS


def test_two_posts_have_their_own_devices_and_builds(tmp_path: Path) -> None:
    first = POST.replace("RTX 1234", "RTX 9999").replace("0abc", "9def")
    records, _ = import_text(tmp_path, first + POST)
    builds = [
        (record.machine.llama_cpp_commit, record.machine.devices[0].description)
        for record in records
    ]
    assert builds == 3 * [("9def123", "NVIDIA GeForce RTX 9999")] + 3 * [
        ("0abc123", "NVIDIA GeForce RTX 1234")
    ]


def test_other_settings_keep_results_apart(tmp_path: Path) -> None:
    head = "| model | backend | threads | mmap | test | t/s |\n| - | - | - | - | - | - |\n"
    line = "| llama 7B all F32 | CPU | 4 | {0} | tg128 | 5.{0} ± 0.0 |\n"
    records, skipped = import_text(
        tmp_path, head + line.format(0) + line.format(1), device="Test CPU"
    )
    assert not skipped
    assert [record.run.variant for record in records] == ["mmap 0", "mmap 1"]
    assert records[0].machine.cpu == "Test CPU"
    assert records[0].machine.devices == ()
    assert records[0].settings.n_threads == 4
    assert records[0].settings.n_gpu_layers == 0
    groups = comparison.groups(records)
    assert comparison.differences(groups) == {"variant": ["mmap 0", "mmap 1"]}


@pytest.mark.parametrize(
    ("pasted", "sentence"),
    [
        ("nonsense", ""),
        ("[]", ""),
        ("[1, 2]", ""),
        ("{", ""),
        ('{"a": 1}', ""),
        ("[{}]", ""),
        (" \n\n", "is empty"),
        ("What is the fastest card? a | b, or c?", "no result that the lab can read"),
        (
            "| name | price |\n| --- | --- |\n| RTX 1234 | 500 |",
            "Line 1 skipped: it is not below the head",
        ),
        (f"{HEAD}| llama 7B Q4_0 | pp512 | fast |", "Line 3 skipped: 'fast' is not a rate"),
        (f"{HEAD}| llama 7B Q4_0 | reads | 12.0 |", "Line 3 skipped: 'reads' is not a test"),
        (
            f"{HEAD}| llama 7B Q4_0 | pp512 | 0.00 |",
            "Line 3 skipped: '0.00' is not a rate above",
        ),
        (f"{HEAD}| llama 7B Q4_0 | 12.0 |", "Line 3 skipped: it has 2 columns"),
        (
            f"{HEAD}| {'a' * 10_000} | pp512 | 12.0 |",
            "Line 3 skipped: it has over 10,000 letters",
        ),
        ("[" * 100_000, "is not JSON"),
        ("run,session,model,machine\n0,a,b,c\n", "is a table that lab export wrote"),
    ],
)
def test_what_cannot_be_read_gets_its_sentence(
    tmp_path: Path,
    pasted: str,
    sentence: str,
) -> None:
    with pytest.raises(LabError, match=r"post\.txt") as problem:
        import_text(tmp_path, pasted)
    assert sentence in str(problem.value)


def test_a_results_file_is_not_imported(records: list[Record], tmp_path: Path) -> None:
    results.save(tmp_path / "mine.jsonl", records[1])
    with pytest.raises(LabError, match="is a results file of the lab already"):
        llama_bench_import.read(str(tmp_path / "mine.jsonl"))


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv"])
def test_an_export_comes_back_as_what_it_was(
    records: list[Record], tmp_path: Path, kind: str
) -> None:
    rows = llama_bench_export.rows(records)
    columns = pd.DataFrame(rows)[llama_bench_export.COLUMNS]
    content = {
        "json": llama_bench_export.as_json(rows),
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "csv": columns.to_csv(index=False),
    }
    back, skipped = import_text(tmp_path, content[kind], "Test CPU")
    samples = [
        (20, 0, 1000.0),
        (20, 0, 1000.0),
        (20, 4, 100.0),
        (20, 4, 90.91),
    ]
    means = [(20, 0, 1000.0), (20, 4, 95.24)]
    assert not skipped
    assert rates(back) == (means if kind == "csv" else samples)
    assert {record.model.n_params for record in back} == {None}


def test_a_committed_sample_comes_back(tmp_path: Path) -> None:
    sample = "results/sample-smollm2-135m-amd-epyc.jsonl"
    bench = tmp_path / "bench.json"
    assert run_lab("export", sample, "--as", "json", "-f", bench)[0] == 0
    code, out, err = run_lab("import", bench, "-o", tmp_path / "in")
    assert code == 0, err
    assert "skipped" not in err
    timed = [record for record in results.read([sample]).records if record.run.is_timed]
    back = results.read([tmp_path / "in"]).records
    assert len(back) == 2 * len(timed)
    assert f"{len(back)} samples" in out
    measured = {phases.prefill_ns(record.run) for record in timed}
    assert {phases.prefill_ns(record.run) for record in back} - {None} == measured


def test_imported_results_are_shown_as_someone_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(POST.encode())))
    code, out, err = run_lab("import", "-", "-o", tmp_path)
    assert code == 0
    assert "imported-pasted.jsonl  3 samples" in out
    assert "line 11 skipped" in err
    for command in ("show", "compare", "plot"):
        code, out, err = run_lab(command, tmp_path)
        assert code == 0
        assert "All results were imported" in " ".join((out + err).split())
    assert run_lab("report", tmp_path)[0] == 0
    page = (tmp_path / "report.html").read_text()
    assert "unknown date" in page
    assert "--n-gpu-layers 99" in page
    assert not re.search(r"--threads(-batch)? -1", page)
    rows = table.runs(results.read([tmp_path]).records)
    assert rows.n_threads.isna().all()
    assert set(rows.n_gpu_layers) == {99}


def test_the_export_command_writes_tables(records: list[Record], tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    results.save(mine, *records)
    code, out, _ = run_process("export", mine, "--as", "csv", "--table", "steps")
    assert code == 0
    assert len(pd.read_csv(io.StringIO(out))) == 4 * 7
    parquet = tmp_path / "new" / "runs.parquet"
    assert run_lab("export", mine, "--as", "parquet", "-f", parquet)[0] == 0
    assert list(pd.read_parquet(parquet).tpot_ms)[1:3] == [11, 12]
    assert "Name a file" in run_lab("export", mine, "--as", "parquet")[2]


def test_an_export_writes_to_a_link_and_does_not_replace_it(
    records: list[Record], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.jsonl"
    results.save(mine, *records)
    target = tmp_path / "target.csv"
    target.touch()
    link = tmp_path / "link.csv"
    link.symlink_to(target)
    assert run_lab("export", mine, "--as", "csv", "-f", link)[0] == 0
    assert link.is_symlink()
    assert target.read_text().startswith("row,run,session,")


def test_the_import_command_names_its_files(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps([LLAMA_BENCH]))
    folder = tmp_path / "in"
    code, out, _ = run_process("import", bench, "-o", folder)
    assert code == 0
    assert "imported-bench.jsonl  2 samples" in out
    assert "imported-bench-2.jsonl" in run_lab("import", bench, "-o", folder)[1]
    (folder / "imported-bench-2.jsonl").unlink()
    code, out, _ = run_lab("show", folder)
    assert code == 0
    assert "SmolLM2.Q4_1, AMD EPYC" in out
    assert "nan" not in out
    assert run_lab("plot", folder)[0] == 0
    assert "Error" in run_lab("import", tmp_path / "none.json")[2]


def test_a_table_of_another_settings_file_keeps_its_model(records: list[Record]) -> None:
    model = dataclasses.replace(records[1].model, n_params=1_234_567_890)
    (prefill, _) = llama_bench_export.rows([dataclasses.replace(records[1], model=model)])
    assert prefill["model_n_params"] == 1_234_567_890
