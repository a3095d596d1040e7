"""The lab as a command, in this process or in one of its own."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest


def start_lab(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """The real command, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "lab", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        **options,
    )


def run_process(*arguments: object, timeout_s: float = 120) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the real command."""
    process = start_lab(*arguments)
    out, err = process.communicate(timeout=timeout_s)
    assert "Traceback" not in err, err
    return process.returncode, out, err


def run_lab(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command's `main` in this process.

    A process of its own starts Python, pandas and matplotlib anew, which takes seconds:
    `run_process` is for tests of that. What `main` does to signals is undone.
    """
    from lab.main import main

    out, err = (
        io.TextIOWrapper(
            io.BytesIO(),
            encoding="utf-8",
            write_through=True,
        )
        for _ in range(2)
    )
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if hasattr(signal, "SIGHUP"):
        handlers[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)
    status: object = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["lab", *map(str, arguments)])
        try:
            main()
        except SystemExit as end:
            status = end.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    written = [stream.buffer.getvalue().decode() for stream in (out, err)]
    assert isinstance(status, int), written[1]
    assert "Traceback" not in written[1], written[1]
    return status, written[0], written[1]
