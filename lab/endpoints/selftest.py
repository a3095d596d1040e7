"""Measure the client's timing error with a server that sends every event at a known time.

The error is the time from an event's sending to its stamp, with the kernel's loopback and the wake-up of the process.
Figures of a server that are not much larger than this error say more about the client than about the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.core import request_times as times
from lab.core.record import OK
from lab.core.request import CHAT, Asked
from lab.endpoints.access import access, ask
from lab.endpoints.client import Client
from lab.endpoints.formats import CONTINUOUS_USAGE, INCLUDE_USAGE, as_dict, ask_for
from lab.endpoints.null_server import null_server
from lab.endpoints.send_plan import Ask, Reply, SendPlan
from lab.errors import LabError

WANTED_MEDIAN_US, WANTED_P99_US = 100.0, 1000.0
"""Limits for the error with 16 streams on 2 cores."""


@dataclass(frozen=True)
class SelfTest:
    """The client's error with `n_streams` concurrent streams, in microseconds."""

    n_streams: int
    n_events: int
    rate: float  # events per second of all streams
    median_us: float
    p99_us: float
    max_us: float
    server_late_median_us: float  # how late the null server sent: the machine's part of the error
    server_late_p99_us: float


def selftest(
    streams: Sequence[int] = (1, 16), n_tokens: int = 200, gap_ms: float = 20.0, n_rounds: int = 2
) -> list[SelfTest]:
    """Measure the client with each number of streams; each stream has `n_rounds` requests of `n_tokens` events."""
    tests = []
    for n_streams in streams:
        with null_server(str(gap_ms)) as server:
            tests.append(_test(server.url, n_streams, n_tokens, n_rounds, n_streams * 1000.0 / gap_ms))
    return tests


def client_error(n_streams: int = 1, seconds: float = 1.0) -> tuple[int, int] | None:
    """The client's error now, with `n_streams` streams: median and 99th percentile, in ns.

    Runs for about `seconds` with a null server. None if that fails.
    """
    gap_ms = min(20.0, 5.0 * n_streams)
    try:
        (test,) = selftest((n_streams,), max(2, round(1000 * seconds / gap_ms)), gap_ms, n_rounds=1)
    except LabError:
        return None
    return round(1e3 * test.median_us), round(1e3 * test.p99_us)


def _test(url: str, n_streams: int, n_tokens: int, n_rounds: int, rate: float) -> SelfTest:
    asked = access(url)
    asks = tuple(_ask(seed, n_tokens) for seed in range(n_streams * n_rounds))
    with Client(asked) as client:
        replies = list(client.run(SendPlan(asks=asks, api=CHAT, n_at_once=n_streams)))
        start_ns = client.start_ns or 0
    streams = as_dict(ask(asked, f"{asked.root}/null/sent").parsed)["streams"]
    logs = {stream["seed"]: stream for stream in streams}
    errors_ns, late_ns = [], []
    for reply in replies:
        log = logs[reply.request.asked.seed]
        errors_ns += _errors_ns(reply, log["sent_ns"], start_ns)
        late_ns += [a - b for a, b in zip(log["sent_ns"], log["due_ns"], strict=True)]
    return SelfTest(
        n_streams=n_streams,
        n_events=len(errors_ns),
        rate=rate,
        median_us=_share_us(errors_ns, 0.5),
        p99_us=_share_us(errors_ns, 0.99),
        max_us=_share_us(errors_ns, 1.0),
        server_late_median_us=_share_us(late_ns, 0.5),
        server_late_p99_us=_share_us(late_ns, 0.99),
    )


def _ask(seed: int, n_tokens: int) -> Ask:
    asked = Asked(n_prompt=None, n_gen=n_tokens, seed=seed)
    return ask_for(CHAT, "null", "a b c", asked, (INCLUDE_USAGE, CONTINUOUS_USAGE))


def _errors_ns(reply: Reply, sent_ns: list[int], start_ns: int) -> list[int]:
    """The stamp of each event with content, minus the time of its sending. LabError if the client missed one."""
    request = reply.request
    indices = times.generated(request)
    if request.status != OK or request.sent_ns is None or len(indices) != len(sent_ns):
        raise LabError(
            f"Only {len(indices)} of {len(sent_ns)} null-server events arrived ({request.failure or 'no error'}).",
            "Run it again on a quiet machine. If it fails again, this is a bug of the lab.",
        )
    began_ns = start_ns + request.sent_ns
    return [began_ns + request.events.arrive_ns[i] - ns for i, ns in zip(indices, sent_ns, strict=True)]


def _share_us(values_ns: list[int], share: float) -> float:
    """The quantile `share` of the values, in microseconds."""
    ordered = sorted(values_ns)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e3
