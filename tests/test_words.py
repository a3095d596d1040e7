"""The lab's terms: `lab words`, and that the heads of tables use no abbreviation without an
entry."""

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
from tests.support.command import run_lab

SAMPLES = sorted(map(str, Path("results").glob("sample-*.jsonl")))
SAMPLE = "results/sample-smollm2-135m-amd-epyc.jsonl"
UNITS = {"B", "GB", "MB", "GFLOP", "TFLOP"}
COMMON = {"CPU", "GPU", "RAM"}


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("ttft", "TTFT"),
        ("KV-Cache", "KV cache"),
        ("kv_cache", "KV cache"),
        ("streams", "stream"),
        ("!!", "disturbed"),
    ],
)
def test_terms_are_found_however_they_are_written(word: str, name: str) -> None:
    assert wording.term(word).name == name


@pytest.mark.parametrize(
    ("word", "nearest"),
    [
        ("tfft", "TTFT"),
        ("accept ance", "acceptance"),
        ("sequense", "sequence"),
    ],
)
def test_of_an_unknown_term_the_nearest_is_named(word: str, nearest: str) -> None:
    with pytest.raises(LabError, match=f"The nearest is {nearest}"):
        wording.term(word)


WRITTEN_ELSEWHERE = {
    "flash attention": ("fa", "flash-attn", "flash_attn"),
    "offload": ("ngl", "n-gpu-layers", "n_gpu_layers", "gpu layers"),
    "KV cache": ("ctk", "ctv", "kv", "cache-type-k", "type_v"),
    "prefill": ("pp", "pp512", "prompt processing", "prompt eval time"),
    "decode compute": ("tg", "tg128"),
    "decode": ("eval time", "token generation", "t/s", "tok/s", "tps"),
    "context": ("n_ctx", "ctx", "ctx-size", "num_ctx", "context window"),
    "n_threads": ("t", "threads", "threads-batch"),
    "draft": ("speculation", "speculative decoding", "md"),
    "mixture of experts": ("moe", "experts", "n_cpu_moe", "ncmoe"),
    "interval": ("95 % interval", "confidence interval"),
    "sequence": ("np", "slots", "parallel"),
    "broken cache": ("cache miss", "prefix cache"),
    "concurrency": ("users", "concurrent"),
}
"""Words of llama.cpp, its servers and their users."""


@pytest.mark.parametrize("name", WRITTEN_ELSEWHERE)
def test_words_of_other_programs_find_their_term(name: str) -> None:
    for word in WRITTEN_ELSEWHERE[name]:
        assert wording.term(word).name == name


def test_every_term_is_one_or_two_sentences_and_has_one_entry() -> None:
    spellings = []
    for term in wording.terms():
        spellings += [wording.plain(spelling) for spelling in (term.name, *term.also)]
        assert 10 < len(term.meaning) < 280, term.name
        assert not term.meaning.endswith("."), term.name
    assert len(spellings) == len(set(spellings))
    assert len(wording.terms()) >= 45


def test_where_a_term_is_shown_is_a_command() -> None:
    places: set[str] = set()
    for term in wording.terms():
        places |= {place for place in term.shown.split(", ") if place.startswith("lab ")}
    assert len(places) > 10
    for place in places:
        arguments = place.split()[1:]
        options = [argument for argument in arguments if argument.startswith("-")]
        names = [argument for argument in arguments if not argument.startswith("-")]
        code, out, _ = run_lab(*names, "--help")
        assert code == 0, place
        for option in options:
            assert option in out, place


def test_the_command_shows_all_terms() -> None:
    code, out, _ = run_lab("words")
    assert code == 0
    for term in wording.terms():
        assert term.name in out


def test_the_command_shows_one_term() -> None:
    code, out, _ = run_lab("words", "ttft")
    assert code == 0
    assert out.startswith("TTFT")
    assert "lab measure" in out
    assert "acceptance" not in out


def test_the_command_prints_json() -> None:
    _, of_all, _ = run_lab("words", "--json")
    _, of_term, _ = run_lab("words", "KV", "cache", "--json")
    assert len(json.loads(of_all)) == len(wording.terms())
    (term,) = json.loads(of_term)
    assert term["name"] == "KV cache"


def test_the_command_fails_for_an_unknown_term() -> None:
    code, _, err = run_lab("words", "throughputt")
    assert code == 1
    assert "The nearest is" in err


def test_every_abbreviation_in_the_head_of_a_table_has_an_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headings: set[str] = set()
    add_row = console.Grid.add_row

    def keep_headings(grid: console.Grid, *cells: Any) -> None:
        headings.update(column.heading for column in grid.columns)
        add_row(grid, *cells)

    monkeypatch.setattr(console.Grid, "add_row", keep_headings)
    for sample in SAMPLES:
        contents = lab.read([sample])
        sections = kinds.sections(contents, Context(contents.ceilings))
        kinds.print_results(contents, console.console(), sections)
    run_lab("explain", "--no-plot", SAMPLE)
    run_lab("compare", *SAMPLES[:2])
    run_lab("predict", "-m", "llama-3.2-3b", "-d", "m4")
    run_lab("predict", "-m", "llama-3.2-3b", "-d", "laptop")

    abbreviations = set(re.findall(r"\b[A-Z][A-Z0-9]+\b", " ".join(headings))) - UNITS - COMMON
    assert {"TTFT", "TPOT", "E2E"} <= abbreviations
    explained = set(" ".join(term.name for term in wording.terms()).split())
    assert abbreviations <= explained
