"""The client's end: requests sent and stamped in a process of its own, so that nothing else makes a stamp late.

The process reads one plan after the other from its stdin, and writes each request to a file when it has ended. Nothing
crosses the pipe while requests run. All requests share one asyncio loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lab.core.lines import from_json, to_json
from lab.core.record import OK
from lab.core.request import Request
from lab.endpoints.access import Access
from lab.endpoints.connection import Arrivals
from lab.endpoints.exchange import Line, Target, exchange, rehearse, target
from lab.endpoints.wire import Plan, fresh_nonce
from lab.errors import LabError

PREPARE_S = 0.1
"""How long before its time a request gets its connection."""

PAUSE_S = 0.25
"""How long a user waits after a failure: a server that refuses at once is not asked thousands of times a second."""


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
        runner.run(_run_plan(target(access, plan.api, arrivals, plan.path), plan, file))


async def _run_plan(to: Target, plan: Plan, file: IO[bytes]) -> None:
    """All requests, each written to `file` when it has ended."""
    lines = [Line() for _ in range(min(plan.n_at_once, plan.n_all))]
    await rehearse()
    n_first = plan.n_all if plan.times_ns is None else sum(ns <= PREPARE_S * 1e9 for ns in plan.times_ns)
    await asyncio.gather(*(_warm(line, to) for line in lines[:n_first]))
    load = _Load(plan, iter(range(plan.n_all)), time.perf_counter_ns())
    file.write(b"%d\n" % load.start_ns)
    file.flush()
    await asyncio.gather(*(_user(line, load, to, file) for line in lines))
    for line in lines:
        await line.close()


@dataclass
class _Load:
    """A plan while it runs: what all users share."""

    plan: Plan
    numbers: Iterator[int]  # of requests that are not sent yet
    start_ns: int
    n_wanted: int = 0  # requests in flight, or waited for, that were due before the plan's `stop_s`
    over: asyncio.Event = field(default_factory=asyncio.Event)  # set while there are none

    def is_late(self, due_ns: int) -> bool:
        """Whether what is due then is due after the stop."""
        return self.plan.stop_s is not None and due_ns > self.plan.stop_s * 1e9

    def count(self, n_wanted: int) -> None:
        """So many more that were due before the stop."""
        self.n_wanted += n_wanted
        (self.over.clear if self.n_wanted else self.over.set)()


async def _user(line: Line, load: _Load, to: Target, file: IO[bytes]) -> None:
    """Send one request after the other: whichever is next when the last one has ended."""
    plan, rng = load.plan, random.Random()
    for number in load.numbers:
        ask = plan.asks[number % len(plan.asks)]
        scheduled_ns = None if plan.times_ns is None else plan.times_ns[number]
        due_ns = time.perf_counter_ns() - load.start_ns if scheduled_ns is None else scheduled_ns
        is_wanted = not load.is_late(due_ns)
        load.count(is_wanted)
        if scheduled_ns is not None:
            await _until_nearly(load, scheduled_ns, is_wanted)
        if not is_wanted and load.over.is_set():
            return
        if scheduled_ns is not None:
            await _warm(line, to)
        if ask.nonce is not None:
            ask = dataclasses.replace(ask, body=ask.body.replace(ask.nonce, fresh_nonce(rng), 1))
        request, text = await exchange(line, to, ask, plan, load.start_ns, scheduled_ns)
        load.count(-is_wanted)
        _write(file, number, request, text)
        if request.status != OK and scheduled_ns is None:
            await asyncio.sleep(PAUSE_S)


async def _until_nearly(load: _Load, scheduled_ns: int, is_wanted: bool) -> None:
    """Sleep until a request's connection is to be prepared, or nobody waits for it any more."""
    left_s = (load.start_ns + scheduled_ns - time.perf_counter_ns()) / 1e9 - PREPARE_S
    if left_s > 0 and is_wanted:
        await asyncio.sleep(left_s)
    elif left_s > 0:
        with suppress(TimeoutError):
            await asyncio.wait_for(load.over.wait(), left_s)


async def _warm(line: Line, to: Target) -> None:
    """Open a connection ahead of time. Where that fails, the request will fail, and say it."""
    try:
        await line.open(to)
    except (OSError, TimeoutError):
        await line.close()


def _write(file: IO[bytes], index: int, request: Request, text: str) -> None:
    file.write(f"{index}\n{to_json(request)}\n{json.dumps(text)}\n".encode())
    file.flush()
