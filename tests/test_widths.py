"""Tables on narrow terminals: no number is broken or cut, columns that do not fit are left out and named."""

import re
from pathlib import Path

import pytest

import lab
from lab.app import kinds
from lab.show.console import Grid, console
from lab.show.section import MOST_LINES, Context, Section, print_section
from tests.conftest import run_lab

SAMPLES = sorted(Path(__file__).parents[1].glob("results/sample-*.jsonl"))
WIDTHS = (60, 80, 100, 120)


def numbers(text: str) -> set[str]:
    """Everything with a digit in it that spaces separate."""
    lines = [line for line in text.splitlines() if not line.startswith("Columns left out")]
    return {word for line in lines for word in line.split() if re.search(r"\d", word)}


def shown(command: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = run_lab(*command)
    assert code == 0, err
    return out


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name)
def test_no_number_of_any_table_is_broken_or_cut(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reading = lab.read([path])
    measured = reading.all_lines
    made = kinds.sections(measured, Context(reading.ceilings))
    capsys.readouterr()

    def shown_at(width: int) -> set[str]:
        out = console(details="add --details")
        out.width = width
        kinds.print_results(measured, out, made)
        return numbers(capsys.readouterr().out)

    whole = shown_at(400)
    assert whole
    for width in WIDTHS:
        assert shown_at(width) <= whole, width


COMMANDS = [
    (
        "compare",
        "--no-plot",
        *(
            str(path)
            for path in SAMPLES
            if "to-compare" in path.name or "sample-smollm2" in path.name
        ),
    ),
    ("predict", "-m", "llama-3.2-3b", "-d", "rtx-4090"),
    ("predict", "-m", "llama-3.2-3b", "-d", "apple"),
    ("models",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: Path(command[-1]).name)
def test_nor_in_what_other_commands_print(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = numbers(shown(command, 400, monkeypatch))
    for width in WIDTHS[::2]:
        assert numbers(shown(command, width, monkeypatch)) <= whole, width


def test_columns_that_others_imply_give_way_first_and_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rich.console import Console

    grid = Grid("prompt\ntokens", "prefill\ns", "TTFT\ns", "E2E\ns", "note")
    grid.add_row(
        "1,000", "0.1", "0.123-0.456", "12.3-45.6", "words that can be broken between them"
    )
    Console(width=46).print(grid)
    out = capsys.readouterr().out
    assert "0.123-0.456" not in out and "12.3-45.6" in out
    assert "Columns left out (widen the terminal, or --json): TTFT s" in " ".join(out.split())
    Console(width=200).print(grid)
    assert "Columns left out" not in capsys.readouterr().out


def test_a_table_is_followed_by_four_lines_warnings_first_and_by_how_to_see_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = Section(
        headings=["prompt\ntokens"],
        cells=[["10"], ["20"], ["30"]],
        warnings=["10 and 30 prompt tokens: was disturbed", "drifted"],
        sentences=[f"sentence {n}" for n in range(5)],
        notes=["a definition"],
    )
    whole = [
        "! 10 and 30 prompt tokens: was disturbed",
        "! drifted",
        *one.sentences,
        "a definition",
    ]
    print_section(one, console())
    assert capsys.readouterr().out.splitlines()[-8:] == whole
    print_section(one, console(details="add --details"))
    assert capsys.readouterr().out.splitlines()[-5:] == [
        *whole[:MOST_LINES],
        "4 more lines: add --details",
    ]


def test_details_shows_what_a_command_leaves_out() -> None:
    (path,) = (path for path in SAMPLES if "intel" in path.name)
    short, whole = (run_lab("show", str(path), *option)[1] for option in ([], ["--details"]))
    assert "3 more lines: add --details" in short and "more line" not in whole
    assert (
        "TTFT" in whole
        and "TTFT" not in short
        and len(whole.splitlines()) > len(short.splitlines())
    )


def test_no_summary_of_a_command_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    _usage, *lines = shown(("--help",), 80, monkeypatch).splitlines()
    assert [line for line in lines if line.endswith("...")] == []


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
    out = shown(command, 80, monkeypatch)
    assert re.search(r"^.*\bE2E\b.*$", out, re.M) and not re.search(r"left out .*E2E", out)
