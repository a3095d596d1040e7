"""Run a load on a server, window after window, and write each request to disk soon after it has ended.

Between two windows the server is idle: all requests of the last one have ended.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from lab.core.lists import plural
from lab.core.record import OK
from lab.core.request import RequestRecord
from lab.core.results import unless_empty
from lab.features.serve.load_plan import MOST_LOST, STALL_S, LoadOptions, LoadPlan, Window, make_plan, spread_s
from lab.features.serve.send_plan import MOST_AT_ONCE, Ask, Reply, SendPlan
from lab.features.serve.server_session import ServerSession, warn_of_failures
from lab.features.serve.servers import Server, connect, prompt_text, reaching_of
from lab.runner import progress
from lab.runner.progress import ShowStatus, Status
from lab.runner.prompts import TEXT

LOOK_S = 1.0
"""Interval of writing finished requests to disk."""

Note = Callable[[str], object]


def load(
    url: str,
    *,
    model: str | None = None,
    prompt: str = TEXT,
    out: str | Path = "results",
    watch: ShowStatus | None = None,
    **asked: Unpack[LoadOptions],
) -> list[RequestRecord]:
    """Put load on a server and return the records of all requests, which are also in a new file in `out`.

        records = lab.load("http://127.0.0.1:8080/v1", concurrency=[1, 4, 16], duration=30)

    A closed loop for each of `concurrency` (its users), or an open loop for each `rate` (requests per second), or
    the requests of the file `replay`. Lengths are numbers or distributions: "100-1000", "normal:500,100",
    "lognormal:300,0.8". Each round measures every arm once: `warmup` seconds, then `duration` seconds that count.
    `slo` are limits such as "ttft=1s,tpot=50ms". Sends at most `max_requests`, besides those that examine the server
    and count prompts. Failed requests are records too, with a warning. The other arguments are those of `lab.measure`
    with `url`. LabError if no server answers, or it stops answering.
    """
    plan = make_plan(**asked)
    text = prompt_text(prompt)
    notes = list(plan.notes)
    with progress.in_notebook() as watching:
        show = watch or watching
        how = reaching_of({**asked, "timeout": plan.timeout_s})
        with connect(url, model, lambda words: show(Status(words)), **how) as server:
            path = server.new_file(Path(out))
            records = list(execute(plan, server, text, path, show, notes.append))
    warn_of_failures(notes, [record.request.error for record in records])
    return records


def execute(
    plan: LoadPlan, server: Server, text: str, path: Path, watch: ShowStatus, note: Note
) -> Generator[RequestRecord, None, None]:
    """Measure the plan's windows; yield each record after it is written to the file `path`.

    Calls `note` with sentences for the user. LabError if the server is gone. Stopping early (Ctrl-C) keeps all finished
    requests.
    """
    shown = _Progress(plan, watch)
    session = ServerSession(server, path, shown.report)
    with unless_empty(path):
        asks = asks_of(plan, server, text, shown.report)
        if too_long := server.too_long(max(plan.prompts.values), plan.longest_answer):
            note(str(too_long).replace("\n", " "))
        n_left = plan.max_requests
        for i, window in enumerate(plan.windows):
            n_most = n_left // (len(plan.windows) - i) if window.times_ns is None else len(window.times_ns)
            could_count = session.can_count
            shown.begin(i)
            plan_of_window = send_plan(plan, window, server, asks, n_most)
            yield from session.send(plan_of_window, LOOK_S, lambda: shown.show(session.n_kept), shown.ended)
            if could_count and not session.can_count:
                note("The server does not count the tokens of its answers, so there are no token rates.")
            lasted_s = shown.lasted_s
            shown.show(session.n_kept, is_over=True)
            session.check_reached(MOST_LOST, f"{window.label}; ")
            if window.times_ns is None and session.n_kept >= n_most and lasted_s < window.stop_s:
                needed = round(1.2 * n_most * window.stop_s / lasted_s * len(plan.windows), -2)
                note(
                    f"{window.label} ended after {lasted_s:.1f} s of {window.stop_s:g} s: it used its share of "
                    f"--max-requests ({n_most:,}). Use --max-requests {needed:.0f} for all windows."
                )
            n_left -= session.n_kept


def asks_of(plan: LoadPlan, server: Server, text: str, report: Callable[[str], object]) -> tuple[Ask, ...]:
    """A request for each prompt length, with a prompt of exactly that many of the server's tokens."""
    asks = []
    lengths = plan.prompts.values
    for i, n in enumerate(lengths):
        report(f"sizing prompts, {i + 1} of {len(lengths)}")
        prompt = server.prompt(n, text, plan.seed, i)
        asks.append(server.ask(prompt, server.asked(prompt, n, plan.longest_answer)))
    return tuple(asks)


def send_plan(plan: LoadPlan, window: Window, server: Server, asks: tuple[Ask, ...], n_most: int) -> SendPlan:
    """The plan of at most `n_most` requests of a window."""
    asked = [dataclasses.replace(ask.asked, load=window.load, repeat=window.load.round) for ask in asks]
    return SendPlan(
        asks=tuple(dataclasses.replace(ask, asked=own) for ask, own in zip(asks, asked, strict=True)),
        api=server.endpoint.api,
        n_at_once=window.load.concurrency or MOST_AT_ONCE,
        n_requests=n_most,
        times_ns=window.times_ns,
        timeout_s=plan.timeout_s,
        stall_s=STALL_S,
        stop_s=window.stop_s,
        spread_s=spread_s(window.load),
        order=plan.order(window, n_most),
        most_lost=MOST_LOST,
    )


@dataclass
class _Progress:
    """The progress messages of a plan."""

    plan: LoadPlan
    watch: ShowStatus
    started: float = field(default_factory=time.monotonic)
    began: float = 0.0  # of the window
    index: int | None = None  # of the window
    n_failed: int = 0  # requests of the window

    def begin(self, index: int) -> None:
        """Start window `index`."""
        self.index, self.began, self.n_failed = index, time.monotonic(), 0

    def ended(self, reply: Reply) -> None:
        """Count a finished request of the window."""
        self.n_failed += reply.request.status != OK

    @property
    def lasted_s(self) -> float:
        """Seconds since the window began."""
        return time.monotonic() - self.began

    @property
    def part(self) -> str:
        """Such as "8 users, round 2 of 3"."""
        windows = self.plan.windows
        rounds = 1 + max(one.load.round for one in windows)
        return "" if self.index is None else f"{windows[self.index].label} of {rounds}"

    def report(self, doing: str) -> None:
        """Show work other than sending requests."""
        self.watch(Status(doing, part=self.part))

    def show(self, n_kept: int, is_over: bool = False) -> None:
        """Show the progress of the window."""
        assert self.index is not None
        window, *later = self.plan.windows[self.index :]
        lasted_s = self.lasted_s
        left_s = 0.0 if is_over else max(0.0, window.stop_s - lasted_s)
        doing = plural(n_kept, "request") + (f", {self.n_failed:,} failed" if self.n_failed else "")
        if not is_over and lasted_s > window.stop_s:
            doing = f"waiting for the last requests, {doing}"
        elif not is_over and lasted_s < window.load.warmup_s:
            doing = f"warming up, {doing}"
        elapsed_s = time.monotonic() - self.started
        left_s += sum(one.stop_s for one in later)
        self.watch(Status(doing, part=self.part, elapsed_s=elapsed_s, left_s=left_s))
