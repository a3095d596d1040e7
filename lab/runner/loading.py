"""Loads on a server: window after window, each request on disk soon after it has ended.

While a window runs, the client's process does all the work; this one looks once a second at what has ended, writes it
down, and sleeps again, since both share the cores with the server. Between two windows the server is idle: all requests
of the last one have ended.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import LOST, REFUSED, Asked, RequestRecord
from lab.core.results import save, unless_empty
from lab.endpoints import prompts
from lab.endpoints.client import ClientDied
from lab.endpoints.selftest import client_error
from lab.endpoints.send_plan import MOST_AT_ONCE, Ask, Reply, SendPlan
from lab.errors import LabError
from lab.runner import progress
from lab.runner.load_plan import (
    MOST_LOST,
    STALL_S,
    LoadPlan,
    Window,
    make_plan,
)
from lab.runner.progress import ShowStatus, Status
from lab.runner.prompts import TEXT
from lab.runner.servers import Server, connect
from lab.runner.through_server import prompt_text

LOOK_S = 1.0
"""How often what has ended is read and written down."""

MOST_STREAMS = 16
"""Streams with which the client's own error is measured at most."""

MOST_RESERVED_BYTES = 256_000_000
"""For so much of a session room on the disk is made sure of."""

Note = Callable[[str], object]


def load(
    url: str,
    *,
    model: str | None = None,
    api: str | None = None,
    api_key_env: str | None = None,
    headers: Sequence[str] = (),
    prompt: str = TEXT,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **asked: Any,
) -> list[RequestRecord]:
    """Put load on a server and return the records of all requests, which are also in a new file in `out`.

        records = lab.load("http://127.0.0.1:8080/v1", concurrency=[1, 4, 16], duration=30)

    A closed loop for each of `concurrency` (so many users), or an open loop for each `rate` (requests per second), or
    the requests of the file `replay`. Lengths are numbers or distributions: "100-1000", "normal:500,100",
    "lognormal:300,0.8". Each round measures every arm once: `warmup` seconds, then `duration` seconds that count.
    `slo` are limits such as "ttft=1s,tpot=50ms". At most `max_requests` are sent, besides those that learn what the
    server can do and how long prompts are. Failed requests are records too, and are warned of. `asked` are those of
    `load_plan.make_plan`: the arguments named here, and arrivals, timeout, seed. The other arguments are those of
    `lab.endpoint`. LabError where nobody answers, or the server is gone.
    """
    plan = make_plan(**asked)
    text = prompt_text(prompt)
    notes = list(plan.notes)
    with progress.in_notebook() as watching:
        show = watch or watching
        with connect(
            url, model, api, api_key_env, headers, plan.timeout_s, lambda words: show(Status(words))
        ) as server:
            path = new_results_file(plan, server, Path(out))
            records = list(execute(plan, server, text, path, show, notes.append))
    errors = [record.request.error for record in records if record.request.error]
    for sentence in (*notes, *([f"{len(errors)} requests failed: {errors[0]}"] if errors else [])):
        warnings.warn(sentence, stacklevel=2)
    return records


def new_results_file(plan: LoadPlan, server: Server, folder: Path) -> Path:
    """Create the session's file, and find out now whether its requests will have room in it."""
    n_bytes = plan.n_most * (4000 + 60 * plan.longest_answer)
    return server.new_file(folder, min(n_bytes, MOST_RESERVED_BYTES))


def execute(
    plan: LoadPlan, server: Server, text: str, path: Path, watch: ShowStatus, note: Note
) -> Generator[RequestRecord, None, None]:
    """Measure the plan's windows; yield each record once it is in the file `path`.

    `note` is called with sentences that the user should read. LabError when the server is gone. Whoever stops
    iterating (Ctrl-C) keeps everything that had ended.
    """
    with unless_empty(path):
        session = _Session(plan, server, path, watch, note)
        watch(Status("measuring the client's own error"))
        users = [window.load.concurrency or MOST_STREAMS for window in plan.windows]
        session.error_ns = client_error(min(MOST_STREAMS, max(users)))
        asks = _asks(plan, server, text, watch)
        settings = server.endpoint.settings
        longest = max(plan.prompts.values) + plan.longest_answer
        if settings and settings.n_ctx is not None and longest > settings.n_ctx:
            note(f"Requests of up to {longest:,} tokens do not fit into the server's context of {settings.n_ctx:,}.")
        n_left = plan.max_requests
        for i, window in enumerate(plan.windows):
            n_most = n_left // (len(plan.windows) - i) if window.times_ns is None else len(window.times_ns)
            yield from session.measure(i, window, asks, n_most)
            n_left -= len(session.kept)


def _asks(plan: LoadPlan, server: Server, text: str, watch: ShowStatus) -> tuple[Ask, ...]:
    """A request for each length of prompt, each sized exactly by the server."""
    asks = []
    lengths = plan.prompts.values
    for i, n in enumerate(lengths):
        watch(Status(f"sizing prompts, {i + 1} of {len(lengths)}"))
        prompt = server.prompt(n, text, plan.seed, i)
        asks.append(server.ask(prompt, server.asked(prompt, n, plan.longest_answer)))
    return tuple(asks)


def _once(replies: Iterable[Reply]) -> list[Reply]:
    """The last reply of each index."""
    return list({reply.index: reply for reply in replies}.values())


class _Session:
    """A plan while it runs."""

    def __init__(self, plan: LoadPlan, server: Server, path: Path, watch: ShowStatus, note: Note) -> None:
        self._plan, self._server, self._path, self._watch, self._note = plan, server, path, watch, note
        self._started = time.monotonic()
        self._asked: dict[Asked, Asked] = {}
        self._can_count = True  # tokens of answers whose stream did not
        self.error_ns: tuple[int, int] | None = None
        self.kept: set[int] = set()  # requests of this window that are in the file
        self._n_failed = 0  # of those
        self._n_lost = 0  # in a row

    def measure(self, i: int, window: Window, asks: tuple[Ask, ...], n_most: int) -> Iterator[RequestRecord]:
        """One window: window `i` of the plan, of at most `n_most` requests."""
        client = self._server.client
        self.kept, self._n_failed = set(), 0
        uncounted: list[Reply] = []
        began = time.monotonic()
        try:
            for batch in client.batches(self._wire_plan(window, asks, n_most), LOOK_S):
                replies = list(batch)
                for reply in replies:
                    self._n_failed += reply.request.status != OK
                    self._n_lost = self._n_lost + 1 if reply.request.failure in (REFUSED, LOST) else 0
                yield from self._keep(replies, uncounted)
                self._report(i, window, time.monotonic() - began)
            if self._n_lost < MOST_LOST:
                self._count(uncounted, window)
            yield from self._keep(uncounted)
        except (KeyboardInterrupt, ClientDied):
            yield from self._keep(_once((*client.given_up(), *uncounted)))
            raise
        except LabError:  # the disk is full: what is left goes where the first of it went
            with suppress(LabError):
                self._keep(_once((*client.given_up(), *uncounted)))
            raise
        except GeneratorExit:
            self._keep(_once((*client.given_up(), *uncounted)))
            raise
        lasted_s = time.monotonic() - began
        self._report(i, window, lasted_s, is_over=True)
        if self._n_lost >= MOST_LOST:
            raise LabError(
                f"The server at {self._server.endpoint.url} is gone: {self._n_lost} requests in a row got no "
                f"connection, or lost it ({window.words}).",
                f"Look into its log. What had ended is in {self._path}",
            )
        if window.times_ns is None and len(self.kept) >= n_most and lasted_s < window.stop_s:
            needed = round(1.2 * n_most * window.stop_s / lasted_s * len(self._plan.windows), -2)
            self._note(
                f"{window.words} ended after {lasted_s:.1f} s of {window.stop_s:g} s: its share of --max-requests, "
                f"{n_most:,}, was used up. About {needed:,.0f} would do for all."
            )

    def _wire_plan(self, window: Window, asks: tuple[Ask, ...], n_most: int) -> SendPlan:
        own = (
            dataclasses.replace(ask, asked=dataclasses.replace(ask.asked, load=window.load, repeat=window.load.round))
            for ask in asks
        )
        return SendPlan(
            asks=tuple(own),
            api=self._server.endpoint.api,
            n_at_once=window.load.concurrency or MOST_AT_ONCE,
            n_requests=n_most,
            times_ns=window.times_ns,
            timeout_s=self._plan.timeout_s,
            stall_s=min(STALL_S, self._plan.timeout_s),
            stop_s=window.stop_s,
            order=self._plan.order(window, n_most),
            most_lost=MOST_LOST,
        )

    def _keep(self, replies: Iterable[Reply], uncounted: list[Reply] | None = None) -> list[RequestRecord]:
        """Write down what is not written yet. What has no count of its tokens goes to `uncounted` instead, if given."""
        new = []
        for reply in replies:
            if reply.index in self.kept:
                continue
            asked = self._asked.setdefault(reply.request.asked, reply.request.asked)
            request = dataclasses.replace(reply.request, asked=asked)  # thousands of requests share a few of them
            is_counted = request.status != OK or times.n_generated(request) is not None
            if is_counted or uncounted is None or not self._can_count:
                new.append((reply.index, self._server.record(self._path.stem, request, self.error_ns)))
            else:
                uncounted.append(reply)
        if new:
            n_bytes = self._path.stat().st_size
            try:
                save(self._path, *(record for _, record in new))
            finally:  # Ctrl-C may come when they are written: they shall not be written again
                if self._path.stat().st_size > n_bytes:
                    self.kept.update(index for index, _ in new)
        return [record for _, record in new]

    def _count(self, uncounted: list[Reply], window: Window) -> None:
        """Let the server's tokenizer count the answers, now that it has nothing else to do."""
        for i, reply in enumerate(uncounted):
            if i % 10 == 0:
                self._watch(Status(f"counting the tokens of answers, {i} of {len(uncounted)}", part=self._part(window)))
            usage = prompts.tokenized(self._server.access, self._server.own_name, reply.text)
            if usage is None:
                self._can_count = False
                self._note("The server does not count the tokens of its answers: there are no rates of tokens.")
                return
            uncounted[i] = dataclasses.replace(reply, request=dataclasses.replace(reply.request, usage=usage))

    def _report(self, i: int, window: Window, lasted_s: float, is_over: bool = False) -> None:
        n, n_failed = len(self.kept), self._n_failed
        phase = "warming up, " * (lasted_s < window.load.warmup_s) + "the last ones end, " * (lasted_s > window.stop_s)
        later_s = sum(one.stop_s for one in self._plan.windows[i + 1 :])
        self._watch(
            Status(
                f"{'' if is_over else phase}{n:,} request{'s' * (n != 1)}" + f", {n_failed:,} failed" * bool(n_failed),
                part=self._part(window),
                elapsed_s=time.monotonic() - self._started,
                left_s=max(0.0, window.stop_s - lasted_s) * (not is_over) + later_s,
            )
        )

    def _part(self, window: Window) -> str:
        return f"{window.words} of {1 + max(one.load.round for one in self._plan.windows)}"
