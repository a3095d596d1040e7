"""The child's own end of its pipes: requests from stdin, replies on stdout, and its end when the parent has ended."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from lab.errors import LabError

Value = TypeVar("Value")


def serve(
    start: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]], clean_up: Callable[[], object] = lambda: None
) -> NoReturn:
    """Answer requests until the parent ends, with the function that `start` returns; then `clean_up`.

    The first line of output is the process id. A request is one JSON line; a reply is one JSON line: the answer, or the
    error and the hint of a LabError. That of `start` answers every request. All other output goes to stderr.
    """
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # output of native code goes to stderr
    replies.write(f"{os.getpid()}\n".encode())
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    end_with_parent(requests.put, clean_up)
    answer = _tried(start)
    while True:
        request = json.loads(requests.get())
        reply = answer if isinstance(answer, LabError) else _tried(lambda: answer(request))  # noqa: B023
        if isinstance(reply, LabError):
            reply = {"error": reply.what, "hint": reply.hint}
        replies.write(json.dumps(reply).encode() + b"\n")


def _tried(call: Callable[[], Value]) -> Value | LabError:
    """What `call` returns, or its LabError. After a bug the parent shows the traceback as the child's last output."""
    try:
        return call()
    except LabError as problem:
        return problem
    except Exception:
        traceback.print_exc()
        os._exit(1)


def end_with_parent(
    take: Callable[[bytes], object] = lambda line: None, clean_up: Callable[[], object] = lambda: None
) -> None:
    """In a thread: take each line of stdin, and end this process when the parent closes it."""

    def read() -> None:
        for line in sys.stdin.buffer:
            take(line)
        clean_up()
        os._exit(0)  # native code may still run a long step

    threading.Thread(target=read, daemon=True).start()
