"""The notebooks: as they are stored, and run from top to bottom, in small."""

import ast
import os
import re
import sys
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import lab
from lab.core.record import SCHEMA
from lab.errors import LabError
from lab.features.lessons import lesson
from lab.models import catalog
from tests.bench import notebooks as bench
from tests.support.rates import FAST
from tests.support.records import MODEL, make_record, make_run

ROOT = Path(__file__).parent.parent
NAMES = (
    "01-two-phases",
    "02-what-limits-each",
    "03-the-kv-cache",
    "04-your-machine-and-others",
    "05-four-optimizations",
    "06-through-a-server",
    "07-from-one-machine-to-many",
)
ASKING = NAMES[-2:]  # they ask the wrong guesses of the notebooks up to them again
ALL = tuple(sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb")))
FEWEST_PICTURES = {"00": 2, "04": 1, "06": 1, "08": 0, "09": 0}  # other notebooks have three
SHIPPED = ("09-six-faults",)  # it shows sessions that lie beside it, and measures nothing
BEGUN = re.compile(r"results files in format \d+\n(.+); begun (\S+ \S+) UTC\n")

IS_WHOLE = bool(os.environ.get("LAB_ALL_NOTEBOOKS"))
"""All notebooks run, on the whole model; otherwise the first one, on one of its layers."""

NUMBER = r"\d[\d,]*(?:\.\d+)?"
ANSWERS = {  # of each exercise: a right answer and a wrong one, in the notebook's own names
    "00": [],
    "01": [
        ("first.e2e_s + (500 - first.n_gen) * first.tpot_ms / 1e3", "500 * first.tpot_ms"),
        (
            "min(n for n in range(1, 10**5) if prefill.seconds(n) >= 0.199 * first.tpot_ms)",
            "2",
        ),
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
    "07": [
        ("10", "12"),
        (
            "2_000 * 2 * 2 * model.n_layer * model.n_head_kv * model.head_dim"
            " / (prefill.seconds(2_000) / 10)",
            "2_000 * 2 * model.n_layer * model.n_head_kv * model.head_dim"
            " / (prefill.seconds(2_000) / 10)",
        ),
        ('"b"', '"a"'),
    ],
    "08": [],
    "09": [('"memory"', '"kernel"'), ('"arithmetic"', '"memory"'), ('"Kernel"', '"memory"')],
}


def stored(name: str) -> Any:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def markdown(name: str) -> list[str]:
    return [cell.source for cell in stored(name).cells if cell.cell_type == "markdown"]


def tagged(cells: list[Any], tag: str) -> list[Any]:
    return [cell for cell in cells if tag in cell.metadata.get("tags", [])]


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def has_picture(output: Any) -> bool:
    return "image/png" in output.get("data", {})


def numbers_in(text: str) -> list[str]:
    return [number.replace(",", "") for number in re.findall(NUMBER, text)]


def problems(cells: list[Any], schema: int = SCHEMA) -> list[str]:
    """What is wrong with the outputs of a notebook's code cells."""
    mistakes: list[str] = []
    for number, cell in enumerate(cells):
        for output in cell.outputs:
            if output.output_type == "error":
                mistakes.append(f"cell {number}: {output.ename}")
            if output.get("name") == "stderr":
                mistakes.append(f"cell {number} wrote to stderr: {output.text[:80]}")
    if f"results files in format {schema}\n" not in printed(cells[0]):
        mistakes.append(
            "the outputs are of another schema: run python -m tests.bench.notebooks"
        )
    return mistakes


def assert_pictures(cells: list[Any]) -> None:
    """Each cell that draws has a picture below it."""
    for cell in cells:
        if re.match(r"lab\.plot_|lesson\.draw", cell.source):
            assert any(map(has_picture, cell.outputs)), cell.source


@pytest.mark.parametrize("name", ALL)
def test_stored_outputs_are_whole_and_of_this_schema(name: str) -> None:
    cells = code_cells(stored(name))
    assert problems(cells) == []
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert_pictures(cells)
    n_pictures = 0
    for cell in cells:
        n_pictures += len([output for output in cell.outputs if has_picture(output)])
    assert n_pictures >= FEWEST_PICTURES.get(name[:2], 3)


@pytest.mark.parametrize("name", ALL)
def test_no_stored_output_is_doubtful_and_no_cell_that_says_something_is_silent(
    name: str,
) -> None:
    assert bench.disturbances(stored(name)) == []
    for cell in code_cells(stored(name)):
        last = ast.parse(cell.source).body[-1]
        if isinstance(last, ast.Expr):
            assert cell.outputs, cell.source


def begun(name: str) -> tuple[str, datetime]:
    """The machine and the time that the first cell of a notebook names."""
    match = BEGUN.search(printed(code_cells(stored(name))[0]))
    assert match is not None, name
    return match[1], datetime.strptime(match[2], "%Y-%m-%d %H:%M")


def test_all_outputs_come_from_one_session_on_one_machine() -> None:
    measuring = [name for name in ALL if name not in SHIPPED]
    sessions = [begun(name) for name in measuring]
    assert len({machine for machine, _ in sessions}) == 1
    times = sorted(time for _, time in sessions)
    assert times[-1] - times[0] < timedelta(hours=3)
    for name in measuring:
        for stamp in re.findall(r"measured at (\S+)Z", bench.outputs_text(stored(name))):
            assert datetime.fromisoformat(stamp) >= times[0], name


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_is_small_and_names_no_folder_of_a_machine(name: str) -> None:
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < 1_500_000
    assert not re.search(r"(?<![.\w])/(work|root|home|tmp)/", path.read_text(encoding="utf-8"))


INTERFACE = {"import lab", "from lab.features.lessons import lesson"}


def beyond_the_interface(source: str) -> list[str]:
    """What a cell uses beyond the public interface, `lesson` and the standard library."""
    functions = {name for name, value in vars(lesson).items() if callable(value)}
    public = {"lab": set(lab.PUBLIC), "lesson": functions}
    uses: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            is_standard = (package or "").partition(".")[0] in sys.stdlib_module_names
            if not is_standard and ast.unparse(node) not in INTERFACE:
                uses.append(ast.unparse(node))
        elif isinstance(node, ast.Name) and node.id.startswith("_"):
            uses.append(node.id)
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            is_private = node.attr.startswith("_")
            if is_private or (owner in public and node.attr not in public[owner]):
                uses.append(ast.unparse(node))
    return uses


@pytest.mark.parametrize("name", ALL)
def test_a_notebook_uses_the_public_interface_only(name: str) -> None:
    sources = [cell.source for cell in code_cells(stored(name))]
    assert beyond_the_interface("\n".join(sources)) == []


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the samples only, that all notebooks share: what one measures the next one
    knows."""
    return bench.checkout(tmp_path_factory.mktemp("checkout")).parent


def installed(model: Path, folder: Path) -> Path:
    """A folder of Python packages with this file as the embedded model."""
    metadata = folder / f"{catalog.EMBEDDED_PACKAGE.replace('-', '_')}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: {catalog.EMBEDDED_PACKAGE}\nVersion: 1\n")
    (metadata / "RECORD").write_text(f"{model.name},,\n")
    (folder / model.name).symlink_to(model)
    return folder


def with_answers(notebook: Any, name: str) -> None:
    """Add cells that check a right and a wrong answer to each exercise."""
    checks = tagged(notebook.cells, "check")
    for number, (cell, (right, wrong)) in enumerate(
        zip(checks, ANSWERS[name], strict=True), 1
    ):
        for kind, answer in (("right", right), ("wrong", wrong)):
            changes = {"id": f"{kind}-{number}", "metadata": {"tags": [kind]}}
            copy = nbformat.from_dict({**cell, **changes})  # type: ignore[no-untyped-call]
            copy.source = f"answer_{number} = {answer}\n{cell.source}"
            notebook.cells.append(copy)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ALL if IS_WHOLE else NAMES[:1])
def test_a_notebook_runs_and_its_exercises_tell_right_from_wrong(
    name: str,
    workplace: Path,
    shallow: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not IS_WHOLE:
        monkeypatch.setenv("PYTHONPATH", str(installed(shallow, tmp_path)))
    monkeypatch.setenv("LAB_SMALL", "1")
    monkeypatch.setenv("MINI_LAB_CACHE", str(workplace / "models"))
    notebook = stored(name)
    checks = tagged(notebook.cells, "check")
    with_answers(notebook, name[:2])
    where = {"metadata": {"path": str(workplace / "notebooks")}}
    NotebookClient(notebook, timeout=240, resources=where, coalesce_streams=True).execute()
    cells = code_cells(notebook)
    busy = "UserWarning: While the ceilings"  # other work on this machine is no mistake
    assert [problem for problem in problems(cells) if busy not in problem] == []
    for cell in checks:
        assert printed(cell).startswith("No answer yet")
    assert [printed(cell) for cell in tagged(cells, "right")] == ["Right.\n"] * len(checks)
    for cell in tagged(cells, "wrong"):
        assert printed(cell).startswith("Not yet. Hint: ")
    assert_pictures(cells)
    progress = re.search(
        r"^\d+ runs? in (\d+ min )?\d+ s$", "\n".join(map(shown, cells)), re.MULTILINE
    )
    assert (progress is None) == (name in SHIPPED)


def shown(cell: Any) -> str:
    """The values below a cell as text, such as the progress line when it is over."""
    return "\n".join(output.data["text/plain"] for output in cell.outputs if "data" in output)


# What they say


@pytest.mark.parametrize(
    ("guess", "end"),
    [
        (..., "; you entered no guess"),
        (10, "; a good guess"),
        (5, "your guess: 5.00 ms; measured: 10.0 ms; the guess is 2.00 times too low"),
        (9.5, "; a good guess"),
        ("ten", "; 'ten' is not a number (write 12.5, without a unit)"),
        (True, "; True is not a number (write 12.5, without a unit)"),
        (0, "; off by 10.0"),
        (float("nan"), "; nan is not a number (write 12.5, without a unit)"),
    ],
)
def test_a_guess_is_set_beside_what_was_measured(
    guess: Any, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.guess(guess, 10.0, "ms")
    out = capsys.readouterr().out
    assert "measured: 10.0 ms" in out
    assert out.endswith(f"{end}\n")


def test_a_guess_of_what_is_not_known_is_not_judged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lesson.guess(3, float("inf"), "times as long")
    assert capsys.readouterr().out == "times as long: not known from this measurement\n"


@pytest.fixture
def wrong_guesses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """The guesses of two notebooks, of which those of 2.1, 2.2 and 2.3 were wrong; what was
    printed."""
    monkeypatch.chdir(tmp_path)
    guesses = {"1.1": 14, "1.2": ..., "1.3": "ten", "2.1": 16, "2.2": 3, "2.3": -1}
    for number, guess in guesses.items():
        lesson.guess(guess, 10.0, "ms", again=(number, f"How long is {number}?", 20.0))
    lesson.guess(1, 10.0, "ms", again=("3.1", "What is not known?", float("nan")))
    return capsys.readouterr().out


def asked_questions(capsys: pytest.CaptureFixture[str]) -> list[str]:
    lesson.ask()
    return capsys.readouterr().out.splitlines()


def test_a_wrong_guess_is_asked_again_with_other_numbers(
    wrong_guesses: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asks_again = "asks this again, with other numbers (pop question 2."
    questions = asked_questions(capsys)
    assert wrong_guesses.count(asks_again) == 3
    assert [question[:5] for question in questions] == ['"2.1"', '"2.2"', '"2.3"']
    assert "20" not in "".join(questions)
    before = "With the numbers of notebook 2, you guessed 16.0 and measured 10.0 ms."
    assert questions[0] == f'"2.1": How long is 2.1? ({before})'


def test_guesses_of_pop_questions_are_judged(
    wrong_guesses: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.ask_again(...)
    lesson.ask_again(12.5)
    lesson.ask_again({"2.1": 29, "2.2": 31, "2.3": "x", "1.1": 20})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("No guesses yet")
    assert lines[1].endswith("Write {'2.1': 12.5}.")
    assert lines[2] == (
        "2.1: your guess: 29.0 ms; measured: 20.0 ms; the guess is 1.45 times too high"
    )
    assert lines[4] == "2.3: 'x' is not a number. Write 12.5, without a unit."
    assert lines[5] == "'1.1' is not asked. Questions to ask: 2.1, 2.2 and 2.3."


def test_a_question_is_asked_until_its_guess_is_good(
    wrong_guesses: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.ask_again({"2.1": 29})
    lesson.guess(
        11, 10.0, "ms", again=("2.3", "How long is 2.3?", 20.0)
    )  # in the notebook itself
    capsys.readouterr()
    assert [question[:5] for question in asked_questions(capsys)] == ['"2.2"']
    lesson.ask_again({"2.2": 20})
    capsys.readouterr()
    lesson.ask_again(...)
    assert capsys.readouterr().out == "There is nothing to answer.\n"
    assert asked_questions(capsys) == [
        "No question to ask again: you entered no guess that was off by more than 1.5 times."
    ]


def test_a_damaged_file_of_guesses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guesses.json").write_text('{"1.1": {"words": "?"}}')
    with pytest.raises(
        LabError, match=r"guesses\.json, the file of wrong guesses, cannot be read"
    ):
        lesson.ask()


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_three_pop_questions_that_the_last_one_asks_again(name: str) -> None:
    numbers = [f"{int(name[:2])}.{i}" for i in (1, 2, 3)]
    sources = [cell.source for cell in code_cells(stored(name))]
    guesses = [text for text in markdown(name) if "**Guess:**" in text]
    assert re.findall(r'\("(\d\.\d)", asked, ', "\n".join(sources)) == numbers
    assert re.findall(r"\((\d\.\d)\)", "\n".join(guesses)) == numbers
    asks = "lesson.ask()" in sources and "lesson.ask_again(guesses_again)" in sources
    assert asks == (name in ASKING)


@pytest.mark.parametrize(
    ("answer", "right", "start"),
    [
        (..., 100.0, "No answer yet"),
        (110, 100.0, "Right."),
        (111, 100.0, "Not yet. Hint: think"),
        ("ninety", 100.0, "'ninety' is not a number"),
        (" B", "b", "Right."),
        ("c", "b", "Not yet. Hint: think"),
        (3, "b", "Not yet. Hint: think"),
    ],
)
def test_an_answer_is_right_wrong_or_none(
    answer: Any, right: float | str, start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.check(answer, right, "think")
    assert capsys.readouterr().out.startswith(start)


OF_RUNS = (
    lesson.figures,
    lesson.both_laws,
    lesson.compare,
    lesson.rows,
    lesson.draw,
    partial(lesson.explain, ceilings=FAST),
    partial(lesson.experiments, ceilings=FAST),
    partial(lesson.gains, ceilings=FAST),
)


def test_a_failed_measurement_is_a_sentence() -> None:
    failed = [make_record(make_run(status="failed", error="no memory"))]
    sentence = r"All runs failed\. 20 prompt tokens, repeat 1: no memory"
    for function in OF_RUNS:
        with pytest.raises(LabError, match=sentence):
            function(failed)
    assert LabError("It broke.", "Mend it.")._render_traceback_() == [
        "Error: It broke.\nMend it."
    ]


def test_what_a_notebook_cannot_show_is_named() -> None:
    with pytest.raises(LabError, match="Q5_0 with 2 threads are not measured"):
        lesson.kernels(FAST, MODEL, 2, ["Q5_0"])
    with pytest.raises(LabError, match="belong to no experiment"):
        lesson.rows([make_record(make_run())])


def test_a_build_without_rpc_is_a_sentence_in_place_of_a_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lesson.token_ms_in_processes(2, "tensor") is None
    out = " ".join(capsys.readouterr().out.split())
    assert "has no RPC" in out
    assert "-DGGML_RPC=ON" in out


def test_a_table_of_computed_figures_is_headed_by_its_first_column() -> None:
    frame = lesson.rows_of(
        {"way": "static", "steps": 6, "s": 1.23456}, {"way": "b", "steps": 5, "s": 2.0}
    )
    assert frame.index.name == "way"
    assert frame.loc["static"].tolist() == [6, "1.23"]


NAMES_AN_OUTPUT = re.compile(r"stored here|table above|last column")
"""Words with which a sentence says that its numbers are those of an output of the same notebook."""


@pytest.mark.parametrize("name", ALL)
def test_numbers_that_the_text_takes_from_the_outputs_are_there(name: str) -> None:
    outputs = ""
    for cell in code_cells(stored(name)):
        outputs += f"{printed(cell)} {shown(cell)} "
    values = [float(number) for number in numbers_in(outputs)]
    text = " ".join(" ".join(markdown(name)).split())
    for sentence in re.split(r"(?<=[.:?]) ", text):
        if NAMES_AN_OUTPUT.search(sentence):
            for number in numbers_in(sentence):
                n_decimals = len(number.partition(".")[2])
                assert float(number) in {round(value, n_decimals) for value in values}, (
                    sentence
                )


def test_verdicts_stand_beside_the_guesses(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"number": 7, "claim": "a", "verdict": "holds here", "words": "Holds: it does."},
        {
            "number": 10,
            "claim": "b",
            "verdict": "cannot be told",
            "words": "Cannot be told: it.",
        },
    ]
    session = SimpleNamespace(rows=rows)
    table = lesson.verdicts(session, {7: " Holds here", 10: ...})
    assert list(table["your guess"]) == [" Holds here", "no guess"]
    lesson.verdicts(session, {7: ..., 10: ...})
    lesson.reasons(session)
    assert capsys.readouterr().out.splitlines() == [
        "Right guesses: 1 of 1.",
        "You entered no guess.",
        "7. a: holds here",
        "Holds: it does.",
        "10. b: cannot be told",
        "Cannot be told: it.",
    ]
