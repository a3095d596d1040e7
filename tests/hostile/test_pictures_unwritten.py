"""A picture or a page that cannot be written takes no answer with it."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.core import results
from lab.errors import LabError
from tests.support.command import run_lab

SAMPLES = Path("results").absolute()
EPYC = "sample-smollm2-135m-amd-epyc.jsonl"
XEON = "sample-smollm2-135m-intel-xeon.jsonl"


def a_file(folder: Path) -> Path:
    """An output folder that is a file."""
    path = folder / "output"
    path.write_text("x")
    return path


def below_a_file(folder: Path) -> Path:
    """An output folder below a file."""
    return a_file(folder) / "more"


def too_long(folder: Path) -> Path:
    """A folder whose name no system has."""
    return folder / ("x" * 300)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with two results files, and the ceilings of the first."""
    for name, sample in {"a.jsonl": EPYC, "b.jsonl": XEON}.items():
        shutil.copy(SAMPLES / sample, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


ANSWERS = {
    "compare a.jsonl b.jsonl": "next     a page to share",
    "explain a.jsonl": "prefill",
    "why a.jsonl b.jsonl --budget 0": "not explained",
}


@functools.cache
def printed_without_picture(line: str) -> str:
    undrawn = [] if line.startswith("compare") else ["--no-plot"]
    return run_lab(*line.split(), *undrawn)[1]


@pytest.mark.parametrize("line", ANSWERS)
@pytest.mark.parametrize("make", [a_file, below_a_file, too_long])
def test_the_answer_is_printed_and_the_picture_is_a_note(
    line: str, make: Callable[[Path], Path], here: Path
) -> None:
    out = make(here)
    status, text, err = run_lab(*line.split(), "--out", out)
    assert status == 0, err
    assert ANSWERS[line] in text
    assert "plot     " not in text
    assert "Note: The plot " in err
    assert "The answer is complete without it." in err
    assert text == printed_without_picture(line)


@pytest.mark.parametrize("line", ANSWERS)
def test_the_answer_as_json_is_whole_without_its_picture(line: str, here: Path) -> None:
    status, text, err = run_lab(*line.split(), "--json", "--out", a_file(here))
    assert status == 0, err
    document = json.loads(text)
    (first, *_) = document if isinstance(document, list) else [document]
    assert first["plots"] == []
    assert "Note: The plot " in err


def test_a_command_that_only_draws_fails(here: Path) -> None:
    status, text, err = run_lab("plot", "a.jsonl", "--out", a_file(here))
    assert status == 1
    assert not text
    assert err.startswith("Error: The plot ")
    assert "Free some space" not in err


def test_measured_results_are_named_before_anything_is_drawn(
    here: Path, shallow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = results.write_whole

    def full(path: Path, data: bytes, what: str) -> None:
        if path.suffix in (".png", ".html"):
            path = Path("/dev/full")
        written(path, data, what)

    monkeypatch.setattr(results, "write_whole", full)
    line = f"measure -m {shallow} -p 5 -n 2 -r 1 -t 1 --report --out o"
    status, text, err = run_lab(*line.split())
    assert status == 0
    (path,) = Path("o").glob("*.jsonl")
    assert f"results  {path}" in text
    assert "Note: The plot /dev/full cannot be written: No space left" in err
    assert "Note: The report /dev/full cannot be written: No space left" in err
    assert "Free some space" in err
    status, text, err = run_lab(*line.split(), "--json")
    assert status == 0
    document = json.loads(text)
    assert document["rows"]
    assert document["plots"] == []
    assert document["report"] is None


def test_a_hint_fits_its_reason(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="Free some space"):
        results.write_whole(Path("/dev/full"), b"x", "The file")
    with pytest.raises(LabError, match="check the permissions"):
        results.write_whole(a_file(tmp_path) / "x", b"x", "The file")
