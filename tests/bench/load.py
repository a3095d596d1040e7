"""The load generator against a server whose every event has a known time: does it send what it says, and see all?

    python -m tests.bench.load [--small]

truth     a closed loop of c users and service time S makes c / S requests a second; Poisson arrivals have exponential
          gaps (Kolmogorov and Smirnov), and leave when they are due; the tokens of a window are those that were sent in
          it
memory    of both processes after 1,000 and after 5,000 requests
reading   the error of the client's stamps at 16 streams while its parent reads and writes down what has ended: ten
          times a second line by line, once a second in one piece (what lab load does), and not at all
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from scipy import stats

from lab.core import results
from lab.core.request import CHAT, Asked
from lab.core.request_times import figures
from lab.features.serve import load_figures, loads
from lab.features.serve.access import Client, access, ask
from lab.features.serve.formats import CONTINUOUS_USAGE, INCLUDE_USAGE, Reply, SendPlan, ask_for
from lab.features.serve.loads import make_plan
from lab.features.serve.servers import Server, connect, prompt_text
from tests.bench.client import quantile, stamped_late
from tests.null_server import NEVER, RUNNING, Behaviour, NullServer, NullSettings, null_server

FIRST_MS, GAP_MS = 20.0, 5.0


def served(**changes: Any) -> NullSettings:
    return NullSettings(
        models={"null": Behaviour(first_ms=FIRST_MS, gap_ms=GAP_MS, usage=RUNNING, role=NEVER, **changes)}
    )


def run(server: Server, keep: Callable[[Any], object], **asked: Any) -> None:
    """A load, as `lab load` measures it; `keep` gets all records."""
    plan = make_plan(prompt_len=40, **asked)
    with tempfile.TemporaryDirectory() as folder:
        path = server.new_file(Path(folder))
        for record in loads.execute(plan, server, prompt_text("text"), path, lambda _: None, lambda _: None):
            keep(record)


def sent_ns(server: NullServer) -> list[int]:
    """When the null server sent each event with content, by the clock that all processes share."""
    asked = access(server.url)
    streams = (ask(asked, f"{asked.root}/null/sent").parsed or {})["streams"]
    return [ns for stream in streams for ns in stream["sent_ns"]]


def truth_of_closed_loops(seconds: float) -> None:
    n_gen = 40
    service_s = (FIRST_MS + GAP_MS * (n_gen - 1)) / 1e3
    print(f"closed loops, S = {1e3 * service_s:g} ms, {seconds:g} s each")
    for users in (1, 4, 16):
        ends: list[float] = []

        def add(record: Any, ends: list[float] = ends) -> None:
            ends.append((record.request.sent_ns + record.request.ended_ns) / 1e9)

        with null_server(served()) as null, connect(null.url) as server:
            run(server, add, concurrency=users, gen=n_gen, warmup=1, duration=seconds, rounds=1, max_requests=100_000)
        rate = sum(1 <= end < 1 + seconds for end in ends) / seconds
        print(
            f"  {users:2} users: {rate:.2f} requests/s, c / S = {users / service_s:.2f}, {rate * service_s / users:.3f}"
        )


def truth_of_open_loops(seconds: float) -> None:
    print(f"open loops, Poisson, {seconds:g} s each")
    for rate, n_gen in ((5, 20), (20, 20), (60, 4)):
        records: list[Any] = []
        asked = {"rate": rate, "gen": n_gen, "warmup": 1, "duration": seconds, "rounds": 1, "max_requests": 100_000}
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


def memory(n_few: int, n_many: int) -> None:
    samples: list[Any] = []
    rss: dict[int, tuple[float, float]] = {}
    with null_server(served()) as null, connect(null.url) as server:
        here, child = psutil.Process(), psutil.Process(server.client.pid)

        def add(record: Any) -> None:
            samples.append(load_figures.row(record.request))
            if len(samples) in (n_few // 10, n_few, n_many):
                rss[len(samples)] = here.memory_info().rss / 1e6, child.memory_info().rss / 1e6

        asked = {"concurrency": "8,16", "gen": "2-20", "warmup": 0.5, "duration": n_many / 450, "rounds": 4}
        run(server, add, max_requests=n_many, **asked)
    for n, (of_lab, of_client) in rss.items():
        print(f"memory after {n:,} requests: the lab {of_lab:.1f} MB, the client's process {of_client:.1f} MB")
    print(f"memory: {len(samples):,} requests in all")


def reading(n_tokens: int) -> None:
    n_streams, gap_ms = 16, 20.0
    options = (INCLUDE_USAGE, CONTINUOUS_USAGE)
    asked = [Asked(n_prompt=None, n_gen=n_tokens, seed=seed) for seed in range(n_streams * 4)]
    asks = tuple(ask_for(CHAT, "null", "a b c", one, options) for one in asked)
    print(f"stamps at {n_streams} streams, {n_streams * 1000 / gap_ms:.0f} events/s")
    for words, poll_s, is_single in (
        ("read and written line by line", 0.1, True),
        ("once a second in one piece", loads.LOOK_S, False),
        ("not read", 3600.0, False),
    ) * 2:
        with (
            tempfile.TemporaryDirectory() as folder,
            null_server(NullSettings(models={"null": Behaviour(usage=RUNNING, gap_ms=gap_ms)})) as null,
            connect(null.url) as server,
            Client(server.access) as client,
        ):
            path, replies = Path(folder) / "a.jsonl", list[Reply]()
            for batch in client.batches(SendPlan(asks=asks, api="chat", n_at_once=n_streams), poll_s):
                new = list(batch)
                lines = [server.record("a", reply.request) for reply in new]
                for part in ([line] for line in lines) if is_single else [lines] if lines else []:
                    results.save(path, *part)
                replies += new
            streams = (ask(server.access, f"{server.access.root}/null/sent").parsed or {})["streams"]
            sent = {stream["seed"]: stream["sent_ns"] for stream in streams}
            errors = [
                ns
                for reply in replies
                for ns in stamped_late(reply, sent[reply.request.asked.seed], client.start_ns or 0)
            ]
        shares = " ".join(f"{quantile(errors, share) / 1e3:6,.0f}" for share in (0.5, 0.99, 1.0))
        print(f"  {words:30} median, 99 %, most: {shares} us")


def main() -> None:
    is_small = "--small" in sys.argv
    print(json.dumps({"cores": psutil.cpu_count(), "small": is_small}))
    truth_of_closed_loops(4 if is_small else 20)
    truth_of_open_loops(6 if is_small else 60)
    reading(50 if is_small else 200)
    memory(*((200, 800) if is_small else (1000, 5000)))


if __name__ == "__main__":
    main()
