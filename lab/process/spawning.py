"""The lab's child processes: start, end and diagnose them; and the child's own end of its pipes (`serve`)."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from lab.errors import LabError

END_S = 5  # for a killed child to end
DIED = object()
LIB_VARIABLE = "LLAMA_CPP_LIB_PATH"  # where llama-cpp-python finds its libraries' folder
_PACKAGE = str(Path(__file__).parents[2])


def start(
    code: str,
    *arguments: str,
    stdout: IO[bytes] | int = subprocess.PIPE,
    stderr: IO[bytes] | int | None = subprocess.PIPE,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """A new Python process that runs `code`, with a pipe for its stdin. Every child of the lab starts here."""
    apart: dict[str, Any] = (
        {"creationflags": 0x200} if os.name == "nt" else {"start_new_session": True}
    )
    return subprocess.Popen(
        # -P: a file random.py in the current folder would replace the standard library's module
        [
            sys.executable,
            "-P",
            "-c",
            f"import sys; sys.path.append({_PACKAGE!r}); {code}",
            *arguments,
        ],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=env,
        **apart,  # Ctrl-C does not reach the child; 0x200: CREATE_NEW_PROCESS_GROUP
    )


def wait_for_end(process: subprocess.Popen[bytes], *listeners: threading.Thread) -> None:
    """After a kill: wait for the child and the threads that read its pipes, then close the pipes."""
    process.wait()
    for listener in listeners:
        listener.join(END_S)
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with suppress(OSError):
            pipe.close()


def environment(lib: str | None = None) -> dict[str, str]:
    """The environment of a child that loads the llama.cpp libraries in folder `lib` (None: the installed ones)."""
    own = {name: value for name, value in os.environ.items() if name != LIB_VARIABLE}
    return own | {"GGML_NO_BACKTRACE": "1", **({} if lib is None else {LIB_VARIABLE: lib})}


def listen(
    process: subprocess.Popen[bytes], pids: queue.SimpleQueue[int], replies: queue.SimpleQueue[Any]
) -> None:
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
    words = f"exit status {status:#x}" if status > 255 else f"exit status {status}"
    if status < 0:
        words = (
            signal.Signals(-status).name if -status in set(signal.Signals) else "an unknown signal"
        )
    causes = {
        "SIGKILL": "killed from outside; the system does this when memory runs out",
        "SIGSEGV": "a crash in native code",
        "SIGABRT": "native code aborted (a failed assertion)",
        "SIGILL": "llama.cpp was built for another CPU",
    }
    last_lines = f" Its last output: {' | '.join(lines[-3:]).rstrip('.')}." if lines else ""
    return f"{name} ended: {words}{f' ({causes[words]})' if words in causes else ''}.{last_lines}"


def serve(
    start: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]],
    clean_up: Callable[[], object] = lambda: None,
) -> NoReturn:
    """In the child: answer requests until the parent ends, with the function that `start` returns; then `clean_up`.

    The first line of output is the process id. A request is one JSON line; a reply is one JSON line: the answer, or the
    error and the hint of a LabError. That of `start` answers every request. All other output goes to stderr.
    """
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of native code goes to stderr
    replies.write(f"{os.getpid()}\n".encode())
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    end_with_parent(requests.put, clean_up)
    try:
        try:
            answer = start()
        except LabError as problem:
            broken = {"error": problem.what, "hint": problem.hint}
            answer = lambda request: broken  # noqa: E731
        while True:
            request = json.loads(requests.get())
            try:
                reply = answer(request)
            except LabError as problem:
                reply = {"error": problem.what, "hint": problem.hint}
            replies.write(json.dumps(reply).encode() + b"\n")
    except Exception:
        # A bug: the parent shows the traceback as the child's last output. Python's own end would abort, because the
        # thread above waits for stdin, and look like a crash of llama.cpp.
        traceback.print_exc()
        os._exit(1)


def end_with_parent(
    take: Callable[[bytes], object] = lambda line: None,
    clean_up: Callable[[], object] = lambda: None,
) -> None:
    """In a thread: take each line of stdin, and end this process when the parent closes it."""

    def read() -> None:
        for line in sys.stdin.buffer:
            take(line)
        clean_up()
        os._exit(0)  # native code may still run a long step

    threading.Thread(target=read, daemon=True).start()
