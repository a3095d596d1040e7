"""The client's end: requests sent and stamped in a process of its own, so that nothing else makes a stamp late.

The process reads one plan after the other from its stdin, and writes each request to a file when it has ended. Nothing
crosses the pipe while requests run. All requests share one asyncio loop.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from lab.core.lines import from_json, to_json
from lab.core.request import Request
from lab.endpoints.access import Access
from lab.endpoints.connection import Arrivals
from lab.endpoints.exchange import Line, Target, exchange, rehearse, target
from lab.endpoints.wire import Ask, Plan
from lab.errors import LabError

PREPARE_S = 0.1
"""How long before its time a request gets its connection."""


def serve() -> None:
    """Run plans from stdin until it ends."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # nothing else may write there
    replies.write(f"{os.getpid()}\n".encode())
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    while True:
        request = json.loads(requests.get())
        try:
            access = from_json(Access, json.dumps(request["access"]))
            _run(access, from_json(Plan, json.dumps(request["plan"])), Path(request["path"]))
            answer: dict[str, str] = {}
        except LabError as problem:
            answer = {"error": problem.what, "hint": problem.hint}
        except Exception:  # a bug: the parent shows the traceback as the last words
            traceback.print_exc()
            os._exit(1)
        replies.write(json.dumps(answer).encode() + b"\n")


def _read_requests(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)  # the parent is gone


def _run(access: Access, plan: Plan, path: Path) -> None:
    arrivals = Arrivals()
    with path.open("wb") as file, asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(arrivals)) as runner:
        gc.collect()
        gc.freeze()  # a search for garbage takes milliseconds; without what is here already, microseconds
        runner.run(_run_plan(target(access, plan.api, arrivals), plan, file))


async def _run_plan(to: Target, plan: Plan, file: IO[bytes]) -> None:
    """All requests, each written to `file` when it has ended."""
    lines = [Line() for _ in range(min(plan.n_at_once, len(plan.asks)))]
    await rehearse()
    n_first = sum((ask.scheduled_ns or 0) <= PREPARE_S * 1e9 for ask in plan.asks)
    await asyncio.gather(*(_warm(line, to) for line in lines[:n_first]))
    start_ns = time.perf_counter_ns()
    file.write(b"%d\n" % start_ns)
    file.flush()
    asks = iter(enumerate(plan.asks))
    await asyncio.gather(*(_user(line, asks, to, plan, start_ns, file) for line in lines))
    for line in lines:
        await line.close()


async def _user(
    line: Line, asks: Iterator[tuple[int, Ask]], to: Target, plan: Plan, start_ns: int, file: IO[bytes]
) -> None:
    """Send one request after the other: whichever is next when the last one has ended."""
    for index, ask in asks:
        due_ns = time.perf_counter_ns() - start_ns if ask.scheduled_ns is None else ask.scheduled_ns
        if plan.stop_s is not None and due_ns > plan.stop_s * 1e9:
            return  # what was due before is sent, however late
        if ask.scheduled_ns is not None:
            await asyncio.sleep(max(0.0, (start_ns + ask.scheduled_ns - time.perf_counter_ns()) / 1e9 - PREPARE_S))
            await _warm(line, to)
        request, text = await exchange(line, to, ask, plan, start_ns)
        _write(file, index, request, text)


async def _warm(line: Line, to: Target) -> None:
    """Open a connection ahead of time. Where that fails, the request will fail, and say it."""
    try:
        await line.open(to)
    except (OSError, TimeoutError):
        await line.close()


def _write(file: IO[bytes], index: int, request: Request, text: str) -> None:
    file.write(f"{index}\n{to_json(request)}\n{json.dumps(text)}\n".encode())
    file.flush()
