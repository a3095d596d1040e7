"""Send requests and stamp their events in a separate process, so that no other work delays a stamp.

The process reads plans from its stdin, and writes each request to a file when it has ended. Nothing crosses the pipe
while requests run. All requests share one asyncio loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lab.core.lines import converted, to_json
from lab.core.record import OK
from lab.core.request import LOST, REFUSED, Request
from lab.features.serve.access import Access
from lab.features.serve.exchange import Arrivals, Connection, Failure, Target, exchange
from lab.features.serve.send_plan import SEPARATOR, SendPlan, fresh_nonce
from lab.process import served

PREPARE_S = 0.1
"""A request's connection is opened this long before its time."""

PAUSE_S = 0.25
"""A user's pause after a failure. Without it a server that rejects at once would get thousands of requests a second."""


def serve() -> None:
    """Run plans from stdin until it closes."""
    served.serve(lambda: _answer)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Send the requests of a plan. Returns the time of its start."""
    access, plan = converted(request["access"], Access), converted(request["plan"], SendPlan)
    arrivals, path = Arrivals(), Path(request["path"])
    with path.open("wb") as file, asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(arrivals)) as runner:
        gc.collect()
        gc.freeze()  # shortens garbage collections from milliseconds to microseconds
        return {"start_ns": runner.run(_run_plan(Target(access, plan.api, arrivals), plan, file))}


async def _run_plan(to: Target, plan: SendPlan, file: IO[bytes]) -> int:
    """Send all requests, and write each to `file` when it has ended. Returns the time of the start."""
    times_ns, connections = plan.times_ns, [Connection(to) for _ in range(min(plan.n_at_once, plan.n_all))]
    n_first = len(connections) if times_ns is None else sum(ns <= PREPARE_S * 1e9 for ns in times_ns)
    await asyncio.gather(*map(_warm, connections[:n_first]))
    load = _Load(plan, file, iter(range(plan.n_all)), connections[::-1], time.perf_counter_ns())
    async with asyncio.TaskGroup() as group:
        for _ in connections:
            group.create_task(_user(load, group))
    for connection in connections:
        connection.hang_up()
    return load.start_ns


async def _warm(connection: Connection) -> None:
    """Open a connection ahead of time. If that fails, the request itself will fail and report it."""
    with suppress(Failure):
        await connection.connect()


@dataclass
class _Load:
    """The state of a running plan, shared by all requests."""

    plan: SendPlan
    file: IO[bytes]
    numbers: Iterator[int]  # of requests not yet sent
    free: list[Connection]  # the one that was used last at the end
    start_ns: int
    n_wanted: int = 0  # requests in flight, or still to send, that are due before the plan's `stop_s`
    n_lost: int = 0  # requests in a row
    idle: asyncio.Event = field(default_factory=asyncio.Event)  # set while n_wanted is 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set after the plan's `most_lost`
    rng: random.Random = field(default_factory=random.Random)

    def count(self, n_wanted: int) -> None:
        """Add to `n_wanted`."""
        self.n_wanted += n_wanted
        (self.idle.clear if self.n_wanted else self.idle.set)()

    async def send(
        self, number: int, connection: Connection, is_wanted: bool, over: asyncio.Event, scheduled_ns: int | None
    ) -> Request:
        """Send request `number` over `connection`, and write the result to the file. `over`: see `exchange`."""
        ask = self.plan.ask(number)
        if ask.nonce is not None:
            ask = dataclasses.replace(ask, body=ask.body.replace(ask.nonce, fresh_nonce(self.rng), 1))
        request, text = await exchange(connection, ask, self.plan, self.start_ns, over, scheduled_ns)
        self.n_lost = self.n_lost + 1 if request.failure in (REFUSED, LOST) else 0
        if self.plan.most_lost is not None and self.n_lost >= self.plan.most_lost:
            self.gone.set()
        self.count(-is_wanted)
        self.file.write(SEPARATOR.join((str(number), to_json(request), json.dumps(text))).encode() + b"\n")
        self.file.flush()
        over.set()
        return request


async def _user(load: _Load, group: asyncio.TaskGroup) -> None:
    """Send one request after the other: in a closed loop when the last answer has arrived, else at its time.

    The answer is parsed meanwhile, so a pause after a failure may come one request late. Late requests, which are due
    after the plan's stop, are sent as long as others are in flight.
    """
    plan, sent = load.plan, list[asyncio.Task[Request]]()
    if plan.spread_s:
        await asyncio.sleep(load.rng.uniform(0, plan.spread_s))
    for number in load.numbers:
        scheduled_ns = None if plan.times_ns is None else plan.times_ns[number]
        due_ns = time.perf_counter_ns() - load.start_ns if scheduled_ns is None else scheduled_ns
        is_wanted = plan.stop_s is None or due_ns <= plan.stop_s * 1e9
        load.count(is_wanted)
        left_s = (load.start_ns + due_ns - time.perf_counter_ns()) / 1e9 - PREPARE_S
        needless = load.gone if is_wanted else load.idle
        if left_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(needless.wait(), left_s)
        if needless.is_set():
            load.count(-is_wanted)
            return
        connection, over = load.free.pop(), asyncio.Event()
        if scheduled_ns is not None:
            await _warm(connection)
        sent.append(group.create_task(load.send(number, connection, is_wanted, over, scheduled_ns)))
        await over.wait()
        load.free.append(connection)
        ended = [task for task in sent if task.done()]
        sent = [task for task in sent if not task.done()]
        if scheduled_ns is None and any(task.result().status != OK for task in ended):
            await asyncio.sleep(PAUSE_S)
