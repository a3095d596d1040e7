"""The engine's process as its parent sees it."""

import os
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


def test_a_child_that_never_starts_has_a_process_id_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lab.process.worker._CHILD", "raise SystemExit(3)")
    with Worker() as worker:
        assert worker.pid == worker._process.pid
        with pytest.raises(WorkerDied, match="exit status 3"):
            worker.quantizations()
