"""Published measurements: how rows are cleaned, and what is learned from them."""

from pathlib import Path

import pytest

from lab.core.record import DECODE, PREFILL
from lab.why import datasheet, published
from tests.bench import clean_published

RAW = {
    "source": "localscore",
    "url": "https://example.com",
    "collected": "2026-04-17",
    "device": "rtx-3060-12gb",
    "model": "meta-llama/Llama-3.1-8B",
    "quantization": "q4_k_m",
    "test": "tg",
    "tps": "57.5",
    "as_published": "LocalScore · NVIDIA GeForce RTX 3060 · Q4_K - Medium",
}
BOARD = {"source": "board", "backend": "CUDA", "model": "llama-2-7b", "quantization": "Q4_0", "test": "pp512"}


def cleaned(**changes: str) -> dict[str, str]:
    raw = dict.fromkeys((*clean_published.COLUMNS, "test"), "") | RAW | changes
    return clean_published.cleaned(raw)


@pytest.mark.parametrize(
    ("changes", "device", "share", "backend"),
    [
        ({}, "rtx-3060", "", "CUDA"),
        ({"as_published": "LocalScore · NVIDIA GeForce RTX 3060 Laptop GPU · Q4_K"}, "rtx-3060-laptop", "", "CUDA"),
        ({"as_published": "LocalScore · Apple M1 Max 8P+2E+24GPU · Q4_K"}, "m1-max", "0.75", "Metal"),
        ({"as_published": "LocalScore · Apple M4 Max 10P+4E+32GPU · Q4_K"}, "m4-max-32core", "", "Metal"),
        ({"as_published": "LocalScore · AMD  Radeon RX 7800 XT · Q4_K"}, "rx-7800-xt", "", "tinyBLAS"),
        ({"as_published": "x · Ryzen 9 7900X (Nvidia 4090)", "source": "g"}, "rtx-4090", "", "CUDA"),
        ({"as_published": "x · M1 Ultra (48 GPU Core) 64GB", "source": "g"}, "m1-ultra", "0.75", "Metal"),
        ({"as_published": "LLaMA 7B; device=rtx-2060s-8gb", "device": "rtx-2060s-8gb"}, "rtx-2060-super", "", "CUDA"),
    ],
)
def test_the_published_name_says_which_device_it_was(
    changes: dict[str, str], device: str, share: str, backend: str
) -> None:
    row = cleaned(**changes)
    assert (row["device"], row["gpu_share"], row["backend"], row["marks"]) == (device, share, backend, "")


@pytest.mark.parametrize(
    ("changes", "marks"),
    [
        ({"tps": "90"}, "above-bandwidth"),
        ({"as_published": "LocalScore · NVIDIA Foo 9 · Q4_K"}, "unknown-device"),
        ({"as_published": "LocalScore · NVIDIA L40S-8Q · Q4_K"}, "unclear-device"),
        ({"model": "nobody/Foo-8B"}, "unknown-model"),
        ({"model": "Qwen/Qwen2.5-14B", "as_published": "LocalScore · NVIDIA GeForce RTX 3070 · Q4_K"}, "does-not-fit"),
        ({"as_published": "x · Pi 5 - 8GB (Nvidia RTX 3060)", "source": "g"}, "slow-host"),
        ({**BOARD, "tps": "4000", "as_published": "RTX 3060"}, "above-peak"),
        ({**BOARD, "tps": "40", "as_published": "Raspberry Pi 5"}, "no-peak slow-host"),
        ({"source": "somebody with vLLM"}, "other-runtime"),
    ],
)
def test_a_row_that_breaks_a_rule_is_kept_and_marked(changes: dict[str, str], marks: str) -> None:
    row = cleaned(**changes)
    assert row["marks"] == marks or row["marks"].split()[0] == marks
    assert set(row["marks"].split()) <= set(clean_published.RULES)


def test_the_file_is_what_the_rules_make_of_it() -> None:
    path = Path(__file__).parent.parent / "models" / "published.csv"
    assert path.stat().st_size < 200_000
    rows = published.rows()
    assert len(rows) == 860 and sum(not row.marks for row in rows) > 800
    for row in rows:
        assert set(published.marks_of(row)) <= {
            *row.marks,
            *(["unknown-device"] if "unclear-device" in row.marks else []),
        }
        assert row.marks or datasheet.find_device(row.device).name == row.device
        assert row.phase in (DECODE, PREFILL) and row.tps > 0
