"""Printed commands of inputs that were not measured here: hub files, files elsewhere, imports,
sessions that went on without a part of llama.cpp."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from lab.app import command_words
from lab.core import results
from lab.core.record import Record
from lab.models import catalog
from lab.runner import as_options
from tests.support.command import run_lab
from tests.support.printed import commands_in, problem_of

SAMPLE = Path("results/sample-smollm2-135m-amd-epyc.jsonl")


def changed(record: Record, source: str, **model: str | None) -> Record:
    """A record of another model, whose command named its file."""
    fields = {"name": "model-Q4_0", "source": source, "file": "model-Q4_0.gguf", **model}
    return dataclasses.replace(
        record,
        model=dataclasses.replace(record.model, **fields),  # type: ignore[arg-type]
        command=("measure", "--model", "model-Q4_0.gguf", "--repeat", "3"),
    )


MODELS: dict[str, tuple[dict[str, str | None], str]] = {
    "hub": ({"repo": "org/repo", "revision": "abc"}, "hf:org/repo/model-Q4_0.gguf@abc"),
    "hub without a revision": ({"repo": "org/repo"}, "hf:org/repo/model-Q4_0.gguf"),
    "hub without a repo": ({"repo": None}, "FOLDER/model-Q4_0.gguf"),
    "file": ({}, "FOLDER/model-Q4_0.gguf"),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_command_about_a_model_names_what_can_be_found(
    name: str, tmp_path: Path
) -> None:
    fields, spec = MODELS[name]
    source = name.partition(" ")[0]
    records = [
        changed(record, source, **{"repo": None, "revision": None, **fields})
        for record in results.read([SAMPLE]).records
    ]
    assert catalog.spec_of(records[0].model) == spec
    assert ("--model", spec) in as_options.options(records[0])
    path = tmp_path / "a.jsonl"
    results.save(path, *records)
    texts = []
    for words in (("show", path), ("explain", path), ("compare", path, SAMPLE)):
        _, out, err = run_lab(*words)
        texts.append(out + err)
    text = "\n".join(texts)
    assert "None" not in text
    assert "hf:None" not in text
    assert "-m model-Q4_0.gguf" not in text
    for printed in commands_in(text):
        assert not problem_of(printed), printed.text


def test_a_file_that_is_here_is_named_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (record, *_) = results.read([SAMPLE]).records
    of_file = changed(record, "file")
    monkeypatch.chdir(tmp_path)
    assert (
        command_words.line([of_file])
        == "lab measure --model FOLDER/model-Q4_0.gguf --repeat 3"
    )
    shutil.copy(__file__, "model-Q4_0.gguf")
    assert command_words.line([of_file]) == "lab measure --model model-Q4_0.gguf --repeat 3"
    assert catalog.spec_of(of_file.model) == "model-Q4_0.gguf"


@pytest.mark.parametrize(
    ("source", "option"),
    [
        ("file", " --model FOLDER/model-Q4_0.gguf"),
        ("embedded", ""),
    ],
)
def test_missing_ceilings_are_those_of_the_measured_model(
    source: str, option: str, tmp_path: Path
) -> None:
    records = list(results.read([SAMPLE]).records)
    if source != "embedded":
        records = [changed(record, source) for record in records]
    path = tmp_path / "a.jsonl"
    results.save(path, *records)
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    status, _, err = run_lab("explain", path, "--ceilings", nothing)
    assert status == 1
    assert err.splitlines()[1].endswith(f"settings of the runs: lab ceilings{option}")


def test_a_page_without_ceilings_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    results.save(path, *results.read([SAMPLE]).records)  # the sample has ceilings beside runs
    page = tmp_path / "a.html"
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    status, _, err = run_lab("report", path, "--file", page, "--ceilings", nothing)
    assert status == 0, err
    text = page.read_text(encoding="utf-8")
    assert "has no sliders" in text
    assert "lab ceilings" in text


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://[zz]:1/v1", "http://a:b", "http://", "://"]
)
def test_an_address_that_is_none_is_refused_with_a_sentence(url: str) -> None:
    status, _, err = run_lab("measure", "--url", url)
    assert status == 1
    assert "not a valid server address" in err
