"""Files that a user names and a stranger made: pipes, devices, endless and sparse files."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lab
from lab.core import results
from lab.errors import LabError
from lab.features.quant import texts
from lab.features.turns import recorded_calls
from lab.features.why import pairing
from lab.formats import llama_bench_import
from lab.runner import as_options, prompts
from lab.show import canvas
from tests.support.command import run_lab

pytestmark = pytest.mark.skipif(os.name == "nt", reason="has no pipes in folders")
SPARSE_BYTES = 10**10


def read_settings(path: Path) -> object:
    os.environ[as_options.FOLDER] = str(path.parent)
    return as_options.settings(path.stem)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    # What reads, the name of its file, and the function.
    "results": ("a.jsonl", lambda path: results.read([path])),
    "a page": ("a.html", lambda path: results.read([path])),
    "import": ("a.json", lambda path: llama_bench_import.read(str(path))),
    "why": ("a.txt", lambda path: pairing.figures_of(str(path))),
    "--prompt": ("a.txt", lambda path: prompts.source(str(path))),
    "--prompt of lab quant": ("a.txt", lambda path: texts.texts_of(str(path))),
    "--replay": ("a.jsonl", recorded_calls.read),
    "--settings": ("a.json", read_settings),
}


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, SPARSE_BYTES)


@pytest.fixture
def in_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What waits or reads without end fails the test after some seconds."""

    def stop(*_: object) -> None:
        raise AssertionError("it did not end")

    monkeypatch.setenv(as_options.FOLDER, "none")
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("make", [make_pipe, make_endless, make_sparse])
@pytest.mark.parametrize("reader", READERS)
def test_no_reader_waits_or_reads_without_end(
    reader: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    name, read = READERS[reader]
    make(tmp_path / name)
    if reader == "results" and make is make_sparse:
        (sentence,) = results.read([tmp_path / name]).skipped
        assert "bytes" in sentence
        return
    with pytest.raises(LabError, match=r"not a (regular )?file|bytes|MB"):
        read(tmp_path / name)


class Endless(io.RawIOBase):
    """A stdin that never ends."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        buffer[:] = b"x" * len(buffer)
        return len(buffer)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize(
    "command", [("import", "-"), ("why", "-", "35 tokens/s", "--budget", "0")]
)
def test_stdin_has_an_end(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BufferedReader(Endless()))
    monkeypatch.setattr(sys, "stdin", stdin)
    code, _, err = run_lab(*command)
    assert code == 1
    assert "stdin has over" in err


@pytest.mark.parametrize(
    "command",
    [
        ("show", "LONG"),
        ("show", "a.jsonl", "--details"),
        ("report", "results", "--ceilings", "LONG"),
        ("plot", "results/sample-sweep-smollm2-135m-amd-epyc.jsonl", "-o", "LONG"),
        ("export", "results/sample-sweep-smollm2-135m-amd-epyc.jsonl", "-f", "LONG"),
        ("predict", "--ceilings", "LONG"),
        ("why", "LONG", "LONG", "--budget", "0"),
        ("show", "/proc/self/mem"),
        ("import", "/proc/self/mem"),
        ("quant", "--prompt", "/proc/self/mem"),
        ("measure", "-m", "LONG"),
        ("measure", "--prompt", "LONG"),
    ],
)
def test_a_path_that_no_system_has_is_a_sentence(command: tuple[str, ...]) -> None:
    code, _, err = run_lab(*(word.replace("LONG", "x" * 5_000) for word in command))
    assert code == 1
    assert err.startswith("Error: ")
    assert len(err) < 12_000


def test_a_width_that_is_no_number_is_no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "\N{SUPERSCRIPT TWO}")
    code, out, _ = run_lab("show", "results/sample-sweep-smollm2-135m-amd-epyc.jsonl")
    assert code == 0
    assert out


def test_matplotlib_reads_no_file_of_the_current_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "matplotlibrc")
    code = "from lab.show import canvas; canvas.drawn(lambda figure: None, (1, 1))"
    environment = {**os.environ, "PYTHONPATH": str(Path(lab.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, timeout=60)


def test_a_style_of_the_user_does_not_reach_a_picture() -> None:
    import matplotlib

    with matplotlib.rc_context({"text.usetex": True}):
        figure = canvas.drawn(lambda figure: figure.text(0, 0, "$x_{1$"), (1, 1))
        assert not figure.texts[0].get_usetex()
        assert not figure.texts[0].get_parse_math()
