"""Run a load on a server, window after window, and write each request to disk soon after it has ended.

Between two windows the server is idle: all requests of the last one have ended.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Generator
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
    n_rounds = 1 + max(window.load.round for window in plan.windows)
    started, part, n_failed = time.monotonic(), "", 0

    def report(doing: str) -> None:
        watch(Status(doing, part=part))

    def ended(reply: Reply) -> None:
        nonlocal n_failed
        n_failed += reply.request.status != OK

    def show(is_over: bool = False) -> None:
        lasted_s = time.monotonic() - began
        left_s = (0.0 if is_over else max(0.0, window.stop_s - lasted_s)) + sum(one.stop_s for one in later)
        doing = plural(session.n_kept, "request") + (f", {n_failed:,} failed" if n_failed else "")
        if not is_over and lasted_s > window.stop_s:
            doing = f"waiting for the last requests, {doing}"
        elif not is_over and lasted_s < window.load.warmup_s:
            doing = f"warming up, {doing}"
        watch(Status(doing, part=part, elapsed_s=time.monotonic() - started, left_s=left_s))

    session = ServerSession(server, path, report)
    with unless_empty(path):
        asks = asks_of(plan, server, text, report)
        if too_long := server.too_long(max(plan.prompts.values), plan.longest_answer):
            note(str(too_long).replace("\n", " "))
        n_left = plan.max_requests
        for i, window in enumerate(plan.windows):
            n_most = n_left // (len(plan.windows) - i) if window.times_ns is None else len(window.times_ns)
            could_count = session.can_count
            later, part = plan.windows[i + 1 :], f"{window.label} of {n_rounds}"
            began, n_failed = time.monotonic(), 0
            yield from session.send(send_plan(plan, window, server, asks, n_most), LOOK_S, show, ended)
            if could_count and not session.can_count:
                note("The server does not count the tokens of its answers, so there are no token rates.")
            lasted_s = time.monotonic() - began
            show(is_over=True)
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
