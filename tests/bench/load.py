"""The load generator against a server whose every event has a known time: does it send what it says, and see all?

    python -m tests.bench.load [SECONDS]

A closed loop of c users and service time S makes c / S requests a second; Poisson arrivals have exponential gaps
(Kolmogorov and Smirnov), and leave when they are due; the tokens of a window are those that were sent in it. SECONDS
(20) is the length of a closed loop; open loops take three times as long.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scipy import stats

from lab.core.request_times import figures
from lab.features.serve import load_figures, loads
from lab.features.serve.loads import make_plan
from lab.remote.servers import Server, connect, prompt_text
from tests.null_server import NEVER, RUNNING, Behaviour, NullServer, NullSettings, null_server

FIRST_MS = 20.0
GAP_MS = 5.0


def served(**changes: Any) -> NullSettings:
    return NullSettings(
        models={
            "null": Behaviour(
                first_ms=FIRST_MS, gap_ms=GAP_MS, usage=RUNNING, role=NEVER, **changes
            )
        }
    )


def run(server: Server, keep: Callable[[Any], object], **asked: Any) -> None:
    """A load, as `lab load` measures it; `keep` gets all records."""
    plan = make_plan(prompt_len=40, **asked)
    with tempfile.TemporaryDirectory() as folder:
        path = server.new_file(Path(folder))
        for record in loads.execute(
            plan, server, prompt_text("text"), path, lambda _: None, lambda _: None
        ):
            keep(record)


def sent_ns(server: NullServer) -> list[int]:
    """When the null server sent each event with content, by the clock that all processes share."""
    return [ns for stream in server.sent()["streams"] for ns in stream["sent_ns"]]


def truth_of_closed_loops(seconds: float) -> None:
    n_gen = 40
    service_s = (FIRST_MS + GAP_MS * (n_gen - 1)) / 1e3
    print(f"closed loops, S = {1e3 * service_s:g} ms, {seconds:g} s each")
    for users in (1, 4, 16):
        ends: list[float] = []

        def add(record: Any, ends: list[float] = ends) -> None:
            ends.append((record.request.sent_ns + record.request.ended_ns) / 1e9)

        with null_server(served()) as null, connect(null.url) as server:
            run(
                server,
                add,
                concurrency=users,
                gen=n_gen,
                warmup=1,
                duration=seconds,
                rounds=1,
                max_requests=100_000,
            )
        rate = sum(1 <= end < 1 + seconds for end in ends) / seconds
        print(
            f"  {users:2} users: {rate:.2f} requests/s, c / S = {users / service_s:.2f}, {rate * service_s / users:.3f}"
        )


def truth_of_open_loops(seconds: float) -> None:
    print(f"open loops, Poisson, {seconds:g} s each")
    for rate, n_gen in ((5, 20), (20, 20), (60, 4)):
        records: list[Any] = []
        asked = {
            "rate": rate,
            "gen": n_gen,
            "warmup": 1,
            "duration": seconds,
            "rounds": 1,
            "max_requests": 100_000,
        }
        with null_server(served()) as null, connect(null.url) as server:
            run(server, records.append, **asked)
            began_ns = (server.client.start_ns or 0) + 1e9
            truth = sum(began_ns <= ns < began_ns + seconds * 1e9 for ns in sent_ns(null))
        requests = [record.request for record in records]
        sent_s = sorted(request.sent_ns / 1e9 for request in requests)
        gaps = [b - a for a, b in zip([0.0, *sent_s], sent_s, strict=False)]
        p = stats.kstest(gaps, "expon", args=(0, 1 / rate)).pvalue
        late_us = sorted(figures(request).delay_ns / 1e3 for request in requests)  # type: ignore[operator]
        late = f"{late_us[len(late_us) // 2]:.0f} us in the median, {late_us[int(0.99 * len(late_us))]:.0f} in 99 %"
        tokens = sum(load_figures.row(request)["n_in_window"] for request in requests)
        print(
            f"  {rate:2}/s: {len(requests)} requests, {len(requests) / sent_s[-1]:.2f}/s; gaps exponential with "
            f"p = {p:.2f}; late {late}, {late_us[-1]:.0f} at most; window: {tokens:.0f} tokens, sent {truth}"
        )


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    truth_of_closed_loops(seconds)
    truth_of_open_loops(3 * seconds)


if __name__ == "__main__":
    main()
