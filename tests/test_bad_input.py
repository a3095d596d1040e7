"""Bad input, full disks, Ctrl-C and sudden death: a clear message, and nothing measured is lost."""

import errno
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from lab.core import results
from lab.core.record import CRASHED, OK
from lab.errors import LabError
from lab.process.worker import Worker
from lab.runner.progress import Status
from lab.show import console
from tests.support.command import run_lab, start_lab
from tests.support.records import make_record

posix = pytest.mark.skipif(os.name == "nt", reason="signals are POSIX's")


def fails(*arguments: object, says: str, status: int = 1) -> None:
    code, out, err = run_lab(
        "measure", "-r", "1", "-n", "2", "-t", "1", "--no-plot", *arguments
    )
    assert code == status, err
    assert says in err
    assert "tokens/s" not in out


def test_files_that_are_not_models(tmp_path: Path, embedded: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("This is a letter to my aunt.")
    fails("-m", text, says="text.gguf is not a GGUF file")

    cut = tmp_path / "cut.gguf"
    content = embedded.read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    fails("-m", cut, says="cut.gguf is truncated: it has 49,181,216 of 98,362,432 bytes")
    cut.write_bytes(content[:50_000])
    fails("-m", cut, says="cut.gguf is a broken GGUF file")
    fails("-m", tmp_path, says="is a folder")


def test_a_model_that_llama_cpp_refuses(tmp_path: Path, embedded: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(
        embedded.read_bytes().replace(b"blk.7.ffn_up.weight", b"blk.7.ffn_xx.weight")
    )
    fails("-m", broken, "-o", tmp_path / "out", says="llama.cpp cannot load broken.gguf")
    assert not list((tmp_path / "out").iterdir())


def test_results_folders_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    fails("-o", tmp_path / "file" / "results", says="Results cannot be written to")
    if Path("/proc/version").exists():
        fails("-o", "/proc/results", says="Results cannot be written to /proc/results")


def test_a_full_results_folder_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path)]
    if (
        sys.platform != "linux"
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("only an administrator of Linux can make a full disk here")
    try:
        (tmp_path / "other").write_text("the only page")
        fails("-p", "10,100", "-n", "200", "-o", tmp_path, says="No space left on device")
        assert [path.name for path in tmp_path.iterdir()] == ["other"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.skipif(os.name == "nt", reason="a POSIX shell closes the output")
@pytest.mark.parametrize("options", ["", "--json"])
def test_a_closed_output_is_no_traceback(tmp_path: Path, options: str) -> None:
    results.save(tmp_path / "a.jsonl", make_record())
    command = f"{sys.executable} -m lab show {options} {tmp_path} >&-"
    ended = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0
    assert ended.stderr == ""


@pytest.mark.skipif(
    not hasattr(os, "posix_fallocate"), reason="the system cannot reserve space"
)
def test_a_full_folder_for_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(LabError, match="Temporary files cannot be written: No space left"):
        Worker()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_to_a_full_disk_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    results.save(path, make_record())
    command = f"{sys.executable} -m lab export --as csv --table steps {path} > /dev/full"
    ended = subprocess.run(
        ["sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "The output cannot be written: No space left on device" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
@pytest.mark.parametrize(
    "command", ["report FILE -f OUT/page.html", "export FILE -f OUT/rows.json"]
)
def test_a_disk_that_fills_up_leaves_no_part_of_a_file(tmp_path: Path, command: str) -> None:
    path = tmp_path / "a.jsonl"
    out = tmp_path / "out"
    results.save(path, make_record())
    arguments = command.replace("FILE", str(path)).replace("OUT", str(out))
    # Files of at most 1 kB. Python 3.11 would leave compiled modules that end there (-B).
    limited = f"trap '' XFSZ; ulimit -f 1; {sys.executable} -B -m lab {arguments}"
    ended = subprocess.run(
        ["bash", "-c", limited],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "cannot be written: File too large" in ended.stderr, ended.stderr
    assert not list(out.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("measure", "--budget", "3min"), "--budget has an effect only with --until"),
        (
            ("export", "RESULTS", "--table", "steps"),
            "--table steps has no effect with --as json",
        ),
        (("predict", "--ceilings", "/nonexistent"), "There is no folder /nonexistent"),
    ],
)
def test_options_without_effect_are_errors(
    arguments: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    results.save(path, make_record())
    code, _, err = run_lab(*(path if word == "RESULTS" else word for word in arguments))
    assert code == 1
    assert says in err


def read_until(process: Any, text: str) -> None:
    """Read what a lab says until it says `text`."""
    line = process.stderr.readline()
    while text not in line:
        assert line, f"the lab ended without saying {text}"
        line = process.stderr.readline()


def long_measurement(folder: Path) -> tuple[Any, psutil.Process]:
    """A lab that has finished a run of 10 tokens and is in a prefill of 10,000; its engine."""
    sizes = ("-p", "10,10000", "-n", "2", "-r", "3", "-t", "1", "--seed", "5")
    process = start_lab("measure", *sizes, "--no-plot", "-o", folder)
    read_until(process, "10 prompt tokens, repeat 1")
    time.sleep(0.2)
    children = [
        child for child in psutil.Process(process.pid).children() if child.is_running()
    ]
    assert len(children) == 1
    return process, children[0]


def finished_runs(folder: Path) -> list[tuple[int, str]]:
    reading = results.read([folder])
    assert not reading.skipped
    return [(r.run.n_prompt, r.run.status) for r in reading.records if not r.run.warmup]


@posix
def test_ctrl_c_in_a_long_prefill(tmp_path: Path) -> None:
    process, child = long_measurement(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Interrupted. 1 finished run is in" in err
    assert "Traceback" not in err
    assert finished_runs(tmp_path) == [(10, OK)]
    assert not child.is_running()


@posix
def test_an_engine_that_is_killed_in_the_middle(tmp_path: Path) -> None:
    process, child = long_measurement(tmp_path)
    child.kill()
    read_until(process, "10,000 prompt tokens, repeat 1: crashed")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert finished_runs(tmp_path) == [(10, OK), (10_000, CRASHED)]
    assert any("SIGKILL" in (r.run.error or "") for r in results.read([tmp_path]).records)


@posix
def test_a_lab_that_is_killed_takes_its_engine_along(tmp_path: Path) -> None:
    process, child = long_measurement(tmp_path)
    process.kill()
    process.communicate()
    child.wait(timeout=2)
    assert finished_runs(tmp_path) == [(10, OK)]


def test_lengths_without_commas_are_met_with_a_hint() -> None:
    code, _, err = run_lab("measure", "--prompt-len", 10, 100, 500)
    assert code == 1
    assert "--prompt-len 10,100,1000" in err


def test_progress_on_a_terminal_replaces_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    err = console.Terminal(file=io.StringIO(), force_terminal=True, width=80)
    with console.transfer(err) as show:
        show("a\x1bfile", 0, 10**7)
    with console.progress(err, None, str) as (watch, _):
        watch(Status("prefill", left_s=5))
    shown = cast(io.StringIO, err.file).getvalue()
    clear = "\r\x1b[2K"
    assert shown.startswith(f"{clear}a?file: 0 of 10 MB\n")
    assert shown.count("prefill; about 5 s left") == 2  # Live shows it anew when it ends
    assert shown.endswith("\x1b[2K")
