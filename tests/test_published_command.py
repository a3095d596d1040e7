"""lab published: which rows it lists, how it pairs them, and that it says whose measurements they are."""

import dataclasses
import json
from pathlib import Path

import pytest

from lab.core.record import DECODE, PREFILL
from lab.errors import LabError
from lab.show import text_published
from lab.why import datasheet, published
from lab.why.published import Row
from tests.conftest import run_lab

ROW = Row(
    "board", "rtx-4090", 1.0, "CUDA", "llama-2-7b", "Q4_0", PREFILL, 512, True, 9000.0, "2026-01-02", (), "https://a"
)
DECODED = dataclasses.replace(ROW, phase=DECODE, n_prompt=64, tps=150.0)


def test_every_row_of_the_file_is_in_one_entry() -> None:
    rows = published.rows()
    listed = [row for entry in text_published.entries(rows) for row in entry.values()]
    assert sorted(map(repr, listed)) == sorted(map(repr, rows))
    assert all(set(entry) <= {PREFILL, DECODE} for entry in text_published.entries(rows))


def test_prefill_and_decode_of_one_entry_are_a_line_and_those_of_two_are_not() -> None:
    other = dataclasses.replace(DECODED, flash_attn=False, tps=140.0, marks=("above-bandwidth",))
    assert text_published.entries([ROW, DECODED, other]) == [{PREFILL: ROW, DECODE: DECODED}, {DECODE: other}]
    section = text_published.section([ROW, DECODED, other])
    first, second = ([cell.text for cell in line] for line in section.lines)
    assert first == ["rtx-4090", "llama-2-7b Q4_0", "512", "9,000", "150", "1", "CUDA", "on", ""]
    assert second == ["rtx-4090", "llama-2-7b Q4_0", "-", "-", "140", "1", "CUDA", "off", "above-bandwidth"]
    assert section.about == "measured by other people, not by the lab"
    assert section.sentences[1] == "Source 1: board, 2026-01-02, https://a"


@pytest.mark.parametrize("words", ["rtx-4090", "RTX 4090", "rtx4090", "geforce", "m1,rtx-4090"])
def test_devices_by_name_and_kind(words: str) -> None:
    other = dataclasses.replace(ROW, device="rx-7600")
    assert text_published.chosen([ROW, other], device=words) == [ROW]


def test_models_sources_and_names_that_are_not_there() -> None:
    other = dataclasses.replace(ROW, model="llama-3.1-8b", source="page")
    assert text_published.chosen([ROW, other], model="3.1", source="PAGE", device=None) == [other]
    assert text_published.chosen([ROW, other], model="q4_0") == [ROW, other]
    for name, words in {"device": "rtx-4091", "model": "llama-4", "source": "boards"}.items():
        with pytest.raises(LabError, match=f"no published rows of the {name} '{words}'") as problem:
            text_published.chosen([ROW, other], **{name: words})
        assert problem.value.hint.startswith("There are: ")


def test_commands(tmp_path: Path) -> None:
    code, out, _ = run_lab("published")
    assert code == 0 and "measured by other people, not by the lab" in out and "lab published --device" in out
    code, out, _ = run_lab("published", "-d", "apple", "--json")
    devices = {row["device"] for row in json.loads(out)["rows"]}
    assert code == 0 and devices and devices <= set(datasheet.names_of("apple"))
    code, out, _ = run_lab("published", "-m", "llama-2-7b", "--source", "cuda")
    assert code == 0 and "Source 1: llama.cpp CUDA Scoreboard" in out
    assert "There are: " in run_lab("published", "-d", "no such device")[2]
    file = Path(__file__).parent.parent / "models" / "published.csv"
    code, out, _ = run_lab("show", file)
    assert code == 0 and f"{len(published.rows())} published measurements" in out
    (tmp_path / "prices.csv").write_text("device,price\nrtx-4090,1599\n")
    assert "is not a table of published measurements" in run_lab("show", tmp_path / "prices.csv")[2]
