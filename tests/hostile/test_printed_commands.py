"""Commands that the lab prints for pasting: no value in them runs anything in a shell.

Values come from records, servers and options.
"""

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
from lab.core.attention import AttentionLayers
from lab.core.matrices import FEED_FORWARD, Matrix
from lab.core.record import Ceilings
from lab.errors import LabError
from lab.features.explain import advice
from lab.formats import other_tools
from lab.models import obtain
from lab.models.catalog import HUB, Spec
from lab.remote import examination
from lab.roofline import explanation, kernel_rates
from tests.hostile.evil import EVIL, evil_record
from tests.support.command import run_lab
from tests.support.rates import FAST, timed
from tests.support.records import SETTINGS
from tests.support.requests import make_request_record

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")


TOOLS = ("lab", "llama-server", "llama-cli", "llama-bench")


def check(lines: Iterable[str], folder: Path) -> None:
    """Run the lines in a shell whose `lab` and llama.cpp only write down their arguments."""
    lines = list(lines)
    script = "\n".join([*map(stand_in, TOOLS), *lines])
    ended = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, (ended.stderr, script)
    assert not ended.stderr, (ended.stderr, script)
    assert [path.name for path in folder.iterdir()] == ["calls"], script
    calls = (folder / "calls").read_text().removesuffix("\0END\0").split("\0END\0")
    assert [call.split("\0") for call in calls] == [shlex.split(line) for line in lines]
    assert any("PWNED" in line for line in lines)


def stand_in(tool: str) -> str:
    """A shell function that writes down its name and arguments."""
    return f"{tool}() {{ printf '%s\\0' {tool} \"$@\" END >> calls; }}"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    folder = tmp_path / "empty"
    folder.mkdir()
    return folder


def hints() -> list[str]:
    """The commands at the end of errors: of missing kernels, models and names."""
    spec = Spec(
        EVIL,
        HUB,
        repo="owner/repo",
        quantization=EVIL,
    )
    model = evil_record().model
    product = Matrix(FEED_FORWARD, EVIL, model.n_ff or 1, model.n_embd or 1, 1)
    heads = AttentionLayers(1, 32, 8, 0, 128, 128)
    calls = (
        lambda: kernel_rates.product_s_per_byte(FAST, model, product, 1, 2),
        lambda: kernel_rates.attention_points(FAST, model, heads, EVIL, 2, True),
        lambda: obtain.obtain(spec, None, None),  # type: ignore[arg-type]
    )
    commands = []
    for call in calls:
        with pytest.raises(LabError) as problem:
            call()
        _, start, arguments = problem.value.hint.partition("lab ")
        commands.append(start + arguments)
    return commands


def test_errors(empty: Path) -> None:
    check(hints(), empty)


def with_rates(**changes: Any) -> Ceilings:
    """The ceilings of FAST, and the same rates with changes."""
    changed = [dataclasses.replace(rate, **changes) for rate in FAST.rates]
    return dataclasses.replace(FAST, rates=(*FAST.rates, *changed))


@pytest.mark.parametrize("source", ["hub", "file", "synthetic", "requantized"])
def test_advice_and_how_to_measure_again(source: str, empty: Path) -> None:
    record = evil_record(source)
    best = with_rates(n_threads=1, times_ns=(1,))
    best = dataclasses.replace(
        best, rates=(*best.rates, *with_rates(type="Q4_0", times_ns=(1,)).rates)
    )
    records = [dataclasses.replace(run, model=record.model) for run in timed(1.1)]
    rows = explanation.explain(records, best)
    advised = [*advice.changes(rows, record, best), *advice.experiments(rows, [record], best)]
    lines = [advice_line.command for advice_line in advised if advice_line.command]
    lines += kinds.commands([record])
    request = dataclasses.replace(make_request_record(), command=("measure", "--url", EVIL))
    lines += kinds.commands([request])
    check(lines, empty)


def test_other_programs(empty: Path) -> None:
    settings = dataclasses.replace(
        evil_record().settings,
        type_k=EVIL,
        type_v=EVIL,
    )
    check([other_tools.llama_server(EVIL, settings, 10, 5, 2)], empty)


def test_names_that_a_server_lists(empty: Path) -> None:
    with pytest.raises(LabError) as problem:
        models = [examination.ListedModel(name, name) for name in (EVIL, "other")]
        examination.choose_model(models, None)
    listed = problem.value.hint.removeprefix("Name one: ").removesuffix(", other")
    check([f"lab {listed}"], empty)


def test_what_explain_and_measure_print(
    mini: Path,
    tmp_path: Path,
    empty: Path,
) -> None:
    out = tmp_path / EVIL
    sizes = ("-p", "8", "-n", "2", "-r", "1", "-t", "1", "--prompt", "random", "--no-plot")
    status, measured, _ = run_lab("measure", "-m", mini, *sizes, "-o", out)
    results.save(
        tmp_path / "a.jsonl", dataclasses.replace(timed(1.1)[0], model=evil_record().model)
    )
    results.save(tmp_path / "ceilings-a.jsonl", with_rates(n_threads=1, times_ns=(1,)))
    explained = run_lab(
        "explain", tmp_path / "a.jsonl", "--details", "--no-plot", "--ceilings", tmp_path
    )[1]
    printed = re.findall(r"(?:Try|Run|each phase): (lab .*)", measured + explained)
    lines = " && ".join(printed).split(" && ")
    assert status == 0
    assert len(lines) == 2 + 4
    check(lines, empty)


@pytest.mark.parametrize(
    "arguments",
    [
        ("a b",),
        ("--x", ["-m", "a b"]),
        (SETTINGS.n_ctx, ""),
        ("~", "*", "!x", "\\"),
    ],
)
def test_what_is_joined_comes_apart_again(arguments: tuple[object, ...]) -> None:
    texts = []
    for argument in arguments:
        texts.append(shell.join(*argument) if isinstance(argument, list) else str(argument))
    assert shlex.split(shell.lab(*arguments)) == ["lab", *texts]
