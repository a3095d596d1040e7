"""Commands that the lab prints for pasting: no value of a record, a server or an option runs anything in a shell."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from lab.app import kinds
from lab.core import results, shell
from lab.core.payloads import Tuning
from lab.core.record import Record
from lab.core.shape import FEED_FORWARD, Heads, Matrix
from lab.errors import LabError
from lab.formats import other_tools
from lab.features.explain import advice
from lab.roofline import explanation, step_kernels
from lab.remote import examination
from lab.models import obtain
from lab.models.catalog import HUB, Spec
from tests.conftest import SETTINGS, run_lab
from tests.test_explain import FAST, timed
from tests.test_request import make_request_record

EVIL = "x'\"`touch PWNED`$(touch PWNED);touch PWNED;#&&touch PWNED|touch PWNED\ttouch PWNED"
KEPT = (
    *(
        "status",
        "kind",
        "type",
        "type_k",
        "type_v",
        "op",
        "flash_attn_resolved",
        "source",
        "tensor_bytes",
        "arch",
    ),
    *(
        "embedding_type",
        "output_type",
        "uncounted",
        "matrices",
        "part",
        "started_at",
        "measured_at",
        "quantization",
    ),
)
"""Fields whose words decide what is computed."""

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


def poisoned(value: Any) -> Any:
    """`value` with EVIL instead of every string, and in the settings that may be text but are None."""
    if isinstance(value, str):
        return EVIL
    if isinstance(value, tuple):
        return tuple(map(poisoned, value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return type(value)(
        **{name: part if name in KEPT else poisoned(part) for name, part in parts.items()}
    )


def evil_record(source: str = HUB, **changes: Any) -> Record:
    record: Record = poisoned(timed(1.1)[0])
    model = dataclasses.replace(record.model, source=source, repo=EVIL, file=EVIL, revision=EVIL)
    lists: dict[str, Any] = {"devices": (EVIL, EVIL)}
    settings = dataclasses.replace(record.settings, lib=f"{EVIL} 12345678", **lists)
    run = dataclasses.replace(record.run, **changes)
    return dataclasses.replace(record, model=model, settings=settings, run=run)


def check(lines: Iterable[str], folder: Path) -> None:
    """Run the lines in a shell whose `lab` and llama.cpp only keep their words."""
    tools = "lab llama-server llama-cli llama-bench"
    kept = "".join(
        f"{tool}() {{ printf '%s\\0' {tool} \"$@\" END >> words; }}\n" for tool in tools.split()
    )
    script = kept + "\n".join(lines)
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, (done.stderr, script)
    assert [path.name for path in folder.iterdir()] == ["words"], script
    words = (folder / "words").read_text().removesuffix("\0END\0").split("\0END\0")
    assert [line.split("\0") for line in words] == [shlex.split(line) for line in lines]
    assert any("PWNED" in line for line in lines)


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def hints() -> list[str]:
    """The commands at the end of errors: of missing kernels, models and names."""
    spec = Spec(EVIL, HUB, repo="owner/repo", quantization=EVIL)
    model = evil_record().model
    product = Matrix(FEED_FORWARD, EVIL, model.n_ff or 1, model.n_embd or 1, 1)
    heads = Heads(1, 32, 8, 0)
    calls = (
        lambda: step_kernels.product_s_per_byte(FAST, model, product, 1, 2),
        lambda: step_kernels.attention_points(FAST, model, heads, EVIL, 1, 2, True),
        lambda: obtain.obtain(spec, None, None),  # type: ignore[arg-type]
    )
    found = []
    for call in calls:
        with pytest.raises(LabError) as problem:
            call()
        found.append(problem.value.hint[problem.value.hint.index("lab ") :])
    return found


def test_errors(empty: Path) -> None:
    check(hints(), empty)


@pytest.mark.parametrize("source", ["hub", "file", "synthetic", "requantized"])
def test_advice_and_how_to_measure_again(source: str, empty: Path) -> None:
    record = evil_record(source)
    faster = (dataclasses.replace(one, n_threads=1, times_ns=(1,)) for one in FAST.rates)
    others = (dataclasses.replace(one, type="Q4_0", times_ns=(1,)) for one in FAST.rates)
    best = dataclasses.replace(FAST, rates=(*FAST.rates, *faster, *others))
    rows = explanation.explain(
        [dataclasses.replace(one, model=record.model) for one in timed(1.1)], best
    )
    levers = [lever.command for lever in advice.changes(rows, record, best)]
    levers += [one.command for one in advice.experiments(rows, [record], best)]
    again = [
        kinds.commands([evil_record(source, **one)])[0] for one in ({}, {"every": 5}, {"block": 0})
    ]
    again += kinds.commands([evil_record(source, tuning=Tuning(EVIL, EVIL, 5))])
    again += kinds.commands([poisoned(make_request_record())])
    check([line for line in (*levers, *again) if line], empty)


def test_other_programs(empty: Path) -> None:
    settings = dataclasses.replace(evil_record().settings, type_k=EVIL, type_v=EVIL)
    check([other_tools.llama_server(EVIL, settings, 10, 5, 2)], empty)


def test_names_that_a_server_lists(empty: Path) -> None:
    with pytest.raises(LabError) as problem:
        examination.choose_model((EVIL, "other"), None)
    listed = problem.value.hint.removeprefix("Name one: ").removesuffix(", other")
    check([f"lab {listed}"], empty)


def test_what_explain_and_measure_print(mini: Path, tmp_path: Path, empty: Path) -> None:
    out = tmp_path / EVIL
    asked = (
        "-p",
        "8",
        "-n",
        "2",
        "-r",
        "1",
        "-t",
        "1",
        "--prompt",
        "random",
        "--no-plot",
        "-o",
        out,
    )
    status, measured, _ = run_lab("measure", "-m", mini, *asked)
    results.save(
        tmp_path / "a.jsonl", dataclasses.replace(timed(1.1)[0], model=evil_record().model)
    )
    slower = (dataclasses.replace(one, n_threads=1, times_ns=(1,)) for one in FAST.rates)
    results.save(
        tmp_path / "ceilings-a.jsonl", dataclasses.replace(FAST, rates=(*FAST.rates, *slower))
    )
    explained = run_lab(
        "explain", tmp_path / "a.jsonl", "--details", "--no-plot", "--ceilings", tmp_path
    )[1]
    printed = re.findall(r"(?:Try|Run|each phase): (lab .*)", measured + explained)
    lines = [line for one in printed for line in one.split(" && lab ")]
    assert status == 0 and len(lines) == 2 + 4
    check([line if line.startswith("lab ") else f"lab {line}" for line in lines], empty)


@pytest.mark.parametrize(
    "words", [("a b",), ("--x", ["-m", "a b"]), (SETTINGS.n_ctx, ""), ("~", "*", "!x", "\\")]
)
def test_what_is_joined_comes_apart_again(words: tuple[object, ...]) -> None:
    flat = [shell.join(*word) if isinstance(word, list) else str(word) for word in words]
    assert shlex.split(shell.lab(*words)) == ["lab", *flat]
