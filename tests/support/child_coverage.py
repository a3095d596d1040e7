"""Coverage of the lab's children too: they end by themselves and write it, instead of being killed.

uv pip install --python .venv/bin/python pytest-cov
python -m pytest -p tests.support.child_coverage --cov --cov-report=term -n 0 tests/test_real.py
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress

from lab.process import spawning, worker

PATIENCE_S = 4
kill = spawning.kill


def end(process: subprocess.Popen[bytes], child_pid: Callable[[], int]) -> None:
    """Close the child's stdin, at which it ends; kill it if it does not."""
    if process.poll() is None and process.stdin:
        with suppress(OSError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    kill(process, child_pid)


vars(spawning)["kill"] = end
vars(worker)["kill"] = end
