"""What the child processes of the lab have in common: how they start, and what their end means."""

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
"""How long the parent waits for a killed child to be gone."""

DIED = object()

LIB_VARIABLE = "LLAMA_CPP_LIB_PATH"
"""The environment variable in which llama-cpp-python looks for the folder of its libraries."""


_PACKAGE = str(Path(__file__).parents[2])


def start(
    code: str, *arguments: str, stderr: IO[bytes] | int = subprocess.PIPE, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Python in a process of its own that runs `code`, with pipes to its stdin and from its stdout.

    -P: a file named random.py in the folder where the lab is started shall not become part of it.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", f"import sys; sys.path.append({_PACKAGE!r}); {code}", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=env,
        **detached(),
    )


def wait_for_end(process: subprocess.Popen[bytes], *listeners: threading.Thread) -> None:
    """After a kill: until the child is gone and nothing holds the other ends of its pipes, which are closed then."""
    process.wait()
    for listener in listeners:
        listener.join(END_S)
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with suppress(OSError):
            pipe.close()


def detached() -> dict[str, Any]:
    """Arguments of Popen with which Ctrl-C reaches the parent alone."""
    if os.name == "nt":
        return {"creationflags": 0x200}  # CREATE_NEW_PROCESS_GROUP
    return {"start_new_session": True}


def environment(lib: str | None = None) -> dict[str, str]:
    """The environment of a child that loads the llama.cpp libraries in folder `lib`; None: those installed."""
    own = {name: value for name, value in os.environ.items() if name != LIB_VARIABLE}
    return own | {"GGML_NO_BACKTRACE": "1", **({} if lib is None else {LIB_VARIABLE: lib})}


def listen(process: subprocess.Popen[bytes], pids: queue.SimpleQueue[int], replies: queue.SimpleQueue[Any]) -> None:
    """Put what a child writes into queues: its own process id, then its replies, a line each, and at its end DIED."""
    stdout: IO[bytes] = process.stdout  # type: ignore[assignment]
    with suppress(ValueError, OSError):  # the parent has closed it
        pids.put(int(stdout.readline()))
        for line in stdout:
            replies.put(line)
    pids.put(process.pid)
    replies.put(DIED)


def kill(process: subprocess.Popen[bytes], own_pid: Callable[[], int]) -> None:
    """End a child. Where Python starts through a launcher (Windows), `own_pid` returns the child's own process id."""
    alive = process.poll() is None
    process.kill()
    with suppress(OSError):
        if alive and (pid := own_pid()) != process.pid:
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


def cause_of_death(name: str, status: int, lines: Sequence[str]) -> str:
    """Why the process called `name` ended, with the last of the lines that it wrote to stderr."""
    last_words = f" Its last words: {' | '.join(lines[-3:]).rstrip('.')}." if lines else ""
    return f"{name} ended: {explain_exit(status)}.{last_words}"


def explain_exit(status: int) -> str:
    """An exit status of a child in words."""
    if status >= 0:
        return f"exit status {status:#x}" if status > 255 else f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "an unknown signal"
    causes = {
        "SIGKILL": "killed from outside; when memory is short, the system does this",
        "SIGSEGV": "a crash in native code",
        "SIGABRT": "native code gave up (a failed assertion)",
        "SIGILL": "a build for another CPU",
    }
    return f"{name} ({causes[name]})" if name in causes else name
