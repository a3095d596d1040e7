"""The six sessions of notebook 9: each is graded right by its command, and sound ones are clean."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lab.app.reading import read
from lab.core import results
from lab.errors import LabError
from lab.features.lessons import faults, lesson
from lab.features.lessons.faults import FAULTS, SESSIONS, SHOW, WHY, FaultSession
from lab.features.recording import breaks
from lab.features.recording.lines import CLIENT, SERVER, Cause
from tests.bench import six_faults as planting
from tests.support.command import run_lab

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
PLANTED = {
    1: (faults.SWAPPED, "memory was short in 4 of 7 runs"),
    2: (faults.CACHE, "message 1 (system) changed, first at character 22: a time of day"),
    3: (faults.THREADS, "The likely cause is threads, threads_batch 1 in A, 2 in B"),
    4: (faults.SPECULATION, "The main cause is speculation"),
    5: (faults.THROTTLED, "heat or a power limit slowed the CPU or GPU in 4 of 7 runs"),
    6: (faults.KERNEL, "memory is not the limit"),
}
"""The fault of each session, and the words with which its command names it."""


@pytest.fixture(autouse=True)
def in_the_notebooks_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


def test_each_fault_is_planted_once() -> None:
    assert sorted(fault for fault, _ in PLANTED.values()) == sorted(FAULTS)
    assert list(PLANTED) == list(SESSIONS)


@pytest.mark.parametrize("number", SESSIONS)
def test_the_named_fault_is_the_planted_one(number: int) -> None:
    assert faults.named(SESSIONS[number]) == [PLANTED[number][0]]


@pytest.mark.parametrize("number", SESSIONS)
def test_the_command_itself_names_the_planted_fault(number: int, tmp_path: Path) -> None:
    session = SESSIONS[number]
    options = ["--no-plot", "--out", str(tmp_path)] if session.command == WHY else []
    status, out, _ = run_lab(*session.arguments, *options)
    text = " ".join(out.split())
    assert status == 0
    for named, (_, cause) in PLANTED.items():
        assert (cause in text) == (named == number), cause


@pytest.mark.parametrize("number", SESSIONS)
def test_a_guess_is_graded(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    planted, cause = PLANTED[number]
    lesson.grade(number, f" {planted.upper()}")
    out = capsys.readouterr().out
    assert cause in " ".join(out.split())
    assert FAULTS[planted] in out
    assert out.endswith("Your guess is right.\n")


@pytest.mark.parametrize(
    ("guess", "end"),
    [
        (..., "You entered no guess. The words are: threads, "),
        ("cache", "Your guess was cache: not this time."),
        ("caches", "'caches' is none of the words: threads, "),
        (3, "3 is none of the words"),
        (None, "None is none of the words"),
    ],
)
def test_a_wrong_guess_is_a_sentence(
    guess: Any, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lesson.grade(6, guess)
    assert end in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("number", SESSIONS)
def test_what_is_observed_names_no_fault(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    table = lesson.observe(number)
    shown = f"{capsys.readouterr().out} {table.to_string()}"
    assert not table.empty
    for _, cause in PLANTED.values():
        assert cause not in shown
    assert "throttled" not in shown
    assert "swapped" not in shown


def test_a_session_that_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (0, 7, -1):
        with pytest.raises(LabError, match="There is no session"):
            lesson.observe(number)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LabError, match="is not here"):
        lesson.grade(1, "cache")


# Sound sessions


CLEAN = [
    FaultSession(("base.jsonl", str(planting.SAMPLE)), WHY, ""),
    *(
        FaultSession((str(path),), SHOW, "")
        for path in sorted((ROOT / "results").glob("sample-*.jsonl"))
    ),
]


@pytest.mark.parametrize("session", CLEAN, ids=lambda session: Path(session.files[-1]).stem)
def test_a_sound_session_is_graded_clean(session: FaultSession) -> None:
    assert faults.named(session) == []


def answer_with_threads(fast: int, slow: int, folder: Path) -> list[str]:
    """What is named in the sessions of one and two threads, with other numbers of threads."""
    path = folder / "threads.jsonl"
    for record in read((str(FOLDER / "faults/3.jsonl"),)).records:
        n_threads = fast if record.settings.n_threads == 1 else slow
        settings = dataclasses.replace(
            record.settings, n_threads=n_threads, n_threads_batch=n_threads
        )
        results.save(path, dataclasses.replace(record, settings=settings))
    return faults.named(FaultSession((str(path),), WHY, ""))


def test_fewer_threads_that_are_slower_are_not_too_many(tmp_path: Path) -> None:
    assert answer_with_threads(2, 3, tmp_path) == [faults.THREADS]
    (tmp_path / "threads.jsonl").unlink()
    assert answer_with_threads(2, 1, tmp_path) == []


@pytest.mark.parametrize(
    ("counter", "fault"),
    [("n_throttled", faults.THROTTLED), ("memory_pressure_s", faults.SWAPPED)],
)
@pytest.mark.parametrize("n_disturbed", [1, 3, 7])
def test_counters_of_any_number_of_runs_are_named(
    counter: str, fault: str, n_disturbed: int, tmp_path: Path
) -> None:
    path = tmp_path / "some.jsonl"
    for index, record in enumerate(planting.clean_runs()):
        rise = 2 if index < n_disturbed else 0
        changed = planting.with_run(record, record.run.steps, **{counter: (1, 1 + rise)})
        results.save(path, dataclasses.replace(changed, session="other"))
    assert faults.named(FaultSession(("base.jsonl", str(path)), WHY, "")) == [fault]


@pytest.mark.parametrize(
    ("what", "by", "is_named"),
    [
        ("a date", CLIENT, True),
        ("a date and time", CLIENT, True),
        ("a time of day", CLIENT, True),
        ("a number", CLIENT, False),
        ("an identifier", CLIENT, False),
        ("", CLIENT, False),
        ("a date", SERVER, False),
    ],
)
def test_a_cache_is_broken_by_a_date_if_the_client_changed_one(
    what: str, by: str, is_named: bool
) -> None:
    call = faults.calls_in(read(("faults/2.jsonl",), with_findings=True))[1]
    cause = Cause(
        kind=breaks.CHANGED, by=by, part="message", index=0, role="system", what=what
    )
    changed = dataclasses.replace(call, cause=cause)
    assert (faults.CACHE in list(faults.in_calls([changed]))) == is_named
    assert list(faults.in_calls([dataclasses.replace(call, cause=None)])) == []


# The files


def test_the_files_are_small_and_name_no_folder() -> None:
    files = sorted((FOLDER / "faults").iterdir())
    assert {path for session in SESSIONS.values() for path in session.files} == {
        path.name for path in files
    }
    for path in files:
        assert path.stat().st_size < 100_000
        assert not any(folder in path.read_text() for folder in ("/work", "/root", "/home"))


@pytest.mark.parametrize("name", ["base", "1", "5", "6"])
def test_the_planted_files_are_what_the_script_writes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planting, "FOLDER", tmp_path)
    planting.SESSIONS[name]()
    file = f"{name}.jsonl"
    assert (tmp_path / file).read_bytes() == (FOLDER / "faults" / file).read_bytes()
