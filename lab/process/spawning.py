"""Start, end and diagnose the lab's child processes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

END_S = 5
"""Time limit for a killed child to end."""

DIED = object()

LIB_VARIABLE = "LLAMA_CPP_LIB_PATH"
"""The environment variable with which llama-cpp-python finds its libraries' folder."""

_PACKAGE = str(Path(__file__).parents[2])


def start(
    code: str,
    *arguments: str,
    stdout: IO[bytes] | int = subprocess.PIPE,
    stderr: IO[bytes] | int | None = subprocess.PIPE,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """A new Python process that runs `code`, with a pipe for its stdin. Every child of the lab starts here.

    -P: otherwise a file random.py in the current folder would replace the standard library's module.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"import sys; sys.path.append({_PACKAGE!r}); {code}", *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=env,
        **detached(),
    )


def wait_for_end(process: subprocess.Popen[bytes], *listeners: threading.Thread) -> None:
    """After a kill: wait for the child and the threads that read its pipes, then close the pipes."""
    process.wait()
    for listener in listeners:
        listener.join(END_S)
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with suppress(OSError):
            pipe.close()


def detached() -> dict[str, Any]:
    """Arguments of Popen that keep Ctrl-C from the child."""
    if os.name == "nt":
        return {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP
    return {"start_new_session": True}


def environment(lib: str | None = None) -> dict[str, str]:
    """The environment of a child that loads the llama.cpp libraries in folder `lib` (None: the installed ones)."""
    own = {name: value for name, value in os.environ.items() if name != LIB_VARIABLE}
    return own | {"GGML_NO_BACKTRACE": "1", **({} if lib is None else {LIB_VARIABLE: lib})}


def listen(process: subprocess.Popen[bytes], pids: queue.SimpleQueue[int], replies: queue.SimpleQueue[Any]) -> None:
    """Read a child's stdout: the first line is its process id, each other line a reply, and then follows DIED."""
    stdout: IO[bytes] = process.stdout  # type: ignore[assignment]
    with suppress(ValueError, OSError):  # the parent has closed it
        pids.put(int(stdout.readline()))
        for line in stdout:
            replies.put(line)
    pids.put(process.pid)
    replies.put(DIED)


def kill(process: subprocess.Popen[bytes], own_pid: Callable[[], int]) -> None:
    """Kill a child. If Python starts through a launcher (Windows), `own_pid` returns the child's own process id."""
    alive = process.poll() is None
    process.kill()
    with suppress(OSError):
        if alive and (pid := own_pid()) != process.pid:
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


def cause_of_death(name: str, status: int, lines: Sequence[str]) -> str:
    """Why the process called `name` ended, with the last three `lines` of its stderr."""
    last_lines = f" Its last output: {' | '.join(lines[-3:]).rstrip('.')}." if lines else ""
    return f"{name} ended: {explain_exit(status)}.{last_lines}"


def explain_exit(status: int) -> str:
    """A child's exit status in words."""
    if status >= 0:
        return f"exit status {status:#x}" if status > 255 else f"exit status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else "an unknown signal"
    causes = {
        "SIGKILL": "killed from outside; the system does this when memory runs out",
        "SIGSEGV": "a crash in native code",
        "SIGABRT": "native code aborted (a failed assertion)",
        "SIGILL": "llama.cpp was built for another CPU",
    }
    return f"{name} ({causes[name]})" if name in causes else name
