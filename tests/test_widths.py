"""Tables on narrow terminals: no number is broken or cut, columns that do not fit are left out and
named."""

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Never

import pytest
from rich.console import Console

import lab
from lab.app import kinds
from lab.core.figures import E2E, PREFILL, TTFT
from lab.features import ceilings
from lab.features.predict import tables
from lab.show.cells import (
    LONG_TEXT,
    PROMPT_TOKENS,
    TEXT,
    Cell,
    Column,
    listed,
    of_figure,
    stacked,
)
from lab.show.console import Grid, console
from lab.show.section import Context, Section, print_sections, tabled
from tests.support.command import run_lab

pytestmark = pytest.mark.usefixtures("one_engine")

RESULTS = Path(__file__).parents[1] / "results"
SAMPLES = sorted(RESULTS.glob("sample-*.jsonl"))
TO_COMPARE = [
    *RESULTS.glob("sample-smollm2*.jsonl"),
    *RESULTS.glob("sample-to-compare*.jsonl"),
]
UNBROKEN = 400  # a width at which no table gives way
NAME: Column[object] = Column("name", kind=TEXT)
WIDTHS = (60, 80, 100, 120)
MOST_LINES_OF_OUTPUT = 14


def numbers(text: str) -> set[str]:
    """Everything with a digit in it that spaces separate."""
    numbers: set[str] = set()
    for line in text.splitlines():
        if "--details" not in line and not line.startswith("Columns left out"):
            numbers |= {word.rstrip(",.;") for word in re.findall(r"\S*\d\S*", line)}
    return numbers


def printed(
    command: tuple[str, ...],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = run_lab(*command)
    assert code == 0, err
    return out


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_no_number_of_any_table_is_broken_or_cut(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = lab.read([path])
    sections = kinds.sections(contents, Context(contents.ceilings))
    capsys.readouterr()

    def numbers_at(width: int, details: str) -> set[str]:
        out = console(details=details)
        out.width = width
        kinds.print_results(contents, out, sections)
        return numbers(capsys.readouterr().out)

    unbroken = numbers_at(UNBROKEN, "")
    assert unbroken
    for width in WIDTHS:
        assert numbers_at(width, "add --details") <= unbroken, width


COMMANDS = [
    ("compare", *map(str, sorted(TO_COMPARE))),
    ("predict", "-m", "llama-3.2-3b", "-d", "rtx-4090"),
    ("predict", "-m", "llama-3.2-3b", "-d", "apple"),
    ("models",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command[-1]).name)
def test_nor_in_what_other_commands_print(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    has_details = ["--details"] if command[0] == "compare" else []
    unbroken = numbers(printed((*command, *has_details), UNBROKEN, monkeypatch))
    for width in (60, 100):
        assert numbers(printed(command, width, monkeypatch)) <= unbroken, width


def test_columns_that_others_imply_give_way_first_and_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = Grid(
        PROMPT_TOKENS,
        *map(of_figure, (PREFILL, TTFT, E2E)),
        Column("note", kind=LONG_TEXT),
    )
    grid.add_row(
        "1,000", "0.1", "0.123-0.456", "12.3-45.6", "text that can be broken at spaces"
    )

    Console(width=46).print(grid)
    narrow = capsys.readouterr().out
    Console(width=200).print(grid)
    wide = capsys.readouterr().out

    assert "0.123-0.456" not in narrow
    assert "12.3-45.6" in narrow
    in_one_line = " ".join(narrow.split())
    assert "Columns left out (widen the terminal, or --json): TTFT s" in in_one_line
    assert "Columns left out" not in wide


@pytest.mark.parametrize(
    ("columns", "cells", "deciding"),
    [
        (
            (NAME, *tables.SHORT_COLUMNS[1:5], tables.SHORT_COLUMNS[-1]),
            ("rtx-4090", "0.0366-0.0969", "143-365", "0.583-1.51", "2.43", ""),
            "143-365",
        ),
        (
            ceilings.CPU_COLUMNS,
            ("MUL_MAT", "Q4_0", "1536 x 576", "CPU_REPACK", "512", "2 of 2", "7.10", "210"),
            "2 of 2",
        ),
    ],
    ids=["predictions", "ceilings"],
)
def test_the_deciding_column_stays_in_a_narrow_terminal(
    columns: Sequence[Column[Never]],
    cells: tuple[str, ...],
    deciding: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    grid = Grid(*columns)
    grid.add_row(*cells)
    Console(width=62).print(grid)
    narrow = capsys.readouterr().out
    assert "Columns left out" in narrow
    assert deciding in narrow


def test_a_terminal_shows_the_table_and_three_lines_and_says_how_to_see_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warnings = ["10 and 30 prompt tokens: was disturbed", "drifted"]
    sentences = [f"sentence {number}" for number in range(5)]
    rows: list[list[Cell | str]] = [
        ["10", stacked("0.1", "0.08-0.12")],
        ["20", stacked("0.2", "0.1-0.3")],
        ["30", "0.3"],
    ]
    section = Section(
        below="their range",
        **tabled(listed(["prompt\ntokens", "TTFT\ns"]), rows),
        warnings=warnings,
        sentences=sentences,
        notes=["a definition"],
        parts=[Section(**tabled(listed(["n"]), [["1"]]))],
    )
    all_lines = [f"! {warnings[0]}", f"! {warnings[1]}", *sentences, "a definition"]

    print_sections([section], console())
    details = capsys.readouterr().out
    print_sections([section], console(details="add --details"))
    short = capsys.readouterr().out

    assert "\n".join(all_lines) in details
    assert "0.08-0.12" in details
    assert "below each their range" in details
    assert short.splitlines()[-4:] == [
        *all_lines[:3],
        "More (ranges, 1 table, 5 lines): add --details",
    ]
    assert "0.08-0.12" not in short
    assert "their range" not in short


def test_few_rows_keep_their_ranges_and_what_names_a_row_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        [stacked("10", "4 users"), stacked("0.1", "0.08-0.12")],
        [stacked("10", "8 users"), stacked("0.2", "0.1-0.3")],
    ]
    two = Section(below="their range", **tabled(listed(["prompt", "s"]), rows))
    four = dataclasses.replace(two, cells=[*two.cells, *two.cells])

    print_sections([two], console(details="add --details"))
    of_two = capsys.readouterr().out
    print_sections([four], console(details="add --details"))
    of_four = capsys.readouterr().out

    assert "0.08-0.12" in of_two
    assert "below each their range" in of_two
    assert "0.08-0.12" not in of_four
    assert of_four.count("8 users") == 2


@pytest.mark.parametrize("is_curve", [True, False])
def test_many_rows_are_shown_in_part_and_failures_always(
    is_curve: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    section = Section(
        **tabled(listed(["prompt"]), [[f"row {number}"] for number in range(1, 41)]),
        is_curve=is_curve,
        sentences=[f"a long sentence {'x' * 200}"] * 3,
    )
    closing = Section(failures=["2 of 3 runs"])

    print_sections([section, closing], console(details="add --details"))
    out = capsys.readouterr().out

    assert ("row 1\n" in out) == (not is_curve)
    assert ("row 40" in out) == is_curve
    assert "failed 2 of 3 runs" in out
    assert "more" in out.lower()
    assert len(out.splitlines()) <= 14


SAMPLE = str(RESULTS / "sample-smollm2-135m-amd-epyc.jsonl")
SERVER_SAMPLE = str(RESULTS / "sample-server-smollm2-135m-llama-server.jsonl")
DOCS = RESULTS.parent / "docs"
PASTED = str(DOCS / "pasted-webui.txt")
ONLY_READ = ("--budget", "0", "--no-plot")
LLAMA = ("-m", "llama-3.1-8b")
OUTPUTS = [
    *(("show", str(path)) for path in [*SAMPLES, *sorted(DOCS.glob("*.jsonl"))]),
    ("explain", SAMPLE),
    ("compare", *map(str, sorted(TO_COMPARE))),
    ("why", SAMPLE, PASTED, *ONLY_READ),
    ("why", SERVER_SAMPLE, SAMPLE, *ONLY_READ),
    ("why", str(DOCS / "pasted-llama-server.txt"), "--read"),
    ("predict", *LLAMA),
    ("predict", *LLAMA, "-p", "4000", "-n", "300"),
    ("predict", *LLAMA, "-d", "rtx-4090"),
    ("predict", *LLAMA, "-d", "laptop"),
    ("predict", *LLAMA, "-d", "laptop", "--sequences", "4", "--slo", "ttft=2s,tpot=50ms"),
    ("predict", *LLAMA, "-d", "m4", "-d", "rtx-3060", "-d", "rtx-4090", "-p", "1k,8k,32k"),
    ("predict", *LLAMA, "-d", "rtx-4060-laptop", "--quantizations"),
    ("predict", "-m", "llama-3.1-8b:Q4_K_M,Q5_K_M", "-d", "m4"),
    ("predict", "-m", "llama-3.1-70b", "-d", "rtx-3060"),
    ("predict", "--check", SAMPLE),
    ("words",),
    ("words", "pp", "tg"),
    ("models",),
    ("models", "info", "llama-3.1-8b"),
    ("measure", "--dry-run"),
    ("ab", "-t 1", "-t 2", "--dry-run"),
    ("bisect", "--good", "0.3.20", "--bad", "0.3.36", "--dry-run"),
]
SCREEN = 24
"""Rows of the smallest usual terminal, on which a sentence takes several."""


@pytest.mark.parametrize("command", OUTPUTS, ids=" ".join)
def test_a_default_output_has_at_most_14_lines_and_fits_on_a_screen(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(command, 80, monkeypatch).splitlines()
    assert len(lines) <= MOST_LINES_OF_OUTPUT
    assert sum(len(textwrap.wrap(line, 80)) or 1 for line in lines) <= SCREEN


LESS = [
    *(
        ("show", str(DOCS / f"{name}.jsonl"))
        for name in ("claims-amd-epyc", "record-amd-epyc")
    ),
    *(("show", str(DOCS / f"{name}-amd-epyc.jsonl")) for name in ("start", "memory")),
    ("why", SAMPLE, PASTED, *ONLY_READ),
    ("words",),
    ("models",),
]


@pytest.mark.parametrize("command", LESS, ids=" ".join)
def test_nothing_of_a_short_output_is_lost_with_details(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = printed(command, UNBROKEN, monkeypatch)
    details = printed((*command, "--details"), UNBROKEN, monkeypatch)
    assert "--details" in short
    assert numbers(short) <= numbers(details)
    assert len(details) > len(short)


def test_details_shows_what_a_command_leaves_out() -> None:
    path = str(RESULTS / "sample-smollm2-135m-intel-xeon.jsonl")

    _, short, _ = run_lab("show", path)
    _, details, _ = run_lab("show", path, "--details")

    assert "More (ranges" in short
    assert "add --details" not in details
    assert "TTFT" not in short
    assert "TTFT" in details
    assert len(details.splitlines()) > len(short.splitlines())


def test_no_summary_of_a_command_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in printed(("--help",), 80, monkeypatch).splitlines()[1:]:  # below the usage
        assert not line.endswith("...")


@pytest.mark.parametrize(
    "command",
    [
        ("show", "results/sample-smollm2-135m-amd-epyc.jsonl"),
        ("predict", "-m", "llama-3.2-3b", "-p", "32000"),
        ("predict", "-m", "llama-3.2-3b", "-p", "32000", "-d", "rtx-4090"),
    ],
    ids=" ".join,
)
def test_the_time_of_the_whole_request_is_never_left_out(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = printed(command, 80, monkeypatch)
    assert re.search(r"\bE2E\b", out)
    assert not re.search(r"left out .*E2E", out)
