"""The client: sends the requests of plans from a thread of its own, and makes records of their
answers.

    with Client(access("http://127.0.0.1:8080/v1")) as client:
        for reply in client.run(plan):
            ...

All requests of a plan share one asyncio loop. The calling thread sleeps meanwhile, so that stamps
wait for nothing (`python -m tests.bench.client` measures how late they are).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import gc
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from lab.core import request as kinds
from lab.core.record import FAILED, OK
from lab.core.request import CHAT, Asked, Request
from lab.errors import LabError
from lab.remote.access import LONGEST_S, Access, all_headers
from lab.remote.answer import Failure, refusal
from lab.remote.exchange import Arrivals, Exchange, Route, certificates
from lab.remote.formats import LOADING, Ask, JsonReply, Reply, SendPlan
from lab.remote.streams import StreamedAnswer, StreamReader

ANSWER_S = 30.0  # time limit for a request that generates nothing
POLL_S = 0.1
RATE_PAUSE_S = 1.0  # after a 429 that names no time
MOST_PAUSE_S = 60.0  # that a 429 may name
LOADING_PAUSE_S = 1.0
PAUSE_S = 0.25  # before the next request of a plan, after a failed one: no flood of rejections
READ_AFTER_S = 0.005
"""An ended answer is parsed later: the server (on the same cores) accepts the next request first.
"""


class TimeIsOver(LabError):
    """The session has lasted as long as it may."""


class Client:
    """Sends plans of requests. Use it in a `with` block: leaving it ends every request in
    flight.
    """

    def __init__(
        self,
        access: Access,
        budget_s: float | None = None,
        say: Callable[[str], object] = lambda sentence: None,
    ) -> None:
        self.access = access
        self._say = say  # called with a sentence before it waits
        self._budget_s = budget_s  # of the whole session
        self._began_s = time.monotonic()
        self.start_ns = 0  # of the last plan, by time.perf_counter_ns()
        self._arrivals = Arrivals()
        self._loop = asyncio.SelectorEventLoop(self._arrivals)
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, plan: SendPlan, watch: Callable[[], None] = lambda: None) -> Iterator[Reply]:
        """Send the requests of a plan and yield each reply when it has ended. Calls `watch` every
        POLL_S.

        Closing this iterator early ends all requests in flight. TimeIsOver if the session's time is
        over.
        """
        watch()
        if self.left_s <= 0:
            raise TimeIsOver(
                f"The time of the session is over ({self._budget_s:,.0f} s).",
                "What has ended is kept. Allow more with --budget.",
            )
        plan = dataclasses.replace(plan, timeout_s=min(plan.timeout_s, self.left_s))
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        sending = _Sending(self.access, plan, self._arrivals, replies)
        self.start_ns = sending.start_ns
        gc.freeze()  # shortens garbage collections from milliseconds to microseconds
        future = asyncio.run_coroutine_threadsafe(sending.run(), self._loop)
        try:
            n_due = len(plan.asks)
            while n_due and not (future.done() and replies.empty()):
                with suppress(queue.Empty):
                    reply = replies.get(timeout=POLL_S)
                    n_due -= 1
                    yield reply
                watch()
            future.result()
        finally:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], ANSWER_S)
            gc.unfreeze()

    @property
    def left_s(self) -> float:
        """What is left of the session's time."""
        if self._budget_s is None:
            return math.inf
        return self._began_s + self._budget_s - time.monotonic()

    def send(
        self,
        ask: Ask,
        api: str,
        timeout_s: float = LONGEST_S,
        watch: Callable[[], None] = lambda: None,
    ) -> Reply:
        """Send one request, and wait for its answer, at most `timeout_s` and the server's time
        limit.

        A server that limits the rate of requests is asked once more, after the time that it names;
        one that loads its model is asked until it has.
        """
        began_s = time.monotonic()
        timeout_s = min(timeout_s, self.access.timeout_s)
        plan = SendPlan(asks=(ask,), api=api, timeout_s=timeout_s)
        (reply,) = self.run(plan, watch)
        if reply.request.http_status == 429:
            pause_s = RATE_PAUSE_S if reply.retry_after_s is None else reply.retry_after_s
            if pause_s <= min(MOST_PAUSE_S, self.access.timeout_s, self.left_s):
                self._say(
                    "the server limits the rate of requests (429): "
                    f"the lab asks again in {pause_s:g} s ..."
                )
                self._pause(pause_s, watch)
                (reply,) = self.run(plan, watch)
        has_said = False
        while is_loading(reply.request) and not has_waited(began_s, self.access.timeout_s):
            if not has_said:
                limit = f"at most {self.access.timeout_s:g} s (--timeout)"
                self._say(f"the server is loading its model (503): waiting, {limit} ...")
                has_said = True
            self._pause(LOADING_PAUSE_S, watch)
            (reply,) = self.run(plan, watch)
        return reply

    def _pause(self, pause_s: float, watch: Callable[[], None]) -> None:
        """Wait, and call `watch` meanwhile. TimeIsOver comes with the next request."""
        ends_s = time.monotonic() + min(pause_s, self.left_s)
        while (left_s := ends_s - time.monotonic()) > 0:
            watch()
            time.sleep(min(POLL_S, left_s))

    def ask(self, url: str, body: Mapping[str, object] | None = None) -> JsonReply:
        """GET `url`, or POST `body` to it, and read a JSON object. A failure is in the reply."""
        text = "" if body is None else json.dumps(body)
        path = urlsplit(url).path or "/"
        question = Ask(asked=Asked(n_prompt=None, n_gen=0), body=text, path=path)
        reply = self.send(question, CHAT, ANSWER_S)
        request = reply.request
        if request.status != OK or request.http_status is None:
            return JsonReply(None, None, request.error)
        parsed = json.loads(reply.text or "null")
        return JsonReply(request.http_status, parsed, request.error)

    def object_at(
        self, path: str, body: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """The JSON object at a path of the server; empty if there is none."""
        answer = self.ask(self.access.root + path, body)
        if answer.status != 200:
            return {}
        return answer.parsed or {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_S)
        if not self._thread.is_alive():
            self._loop.close()


class _Sending:
    """A running plan."""

    def __init__(
        self,
        access: Access,
        plan: SendPlan,
        arrivals: Arrivals,
        replies: queue.SimpleQueue[Reply],
    ) -> None:
        self.plan = plan
        self.replies = replies
        self.start_ns = time.perf_counter_ns()
        self._route = _route(access, plan, arrivals)
        self._numbers = iter(range(len(plan.asks)))  # of requests not yet sent

    async def run(self) -> None:
        """Send all requests, and put each reply into the queue when it has ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.plan.n_at_once, len(self.plan.asks))):
                group.create_task(self._send_in_turn(group))

    async def _send_in_turn(self, group: asyncio.TaskGroup) -> None:
        """Send one request after the other; an answer is parsed while the next request runs."""
        has_failed = False
        for number in self._numbers:
            if has_failed:
                await asyncio.sleep(PAUSE_S)
            exchange = Exchange(self._route, self.plan.asks[number].with_fresh_nonce())
            await exchange.connect()
            group.create_task(self._send(number, exchange))
            await exchange.frees_turn.wait()
            has_failed = exchange.problem is not None

    async def _send(self, number: int, exchange: Exchange) -> None:
        """Send a request, and put its reply into the queue when it has ended."""
        try:
            if exchange.problem is None:
                await exchange.send()
            answer = await self._answer(exchange)
        finally:
            exchange.hang_up()
            exchange.memory.release()
        request = self._request(exchange, answer)
        retry_after = exchange.head.retry_after
        retry_after_s = float(retry_after) if retry_after else None
        self.replies.put(Reply(number, request, answer.text, retry_after_s))
        exchange.frees_turn.set()

    async def _answer(self, exchange: Exchange) -> StreamedAnswer:
        """What the answer says; the reply to a question is its JSON object as text."""
        if exchange.body.is_stream:
            await asyncio.sleep(READ_AFTER_S)
            reader = StreamReader(exchange.body.pieces, exchange.sent_ns or 0)
            for _ in reader.read():
                await self._route.wait_for_turn()
            return reader.answer()
        if exchange.problem is None and exchange.ask.path is not None:
            reply = exchange.json_reply()
            return StreamedAnswer(text=json.dumps(reply.parsed), error=reply.error)
        if exchange.problem is None:
            exchange.problem = refusal(exchange.json_reply())
        return StreamedAnswer()

    def _request(self, exchange: Exchange, answer: StreamedAnswer) -> Request:
        """The record of a request."""
        request = Request(
            asked=exchange.ask.asked,
            started_at=exchange.started_at,
            sent_ns=_since(self.start_ns, exchange.sent_ns),
            headers_ns=_since(exchange.sent_ns, exchange.received.first_ns),
            ended_ns=_since(exchange.sent_ns, exchange.received.last_ns),
            status=OK,
            error=answer.error,
            http_status=exchange.head.http_status,
            finish_reason=answer.finish_reason,
            events=answer.events,
            tokens_by=answer.tokens_by,
            usage=answer.usage,
            timings=answer.timings,
            wrong_counts=answer.wrong_counts,
        )
        problem = _problem(exchange, answer)
        if problem is None:
            return request
        return dataclasses.replace(
            request,
            status=FAILED,
            failure=problem.failure,
            error=problem.error,
            failed_ns=_since(exchange.sent_ns, time.perf_counter_ns()),
        )


def is_loading(request: Request) -> bool:
    """Whether the server says that it is loading its model."""
    return request.http_status == 503 and LOADING in (request.error or "")


def has_waited(began_s: float, limit_s: float) -> bool:
    return time.monotonic() - began_s >= limit_s


def _since(begin_ns: int | None, ns: int | None) -> int | None:
    """The time since `begin_ns`; None if either is unknown."""
    if begin_ns is None or ns is None:
        return None
    return ns - begin_ns


def _problem(exchange: Exchange, answer: StreamedAnswer) -> Failure | None:
    """Why a request failed: on its connection, or in its stream."""
    problem = exchange.problem
    if not exchange.body.is_stream:
        return problem
    wrong = Failure(answer.failure, answer.error or "") if answer.failure else None
    if problem is None:
        return wrong
    if problem.failure == kinds.LOST:
        if wrong is None:  # the answer was complete
            return None
        if wrong.failure == kinds.ERROR_INSIDE:  # it says why the connection was lost
            return wrong
    return problem


def _route(access: Access, plan: SendPlan, arrivals: Arrivals) -> Route:
    """Where the requests of a plan go."""
    path = "chat/completions" if plan.api == CHAT else "completions"
    url = urlsplit(f"{access.url}/{path}")
    has_tls = url.scheme == "https"
    headers = {
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": "mini-lab",
    }
    headers |= {name.title(): value for name, value in all_headers(access)}
    return Route(
        host=url.hostname or "",
        port=url.port or (443 if has_tls else 80),
        path=url.path,
        certificates=certificates() if has_tls else None,
        headers=[("Host", url.netloc), *headers.items()],
        arrivals=arrivals,
        access=access,
        timeout_s=plan.timeout_s,
        stall_s=plan.longest_stall_s,
    )


def with_asked(ask: Ask, **changes: Any) -> Ask:
    """The same request in another place of the measurement."""
    return dataclasses.replace(ask, asked=dataclasses.replace(ask.asked, **changes))
