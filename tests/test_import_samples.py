"""llama-bench's samples: kept apart by setup and judged, what older builds omit is unknown; and
files that are packed, or of something else."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.core import files, results
from lab.errors import LabError
from lab.formats import llama_bench_import
from lab.runner import disturbances
from tests.support.command import run_lab

ROW: dict[str, Any] = {
    "build_commit": "1a2b3c4d",
    "build_number": 6000,
    "cpu_info": "A CPU of 16 cores",
    "gpu_info": "A GPU",
    "backends": "CUDA",
    "model_filename": "models/some-7b.Q4_0.gguf",
    "model_type": "llama 7B Q4_0",
    "model_size": 3_825_065_984,
    "model_n_params": 6_738_415_616,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 16,
    "type_k": "f16",
    "type_v": "f16",
    "n_gpu_layers": 99,
    "no_kv_offload": False,
    "flash_attn": True,
    "n_prompt": 0,
    "n_gen": 128,
    "n_depth": 0,
    "test_time": "2026-11-01T10:00:00Z",
}


def row(rates: Sequence[float], **changes: Any) -> dict[str, Any]:
    """A test whose samples have these tokens/s."""
    test = {**ROW, **changes}
    n_tokens = test["n_prompt"] + test["n_gen"]
    return {
        **test,
        "samples_ts": list(rates),
        "samples_ns": [round(1e9 * n_tokens / rate) for rate in rates],
        "avg_ts": sum(rates) / len(rates),
    }


FAST = (99.8, 100.0, 100.4, 99.9, 100.1)
SLOW = (31.1, 31.0, 30.9, 31.06, 31.2)


def imported(folder: Path, *rows: dict[str, Any]) -> list[Any]:
    path = folder / "bench.json"
    path.write_text(json.dumps(rows))
    return llama_bench_import.read(str(path))[0]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"no_kv_offload": True}, "no_kv_offload True"),
        ({"use_mmap": False}, "use_mmap False"),
        ({"split_mode": "row"}, "split_mode row"),
        ({"tensor_split": "1.00/3.00"}, "tensor_split 1.00/3.00"),
        ({"n_cpu_moe": 12}, "n_cpu_moe 12"),
        ({"backends": "Vulkan"}, "backends Vulkan"),
        ({"poll": 0}, "poll 0"),
        ({"test_time": "2026-11-02T10:00:00Z"}, "test 2"),
        ({}, "test 2"),
    ],
)
def test_tests_of_other_settings_are_not_pooled(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    records = imported(tmp_path, row(FAST), row(SLOW, **changes))
    variants = [record.run.variant or "" for record in records]
    assert name in variants[-1]
    assert name not in variants[0]
    run_lab("import", tmp_path / "bench.json", "--out", tmp_path)
    _, text, _ = run_lab("show", tmp_path / "imported-bench.jsonl", "--details")
    assert "10 runs" not in text


def test_tests_that_differ_in_a_recorded_setting_need_no_other_name(tmp_path: Path) -> None:
    rows = [
        row(FAST),
        row(FAST, flash_attn=False),
        row(FAST, n_ubatch=128),
        row(FAST, n_depth=4),
    ]
    assert {record.run.variant for record in imported(tmp_path, *rows)} == {None}


OLDEST = ("type_k", "type_v", "n_gpu_layers", "flash_attn", "n_ubatch", "gpu_info")


@pytest.mark.parametrize(
    "missing",
    [
        ("type_k",),
        ("type_k", "type_v"),
        ("n_gpu_layers",),
        ("flash_attn",),
        ("n_ubatch", "n_depth"),
        OLDEST,
    ],
)
def test_what_older_builds_omit_is_unknown(missing: Sequence[str], tmp_path: Path) -> None:
    old = row(FAST)
    for name in missing:
        del old[name]
    (first, *_) = imported(tmp_path, old)
    settings = first.settings
    assert (settings.type_k is None) == ("type_k" in missing)
    assert (settings.type_v is None) == ("type_v" in missing)
    assert (settings.flash_attn is None) == ("flash_attn" in missing)


def test_what_is_unknown_is_never_shown_as_a_value(tmp_path: Path) -> None:
    old = row(FAST)
    for name in OLDEST:
        del old[name]
    (first, *_) = imported(tmp_path, old)
    path = tmp_path / "bench.json"
    assert run_lab("import", path, "--out", tmp_path)[0] == 0
    saved = tmp_path / "imported-bench.jsonl"
    assert results.read([saved]).records[0].settings == first.settings
    page = tmp_path / "page.html"
    for arguments in (
        ("show", saved, "--details"),
        ("show", saved, "--json"),
        ("plot", saved),
        ("compare", saved, "results/sample-smollm2-135m-amd-epyc.jsonl"),
        ("export", saved, "--as", "json"),
        ("report", saved, "--file", page),
        ("why", saved, "35 tokens/s", "--budget", "0", "--no-plot"),
    ):
        status, text, err = run_lab(*arguments)
        assert status == 0, (arguments, err)
        assert "unknown --" not in text
        assert "None" not in text, arguments
    assert "--flash-attn" not in page.read_text(encoding="utf-8").partition("<script")[0]


NOTHING = [
    FAST,
    SLOW,
    (100.0, 101.0, 99.0),
    (50.0, 52.0, 49.0, 51.5, 50.5),
    (10.0, 10.6, 10.3, 10.1, 10.5),
    (1000.0, 1040.0, 980.0, 1010.0, 1030.0, 990.0),
    (5.0,),
    (5.0, 9.0),
    (7.0, 7.0, 7.0, 7.0, 7.0),
    (100.0, 100.5, 100.2, 100.4, 100.1, 100.6, 100.3),
]


@pytest.mark.parametrize("rates", NOTHING)
def test_ordinary_samples_are_not_doubted(rates: Sequence[float]) -> None:
    assert disturbances.of_unwatched([1 / rate for rate in rates]) == []


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ((52.0, 100.1, 99.8, 100.2, 99.9), "the first run took 1.92x as long as the others"),
        ((10.0, 80.0, 81.0, 80.5), "the first run took 8.05x"),
        ((100.0, 95.0, 90.0, 86.0, 82.0), "the runs became slower"),
        ((82.0, 86.0, 90.0, 95.0, 100.0), "the runs became faster"),
        ((100.0, 60.0, 101.0, 61.0, 99.0, 60.5), "of two kinds, 3 fast and 3 slow"),
        ((100.0, 60.0, 61.0, 99.0, 100.5), "of two kinds, 3 fast and 2 slow"),
    ],
)
def test_odd_samples_are_named(rates: Sequence[float], says: str, tmp_path: Path) -> None:
    imported(tmp_path, row(rates))
    run_lab("import", tmp_path / "bench.json", "--out", tmp_path)
    _, text, _ = run_lab("show", tmp_path / "imported-bench.jsonl")
    assert says in " ".join(text.split())


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "md"])
def test_llama_benchs_output_is_to_be_imported(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"bench.{ending}"
    text = {
        "json": json.dumps([row(FAST)], indent=2),
        "jsonl": "".join(json.dumps(row(rates)) + "\n" for rates in (FAST, SLOW)),
        "csv": "build_commit,n_prompt,n_gen,avg_ts\n1a2b3c4d,512,0,100.0\n",
        "md": "| model | test | t/s |\n| --- | --- | --- |\n| a | pp512 | 9 |\n",
    }
    path.write_text(text[ending])
    for command in ("show", "plot", "compare", "report", "explain"):
        status, _, err = run_lab(command, path)
        assert status == 1
        assert f"Import it first: lab import {path}" in err


def test_imports_are_not_explained_and_not_advised_to_be(tmp_path: Path) -> None:
    imported(tmp_path, row(FAST))
    run_lab("import", tmp_path / "bench.json", "--out", tmp_path)
    saved = tmp_path / "imported-bench.jsonl"
    _, text, _ = run_lab("show", saved)
    assert "lab explain" not in text
    assert "after 1 token takes" in text
    status, _, err = run_lab("explain", saved)
    assert status == 1
    assert "imported from llama-bench" in err


SAMPLE = Path("results/sample-smollm2-135m-amd-epyc.jsonl")


def test_packed_results_are_read(tmp_path: Path) -> None:
    data = SAMPLE.read_bytes()
    half = data.index(b"\n", len(data) // 2) + 1
    packed = tmp_path / "a.jsonl.gz"
    for content in (
        gzip.compress(data),
        gzip.compress(data[:half]) + gzip.compress(data[half:]),
        gzip.compress(data) + bytes(512),
    ):
        packed.write_bytes(content)
        assert results.read([packed]) == results.read([SAMPLE])
    bench = tmp_path / "bench.json.gz"
    bench.write_bytes(gzip.compress(json.dumps([row(FAST)]).encode()))
    assert len(llama_bench_import.read(str(bench))[0]) == len(FAST)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"\xfd7zXZ\0" + bytes(100), "xz"),
        (b"\x28\xb5\x2f\xfd" + bytes(100), "zstd"),
        (b"BZh9" + bytes(100), "bzip2"),
        (b"GGUF" + bytes(100), "a model"),
        (b"SQLite format 3\0", "SQLite"),
        (b"\x89PNG\r\n", "a picture"),
        (gzip.compress(b"x" * 1000, mtime=0)[:20], "truncated"),
        (b"\x1f\x8b" + b"x" * 100, "damaged"),
    ],
)
def test_a_file_of_something_else_is_named(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    for read in (lambda: results.read([path]), lambda: files.read(path, "The file", "")):
        with pytest.raises(LabError, match=says):
            read()


def test_a_small_packed_file_cannot_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(bytes(files.MOST_BYTES + 1)))
    with pytest.raises(LabError, match="when unpacked"):
        results.read([path])
