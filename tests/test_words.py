"""The lab's terms: `lab words`, and that the heads of tables use no abbreviation without an entry."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.app import kinds
from lab.errors import LabError
from lab.show import console, wording
from lab.show.section import Context
from tests.conftest import run_lab

SAMPLES = sorted(map(str, Path("results").glob("sample-*.jsonl")))
UNITS = {"B", "GB", "MB", "GFLOP", "TFLOP"}
COMMON = {"CPU", "GPU", "RAM"}


def test_terms_are_found_however_they_are_written() -> None:
    assert wording.term("ttft").name == "TTFT"
    assert wording.term("KV-Cache").name == wording.term("kv_cache").name == "KV cache"
    assert wording.term("streams").name == "stream" and wording.term("!!").name == "disturbed"
    for word, nearest in (
        ("tfft", "TTFT"),
        ("accept ance", "acceptance"),
        ("sequense", "sequence"),
    ):
        with pytest.raises(LabError, match=f"The nearest is {nearest}"):
            wording.term(word)


def test_every_term_is_one_or_two_sentences_and_has_one_entry() -> None:
    names = [wording.plain(name) for term in wording.terms() for name in (term.name, *term.also)]
    assert len(names) == len(set(names)) and len(wording.terms()) >= 45
    for term in wording.terms():
        assert 10 < len(term.meaning) < 280 and not term.meaning.endswith("."), term.name


def test_where_a_term_is_shown_is_a_command() -> None:
    shown = {
        place
        for term in wording.terms()
        for place in term.shown.split(", ")
        if place.startswith("lab ")
    }
    assert len(shown) > 10
    for place in shown:
        words = place.split()[1:]
        status, out, _ = run_lab(*(word for word in words if not word.startswith("-")), "--help")
        assert status == 0 and all(word in out for word in words if word.startswith("-")), place


def test_the_command_shows_all_one_or_json() -> None:
    status, out, _ = run_lab("words")
    assert status == 0 and all(term.name in out for term in wording.terms())
    status, out, _ = run_lab("words", "ttft")
    assert (
        status == 0 and out.startswith("TTFT") and "lab measure" in out and "acceptance" not in out
    )
    assert [term["name"] for term in json.loads(run_lab("words", "KV", "cache", "--json")[1])] == [
        "KV cache"
    ]
    assert len(json.loads(run_lab("words", "--json")[1])) == len(wording.terms())
    status, _, err = run_lab("words", "throughputt")
    assert status == 1 and "The nearest is" in err


def test_every_abbreviation_in_the_head_of_a_table_has_an_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heads: set[str] = set()
    add_row = console.Grid.add_row

    def watched(grid: console.Grid, *cells: Any) -> None:
        heads.update(grid.headings)
        add_row(grid, *cells)

    monkeypatch.setattr(console.Grid, "add_row", watched)
    for sample in SAMPLES:
        reading = lab.read([sample])
        sections = kinds.sections(reading.all_lines, Context(reading.ceilings))
        kinds.print_results(reading.all_lines, console.console(), sections)
    run_lab(
        "explain", "--no-plot", next(path for path in SAMPLES if "sample-smollm2-135m-amd" in path)
    )
    run_lab("compare", "--no-plot", *SAMPLES[:2])
    run_lab("predict", "-m", "llama-3.2-3b", "-d", "m4")
    run_lab("predict", "-m", "llama-3.2-3b", "-d", "laptop")
    found = (
        {word for head in heads for word in re.findall(r"\b[A-Z][A-Z0-9]+\b", head)}
        - UNITS
        - COMMON
    )
    assert {"TTFT", "TPOT", "E2E"} <= found
    terms = {term.name for term in wording.terms()}
    assert all(word in terms or any(word in name.split() for name in terms) for word in found), (
        found - terms
    )
