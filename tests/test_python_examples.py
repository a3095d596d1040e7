"""Every example of a docstring and of docs/python.md runs.

Tables and pictures are made of this repository's samples. What measures for minutes gets its
arguments through the same door as ever, and returns a sample instead.
"""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lab
from lab.app import entry

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PLAIN = RESULTS / "sample-smollm2-135m-amd-epyc.jsonl"
OTHER = RESULTS / "sample-smollm2-135m-intel-xeon.jsonl"
SAMPLES = {
    "measure": PLAIN,
    "sweep": RESULTS / "sample-sweep-smollm2-135m-amd-epyc.jsonl",
    "ab": PLAIN,
    "batch": RESULTS / "sample-batch-smollm2-135m-amd-epyc.jsonl",
    "stall": RESULTS / "sample-stall-smollm2-135m-amd-epyc.jsonl",
    "turns": RESULTS / "sample-turns-smollm2-135m-amd-epyc.jsonl",
    "quant": RESULTS / "sample-quant-smollm2-135m-amd-epyc.jsonl",
    "choose": ROOT / "docs/choose-amd-epyc.jsonl",
    "speculate": PLAIN,
}
OTHERS: dict[str, Any] = {
    "attention": SimpleNamespace(looks=SimpleNamespace(changes=())),
    "trace": SimpleNamespace(decode=SimpleNamespace(parts=())),
    "start": [SimpleNamespace(stages={}, token_s=None)],
    "claims": SimpleNamespace(rows=[], records=[], summary=""),
    "tune": SimpleNamespace(settings={"threads": 2}),
    "why": SimpleNamespace(parts=()),
    "settings": {"threads": 2},
    "bisect": None,
    "show_tuned": None,
    "show_bisected": None,
    "plot_bisected": None,
    "plot_tuned": None,
}


def instead_of(name: str, answer: Callable[[], Any]) -> Callable[..., Any]:
    """A public function that takes the arguments of the real one and returns a sample."""
    function = getattr(import_module(lab.PUBLIC[name]), name)

    @functools.wraps(function)
    def stand_in(*_: Any, **__: Any) -> Any:
        return answer()

    return entry.public(name, stand_in)


@pytest.fixture
def sampled(undrawn: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The names that examples use, in a folder with the files that they name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    for name in ("mine.jsonl", "results/mine.jsonl"):
        shutil.copy(PLAIN, tmp_path / name)
    for name in ("yours.jsonl", "results/yours.jsonl"):
        shutil.copy(OTHER, tmp_path / name)
    for name, path in SAMPLES.items():
        read = functools.partial(lab.read, [path, OTHER] if name == "ab" else path)
        monkeypatch.setitem(vars(lab), name, instead_of(name, read))
    for name in OTHERS:
        monkeypatch.setitem(
            vars(lab), name, instead_of(name, functools.partial(OTHERS.get, name))
        )
    plain = lab.read(PLAIN)
    best = instead_of("ceilings", lambda: plain.ceilings[0])
    monkeypatch.setitem(vars(lab), "ceilings", best)
    return {"lab": lab, "records": plain, "lines": lab.read(SAMPLES["quant"])}


def examples(name: str) -> str:
    """The indented lines of a docstring that call a public function, and those around them."""
    text = inspect.getdoc(getattr(lab, name)) or ""
    blocks = re.findall(r"(?m)^(?:    .*\n?)+", text)
    return "\n".join(textwrap.dedent(block) for block in blocks if "lab." in block)


@pytest.mark.parametrize("name", sorted(lab.PUBLIC))
def test_the_examples_of_a_docstring_run(name: str, sampled: dict[str, Any]) -> None:
    code = examples(name)
    assert f"lab.{name}(" in code
    exec(compile(code, f"the docstring of lab.{name}", "exec"), sampled)


@pytest.mark.parametrize("name", sorted(lab.PUBLIC))
def test_a_docstring_names_nothing_of_the_inside(name: str) -> None:
    text = inspect.getdoc(getattr(lab, name)) or ""
    inner = re.findall(
        r"\b[a-z_]+/[a-z_/]+\.(?:py|toml)\b|\blesson\.|\b[A-Z]+_[A-Z_]+\b", text
    )
    assert inner == [], name


def test_the_examples_of_the_page_run(sampled: dict[str, Any]) -> None:
    page = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/python.md", "exec"), sampled)
