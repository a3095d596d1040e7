"""The engine's process as its parent sees it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lab.process.worker import Worker, WorkerDied

LAUNCHER = """#!{python}
import subprocess, sys
sys.exit(subprocess.call([{python!r}, *sys.argv[1:]]))
"""


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Python as a virtual environment of Windows starts it: by a process that starts the real one
    and waits."""
    path = tmp_path / "python"
    path.write_text(LAUNCHER.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def has_ended(process: psutil.Process) -> bool:
    """Whether it ends within some seconds; a zombie only waits for init to note its end."""
    for _ in range(100):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(
    os.name == "nt",
    reason="needs a script that can be executed; there every test has a launcher",
)
def test_the_engine_is_known_by_its_own_process_id(launcher: Path) -> None:
    with Worker() as worker:
        engine = psutil.Process(worker.pid)
        started = psutil.Process(worker._process.pid)
        assert engine.ppid() == started.pid
        assert str(launcher) in started.cmdline()
        assert worker.build.devices
        worker.restart()
        assert has_ended(engine)
        assert worker.quantizations()  # the files that both share are still there
        engine = psutil.Process(worker.pid)
        assert engine.ppid() == worker._process.pid
    assert has_ended(engine)


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_a_killed_engine_is_known_to_be_dead_behind_a_launcher(launcher: Path) -> None:
    with Worker() as worker:
        psutil.Process(worker.pid).kill()
        with pytest.raises(WorkerDied):
            worker.quantizations()
        worker.restart()
        assert worker.quantizations()


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_a_kill_from_outside_is_no_native_crash_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr("lab.process.worker._CHILD", code)
    with Worker() as worker, pytest.raises(WorkerDied, match="killed from outside") as death:
        worker.quantizations()
    assert not death.value.is_native_crash
    assert "a smaller model" in death.value.hint


def test_a_child_that_never_starts_has_a_process_id_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lab.process.worker._CHILD", "raise SystemExit(3)")
    with Worker() as worker:
        assert worker.pid == worker._process.pid
        with pytest.raises(WorkerDied, match="exit status 3") as death:
            worker.quantizations()
        assert not death.value.hint


@pytest.mark.skipif(os.name == "nt", reason="needs sessions")
def test_the_engine_stays_in_the_session_but_not_in_the_process_group() -> None:
    """A terminal's Ctrl-C does not reach it, and Linux counts its time with the terminal's."""
    with Worker() as worker:
        assert os.getsid(worker.pid) == os.getsid(0)
        assert os.getpgid(worker.pid) == worker.pid
        assert os.getpgid(worker.pid) != os.getpgid(0)


CHILD = """
import sys
from lab.process import spawning

def answer(request):
    print("written to the terminal", file=sys.stderr)
    return {"value": "1"}

spawning.serve(lambda: answer)
"""
PARENT = """
import sys, time
from pathlib import Path
from lab.process import spawning

child_code, pid_file, answer_file, _ = sys.argv[1:]
child = spawning.start(child_code, stderr=None)
Path(pid_file).write_text(child.stdout.readline().decode())
child.stdin.write(b"{}\\n")
child.stdin.flush()
Path(answer_file).write_bytes(child.stdout.readline())
time.sleep(60)
"""
TERMINAL = """
import os, pty, signal, sys, time
from pathlib import Path

parent_code, *arguments = sys.argv[1:]
_, _, answer_file, how = arguments
pid, terminal = pty.fork()
if pid == 0:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
    os.system("stty tostop")
    os.execv(sys.executable, [sys.executable, "-c", parent_code, *arguments])
while not Path(answer_file).exists():
    time.sleep(0.05)
if how == "stop":
    os.kill(pid, signal.SIGSTOP)  # no shell that Ctrl-Z returns to
    os.waitpid(pid, os.WUNTRACED)
    os.kill(pid, signal.SIGKILL)
elif how == "interrupt":
    os.write(terminal, b"\\x03")
os.close(terminal)
os.waitpid(pid, 0)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs a terminal of Unix")
@pytest.mark.parametrize("how", ["stop", "interrupt", "close"])
def test_a_child_of_a_terminal_leaves_nothing_behind(how: str, tmp_path: Path) -> None:
    """Also with `stty tostop`, which stops background processes that write to the terminal."""
    paths = [str(tmp_path / "pid"), str(tmp_path / "answer")]
    command = [sys.executable, "-c", TERMINAL, PARENT, CHILD, *paths, how]
    subprocess.run(command, check=True, timeout=20)
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or has_ended(psutil.Process(pid))
