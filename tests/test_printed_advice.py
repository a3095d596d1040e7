"""Every command that the lab prints can be pasted: its parser takes it, and its plan is made.

The commands come from the pages, from the helps, and from what commands say of the committed
samples; `python -m tests.bench.printed_commands` takes those of all golden outputs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lab.feature_list import FEATURES
from tests.bench.golden import EPYC, REFUSED, TO_COMPARE, XEON
from tests.support.command import run_lab
from tests.support.printed import (
    PrintedCommand,
    can_be_planned,
    commands_in,
    problem_of,
    problem_of_plan,
)

SAMPLES = sorted(map(str, Path("results").glob("sample-*.jsonl")))
STARTS_AN_ENGINE = ("stall", "speculate", "measure -m")
OUTPUTS = (
    *(("show", path) for path in SAMPLES if "batch" not in path),
    ("explain", EPYC),
    ("explain", XEON, "--details"),
    ("compare", EPYC, XEON),
    ("predict", "-m", "llama-3.1-8b", "-d", "here"),
    ("why", EPYC, XEON, "--budget", "0", "--no-plot"),
    ("why", EPYC, TO_COMPARE, "--budget", "0", "--no-plot"),
    ("why", EPYC),
    ("models", "info", "llama-3.2-3b"),
    ("claims", "--only", "a"),
    ("quant", "smollm2-135m:Q4_0"),
    ("models", "info", "no-such-model"),
    *(tuple(line.split()) for line in REFUSED if not line.startswith(STARTS_AN_ENGINE)),
)
PLANNED_IN_SUITE = 3


def problems(text: str) -> list[str]:
    """The printed commands that a parser refuses, with its reason and their lines."""
    refused = list[str]()
    for printed in commands_in(text):
        problem = problem_of(printed)
        if problem:
            refused.append(f"{printed.text}: {problem} ({printed.line})")
    return refused


def test_a_command_is_found_without_the_prose_around_it() -> None:
    text = (
        "Too few: lab measure -r 10 measures more, as lab show does.\n"
        "next: lab ceilings -t 1 && lab explain results/x.jsonl\n"
        "Needs the ceilings of the machine: lab ceilings, lab measure"
    )
    assert [printed.text for printed in commands_in(text)] == [
        "lab measure -r 10",
        "lab show",
        "lab ceilings -t 1",
        "lab explain results/x.jsonl",
        "lab ceilings",
        "lab measure",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "Try: lab measure --no-such-option",
        "lab measure -r many",
        "next: lab explain",
        "lab ab --repeat 4 --blocks 3 a b",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    assert problems(line)


def test_the_commands_of_all_pages_parse() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], capture_output=True, text=True, check=True
    )
    pages = listed.stdout.split()
    assert "README.md" in pages
    for name in pages:
        assert not problems(Path(name).read_text(encoding="utf-8")), name


@pytest.mark.parametrize("name", [feature.name for feature in FEATURES])
def test_the_commands_of_a_help_parse(name: str) -> None:
    status, text, _ = run_lab(name, "--help")
    assert not status
    assert not problems(text)


@pytest.fixture(scope="module")
def printed_commands(tmp_path_factory: pytest.TempPathFactory) -> list[PrintedCommand]:
    """The commands in what the lab says of its samples, and in its errors."""
    folder = tmp_path_factory.mktemp("advice")
    texts = list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        for arguments in OUTPUTS:
            _, stdout, stderr = run_lab(*arguments)
            texts += [stdout, stderr]
    return list(commands_in("\n".join(texts)))


def test_the_commands_of_all_outputs_and_errors_parse(
    printed_commands: list[PrintedCommand],
) -> None:
    assert len({printed.text for printed in printed_commands}) > 15
    refused = [
        f"{printed.text}: {problem_of(printed)} ({printed.line})"
        for printed in printed_commands
        if problem_of(printed)
    ]
    assert not refused


def test_the_plans_of_printed_commands_are_made(
    printed_commands: list[PrintedCommand],
) -> None:
    """Some of the shortest; the benchmark makes all of them."""
    by_text = {printed.text: printed for printed in printed_commands}
    planned = [by_text[text] for text in sorted(by_text, key=len)]
    planned = [printed for printed in planned if can_be_planned(printed)]
    assert len(planned) >= PLANNED_IN_SUITE
    for printed in planned[:PLANNED_IN_SUITE]:
        assert not problem_of_plan(printed), printed.text
