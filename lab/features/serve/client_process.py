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
    load = _Load(plan, file, iter(range(plan.n_all)), time.perf_counter_ns())
    async with asyncio.TaskGroup() as group:
        if times_ns is None:
            for connection in connections:
                group.create_task(_user(connection, load, group))
        else:
            await _open_loop(connections, times_ns, load, group)
    for connection in connections:
        connection.hang_up()
    return load.start_ns


@dataclass
class _Load:
    """The state of a running plan, shared by all requests."""

    plan: SendPlan
    file: IO[bytes]
    numbers: Iterator[int]  # of requests not yet sent
    start_ns: int
    n_wanted: int = 0  # requests in flight, or still to send, that are due before the plan's `stop_s`
    n_lost: int = 0  # requests in a row
    over: asyncio.Event = field(default_factory=asyncio.Event)  # set while n_wanted is 0
    rng: random.Random = field(default_factory=random.Random)

    def begin(self, due_ns: int) -> bool:
        """Count a request that is due at this time. Returns whether that is before the plan's stop."""
        is_wanted = self.plan.stop_s is None or due_ns <= self.plan.stop_s * 1e9
        self.count(is_wanted)
        return is_wanted

    def count(self, n_wanted: int) -> None:
        """Add to `n_wanted`."""
        self.n_wanted += n_wanted
        (self.over.clear if self.n_wanted else self.over.set)()

    def ends(self, is_wanted: bool) -> bool:
        """Whether no more requests are sent: the server is gone, or this one is late and no other is in flight."""
        is_gone = self.plan.most_lost is not None and self.n_lost >= self.plan.most_lost
        if is_over := is_gone or (not is_wanted and self.over.is_set()):
            self.count(-is_wanted)
        return is_over

    async def send(
        self, number: int, connection: Connection, is_wanted: bool, over: asyncio.Event, scheduled_ns: int | None = None
    ) -> Request:
        """Send request `number` over `connection`, and write the result to the file. `over`: see `exchange`."""
        ask = self.plan.ask(number)
        if ask.nonce is not None:
            ask = dataclasses.replace(ask, body=ask.body.replace(ask.nonce, fresh_nonce(self.rng), 1))
        request, text = await exchange(connection, ask, self.plan, self.start_ns, over, scheduled_ns)
        self.n_lost = self.n_lost + 1 if request.failure in (REFUSED, LOST) else 0
        self.count(-is_wanted)
        self.file.write(SEPARATOR.join((str(number), to_json(request), json.dumps(text))).encode() + b"\n")
        self.file.flush()
        over.set()
        return request


async def _user(connection: Connection, load: _Load, group: asyncio.TaskGroup) -> None:
    """Send one request after the other, each when the last answer has arrived.

    The answer is parsed meanwhile, so a pause after a failure may come one request late.
    """
    sent: list[asyncio.Task[Request]] = []
    if load.plan.spread_s:
        await asyncio.sleep(load.rng.uniform(0, load.plan.spread_s))
    for number in load.numbers:
        is_wanted = load.begin(time.perf_counter_ns() - load.start_ns)
        if load.ends(is_wanted):
            return
        over = asyncio.Event()
        sent.append(group.create_task(load.send(number, connection, is_wanted, over)))
        await over.wait()
        ended = [task for task in sent if task.done()]
        sent = [task for task in sent if not task.done()]
        if any(task.result().status != OK for task in ended):
            await asyncio.sleep(PAUSE_S)


async def _open_loop(
    connections: list[Connection], times_ns: tuple[int, ...], load: _Load, group: asyncio.TaskGroup
) -> None:
    """Send each request at its time, over the free connection that was used last."""
    free = asyncio.LifoQueue[Connection]()
    for connection in reversed(connections):
        free.put_nowait(connection)

    async def send(number: int, connection: Connection, is_wanted: bool) -> None:
        await _warm(connection)
        await load.send(number, connection, is_wanted, asyncio.Event(), times_ns[number])
        free.put_nowait(connection)

    for number in load.numbers:
        is_wanted = load.begin(times_ns[number])
        left_s = (load.start_ns + times_ns[number] - time.perf_counter_ns()) / 1e9 - PREPARE_S
        if left_s > 0 and is_wanted:
            await asyncio.sleep(left_s)
        elif left_s > 0:  # no longer needed once the others have ended
            with suppress(TimeoutError):
                await asyncio.wait_for(load.over.wait(), left_s)
        connection = await free.get()
        if load.ends(is_wanted):
            return
        group.create_task(send(number, connection, is_wanted))


async def _warm(connection: Connection) -> None:
    """Open a connection ahead of time. If that fails, the request itself will fail and report it."""
    with suppress(Failure):
        await connection.connect()
