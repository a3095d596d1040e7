"""The lab's child processes: start, end and diagnose them; and the child's own end of its pipes
(`serve`)."""

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
from typing import IO, NoReturn

from lab.errors import LabError

END_S = 5  # for a killed child to end
DIED = object()  # what follows a child's last reply
CREATE_NEW_PROCESS_GROUP = 0x200  # Windows
CAUSES = {
    "SIGKILL": "killed from outside; the system does this when memory runs out",
    "SIGSEGV": "a crash in native code",
    "SIGABRT": "native code aborted (a failed assertion)",
    "SIGILL": "llama.cpp was built for another CPU",
}
_PACKAGE = str(Path(__file__).parents[2])


def start(
    code: str,
    *arguments: str,
    stdout: IO[bytes] | int = subprocess.PIPE,
    stderr: IO[bytes] | int | None = subprocess.PIPE,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
) -> subprocess.Popen[bytes]:
    """A new Python process that runs `code`, with a pipe for its stdin.

    Every child of the lab starts here. `launcher` is a command that ends by executing the words
    after it, such as one that enters a control group first.
    """
    # Without -P a file random.py in the current folder would replace the standard library's module.
    program = f"import sys; sys.path.append({_PACKAGE!r}); {code}"
    # In a process group of its own, Ctrl-C does not reach the child. It stays in the session: Linux
    # shares processor time among sessions, and divides a session's share among its threads. Beside
    # a busy program of another session two spinning threads then take turns on one core.
    is_windows = os.name == "nt"
    return subprocess.Popen(
        [*launcher, sys.executable, "-P", "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=env,
        process_group=None if is_windows else 0,
        creationflags=CREATE_NEW_PROCESS_GROUP if is_windows else 0,
    )


def wait_for_end(process: subprocess.Popen[bytes], *listeners: threading.Thread) -> None:
    """After a kill: wait for the child and the threads that read its pipes, and close the pipes."""
    process.wait()
    for listener in listeners:
        listener.join(END_S)
    for pipe in filter(None, (process.stdin, process.stdout, process.stderr)):
        with suppress(OSError):
            pipe.close()


def listen(
    process: subprocess.Popen[bytes],
    pids: queue.SimpleQueue[int],
    replies: queue.SimpleQueue[object],
) -> None:
    """Read a child's stdout: the first line is its process id, each later line a reply.

    After the last reply follows DIED.
    """
    stdout: IO[bytes] = process.stdout  # type: ignore[assignment]
    with suppress(ValueError, OSError):  # the parent has closed it
        pids.put(int(stdout.readline()))
        for line in stdout:
            replies.put(line)
    pids.put(process.pid)
    replies.put(DIED)


def kill(process: subprocess.Popen[bytes], child_pid: Callable[[], int]) -> None:
    """Kill a child, and its launcher if Python starts through one (Windows).

    `child_pid` returns the process id that the child reports.
    """
    is_alive = process.poll() is None
    process.kill()
    if not is_alive:
        return
    pid = child_pid()
    if pid != process.pid:
        with suppress(OSError):
            os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


def cause_of_death(name: str, status: int, lines: Sequence[str]) -> str:
    """Why the process called `name` ended, with the last three `lines` of its stderr."""
    if status > 255:
        end = f"exit status {status:#x}"
    elif status >= 0:
        end = f"exit status {status}"
    else:
        names = {number.value: number.name for number in signal.Signals}
        end = names.get(-status, "an unknown signal")
    if end in CAUSES:
        end = f"{end} ({CAUSES[end]})"
    if not lines:
        return f"{name} ended: {end}."
    last_lines = " | ".join(lines[-3:]).rstrip(".")
    return f"{name} ended: {end}. Its last output: {last_lines}."


def serve(
    start: Callable[[], Callable[[dict[str, object]], dict[str, object]]],
    clean_up: Callable[[], object] = lambda: None,
) -> NoReturn:
    """In the child: answer requests until the parent ends, then call `clean_up`.

    The first line of output is the process id. A request is one JSON line. A reply is one JSON
    line: the answer of the function that `start` returns, or the error and the hint of a LabError.
    If `start` raises one, it answers every request. All other output goes to stderr.
    """
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of native code goes to stderr
    replies.write(f"{os.getpid()}\n".encode())
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    end_with_parent(requests.put, clean_up)
    try:
        answer = _answering(start)
        while True:
            reply = answer(json.loads(requests.get()))
            replies.write(json.dumps(reply).encode() + b"\n")
    except Exception:
        # A bug: the parent shows the traceback as the child's last output. Python's normal end
        # would abort, because the thread above waits for stdin, and look like a crash of llama.cpp.
        traceback.print_exc()
        os._exit(1)


def _answering(
    start: Callable[[], Callable[[dict[str, object]], dict[str, object]]],
) -> Callable[[dict[str, object]], dict[str, object]]:
    """The function that `start` returns, with a LabError as a reply."""
    try:
        answer = start()
    except LabError as problem:
        broken: dict[str, object] = {"error": problem.what, "hint": problem.hint}
        return lambda request: broken

    def reply(request: dict[str, object]) -> dict[str, object]:
        try:
            return answer(request)
        except LabError as problem:
            return {"error": problem.what, "hint": problem.hint}

    return reply


def end_with_parent(
    take: Callable[[bytes], object] = lambda line: None,
    clean_up: Callable[[], object] = lambda: None,
) -> None:
    """In a thread: take each line of stdin, and end this process when the parent closes it."""
    if hasattr(signal, "SIGTTOU"):  # `stty tostop` stops a background process that writes
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def read() -> None:
        for line in sys.stdin.buffer:
            take(line)
        clean_up()
        os._exit(0)  # native code may still run a long step

    threading.Thread(target=read, daemon=True).start()
