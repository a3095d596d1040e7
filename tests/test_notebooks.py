"""The notebooks: as they are stored, and run from top to bottom on the real model, in small."""

import ast
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import lab
from lab.core.record import SCHEMA
from lab.errors import LabError
from lab.features.lessons import lesson
from tests.conftest import MODEL, make_record, make_run
from tests.test_explain import FAST

ROOT = Path(__file__).parent.parent
NAMES = (
    *(
        "01-two-phases",
        "02-what-limits-each",
        "03-the-kv-cache",
        "04-your-machine-and-others",
        "05-four-optimizations",
    ),
    "06-through-a-server",
)
SHORT = "00-ten-minutes"  # it has no guesses and no exercises
ALL = (SHORT, *NAMES)
MEASURES = r"\blab\.(measure|ab|ceilings|batch|turns|stall|speculate|tune)\("
ANSWERS = {  # of each exercise a right answer and a wrong one, in the names that the notebook has by then
    "00": [],
    "01": [
        ("first.e2e_s + (500 - first.n_gen) * first.tpot_ms / 1e3", "500 * first.tpot_ms"),
        ("min(n for n in range(1, 10**5) if prefill.seconds(n) >= 199 * first.tpot_ms / 1e3)", "2"),
        ('"B"', '"a"'),
    ],
    "02": [
        ("1.88", "2"),
        ("roof.gflops / roof.gbps * 20 / 32 / 2", "roof.ridge"),
        ('"b"', '"a"'),
    ],
    "03": [
        ("0.94", "0.094"),
        ("344_064", "114_688"),
        ('"c"', '"b"'),
    ],
    "04": [
        ("59", "273"),
        ("1_231", "800"),
        ('"a"', '"b"'),
    ],
    "05": [
        ("1_600 / 4", "100"),
        ("1.48", "2.95"),
        ('"c"', '"a"'),
    ],
    "06": [("2_000 / 100", "2_000 / 101"), ("2.7", "0.3")],
}


def stored(name: str) -> Any:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]


def tagged(cells: list[Any], tag: str) -> list[Any]:
    return [cell for cell in cells if tag in cell.metadata.get("tags", [])]


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def problems(cells: list[Any], schema: int = SCHEMA) -> list[str]:
    """What is wrong with the outputs of a notebook's code cells."""
    problems_found = []
    for number, cell in enumerate(cells):
        for output in cell.outputs:
            if output.output_type == "error":
                problems_found.append(f"cell {number}: {output.ename}")
            if output.get("name") == "stderr":
                problems_found.append(f"cell {number} wrote to stderr: {output.text[:80]}")
    if f"results files in format {schema}\n" not in printed(cells[0]):
        problems_found.append(
            "the outputs are of another schema: run python -m tests.bench.notebooks"
        )
    return problems_found


def assert_pictures(cells: list[Any]) -> None:
    """Each cell that draws has a picture below it."""
    for cell in cells:
        draws = re.match(r"lab\.plot_|lesson\.draw", cell.source) is not None
        assert not draws or any("image/png" in output.get("data", {}) for output in cell.outputs), (
            cell.source
        )


@pytest.mark.parametrize("name", ALL)
def test_stored_outputs_are_whole_and_of_this_schema(name: str) -> None:
    cells = [cell for cell in stored(name).cells if cell.cell_type == "code"]
    assert problems(cells) == []
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert_pictures(cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= {
        "00": 2,
        "04": 1,
        "06": 1,
    }.get(name[:2], 3)
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 1_500_000
    assert not re.search(r"(?<![.\w])/(work|root|home|tmp)/", nbformat.writes(stored(name)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_the_parts_that_all_have(name: str) -> None:
    cells = stored(name).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    assert text.startswith(f"# {int(name[:2])}. ")
    assert "All measurements together take about" in text
    assert "What people often get wrong" in text
    assert len(tagged(cells, "guess")) >= 2
    assert 2 <= len(tagged(cells, "answer")) <= 3
    assert len(tagged(cells, "answer")) == len(tagged(cells, "check")) == len(ANSWERS[name[:2]])
    for cell in [*tagged(cells, "guess"), *tagged(cells, "answer")]:
        assert all(re.fullmatch(r"\w+ = \.\.\.", line) for line in cell.source.splitlines())
    for cell in cells:  # what is measured is announced: how long it takes
        if cell.cell_type == "code" and re.search(MEASURES, cell.source):
            before = [
                each.source for each in cells[: cells.index(cell)] if each.cell_type == "markdown"
            ][-1]
            assert re.search(r"seconds|minute", before), before


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_begins_with_questions_and_ends_with_their_answers(name: str) -> None:
    texts = [cell.source for cell in stored(name).cells if cell.cell_type == "markdown"]
    assert "**Time:** All measurements together" in texts[0]
    assert "**You need:**" in texts[0]
    (questions,) = re.findall(r"you can answer:\n\n((?:\d\. .*\n)+)", texts[0])
    asked = re.findall(r"(\d)\. .*\?\n", questions)
    answers = re.split(r"\n(?=\d\. )", texts[-1].partition("## Short answers\n")[2])[1:]
    assert 3 <= len(asked) <= 5
    assert [answer[0] for answer in answers] == asked
    headings = {
        heading.replace(" ", "-")
        for text in texts
        for heading in re.findall(r"^## (.*)$", text, re.MULTILINE)
    }
    for answer in answers:
        links = re.findall(r"\]\(#(.*?)\)", answer)
        assert links, answer
        assert set(links) <= headings, answer


def beyond_the_interface(source: str) -> list[str]:
    """What a cell uses of the lab that is neither public nor of `lesson`, of other packages, and
    every private name."""
    problems_found = []
    allowed = {"import lab", "from lab.features.lessons import lesson"}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) not in allowed:
            package = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if (package or "").partition(".")[0] not in sys.stdlib_module_names:
                problems_found.append(ast.unparse(node))
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Name):
            name = node.id
        if name.startswith("_"):
            problems_found.append(name)
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        of_lesson = {
            "lab": lab.PUBLIC,
            "lesson": {name for name, item in vars(lesson).items() if callable(item)},
        }
        if name not in of_lesson.get(node.value.id, {name}):
            problems_found.append(ast.unparse(node))
    return problems_found


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_uses_the_public_interface_only(name: str) -> None:
    assert (
        beyond_the_interface(
            "\n".join(cell.source for cell in stored(name).cells if cell.cell_type == "code")
        )
        == []
    )


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the samples only, that all notebooks share: what one measures the next one
    knows."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "notebooks").mkdir()
    (folder / "results").mkdir()
    for sample in (ROOT / "results").glob("sample-*.jsonl"):
        shutil.copy(sample, folder / "results")
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ALL if os.environ.get("LAB_ALL_NOTEBOOKS") else NAMES[:1])
def test_a_notebook_runs_and_its_exercises_tell_right_from_wrong(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAB_SMALL", "1")
    monkeypatch.setenv("MINI_LAB_CACHE", str(workplace / "models"))
    ours = stored(name)
    checks = tagged(ours.cells, "check")
    for number, (cell, tries) in enumerate(zip(checks, ANSWERS[name[:2]], strict=True), 1):
        for kind, answer in zip(("right", "wrong"), tries, strict=True):
            source = {**cell, "id": f"{kind}-{number}", "metadata": {"tags": [kind]}}
            again = nbformat.from_dict(source)  # type: ignore[no-untyped-call]
            again.source = f"answer_{number} = {answer}\n{cell.source}"
            ours.cells.append(again)
    where = {"metadata": {"path": str(workplace / "notebooks")}}
    NotebookClient(
        ours,
        timeout=240,
        resources=where,
        coalesce_streams=True,
    ).execute()
    cells = [cell for cell in ours.cells if cell.cell_type == "code"]
    # Other work on the machine that runs the tests is no mistake.
    busy = "UserWarning: While the ceilings were"
    assert [problem for problem in problems(cells) if busy not in problem] == []
    assert all(printed(cell).startswith("No answer yet") for cell in checks)
    assert [printed(cell) for cell in tagged(cells, "right")] == ["Right.\n"] * len(checks)
    assert all(printed(cell).startswith("Not yet. Hint: ") for cell in tagged(cells, "wrong"))
    assert_pictures(cells)
    shown = [
        output.data["text/plain"] for cell in cells for output in cell.outputs if "data" in output
    ]
    assert any(
        re.fullmatch(r"\d+ runs? in \d+ s", text) for text in shown
    )  # the progress line, when it is over


# What they say


def test_a_guess_is_set_beside_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for guess in (..., 10, 5, 9.5, "ten", True, 0, float("nan")):
        lesson.guess(guess, 10.0, "ms")
    lesson.guess(3, float("inf"), "times as long")
    lines = capsys.readouterr().out.splitlines()
    assert "you entered no guess" in lines[0]
    assert "'ten' is not a number" in lines[4]
    assert "True is not a number" in lines[5]
    assert "nan is not a number" in lines[7]
    assert lines[1] == "your guess: 10.0 ms; measured: 10.0 ms; a good guess"
    assert lines[2] == "your guess: 5.00 ms; measured: 10.0 ms; the guess is 2.00 times too low"
    assert "a good guess" in lines[3]
    assert lines[6].endswith("off by 10.0")
    assert lines[8] == "times as long: not known from this measurement"


def test_a_wrong_guess_is_asked_again_with_other_numbers_until_it_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, guessed in {
        "1.1": 14,
        "1.2": ...,
        "1.3": "ten",
        "2.1": 16,
        "2.2": 3,
        "2.3": -1,
    }.items():
        lesson.guess(guessed, 10.0, "ms", again=(number, f"How long is {number}?", 20.0))
    lesson.guess(1, 10.0, "ms", again=("3.1", "What is not known?", float("nan")))
    assert (
        capsys.readouterr().out.count("asks this again, with other numbers (pop question 2.") == 3
    )
    lesson.ask()
    asked = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in asked] == ['"2.1"', '"2.2"', '"2.3"']
    assert "20" not in "".join(asked)
    then = "With the numbers of notebook 2, you guessed 16.0 and measured 10.0 ms."
    assert asked[0] == f'"2.1": How long is 2.1? ({then})'
    for guesses in (
        ...,
        12.5,
        {
            "2.1": 29,
            "2.2": 31,
            "2.3": "x",
            "1.1": 20,
        },
    ):
        lesson.ask_again(guesses)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("No guesses yet")
    assert lines[1].endswith("Write {'2.1': 12.5}.")
    assert (
        lines[2] == "2.1: your guess: 29.0 ms; measured: 20.0 ms; the guess is 1.45 times too high"
    )
    assert lines[4] == "2.3: 'x' is not a number. Write 12.5, without a unit."
    assert lines[5] == "'1.1' is not asked. Questions to ask: 2.1, 2.2 and 2.3."
    lesson.guess(
        11, 10.0, "ms", again=("2.3", "How long is 2.3?", 20.0)
    )  # a good guess in the notebook itself
    lesson.ask()
    assert '"2.2"' in (left := capsys.readouterr().out)
    assert '"2.1"' not in left
    assert '"2.3"' not in left
    lesson.ask_again({"2.2": 20})
    lesson.ask()
    lesson.ask_again(...)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "No question to ask again: no guess was off by more than a factor of 1.5."
    ]
    (tmp_path / "guesses.json").write_text('{"1.1": {"words": "?"}}')
    with pytest.raises(LabError, match=r"guesses\.json, the file of wrong guesses, cannot be read"):
        lesson.ask()


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_three_pop_questions_that_the_last_one_asks_again(name: str) -> None:
    sources = [cell.source for cell in stored(name).cells if cell.cell_type == "code"]
    assert re.findall(r'\("(\d\.\d)", asked, ', "\n".join(sources)) == [
        f"{int(name[:2])}.{i}" for i in (1, 2, 3)
    ]
    text = "\n".join(cell.source for cell in stored(name).cells if "**Guess:**" in cell.source)
    assert re.findall(r"\((\d\.\d)\)", text) == [f"{int(name[:2])}.{i}" for i in (1, 2, 3)]
    asks = "lesson.ask()" in sources and "lesson.ask_again(guesses_again)" in sources
    assert asks == (name == NAMES[-1])


def test_an_answer_is_right_wrong_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    for answer in (..., 110, 111, "ninety"):
        lesson.check(answer, 100.0, "count again")
    for answer in (" B", "c", 3):
        lesson.check(answer, "b", "think")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("No answer yet")
    assert lines[1] == "Right."
    assert lines[2] == "Not yet. Hint: count again"
    assert "is not a number" in lines[3]
    assert lines[4:] == ["Right.", "Not yet. Hint: think", "Not yet. Hint: think"]


def test_a_failed_measurement_is_a_sentence() -> None:
    failed = [make_record(make_run(status="failed", error="no memory"))]
    of_ceilings = [
        partial(function, ceilings=FAST)
        for function in (lesson.explain, lesson.experiments, lesson.gains)
    ]
    for shown in (
        lesson.figures,
        lesson.both_laws,
        lesson.compare,
        lesson.rows,
        lesson.draw,
        *of_ceilings,
    ):
        with pytest.raises(
            LabError, match=r"All runs failed\. 20 prompt tokens, repeat 1: no memory"
        ):
            shown(failed)
    with pytest.raises(LabError, match="Q5_0 with 2 threads are not measured"):
        lesson.kernels(FAST, MODEL, 2, ["Q5_0"])
    with pytest.raises(LabError, match="belong to no experiment"):
        lesson.rows([make_record(make_run())])
    assert LabError("It broke.", "Mend it.")._render_traceback_() == ["Error: It broke.\nMend it."]


NAMES_AN_OUTPUT = re.compile(r"stored here|table above|last column")
"""Words with which a sentence says that its numbers are those of an output of the same notebook."""


@pytest.mark.parametrize("name", ALL)
def test_numbers_that_the_text_takes_from_the_outputs_are_there(name: str) -> None:
    cells = stored(name).cells
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    printed = " ".join(
        str(item.get("text", "")) + str(item.get("data", {}).get("text/plain", ""))
        for item in outputs
    )
    shown = {
        float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", printed)
    }
    text = " ".join(" ".join(cell.source.split()) for cell in cells if cell.cell_type == "markdown")
    for sentence in re.split(r"(?<=[.:?]) ", text):
        for number in (
            re.findall(r"\d[\d,]*(?:\.\d+)?", sentence) if NAMES_AN_OUTPUT.search(sentence) else ()
        ):
            value = float(number.replace(",", ""))
            n_decimals = len(number.partition(".")[2])
            assert value in {round(item, n_decimals) for item in shown}, sentence
